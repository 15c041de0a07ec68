"""Random sequences of calls of ``generate`` on one model, each compared with plain generation.

Hypothesis draws them, and makes the first that fails as short and as simple as it can; the steps
that it prints are a program. ``make random ARGS="--sequences 1000"`` plays that many, ``--first``
chooses others.

A sequence has turns of conversations: strategies with their variants and adapters, attached or by
folder, batch sizes, sampling, processors, ends, padding as ``torch.cat([out.sequences, new])``
leaves it, caches that are handed on from call to call, recorded steps beside others, configurations
of all calls or out of a file, modes of PyTorch, and errors and interrupts. Between them the model
changes: dtypes, a LoRA, deleted adapters, training mode, numbers of embeddings, weights, attributes
of modules, and hooks. A ``TreeCache`` must give what plain generation gives without a cache, a
``DynamicCache`` what it gives with its own one that has been through the same calls. Each call
leaves model and configurations as they were.
"""

import copy
import pickle
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import multimodal
import torch
from adapter_oracle import randomise, saved
from conftest import EAGER_ONLY, EOS, VOCAB, padded, prompt, ragged
from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from peft import LoraConfig
from processors import Criterion, Fails, Failure, Processor
from random_cases import (
    AROUND,
    MODELS,
    PROCESSORS,
    RUNS,
    WARPERS,
    Case,
    adapter_of,
    dynamic,
    matching,
    model_of,
)
from replay import RECORDED
from running import needed
from torch import Tensor
from transformers import GenerationConfig

from hf_spec.cache.recurrent import stock_states
from hf_spec.methods.registry import methods
from hf_spec.modeling_patches.modules import CACHE, linear_modules

#: Steps of a sequence: half of them are calls.
STEPS = 10
#: Models that continue no DynamicCache: it tells no length, or the model has a cache of its own.
NO_DYNAMIC = ("mamba", "mamba2", "falcon_mamba")
ERRORS = (Failure, KeyboardInterrupt, torch.OutOfMemoryError)
#: What raises an error in the middle of a call.
RAISING = {
    "streamer": Fails,
    "logits_processor": lambda *given: [Processor(*given)],
    "stopping_criteria": lambda *given: [Criterion(*given)],
}


# -- what is drawn -------------------------------------------------------------------------------


def seldom(times: int) -> st.SearchStrategy[bool]:
    """True once in so many times."""
    return st.sampled_from([False] * (times - 1) + [True])


SEEDS = st.integers(0, 999)


class Talked(NamedTuple):
    """How a conversation begins.

    Attributes:
        cache: that is handed on: ``"tree"``, ``"dynamic"`` or None.
        lengths: tokens of each prompt.
        images: of each prompt, for a model that sees.
    """

    cache: str | None
    lengths: list[int]
    images: list[int]
    seed: int


@st.composite
def talks(draw: Any) -> Talked:
    cache = draw(st.sampled_from([None, "tree", "tree", "dynamic", "dynamic"]))
    size = 1 if cache == "dynamic" else draw(st.sampled_from([1, 1, 2, 2, 3, 4]))
    lengths = st.lists(st.integers(4, 16), min_size=size, max_size=size)
    alike = st.integers(4, 16).map(lambda length: [length] * size)
    images = st.lists(st.integers(1, 2), min_size=size, max_size=size)
    return Talked(cache, draw(st.one_of(alike, lengths)), draw(images), draw(SEEDS))


class Following(NamedTuple):
    """What the next prompt has beside prompt and answer.

    Attributes:
        new: so many tokens.
        whole: whether its mask shows what is behind an answer's end.
        moved: whether its padding moves to the left, where no cache counts columns.
        cut: how many tokens of the last prompt it leaves out, of such ones; 0 for none.
    """

    new: int
    seed: int
    whole: bool
    moved: bool
    cut: int


FOLLOWING = st.builds(
    Following, st.integers(1, 5), SEEDS, seldom(5), st.booleans(),
    st.sampled_from([0, 0, 0, 1, 2, 5]),
)  # fmt: skip

Method = tuple[str, str, str, bool]


