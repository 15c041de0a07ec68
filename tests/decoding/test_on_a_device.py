"""Calls on an emulated device: no tensor is made elsewhere, and the host waits once per step, to
read what was accepted. What else it waits for stands below, with the reason."""

import copy
import os
from itertools import product
from typing import Any

import pytest
import torch
from architectures import assistant_for, base_of
from conftest import ARCHITECTURES, EOS, prompt, ragged
from covering import EVERY_CASE, covering
from emulated_device import DEVICE, EmulatedDevice, emulated
from recurrent_models import recurrent
from replay import RECORDED, Rerun
from running import LAYERS, drafting, family, without_pruning
from test_compiled import KINDS
from test_method_contract import CASES, RUNS, adapted, strategy

import hf_spec
from hf_spec.decoding.step import Steps
from hf_spec.methods.mtp import mtp_layers
from hf_spec.target import captures

NEW = 14
TRANSFER = "core/verify to_host: read"
#: Waits of a call's first step, and of the first with predictions, which have to prepare something.
FIRST = {
    "target/hidden_states shapes_logits: allclose": "once per model: what logits are of",
    "predict/markov check_tokens: _local_scalar_dense": "once per adapter: which tokens",
    "cache/tree_cache take_over: read": "the padding of the assistant's prompt",
    "methods/draft_model _prompt: _local_scalar_dense": "Transformers' own, in a prompt",
    "methods/draft_model _prompt: copied with a wait": "Transformers' own, in a prompt",
}  # fmt: skip
#: Further waits of a step: how often at most, and why.
LATER = {
    "core/tree unpacked: read": (1, "the step's trees, which recorded code grows ahead"),
    "core/pruning keep_likely: read": (1, "the deeper layers' number of nodes"),
    "draft/lookup _appended: read": (1, "looked-up tokens may be equal to drafted ones"),
    "methods/propd _count: read": (1, "in one of 16 steps"),
    "methods/layer_skip _chain: read": (
        8, "the last token's probability decides whether there is another forward (algorithm 3)"
    ),
    "methods/layer_skip goes_on: read": (8, "the same, of trees"),
    "decoding/sequences _ask: read": (NEW, "criteria decide column by column"),
}  # fmt: skip
#: What each step of a call waited for.
Waits = dict[str, int]


def steps_of(monkeypatch: pytest.MonkeyPatch, device: EmulatedDevice) -> list[Waits]:
    """The steps to come."""
    steps: list[Waits] = []
    take = Steps.take

    def taken(self: Steps) -> None:
        device.waits.clear()
        take(self)
        steps.append(dict(device.waits))

    monkeypatch.setattr(Steps, "take", taken)
    return steps


def generate(
    monkeypatch: pytest.MonkeyPatch, model: Any, inputs: dict[str, Any], **settings: Any
) -> tuple[torch.Tensor, list[Waits]]:
    """Tokens of a call on the device, and its steps."""
    with monkeypatch.context() as patch, emulated(patch) as device:
        there = {name: values.to(DEVICE) for name, values in inputs.items()}
        if "assistant_model" in settings:  # which tests share
            settings["assistant_model"] = copy.deepcopy(settings["assistant_model"]).to(DEVICE)
        steps = steps_of(patch, device)
        model.to(DEVICE)
        if settings.get("assistant_strategy") == "mtp":
            mtp_layers(model)  # layers without data draw numbers where the device is emulated
        torch.manual_seed(3)
        output = model.generate(**there, **settings)
        return output.cpu(), steps


def check(steps: list[Waits]) -> None:
    assert len(steps) > 2
    for number, waits in enumerate(steps):
        assert waits.pop(TRANSFER) == 1, (number, waits)
        for place, count in waits.items():
            if number < 2 and place in FIRST:
                continue
            assert place in LATER and count <= LATER[place][0], (number, place, count)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.7, "top_k": 9},
    "processed": {"repetition_penalty": 1.3, "min_new_tokens": 9},
    "typical": {"do_sample": True, "temperature": 1.7, "top_k": 9, "acceptance": "typical"},
}


