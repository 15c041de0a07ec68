"""What calls hold in memory: nothing once they are over, and before no more than they need."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from allocations import allocations
from conftest import Tiny, prompt, ragged
from recurrent_models import KINDS, shared_recurrent
from running import CAPTURED, as_if, drafting
from test_method_contract import FIRST, adapted, strategy
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_spec.core.memory import memory
from modeling_patches.cache_name import CACHE
from modeling_patches.support import VERIFIED

#: Bytes that may stay: of output ids, and of small tensors that are made once.
FEW = 6_000
#: Each is worth more than that: a prompt's states of one layer, or its keys.
LONG = (100, 60, 80)


class Fails(StoppingCriteria):
    """Interrupts a call after some tokens."""

    def __init__(self, tokens: int = 4):
        self.left = tokens

    def __call__(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)


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
        criteria = StoppingCriteriaList([Fails()])
        model.generate(**given, stopping_criteria=criteria, **settings)
    assert allocated.kept < FEW < allocated.peak


@pytest.mark.parametrize(("name", "variant"), FIRST, ids=[name for name, _ in FIRST])
def test_nothing_is_left_of_a_call(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str, variant: str
) -> None:
    """On a GPU, the caches of finished calls would pile up."""
    model, spec = tiny(), {**strategy(name, variant), "max_new_tokens": 12}
    with adapted(model, name, variant):
        check_freed(model, {"input_ids": prompt(100)}, **spec, do_sample=False)
        as_if(True, monkeypatch)  # a host that reads waits, so that drafts are prefetched
        check_freed(model, ragged(LONG), **spec, do_sample=True)
        spec["assistant_kwargs"].pop("prune", None)  # compiled steps cannot
        check_freed(model, ragged(LONG), **spec, do_sample=False, **CAPTURED)


def test_nothing_is_left_of_a_call_that_chooses(tiny: Tiny) -> None:
    spec = {"assistant_strategy": "auto", "max_new_tokens": 12, "do_sample": False}
    check_freed(tiny(), ragged(LONG), **spec)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_a_call_of_a_recurrent_model(kind: str) -> None:
    model, same = shared_recurrent(kind), {"skip_attention": [], "skip_mlp": []}
    for spec in (drafting("prompt_lookup"), drafting("layer_skip", **same)):
        check_freed(model, ragged(LONG), max_new_tokens=12, do_sample=False, **spec)


def test_nothing_is_left_of_a_trial(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny(), {"inputs": prompt(8), "max_new_tokens": 2, "do_sample": False}
    monkeypatch.setattr("hf_spec.decoding.selfcheck.VERIFIED", VERIFIED - {"llama"})
    model.generate(**given, **drafting("prompt_lookup"))
    memory(model).pop("self-checks")
    with without_collector(), allocations() as allocated:
        model.generate(**given, **drafting("prompt_lookup"))
    assert memory(model).pop("self-checks") and allocated.kept < FEW < allocated.peak


def test_a_returned_cache_is_the_caller_s(tiny: Tiny) -> None:
    """It is freed when the caller drops it, also after further calls."""
    model, ids = tiny(), prompt(60)
    settings = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    for compiled in ({}, CAPTURED):
        spec = {**drafting("prompt_lookup"), **settings, **compiled}
        model.generate(ids, **spec)
        with without_collector(), allocations() as allocated:
            out = model.generate(ids, **spec)
            more = torch.cat([out.sequences, prompt(5, seed=3)], 1)
            out = model.generate(more, **spec, **{CACHE: out[CACHE]})
            assert out[CACHE].get_seq_length() == more.shape[1] + 11
            del out
        assert allocated.kept < FEW < allocated.peak