@st.composite
def strategies(draw: Any, runs: Sequence[tuple[str, str]] = tuple(RUNS)) -> Method:
    """Name, variant, whether it drafts always, and whether its adapter is named by a folder."""
    name = draw(st.sampled_from(sorted({name for name, _ in runs})))
    variant = draw(st.sampled_from([variant for owner, variant in runs if owner == name]))
    drafting = draw(st.sampled_from(["always"] * 9 + ["auto"]))
    return name, variant, drafting, methods()[name].needs_adapter and draw(seldom(5))


class Called(NamedTuple):
    """A call, and what follows it.

    Attributes:
        strategy: see :func:`strategies`; None for none.
        settings: keywords of ``generate``.
        around: see :data:`AROUND`.
        config: what has the settings: ``"keywords"``, ``"shared"`` by all calls, or out of a
            ``"file"``.
        recorded: whether steps are recorded and replayed, where the cache allows it.
        pickled: whether the cache is one that was pickled.
        short: whether the prompt is without the tokens that the cache has, where that is possible.
    """

    strategy: Method | None
    settings: dict[str, Any]
    around: str
    config: str
    recorded: bool
    pickled: bool
    short: bool
    seed: int
    then: Following


ENDS = st.sets(st.integers(EOS, VOCAB - 4), min_size=1, max_size=8).map(sorted)


@st.composite
def calls(
    draw: Any, sampled: bool = False, recorded: bool = False, plain: bool = False
) -> Called:  # fmt: skip
    given: dict[str, Any] = {"max_new_tokens": draw(st.integers(2, 20)), "do_sample": sampled}
    if draw(seldom(3)):
        given |= draw(st.sampled_from(PROCESSORS))
    if sampled:
        given |= draw(st.sampled_from(WARPERS))
    if "exponential_decay_length_penalty" in given or draw(st.booleans()):
        given["eos_token_id"] = draw(ENDS)
    strategy = None if plain else draw(strategies(sorted(matching()) if sampled else tuple(RUNS)))
    return Called(
        strategy, given, draw(st.sampled_from([""] * 10 + [*AROUND])),
        draw(st.sampled_from(["keywords"] * 3 + ["shared", "file"])), recorded, draw(seldom(6)),
        draw(seldom(5)), draw(SEEDS), draw(FOLLOWING),
    )  # fmt: skip


#: What changes in a model, and a number that says which one of its kind or how.
CHANGES = st.tuples(
    st.sampled_from(["lora", "adapter", "training", "embeddings", "weight", "attribute", "hook"]),
    st.integers(0, 99),
)


# -- the sequence --------------------------------------------------------------------------------


@dataclass
class Talk:
    """A conversation and its caches.

    Attributes:
        ids, mask: ``(batch, width)`` of the next prompt.
        images: what the first prompt has besides.
        kind: of cache that is handed on: ``"tree"``, ``"dynamic"`` or None.
        ours, plain: the cache of calls with strategies, and a DynamicCache's of those without.
        edited: whether the prompt does not begin with what ``ours`` holds.
    """

    ids: Tensor
    mask: Tensor
    images: dict[str, Tensor] = field(default_factory=dict)
    kind: str | None = None
    ours: Any = None
    plain: Any = None
    edited: bool = False


