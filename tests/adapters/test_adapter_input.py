"""Adapters that are broken, foreign or for another base: refused before anything is attached."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from adapter_oracle import SHAPE, load, make_base
from covering import covering
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import hf_spec
from hf_spec import hub_cards
from hf_spec.adapters.checkpoint import complaints
from hf_spec.adapters.config import FACTS, SpecPeftConfig
from hf_spec.adapters.layer import Adapter
from hf_spec.adapters.loading import find_active, require_active
from hf_spec.adapters.tuner import register_type
from hf_spec.methods.registry import methods

TOKENS = torch.arange(3, 12)[None]
PREFIX = "base_model.model.spec_modules.type_sample.sample_"


@dataclass
class SampleConfig(SpecPeftConfig):
    """A throw-away type with weights; its shapes don't follow from the base's."""

    type_name: ClassVar[str] = "SAMPLE"
    num_masks: int = 3


class SampleAdapter(Adapter):
    def __init__(self, config: Any, model: Any) -> None:
        super().__init__(config, model)
        self.hold({"masks": torch.randn(config.num_masks, 5), "bias": torch.zeros(7)})


register_type(SampleConfig, SampleAdapter)


@pytest.fixture(scope="module")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def good(base_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    torch.manual_seed(1)
    get_peft_model(load(base_path), SampleConfig()).save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(good: Path, tmp_path: Path) -> Path:
    """A copy of a good adapter, to be spoiled."""
    return Path(shutil.copytree(good, tmp_path / "adapter"))


def edit(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def without(name: str) -> Callable[[Path], Any]:
    return lambda folder: rewrite(folder, lambda tensors: tensors.pop(name))


def put(name: str, value: torch.Tensor) -> Callable[[Path], Any]:
    return lambda folder: rewrite(folder, lambda tensors: tensors.update({name: value}))


def cut(folder: Path, size: int) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:size])


def to_pickle(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    torch.save(load_file(file), folder / "adapter_model.bin")
    file.unlink()


def foreign(tensors: dict[str, torch.Tensor]) -> None:
    """Weights of a LoRA, say."""
    tensors.clear()
    tensors.update({f"base_model.model.layers.{n}.lora_A": torch.ones(2) for n in range(9)})


def onto(door: str, folder: Path, model: Any = None) -> Any:
    """Attach by one of the ways in; the Auto classes load the base themselves."""
    if door == "AutoPeftModel":
        return AutoPeftModelForCausalLM.from_pretrained(str(folder))
    if door == "AutoModel":
        return AutoModelForCausalLM.from_pretrained(str(folder))
    if door == "PeftModel":
        return PeftModel.from_pretrained(model, str(folder))
    if door == "PeftModel.load_adapter":  # beside another of the type
        wrapped = get_peft_model(model, SampleConfig(), "other")
        wrapped.load_adapter(str(folder), "default")
        wrapped.set_adapter("default")
        return wrapped
    model.load_adapter(str(folder), is_trainable="trainable" in door)
    return model


DOORS = (
    "load_adapter", "load_adapter trainable", "PeftModel", "PeftModel.load_adapter",
    "AutoPeftModel", "AutoModel",
)  # fmt: skip

Defects = dict[str, tuple[Callable[[Path], Any], str]]
WEIGHT_DEFECTS: Defects = {
    "cut off": (lambda f: cut(f, -3), "is no safetensors file, or was cut off"),
    "empty": (lambda f: cut(f, 0), "is no safetensors file, or was cut off"),
    "pickle": (to_pickle, r"holds no adapter_model.safetensors.* never from a pickle.*Save the"),
    "foreign": (
        lambda f: rewrite(f, foreign),
        r"no tensor '[\w.]*sample_bias'; .*unknown tensor 'layers.0.lora_A'; .*; 6 more such",
    ),
    "missing": (
        without(f"{PREFIX}masks"),
        r"this SAMPLE adapter: no tensor 'spec_modules.type_sample.sample_masks'\. adapter_config",
    ),
    "unexpected": (
        put(f"{PREFIX}more", torch.ones(2)),
        r"this SAMPLE adapter: unknown tensor 'spec_modules.type_sample.sample_more'\. adapter_co",
    ),
    "embeddings": (  # PEFT saves them where the vocabulary was changed
        put("base_model.model.model.embed_tokens.weight", torch.ones(2)),
        r"unknown tensor 'model.embed_tokens.weight'",
    ),
    "shape": (
        put(f"{PREFIX}masks", torch.ones(2, 5)),
        r"sample_masks' has shape \(2, 5\), expected \(3, 5\)",
    ),
    "shape by config": (
        lambda f: edit(f, num_masks=4), r"sample_masks' has shape \(3, 5\), expected \(4, 5\)",
    ),
    "type": (
        put(f"{PREFIX}bias", torch.ones(7).long()),
        r"sample_bias' is of type torch.int64, expected torch.float32",
    ),
    "NaN": (
        lambda f: rewrite(f, lambda t: t[f"{PREFIX}masks"][0].fill_(torch.nan)),
        r"'spec_modules.type_sample.sample_masks' of the SAMPLE adapter have numbers that are "
        r"NaN, infinite, or not finite in float32, the model's type \(largest: 3.4e\+38\): take",
    ),
    "infinity": (
        lambda f: rewrite(f, lambda t: [part[-1:].fill_(-torch.inf) for part in t.values()]),
        "'spec_modules.type_sample.sample_bias', 'spec_modules.type_sample.sample_masks' of the ",
    ),
}  # fmt: skip
CONFIG_DEFECTS: Defects = {
    "newer": (
        lambda f: edit(f, format_version=2),
        r"format_version=2; this hf_spec reads versions 1 to 1\. Install a newer one: pip install",
    ),
    "newer, with more fields": (
        lambda f: edit(f, format_version=2, num_more=4),
        "format_version=2; this hf_spec reads",
    ),
    "unknown field": (
        lambda f: edit(f, num_maskz=4),
        r"Config has no field 'num_maskz' \(did you mean 'num_masks'\?\)\. Another .* train the",
    ),
    "task": (lambda f: edit(f, task_type="SEQ_CLS"), "for causal language models.*'SEQ_CLS'"),
    "facts": (lambda f: edit(f, base_facts=[1]), r"base_facts must be a dict or None, got \[1\]"),
}
DEFECTS = WEIGHT_DEFECTS | CONFIG_DEFECTS


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpickling anything fails the test."""

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("a pickle was read")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr("peft.utils.save_and_load.torch_load", refuse)


