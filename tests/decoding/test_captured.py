"""Recorded steps: whole answers by replaying what was recorded once, equal to plain generation.

What has no input in a record is a number of the step that it was recorded in, and shows as a wrong
token. On a GPU these tests record CUDA graphs.
"""

import gc
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import peft
import pytest
import torch
from conftest import Tiny, prompt, ragged
from covering import covering
from recurrent_models import recurrent
from replay import RECORDED, Replay, Rerun
from running import CAPTURED, LAYERS, drafting, family, proposals, without_pruning
from test_compiled import adapt, check_ways, compiled, generate, graphs_of, same, strategy
from test_compiled import check as check_one
from test_method_contract import CASES, FIRST, adapted
from test_method_contract import strategy as variant_of
from test_recurrent import STRATEGIES, with_adapter
from torch import Tensor
from transformers import CompileConfig

import hf_spec
from hf_spec.decoding.step import DeviceStep
from hf_spec.methods.registry import methods
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.target import captures, recording
from hf_spec.target.captures import Captured, Unrepeatable, Watch
from hf_spec.target.compiled import _Step
from hf_spec.target.graph_parts import AnySize, compile_in_parts
from hf_spec.target.graphs import CHECKS
from hf_spec.target.recording import ASKED
from hf_spec.threads import memory

pytestmark = pytest.mark.usefixtures("recorded")

SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 8, "top_p": 0.95}


def drafts_outside(spec: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether drafting, or a part of it, is known to be outside of the steps' programs."""
    name, chain = spec["assistant_strategy"], spec["assistant_kwargs"].get("tree") == "chain"
    by_scores = name == "space" and chain and "do_sample" in settings
    return name in ("draft_model", "layer_skip") or by_scores


def check(model: Any, spec: dict[str, Any], way: Any = RECORDED, **settings: Any) -> Any:
    """Two calls give the tokens of plain generation, the second one by replays alone."""
    check_one(model, spec, way, **settings)
    output = check_one(model, spec, way, **settings)
    assert compiled(output)["made"] == 0
    assert bool(compiled(output)["outside"]) == drafts_outside(spec, settings)
    assert f"recorded steps: code ran {compiled(output)['runs']} times" in str(output.spec_stats)
    stats, plain = output.spec_stats, spec["assistant_strategy"] == "plain"
    assert plain or stats.num_drafted_tokens > 0
    return output


# -- the same tokens ---------------------------------------------------------------------------


#: Strategies with their second variant, or the only one.
SECOND = [[case for case in CASES if case[0] == name][:2][-1] for name, _ in FIRST]
#: Each method, each kind of drafter greedy and sampled, and heads with code of their own.
SOME = covering(
    CASES,
    lambda name, variant: [
        name,
        (family(name), (name, variant) in SECOND),
        variant in ("dspine", "xpress", "lilicorr") and variant,
    ],
)


@pytest.mark.parametrize(("name", "variant"), SOME, ids=["-".join(case) for case in SOME])
def test_every_method(shallow: Tiny, name: str, variant: str) -> None:
    """A ragged batch of the first variant, a row alone of the others; sampled of the second."""
    model, case = shallow(layers=LAYERS.get(name, 1)), (name, variant)
    given = ragged() if case in FIRST and case not in SECOND else {"inputs": prompt()}
    given |= SAMPLED if case in SECOND else {}
    with adapted(model, name, variant):
        check(model, without_pruning(variant_of(name, variant)), **given, max_new_tokens=12)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("bita", "full"), ("bita", "straightforward"), ("dspark", "paths"), ("medusa", "sparse"),
        ("ppd", "paths"), ("space", "chain"),
    ],
)  # fmt: skip
def test_drafts_are_those_of_eager_steps(tiny: Tiny, name: str, variant: str) -> None:
    """Trees that do not grow by probabilities: whose tokens a program chooses, too."""
    model, drafted = tiny("llama"), []
    with adapted(model, name, variant):
        for way in ({}, RECORDED, RECORDED):
            with proposals(hf_spec.Drafter) as seen:
                generate(model, ragged(), **variant_of(name, variant), **way)
            drafted.append({len(tokens): tree.tokens[0].tolist() for tokens, tree in seen})
    eager, _, replayed = drafted
    # The last ones are cut off to what is left, in eager steps.
    same = [at for at in eager if len(replayed.get(at, ())) == len(eager[at]) > 1]
    assert len(same) > 6
    for at in same:
        assert sorted(replayed[at]) == sorted(eager[at])


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["medusa", "prompt_lookup"])
def test_processors_of_tokens(
    shallow: Tiny, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any]
) -> None:
    """The record is shown which tokens each row has, and how many, in a batch that shrinks, too."""
    model, spec, run = adapt(shallow(), name), strategy(name), DeviceStep.run
    inputs = {"input_ids": prompt()} if settings else ragged()
    settings = {**settings, "repetition_penalty": 1.7, "eos_token_id": 60, "max_new_tokens": 30}
    settings |= {"min_new_tokens": 9, "suppress_tokens": [7, 8]}
    by_program = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        by_program.append(result[1])  # what a program accepts is in its place
        return result

    check_one(model, spec, RECORDED, **inputs, **settings)
    monkeypatch.setattr(DeviceStep, "run", watched)
    check(model, spec, **inputs, **settings)
    assert by_program and all(by_program)
    ours, other = (
        generate(model, inputs, **{**settings, "do_sample": False, "repetition_penalty": penalty})
        for penalty in (1.7, 1.0)
    )
    assert not torch.equal(ours.sequences, other.sequences), "the penalty changes something"
    assert not (ours.sequences[:, prompt().shape[1] :][:, :9] == 60).any()


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_typical_acceptance(shallow: Tiny, settings: dict[str, Any]) -> None:
    """The tokens of eager steps, also of a seed where nothing is recorded any more."""
    model = adapt(shallow(), "medusa")
    lossy = drafting("medusa", num_draft_tokens=6, acceptance="typical", typical_epsilon=0.02)
    given = {**lossy, **settings, "max_new_tokens": 24}
    made = [compiled(generate(model, ragged(), **given, **RECORDED))["made"] for _ in range(2)]
    output = check_ways(model, ragged(), RECORDED, **given)
    assert output.spec_stats.num_drafted_tokens > 0
    assert made[0] and not compiled(output)["made"]


