"""Compiled steps: the same tokens, few graphs, and what cannot be compiled runs as it is.

Most tests run what was captured as it is (``backend="eager"``): what capturing can get wrong,
numbers of one step above all, shows there as well. One runs a compiler.
"""

from __future__ import annotations

import copy
import logging
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from adapter_oracle import randomise
from conftest import ARCHITECTURES, EOS, prompt, ragged
from running import drafting
from test_shrinking import StopRowAt
from transformers import CompileConfig, DynamicCache, StaticCache

import hf_spec
from hf_spec.cache.buffers import BUCKET, AttentionStates
from hf_spec.cache.convert import pack
from hf_spec.core.buckets import bucket
from hf_spec.decoding.compiling import STATIC
from hf_spec.methods.registry import methods
from hf_spec.model.graphs import Graph, Graphs
from modeling_patches.cache_name import CACHE, cache_in

NEW = 20
CAPTURED = {"cache_implementation": STATIC, "compile_config": CompileConfig(backend="eager")}
#: Options of each strategy, under which every step drafts.
OPTIONS: dict[str, dict[str, Any]] = {
    "layer_skip": {"skip_attention": [1], "skip_mlp": [1], "max_draft": 4},
    "propd": {"prune": False},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "space": {"markov_rank": 4}, "bita": {}, "medusa": {"num_heads": 3},
    "propd": {}, "ppd": {"num_ept": 2},
}  # fmt: skip


def strategy(name: str, **options: Any) -> dict[str, Any]:
    return drafting(name, **{**OPTIONS.get(name, {}), **options})


def adapt(model: Any, name: str, adapter: str = "one", seed: int = 2) -> Any:
    """The model with an adapter of random parameters, where the strategy has one."""
    if name in ADAPTERS:
        torch.manual_seed(seed)
        model.add_adapter(methods()[name].adapter_config(**ADAPTERS[name]), adapter)
        randomise(model, methods()[name].adapter_config.type_name)
    return model


def generate(model: Any, inputs: Any, **kwargs: Any) -> Any:
    given = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    defaults = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(**given, **{**defaults, **kwargs})


def compiled(output: Any) -> dict[str, Any]:
    return output.spec_stats.details["compiled"]


# -- the same tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(shallow: Any, architecture: str) -> None:
    """With a layer of each kind that it has."""
    layers = 2 if architecture in ("gemma2", "gemma3", "cohere2", "gpt_neo") else 1
    model, inputs = adapt(shallow(architecture, layers), "space"), ragged((12, 5))
    plain = generate(model, inputs).sequences
    output = generate(model, inputs, **strategy("space", num_draft_tokens=3), **CAPTURED)
    assert torch.equal(output.sequences, plain)
    found = compiled(output)
    if architecture == "mixtral":  # torch captures its grouped product in bfloat16 only
        assert "BF16" in str(found["refused"])
    else:
        assert found["kept"] and not found["refused"], found


@pytest.mark.parametrize("name", methods())
def test_every_strategy(shallow: Any, name: str) -> None:
    model, inputs = adapt(shallow(layers=2), name), ragged((12, 5))
    plain = generate(model, inputs).sequences
    options = {"lookup": True} if name in ADAPTERS else {}
    output = generate(model, inputs, **strategy(name, **options), **CAPTURED)
    assert torch.equal(output.sequences, plain)
    assert compiled(output)["kept"] and not compiled(output)["refused"]


@pytest.mark.parametrize("name", ["prompt_lookup", "space", "medusa"])
def test_the_policy_decides(shallow: Any, name: str) -> None:
    """The shipped default: every step another size, all of them padded to few."""
    model = adapt(shallow(), name)
    plain = generate(model, ragged(), max_new_tokens=60).sequences
    for _ in range(3):
        output = generate(model, ragged(), max_new_tokens=60, assistant_strategy=name, **CAPTURED)
        assert torch.equal(output.sequences, plain)


@pytest.mark.parametrize("name", ["prompt_lookup", "medusa", "layer_skip"])
def test_sampling_and_processors(shallow: Any, name: str) -> None:
    model = adapt(shallow(layers=2), name)
    kwargs = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}
    torch.manual_seed(5)
    want = generate(model, ragged(), **kwargs, **strategy(name)).sequences
    torch.manual_seed(5)
    assert torch.equal(
        generate(model, ragged(), **kwargs, **strategy(name), **CAPTURED).sequences, want
    )


