"""What a method is: options, a drafter, and how the loop finds it.

A method lives in ``hf_spec/methods/<name>/`` and exports ``METHOD``. Nothing else in the project
names it: the loop, the command line, the tests and the documentation list what is discovered here.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from hf_spec.core.cache import TreeCache
from hf_spec.core.probes import ProbeRows
from hf_spec.core.pruning import Survivors
from hf_spec.core.stats import SpecStats
from hf_spec.core.tree import TreeBatch
from hf_spec.methods.forward import ProbeInputs, Pruning, TreeForward

#: Acceptance rules and whether they keep the target distribution.
ACCEPTANCE_RULES = {"match": True, "rejection": True, "typical": False}


@dataclass(frozen=True)
class StrategyOptions:
    """Options that every strategy has; a method's own options derive from this.

    Attributes:
        acceptance: ``match`` (exact), ``rejection`` (exact, for sampled drafts) or ``typical``
            (lossy). ``auto`` takes ``rejection`` if the draft was sampled, else ``match``.
        typical_epsilon, typical_delta: thresholds of typical acceptance, in (0, 1].
        retrieval: merge the candidates of ``prompt_lookup`` into the strategy's own tree.
        fallback: take plain steps while speculation does not pay. ``auto`` does so unless what is
            emitted depends on which steps draft (sampled drafts under ``rejection``, ``typical``).
    """

    acceptance: str = "auto"
    retrieval: bool = False
    fallback: bool | str = "auto"
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3

    #: Whether drafts can carry the distribution they were sampled from.
    samples_drafts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        rules = ("auto", *ACCEPTANCE_RULES)
        if self.acceptance not in rules:
            raise ValueError(f"acceptance={self.acceptance!r}: choose one of {', '.join(rules)}.")
        if self.acceptance == "rejection" and not self.samples_drafts:
            raise ValueError(
                "acceptance='rejection': this strategy's candidates are not sampled from a "
                "distribution. Use acceptance='match', which is exact for them."
            )
        if not isinstance(self.retrieval, bool):
            raise ValueError(f"retrieval={self.retrieval!r}: must be True or False.")
        if not isinstance(self.fallback, bool) and self.fallback != "auto":
            raise ValueError(f"fallback={self.fallback!r}: must be 'auto', True or False.")
        for name in ("typical_epsilon", "typical_delta"):
            check_range(name, getattr(self, name), 0.0, 1.0, open_low=True)

    def untimed(self) -> dict[str, Any]:
        """Options to change so that what is drafted does not depend on what steps take here.

        For figures that are compared with each other, such as those of a training's checkpoints.
        """
        return {"fallback": False}

    @property
    def other_adapters(self) -> tuple[str, ...]:
        """Strategies whose adapters must be active, too, besides the strategy's own."""
        return ()

    @property
    def lossless(self) -> bool:
        return ACCEPTANCE_RULES.get(self.acceptance, True)


def check_range(
    name: str, value: Any, low: float, high: float = float("inf"), open_low: bool = False
) -> None:
    """Raise a ValueError unless ``value`` is a number in [low, high] (or (low, high])."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name}={value!r}: must be a number in {bracket}{low}, {high}].")


def check_count(name: str, value: Any, low: int = 1, high: int | None = None) -> None:
    """Raise a ValueError unless ``value`` is an int of at least ``low`` (and at most ``high``)."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}={value!r}: must be a whole number {limit}.")


@dataclass
class Draft:
    """Candidates for one step.

    Attributes:
        tree: tree of each row; node 0 is the root.
        tokens: ``(batch, nodes)`` int64, column 0 the root's token.
        distributions: ``(batch, nodes, vocab)`` q from which each candidate was sampled, after all
            logits processors; None if candidates were not sampled. Column 0 is ignored.
        probes: rows that run behind the nodes and tell the drafter of future tokens.
    """

    tree: TreeBatch
    tokens: Tensor
    distributions: Tensor | None = None
    probes: ProbeRows | None = None

    @property
    def num_rows(self) -> int:
        """Rows that its forward has for each batch row."""
        return self.tokens.shape[1] + (0 if self.probes is None else self.probes.num_probes)

    def left_with(self, survivors: Survivors) -> Draft:
        """What pruning left of it."""
        tokens = self.tokens.gather(1, survivors.nodes)
        return Draft(survivors.tree, tokens, None, survivors.probes)


