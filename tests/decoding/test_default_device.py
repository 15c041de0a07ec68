"""Nothing is on torch's default device, which need not be the model's.

With "meta" as the default, a tensor that was made without naming a device has no data: what is
computed from it fails, or has none either.
"""

import dataclasses
import sys
from functools import _lru_cache_wrapper
from typing import Any

import pytest
import torch
from adapter_oracle import randomise
from conftest import EOS, Tiny, ragged
from running import needed, one_of_each_kind
from test_compiled import ADAPTERS, CAPTURED, OPTIONS, strategy
from test_compiled import generate as generate_many

from hf_spec.decoding import selfcheck
from hf_spec.methods.registry import methods
from modeling_patches.cache_name import CACHE

#: Fields of adapters' configs under which they compute all that they can.
ALL = {"markov_rank": 4, "draft_vocab_size": 20}
ONE, SEVERAL = ragged((12,)), ragged((12, 5, 9))


def generate(model: Any, inputs: Any, **settings: Any) -> Any:
    """Few tokens: a tensor on the wrong device is found in the first steps."""
    return generate_many(model, inputs, **{"max_new_tokens": 8, **settings})


@pytest.fixture(autouse=True)
def nothing_cached() -> None:
    """Small tensors that calls share are made anew."""
    modules = [module for name, module in sys.modules.items() if name.startswith("hf_spec.")]
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, _lru_cache_wrapper):
                value.cache_clear()


def add_adapter(model: Any, name: str) -> None:
    config = methods()[name].adapter_config
    if name in ADAPTERS and config is not None:
        known = {field.name for field in dataclasses.fields(config)}
        given = {field: value for field, value in ALL.items() if field in known}
        with torch.device("meta"):
            model.add_adapter(config(**{**ADAPTERS[name], **given}), "one")
        randomise(model, config.type_name)


@pytest.mark.parametrize("name", one_of_each_kind())
def test_every_strategy(shallow: Tiny, name: str) -> None:
    model = shallow(layers=2)
    add_adapter(model, name)
    every = {"do_sample": True, "eos_token_id": [EOS, 20, 41], "output_scores": True}
    for inputs in (ONE, SEVERAL):
        found = []
        for device in ("cpu", "meta"):
            torch.manual_seed(3)
            with torch.device(device):
                found.append(generate(model, inputs, **every, **strategy(name)))
        assert torch.equal(found[0].sequences, found[1].sequences)
    options = {**OPTIONS.get(name, {}), "drafting": "auto"}
    with torch.device("meta"):
        spec = {"assistant_strategy": name, "assistant_kwargs": options, **needed(name)}
        ours = generate(model, ONE["input_ids"], **spec)
        ids = torch.cat([ours.sequences, ONE["input_ids"]], dim=1)
        ours = generate(model, ids, **{CACHE: ours[CACHE]}, **strategy(name))
    assert torch.equal(ours.sequences, generate(model, ids).sequences)


def test_compiled_steps(shallow: Tiny) -> None:
    model = shallow()
    add_adapter(model, "medusa")
    want = generate(model, SEVERAL).sequences
    with torch.device("meta"):
        ours = generate(model, SEVERAL, **strategy("medusa"), **CAPTURED)
    assert torch.equal(ours.sequences, want)


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_masks_and_self_check(
    shallow: Tiny, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shallow(architecture, layers=2)
    want = generate(model, SEVERAL).sequences
    monkeypatch.setattr(selfcheck, "VERIFIED", frozenset())
    with torch.device("meta"):
        ours = generate(model, SEVERAL, **strategy("prompt_lookup"))
    assert torch.equal(ours.sequences, want)
    ours[CACHE].batch_repeat_interleave(2)
