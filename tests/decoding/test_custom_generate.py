"""``custom_generate=hf_spec.generate``, and decoding methods of others beside a strategy."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import STRATEGIES, Tiny, check_same, prompt, ragged
from running import drafting, no_forward
from test_generate import Puts
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import utils

import hf_spec

GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers as it is where hf_spec's generation mode is not registered."""
    for owner, name in (
        (GenerationMixin, "generate"), (GenerationMixin, "_validate_generation_mode"),
        (GenerationMixin, "load_custom_generate"), (GenerationConfig, "get_generation_mode"),
        (GenerationConfig, "__init__"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, vars(owner)[name].__wrapped__)
    monkeypatch.delattr(GenerationConfig, "assistant_strategy")
    monkeypatch.delattr(GenerationConfig, "assistant_kwargs")
    monkeypatch.delattr(GenerationMixin, "_hf_spec_decode")
    modes = {**utils.GENERATION_MODES_MAPPING}
    del modes["hf_spec_decode"]
    monkeypatch.setattr(utils, "GENERATION_MODES_MAPPING", modes)


CALLS: dict[str, dict[str, Any]] = {
    "auto": {},
    "by name": {"assistant_strategy": "prompt_lookup"},
    "options": {"assistant_strategy": "prompt_lookup", "assistant_kwargs": {"max_ngram": 2}},
    "config": {"generation_config": hf_spec.SpecConfig("prompt_lookup", **GREEDY)},
    "sampled": {"do_sample": True, "assistant_strategy": "prompt_lookup"},
    "static": {"cache_implementation": "static"},
    "dictionary": {"return_dict_in_generate": True, "output_scores": True},
}


def chosen(call: dict[str, Any]) -> str:
    """The strategy: for ``auto``, the layers that the tests' models bring along."""
    return "prompt_lookup" if {"assistant_strategy", "generation_config"} & {*call} else "mtp"


def check(model: Any, call: dict[str, Any]) -> None:
    own = {name: value for name, value in call.items() if not name.startswith("assistant")}
    inputs = {"input_ids": prompt()} if call.get("do_sample") else ragged()
    torch.manual_seed(0)
    expected = model.generate(**{**GREEDY, **own, "generation_config": None}, **inputs)
    torch.manual_seed(0)
    settings = own if "generation_config" in own else {**GREEDY, **call}
    found = model.generate(**settings, **inputs, custom_generate=hf_spec.generate)
    sequences = [getattr(one, "sequences", one) for one in (expected, found)]
    assert torch.equal(*sequences)
    assert type(found).__name__ == ("Tensor" if found is sequences[1] else "SpecGenerateOutput")


@pytest.mark.parametrize("call", CALLS)
def test_called_with_a_model(tiny: Tiny, decoded: list[str], call: str) -> None:
    """``hf_spec.generate(model, ...)``, as ``model.generate`` is called."""
    inputs = {"input_ids": prompt()} if CALLS[call].get("do_sample") else ragged()
    settings = CALLS[call] if "generation_config" in CALLS[call] else {**GREEDY, **CALLS[call]}
    torch.manual_seed(0)
    expected = tiny().generate(**settings, **inputs, custom_generate=hf_spec.generate)
    torch.manual_seed(0)
    found = hf_spec.generate(tiny(), **settings, **inputs)
    assert type(found) is type(expected) and decoded == [chosen(CALLS[call])] * 2
    assert torch.equal(getattr(found, "sequences", found), getattr(expected, "sequences", expected))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.usefixtures("unregistered")
def test_without_any_registration(tiny: Tiny, decoded: list[str], call: str) -> None:
    model = tiny()
    with pytest.raises(ValueError, match="assistant_strategy"):
        model.generate(prompt(), **GREEDY, assistant_strategy="prompt_lookup")
    check(model, CALLS[call])
    assert decoded == [chosen(CALLS[call])]
    with pytest.raises(ValueError, match="'max_ngra' .did you mean 'max_ngram'"):
        model.generate(
            prompt(), **GREEDY, custom_generate=hf_spec.generate, assistant_kwargs={"max_ngra": 2},
            assistant_strategy="prompt_lookup",
        )  # fmt: skip
    with pytest.raises(ValueError, match="num_beams=2.*beam search keeps"):
        model.generate(prompt(), **GREEDY, custom_generate=hf_spec.generate, num_beams=2)


def test_as_by_the_name_of_a_strategy(tiny: Tiny, decoded: list[str]) -> None:
    """With arguments that Transformers keeps from callables."""
    model, streamer = tiny(), Puts()
    for call in ("auto", "by name"):
        check(model, CALLS[call])
    given = {"streamer": streamer, "assistant_model": model}
    check_streamed(model, streamer, custom_generate=hf_spec.generate, **given)
    assert decoded == ["mtp", "prompt_lookup", "draft_model"]


def check_streamed(model: Any, ours: Puts, **call: Any) -> None:
    """The call gives, and its streamer gets, what they do in plain generation."""
    plain = Puts()
    expected = model.generate(prompt(), **GREEDY, streamer=plain)
    assert torch.equal(model.generate(prompt(), **GREEDY, **call), expected)
    assert ours.calls == plain.calls


@pytest.mark.parametrize("registered", [True, False])
def test_arguments_that_are_bound(
    tiny: Tiny, decoded: list[str], registered: bool, request: pytest.FixtureRequest
) -> None:
    """Also with no registration, where an assistant and a streamer get there in no other way."""
    model, streamer = tiny(), Puts()
    if not registered:
        request.getfixturevalue("unregistered")
    bound = functools.partial(
        hf_spec.generate, streamer=streamer, assistant_model=model,
        assistant_strategy="draft_model", assistant_kwargs={"drafting": "always"},
    )  # fmt: skip
    check_streamed(model, streamer, custom_generate=bound)
    assert decoded == ["draft_model"]

    def own(model: Any, *args: Any, **kwargs: Any) -> Any:
        return hf_spec.generate(model, *args, assistant_strategy="prompt_lookup", **kwargs)

    check_same(model, {"custom_generate": own}, prompt(), **GREEDY)
    assert decoded == ["draft_model", "prompt_lookup"]


@pytest.mark.usefixtures("unregistered")
def test_ranks_that_share_weights_wait_for_each_other(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in ``generate``, which keeps ``synced_gpus`` from callables, its default included."""
    asked: list[bool] = []

    def unfinished(self: Any, finished: bool, synced_gpus: bool, device: Any) -> bool:
        asked.append(synced_gpus)
        return not finished

    monkeypatch.setattr(GenerationMixin, "_has_unfinished_sequences", unfinished)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *group: 2)
    call = {**GREEDY, **CALLS["by name"], "custom_generate": hf_spec.generate}
    for shared in (False, True):
        monkeypatch.setattr(utils, "is_fsdp_managed_module", lambda model, value=shared: value)
        asked.clear()
        tiny().generate(prompt(), **call)
        assert {*asked} == {shared}
    with pytest.raises(ValueError, match="synced_gpus=True.*Choose a strategy whose drafts run no"):
        tiny().generate(prompt(), **{**call, "assistant_strategy": "mtp"})


def own_loop(model: Any, *args: Any, **kwargs: Any) -> Any:
    return type(model)._sample(model, *args, **kwargs)


@pytest.mark.parametrize("own", [own_loop, functools.partial(own_loop)])
def test_other_methods_beside_a_strategy(fresh: Tiny, own: Any) -> None:
    model, spec = fresh(), STRATEGIES["prompt_lookup"]
    config = hf_spec.SpecConfig("prompt_lookup", **GREEDY)
    for call in (spec, {"generation_config": config}):
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
    config = hf_spec.SpecConfig("prompt_lookup", **GREEDY)
    for named in (drafting("prompt_lookup"), {"generation_config": config}):
        with pytest.raises(ValueError, match="repo' with assistant_strategy='prompt_lookup': both"):
            tiny().generate(prompt(), **call, **named)