class Process(Protocol):
    """The call's logits processors."""

    @property
    def trivial(self) -> bool:
        """Whether they leave the order of the logits as it is, so that the likeliest stays so."""

    def __call__(
        self, logits: Tensor, suffixes: Sequence[Sequence[int]], active: Sequence[bool]
    ) -> Tensor:
        """Logits ``(batch, vocab)`` -> float32 scores after all processors, each active row's
        prefix being its tokens so far and then its suffix."""


@dataclass
class DecodingState:
    """What the loop shows a drafter; read it, don't change it.

    Rows are those that the batch still carries: it shrinks as rows finish (:meth:`select`).

    Attributes:
        model: the model that is decoded.
        forward: runs the model on nodes of a tree behind the cached tokens.
        cache: the cache; all tokens of a row but its last (the root) are in it.
        tokens: each row's real tokens so far, prompt included, padding left out.
        root: ``(batch,)`` the last token of each row.
        active: rows that are not finished.
        remaining: how many tokens each row may still emit.
        do_sample: whether tokens are sampled.
        process: applies the call's logits processors.
        stats: the statistics of the call so far.
        probe_hidden: ``(batch, group, hidden)`` what the last step's forward made of the probes
            under each row's last accepted node; None if there were none.
        probe_counts: how many of them each row has; the others are any rows. 0 in finished rows.
        hidden: ``(batch, hidden)`` final hidden state of each row's last accepted node, from which
            the model made the root's token; any states in finished rows. Of the prompt's last token
            at first. None unless the drafter wants it, or while it is not known.
        rows: which row of the call each of these is.
    """

    model: Any
    forward: TreeForward
    cache: TreeCache
    tokens: list[list[int]]
    root: Tensor
    active: list[bool]
    remaining: list[int]
    do_sample: bool
    process: Process
    stats: SpecStats = field(default_factory=SpecStats)
    probe_hidden: Tensor | None = None
    probe_counts: list[int] = field(default_factory=list)
    hidden: Tensor | None = None
    rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.probe_counts = self.probe_counts or [0] * len(self.tokens)
        self.rows = self.rows or list(range(len(self.tokens)))

    def select(self, rows: Sequence[int]) -> None:
        """Follow the cache, whose row ``i`` is now the one that was ``rows[i]``; for the loop."""
        self.forward.select(rows)
        for name in ("tokens", "active", "remaining", "probe_counts", "rows"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])
        for name in ("root", "probe_hidden", "hidden"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor[torch.tensor(rows, device=tensor.device)])

    @property
    def batch_size(self) -> int:
        return len(self.tokens)

    @property
    def max_depth(self) -> int:
        """Deepest candidate that any row can still use: one token of the budget is the bonus."""
        left = [n for n, active in zip(self.remaining, self.active) if active]
        return max(left, default=1) - 1


