"""Compiled steps: the same tokens, few graphs, and what cannot be compiled runs as it is.

Most tests run what was captured as it is (``backend="eager"``): what capturing can get wrong,
numbers of one step above all, shows there as well. Two run a compiler.
"""

import copy
import gc
import logging
import os
import weakref
from itertools import product
from typing import Any

import architectures
import pytest
import torch
from adapter_oracle import as_in_papers, randomise
from conftest import ARCHITECTURES, EOS, check_same, prompt, ragged
from covering import EVERY_CASE, covering
from replay import RECORDED
from running import CAPTURED, default_dtype, drafting, experts_are_captured, family
from torch._subclasses.fake_tensor import FakeTensor
from transformers import CompileConfig, DynamicCache, StaticCache

import hf_spec
from hf_spec.cache.attention import AttentionStates
from hf_spec.decoding.call import STATIC
from hf_spec.draft import drafter as drafters
from hf_spec.draft import policy
from hf_spec.methods.registry import methods
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.target import captures
from hf_spec.target.graphs import CHECKS, Graphs
from hf_spec.target.recording import ASKED

NEW = 16
#: Options of each strategy, under which every step drafts.
OPTIONS: dict[str, dict[str, Any]] = {
    "layer_skip": {"skip_attention": [1], "skip_mlp": [1], "num_draft_tokens": 4},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "space": {"markov_rank": 4}, "bita": {}, "medusa": {"num_heads": 3},
    "propd": {}, "ppd": {"num_ept": 2}, "dflash": {"num_layers": 1, "draft_vocab_size": 40},
    "dspark": {"num_layers": 1, "block_size": 3, "markov_rank": 4, "markov_head": "rnn"},
    "eagle3": {"draft_vocab_size": 40},
}  # fmt: skip


def strategy(name: str, **options: Any) -> dict[str, Any]:
    return drafting(name, **{**OPTIONS.get(name, {}), **options})


def adapt(model: Any, name: str, adapter: str = "one", seed: int = 2) -> Any:
    """The model with an adapter of random parameters, where the strategy has one."""
    if name in ADAPTERS:
        torch.manual_seed(seed)
        kind: Any = methods()[name].adapter_config
        model.add_adapter(kind(**{**as_in_papers(kind), **ADAPTERS[name]}), adapter)
        randomise(model, methods()[name].adapter_config.type_name)
    return model


def generate(model: Any, inputs: Any, **kwargs: Any) -> Any:
    given = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    defaults = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(**given, **{**defaults, **kwargs})


def compiled(output: Any) -> dict[str, Any]:
    return output.spec_stats.details["compiled"]


def same(model: Any, spec: dict[str, Any], way: Any = CAPTURED, **settings: Any) -> Any:
    """The output of compiled steps, whose tokens are those of plain generation."""
    return check_same(model, {**spec, **way, "return_dict_in_generate": True}, **settings)


def check(model: Any, spec: dict[str, Any], way: Any = CAPTURED, **settings: Any) -> Any:
    """The same where nothing is refused."""
    output = same(model, spec, way, **settings)
    assert compiled(output)["kept"] and not compiled(output)["refused"], compiled(output)
    return output


def check_ways(model: Any, inputs: Any, *ways: dict[str, Any], **kwargs: Any) -> Any:
    """The output of the last way, whose tokens are those of eager steps with the same seed."""
    found = []
    for way in ({}, *ways):
        torch.manual_seed(3)
        found.append(generate(model, inputs, **kwargs, **way))
        assert torch.equal(found[-1].sequences, found[0].sequences)
    return found[-1]


def graphs_of(model: Any, way: Any = CAPTURED) -> Graphs:
    return Graphs(model, way["compile_config"], "a test")


# -- the same tokens ---------------------------------------------------------------------------

#: One of each kind of positions and layers, and one with experts.
KINDS = ["llama", "gemma3", "opt", "mixtral"]


