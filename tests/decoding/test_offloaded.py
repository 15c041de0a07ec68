"""Models whose weights accelerate brings to the device that computes, module by module."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tiny, ragged
from running import one_of_each_kind
from test_compiled import CAPTURED, adapt, compiled, generate, strategy
from transformers import AutoModelForCausalLM

from hf_spec.adapters.loading import find_active
from hf_spec.methods.registry import methods
from hf_spec.modeling_patches.weights import device_of, loaded, placement

accelerate = pytest.importorskip("accelerate")


def offloaded_parts(model: Any) -> list[str]:
    return [name for name, one in model.named_parameters() if one.is_meta]


def in_memory(model: Any, folder: Path) -> Any:
    return accelerate.cpu_offload(model, execution_device="cpu")


def on_disk(model: Any, folder: Path) -> Any:
    return accelerate.disk_offload(model, str(folder), execution_device="cpu")


def dispatched(model: Any, folder: Path) -> Any:
    """The embeddings, the head and the adapters on the disk, the layers in memory."""
    places = {f"model.{name}": "cpu" for name, _ in model.model.named_children()}
    places |= {name: "disk" for name, _ in model.named_children() if name != "model"}
    places["model.embed_tokens"] = "disk"
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder))


@pytest.mark.parametrize(
    ("name", "offload"),
    [(name, in_memory) for name in one_of_each_kind()]
    + [("layer_skip", on_disk), ("medusa", dispatched)],
)
def test_every_strategy(shallow: Tiny, tmp_path: Path, name: str, offload: Any) -> None:
    model = adapt(shallow(layers=2), name)
    plain = generate(model, ragged((12, 5)), **strategy(name)).sequences
    model = offload(model, tmp_path)
    gone, sampled = offloaded_parts(model), []
    assert "model.embed_tokens.weight" in gone
    assert placement(model) == (torch.device("cpu"), torch.float32)
    assert torch.equal(generate(model, ragged((12, 5)), **strategy(name)).sequences, plain)
    for spec in ({}, strategy(name)):
        torch.manual_seed(3)
        sampled.append(generate(model, ragged((12,)), do_sample=True, **spec).sequences)
    assert torch.equal(*sampled)
    assert offloaded_parts(model) == gone, "what was loaded is dropped again"


@pytest.mark.parametrize("name", [name for name, one in methods().items() if one.needs_adapter])
def test_an_adapter_on_an_offloaded_model(shallow: Tiny, tmp_path: Path, name: str) -> None:
    """New ones start from its weights; loaded ones are not offloaded."""
    shallow(layers=2).save_pretrained(tmp_path / "model")
    model = adapt(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), name)
    plain = generate(model, ragged((12, 5))).sequences
    want = generate(model, ragged((12, 5)), **strategy(name))
    model.save_pretrained(tmp_path / "adapter")
    places = dict.fromkeys(("model.layers", "model.norm", "model.rotary_emb"), "cpu")
    places |= dict.fromkeys(("model.embed_tokens", "lm_head"), "disk")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=str(tmp_path / "off")
    )
    assert offloaded_parts(model)
    model.load_adapter(str(tmp_path / "adapter"), "loaded")
    ours = generate(model, ragged((12, 5)), **strategy(name))
    assert torch.equal(ours.sequences, plain)
    assert ours.spec_stats.accepted == want.spec_stats.accepted
    model.delete_adapter("loaded")
    adapt(model, name, "new")
    assert torch.equal(generate(model, ragged((12, 5)), **strategy(name)).sequences, plain)


def test_steps_are_not_compiled(shallow: Tiny) -> None:
    model = accelerate.cpu_offload(shallow(), execution_device="cpu")
    output = generate(model, ragged((12, 5)), **strategy("prompt_lookup"), **CAPTURED)
    assert torch.equal(output.sequences, generate(model, ragged((12, 5))).sequences)
    assert compiled(output)["refused"] == ["some of its weights are offloaded"]


def test_weights_have_data_within_a_block(shallow: Tiny) -> None:
    model = adapt(shallow(), "medusa")
    adapter = find_active(model, "MEDUSA")
    kept = model.lm_head.weight.clone(), adapter.tensors()["weights"].clone()
    with loaded(model.lm_head), loaded(adapter):  # nothing to do
        pass
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(ZeroDivisionError), loaded(model.lm_head):
        assert torch.equal(model.lm_head.weight, kept[0])
        raise ZeroDivisionError
    assert model.lm_head.weight.is_meta and adapter.biases.is_meta
    assert torch.equal(adapter.tensors()["weights"], kept[1])
    assert device_of(model.lm_head) == torch.device("cpu")
    bare = shallow().to("meta")
    assert placement(bare).device.type == device_of(bare.lm_head).type == "meta"
