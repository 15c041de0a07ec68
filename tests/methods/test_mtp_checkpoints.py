"""Checkpoints with layers for multi-token prediction: where they are found, and bad ones."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from conftest import check_same, prompt
from released import Files, check_refused, imported
from released_mtp import FAMILIES, add_tensors, checkpoint
from running import drafting, no_forward
from safetensors.torch import load_file, save_file
from test_mtp import FIXTURES, model_of

import hf_spec
from hf_spec.adapters.loading import find_active
from hf_spec.methods import mtp
from hf_spec.methods.mtp import INDEX, SINGLE, mtp_layers

pytestmark = pytest.mark.usefixtures("mtp_as_shipped")

SECOND = "model-00002-of-00002.safetensors"
Tensors = dict[str, torch.Tensor]


def loaded(folder: Path, name: str = "qwen3") -> Any:
    """A copy of the model that is loaded from another folder, and of the checkpoint in this."""
    if not folder.exists():
        shutil.copytree(FIXTURES / name / "checkpoint", folder)
    model = copy.deepcopy(model_of(name))
    model.config.name_or_path = model.name_or_path = str(folder)
    return model


def change(folder: Path, edit: Callable[[Tensors], Any]) -> None:
    """Rewrite the second file, and the index."""
    tensors = load_file(folder / SECOND)
    edit(tensors)
    save_file(tensors, folder / SECOND, metadata={"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    files = {name: file for name, file in index["weight_map"].items() if file != SECOND}
    index["weight_map"] = files | dict.fromkeys(tensors, SECOND)
    (folder / INDEX).write_text(json.dumps(index))


def refused(model: Any) -> str:
    """The error of a call, which runs nothing."""
    with no_forward(model), pytest.raises(ValueError) as error:
        model.generate(prompt(), max_new_tokens=4, do_sample=False, **drafting("mtp"))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_only_the_files_that_hold_them_are_opened(tmp_path: Path) -> None:
    model = loaded(tmp_path / "a")
    (tmp_path / "a/model-00001-of-00002.safetensors").unlink()
    layers = mtp_layers(model)
    assert mtp_layers(model) is layers  # read once
    assert not any(parameter.requires_grad for parameter in layers.parameters())
    model.to(torch.bfloat16)
    assert {one.dtype for one in mtp_layers(model).parameters()} == {torch.bfloat16}


def one_file(folder: Path) -> None:
    """Put all tensors into one file, without an index."""
    tensors: Tensors = {}
    for file in folder.glob("model-*"):
        tensors |= load_file(file)
        file.unlink()
    (folder / INDEX).unlink()
    save_file(tensors, folder / SINGLE)


def test_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model's revision, and nothing is asked of the Hub."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--org--tiny/snapshots" / commit
    model = loaded(snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model.config.name_or_path = "org/tiny"
    model.config._commit_hash = commit
    ask: Any = mtp.Origin._on_hub

    def only_local(origin: Any, name: str, asks: bool) -> Any:
        assert not asks
        return ask(origin, name, asks)

    monkeypatch.setattr(mtp.Origin, "_on_hub", only_local)
    assert len(mtp_layers(model).layers) == 1
    one_file(snapshot)
    model.to(torch.bfloat16)
    assert len(mtp_layers(model).layers) == 1


def test_copies_of_the_embeddings_are_not_read(tmp_path: Path) -> None:
    model = loaded(tmp_path / "a", "deepseek_v3")

    def add(tensors: Tensors) -> None:
        for name in ("embed_tokens", "shared_head.head"):
            tensors[f"model.layers.1.{name}.weight"] = torch.full((64, 32), torch.nan)

    change(tmp_path / "a", add)
    assert len(mtp_layers(model).layers) == 1


def in_8_bits(tensors: Tensors) -> None:
    """Store the matrices of the layers as DeepSeek-V3 is published."""
    for name, weight in list(tensors.items()):
        if weight.ndim == 2 and "norm" not in name:
            scale = weight.abs().max() / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)


def test_8_bit_floats(tmp_path: Path) -> None:
    model = loaded(tmp_path / "a", "deepseek_v3")
    expected = mtp_layers(model_of("deepseek_v3")).state_dict()
    change(tmp_path / "a", in_8_bits)
    found = mtp_layers(model).state_dict()
    changed = 0
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, expected[name], rtol=2**-4, atol=2e-3)
            changed += not torch.equal(tensor, expected[name])
    assert changed > 5


def test_models_without_such_layers(tmp_path: Path) -> None:
    model = copy.deepcopy(model_of("qwen3"))
    model.config.name_or_path = model.name_or_path = ""
    assert "Qwen3ForCausalLM was not loaded from a checkpoint" in refused(model)
    model = loaded(tmp_path / "a")
    change(tmp_path / "a", lambda tensors: [tensors.pop(name) for name in [*tensors][1:]])
    change(tmp_path / "a", lambda tensors: tensors.update(odd=tensors.pop([*tensors][0])))
    assert f"Qwen3ForCausalLM, '{tmp_path}/a', has no layers for multi-token" in refused(model)


def test_types_that_are_not_supported(tmp_path: Path) -> None:
    model: Any = copy.deepcopy(architectures.build("gpt2"))
    model.save_pretrained(tmp_path)
    add_tensors(model, tmp_path, {"mtp.fc.weight": torch.zeros(32, 64)})
    assert "GPT2LMHeadModel: its decoder layers (GPT2Block) do not have" in refused(model)


def test_layers_that_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tried before a call begins, and are not kept."""
    model = copy.deepcopy(model_of("qwen3"))
    forward = type(model.model.layers[0]).forward

    def needs_more(*args: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        raise TypeError("missing 1 required positional argument: 'alibi'")

    monkeypatch.setattr(type(model.model.layers[0]), "forward", needs_more)
    with pytest.raises(ValueError, match="Qwen3DecoderLayer does not run .* argument: 'alibi'"):
        mtp_layers(model)
    monkeypatch.setattr(type(model.model.layers[0]), "forward", forward)
    assert len(mtp_layers(model).layers) == 1


FC = "mtp.fc.weight"
EIGHT_BITS = {FC: torch.zeros(64, 128).to(torch.float8_e4m3fn)}
#: What is wrong: tensors that are put into the file, or taken out of it, or the folder.
BAD: list[tuple[dict[str, torch.Tensor | None] | Callable[[Path], Any], str]] = [
    ({"mtp.linear.weight": torch.zeros(64, 128), FC: None},
     "under names that are known, but 'mtp.layers.0."),
    ({"mtp.layers.0.mlp.up_proj.weight": None}, "no tensor '0.mtp_block.mlp.up_proj.weight'"),
    ({"mtp.gate.weight": torch.zeros(2)}, "unknown tensor 'mtp.gate.weight'"),
    ({"mtp.layers.0.mlp.up_proj.bias": torch.zeros(2)},
     "unknown tensor 'mtp.layers.0.mlp.up_proj.bias'"),
    ({"mtp.norm.weight": torch.zeros(32)}, "'mtp.norm.weight' has shape (32,), expected (64,)"),
    (EIGHT_BITS, "'mtp.fc.weight' is stored as F8_E4M3; layers for multi-token prediction are read "
     "from BF16, F16, F32, F64, and F8_E4M3 with scales ('mtp.fc.weight_scale_inv')"),
    ({**EIGHT_BITS, f"{FC}_scale_inv": torch.ones(2, 1)}, f"'{FC}_scale_inv' has shape (2, 1)"),
    ({FC: torch.zeros(64, 128).to(torch.int8)},
     "'mtp.fc.weight' is stored as I8; layers for multi-token prediction are read from BF16"),
    (lambda folder: (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-100]),
     f"{SECOND}' is no safetensors file, or was cut off"),
    (lambda folder: (folder / SECOND).unlink(), f"has no '{SECOND}', which {INDEX} names"),
    (lambda folder: (folder / INDEX).write_text("{}"), f"{INDEX}' has no weight_map"),
    (lambda folder: (folder / INDEX).write_text("[1"), f"{INDEX}' is not JSON"),
    (lambda folder: (folder / INDEX).write_text(
        (folder / INDEX).read_text().replace(SECOND, f"../{SECOND}")),
     f"names '../{SECOND}', which is no file beside it"),
    (lambda folder: (folder / INDEX).rename(folder / "pytorch_model.bin.index.json"),
     "safetensors only, never from a pickle"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), BAD)