@pytest.mark.parametrize("name", ["prompt_lookup", "bita"])
def test_rows_end_one_by_one(shallow: Any, name: str) -> None:
    """The batch goes down in powers of two, and outputs are those of rows alone."""
    model = adapt(shallow(), name)
    inputs = ragged((12, 5, 9, 7, 8, 12, 6, 10))
    whole = generate(model, inputs, max_new_tokens=40).sequences
    ends = [int(token) for token in whole[:, -38:].flatten()[::3].unique()[:6]]
    plain = generate(model, inputs, max_new_tokens=40, eos_token_id=[EOS, *ends]).sequences
    output = generate(
        model, inputs, max_new_tokens=40, eos_token_id=[EOS, *ends], **strategy(name), **CAPTURED
    )
    assert torch.equal(output.sequences, plain)
    assert not compiled(output)["refused"]


def test_hidden_states_and_scores(fresh: Any) -> None:
    model = fresh()
    record = {"output_scores": True, "output_logits": True}
    want = generate(model, ragged(), **record)
    found = generate(model, ragged(), **record, **strategy("prompt_lookup"), **CAPTURED)
    for one, other in zip(want.scores, found.scores, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_caches_go_in_and_out(shallow: Any) -> None:
    model = shallow()
    first = prompt(10, 2)
    plain = generate(model, first).sequences
    longer = generate(model, plain).sequences
    for given in (DynamicCache(config=model.config), None):
        kwargs = {} if given is None else {CACHE: given}
        output = generate(model, first, **kwargs, **strategy("prompt_lookup"), **CAPTURED)
        assert torch.equal(output.sequences, plain)
        again = generate(
            model, plain, **{CACHE: output[CACHE]}, **strategy("prompt_lookup"),
            **CAPTURED,
        )  # fmt: skip
        assert torch.equal(again.sequences, longer)


def test_peft_model(shallow: Any) -> None:
    """Another adapter's LoRA around the model, active and not, are different graphs."""
    import peft

    model = peft.get_peft_model(shallow(), peft.LoraConfig(init_lora_weights=False))
    for _ in range(2):
        plain = generate(model, prompt()).sequences
        output = generate(model, prompt(), **strategy("prompt_lookup"), **CAPTURED)
        assert torch.equal(output.sequences, plain)
        with model.disable_adapter():
            without = generate(model, prompt()).sequences
            output = generate(model, prompt(), **strategy("prompt_lookup"), **CAPTURED)
            assert torch.equal(output.sequences, without)
    assert not torch.equal(plain, without)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)
    output = generate(model, prompt(), **strategy("prompt_lookup"), **CAPTURED)
    assert torch.equal(output.sequences, generate(model, prompt()).sequences)
    assert compiled(output)["made"]


def test_fine_tuned_models(shallow: Any) -> None:
    """Updates of the whole model: merged, taken out, switched and disabled between calls."""
    import peft

    peft_model = peft.get_peft_model(shallow(), hf_spec.SpaceConfig(update="lora"), "one")
    randomise(peft_model, "SPACE", seed=1)
    peft_model.add_adapter("two", hf_spec.SpaceConfig(update="lora"))
    peft_model.set_adapter("two")
    randomise(peft_model, "SPACE", seed=2)

    def check(name: str = "space") -> tuple[Any, dict[str, Any]]:
        """What is compiled gives what the model gives as it is now."""
        plain = generate(peft_model, prompt()).sequences
        output = generate(peft_model, prompt(), **strategy(name, **options[name]), **CAPTURED)
        assert torch.equal(output.sequences, plain)
        assert compiled(output)["kept"] and not compiled(output)["refused"]
        return plain, compiled(output)

    options: dict[str, dict[str, Any]] = {"space": {"tree": "chain"}, "prompt_lookup": {}}
    second, _ = check()
    for merge, unmerge in (
        (peft_model.merge_adapter, peft_model.unmerge_adapter),
        (lambda: hf_spec.merge_adapter(peft_model), lambda: hf_spec.unmerge_adapter(peft_model)),
    ):
        merge()
        merged, found = check()
        assert torch.equal(merged, second) and found["made"]  # one without hooks
        assert check()[1]["made"] == 0
        unmerge()
        assert torch.equal(check()[0], second)
    peft_model.set_adapter("one")
    first, _ = check()
    assert not torch.equal(first, second)
    peft_model.merge_adapter()
    peft_model.set_adapter("two")  # takes it out
    assert torch.equal(check()[0], second)
    with peft_model.disable_adapter():
        base, _ = check("prompt_lookup")
    assert not torch.equal(base, second)
    assert torch.equal(check("prompt_lookup")[0], second)


