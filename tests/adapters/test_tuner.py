"""Our adapter types through every door of PEFT and Transformers, with and without weights."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from adapter_oracle import SHAPE, load, make_base
from peft import LoraConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import AutoModelForCausalLM, MixtralConfig

from hf_spec.adapters.active import find_active
from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.module import Adapter
from hf_spec.adapters.tuner import register_type
from hf_spec.methods.layer_skip import LayerSkipConfig

TOKENS = torch.arange(3, 12)[None]


def active_adapter_config(model, kind):
    active = find_active(model, kind)
    return None if active is None else active.config


@dataclass
class ToyConfig(SpecPeftConfig):
    """A method with free embeddings and linear heads, as the trained methods have."""

    type_name: ClassVar[str] = "TOY"
    num_masks: int = 3
    num_heads: int = 2


class ToyAdapter(Adapter):
    """Embeddings and modules, in a list as decoder layers would be."""

    def __init__(self, config, model):
        super().__init__(config, model)
        hidden, vocab = model.config.hidden_size, model.config.vocab_size
        self.hold({"masks": torch.randn(config.num_masks, hidden)})
        heads = (torch.nn.Linear(hidden, vocab) for _ in range(config.num_heads))
        self.heads = torch.nn.ModuleList(heads)


register_type(ToyConfig, ToyAdapter)

# Every test of a door runs for an adapter without and one with weights.
CONFIGS = {
    "LAYER_SKIP": lambda: LayerSkipConfig(skip_attention=[2, 1], skip_mlp=[1]),
    "TOY": ToyConfig,
}
OTHERS = {
    "LAYER_SKIP": lambda: LayerSkipConfig(skip_attention=[0]),
    "TOY": lambda: ToyConfig(num_masks=5, num_heads=3),
}


@pytest.fixture(params=CONFIGS)
def kind(request):
    return request.param


@pytest.fixture(scope="session")
def base_path(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def base(base_path):
    return load(base_path)


def logits(model):
    with torch.inference_mode():
        return model(TOKENS).logits


def weights(model, kind):
    return {name: w.detach().clone() for name, w in find_active(model, kind).tensors().items()}


def same(ours, theirs):
    """The same names and the same bits."""
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def saved(base_path, path, config, adapter_name="default"):
    """A saved adapter with random weights; returns its folder, its weights and its config."""
    model = get_peft_model(load(base_path), config, adapter_name)
    found = find_active(model, config.type_name)
    for weight in found.tensors().values():
        weight.data.normal_()
    model.save_pretrained(str(path))
    folder = path if adapter_name == "default" else path / adapter_name
    return str(folder), weights(model, config.type_name), found.config


def test_a_base_that_is_dispatched(base, base_path, kind, tmp_path):
    """Loading looks the adapter's device up in the base's map."""
    accelerate = pytest.importorskip("accelerate")
    folder, expected, _ = saved(base_path, tmp_path, CONFIGS[kind]())
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
    for name, made in (("one", CONFIGS), ("two", OTHERS)):
        base.add_adapter(made[kind](), adapter_name=name)
    base.set_adapter(["one", "two"])
    with pytest.raises(ValueError, match=r"2 adapters of type .* active \(one, two\).*set_adapter"):
        find_active(base, kind)


def test_adding_keeps_others_trainable(base, kind):
    base.add_adapter(LoraConfig(target_modules=["q_proj"]), adapter_name="lora")
    base.add_adapter(CONFIGS[kind](), adapter_name="ours")
    base.set_adapter(["lora", "ours"])
    names = {n.split(".")[1] for n, p in base.named_parameters() if p.requires_grad}
    assert names == ({"layers", "type_toy"} if kind == "TOY" else {"layers"})
    weight = base.model.layers[0].mlp.up_proj.weight
    assert not weight.requires_grad
    weight.requires_grad = True  # on purpose, by the user
    base.add_adapter(OTHERS[kind](), adapter_name="another")
    assert weight.requires_grad


def test_converted_architectures(kind, tmp_path):
    """Mixtral's keys are rewritten while loading; ours are left alone."""
    config = MixtralConfig(**SHAPE, num_local_experts=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    folder, expected, _ = saved(str(tmp_path / "base"), tmp_path / "adapter", CONFIGS[kind]())
    for attach in (PeftModel.from_pretrained, lambda model, folder: model.load_adapter(folder)):
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        attach(base, folder)
        assert same(weights(base, kind), expected)


def doors(base_path, folder, config):
    """Every way to attach an adapter: from a config, from a folder."""
    yield lambda base: get_peft_model(base, config)
    yield lambda base: base.add_adapter(config)
    yield lambda base: PeftModel.from_pretrained(base, folder)
    yield lambda base: base.load_adapter(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LayerSkipConfig(skip_mlp=[4]), r"skip_mlp=.* 4 layers, from 0 to 3\. .* correct 4"),
        (LayerSkipConfig(skip_attention=[7]), r"skip_attention=.* correct 7"),
    ],
)
def test_wrong_base(base_path, tmp_path, config, message):
    folder, _, _ = saved(base_path, tmp_path, LayerSkipConfig())
    config.save_pretrained(folder)
    for attach in doors(base_path, folder, config):
        base = load(base_path)
        with pytest.raises(ValueError, match=message):
            attach(base)
        assert find_active(base, "LAYER_SKIP") is None and not hasattr(base, "spec_modules")
        base.add_adapter(LayerSkipConfig(skip_attention=[1]))  # the failure left nothing behind
        assert active_adapter_config(base, "LAYER_SKIP").skip_attention == [1]
        with pytest.raises(ValueError, match=message):
            base.add_adapter(copy.deepcopy(config), adapter_name="second")
        assert list(base.peft_config) == ["default"]


def test_registration():
    register_type(ToyConfig, ToyAdapter)
    assert PEFT_TYPE_TO_CONFIG_MAPPING["TOY"] is ToyConfig

    @dataclass
    class Another(SpecPeftConfig):
        type_name: ClassVar[str] = "TOY"

    with pytest.raises(ValueError, match=r"TOY already belongs to .*ToyConfig; choose another"):
        register_type(Another, ToyAdapter)
    for name in ("LORA", "toy", "", "SPEC", "TYPE", "TOY_", "A-B"):
        Another.type_name = name
        with pytest.raises(ValueError, match="type_name|already belongs"):
            register_type(Another, ToyAdapter)
    assert "SPEC" not in PEFT_TYPE_TO_CONFIG_MAPPING