def test_bad_checkpoints(tmp_path: Path, damage: Any, message: str) -> None:
    def edit(tensors: Tensors) -> None:
        for name, tensor in damage.items():
            tensors.pop(name, None)
            tensors.update({} if tensor is None else {name: tensor})

    model = loaded(tmp_path / "a")
    damage(tmp_path / "a") if callable(damage) else change(tmp_path / "a", edit)
    found = refused(model)
    assert message in found and str(tmp_path / "a") in found
    assert refused(model) == found  # nothing half-read is kept


def test_experts_of_another_number(tmp_path: Path) -> None:
    model = loaded(tmp_path / "a", "glm4_moe_2")
    name = "model.layers.2.mlp.experts.3.down_proj.weight"
    change(tmp_path / "a", lambda tensors: tensors.pop(name))
    assert "'1.mtp_block.mlp.experts.down_proj' has shape (3, 32, 8)" in refused(model)


# -- families ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
def test_families(tmp_path: Path, model_type: str) -> None:
    """Random layers under their released names, experts one by one: read, and they draft."""
    model, made = checkpoint(model_type, tmp_path)
    for name, tensor in mtp_layers(model).layers.state_dict().items():
        assert torch.equal(tensor, made.layers.state_dict()[name]), name
    ids = prompt(9)
    check_same(model, drafting("mtp"), ids, max_new_tokens=6, do_sample=False)
    assert hf_spec.last_stats(model).num_drafted_tokens > 0