def test_a_lora_is_merged_between_calls(shallow: Any) -> None:
    import peft

    model = peft.get_peft_model(shallow(), peft.LoraConfig(init_lora_weights=False))
    plain = []
    for change in (lambda: None, model.merge_adapter, model.unmerge_adapter, model.merge_adapter):
        change()
        plain.append(generate(model, prompt()).sequences)
        output = generate(model, prompt(), **strategy("prompt_lookup"), **CAPTURED)
        assert torch.equal(output.sequences, plain[-1])
        assert compiled(output)["kept"] and not compiled(output)["refused"]
    assert torch.equal(plain[0], plain[1])


def test_fully_fine_tuned_weights(fresh: Any) -> None:
    """``update="full"``: a step of training changes numbers, a checkpoint's weights the memory."""
    model = fresh()
    model.add_adapter(hf_spec.SpaceConfig(update="full"))
    randomise(model, "SPACE")
    weight, seen = model.model.layers[1].mlp.up_proj.weight, []
    for change in (lambda x: x, torch.neg_, lambda x: x.flip(0).contiguous()):
        weight.data = change(weight.data)
        plain = generate(model, prompt()).sequences
        output = generate(model, prompt(), **strategy("space", max_depth=1), **CAPTURED)
        assert torch.equal(output.sequences, plain)
        seen.append((plain.tolist(), compiled(output)))
    assert seen[2][1]["made"] and seen[0][0] != seen[1][0] != seen[2][0]


@pytest.mark.parametrize("name", methods())
@pytest.mark.parametrize("sampled", [False, True])
def test_code_may_overwrite_its_earlier_results(
    shallow: Any, name: str, sampled: bool, monkeypatch: Any
) -> None:
    """As CUDA graphs do: when any of them runs, the results of those before it are gone."""
    begin, compile_one, results = Graphs.__init__, Graphs._compile, []

    def start(self: Graphs, *args: Any) -> None:
        begin(self, *args)
        self._shares_memory = True

    def overwriting(self: Graphs, *args: Any) -> Any:
        graph = compile_one(self, *args)
        code = graph.code

        def run(*inputs: Any) -> Any:
            for tensor in results:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 99)
            results[:] = [result.clone() for result in code(*inputs)]
            return tuple(results)

        graph.code = run
        return graph

    monkeypatch.setattr(Graphs, "__init__", start)
    monkeypatch.setattr(Graphs, "_compile", overwriting)
    model, inputs = adapt(shallow(layers=2), name), ragged((12, 5))
    kwargs: dict[str, Any] = {"do_sample": True, "temperature": 0.7} if sampled else {}
    torch.manual_seed(5)
    plain = generate(model, inputs, **kwargs, **strategy(name)).sequences
    for _ in range(2):
        torch.manual_seed(5)
        output = generate(model, inputs, **kwargs, **strategy(name), **CAPTURED)
        assert torch.equal(output.sequences, plain)
    assert results and not compiled(output)["refused"]