@pytest.mark.usefixtures("sizes_as_shipped")
def test_recurrent_layers() -> None:
    model = with_adapter(recurrent("falcon_h1"), "medusa", STRATEGIES["medusa"][0])
    check(model, drafting("medusa", num_draft_tokens=3), **ragged(), max_new_tokens=8)


def test_a_lora(shallow: Tiny) -> None:
    model = peft.get_peft_model(shallow(), peft.LoraConfig(init_lora_weights=False))
    spec = drafting("prompt_lookup", num_draft_tokens=4)
    tuned = check(model, spec, **ragged()).sequences
    with model.disable_adapter():
        assert not torch.equal(check(model, spec, **ragged()).sequences, tuned)
    model.merge_adapter()
    check(model, spec, **ragged())
    model.unmerge_adapter()
    assert compiled(check(model, spec, **ragged()))["made"] == 0


@pytest.mark.parametrize("way", [RECORDED, CAPTURED], ids=["recorded", "compiled"])
def test_other_weights(shallow: Tiny, way: Any) -> None:
    """Numbers in place are read anew; another tensor, or another place of it in the model, makes
    another record."""
    model: Any = shallow(layers=2)
    weight, spec = (
        model.model.layers[1].mlp.up_proj.weight,
        drafting("prompt_lookup", num_draft_tokens=4),
    )
    other, made = model.model.layers[0].mlp.up_proj.weight, []
    for change in (lambda x: x, torch.neg_, lambda x: x.flip(0).contiguous(), None):
        if change is None:
            weight.data, other.data = other.data, weight.data
        else:
            weight.data = change(weight.data)
        first = same(model, spec, {**way, "cache_implementation": "static"}, inputs=prompt())
        made.append(compiled(first)["made"] > 0)
    assert made == [True, False, True, True]


@pytest.mark.parametrize("name", [name for name, _ in FIRST if methods()[name].adapter_config])
def test_weights_that_learn(shallow: Tiny, name: str) -> None:
    """In place, those of an adapter and of its model: what is made of them is made anew where it
    was, so that records go on."""
    model: Any = shallow(layers=LAYERS.get(name, 2))
    spec = without_pruning(variant_of(name, dict(FIRST)[name]))
    with adapted(model, name, dict(FIRST)[name]):
        check(model, spec, inputs=prompt())
        kept = []  # takes the places that are given back
        for _ in range(2):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1.01)
            kept += [torch.empty_like(weight) for weight in model.parameters() for _ in range(4)]
            output = check_one(model, spec, RECORDED, inputs=prompt())
            assert compiled(output)["made"] == 0