def test_a_layer_with_the_models_norm(tmp_path: Path) -> None:
    """Another norm of the model is the layer's, too."""
    model, _ = checkpoint("ernie4_5_moe", tmp_path)
    mtp_layers(model)
    state = model.state_dict()
    model.load_state_dict(state | {"model.norm.weight": 2 * state["model.norm.weight"]})
    assert torch.equal(mtp_layers(model).layers[0].post_norm.weight, model.model.norm.weight)


# -- fine-tuned by others ------------------------------------------------------------------------


def speculators(own: Tensors, **fields: Any) -> Files:
    """Layers in speculators' format, every number twice as large."""
    names = {
        "eh_proj": "input_proj", "enorm": "token_layernorm", "hnorm": "hidden_layernorm",
        "post_norm": "final_layernorm",
    }  # fmt: skip
    tensors = {"verifier_lm_head.weight": torch.ones(2, 2)}
    for name, tensor in own.items():
        layer, part, rest = name.split(".", 2)
        part = f"{names[part]}." if part in names else ""
        tensors[f"mtp_layers.{layer}.{part}{rest}"] = tensor * 2
    return {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1, **fields}, tensors


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next"])  # dense, with experts
def test_layers_that_speculators_has_trained(tmp_path: Path, name: str) -> None:
    """They become an adapter; the checkpoint's own are not needed."""
    own = mtp_layers(loaded(tmp_path / "own", name)).layers.state_dict()
    base = copy.deepcopy(model_of(name))
    base.config.name_or_path = base.name_or_path = ""
    model = imported(tmp_path, "mtp", speculators(own), base)
    found = find_active(model, "MTP").layers.state_dict()
    assert found.keys() == own.keys()
    assert all(torch.equal(found[key], 2 * one) for key, one in own.items())
    greedy: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    check_same(model, drafting("mtp"), prompt(), **greedy)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "does not say speculators_model_type='mtp'"),
        ({"num_nextn_predict_layers": 2}, "layers=2, its tensors are of layers 0"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers in config.json='1'"),
    ],
)
def test_what_is_no_such_layer(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    model = loaded(tmp_path / "own")
    files = speculators(mtp_layers(model).layers.state_dict(), **fields)
    check_refused(tmp_path, "mtp", files, model, message)