@pytest.mark.parametrize("architecture", ARCHITECTURES if os.environ.get(EVERY_CASE) else KINDS)
def test_every_architecture(shallow: Any, architecture: str) -> None:
    """With a layer of each kind that it has."""
    layers = 2 if architecture in ("gemma2", "gemma3", "cohere2") else 1
    model = adapt(shallow(architecture, layers), "space")
    given = {"spec": strategy("space", num_draft_tokens=3), **ragged((12, 5))}
    if architecture == "mixtral" and not experts_are_captured():
        assert "BF16" in str(compiled(same(model, **given))["refused"])
    else:
        check(model, **given)


@pytest.mark.parametrize("kind", ["deepseek_v32", "llama4_text"])
def test_attention_with_an_index_of_keys_or_in_chunks(kind: str) -> None:
    config = architectures.tiny_config(kind)
    if kind == "deepseek_v32":  # torch captures the grouped product of experts in bfloat16 only
        config.mlp_layer_types = ["dense"] * architectures.LAYERS
    check(architectures.random_model(config), drafting("prompt_lookup"), **ragged())


@pytest.mark.parametrize(("part", "accepted"), [("tokens", True), ("chances", False)])
def test_trees_are_checked_by_their_chances(
    shallow: Any, monkeypatch: pytest.MonkeyPatch, part: str, accepted: bool
) -> None:
    """Compiled code may take other tokens of several that are equally likely; 16 bits have many."""
    whole = drafters.grow

    def grow(source: Any, root: torch.Tensor, *args: Any) -> torch.Tensor:
        packed = whole(source, root, *args)
        parts = dict(zip(("parents", "depths", "tokens", "chances"), packed.chunk(4, dim=1)))
        if isinstance(root, FakeTensor):  # as it is captured
            least = torch.arange(parts[part].shape[1]).clamp(max=1)  # but for the root
            parts[part] = (parts[part] - least).clamp(min=0 if part == "tokens" else None, max=60)
        return torch.cat(list(parts.values()), 1)

    monkeypatch.setattr(drafters, "grow", grow)
    output = same(adapt(shallow(), "medusa"), strategy("medusa"), inputs=prompt())
    assert bool(compiled(output)["refused"]) != accepted


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("name", "sampled"),
    covering(product(methods(), (False, True)), lambda name, sampled: [family(name), sampled]),
)
def test_every_strategy(shallow: Any, name: str, sampled: bool) -> None:
    layers = 2 if name in ("layer_skip", "propd") else 1  # what they leave out, or look into
    model, inputs = adapt(shallow(layers=layers), name), ragged((12, 5))
    # Few sizes, each of which is a graph.
    few = {"layer_skip": {}, "plain": {}, "prompt_lookup": {"num_draft_tokens": 4}}
    options: dict[str, Any] = dict(few.get(name, {"num_draft_tokens": 3}))
    options |= {"lookup": True} if name in ADAPTERS and not sampled else {}
    settings: dict[str, Any] = {}
    if sampled:
        settings = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}
    spec = strategy(name, **options)
    found = check_ways(model, inputs, CAPTURED, CAPTURED, **settings, **spec)
    assert compiled(found)["kept"] and not compiled(found)["refused"]
    if not sampled:
        assert torch.equal(found.sequences, generate(model, inputs).sequences)


def test_rows_end_one_by_one(shallow: Any) -> None:
    """The batch goes down in powers of two, and outputs are those of rows alone."""
    model, more = adapt(shallow(), "bita"), {"max_new_tokens": 30}
    inputs = ragged((12, 5, 9, 7, 8, 12, 6, 10))
    whole = generate(model, inputs, **more).sequences
    more["eos_token_id"] = [EOS, *whole[:, -28:].flatten()[::3].unique()[:6].tolist()]
    check(model, strategy("bita"), **inputs, **more)


