"""What calls hold in memory: nothing once they are over, and before no more than they need."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from allocations import allocations
from conftest import PAD, VOCAB, Tiny, prompt, ragged
from processors import Criterion
from recurrent_models import KINDS, shared_recurrent
from running import CAPTURED, as_if, drafting, one_of_each_kind
from test_method_contract import FIRST, adapted, strategy
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StoppingCriteriaList

from hf_spec.modeling_patches.modules import CACHE
from hf_spec.modeling_patches.support import VERIFIED
from hf_spec.threads import memory

GREEDY = {"max_new_tokens": 12, "do_sample": False}
LOOKUP = drafting("prompt_lookup")

#: Bytes that may stay: of output ids, and of small tensors that are made once.
FEW = 6_000
#: Each is worth more than that: a prompt's states of one layer, or its keys.
LONG = (100, 60, 80)


@contextmanager
def without_collector() -> Iterator[None]:
    """Only what nobody refers to is freed, as between two runs of the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check_freed(model: Any, given: dict[str, Any], **settings: Any) -> None:
    """A call, and one that is interrupted, leave nothing; the first of all makes what is kept."""
    for _ in range(2):
        model.generate(**given, **settings)
    with without_collector(), allocations() as allocated:
        model.generate(**given, **settings)
    assert allocated.kept < FEW < allocated.peak
    with without_collector(), allocations() as allocated, pytest.raises(KeyboardInterrupt):
        criteria = StoppingCriteriaList([Criterion(4, KeyboardInterrupt)])
        model.generate(**given, stopping_criteria=criteria, **settings)
    assert allocated.kept < FEW < allocated.peak


