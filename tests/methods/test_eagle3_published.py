"""Released EAGLE-3 drafters of every layout, and files that are none."""

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_same
from released import Change, changed, check_refused, put, read, without, write
from running import drafting
from safetensors.torch import load_file, save_file
from test_eagle3 import FIXTURES, base
from tiny_checkpoint import make_tokenizer
from torch import Tensor

from hf_spec.adapters.loading import find_active
from hf_spec.methods.eagle3 import FLAGS
from hf_spec.tools import cli
from hf_spec.tools.hub import check_complete
from hf_spec.tools.transfer import convert, import_adapter, recognized

EMBEDDINGS = "embed_tokens.weight"


def written(folder: Path, name: str, change: Change, file: str = "model.safetensors") -> Path:
    """A checkpoint like that of a fixture."""
    files = read(FIXTURES / name)
    change(*files)
    return write(folder, files, file)


def same(*_: Any) -> None:
    """Leave a checkpoint as it is."""


def in_8_bits(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Matrices in 8-bit floats with scales."""
    for name, weight in list(tensors.items()):
        if weight.ndim == 2 and weight.is_floating_point():
            scale = weight.abs().amax() / 448
            scales = scale.expand(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales.contiguous().float()


def test_8_bit_floats(tmp_path: Path) -> None:
    path = written(tmp_path / "a", "tiny-llama", same)
    _, expected = convert(path, "eagle3")
    _, found = convert(written(tmp_path / "b", "tiny-llama", in_8_bits), "eagle3")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        wanted = expected[name]
        near = {"rtol": 2**-4, "atol": float(wanted.abs().max()) * 2**-9}
        torch.testing.assert_close(tensor.to(wanted), wanted, **near)
    assert found["fc.weight"].dtype == torch.bfloat16
    files = read(tmp_path / "b")
    without("fc.weight_scale_inv")(*files)
    with pytest.raises(ValueError, match="'fc.weight' is of type .*8_e4m3fn and has no scales"):
        convert(write(tmp_path / "c", files), "eagle3")


def as_specforge(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Names of its first version of EAGLE 3.1, and layers counted by outputs."""
    inner = config.pop("transformer_layer_config")
    flags = ("fc_norm", "norm_output", "norm_before_residual")
    kept = {name: config[name] for name in ("draft_vocab_size", *flags)}
    layers = [layer - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]
    config.clear()
    eagle = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    config.update(inner, **kept, eagle_config=eagle, architectures=["LlamaForCausalLMEagle3"])
    for place, name in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
        tensors[f"{name}.weight"] = tensors.pop(f"fc_norm.{place}.weight")
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)


