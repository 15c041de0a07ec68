"""Decoding methods of others beside a strategy."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import STRATEGIES, Tiny, prompt
from running import drafting, no_forward

import hf_spec

GREEDY = {"max_new_tokens": 12, "do_sample": False}


def own_loop(model: Any, *args: Any, **kwargs: Any) -> Any:
    return type(model)._sample(model, *args, **kwargs)


@pytest.mark.parametrize("own", [own_loop, functools.partial(own_loop)])
def test_other_methods_beside_a_strategy(fresh: Tiny, own: Any) -> None:
    model, spec = fresh(), STRATEGIES["prompt_lookup"]
    calls: list[dict[str, Any]] = [
        spec, {"generation_config": hf_spec.SpecConfig("prompt_lookup", **GREEDY)},
    ]  # fmt: skip
    for call in calls:
        with no_forward(model), pytest.raises(ValueError, match="custom_generate=.*both name a de"):
            model.generate(prompt(), **call, custom_generate=own)
    expected = model.generate(prompt(), **GREEDY)
    model.generation_config.assistant_strategy = "prompt_lookup"
    with no_forward(model), pytest.raises(ValueError, match="prompt_lookup.*assistant_strategy=N"):
        model.generate(prompt(), **GREEDY, custom_generate=own)
    plain = {**GREEDY, "assistant_strategy": None}
    assert torch.equal(model.generate(prompt(), **plain, custom_generate=own), expected)


def test_repositories_beside_a_strategy(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of others than ours, whose code takes a strategy that the call names."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.syspath_prepend(str(tmp_path / "m"))
    (tmp_path / "repo" / "custom_generate").mkdir(parents=True)
    (tmp_path / "repo" / "custom_generate" / "generate.py").write_text(
        "def generate(model, inputs, **kwargs):\n    return inputs\n"
    )
    call = {**GREEDY, "custom_generate": str(tmp_path / "repo"), "trust_remote_code": True}
    assert torch.equal(tiny().generate(prompt(), **call), prompt())
    with pytest.raises(ValueError, match="repo' with assistant_strategy='prompt_lookup': both na"):
        tiny().generate(prompt(), **call, **drafting("prompt_lookup"))
    config = hf_spec.SpecConfig("prompt_lookup", **GREEDY)
    with pytest.raises(ValueError, match="repo' with assistant_strategy='prompt_lookup': both na"):
        tiny().generate(prompt(), **{**call, "generation_config": config})