@pytest.mark.parametrize("name", one_of_each_kind())
def test_nothing_is_left_of_a_call(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On a GPU, the caches of finished calls would pile up."""
    variant = dict(FIRST)[name]
    model, spec = tiny(), {**strategy(name, variant), "max_new_tokens": 8}
    with adapted(model, name, variant):
        check_freed(model, {"input_ids": prompt(100)}, **spec, do_sample=False)
        as_if(True, monkeypatch)  # a host that reads waits, so that drafts are prefetched
        check_freed(model, ragged(LONG), **spec, do_sample=True)


@pytest.mark.parametrize("name", ["medusa", "eagle3"])
def test_nothing_is_left_of_a_compiled_call(shallow: Tiny, name: str) -> None:
    """One with predictions, one with a cache of its own."""
    model, variant = shallow(layers=1), dict(FIRST)[name]
    with adapted(model, name, variant):
        spec = strategy(name, variant)
        spec["assistant_kwargs"]["max_depth"] = 1  # trees of few sizes, each of which is a graph
        check_freed(model, ragged(LONG), **spec, **GREEDY, **CAPTURED)


def test_nothing_is_left_of_a_call_that_chooses(tiny: Tiny) -> None:
    check_freed(tiny(), ragged(LONG), **GREEDY, assistant_strategy="auto")


@pytest.mark.parametrize("kind", KINDS[::3])
def test_nothing_is_left_of_a_call_of_a_recurrent_model(kind: str) -> None:
    """What drafts runs the layers, too."""
    spec = drafting("layer_skip", skip_attention=[], skip_mlp=[])
    check_freed(shared_recurrent(kind), ragged(LONG), **GREEDY, **spec)


def test_nothing_is_left_of_a_trial(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny(), {"inputs": prompt(8), "max_new_tokens": 2, "do_sample": False, **LOOKUP}
    monkeypatch.setattr("hf_spec.decoding.strategy.VERIFIED", VERIFIED - {"llama"})
    model.generate(**given)
    memory(model).pop("self-checks")
    with without_collector(), allocations() as allocated:
        model.generate(**given)
    assert memory(model).pop("self-checks") and allocated.kept < FEW < allocated.peak


def test_a_returned_cache_is_the_caller_s(tiny: Tiny) -> None:
    """It is freed when the caller drops it, also after further calls."""
    model, ids = tiny(), prompt(60)
    for compiled in ({}, CAPTURED):
        spec = {**LOOKUP, **GREEDY, "return_dict_in_generate": True, **compiled}
        model.generate(ids, **spec)
        with without_collector(), allocations() as allocated:
            out = model.generate(ids, **spec)
            more = torch.cat([out.sequences, prompt(5, seed=3)], 1)
            out = model.generate(more, **spec, **{CACHE: out[CACHE]})
            assert out[CACHE].get_seq_length() == more.shape[1] + 11
            del out
        assert allocated.kept < FEW < allocated.peak


# -- the most that a call holds --------------------------------------------------------------------

#: Tokens of the prompt, and new ones.
TEXT, NEW = 1_536, 16
#: Heads and their dimension: keys and values are most of what a call holds.
HEADS, DIM, HIDDEN, LAYERS = 4, 32, 64, 12
#: Bytes per token that a drafter holds of its own: the states that it reads, twice as they are put
#: together, keys and values, and the mask of 512 rows, which run at once; those of a block drafter,
#: whose context needs no mask, when what the prompt's forward held is gone. One layer of two has a
#: window in ``dflash`` and keeps 576 tokens, those 512 among them; none has in ``dspark``.
_BLOCKS = 4 * 5 * HIDDEN
OWN = {
    "eagle3": 4 * (2 * 3 * HIDDEN + 2 * HEADS * DIM) + 512,
    "mtp": 4 * (2 * HIDDEN + 2 * HEADS * DIM) + 512,
    "dflash": _BLOCKS,
    "dspark": _BLOCKS + 4 * 2 * HEADS * DIM * (TEXT - 576) // TEXT,
    "draft_model": 4 * 3 * 2 * 16,
}


@cache
def deep() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=DIM, eos_token_id=None,
        pad_token_id=PAD, max_position_embeddings=2 * TEXT, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def peak(make: Callable[[], dict[str, Any]], **settings: Any) -> int:
    """Of a call, with its inputs."""
    with without_collector(), allocations() as allocated:
        deep().generate(**make(), max_new_tokens=NEW, do_sample=False, **settings)
    return allocated.peak


plain_peak = cache(peak)


def text() -> dict[str, Any]:
    return {"input_ids": prompt(TEXT)}


def check_peak(make: Callable[[], dict[str, Any]], spec: dict[str, Any], own: int = 0) -> None:
    """At most plain generation's and 5 %, and what the drafter holds.

    Args:
        make: makes the inputs.
        own: bytes of the drafter's, per token of the prompt.
    """
    deep().generate(prompt(8), max_new_tokens=4, do_sample=False, **spec)  # makes what is kept
    plain, ours = plain_peak(make), peak(make, **spec)
    assert plain > TEXT * LAYERS * 2 * HEADS * DIM * 4
    assert ours < 1.05 * plain + own * TEXT


@pytest.fixture
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of a small model are of as many parts as a large one's."""
    monkeypatch.setattr("hf_spec.cache.attention.LARGE", 0)


@pytest.mark.usefixtures("as_if_large")
@pytest.mark.parametrize("name", one_of_each_kind())
def test_the_peak_of_a_call(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    as_if(True, monkeypatch)
    variant = {**dict(FIRST), "layer_skip": "merged"}[name]  # which drafts few tokens
    with adapted(deep(), name, variant):
        check_peak(text, strategy(name, variant), OWN.get(name, 0))


@pytest.mark.usefixtures("as_if_large")
@pytest.mark.parametrize("kind", ["padded", "returned", "filled", "continued"])
def test_the_peak_of_a_call_with_a_cache(kind: str) -> None:
    """A padded batch; a cache that is returned, or is the caller's, empty or not."""

    def make() -> dict[str, Any]:
        if kind == "padded":
            return ragged((TEXT, TEXT - 300))
        given = text()
        if kind == "returned":
            return given | {"return_dict_in_generate": True}
        given[CACHE] = DynamicCache(config=deep().config)
        if kind == "continued":
            with torch.no_grad():
                deep()(given["input_ids"][:, :-40], use_cache=True, **{CACHE: given[CACHE]})
        return given

    check_peak(make, LOOKUP)