def settings_of(name: str, variant: str, setting: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of plain generation, and those of the strategy."""
    settings = {"do_sample": False, "max_new_tokens": NEW, **SETTINGS[setting]}
    spec = strategy(name, variant)
    if "acceptance" in settings:
        spec["assistant_kwargs"]["acceptance"] = settings.pop("acceptance")
    return settings, spec


#: Variants that other functions draft for.
OWN_CODE = ("online", "dspine", "xpress", "lilicorr", "merged", "straightforward", "looked up")


@pytest.mark.parametrize(
    ("name", "variant", "setting", "batch"),
    covering(
        (
            (*case, *rest)
            for case in CASES for rest in product(("greedy", "sampled", "processed"), (1, 3))
        ),
        lambda name, variant, setting, batch: [
            (name, batch), (family(name), setting), (name == "medusa", setting, batch),
            variant in OWN_CODE and (name, variant),
        ],
    )
    + [  # other rules
        ("medusa", "adaptive", "typical", 3), ("layer_skip", "sampled", "sampled", 3),
        ("space", "rejection", "sampled", 3),
    ],
)  # fmt: skip
def test_every_strategy(
    shallow: Any, monkeypatch: pytest.MonkeyPatch, name: str, variant: str, setting: str, batch: int
) -> None:
    model = shallow(layers=LAYERS.get(name, 1))
    inputs = ragged() if batch > 1 else {"input_ids": prompt()}
    settings, spec = settings_of(name, variant, setting)
    torch.manual_seed(3)
    plain = model.generate(**inputs, **settings)
    with adapted(model, name, variant):
        found, steps = generate(monkeypatch, model, inputs, **settings, **spec)
        check(steps)
    if batch == 1 or not settings["do_sample"]:  # several sequences draw other numbers
        assert torch.equal(found, plain)


@pytest.mark.parametrize(
    ("name", "variant", "setting"),
    covering(
        [
            *((*case, setting) for case in CASES for setting in ("greedy", "sampled")),
            ("medusa", "adaptive", "typical"),
        ],
        lambda name, variant, setting: [
            name, (family(name), setting), setting, variant in OWN_CODE and (name, variant),
        ],
    ),
)  # fmt: skip
def test_recorded_steps(
    shallow: Any, monkeypatch: pytest.MonkeyPatch, name: str, variant: str, setting: str
) -> None:
    """What is to be recorded neither waits for the device nor meets tensors elsewhere, or it would
    be refused."""
    monkeypatch.setitem(captures.RECORDERS, DEVICE.type, Rerun)
    model = shallow(layers=LAYERS.get(name, 1))
    settings, spec = settings_of(name, variant, setting)
    plain = model.generate(**ragged(), **{**settings, "do_sample": False})
    with adapted(model, name, variant):
        given = {**settings, **without_pruning(spec), **RECORDED}
        found, _ = generate(monkeypatch, model, ragged(), **given)
    stats = hf_spec.last_stats(model)
    assert stats is not None and stats.details["compiled"]["runs"]
    assert not stats.details["compiled"]["refused"]
    assert torch.equal(found, plain) or settings["do_sample"]


@pytest.mark.parametrize("name", ["prompt_lookup", "layer_skip"])
def test_nothing_but_the_transfer(shallow: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Where the host decides nothing in the middle of a step: the exit is fixed, here."""
    spec = strategy(name, next(iter(RUNS[name].options)))
    settings = {"max_new_tokens": NEW, "do_sample": False}
    _, steps = generate(monkeypatch, shallow(layers=2), ragged(), **settings, **spec)
    assert all(waits == {TRANSFER: 1} for waits in steps)


def test_an_assistant_with_the_models_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = copy.deepcopy(base_of("shared")), {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**ragged(), **settings)
    spec = {**drafting("draft_model"), "assistant_model": assistant_for("shared", ordered=True)}
    found, steps = generate(monkeypatch, model, ragged(), **settings, **spec)
    assert torch.equal(found, plain)
    check(steps)


def never(input_ids: Any, scores: Any, **_: Any) -> Any:
    return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Characters:
    """A tokenizer of single characters, for stop strings."""

    get_vocab = staticmethod(lambda: {chr(48 + token): token for token in range(61)})
    convert_tokens_to_string = staticmethod("".join)
    _convert_id_to_token = staticmethod(lambda token: chr(48 + token))

    def __call__(self, text: str, **_: Any) -> Any:
        return {"input_ids": [ord(one) - 48 for one in text]}


@pytest.mark.parametrize("name", ["prompt_lookup", "medusa", "eagle3", "draft_model"])
def test_sequences_that_end(shallow: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """At different tokens, by end tokens, stop strings and other criteria."""
    model, variant = shallow(layers=2), next(iter(RUNS[name].options))
    free = model.generate(**ragged(), max_new_tokens=NEW, do_sample=False)[:, 12:]
    eos, text = [EOS, int(free[0, 5])], "".join(chr(48 + int(token)) for token in free[1, 7:10])
    settings = {"eos_token_id": eos, "stop_strings": [text], "tokenizer": Characters()}
    settings |= {"max_new_tokens": NEW, "do_sample": False, "stopping_criteria": [never, never]}
    plain = model.generate(**ragged(), **settings)
    assert len({int((row != 0).sum()) for row in plain[:, 12:]}) > 1
    with adapted(model, name, variant):
        given = {**settings, **strategy(name, variant)}
        found, steps = generate(monkeypatch, model, ragged(), **given)
    assert torch.equal(found, plain)
    check(steps)


#: Waits in Transformers' own code of a model's attention.
OWN = {"falcon": "target/target forward: copied with a wait"}
ATTENTION = [*ARCHITECTURES] if os.environ.get(EVERY_CASE) else ["falcon", "gpt2", *KINDS]


@pytest.mark.parametrize("architecture", [*ATTENTION, "qwen3_5_text", "jamba", "lfm3"])
def test_every_architecture(fresh: Any, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    model = fresh(architecture) if architecture in ARCHITECTURES else recurrent(architecture)
    settings = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(**ragged(), **settings)
    spec = drafting("prompt_lookup")
    found, steps = generate(monkeypatch, model, ragged(), **settings, **spec)
    assert torch.equal(found, plain)
    for waits in steps:
        waits.pop(OWN.get(architecture, ""), None)
    check(steps)


def test_a_tensor_elsewhere_and_a_wait_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(monkeypatch) as device:
        there = torch.arange(4, device=DEVICE)
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.arange(4)
        assert there.device == DEVICE and not device.waits
        for wait in (
            lambda: there.tolist(), lambda: int(there[0]), lambda: bool(there.any()),
            lambda: there.nonzero(), lambda: there[there > 1], lambda: there.cpu(),
            lambda: torch.tensor([1], device=DEVICE), lambda: torch.zeros(4).copy_(there),
        ):  # fmt: skip
            wait()
            assert sum(device.waits.values()) == 1, device.waits
            device.waits.clear()
        assert there.add_(1) is there and there[1:].mul_(2).shape == (3,)
        mine = torch.zeros(4).to(DEVICE, non_blocking=True).add_(there)
        assert mine.local.tolist() == [1, 4, 6, 8]
        assert not device.waits