def test_scores_and_caches_go_in_and_out(shallow: Any) -> None:
    model, record = shallow(), {"output_scores": True, "output_logits": True}
    spec = {**strategy("prompt_lookup"), **CAPTURED}
    for rows, given in ((1, {CACHE: DynamicCache(config=model.config)}), (2, {})):
        first = generate(model, prompt(10, rows), **record)
        output = generate(model, prompt(10, rows), **given, **spec, **record)
        assert torch.equal(output.sequences, first.sequences)
        for name in ("scores", "logits"):
            for one, other in zip(output[name], first[name], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        same(model, {**spec, CACHE: output[CACHE]}, {}, inputs=first.sequences)


def test_adapters_of_one_name(shallow: Any) -> None:
    """One that is deleted and another of its name are not mixed up."""
    model = shallow()
    for seed in (2, 3):
        adapt(model, "space", seed=seed)
        spec, few = strategy("space", max_depth=1), {"max_new_tokens": 12}
        want = generate(model, prompt(), **few, **spec).spec_stats.accepted_histogram
        found = check(model, spec, inputs=prompt(), **few)
        assert found.spec_stats.accepted_histogram == want
        model.delete_adapter("one")


def test_another_default_dtype(shallow: Any) -> None:
    """Trees that a program has grown are read as what it has packed."""
    model = adapt(shallow(), "medusa")
    with default_dtype(torch.float64):
        check(model, strategy("medusa"), inputs=prompt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_the_inputs(dtype: torch.dtype, fresh: Any) -> None:
    """Probabilities in float32 from states in bfloat16 are no more exact than these."""
    graphs, states = graphs_of(fresh()), torch.ones(3, dtype=dtype)

    def run(name: Any, scale: float) -> None:
        states.mul_(2)  # code is checked by several inputs
        near = states.float() * scale
        graphs.run(name, lambda x: (x.float(),), [states], lambda: (near,), tuple)

    for scale in (1.02, 1.06):
        for _ in range(ASKED.tries):
            run(scale, scale)
        assert (graphs.get(scale, [states]) is None) == (dtype == torch.float32)
    assert bool(graphs.details()["refused"]) == (dtype == torch.float32)
    for _ in range(ASKED.tries):
        run("far", 1.2)
    assert graphs.details()["refused"] and graphs.get("far", [states]) is None


@pytest.mark.parametrize(
    ("checks", "used"),
    [
        ([True] * CHECKS, True), ([False, True, True, True], True),
        ([True, False, False, *[True] * 3], True), ([False] * ASKED.tries, False),
        ([True, *[False] * (ASKED.tries + 1)], False),
    ],
)  # fmt: skip
def test_code_that_differs_once(checks: list[bool], used: bool, fresh: Any) -> None:
    """As where rounding chooses another expert: it is checked again until it has agreed twice more
    than it has differed, and refused where it mostly differs. It is compiled once."""
    graphs, x, compiled_times = graphs_of(fresh()), torch.ones(3), list[int]()

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        compiled_times.append(type(x) is not torch.Tensor)
        return (x + 1,)

    for number, agrees in enumerate(checks):
        assert graphs.made == (number > 0) and graphs.get("a", [x]) is None
        x += 1
        want = x + 1 if agrees else x + 2
        [found] = graphs.run("a", function, [x], lambda want=want: (want,), tuple)
        assert torch.equal(found, want)
    assert (graphs.get("a", [x]) is not None) == used != bool(graphs.details()["refused"])
    graphs.run("a", function, [x], lambda: (x + 1,), tuple)
    assert graphs.made == sum(compiled_times) == 1


def test_inputs_that_recur_prove_nothing_new(fresh: Any) -> None:
    """Code may contain what was computed from them: it runs for these alone, until it has been
    right for others."""
    graphs, x, plain = graphs_of(fresh()), torch.ones(3), list[float]()

    def run() -> None:
        graphs.run("a", lambda x: (x + 1,), [x], lambda: plain.append(float(x[0])) or (x + 1,))

    for _ in range(3):
        run()
    x += 1
    for _ in range(3):
        run()
    x += 1
    run()
    assert plain == [1, 2] and graphs.counts["runs"] == 5


@pytest.mark.parametrize("given", ["in options", "in the environment"])
def test_frozen_weights_are_refused(given: str, shallow: Any) -> None:
    """Code is kept, and would hold what weights and caches were."""
    asked = given == "in options"
    config = CompileConfig(options={"freezing": True} if asked else None)
    kwargs = {"cache_implementation": "static", "compile_config": config}
    with (
        torch._inductor.config.patch(freezing=not asked),
        pytest.raises(ValueError, match="freezing is on .*TORCHINDUCTOR_FREEZING.*disable_compile"),
    ):
        generate(shallow(), prompt(), **strategy("prompt_lookup"), **kwargs)


# -- few graphs --------------------------------------------------------------------------------


@pytest.mark.usefixtures("sizes_as_shipped")
def test_a_steady_state_compiles_nothing(shallow: Any) -> None:
    """Calls of mixed lengths, trees, strategies, adapters and batch sizes."""
    model = adapt(adapt(shallow(), "medusa", "heads"), "space", "masks")
    model.set_adapter(["heads", "masks"])
    lookup = strategy("prompt_lookup", num_draft_tokens=4)
    calls = [
        (lookup, prompt(31)), (strategy("medusa", num_draft_tokens=4), prompt(9, 2)),
        (strategy("space", tree="chain", max_depth=2), prompt(5)), (lookup, prompt(22)),
        (strategy("medusa", tree="chain"), prompt(17, 2)),
    ]  # fmt: skip
    few = {**CAPTURED, "max_new_tokens": 8}
    seen = [compiled(generate(model, ids, **spec, **few)) for spec, ids in calls * 2]
    assert all(found["made"] == 0 for found in seen[5:])
    assert sum(found["made"] for found in seen) == seen[-1]["kept"]


@pytest.mark.usefixtures("sizes_as_shipped")
@pytest.mark.parametrize(
    ("name", "sampled", "sizes"), [("prompt_lookup", False, (1, 2)), ("medusa", True, (2,))]
)
def test_a_warm_up(
    shallow: Any, monkeypatch: pytest.MonkeyPatch, name: str, sampled: bool, sizes: tuple[int, ...]
) -> None:
    """Behind it nothing is compiled, whatever the policy chooses."""
    monkeypatch.setattr(policy, "TREE_SIZES", policy.TREE_SIZES[:4])
    model = adapt(shallow(), name)
    config = CAPTURED["compile_config"]
    options = {"assistant_strategy": name, "compile_config": config, "do_sample": sampled}
    told: list[int] = []
    made = hf_spec.warm_up(model, batch_sizes=sizes, max_length=60, progress=told.append, **options)
    assert told == list(range(1, made + 1))
    assert made and hf_spec.warm_up(model, batch_sizes=sizes, max_length=256, **options) == 0
    for inputs in (prompt(9, rows) for rows in sizes):
        plain = generate(model, inputs, max_new_tokens=30).sequences
        for _ in range(2):
            output = generate(model, inputs, max_new_tokens=30, **{**options, **CAPTURED})
            assert compiled(output)["made"] == 0
            assert sampled or torch.equal(output.sequences, plain)
    with pytest.raises(ValueError, match="batch_sizes=0"):
        hf_spec.warm_up(model, batch_sizes=0, **options)
    with pytest.raises(ValueError, match="warm_up without assistant_strategy: name"):
        hf_spec.warm_up(model, batch_sizes=sizes)


@pytest.mark.parametrize("name", ["prompt_lookup", "eagle3"])
def test_buffers_are_used_again(shallow: Any, monkeypatch: Any, name: str) -> None:
    """CUDA graphs are for places in memory; a cache that the caller has is his."""
    held = 2 if name == "eagle3" else 1  # caches of a call: the model's, the drafter's
    places, caches = [], []
    release = AttentionStates.release

    def note(cache: AttentionStates) -> Any:
        buffers = release(cache)
        places.append([buffer.data_ptr() for buffer in buffers])
        return buffers

    monkeypatch.setattr(AttentionStates, "release", note)
    model, spec = adapt(shallow(), name), {**strategy(name, max_depth=1), **CAPTURED}
    plain = generate(model, prompt()).sequences
    for _ in range(2):
        places.clear()
        for _ in range(2):
            found = generate(model, prompt(), return_dict_in_generate=False, **spec)
            assert torch.equal(found, plain)
        assert len(places) == 2 * held
        assert places[:held] == places[held:]
        output = generate(model, prompt(), **spec)
        caches.append(output[CACHE])
    longer = generate(model, plain).sequences
    for cache in caches:
        again = generate(model, plain, **{CACHE: cache}, **strategy(name))
        assert torch.equal(again.sequences, longer)
    assert len({cache.layers[0].keys.data_ptr() for cache in caches}) == 2


def test_a_model_is_freed(shallow: Any) -> None:
    model = adapt(shallow(layers=3), "space")  # so many that one recurs
    generate(model, prompt(), **strategy("space", num_draft_tokens=3), **CAPTURED)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


# -- what cannot be compiled -------------------------------------------------------------------


def reads_numbers(model: Any, patch: pytest.MonkeyPatch) -> None:
    layer = model.model.layers[1].mlp
    stock = layer.forward
    layer.forward = lambda x: stock(x) if float(x.sum()) < 1e9 else x


def knows_tracers(model: Any, patch: pytest.MonkeyPatch) -> None:
    """It computes something else on tensors without data; the trial of the code finds it out."""
    stock = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        if type(output.last_hidden_state) is not torch.Tensor:
            output.last_hidden_state = output.last_hidden_state * 1.1
        return output

    model.model.forward = forward


def test_hooks_that_transformers_leaves(shallow):
    """They collect hidden states where a call asks for them."""
    model = shallow()
    model(prompt(), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    check(model, strategy("prompt_lookup", max_depth=1), inputs=prompt(), max_new_tokens=12)


def has_hooks(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].register_forward_hook(lambda *args: None)


def fills_memory(model: Any, patch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("none is left")

    patch.setattr(captures.RECORDERS[model.device.type], "record", full)


@pytest.mark.usefixtures("hooks_count")
@pytest.mark.parametrize(
    ("change", "way", "message"),
    [
        (reads_numbers, CAPTURED, "DataDependent"), (has_hooks, CAPTURED, "have hooks"),
        (knows_tracers, CAPTURED, "gives something else"), (has_hooks, RECORDED, "have hooks"),
        (reads_numbers, RECORDED, "_local_scalar_dense"),
        (fills_memory, RECORDED, "does not fit into memory (none is left)"),
    ],
)  # fmt: skip
def test_a_forward_that_cannot_be_captured(
    request: Any, shallow: Any, caplog: Any, monkeypatch: Any, change: Any, way: Any, message: str
) -> None:
    """It runs as it is, and one warning says why."""
    if way is RECORDED:
        request.getfixturevalue("recorded")
    model, spec = shallow(layers=2), strategy("prompt_lookup")
    change(model, monkeypatch)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert compiled(check_ways(model, prompt(), way, **spec))["kept"] == 0
    [warned] = [one.message for one in caplog.records if "run as they are" in one.message]
    assert message in warned


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("way", "named"), [(CAPTURED, "cache_implementation="), (RECORDED, "compile_config=")]
)
def test_pruning_is_refused(shallow: Any, way: Any, named: str) -> None:
    model = adapt(shallow(layers=2), "propd")
    with pytest.raises(ValueError, match=f"prune=True with {named}"):
        generate(model, prompt(), **strategy("propd", prune=True), **way)


def test_when_steps_are_compiled(fresh: Any) -> None:
    model = fresh()
    config = CompileConfig(backend="eager")
    eager: list[dict[str, Any]] = [
        {"cache_implementation": STATIC, "compile_config": config, "disable_compile": True},
        {"compile_config": config},  # as in Transformers, a static cache is asked for, too
    ]
    if model.device.type == "cpu":  # there only on request
        eager.append({"cache_implementation": STATIC})
    for kwargs in eager:
        output = same(model, strategy("prompt_lookup"), kwargs, inputs=prompt())
        assert "compiled" not in output.spec_stats.details
    with pytest.raises(ValueError, match="cache_implementation='static' instead"):
        cache = StaticCache(config=model.config, max_cache_len=64)
        generate(model, prompt(), **{CACHE: cache}, **strategy("prompt_lookup"))


def test_a_callers_config_stays(shallow: Any) -> None:
    model = shallow()
    config = hf_spec.SpecConfig(
        assistant_strategy="prompt_lookup", max_new_tokens=5, do_sample=False, **CAPTURED
    )
    before = copy.deepcopy(config.to_dict())
    for _ in range(2):
        output = model.generate(prompt(), generation_config=config, return_dict_in_generate=True)
        assert "compiled" in output.spec_stats.details
    assert config.to_dict() == before
