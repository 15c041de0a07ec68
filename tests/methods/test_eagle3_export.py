"""EAGLE-3 adapters as engines read drafters."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_oracle import added
from conftest import Tiny, check_same
from running import drafting
from safetensors.torch import load_file, save_file
from test_eagle3 import FIXTURES, base

import hf_spec
from hf_spec.adapters.loading import find_active
from hf_spec.methods.eagle3 import Eagle3Network
from hf_spec.tools.transfer import convert, export_adapter, import_adapter


def known(config: Any) -> dict[str, Any]:
    """Fields that published checkpoints state."""
    mine = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    recorded = ("base_facts", "base_model_name_or_path", "peft_version", "task_type")
    return {name: value for name, value in mine.items() if name not in recorded}


@pytest.mark.parametrize(
    ("name", "form"),
    [(path.name, "speculators") for path in sorted(FIXTURES.glob("*tiny-*"))]
    + [("tiny-llama-original", "sglang")],
)
def test_there_and_back(tmp_path: Path, name: str, form: str) -> None:
    path = FIXTURES / name / "model.safetensors"
    adapter = import_adapter(path, "eagle3", base(), tmp_path / "adapter")
    written = export_adapter(adapter, form, base(), tmp_path / "drafter")
    assert sorted(file.name for file in written.iterdir()) == ["config.json", "model.safetensors"]
    want, tensors = convert(path, "eagle3")
    want.check_base(base())  # which names the layers where the config does not
    config, found = convert(written / "model.safetensors", "eagle3")
    assert known(config) == known(want)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], one) for key, one in tensors.items())
    stored, given = (load_file(file) for file in (written / "model.safetensors", path))
    assert form == "speculators" or any(key.startswith("midlayer.") for key in stored)
    if "layers.0.mlp.up_proj.weight" in given:  # what speculators itself wrote, but for its notes
        assert stored.keys() == given.keys()
        ours, theirs = (json.loads((one / "config.json").read_text()) for one in
                        (written, FIXTURES / name))  # fmt: skip
        flags = [key for key in theirs if "norm" in key or "layer_ids" in key or "vocab" in key]
        assert len(flags) == 6 and all(ours[key] == theirs[key] for key in flags)
        layer, wanted = (one["transformer_layer_config"] for one in (ours, theirs))
        assert all(wanted.get(key, value) == value for key, value in layer.items())
        ours, theirs = (one["speculators_config"] for one in (ours, theirs))
        assert ours["algorithm"] == theirs["algorithm"]
        given, wanted = (one["proposal_methods"][0] for one in (ours, theirs))
        assert given.keys() == wanted.keys() and ours.keys() == theirs.keys()


def saved(model: Any, folder: Path, **fields: Any) -> Any:
    """A model with an adapter, which the folder has."""
    added(model, hf_spec.Eagle3Config(**fields))
    model.save_pretrained(folder / "adapter")
    return model


def exported(fresh: Tiny, folder: Path, form: str, **fields: Any) -> Path:
    saved(fresh("llama"), folder, **fields)
    return export_adapter(folder / "adapter", form, fresh("llama"), folder / "out")


@pytest.mark.parametrize("own", [False, True])
def test_rows_of_a_matrix_that_the_base_scales(fresh: Tiny, tmp_path: Path, own: bool) -> None:
    """Imported drafters take them as they are, in the file or not; ours as the base's module gives
    them, which goes with the export and which SGLang does not do."""
    model = saved(fresh("gemma3"), tmp_path, layers=[1], draft_vocab_size=20)
    ids, embed = torch.arange(7), model.get_input_embeddings()
    ours = Eagle3Network(model, find_active(model, "EAGLE3"))
    assert torch.equal(ours.embedded(ids), embed(ids))
    written = export_adapter(tmp_path / "adapter", "speculators", fresh("gemma3"), tmp_path / "out")
    file = written / "model.safetensors"
    stored = load_file(file)
    assert torch.equal(stored["embed_tokens.weight"][:7], embed(ids))
    with pytest.raises(ValueError, match="Gemma3ForCausalLM scales or norms its embeddings"):
        export_adapter(tmp_path / "adapter", "sglang", fresh("gemma3"), tmp_path / "sglang")

    stored["embed_tokens.weight"] = embed.weight.detach().clone() * (3 if own else 1)
    save_file(stored, file)
    model = fresh("gemma3")
    model.load_adapter(str(import_adapter(file, "eagle3", model, tmp_path / "again")))
    adapter = find_active(model, "EAGLE3")
    assert adapter.config.own_embeddings == own
    theirs = Eagle3Network(model, adapter)
    torch.testing.assert_close(theirs.embedded(ids), embed.weight[ids] * (3 if own else 1))
    check_same(model, drafting("eagle3"), ids[None, 1:], max_new_tokens=12, do_sample=False)


def test_the_bases_embeddings_go_with_it(fresh: Tiny, tmp_path: Path) -> None:
    """speculators would leave them random; and engines are told of fewer layers than three."""
    written = exported(fresh, tmp_path, "speculators")
    stored = load_file(written / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(stored, fresh("llama").get_input_embeddings().weight)
    config = json.loads((written / "config.json").read_text())
    assert config["num_aux_hidden_states"] == len(config["eagle_aux_hidden_state_layer_ids"]) == 2
    own = exported(fresh, tmp_path / "sglang", "sglang")
    assert "embed_tokens.weight" not in load_file(own / "model.safetensors")


def test_no_model_is_replaced(fresh: Tiny, tmp_path: Path) -> None:
    """An earlier export is."""
    (tmp_path / "out").mkdir()
    config = tmp_path / "out" / "config.json"
    config.write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ValueError, match=r"out' is of \['LlamaForCausalLM'\], which would be repl"):
        exported(fresh, tmp_path, "sglang")
    config.unlink()
    assert exported(fresh, tmp_path, "sglang") == exported(fresh, tmp_path, "sglang")


def test_the_base_has_its_public_name(fresh: Tiny, tmp_path: Path) -> None:
    """Whether the adapter has it, or the model that is given."""
    names = [("org/base", str(tmp_path)), (str(tmp_path), "org/base"), (str(tmp_path), "/other")]
    for number, (recorded, given) in enumerate(names):
        model, folder = fresh("llama"), tmp_path / str(number)
        model.name_or_path = recorded
        saved(model, folder)
        other = fresh("llama")
        other.config.name_or_path = given
        out = export_adapter(folder / "adapter", "speculators", other, folder / "out")
        told = json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]
        assert told["name_or_path"] == (str(tmp_path) if number == 2 else "org/base")


@pytest.mark.parametrize(
    ("form", "fields", "message"),
    [
        ("sglang", {"architecture": "qwen3"}, "architecture='qwen3': SGLang reads only 'llama'"),
        ("sglang", {"num_layers": 2}, "num_layers=2: SGLang reads only 1"),
        ("sglang", {"norm_before_residual": True}, "norm_before_residual=True: SGLang"),
        ("sglang", {"mask_token_id": 3}, "mask_token_id=3: SGLang reads only None"),
        ("sglang", {"layers": [0, 1]}, "no states of the embeddings"),
        ("speculators", {"layers": [1, 3]}, "last layer, 3, before the final norm"),
    ],
)
def test_what_engines_cannot_read(
    fresh: Tiny, tmp_path: Path, form: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        exported(fresh, tmp_path, form, **fields)
    assert not (tmp_path / "out").exists()