class Drafter(CandidateGenerator):
    """Proposes candidates. One instance serves one ``generate()`` call.

    Attributes:
        single_forward: whether a step is one forward pass of the model; False if drafting runs
            the model, too.
        probe_inputs: what has been learned for the probes of its drafts, if they have any.
        wants_hidden: whether it reads ``DecodingState.hidden``.
        prune_layer: layers that run on all nodes, where some steps prune.
        drafting: entered while it drafts with the model itself; None if it does not.
    """

    single_forward: ClassVar[bool] = True
    probe_inputs: ProbeInputs | None = None
    wants_hidden: bool = False
    prune_layer: int | None = None
    drafting: AbstractContextManager[Any] | None = None

    def __init__(self, model: Any, options: Any):
        self.model = model
        self.options = options

    @property
    def pruning(self) -> Pruning | None:
        """Leaves out nodes of the draft just proposed on their way through the model.

        Which ones depends on their tokens, so that such a draft must carry no distributions.
        """
        return None

    @property
    def kind_of_forward(self) -> Hashable:
        """What its forwards ask of the model, beside a tree."""
        inputs = self.probe_inputs
        probes = inputs and (len(inputs.embeddings), inputs.num_front, inputs.exits)
        return probes, self.wants_hidden, self.prune_layer, repr(self.drafting)

    def start(self, state: DecodingState) -> None:
        """Called once, after the prefill."""

    @abstractmethod
    def propose(self, state: DecodingState) -> Draft:
        """Candidates for the next step; a tree of the root alone if there are none."""

    def observe(self, state: DecodingState, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        """Called after each step with the accepted nodes per row, root first; none if finished.

        ``draft`` is what was proposed, or the root alone where the loop took a plain step instead.
        """

    def select(self, state: DecodingState, rows: Sequence[int]) -> None:
        """Called between two steps when rows that are finished have left the batch.

        A drafter that keeps something for each row selects it here; the state is already that of
        the smaller batch.

        Args:
            rows: row ``i`` is now the one that was ``rows[i]``; each at most once, in any order.
        """

    def details(self) -> dict[str, Any]:
        """What the drafter reports in ``SpecStats.details``."""
        return {}

    # -- stock assisted decoding -------------------------------------------------------------

    @abstractmethod
    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """The best chain, for Transformers' own assisted decoding (batch size 1).

        Args:
            input_ids: ``(1, seq)``.

        Returns:
            ``(1, seq + candidates)`` ids, and no logits.
        """

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        """Part of the ``CandidateGenerator`` interface; stock decoding reports matches here."""


#: Writes an adapter as another program reads it: from the base model and the active adapter to a
#: ``config.json`` and tensors by name.
Exporter = Callable[[Any, Any], tuple[dict[str, Any], dict[str, Tensor]]]


@dataclass(frozen=True)
class Published:
    """How checkpoints that others have published become adapters of a method.

    Attributes:
        wants: whether a tensor of this name is the adapter's; files may hold others, too.
        convert: from tensors by name to fields of the adapter's config, and parameters under the
            names that ``SpecAdapterLayer.build`` gives them; raises a ValueError that says what
            does not fit.
    """

    wants: Callable[[str], bool]
    convert: Callable[[Mapping[str, Tensor]], tuple[dict[str, Any], dict[str, Tensor]]]


@dataclass(frozen=True)
class Method:
    """One strategy.

    Attributes:
        name: what users write as ``assistant_strategy``; the folder's name.
        summary: one line for listings.
        options: dataclass (derived from :class:`StrategyOptions`) of ``assistant_kwargs``.
        drafter: builds the drafter.
        adapter_config: config class of its PEFT adapter, None if it has none.
        needs_adapter: whether it cannot run without a trained adapter.
        training: defaults of ``transformers.TrainingArguments``; None if nothing is trained.
        num_anchors: places per sequence that one training step trains, unless the user says.
        published: reads others' checkpoints, for ``hf-spec import``; None if there are none.
        exports: by name of a form, for ``hf-spec export``.
    """

    name: str
    summary: str
    options: type[StrategyOptions]
    drafter: type[Drafter]
    adapter_config: type[Any] | None = None
    needs_adapter: bool = False
    training: dict[str, Any] | None = None
    num_anchors: int = 64
    published: Published | None = None
    exports: Mapping[str, Exporter] = field(default_factory=dict)

    def parse_options(self, kwargs: dict[str, Any] | None) -> StrategyOptions:
        """Build and validate the options.

        Raises:
            ValueError: naming the unknown or invalid option and the options there are.
        """
        if kwargs is not None and not isinstance(kwargs, dict):
            raise ValueError(
                f"assistant_kwargs is a {type(kwargs).__name__}: give a dict of options of "
                f"{self.name!r}."
            )
        kwargs = kwargs or {}
        known = [item.name for item in dataclasses.fields(self.options)]
        for key in kwargs:
            if key not in known:
                raise ValueError(
                    f"assistant_kwargs: strategy {self.name!r} has no option {key!r}; its options "
                    f"are {', '.join(sorted(known))}."
                )
        return self.options(**kwargs)


@lru_cache(maxsize=1)
def methods() -> dict[str, Method]:
    """All methods by name: every folder of ``hf_spec.methods`` that exports ``METHOD``."""
    import hf_spec.methods as package

    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.ispkg:
            method = importlib.import_module(f"{package.__name__}.{info.name}").METHOD
            found[method.name] = method
    return dict(sorted(found.items()))


def get_method(name: str) -> Method:
    """The method of this name.

    Raises:
        ValueError: listing the strategies there are.
    """
    if name not in methods():
        raise ValueError(
            f"assistant_strategy={name!r} is unknown: choose one of {', '.join(methods())}."
        )
    return methods()[name]