#: Every way in meets the same checks; one defect of each kind meets all of them.
WAYS = covering(
    product(DEFECTS, DOORS),
    lambda defect, door: [defect, (defect if defect in ("missing", "pickle") else None, door)],
)


@pytest.mark.usefixtures("no_pickle")
@pytest.mark.parametrize(("defect", "door"), WAYS)
def test_refused(adapter, base_path, defect, door):
    spoil, message = DEFECTS[defect]
    spoil(adapter)
    base = load(base_path)
    with pytest.raises(ValueError, match=f"(?s){message}") as caught:
        onto(door, adapter, base)
    assert str(caught.value).count("\n") == 0
    assert adapters_of(base) <= {"other"}
    if door != "PeftModel.load_adapter":
        assert not hasattr(base, "spec_modules") and not hasattr(base, "peft_config")
        assert not base._hf_peft_config_loaded
        assert all(parameter.requires_grad for parameter in base.parameters())


def test_an_interrupted_load_leaves_the_model_as_it_was(good, base_path, monkeypatch):
    base = load(base_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(base, "load_state_dict", Mock(side_effect=KeyboardInterrupt))
        base.load_adapter(str(good))
    assert not hasattr(base, "spec_modules")
    base.load_adapter(str(good))
    assert find_active(base, "SAMPLE") is not None


def adapters_of(base: Any) -> set[str]:
    """Names of the adapters of the type that hang under a model."""
    if not hasattr(base, "spec_modules"):
        return set()
    return set(base.spec_modules["type_sample"]._get_available_adapters())


@pytest.mark.parametrize("door", DOORS)
def test_accepted(adapter, base_path, door):
    """The same ways in, without a defect; any floating-point type is cast."""
    rewrite(adapter, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    active = find_active(onto(door, adapter, load(base_path)), "SAMPLE")
    stored = load_file(adapter / "adapter_model.safetensors")
    assert active is not None and len(stored) == 2
    for name, weight in active.tensors().items():
        assert torch.equal(weight.float(), stored[PREFIX + name].float())


def test_numbers_must_fit_the_models_type(adapter, base_path):
    """1e5 is finite in the file, and in the parameters that PEFT keeps in float32."""
    rewrite(adapter, lambda t: t[f"{PREFIX}masks"][0].fill_(-1e5))
    message = r"masks' of the SAMPLE adapter have .* not finite in float16.* \(largest: 6.55e\+04\)"
    for door in ("load_adapter", "PeftModel"):
        onto(door, adapter, load(base_path).bfloat16())
        half = load(base_path).half()
        with pytest.raises(ValueError, match=message):
            onto(door, adapter, half)
        assert not hasattr(half, "spec_modules")


@pytest.mark.parametrize("place", ["./nope", "~/nope", "../a/b/c"])
def test_no_such_folder(base_path, place):
    with pytest.raises(FileNotFoundError, match=f"'{place}'.: there is no such folder"):
        load(base_path).load_adapter(place)


def test_a_config_alone_serves_for_a_fresh_adapter(base_path, tmp_path):
    SampleConfig(num_masks=6).save_pretrained(tmp_path)
    config = PeftConfig.from_pretrained(str(tmp_path))
    model = get_peft_model(load(base_path), config)
    assert find_active(model, "SAMPLE").tensors()["masks"].shape == (6, 5)
    with pytest.raises(ValueError, match="holds no adapter_model.safetensors"):
        load(base_path).load_adapter(str(tmp_path))


@pytest.mark.usefixtures("no_pickle")
@pytest.mark.parametrize("defect", ["cut off", "pickle", "missing"])
def test_loading_again_into_an_attached_adapter(adapter, good, base_path, defect):
    """As the Trainer does with a checkpoint: the config is not read then."""
    model = PeftModel.from_pretrained(load(base_path), str(good))
    model.load_adapter(str(good), "default")
    spoil, message = DEFECTS[defect]
    spoil(adapter)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        model.load_adapter(str(adapter), "default")
    # The same where a config is given by hand.
    with pytest.raises(ValueError, match=f"(?s){message}"):
        PeftModel.from_pretrained(load(base_path), str(adapter), config=SampleConfig())


def test_tensors_given_by_hand(good, base_path):
    tensors = load_file(good / "adapter_model.safetensors")
    base = load(base_path)
    base.load_adapter(peft_config=SampleConfig(), adapter_state_dict=dict(tensors))
    assert torch.equal(find_active(base, "SAMPLE").tensors()["masks"], tensors[f"{PREFIX}masks"])
    wrapped = get_peft_model(load(base_path), SampleConfig())
    set_peft_model_state_dict(wrapped, dict(tensors))
    assert torch.equal(find_active(wrapped, "SAMPLE").tensors()["masks"], tensors[f"{PREFIX}masks"])
    infinite = torch.full_like(tensors[f"{PREFIX}masks"], torch.inf)
    for changed, message in (
        ({k: v for k, v in tensors.items() if k != f"{PREFIX}masks"}, "no tensor .*masks"),
        ({**tensors, f"{PREFIX}more": torch.ones(1)}, "unknown tensor .*more"),
        ({**tensors, f"{PREFIX}masks": infinite}, "masks' of the SAMPLE adapter have num"),
    ):
        fresh = load(base_path)
        with pytest.raises(ValueError, match=message):
            fresh.load_adapter(peft_config=SampleConfig(), adapter_state_dict=changed)
        assert not hasattr(fresh, "spec_modules")
        with pytest.raises(ValueError, match=message):
            set_peft_model_state_dict(wrapped, changed)


def test_other_peoples_adapters_pass_through(base_path, tmp_path):
    """What is refused for ours is PEFT's business for a LoRA."""
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(load(base_path), config).save_pretrained(tmp_path)
    edit(tmp_path, from_the_future=1)
    put("base_model.model.more", torch.ones(1))(tmp_path)
    to_pickle(tmp_path)
    with pytest.warns(UserWarning, match="from_the_future"):
        model = PeftModel.from_pretrained(load(base_path), str(tmp_path))
    assert model.peft_config["default"].target_modules == {"q_proj"}


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        ("Bita", {"num_mask_tokens": 10**7}, "num_mask_tokens=10000000: .* from 1 to 256"),
        ("Bita", {"num_prompt_tokens": 10**7}, "num_prompt_tokens=10000000: .* from 0 to 4096"),
        ("Bita", {"head_dim": 10**9}, "head_dim=1000000000: .* from 1 to 65536"),
        ("Space", {"num_mask_tokens": 10**7}, "num_mask_tokens=10000000: .* from 1 to 256"),
        ("Space", {"rank": 10**7}, "rank=10000000: must be a whole number from 1 to 16384"),
        ("Space", {"alpha": 1e308}, r"alpha=1e\+308: must be a number in \(0.0, 1000000.0\]"),
        ("Space", {"target_modules": "layers.("}, r"'layers.\(' is no regular expression: missing"),
        ("Space", {"target_modules": "a" * 9999}, "a\\.\\.\\.' has 9999 characters: at most 1000"),
        ("LayerSkip", {"draft_rank": 10**7}, "draft_rank=10000000: .* from 0 to 16384"),
        ("LayerSkip", {"draft_alpha": 1e308}, r"draft_alpha=1e\+308: must be a number in"),
        ("LayerSkip", {"draft_target_modules": "*"}, "no regular expression: nothing to repeat"),
        ("LayerSkip", {"skip_attention": [-1]}, r"skip_attention=\[-1\]: must name each layer"),
        ("LayerSkip", {"skip_mlp": [True]}, r"skip_mlp=\[True\]: must name each layer"),
        ("LayerSkip", {"skip_mlp": [3, 1, 3]}, r"skip_mlp=\[3, 1, 3\]: must name each layer once"),
        *(
            ("LayerSkip", {**fields, "base_facts": {"num_hidden_layers": layers}}, message)
            for fields, layers, message in (
                ({"skip_mlp": [1, 4]}, 4, "layer of skip_mlp=4: .* from 0 to 3. By base_facts"),
                ({"skip_attention": [6]}, 6, "layer of skip_attention=6: .* from 0 to 5"),
                ({}, "4", "num_hidden_layers of base_facts='4': must"),
                ({}, 0, "base_facts=0: must be a whole number of at least 1. Leave it out"),
            )
        ),
        ("LayerSkip", {"peft_type": "LORA"}, "LayerSkipConfig is of PEFT type LAYER_SKIP, got .*"),
        ("PPD", {"num_prompt_tokens": 10**7}, "num_prompt_tokens=10000000: .* from 1 to 256"),
        ("PPD", {"num_ept": 10**7}, "num_ept=10000000: .* from 1 to 341"),  # 1024 of three each
        ("PPD", {"num_prefix_tokens": 10**7}, "num_prefix_tokens=10000000: .* from 0 to 1365"),
        ("PPD", {"head": "residual", "head_rank": 10**7}, "head_rank=10000000: .* to 16384"),
        ("Medusa", {"num_heads": 10**7}, "num_heads=10000000: .* from 1 to 256"),
        ("ProPD", {"num_layers": 10**7}, "num_layers=10000000: .* from 1 to 64"),
        ("Medusa", {"markov_rank": 10**6}, "markov_rank="),
    ],
)
def test_bad_fields(config, fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        getattr(hf_spec, f"{config}Config")(**fields)
    assert "\n" not in str(caught.value)


def test_complaints():
    one = {"a": torch.ones(2, 3), "b": torch.ones(1).long()}
    assert complaints(one, one) == complaints({}, {}) == []
    sharded = {**one, "a": torch.ones(0)}  # over processes
    assert complaints(one, sharded) == []


# ---------------------------------------------------------------------------------------- the base

OTHER_BASES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_key_value_heads": 4, "vocab_size": 56,
    "model_type": "mistral",
}  # fmt: skip