class Added:
    """A user's hook: adds to what a module computes, at all tokens or a forward's last, so much."""

    amount = 0.0

    def __init__(self, last: bool):
        self.last = last

    def __call__(self, module: Any, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        part = output[:, -1:] if self.last else output
        part += self.amount * torch.sin(torch.arange(output.shape[-1], dtype=output.dtype))
        return output


class RandomSequence(RuleBasedStateMachine):
    """A sequence on one of the models of :attr:`models`.

    Attributes:
        tally: of all sequences, how many calls were ``exact``, ``refused`` by a ValueError,
            ``interrupted``, ``finished`` before that, or ``invalid`` as plain generation raises.
    """

    models = tuple((kind, name) for kind, names in MODELS.items() for name in names)
    tally: Counter[str] = Counter()

    @initialize(
        which=st.runner().flatmap(lambda machine: st.sampled_from(machine.models)), talk=talks()
    )
    def build(self, which: tuple[str, str], talk: Talked) -> None:
        self.kind, self.name = which
        attention = "eager" if self.name in EAGER_ONLY else "sdpa"
        case = Case(0, 0, self.kind, self.name, attention, "", "", "", [], {})
        self.model = copy.deepcopy(model_of(case))
        self.adapters: dict[tuple[str, str], str] = {}
        self.added = 0  # adapters
        self.lora = self.beside = self.trains = False
        self.hooks: dict[tuple[str, bool], Added] = {}
        self.config = copy.deepcopy(self.model.generation_config)
        self.unset = copy.deepcopy(vars(self.config))
        self.folder = tempfile.TemporaryDirectory()
        self.begin(talk)
        self.stock = self._stock()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    # -- what changes between calls ----------------------------------------------------------

    def begin(self, given: Talked) -> None:
        kind = None if self._tells_apart() else given.cache
        if kind == "dynamic" and self.name in NO_DYNAMIC:
            kind = "tree"
        if self.kind == "images":
            rows = list(zip(given.images, given.lengths))
            inputs = multimodal.prompts(self.name, rows, dtype=self.model.dtype)
        else:
            inputs = ragged(tuple(given.lengths), given.seed)
        self.talk = Talk(inputs.pop("input_ids"), inputs.pop("attention_mask"), inputs, kind)
        if kind == "dynamic":
            self.talk.ours, self.talk.plain = dynamic(self.model), dynamic(self.model)

    @rule(talk=talks(), dtype=st.sampled_from([torch.float32] * 3 + [torch.float64]))
    def begin_anew(self, talk: Talked, dtype: torch.dtype) -> None:
        experts = any("expert" in name for name, _ in self.model.named_modules())
        self.model.to(torch.float32 if experts else dtype)
        self.begin(talk)
        self.stock = self._stock()

    @rule(change=CHANGES)
    def change(self, change: tuple[str, int]) -> None:
        """What a TreeCache holds is then another model's."""
        what, number = change
        getattr(self, f"_change_{what}")(number)
        if self.talk.kind == "tree":
            self.talk.ours = None
        self.stock = self._stock()

    def _stock(self) -> Tensor:
        """What the model itself says; one that sees images keeps positions of its last call."""
        if self.kind == "images":
            return torch.empty(0)
        self._activate(None)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        # An adapter freezes the others. PyTorch multiplies by a tensor that may have gradients in
        # another order, with other rounding.
        self.model.requires_grad_(False)
        logits: Tensor = self.model(**ragged((5, 3), 0), use_cache=False).logits
        for one in trained:
            one.requires_grad_(True)
        return logits

    def _change_lora(self, number: int) -> None:
        if not self.lora:
            names = sorted({name.rpartition(".")[2] for name in linear_modules(self.model)})[:3]
            torch.manual_seed(number)
            config = LoraConfig(r=2, target_modules=names, init_lora_weights=False)
            try:
                copy.deepcopy(self.model).add_adapter(config, "lora")
            except ValueError:  # PEFT knows no LoRA of one of the modules, and has wrapped others
                return
            self.model.add_adapter(config, "lora")
            self.lora = True
        self.beside = number % 2 == 0

    def _change_adapter(self, number: int) -> None:
        """It is deleted; a call adds another one."""
        if self.adapters:
            key = sorted(self.adapters)[number % len(self.adapters)]
            self.model.delete_adapter(self.adapters.pop(key))

    def _change_training(self, number: int) -> None:
        """Without dropout."""
        for module in self.model.modules():
            drops = [key for key in vars(module) if key == "p" or "drop" in key]
            vars(module).update({key: 0.0 for key in drops if vars(module)[key]})
        self.trains = not self.trains

    def _change_embeddings(self, number: int) -> None:
        if self.kind == "attention":
            self.model.resize_token_embeddings(VOCAB + number % 9, mean_resizing=False)
            self.model.generation_config.eos_token_id = None

    def _change_weight(self, number: int) -> None:
        """In place, as training does, or by another tensor."""
        weights = [one for one in self.model.parameters() if one.is_floating_point()]
        weight = weights[number // 2 % len(weights)].data
        if number % 2:
            weight.mul_(1.25)
        else:
            weights[number // 2 % len(weights)].data = weight * 1.25

    def _change_attribute(self, number: int) -> None:
        """A number that a module computes with: an epsilon, a scale, a cap."""
        found = [
            (module, name)
            for module in self.model.modules()
            for name, value in sorted(vars(module).items())
            if type(value) is float and value and name != "p" and "drop" not in name
        ]
        if found:
            module, name = found[number % len(found)]
            setattr(module, name, getattr(module, name) * 1.5)

    def _change_hook(self, number: int) -> None:
        """One is added, or another number of it set."""
        names = sorted(linear_modules(self.model))
        last, name = number // 3 % 2 == 1, names[number // 6 % min(len(names), 4)]
        if (name, last) not in self.hooks:
            self.hooks[name, last] = Added(last)
            self.model.get_submodule(name).register_forward_hook(self.hooks[name, last])
        self.hooks[name, last].amount = number % 3 / 2
        if self._tells_apart():
            self.talk.kind = self.talk.ours = self.talk.plain = None

    def _tells_apart(self) -> bool:
        """Whether a prompt in parts is another one."""
        return any(hook.last and hook.amount for hook in self.hooks.values())

    # -- calls -------------------------------------------------------------------------------

    @rule(call=calls())
    def generate(self, call: Called) -> None:
        self._call(call)

    @rule(call=calls(recorded=True))
    def generate_recorded(self, call: Called) -> None:
        self._call(call)

    # The match rule draws as plain generation does in one row; others only keep the distribution.
    @precondition(lambda self: len(self.talk.ids) == 1)
    @rule(call=calls(sampled=True))
    def generate_sampled(self, call: Called) -> None:
        self._call(call)

    @rule(call=calls(plain=True))
    def generate_plainly(self, call: Called) -> None:
        """With the cache of strategies, which have left the model as it was."""
        self._call(call)
        assert torch.equal(self._stock(), self.stock), "another model"

    def _activate(self, strategy: Method | None) -> dict[str, Any]:
        """Make the adapter of a strategy active, and the LoRA if it is to be; returns keywords."""
        active = ["lora"] if self.lora and self.beside else []
        if self.lora or self.adapters:
            self.model.enable_adapters()
        spec: dict[str, Any] = {}
        if strategy is not None:
            name, variant, drafting, named = strategy
            options = {**RUNS[name, variant], "drafting": drafting}
            if named:
                options["adapter"] = self._saved(name, variant)
            elif methods()[name].needs_adapter:
                active.append(self._attached(name, variant))
            spec = {"assistant_strategy": name, "assistant_kwargs": options, **needed(name)}
        self.model.train(self.trains)
        if active:
            self.model.set_adapter(active)
        elif self.lora or self.adapters:
            self.model.disable_adapters()
        return spec

    def _saved(self, name: str, variant: str) -> str:
        """A folder of such an adapter."""
        attention = "eager" if self.name in EAGER_ONLY else "sdpa"
        case = Case(0, 0, self.kind, self.name, attention, "", "", "", [], {})
        folder = Path(self.folder.name) / f"{name} {variant}"
        if not folder.exists():
            saved(copy.deepcopy(model_of(case)), adapter_of(self.kind, name, variant), folder)
        return str(folder)

    def _attached(self, name: str, variant: str) -> str:
        if (name, variant) not in self.adapters:
            config, own = adapter_of(self.kind, name, variant), f"own{self.added}"
            self.added += 1
            torch.manual_seed(0)
            self.model.add_adapter(config, own)
            self.adapters[name, variant] = own
            self.model.set_adapter(own)
            randomise(self.model, config.type_name)
        return self.adapters[name, variant]

    def _generate(
        self, call: Called, given: dict[str, Any], own: Any, known: int = 0
    ) -> Any:  # fmt: skip
        """Without the first ``known`` tokens of the prompt, which the cache has."""
        given, config = {**given, "return_dict_in_generate": True}, self.config
        if call.config != "keywords":
            vars(config).update(self.unset)
            vars(config).update({key: given.pop(key) for key in {*given} & {*vars(config)}})
            if call.config == "file":
                config.save_pretrained(self.folder.name)
                config = GenerationConfig.from_pretrained(self.folder.name)
            given["generation_config"] = config
        before = dict(vars(config))
        talk, own = self.talk, {} if own is None else {CACHE: own}
        inputs: dict[str, Any] = {"input_ids": talk.ids[:, known:], "attention_mask": talk.mask}
        if self.kind == "images":
            inputs |= multimodal.token_types(self.model, inputs["input_ids"])
            seen = talk.kind == "tree" and own or talk.kind == "dynamic" and self._length(own)
            inputs |= {} if seen else talk.images
        torch.manual_seed(call.seed)
        try:
            with AROUND[call.around]():
                return self.model.generate(**inputs, **given, **own)
        finally:
            assert vars(config) == before, "another configuration"

    @staticmethod
    def _length(own: dict[str, Any]) -> int:
        return own[CACHE].get_seq_length() if own else 0

    def _call(self, call: Called) -> None:
        talk = self.talk
        try:
            spec = self._activate(call.strategy)
        except ValueError as error:
            self._note("refused", error)
            return
        if call.recorded and talk.kind != "dynamic":
            spec |= RECORDED
        before = copy.deepcopy((talk.plain, talk.ours))
        if call.pickled:
            talk.ours = pickle.loads(pickle.dumps(talk.ours))
        apart = talk.edited or not bool(talk.mask.all())
        if call.strategy is None and talk.kind == "tree" and apart:
            # Plain generation would take the cache's slots for columns and trust its tokens.
            talk.ours = None
        known, dynamic = self._known(call), talk.kind == "dynamic"
        try:
            seen = {**call.settings, "output_logits": True}
            out = self._generate(call, seen, talk.plain, known * dynamic)
            if not all(bool(logits.isfinite().all()) for logits in out.logits):
                raise FloatingPointError("logits are not finite")  # Bloom's in float64
            wanted = out.sequences
        except AssertionError:
            raise
        except Exception as error:
            self._note("invalid", error)
            talk.plain, talk.ours = before
            return
        wanted = torch.cat([talk.ids[:, :known], wanted], 1) if known and dynamic else wanted
        try:
            found = self._generate(call, {**call.settings, **spec}, talk.ours, known)
        except ValueError as error:
            self._note("refused", error)
            talk.plain = before[0]
            if dynamic:  # and nothing has changed
                check_alike(talk.ours, before[1], torch.ones_like(talk.mask))
            return
        rows = zip(found.sequences.tolist(), wanted[:, known:].tolist())
        wrong = [pair for pair in rows if pair[0] != pair[1]]
        assert not wrong, f"other tokens than plain generation: {wrong}"
        self._note("exact")
        if talk.kind == "tree" and call.strategy is not None:
            talk.ours = found[CACHE]
        elif dynamic:
            check_alike(talk.ours, talk.plain, torch.cat([talk.mask, torch.ones_like(wanted)], 1))
        self._go_on(wanted, call.settings.get("eos_token_id", []), call.then)

    def _known(self, call: Called) -> int:
        """Of how many tokens of the prompt this call is given the cache alone."""
        talk, free = self.talk, {"max_new_tokens", "do_sample", "eos_token_id"}
        if not call.short or talk.ours is None or call.settings.keys() - free:
            return 0
        if talk.kind == "tree" and not (talk.ours.is_uniform and bool(talk.mask.all())):
            return 0
        known: int = talk.ours.get_seq_length()
        return known if not talk.edited and 0 < known < talk.ids.shape[1] else 0

    def _note(self, result: str, error: BaseException | None = None) -> None:
        self.tally[result] += 1
        note(f"{result}{'' if error is None else ': ' + str(error)[:200]}")

    @precondition(lambda self: not self.talk.images)
    @rule(
        strategy=strategies(), error=st.sampled_from(ERRORS), at=st.integers(1, 8),
        where=st.sampled_from([*RAISING]), then=FOLLOWING,
    )  # fmt: skip
    def interrupt(
        self, strategy: Method, error: type[BaseException], at: int, where: str, then: Following
    ) -> None:
        """A call that ends with an error or interrupt, whose cache goes on."""
        talk, raising = self.talk, {where: RAISING[where](at, error)}
        if talk.kind == "tree" and talk.ours is None:
            return
        before = copy.deepcopy(talk.ours)
        greedy = {"max_new_tokens": 12, "do_sample": False}
        call = Called(strategy, greedy, "", "keywords", False, False, False, 0, then)
        try:
            spec = self._activate(strategy)
            self._generate(call, {**greedy, **raising, **spec}, talk.ours)
        except ERRORS as raised:
            self._note("interrupted", raised)
        except ValueError as raised:
            self._note("refused", raised)
            return
        else:
            self._note("finished")
        if talk.kind != "dynamic":
            talk.edited = True  # the cache may be ahead of the prompt
            return
        length, width = talk.ours.get_seq_length(), talk.ids.shape[1]
        if length < width:
            # The next prompt is the same, of which the cache may hold more than before.
            talk.ours = before
            return
        given = {"max_new_tokens": length - width + 1, "do_sample": False}
        self._activate(None)
        out = self._generate(call, given, talk.plain)
        assert talk.plain.get_seq_length() == length
        self._go_on(out.sequences, [], then)

    def _go_on(self, sequences: Tensor, ends: list[int], then: Following) -> None:
        """The next prompt."""
        talk = self.talk
        talk.edited, width = False, talk.ids.shape[1]
        answers = sequences[:, width:]
        ended = torch.isin(answers, torch.tensor(ends, dtype=torch.long)).long()
        real = (ended.cumsum(-1) - ended == 0).long()  # up to the first end
        if then.whole:
            real = torch.ones_like(real)
        new = prompt(then.new, len(sequences), seed=then.seed)
        ids = torch.cat([sequences, new], 1)
        mask = torch.cat([talk.mask, real, torch.ones_like(new)], 1)
        if talk.kind != "dynamic" and then.moved:
            rows = [row[keep.bool()].tolist() for row, keep in zip(ids, mask)]
            talk.edited = then.cut > 0 and not talk.images  # whose part cannot be cut
            if talk.edited:
                cut = max(2, width - then.cut)
                rows = [row[:cut] + row[-2:] for row in rows]
            ids, mask = padded(rows).values()
        if ids.shape[1] > 80:
            shape = [6] * len(ids)
            self.begin(Talked(talk.kind, shape, [1] * len(ids), then.seed))
        else:
            talk.ids, talk.mask = ids, mask


def check_alike(one: Any, other: Any, mask: Tensor) -> None:
    """Both caches hold the same, but for what the mask ``(batch, columns)`` hides."""
    length = other.get_seq_length()
    assert one.get_seq_length() == length, f"a cache of {one.get_seq_length()} tokens, not {length}"
    for ours, plain in zip(one.layers, other.layers, strict=True):
        if getattr(plain, "keys", None) is not None:
            real = mask[:, None, :length][:, :, -plain.keys.shape[2] :, None]
            for name in ("keys", "values"):
                _check_close(getattr(ours, name) * real, getattr(plain, name) * real)
    states = dict(stock_states(one.layers))
    for place, state in stock_states(other.layers):
        _check_close(states[place], state)


def _check_close(one: Tensor, other: Tensor) -> None:
    """Up to fp32's rounding in other orders of reduction, some layers deep over a conversation."""
    assert float((one - other).norm() / other.norm().clamp(min=1e-3)) < 1e-3, "another cache"


# -- as a program --------------------------------------------------------------------------------


def play(count: int, first: int | None = None, kind: str | None = None) -> Counter[str]:
    """Play sequences; raises what the simplest one that fails raises.

    Args:
        count: how many.
        first: what they are drawn from; None: the same in every run.
        kind: of models; None for all.

    Returns:
        Calls by their results, see :class:`RandomSequence`.
    """
    machine: Any = type("RandomSequence", (RandomSequence,), {"tally": Counter()})
    if kind is not None:
        machine.models = tuple((kind, name) for name in MODELS[kind])
    given = settings(
        max_examples=count, stateful_step_count=STEPS, derandomize=first is None, deadline=None,
        database=None, suppress_health_check=[*HealthCheck], print_blob=True,
        report_multiple_bugs=False, phases=set(Phase) - {Phase.explain},
    )  # fmt: skip
    if first is not None:
        machine = seed(first)(machine)
    run_state_machine_as_test(machine, settings=given)
    tally: Counter[str] = machine.tally
    return tally
