"""The contenders of a benchmark: strategies, stock ones, adapters, and drafts that are accepted at
given rates. Measures nothing."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import CompileConfig, GenerationConfig

import hf_spec
from hf_spec.adapters.loading import fine_tunes
from hf_spec.core import verify
from hf_spec.core.checks import check_choice, check_range
from hf_spec.core.device import Ragged, bucket, to_device
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult, VerifyProgram
from hf_spec.decoding.acceptance import Acceptance, Scorer
from hf_spec.draft.options import ADAPTIVE, AUTO, CHAIN, DraftOptions
from hf_spec.methods.registry import get_method, methods
from hf_spec.threads import forget, memory
from hf_spec.tools.loading import Adapter

#: The baseline: ``generate`` without a strategy.
GENERATE = "generate"
#: Suffix of a contender whose steps are compiled.
COMPILED = "+compiled"
#: Suffix of a contender whose rows are admitted as others end.
CONTINUOUS = "+continuous"
#: Prefix of features of Transformers.
STOCK = "transformers:"
#: Its continuous batching.
STOCK_BATCHES = f"{STOCK}generate_batch"
STOCK_LOOKUP, STOCK_ASSISTED = f"{STOCK}prompt_lookup", f"{STOCK}assisted"
#: Options of ``transformers:prompt_lookup`` by default, as in the documentation of Transformers.
STOCK_LOOKUP_OPTIONS = {"prompt_lookup_num_tokens": 10}


@dataclass(frozen=True)
class Contender:
    """One way to generate.

    Attributes:
        adapters: names of the loaded adapters to activate.
        stock: whether it is a feature of Transformers, which reports no statistics.
        baseline: name of the contender without a strategy that it is compared with.
        compiled: whether its steps are compiled.
        assistant: name of the model that drafts, which is to join its ``kwargs``.
        continuous: whether it gets all prompts at once, of which as many run as others have in a
            batch.
    """

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    stock: bool = False
    baseline: str = GENERATE
    compiled: bool = False
    assistant: str | None = None
    continuous: bool = False

    @property
    def single_row(self) -> bool:
        """Whether it works only with batch size 1, as assistants of Transformers do."""
        return self.name.startswith(STOCK) and not self.continuous

    @property
    def lossy(self) -> bool:
        """Whether its acceptance rule may change the output (typical acceptance)."""
        return self.kwargs.get("assistant_kwargs", {}).get("acceptance") == "typical"

    @property
    def settings(self) -> dict[str, Any]:
        """Those of its arguments that are JSON types; models and tokenizers are left out."""
        kinds = (str, int, float, bool, list, dict, type(None))
        return {name: value for name, value in self.kwargs.items() if isinstance(value, kinds)}


BASELINE = Contender(GENERATE, stock=True)


def with_compiled(uncompiled: Iterable[Contender], backend: str, longest: int) -> list[Contender]:
    """The contenders, each followed by a copy with a static cache and compiled steps, but for stock
    assistants, whose caches are dynamic. Stock calls are compiled for ``longest`` tokens."""
    config = CompileConfig(backend=backend)
    config._compile_all_devices = True  # stock calls, too, also on a CPU
    static = {"cache_implementation": "static", "compile_config": config}
    result = []
    for one in uncompiled:
        result.append(one)
        if not one.single_row:
            kwargs = {**one.kwargs, **static, **({"max_cache_len": longest} if one.stock else {})}
            copy = replace(one, name=f"{one.name}{COMPILED}", kwargs=kwargs, compiled=True)
            result.append(copy)
    return result


def with_continuous(static: Iterable[Contender]) -> list[Contender]:
    """The contenders, with Transformers' continuous batching behind plain ``generate``, and each
    strategy followed by a copy that admits rows as others end."""
    result = []
    for one in static:
        result.append(one)
        if one.name == GENERATE:
            result.append(Contender(STOCK_BATCHES, stock=True, continuous=True))
        elif not one.stock:
            result.append(replace(one, name=f"{one.name}{CONTINUOUS}", continuous=True))
    return result


def parse_names(names: str | Iterable[str]) -> list[str]:
    """Check strategy names, in one string with commas or several; drop :data:`GENERATE`, which
    always takes part, and repetitions. A ValueError names one that is unknown.

    A strategy can take part several times as ``strategy:label``, with its own options each time.
    """
    listed: list[Any] = names.split(",") if isinstance(names, str) else list(names)
    for name in listed:
        if not isinstance(name, str):
            raise ValueError(f"strategy {name!r}: give the name of a strategy")
    if listed == [""]:
        raise ValueError("no strategy is named; leave the option out for the default")
    known = hf_spec.strategies()
    result = dict.fromkeys(item.strip() for item in listed)
    for name in result:
        if strategy_of(name) not in (*known, AUTO, GENERATE, STOCK_LOOKUP, STOCK_ASSISTED):
            check_choice("strategy", name, [*known, AUTO, STOCK_LOOKUP, STOCK_ASSISTED])
    return [name for name in result if name != GENERATE]


def strategy_of(name: str) -> str:
    """The strategy of a contender's name: ``bita`` of ``bita:chain``."""
    return name if name.startswith(STOCK) else name.partition(":")[0]