@pytest.mark.parametrize("field", OTHER_BASES)
def test_another_base(good, base_path, field):
    """The weights of this type would fit any base."""
    fields: dict[str, Any] = {"model_type": "llama", **SHAPE}
    message = (
        rf"this SAMPLE adapter was made for a model with {field}={fields[field]!r} "
        rf"\({re.escape(base_path)}\), .*ForCausalLM has {field}={OTHER_BASES[field]!r}\. Load it "
        rf"onto {re.escape(base_path)}"
    )
    fields[field] = OTHER_BASES[field]
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    for door in ("load_adapter", "PeftModel"):
        with pytest.raises(ValueError, match=message):
            onto(door, good, base)
        assert not hasattr(base, "spec_modules")


def test_what_is_recorded_of_the_base(adapter, base_path, tmp_path):
    """By a fresh adapter and by one that is trained on, not by loading."""
    expected = {"model_type": "llama"} | {name: SHAPE[name] for name in FACTS if name in SHAPE}
    for attach in (get_peft_model, lambda model, config: model.add_adapter(config)):
        config = SampleConfig()
        attach(load(base_path), config)
        assert config.base_facts == expected
    # Not what the config of another adapter says.
    bita = hf_spec.BitaConfig(num_layers=9999, num_kv_heads=9999, head_dim=9999)
    load(base_path).add_adapter(bita)
    assert (bita.num_layers, bita.num_kv_heads, bita.head_dim) == (4, 2, 8)
    edit(adapter, base_facts={"hidden_size": 32})
    model = PeftModel.from_pretrained(load(base_path), str(adapter), is_trainable=True)
    assert model.peft_config["default"].base_facts == expected
    edit(adapter, base_facts=None)
    model = PeftModel.from_pretrained(load(base_path), str(adapter))
    assert model.peft_config["default"].base_facts is None