NUMBERS: dict[str, Any] = {
    "an attribute": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 2.0),
    "of a config": lambda model: setattr(model.config, "final_logit_softcapping", 0.3),
    "of a norm": lambda model: setattr(model.model.norm, "eps", 1.0),
}


@pytest.mark.parametrize("way", [RECORDED, CAPTURED], ids=["recorded", "compiled"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_a_forward_reads(shallow: Tiny, way: Any, name: str) -> None:
    """They are constants of code, which is made anew where one has changed."""
    model: Any = shallow("gemma2", layers=2)
    spec, inputs = drafting("prompt_lookup", max_nodes=4), prompt()
    before = check_one(model, spec, way, inputs=inputs)
    NUMBERS[name](model)
    after = check_one(model, spec, way, inputs=inputs)
    assert compiled(after)["made"] and compiled(before)["made"]
    assert after.sequences.tolist() != before.sequences.tolist() or name != "an attribute"


@pytest.mark.parametrize("way", [RECORDED, CAPTURED], ids=["recorded", "compiled"])
@pytest.mark.parametrize(
    "change", [lambda bank: bank[1], lambda bank: bank[0].T], ids=["elsewhere", "transposed"]
)
def test_weights_that_move_within_their_memory(shallow: Tiny, way: Any, change: Any) -> None:
    """As those of flat parameters, or of a bank of several."""
    model: Any = shallow(layers=2)
    weight, spec = model.model.layers[1].self_attn.o_proj.weight, strategy("plain")
    bank = torch.stack([weight.data, 0.4 * torch.randn_like(weight)])
    made = []
    for value in (bank[0], change(bank), bank[0]):
        weight.data = value
        made.append(compiled(check_one(model, spec, way, inputs=prompt()))["made"] > 0)
    assert made[:2] == [True, True]


def test_caches_over_turns(shallow: Tiny) -> None:
    """What a call returns is the caller's, and the next call records nothing."""
    model, spec = shallow(), drafting("prompt_lookup", num_draft_tokens=4)
    turn, given, made = prompt(), {}, []
    for _ in range(3):
        output = same(model, {**spec, **given}, RECORDED, inputs=turn)
        turn, given = output.sequences, {CACHE: output[CACHE]}
        made.append(compiled(output)["made"])
        same(model, spec, RECORDED, inputs=prompt(seed=7))  # overwrites nothing of the cache
    assert made[0] and not any(made[2:]), made


def test_threads(shallow: Tiny) -> None:
    """Records run in one thread at a time, results are each thread's own."""
    model = adapt(shallow(), "medusa")
    inputs = [prompt(6 + n, seed=n) for n in range(4)]
    plain = [generate(model, ids).sequences for ids in inputs]

    def run(place: int) -> Tensor:
        name = ("medusa", "prompt_lookup")[place % 2]
        return generate(model, inputs[place % 4], **strategy(name), **RECORDED).sequences

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(8)))
    assert all(torch.equal(one, plain[place % 4]) for place, one in enumerate(found))