def needs_assistant(name: str) -> bool:
    """Whether another model drafts for the contender of this name."""
    strategy = strategy_of(name)
    return strategy == STOCK_ASSISTED or (
        strategy in methods() and get_method(strategy).needs_assistant
    )


def sized(
    names: Iterable[str], options: Mapping[str, Mapping[str, Any]], nodes: Sequence[int],
    chains: Sequence[int],
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Options by name of the same strategies at fixed sizes, one after the other: ``medusa:60``
    drafts a tree of 60 tokens, ``medusa:chain3`` a chain of three, in every step and, unless its
    options say otherwise, without lookups. Those of Transformers, and strategies that have no such
    sizes, stay as they are."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        given, method = dict(options.get(name, {})), methods().get(strategy_of(name))
        known = () if method is None else method.option_names
        fixed = {"drafting": "always", "lookup": False}
        given = {option: value for option, value in fixed.items() if option in known} | given
        trees = method.declares.trees if method is not None else {}
        adaptive = {"tree": ADAPTIVE} if "tree" in known else {}
        sizes: dict[str, dict[str, Any]] = {}
        if "num_draft_tokens" in known:
            sizes = {f"{name}:{size}": {**adaptive, "num_draft_tokens": size} for size in nodes}
        for size in chains:
            if CHAIN in trees and "max_depth" in known:
                sizes[f"{name}:chain{size}"] = {"tree": CHAIN, "max_depth": size}
            elif "num_draft_tokens" in known and "tree" not in known:
                sizes[f"{name}:chain{size}"] = {"num_draft_tokens": size}
        found |= {label: given | size for label, size in sizes.items()} or {name: given}
    return found


def untrained(names: Iterable[str], adapters: Iterable[Adapter]) -> list[Adapter]:
    """An adapter of random weights for each strategy that needs one and has none: for synthetic
    acceptance, which does not depend on them. :func:`add_untrained` puts them on a model. Their
    drafts are chains, as trees by probabilities of random weights are wide and not deep."""
    known = {adapter.strategy for adapter in adapters}
    return [
        Adapter(f"untrained_{name}", f"untrained_{name}", name, {"tree": "chain"})
        for name in dict.fromkeys(map(strategy_of, names))
        if name in methods() and get_method(name).needs_adapter and name not in known
    ]


def add_untrained(model: Any, adapters: Iterable[Adapter]) -> None:
    """Give a model these :func:`untrained` adapters, of the size that ``hf-spec train`` makes."""
    kept = fine_tunes(model)
    for one in adapters:
        method = get_method(one.strategy)
        assert method.adapter_config is not None
        model.add_adapter(method.adapter_config(), one.name)
        model.set_adapter([*kept, one.name])


def contenders(
    names: Iterable[str], options: Mapping[str, Mapping[str, Any]] | None = None,
    adapters: Sequence[Adapter] = (), assistants: Sequence[str] = (),
) -> list[Contender]:  # fmt: skip
    """The contenders for strategy names (:func:`parse_names`) and adapters.

    Args:
        options: options by name; they override those stored with an adapter.
        adapters: a strategy with several takes part once with each.
        assistants: names of models; a strategy that needs one takes part once with each.
    """
    names, options, assistants = list(names), options or {}, [*dict.fromkeys(assistants)]
    plain = {}
    for one in adapters:
        if one.changes_model:
            label = f"{GENERATE}@{_distinct(one.path, [other.path for other in adapters])}"
            plain[one.name] = Contender(label, adapters=(one.name,), stock=True, baseline=label)
    result = [*plain.values()]
    for name in names:
        given, method = options.get(name, {}), methods().get(strategy_of(name))
        given = dict(given) if method is None else method.today(given)
        if needs_assistant(name):
            if not assistants:
                raise ValueError(f"{name!r} needs another model that drafts: give --assistant")
            alone = contender_of(name, given)
            labels = {path: _label(name, path, assistants) for path in assistants}
            result += [replace(alone, name=labels[path], assistant=path) for path in assistants]
        else:
            result += _with_adapters(name, given, adapters, plain)
    used = {name for item in result if not item.stock for name in item.adapters}
    for adapter in adapters:
        if adapter.name not in used:
            raise ValueError(
                f"adapter {adapter.path!r} is for strategy {adapter.strategy!r}, which does not "
                "take part; name that strategy, too"
            )
    if assistants and not any(map(needs_assistant, names)):
        raise ValueError(
            f"no strategy here needs the assistant {assistants[0]!r}; name 'draft_model' "
            f"or {STOCK_ASSISTED!r}, too"
        )
    return result


def contender_of(
    name: str, given: dict[str, Any], more: Mapping[str, Any] | None = None
) -> Contender:
    """The contender of a name with these options, without adapters; ``more`` are further arguments
    of its calls, such as an assistant. A ValueError if an option is wrong."""
    more = more or {}
    if name.startswith(STOCK):
        default = STOCK_LOOKUP_OPTIONS if name == STOCK_LOOKUP else {}
        return Contender(name, {**default, **given, **more}, stock=True)
    strategy = strategy_of(name)
    hf_spec.SpecConfig(assistant_strategy=strategy, assistant_kwargs=given)  # checks options
    options = {"assistant_kwargs": given} if given else {}
    return Contender(name, {"assistant_strategy": strategy, **options, **more})


def _with_adapters(
    name: str, given: dict[str, Any], adapters: Sequence[Adapter], plain: Mapping[str, Contender]
) -> list[Contender]:
    """A strategy once with each adapter that fits it, or alone where it needs none; ``plain`` are
    the baselines of adapters that change the model."""
    strategy = strategy_of(name)
    fitting = [one for one in adapters if strategy in (one.strategy, AUTO)]
    if not fitting:
        method = methods().get(strategy)
        if method is not None and method.needs_adapter:
            raise ValueError(
                f"{name!r} needs a trained adapter: give its folder with --adapter, which "
                f"`hf-spec train {strategy}` or `hf-spec import` writes"
            )
        return [contender_of(name, given)]
    found, paths = [], [one.path for one in fitting]
    for adapter in fitting:
        stored = {} if strategy == AUTO else adapter.options  # which it finds itself
        alone = contender_of(name, {**stored, **given})
        active = [adapter, *_companions(alone.kwargs, adapters)]
        label, loaded = _label(name, adapter.path, paths), tuple(one.name for one in active)
        baseline = next((plain[one].name for one in loaded if one in plain), GENERATE)
        found.append(replace(alone, name=label, adapters=loaded, baseline=baseline))
    return found


def _label(name: str, path: str, paths: Sequence[str]) -> str:
    """A contender's name, with that of its adapter or assistant where there are several."""
    return f"{name}@{_distinct(path, paths)}" if len(paths) > 1 else name


def _distinct(path: str, paths: Sequence[str]) -> str:
    """The last part of a path, or all of it if others end alike."""
    name = Path(path).name
    return name if [Path(one).name for one in paths].count(name) == 1 else path


def _companions(kwargs: Mapping[str, Any], adapters: Sequence[Adapter]) -> list[Adapter]:
    """The adapter of another strategy that a contender drafts with, if it does; a ValueError unless
    there is exactly one."""
    if kwargs["assistant_strategy"] == AUTO:
        return []
    method = get_method(kwargs["assistant_strategy"])
    options = method.parse_options(kwargs.get("assistant_kwargs"))
    wrapped = methods().get(getattr(options, method.wraps)) if method.wraps else None
    if wrapped is None or not wrapped.needs_adapter:
        return []
    fitting = [one for one in adapters if one.strategy == wrapped.name]
    if len(fitting) != 1:
        raise ValueError(
            f"{method.name} drafts with {wrapped.name!r} here, for which {len(fitting)} adapters "
            "are given: give one with --adapter"
        )
    return fitting


# -- Acceptance at given rates, whatever the drafts are: speed without a trained drafter -----------
#
# The steps are those of the strategy, with all their costs; only the choice of what is accepted is
# replaced. Outputs are therefore not the model's.


#: The command line's option, for messages.
RATES = "--synthetic-acceptance"


@dataclass(frozen=True)
class SyntheticRates:
    """How often drafts are accepted.

    Attributes:
        rates: the i-th is the probability that the first i draft tokens are all accepted, as vLLM's
            ``synthetic_acceptance_rates`` have it; deeper ones never are. tau, where every step
            drafts so deep, is 1 plus their sum.

    Raises:
        ValueError: a rate is not in [0, 1], or larger than the one before; or there is none.
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rates:
            raise ValueError(f"{RATES} has no rates; give some, such as 0.8,0.6,0.45")
        for rate in self.rates:
            check_range(RATES, rate, 0.0, 1.0)
        for before, rate in itertools.pairwise(self.rates):
            if rate > before:
                raise ValueError(
                    f"{RATES}: {rate} after {before}. Each rate is that of all draft tokens up to "
                    "a position, so that none is larger than the one before. For rates that are "
                    "conditional on the token before, multiply: 0.8,0.75 becomes 0.8,0.6."
                )

    @classmethod
    def parse(cls, text: str) -> Self:
        """The rates in a text such as ``0.8,0.6,0.45``; a ValueError for others."""
        try:
            rates = tuple(float(part) for part in text.split(","))
        except ValueError as error:
            raise ValueError(
                f"{RATES} {text!r}: must be numbers from 0 to 1 with commas, such as 0.8,0.6,0.45"
            ) from error
        return cls(rates)

    def __str__(self) -> str:
        return ", ".join(f"{rate:g}" for rate in self.rates)

    @property
    def conditional(self) -> list[float]:
        """By position, the probability given that all draft tokens before are accepted."""
        return [
            rate / before if before else 0.0
            for before, rate in itertools.pairwise((1.0, *self.rates))
        ]

    @contextmanager
    def of(self, model: Any) -> Iterator[None]:
        """Within the block, calls on the model accept at these rates, with random numbers by
        PyTorch's seed. What the model's strategies had learned is forgotten, before and after."""
        forget(model)
        memory(model)[Acceptance] = partial(SyntheticAcceptance, self.conditional)
        try:
            yield
        finally:
            del memory(model)[Acceptance]
            forget(model)


class SyntheticAcceptance(Acceptance):
    """Accepts the first child of a node at its depth's rate, and no other child.

    The token behind what is accepted is the model's, greedy or sampled.

    Args:
        rates: by depth from 1, given that the parent is accepted; 0 for deeper nodes.

    Raises:
        ValueError: the call has a rule of its own, or a processor that keeps a state.
    """

    def __init__(
        self, rates: Sequence[float], config: GenerationConfig, options: DraftOptions,
        scorer: Scorer, seeds: Sequence[int] | None = None,
    ):  # fmt: skip
        if options.acceptance != "match":
            raise ValueError(
                f"acceptance={options.acceptance!r} with {RATES}, which is a rule itself: leave "
                "one of the two out."
            )
        if scorer.stateful:
            raise ValueError(
                f"the logits processor {scorer.stateful[0]} with {RATES}: it keeps a state, and "
                "would see tokens that the model does not choose. Leave one of the two out."
            )
        super().__init__(config, options, scorer, seeds)
        self._rates = [1.0, *rates]  # the root is certain
        self._random: torch.Generator | None = None

    def program(self, tree: Tree, recorded: bool = False, ahead: int = 0) -> VerifyProgram | None:
        if tree.num_tokens == 1:
            return super().program(tree, recorded, ahead)
        trivial = self.scorer.trivial and not self.do_sample
        known = trivial or (recorded and self.scorer.key is not None)
        return self._rule(tree, ahead) if known else None

    def __call__(
        self, tree: Tree, logits: Tensor, unfinished: list[bool], ragged: Ragged | None = None
    ) -> StepResult:
        if tree.num_tokens == 1:
            return super().__call__(tree, logits, unfinished)
        rule = self._rule(tree, 0)
        if ragged is not None:
            logits = ragged.pad(logits)
        return rule.function(tree, logits, rule.inputs)

    def _rule(self, tree: Tree, ahead: int) -> VerifyProgram:
        """The rule as a program, whose random numbers are drawn before it runs."""
        noise, width = self.noise, bucket(tree.max_depth + 1 + ahead)

        def accept(tree: Tree, logits: Tensor, inputs: Sequence[Tensor]) -> StepResult:
            *given, hits = inputs
            return accept_at(tree, self.targets(tree.without_probes, logits, given), hits)

        key = "synthetic", self.scorer.key, None if noise is None else tuple(noise.temperatures)
        later = None if noise is None else self.ahead
        return VerifyProgram(key, accept, [*self.inputs(width), self._hits(tree, width)], later)

    def _hits(self, tree: Tree, width: int) -> Tensor:
        """Whether a first child is accepted, by row and depth: ``(batch, width)`` bool."""
        device = tree.device
        if self._random is None:
            self._random = torch.Generator(device).manual_seed(torch.initial_seed())
        rates = [*self._rates, *[0.0] * width][:width]
        numbers = torch.rand(tree.batch_size, width, generator=self._random, device=device)
        return numbers < to_device(rates, device)


def accept_at(tree: Tree, targets: Tensor, hits: Tensor) -> StepResult:
    """Accept first children, as far as they hit.

    Args:
        tree: the draft tree of each row.
        targets: ``(batch, tokens)`` the target's token after each node that has one.
        hits: ``(batch, depths)`` bool
    """
    drafted = tree.without_probes
    nodes, parents = drafted.num_nodes, drafted.parents.clamp(min=0)
    earlier = torch.ones(nodes, nodes, dtype=torch.bool, device=parents.device).tril(-1)
    earlier[:, 0] = False
    siblings = (parents[:, :, None] == parents[:, None, :]) & drafted.valid[:, None, :]
    taken = drafted.valid & ~(siblings & earlier).any(-1) & hits.gather(1, drafted.depths)
    taken[:, 0] = False
    # Their parents emit them, as if the target had chosen so; the last column is discarded.
    places = torch.where(taken, parents, nodes)
    targets = pad(targets, (0, 1)).scatter(1, places, drafted.tokens)[:, :nodes]
    taken[:, 0] = True
    return verify.match(tree.changed(valid=pad(taken, (0, tree.num_nodes - nodes))), targets)