def test_code_that_shares_memory_runs_in_one_thread_at_a_time(fresh: Any) -> None:
    graphs = Graphs(fresh(), CAPTURED["compile_config"], "a test")
    graphs._shares_memory = True
    shared = torch.zeros(1)

    def code(x: torch.Tensor) -> tuple[torch.Tensor]:
        shared.copy_(x)
        time.sleep(1e-3)  # lets the other threads run
        return (shared,)

    def call(number: int) -> list[float]:
        x = torch.full((1,), float(number))
        graph = Graph(code, frozenset(), tolerance=0.0)
        return [graphs._call(graph, [x], tuple)[0].item() for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(4))) == [[number] * 20 for number in range(4)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_with_a_compiler(shallow: Any) -> None:
    """Inductor's code gives the same tokens, and is made once."""
    from torch._dynamo.utils import counters

    model = adapt(shallow(), "space")
    plain = generate(model, prompt()).sequences
    # One graph, since each takes its time: nothing says how many tokens are left at the end.
    ends = StopRowAt(prompt().shape[1], {tuple(prompt()[0].tolist()): NEW})
    kwargs = {
        **strategy("space", tree="chain", max_depth=2), "max_new_tokens": 2 * NEW,
        "stopping_criteria": [ends], "cache_implementation": STATIC,
        "compile_config": CompileConfig(),
    }  # fmt: skip
    first = generate(model, prompt(), **kwargs)
    assert torch.equal(first.sequences, plain)
    assert compiled(first)["made"] and not compiled(first)["refused"]
    counters.clear()
    second = generate(model, prompt(), **kwargs)
    assert torch.equal(second.sequences, plain)
    assert compiled(second)["made"] == 0 and not counters["stats"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_the_inputs(dtype: torch.dtype, fresh: Any) -> None:
    """Probabilities in float32 from states in bfloat16 are no more exact than these."""
    model = fresh()
    graphs, states = Graphs(model, CAPTURED["compile_config"], "a test"), torch.ones(3, dtype=dtype)
    graphs.run("near", lambda x: (x.float(),), [states], lambda: (states.float() * 1.02,), tuple)
    assert bool(graphs.details()["refused"]) == (dtype == torch.float32)
    graphs.run("far", lambda x: (x.float(),), [states], lambda: (states.float() * 1.1,), tuple)
    assert graphs.details()["refused"] and graphs.get("far", [states]) is None


@torch.no_grad()
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("given", ["in options", "in the environment"])
def test_frozen_weights(given: str, shallow: Any) -> None:
    """Code with the weights inside is made anew when the numbers in them change."""
    model, asked = shallow(), given == "in options"
    config = CompileConfig(mode=None, options={"freezing": True} if asked else None)
    head, inputs = model.lm_head, torch.randn(3, model.lm_head.in_features)
    made, seen = [], []

    def negate() -> None:
        head.weight.data.neg_()

    def halve() -> None:
        head.weight.mul_(0.5)

    for change in (None, None, negate, None, halve):
        if change is not None:
            change()
        with torch._inductor.config.patch(freezing=not asked):
            graphs = Graphs(model, config, "a test")
            (found,) = graphs.run(
                "head", lambda x: (head(x),), [inputs], lambda: (head(inputs),), lambda found: found
            )
        torch.testing.assert_close(found, head(inputs))
        made.append(graphs.made)
        seen.append(found)
    assert made == [1, 0, 1, 0, 1]
    assert torch.equal(seen[2], -seen[0])


# -- few graphs --------------------------------------------------------------------------------


def test_a_steady_state_compiles_nothing(shallow: Any) -> None:
    """50 calls of mixed lengths, trees, strategies, adapters and batch sizes."""
    model = adapt(adapt(shallow(), "medusa", "heads"), "space", "masks")
    model.set_adapter(["heads", "masks"])
    generator = torch.Generator().manual_seed(0)
    calls = []
    for _ in range(25):
        name = ["prompt_lookup", "medusa", "space"][
            int(torch.randint(3, (1,), generator=generator))
        ]
        options = [{}, {"tree": "chain"}][int(torch.randint(2, (1,), generator=generator))]
        length = int(torch.randint(4, 40, (1,), generator=generator))
        batch = int(torch.randint(1, 3, (1,), generator=generator))
        calls.append((name, {} if name == "prompt_lookup" else options, prompt(length, batch)))
    seen = []
    for name, options, inputs in calls * 2:
        output = generate(model, inputs, **strategy(name, **options), **CAPTURED)
        seen.append(compiled(output))
    assert all(found["made"] == 0 for found in seen[25:])
    assert sum(found["made"] for found in seen) == seen[-1]["kept"]


@pytest.mark.parametrize(
    ("name", "sampled"),
    [("prompt_lookup", False), ("medusa", False), ("space", False), ("medusa", True)],
)
def test_a_warm_up(shallow: Any, name: str, sampled: bool) -> None:
    """Behind it nothing is compiled, whatever the policy chooses."""
    model = adapt(shallow(), name)
    config = CAPTURED["compile_config"]
    options = {"assistant_strategy": name, "compile_config": config, "do_sample": sampled}
    told: list[int] = []
    made = hf_spec.warm_up(
        model, batch_sizes=(1, 2), max_length=100, progress=told.append, **options
    )
    assert told == list(range(1, made + 1))
    assert made and hf_spec.warm_up(model, batch_sizes=(1, 2), max_length=256, **options) == 0
    for inputs in (prompt(), prompt(7, 2)):
        for _ in range(3):
            output = generate(model, inputs, max_new_tokens=60, **{**options, **CAPTURED})
            assert compiled(output)["made"] == 0
    with pytest.raises(ValueError, match="batch_sizes=0"):
        hf_spec.warm_up(model, batch_sizes=(0,), **options)


def test_buffers_are_used_again(shallow: Any, monkeypatch: Any) -> None:
    """CUDA graphs are for places in memory; a cache that the caller has is his."""
    places, caches = [], []
    release = AttentionStates.release

    def note(cache: AttentionStates) -> Any:
        buffers = release(cache)
        places.append([buffer.data_ptr() for buffer in buffers])
        return buffers

    monkeypatch.setattr(AttentionStates, "release", note)
    model = shallow()
    plain = generate(model, prompt()).sequences
    for _ in range(3):
        for _ in range(2):
            found = generate(
                model, prompt(), return_dict_in_generate=False, **strategy("prompt_lookup"),
                **CAPTURED,
            )  # fmt: skip
            assert torch.equal(found, plain)
        assert places[-1] == places[-2]
        output = generate(model, prompt(), **strategy("prompt_lookup"), **CAPTURED)
        caches.append(output[CACHE])
    longer = generate(model, plain).sequences
    for cache in caches:
        again = generate(model, plain, **{CACHE: cache}, **strategy("prompt_lookup"))
        assert torch.equal(again.sequences, longer)
    assert len({cache.layers[0].keys.data_ptr() for cache in caches}) == 3


def test_weights_may_change(shallow: Any) -> None:
    """Numbers in place: the graph stays. Another tensor: it is made anew."""
    model = shallow()
    output = generate(model, prompt(), **strategy("prompt_lookup"), **CAPTURED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    other = generate(model, prompt(), **strategy("prompt_lookup"), **CAPTURED)
    assert torch.equal(other.sequences, generate(model, prompt()).sequences)
    assert not torch.equal(other.sequences, output.sequences)
    layer = model.model.layers[0].mlp
    layer.up_proj.weight = torch.nn.Parameter(torch.randn_like(layer.up_proj.weight))
    third = generate(model, prompt(), **strategy("prompt_lookup"), **CAPTURED)
    assert torch.equal(third.sequences, generate(model, prompt()).sequences)
    assert compiled(third)["made"]


def test_adapters_of_one_name(shallow: Any) -> None:
    """One that is deleted and another of its name are not mixed up."""
    model = shallow()
    plain = generate(model, prompt()).sequences
    histories = []
    for seed in (2, 3):
        adapt(model, "space", seed=seed)
        want = generate(model, prompt(), **strategy("space"))
        found = generate(model, prompt(), **strategy("space"), **CAPTURED)
        assert torch.equal(found.sequences, plain)
        assert found.spec_stats.num_steps == want.spec_stats.num_steps
        histories.append(found.spec_stats.accepted_histogram)
        model.delete_adapter("one")


def test_threads(shallow: Any) -> None:
    model = adapt(shallow(), "medusa")
    inputs = [prompt(6 + n, seed=n) for n in range(4)]
    plain = [generate(model, ids).sequences for ids in inputs]
    found: list[Any] = [None] * 8

    def run(place: int) -> None:
        name = ("medusa", "prompt_lookup")[place % 2]
        found[place] = generate(model, inputs[place % 4], **strategy(name), **CAPTURED).sequences

    threads = [threading.Thread(target=run, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, plain[place % 4]) for place, one in enumerate(found))


def test_a_model_is_freed(shallow: Any) -> None:
    import gc
    import weakref

    model = adapt(shallow(), "space")
    generate(model, prompt(), **strategy("space"), **CAPTURED)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


# -- what cannot be compiled -------------------------------------------------------------------


def test_a_forward_that_reads_numbers(fresh: Any, caplog: Any) -> None:
    """It cannot be captured: it runs as it is, and one warning says why."""
    model = fresh()
    layer = model.model.layers[1].mlp
    stock = layer.forward
    layer.forward = lambda x: stock(x) if float(x.sum()) < 1e9 else x
    plain = generate(model, prompt()).sequences
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            output = generate(model, prompt(), **strategy("prompt_lookup"), **CAPTURED)
            assert torch.equal(output.sequences, plain)
    warned = [one for one in caplog.records if "run as they are" in one.message]
    assert len(warned) == 1 and "DataDependent" in warned[0].message


def test_a_forward_that_counts_tokens(fresh: Any, caplog: Any) -> None:
    """What it makes of the cache's length would be that of one step; the trial finds it out."""
    model = fresh()
    decoder = model.model
    stock = decoder.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        past = cache_in(kwargs)
        output = stock(*args, **kwargs)
        length = 0 if past is None else past.get_seq_length()
        output.last_hidden_state = output.last_hidden_state * (1 + 0.01 * length)
        return output

    decoder.forward = forward
    with caplog.at_level(logging.WARNING):
        output = generate(model, prompt(), **strategy("prompt_lookup"), **CAPTURED)
    assert compiled(output)["kept"] == 0
    assert any("gives something else" in one.message for one in caplog.records)


def test_hooks_are_not_left_out(fresh: Any, caplog: Any) -> None:
    model, calls = fresh(), []
    model.model.layers[0].register_forward_hook(lambda *args: calls.append(1))
    with caplog.at_level(logging.WARNING):
        output = generate(model, prompt(), **strategy("prompt_lookup"), **CAPTURED)
    assert len(calls) >= output.spec_stats.num_steps
    assert compiled(output)["kept"] == 0 and "have hooks" in caplog.text


def test_pruning_is_refused(fresh: Any) -> None:
    model = adapt(fresh(), "propd")
    with pytest.raises(ValueError, match="prune=True with cache_implementation"):
        generate(model, prompt(), **strategy("propd", prune=True), **CAPTURED)
    plain = generate(model, prompt()).sequences
    output = generate(model, prompt(), **strategy("propd", prune="auto"), **CAPTURED)
    assert torch.equal(output.sequences, plain) and not output.spec_stats.num_pruned_tokens


def test_when_steps_are_compiled(fresh: Any) -> None:
    model = fresh()
    plain = generate(model, prompt()).sequences
    config = CompileConfig(backend="eager")
    for kwargs in (
        {"cache_implementation": STATIC},  # on a CPU only on request
        {"cache_implementation": STATIC, "compile_config": config, "disable_compile": True},
        {"compile_config": config},  # as in Transformers, a static cache is asked for, too
    ):
        output = generate(model, prompt(), **strategy("prompt_lookup"), **kwargs)
        assert torch.equal(output.sequences, plain)
        assert "compiled" not in output.spec_stats.details
    with pytest.raises(ValueError, match="cache_implementation='static' instead"):
        cache = StaticCache(config=model.config, max_cache_len=64)
        generate(model, prompt(), **{CACHE: cache}, **strategy("prompt_lookup"))


def test_a_callers_config_stays(fresh: Any) -> None:
    config = hf_spec.SpecConfig(
        assistant_strategy="prompt_lookup", max_new_tokens=5, do_sample=False, **CAPTURED
    )
    before = copy.deepcopy(config.to_dict())
    for _ in range(2):
        output = fresh().generate(prompt(), generation_config=config, return_dict_in_generate=True)
        assert "compiled" in output.spec_stats.details
    assert config.to_dict() == before


# -- shapes ------------------------------------------------------------------------------------


def test_buckets() -> None:
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 64, 65)] == [0, 1, 2, 4, 4, 8, 64, 128]


def test_buffers_have_few_sizes() -> None:
    source = DynamicCache()
    source.update(torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8), 0)
    keys = source.layers[0].keys.clone()
    cache = pack(source, None, 40, "cpu")
    cache.states.use_buckets()
    assert cache.capacity == BUCKET
    cache.states.reserve(BUCKET + 1)
    assert cache.capacity == 2 * BUCKET
    cache.states.reserve(5 * BUCKET)
    assert cache.capacity == 8 * BUCKET
    assert torch.equal(cache.row(0, 0)[0], keys[0])