def test_calls_of_other_lengths_keep_their_records(
    shallow: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose buffers have other sizes; but for those that are too large."""
    monkeypatch.setattr("hf_spec.cache.attention.SMALLEST", 16)
    model, made = shallow(), []
    for room in (2**30, 2**30, 0, 0):
        monkeypatch.setattr("hf_spec.target.graphs.SPARE", room)
        for length in (8, 70):
            output = generate(model, prompt(length), **strategy("prompt_lookup"), **RECORDED)
            made.append(compiled(output)["made"])
    assert made[0] and made[1] and made[2:4] == [0, 0]
    assert made[6] == 0 < made[7], "twice as much as the last call used are kept"


# -- records of compiled code ------------------------------------------------------------------

#: Strategies whose trees have few sizes, each of which is compiled.
FEW = {"prompt_lookup": {"num_draft_tokens": 2}, "medusa": {"num_draft_tokens": 3}}


@pytest.fixture
def cut_into(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each captured graph, how many of its parts are compiled; 0: it runs as a whole."""
    found: list[int] = []

    def noted(captured: Any, parts: AnySize) -> Any:
        before = sum(map(len, parts._kept.values()))
        code = compile_in_parts(captured, parts)
        found.append(sum(map(len, parts._kept.values())) - before)
        return code

    monkeypatch.setattr("hf_spec.target.graphs.compile_in_parts", noted)
    return found


@pytest.mark.parametrize(("name", "inputs"), [*zip(FEW, (ragged(), {"inputs": prompt()}))])
def test_parts(shallow: Tiny, cut_into: list[int], name: str, inputs: Any) -> None:
    """Greedy and sampled: layers are compiled once, and all is one record."""
    model, spec = adapt(shallow(layers=3), name), strategy(name, **FEW[name])
    check(model, spec, CAPTURED, **inputs, max_new_tokens=12)
    assert 0 < max(cut_into) < 4, "of three layers one is compiled"
    # Rows of sampled batches have numbers of their own.
    check_ways(model, dict(inputs), CAPTURED, CAPTURED, **spec, **SAMPLED)


@pytest.mark.usefixtures("sizes_as_shipped")
@pytest.mark.environment  # minutes of a C++ compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
def test_parts_by_a_compiler(
    shallow: Tiny, monkeypatch: pytest.MonkeyPatch, cut_into: list[int], kind: str
) -> None:
    """The mode with CUDA graphs of Inductor's own included, which are not used."""
    monkeypatch.setitem(captures.RECORDERS, "cpu", Rerun)
    model: Any = shallow(layers=3) if kind == "llama" else recurrent(kind)
    spec = strategy("prompt_lookup", num_draft_tokens=1, max_depth=1)
    way = {**CAPTURED, "compile_config": CompileConfig(mode="reduce-overhead")}
    for inputs in ({"inputs": prompt()}, ragged()):
        check(model, spec, way, **inputs, max_new_tokens=8)
    check(model, spec, way, inputs=prompt(), max_new_tokens=8, **SAMPLED)
    assert max(cut_into) > 0 or kind != "llama"  # whose layers are all alike


def test_code_is_kept_for_other_places(shallow: Tiny, cut_into: list[int]) -> None:
    """A record is for places in memory, compiled code for shapes."""
    model, given = shallow(layers=3), {"inputs": prompt(), "max_new_tokens": 8}
    spec = strategy("prompt_lookup", **FEW["prompt_lookup"])
    made = [compiled(check_one(model, spec, **given))["made"] for _ in range(2)]
    assert made[0] and not made[1]
    before = len(cut_into)
    memory(model)["graphs"].spare.clear()
    gc.collect()
    assert compiled(same(model, spec, **given))["made"] and len(cut_into) == before
    # With other weights it is made anew.
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.flip(0).contiguous()
    same(model, spec, **given)
    assert len(cut_into) > before


# -- what is checked ---------------------------------------------------------------------------


class Wrong(Replay):
    """Records of a step go wrong each time that they run, but for the first ones."""

    first = 0

    def record(self, function: Any, inputs: Any) -> Any:
        replay, results = super().record(function, inputs)
        before, ran = [one.clone() for one in inputs], count()

        def again() -> None:
            right = next(ran) < self.first
            if not right:
                self.prepare(inputs, before)
            replay()
            if not right:
                self.spoil(inputs, results)

        return again, results

    def prepare(self, inputs: Any, before: Any) -> None:
        pass

    def spoil(self, inputs: Any, results: Any) -> None:
        pass


class Accepts(Wrong):
    """Other tokens: of the packed result."""

    def spoil(self, inputs: Any, results: Any) -> None:
        [packed] = [one for one in results if one.dtype == torch.long and one.ndim == 2]
        packed[:, 4 + (packed.shape[1] - 4) // 2 :] = packed[:, 3] = 7


class Drafts(Wrong):
    """Other tokens: of packed trees."""

    def spoil(self, inputs: Any, results: Any) -> None:
        [packed] = [one for one in results if one.dtype == torch.float and one.ndim == 2]
        packed.chunk(4, dim=1)[2][:, 1:] = 7


class Writes(Wrong):
    """Other keys, in the first slot of the step."""

    def spoil(self, inputs: Any, results: Any) -> None:
        lengths = next(one for one in inputs if one.ndim == 1 and one.dtype == torch.long)
        keys = next(one for one in inputs if one.ndim == 4)
        keys[0, :, int(lengths[0])] += 1


class Remembers(Wrong):
    """Inputs of the step that it was made in, for which it is right."""

    first = 1

    def prepare(self, inputs: Any, before: Any) -> None:
        for one, other in zip(inputs, before):
            if one.ndim < 4:  # the cache is read where it is
                one.copy_(other)


@pytest.mark.parametrize("wrong", [Accepts, Drafts, Writes, Remembers])
def test_records_that_are_wrong(
    shallow: Tiny, monkeypatch: pytest.MonkeyPatch, wrong: type[Wrong]
) -> None:
    """They are found, whatever is wrong, before they are used."""
    monkeypatch.setitem(captures.RECORDERS, "cpu", wrong)
    model, found = adapt(shallow(), "medusa"), []
    for seed in range(3):
        output = same(
            model, strategy("medusa", **FEW["medusa"]), RECORDED, inputs=prompt(seed=seed)
        )
        found.append(compiled(output))
    assert found[-1]["runs"] == 0 and "something else" in str(found[-1]["refused"])


def test_memory_that_records_take(shallow: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not suffice for a step, the records go, with buffers that are kept for them;
    after some calls, no more are made."""
    model, spec, eager, made = shallow(), strategy("plain"), _Step._eager, []

    def step(self: Any) -> Any:
        if memory(model)["graphs"].graphs:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return eager(self)

    monkeypatch.setattr(_Step, "_eager", step)
    for _ in range(ASKED.tries + 1):
        output = same(model, spec, RECORDED, inputs=prompt())
        made.append(compiled(output)["made"])
        assert not memory(model)["graphs"].graphs
    assert all(made[:-1]) and not made[-1]
    assert "memory does not suffice beside records (CUDA out of" in str(compiled(output)["refused"])


def test_memory_that_kept_buffers_take(fresh: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go where a call needs others; what it lacks without them is its own."""
    graphs, kept = graphs_of(fresh(), RECORDED), torch.zeros(2, 3)
    graphs.spare([kept])

    def zeros(shape: tuple[int, ...], *_: Any) -> Tensor:
        if graphs._kept.spare or len(shape) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.zeros(shape)

    monkeypatch.setattr("hf_spec.target.graphs.zeros", zeros)
    assert graphs.allocate((4, 5), kept.dtype, kept.device).shape == (4, 5)
    assert "does not suffice" in str(graphs.details()["refused"])
    with pytest.raises(torch.OutOfMemoryError):
        graphs.allocate((4, 5, 6), kept.dtype, kept.device)


# -- what cannot be recorded -------------------------------------------------------------------


def record(function: Any, *inputs: Tensor) -> Captured:
    with Watch(inputs):
        function(*inputs)
    recorder = captures.RECORDERS[inputs[0].device.type](inputs[0].device)
    return Captured(recorder, function, inputs, 0, {})


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * float(x.sum()),
        lambda x: x if bool((x > 0).all()) else -x,
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.clone().index_put_((x > 0,), x[:2]),
        lambda x: x.unique(),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda x: x.repeat_interleave(x.long().abs()),
    ],
)
def test_refused(function: Any) -> None:
    with pytest.raises(Unrepeatable):
        record(lambda x: (function(x),), torch.tensor([1.0, 2.0, -1.0, 0.0]))


def test_not_refused() -> None:
    """Masks that are written, values that one number fills, numbers of the host."""
    mask, at = torch.tensor([True, False, True, False]), torch.tensor([0, 3])

    def function(x: Tensor, mask: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        seen = mask.clone()
        seen[at] = mask[at]
        filled = x.clone()
        filled[mask] = 0
        return seen, filled * 2.5, x + 1

    code = record(function, torch.ones(4), mask, at)
    inputs = torch.arange(4.0), mask, torch.tensor([1, 2])
    for found, wanted in zip(code(*inputs), function(*inputs), strict=True):
        assert torch.equal(found, wanted)


class Nothing(Replay):
    """Records what holds no memory, like a CUDA graph."""

    def record(self, function: Any, inputs: Any) -> Any:
        return lambda: None, tuple(function(*inputs))


def test_records_go(fresh: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the memory that they are for, and if there are too many."""
    monkeypatch.setitem(captures.RECORDERS, prompt().device.type, Nothing)
    model, x, buffer, other = fresh(), torch.ones(3), torch.zeros(3), torch.zeros(3)

    def run(name: str, buffer: Tensor) -> None:
        graphs = graphs_of(model, RECORDED)
        for _ in range(CHECKS):
            x.add_(1)
            graphs.run(name, lambda a, x: (a + 0,), [buffer, x], static=1)

    run("add", buffer)
    run("add", other)
    assert graphs_of(model, RECORDED).details()["kept"] == 2
    del buffer
    gc.collect()
    assert graphs_of(model, RECORDED).details()["kept"] == 1
    monkeypatch.setattr(recording, "ASKED", ASKED._replace(most=3))
    for name in "abcd":
        run("add", other)
        run(name, other)
    graphs = graphs_of(model, RECORDED)
    found = {name for name in ("add", *"abcd") if graphs.get(name, [other, x], 1)}
    assert found == {"add", "c", "d"}


def test_logits_are_not_kept(shallow: Tiny) -> None:
    """A record's results stay in memory: once it is checked, without those that no step reads."""
    model = adapt(shallow(), "medusa")
    check(model, strategy("medusa", **FEW["medusa"]), inputs=prompt(), max_new_tokens=8)
    records = [one.code for one in memory(model)["graphs"].graphs.values()]
    for record in records:
        assert isinstance(record, Captured)
        logits, hidden, *others = record._results
        assert logits.shape[-1] == 61 and hidden.shape[-1] == model.config.hidden_size
        assert not logits.untyped_storage().nbytes() and not hidden.untyped_storage().nbytes()
        assert all(one.numel() for one in others)
    assert records


def test_logits_that_the_host_reads(shallow: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a call wants scores, the records of one size have their logits in one place."""
    monkeypatch.setattr(captures, "LARGE", 1)
    model = adapt(shallow(), "medusa")
    for name in [*FEW] * 2:
        given = strategy(name, **FEW[name])
        output = check_one(model, given, RECORDED, inputs=prompt(), output_scores=True)
    assert compiled(output)["runs"]
    own = [[*one.code._large] for one in memory(model)["graphs"].graphs.values()]
    logits = [one for large in own for one in large if one.shape[-1] == 61]
    assert len(logits) > 1 and len({one.data_ptr() for one in logits}) == 1


def test_buffers_of_earlier_calls_are_taken_over(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turns with the stream that has used them, and with a note of the one that does now."""
    taken: list[Any] = []
    monkeypatch.setattr("hf_spec.target.graphs.take_turns", lambda _, *some: taken.append(some))
    graphs, buffer = graphs_of(fresh(), RECORDED), torch.zeros(2, 3)
    graphs.spare([buffer])
    assert graphs.allocate((2, 3), buffer.dtype, buffer.device) is buffer
    assert graphs.allocate((2, 3), buffer.dtype, buffer.device) is not buffer
    assert [[*map(id, some)] for some in taken] == [[], [id(buffer)]]


def test_where_there_are_no_graphs(fresh: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = fresh(), strategy("prompt_lookup")
    config = CompileConfig(backend="cudagraphs", options={"max_autotune": True})
    with pytest.raises(ValueError, match="this backend compiles nothing and has no options"):
        generate(model, prompt(), **spec, compile_config=config)
    monkeypatch.delitem(captures.RECORDERS, model.device.type)
    with pytest.raises(ValueError, match="CUDA graphs need a CUDA device. Give another backend"):
        generate(model, prompt(), **spec, **RECORDED)


def test_nothing_is_compiled_that_could_be_disabled(fresh: Tiny) -> None:
    """TRL disables compiling in all rollouts."""
    way = {**RECORDED, "disable_compile": True}
    assert compiled(check_one(fresh(), strategy("prompt_lookup"), way, inputs=prompt()))["made"]


def test_the_forwards_of_an_assistant(tiny: Tiny, shallow: Any) -> None:
    assistant = shallow(layers=1)
    spec = {"assistant_strategy": "draft_model", "assistant_model": assistant}
    check(tiny("llama"), spec | {"assistant_kwargs": {"drafting": "always"}}, **ragged())
    levels = {key[1][3] for key in memory(assistant)["graphs"].graphs}
    assert levels == {False, True}  # the first level, and committed tokens; further levels
