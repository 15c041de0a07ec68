"""Our adapter types through every door of PEFT and Transformers, with and without weights."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from adapter_oracle import SHAPE, load, make_base, saved
from peft import LoraConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from trained import same
from transformers import AutoModelForCausalLM, MixtralConfig

from hf_spec import DFlashConfig, LayerSkipConfig
from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.loading import find_active
from hf_spec.adapters.tuner import register_type
from hf_spec.methods.registry import methods

# Every test of a door runs for an adapter without weights and for one with decoder layers.
CONFIGS = {
    "LAYER_SKIP": lambda: LayerSkipConfig(skip_attention=[2, 1], skip_mlp=[1]),
    "DFLASH": lambda: DFlashConfig(num_layers=1),
}


@pytest.fixture(params=CONFIGS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def base_path(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def base(base_path):
    return load(base_path)


def weights(model, kind):
    return {name: w.detach().clone() for name, w in find_active(model, kind).tensors().items()}


def test_a_base_that_is_dispatched(base, base_path, kind, tmp_path):
    """Loading looks the adapter's device up in the base's map."""
    accelerate = pytest.importorskip("accelerate")
    made = load(base_path)
    folder, expected = saved(made, CONFIGS[kind](), tmp_path), weights(made, kind)
    device_map = {"model": "cpu", "lm_head": "cpu"}
    dispatched = accelerate.dispatch_model(base, device_map, force_hooks=True)
    dispatched.load_adapter(folder)
    assert same(weights(dispatched, kind), expected)
    assert dispatched.hf_device_map == {**device_map, "spec_modules": "cpu"}
    # Its weights may be on no device between calls; the adapter's are.
    offloaded = load(base_path)
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    assert offloaded.get_input_embeddings().weight.device.type == "meta"
    offloaded.add_adapter(CONFIGS[kind]())
    assert all(w.device.type == "cpu" for w in find_active(offloaded, kind).tensors().values())


def test_unload_restores_the_base(base, base_path, kind):
    model = get_peft_model(base, CONFIGS[kind]())
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(
            ValueError, match=f"merging takes the one active {kind} .*none changes them.*unload"
        ):
            merge()
    restored = model.unload()
    assert model.unload() is model.merge_and_unload() is restored  # as PEFT's own types
    for method in (model.merge_adapter, model.unmerge_adapter):
        with pytest.raises(ValueError, match=f"no {kind} adapter any more.*Load it again"):
            method()
    fresh = load(base_path)
    assert same(restored.state_dict(), fresh.state_dict())
    assert not hasattr(restored, "spec_modules") and not hasattr(restored, "peft_config")
    assert find_active(restored, kind) is None
    assert find_active(get_peft_model(restored, CONFIGS[kind]()), kind).name == "default"


def test_two_active_adapters_of_a_type_are_refused(base, kind):
    for name in ("one", "two"):
        base.add_adapter(CONFIGS[kind](), adapter_name=name)
    base.set_adapter(["one", "two"])
    with pytest.raises(ValueError, match=r"2 adapters of type .* active \(one, two\).*set_adapter"):
        find_active(base, kind)


@pytest.mark.parametrize("name", ["0", "layers", "type_dflash", "model", "b"])
def test_names_of_adapters_that_are_parts_of_others(base, base_path, tmp_path, name):
    """PEFT would leave out tensors of the other adapter: it is saved whole, or not at all."""
    folder = saved(load(base_path), CONFIGS["DFLASH"](), tmp_path / "made")
    model = PeftModel.from_pretrained(base, folder)
    model.load_adapter(folder, name)
    made = (tmp_path / "made" / "adapter_model.safetensors").read_bytes()
    if name in ("model", "b"):
        model.save_pretrained(tmp_path / "again")
    else:
        with pytest.raises(ValueError, match=f"cannot be saved beside one named '{name}'"):
            model.save_pretrained(tmp_path / "again")
        assert not (tmp_path / "again" / "adapter_model.safetensors").exists()
        model.delete_adapter(name)
        model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "adapter_model.safetensors").read_bytes() == made


def test_adding_keeps_others_trainable(base, kind):
    base.add_adapter(LoraConfig(target_modules=["q_proj"]), adapter_name="lora")
    base.add_adapter(CONFIGS[kind](), adapter_name="ours")
    base.set_adapter(["lora", "ours"])
    names = {n.split(".")[1] for n, p in base.named_parameters() if p.requires_grad}
    assert names == ({"layers", "type_dflash"} if kind == "DFLASH" else {"layers"})
    weight = base.model.layers[0].mlp.up_proj.weight
    assert not weight.requires_grad
    weight.requires_grad = True  # on purpose, by the user
    base.add_adapter(CONFIGS[kind](), adapter_name="another")
    assert weight.requires_grad


def test_converted_architectures(kind, tmp_path):
    """Mixtral's keys are rewritten while loading; ours are left alone."""
    config = MixtralConfig(**SHAPE, num_local_experts=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    made = load(str(tmp_path / "base"))
    folder, expected = saved(made, CONFIGS[kind](), tmp_path / "adapter"), weights(made, kind)
    for attach in (PeftModel.from_pretrained, lambda model, folder: model.load_adapter(folder)):
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        attach(base, folder)
        assert same(weights(base, kind), expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LayerSkipConfig(skip_mlp=[4]), r"skip_mlp=.* 4 layers, from 0 to 3\. .* correct 4"),
        (LayerSkipConfig(skip_attention=[7]), r"skip_attention=.* correct 7"),
    ],
)
def test_wrong_base(base_path, tmp_path, config, message):
    folder = saved(load(base_path), LayerSkipConfig(), tmp_path)
    config.save_pretrained(folder)
    for attach in (
        lambda base: get_peft_model(base, config),
        lambda base: base.add_adapter(config),
        lambda base: PeftModel.from_pretrained(base, folder),
        lambda base: base.load_adapter(folder),
    ):
        base = load(base_path)
        with pytest.raises(ValueError, match=message):
            attach(base)
        assert find_active(base, "LAYER_SKIP") is None and not hasattr(base, "spec_modules")
        base.add_adapter(LayerSkipConfig(skip_attention=[1]))  # the failure left nothing behind
        assert find_active(base, "LAYER_SKIP").config.skip_attention == [1]
        with pytest.raises(ValueError, match=message):
            base.add_adapter(copy.deepcopy(config), adapter_name="second")
        assert list(base.peft_config) == ["default"]


def test_registration():
    """The same class again is nothing; a name that is taken, or not one, is refused."""
    module = methods()["dflash"].adapter_module
    register_type(DFlashConfig, module)
    assert PEFT_TYPE_TO_CONFIG_MAPPING["DFLASH"] is DFlashConfig

    @dataclass
    class Another(SpecPeftConfig):
        type_name: ClassVar[str] = "DFLASH"

    taken = r"DFLASH already belongs to .*DFlashConfig; choose another"
    for name in ("DFLASH", "LORA", "dflash", "", "SPEC", "TYPE", "DFLASH_", "A-B"):
        Another.type_name = name
        message = taken if name == "DFLASH" else "type_name|already belongs"
        with pytest.raises(ValueError, match=message):
            register_type(Another, module)
    assert "SPEC" not in PEFT_TYPE_TO_CONFIG_MAPPING