def test_a_fine_tuned_base_of_the_same_shape(good, tmp_path):
    base = load(make_base(tmp_path / "tuned", seed=5))
    base.load_adapter(str(good))
    assert find_active(base, "SAMPLE") is not None


# ------------------------------------------------------------------- a strategy without its adapter


@pytest.mark.parametrize("name", [name for name, m in methods().items() if m.needs_adapter])
def test_a_strategy_without_its_adapter(base_path, name, monkeypatch):
    base = load(base_path)
    monkeypatch.setattr(type(base.model), "forward", lambda *_, **__: pytest.fail("the model ran"))
    base.add_adapter(SampleConfig())  # one of another type is none
    kind = methods()[name].adapter_config.type_name
    message = rf"'{name}' needs an active adapter of type {kind}: load one with model.load_adapter"
    with pytest.raises(ValueError, match=message):
        base.generate(TOKENS, assistant_strategy=name, max_new_tokens=4, pad_token_id=0)


def test_an_adapter_that_is_not_active(good, base_path):
    base = load(base_path)
    with pytest.raises(ValueError, match="needs an active adapter of type SAMPLE: load one"):
        require_active(base, "SAMPLE", "sample")
    base.load_adapter(str(good), adapter_name="mine")
    assert require_active(base, "SAMPLE", "sample").name == "mine"
    base.disable_adapters()
    remedy = r"activate 'mine': call enable_adapters\(\), or leave the `disable_adapter` block\."
    with pytest.raises(ValueError, match=remedy):
        require_active(base, "SAMPLE", "sample")