def as_deepspec(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The base's config with fields added; all tokens are drafted, five layers are read."""
    inner = config.pop("transformer_layer_config")
    config.clear()
    config.update(
        inner, architectures=["Qwen3Eagle3Model"], target_layer_ids=[0, 1, 3, 4, 5],
        num_target_layers=8, target_model_name_or_path="Qwen/Qwen3-4B", ttt_length=7,
        step_loss_decay=0.8, draft_num_hidden_layers=1, layer_types=["full_attention"],
    )  # fmt: skip
    embeddings = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    tensors[EMBEDDINGS], tensors["lm_head.weight"] = embeddings, embeddings.flip(0)
    tensors["fc.weight"] = torch.cat([tensors["fc.weight"], tensors["fc.weight"][:, :128]], 1)
    for name in ("d2t", "t2d", *(f"fc_norm.{place}.weight" for place in range(3))):
        tensors.pop(name)


def with_early_stop(fusion: Tensor) -> Tensor:
    return torch.cat([fusion, torch.ones(2, 192).bfloat16()])


def out_of_order(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    ids = (tensors["d2t"] + torch.arange(48)).flip(0)
    tensors["d2t"] = ids - torch.arange(48)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0).contiguous()
    del tensors["t2d"]


def marked(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Tokens by a mask alone, and what training keeps besides."""
    del tensors["d2t"]
    tensors["verifier_norm.weight"] = torch.ones(64)
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(16)


def saved_inside_a_model(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name in [*tensors]:
        tensors[f"model.{name}" if "layer" in name else name] = tensors.pop(name)


#: A fixture, and how it is released.
LAYOUTS: dict[str, tuple[str, Change]] = {
    "speculators": ("tiny-llama", same),
    "P-EAGLE": ("peagle-tiny-llama", same),
    "norm before fc": ("tiny-llama-before-fc", same),
    "SafeAILab": ("tiny-llama-original", same),
    "SpecForge": ("tiny-qwen3-31", as_specforge),
    "no embeddings": ("tiny-llama", without(EMBEDDINGS)),  # the base's, as in most releases
    "early stop": ("tiny-llama-original", put("fc.weight", with_early_stop)),
    "order": ("tiny-llama", out_of_order),
    "mask": ("tiny-llama-original", marked),
    "inside": ("tiny-llama", saved_inside_a_model),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_adapter(tmp_path: Path, layout: str) -> None:
    name, change = LAYOUTS[layout]
    file = "pytorch_model.bin" if layout == "SafeAILab" else "model.safetensors"
    path = written(tmp_path / "drafter", name, change, file)
    assert recognized(str(path.parent)) == ("eagle3", path)
    wanted, expected = convert(FIXTURES / name / "model.safetensors", "eagle3")
    with torch.device("meta"):  # nothing is on torch's default device
        config, tensors = convert(path, "eagle3")
    if layout == "no embeddings":
        assert not config.own_embeddings and wanted.own_embeddings
        config.own_embeddings = True
        del expected[EMBEDDINGS]
    assert config.to_dict() == wanted.to_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], one) for key, one in expected.items())


def test_layers_of_a_config_that_names_none() -> None:
    config, _ = convert(FIXTURES / "tiny-llama-original" / "model.safetensors", "eagle3")
    assert config.layers is None
    config.check_base(base())
    assert config.layers == [2, 4, 5]


def test_deepspec(tmp_path: Path) -> None:
    """Layers are counted by outputs; the decoder is Qwen3's with none of the variants."""
    path = written(tmp_path / "drafter", "tiny-qwen3-31", as_deepspec)
    assert recognized(str(path.parent)) == ("eagle3", path)
    model = copy.deepcopy(base())
    import_adapter(path, "eagle3", model, tmp_path / "adapter")
    model.load_adapter(str(tmp_path / "adapter"))
    adapter = find_active(model, "EAGLE3")
    config, found = adapter.config, adapter.tensors()
    assert config.layers == [1, 2, 4, 5, 6] and config.architecture == "qwen3"
    assert config.own_embeddings and not config.draft_vocab_size and config.logit_softcap is None
    assert not any(getattr(config, name) for name in FLAGS)
    for name, tensor in load_file(path).items():
        assert torch.equal(found[name], tensor.float()), name


def command(*arguments: Any) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_the_command(tmp_path: Path) -> None:
    """Embeddings that are the base's are not stored again."""
    base().save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    change = put(EMBEDDINGS, base().get_input_embeddings().weight.detach().clone())
    path, given = (
        written(tmp_path / "drafter", "tiny-llama", change),
        ("--model", tmp_path / "base"),
    )
    assert not command("import", path.parent, *given, "--output", tmp_path / "adapter")
    check_complete(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert not any("embed_tokens" in name for name in stored)
    assert {one.dtype for one in stored.values()} == {torch.bfloat16, torch.int64}
    loaded = copy.deepcopy(base())
    loaded.load_adapter(str(tmp_path / "adapter"))
    check_same(loaded, drafting("eagle3"), torch.tensor([[5, 9, 7, 5, 9]]))


def test_a_checkpoint_of_no_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"fc.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "empty").mkdir()
    for place, message in (
        (tmp_path, "of no known layout"), (tmp_path / "empty", "has none of"),
        (tmp_path / "no", "there is no file"),
    ):  # fmt: skip
        assert command("import", place, "--model", tmp_path, "--output", tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


inner = partial(changed, "transformer_layer_config")
WRONG: dict[str, tuple[Change, str]] = {
    "no config": (lambda config, _: config.clear(), "there is no config.json"),
    "kind": (changed(speculators_model_type="eagle"), "speculators_model_type='eagle' in config"),
    "no mask token": (changed(speculators_model_type="peagle"), "mask_token_id in config.json"),
    "architecture": (inner(model_type="gpt2"), "model_type='gpt2' in config.*llama, qwen3"),
    "layout": (inner(model_type="gemma4_text"), "read with target_layer_ids, as DeepSpec"),
    "biases": (inner(attention_bias=True), "attention_bias=True in config.json"),
    "size": (inner(hidden_size="64"), "hidden_size in config.json='64'"),
    "huge": (inner(intermediate_size=10**9), "intermediate_size=1000000000"),
    "act": (inner(hidden_act="swoosh"), "hidden_act='swoosh'.*choose one of"),
    "rope": (inner(rope_parameters={"rope_type": "mrope"}), "rope_parameters=.*rope_type, one"),
    "flag": (changed(norm_before_lunch=True), "norm_before_lunch=True in config.json: it is not"),
    "eagle flag": (changed(eagle_config={"use_mtp_layernorm": True}), "use_mtp_layernorm=True"),
    "new eagle flag": (changed(eagle_config={"rotate": 4}), "eagle_config.rotate=4"),
    "inner flag": (inner(use_sliding_window=True), "use_sliding_window=True in config.json"),
    "no object": (changed(eagle_config=[1]), r"eagle_config=\[1\] in config.json: it must be"),
    "scaling": (
        inner(rope_parameters=None, rope_scaling=[2]),
        r"rope_scaling=\[2\]: it must be an object",
    ),
    "theta": (inner(rope_parameters={"rope_type": "default", "rope_theta": "x"}), "rope_theta"),
    "flat head": (put("lm_head.weight", lambda one: one.flatten()), r"shape \(3072,\), expect"),
    "switch": (changed(fc_norm=3), "fc_norm=3: must be True or False"),
    "layers": (changed(eagle_aux_hidden_state_layer_ids=[1, 1]), r"layers=\[1, 1\]: must name"),
    "no head": (without("lm_head.weight"), "no tensor 'lm_head.weight'"),
    "rows": (changed(draft_vocab_size=40), "has 48 rows, but draft_vocab_size=40"),
    "no ids": (lambda _, t: (t.pop("d2t"), t.pop("t2d")), "no tensor 'd2t'"),
    "ids twice": (put("d2t", lambda ids: ids - torch.arange(48)), "'d2t' leads to ids"),
    "twice": (put("midlayer.hidden_norm.weight", torch.ones(64)), "is there twice"),
}  # fmt: skip
#: Of these the base must be known.
UNFIT: dict[str, tuple[Change, str]] = {
    "shape": (put("fc.weight", lambda one: one[:, :-1].clone()), r"'fc.weight' has shape"),
    "mask token": (
        changed(speculators_model_type="peagle", mask_token_id=128),
        "mask_token_id=128: the model has the tokens 0 to 127",
    ),
    "layer": (changed(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), "the model has 8 layers"),
    "numbers": (put("norm.weight", lambda one: one / 0), "'norm.weight' of the checkpoint"),
    "last layer": (
        changed(eagle_aux_hidden_state_layer_ids=[2, 4, 8]),
        r"it reads states \[2, 4, 8\] of LlamaForCausalLM, which has 8 layers. .* after it",
    ),
    "width": (
        lambda *files: (without(EMBEDDINGS)(*files), inner(hidden_size=32)(*files)),
        "hidden_si",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_checkpoints_are_told_before_the_base_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    change, message = WRONG[case]
    path = written(tmp_path / "drafter", "tiny-llama", change)
    given = ("--model", tmp_path / "nowhere", "--output", tmp_path / "out")
    assert command("import", path, "--type", "eagle3", *given) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and str(path) in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", UNFIT)
def test_checkpoints_that_do_not_fit_the_base(tmp_path: Path, case: str) -> None:
    files, (change, message) = read(FIXTURES / "tiny-llama"), UNFIT[case]
    change(*files)
    check_refused(tmp_path, "eagle3", files, base(), message)


def test_rotary_fields_of_before_transformers_5(tmp_path: Path) -> None:
    def older(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        inner = config["transformer_layer_config"]
        del inner["rope_parameters"]
        inner |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}

    config, _ = convert(written(tmp_path / "drafter", "tiny-llama", older), "eagle3")
    expected = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert config.rope_parameters == expected