def test_an_adapter_whose_weights_were_never_loaded(base_path):
    base = load(base_path)
    inject_adapter_in_model(SampleConfig(), base, low_cpu_mem_usage=True)
    for ask in (lambda: find_active(base, "SAMPLE"), lambda: require_active(base, "SAMPLE", "x")):
        with pytest.raises(ValueError, match=r"'default' was attached without its weights \(masks"):
            ask()


def test_fields_that_a_newer_peft_gives_all_configs():
    """PEFT drops them with a warning, as for its own adapters."""
    written = {"peft_type": "MEDUSA", "num_heads": 3, "of_all_configs": 1}
    with pytest.raises(ValueError, match="no field 'of_all_configs'"):
        PeftConfig.from_peft_type(**written, peft_version="0.21.0")
    with pytest.warns(UserWarning, match="of_all_configs"):
        found: Any = PeftConfig.from_peft_type(**written, peft_version="99.0")
    assert found.num_heads == 3


def test_fields_of_earlier_versions():
    """One that says what is done anyway is dropped; another value is refused."""
    with pytest.warns(UserWarning, match="masks"):
        PeftConfig.from_peft_type(peft_type="SPACE", masks="learned")
    with pytest.raises(ValueError, match="no field 'masks'"):
        PeftConfig.from_peft_type(peft_type="SPACE", masks="noise")


@pytest.mark.parametrize("name", ["medusa", "space"])
def test_the_adapters_of_the_repository(name):
    folder = Path(hub_cards.__file__).parent / "adapters" / f"smollm2-135m-instruct-{name}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PeftConfig.from_pretrained(str(folder)).peft_type == name.upper()
