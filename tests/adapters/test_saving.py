"""Training and saving a model beside an adapter of ours that drafts, or one that is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_oracle import saved
from conftest import Tiny, prompt
from peft import LoraConfig, PeftModel, get_peft_model
from running import drafting
from safetensors.torch import load_file
from trained import same
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_spec
from hf_spec.adapters.layer import CONTAINER
from hf_spec.adapters.loading import find_active


@pytest.fixture
def adapter(fresh: Tiny, tmp_path: Path) -> str:
    """The folder of an adapter."""
    return saved(fresh("llama"), hf_spec.MedusaConfig(num_heads=2), tmp_path / "adapter")


def state(model: Any) -> dict[str, torch.Tensor]:
    """Weights by name, without those of ours."""
    every = model.state_dict().items()
    return {name: one.clone() for name, one in every if CONTAINER not in name}


def learned(model: Any) -> set[str]:
    """Names of the parameters that are trained."""
    return {name for name, one in model.named_parameters() if one.requires_grad}


def tokens(model: Any, **options: Any) -> list[list[int]]:
    return model.generate(prompt(9), max_new_tokens=8, do_sample=False, **options).tolist()


def trainer(model: Any, folder: Path, **settings: Any) -> Trainer:
    ids = prompt(12)[0]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, save_steps=1,
        learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True, **settings,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 8)


class Rollout(TrainerCallback):
    """Generates with a strategy between the steps, as reinforcement learning does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        assert tokens(model, **drafting("medusa")) == tokens(model)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_full_fine_tuning_beside_a_drafter(fresh, tmp_path, adapter, checkpointing):
    """All of the base is trained, saved by checkpoints and at the end, and resumed."""
    model: Any = fresh("llama")
    model.load_adapter(adapter)
    before = state(model)
    heads = {name: one.clone() for name, one in find_active(model, "MEDUSA").tensors().items()}
    training = trainer(model, tmp_path / "run", gradient_checkpointing=checkpointing)
    training.add_callback(Rollout())
    training.train()
    after = state(model)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert same(find_active(model, "MEDUSA").tensors(), heads)
    training.save_model(tmp_path / "saved")
    model.save_pretrained(tmp_path / "by itself")
    for folder in ("saved", "by itself", "run/checkpoint-2"):
        assert not (tmp_path / folder / "adapter_config.json").exists()
        assert not any("spec" in key for key in load_file(tmp_path / folder / "model.safetensors"))
        again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
        assert same(state(again), after)
    again.load_adapter(adapter)
    model.eval()
    assert tokens(again, **drafting("medusa")) == tokens(model, **drafting("medusa"))
    # As without the adapter, also if an interrupted training goes on.
    resumed = fresh("llama")
    resumed.load_adapter(adapter)
    other = trainer(resumed, tmp_path / "run", gradient_checkpointing=checkpointing)
    other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    alone = fresh("llama")
    trainer(alone, tmp_path / "alone", gradient_checkpointing=checkpointing).train()
    assert same(state(resumed), after) and same(state(alone), after)


def test_weights_of_the_base_alone_are_complete(fresh, adapter):
    model: Any = fresh("llama")
    weights = state(model)
    model.load_adapter(adapter)
    assert not model.load_state_dict(weights).missing_keys
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({k: v for k, v in weights.items() if "norm" not in k})
    model.add_adapter(hf_spec.BitaConfig(num_mask_tokens=2), "trained")
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert missing and all("type_bita" in name for name in missing)


def test_every_way_to_attach_a_drafter(fresh, adapter):
    """What is trained stays as it was, whatever is chosen, disabled or deleted later."""
    model: Any = fresh("llama")
    model.get_input_embeddings().requires_grad_(False)
    before, skip = learned(model), hf_spec.LayerSkipConfig(skip_attention=[1], inference_mode=True)
    for change in (
        lambda: model.load_adapter(adapter),
        lambda: model.add_adapter(skip, "other"),
        lambda: model.load_adapter(adapter, adapter_name="second"),
        lambda: model.set_adapter(["default", "other"]), model.disable_adapters,
        model.enable_adapters, lambda: model.set_adapter("second"),
        lambda: model.delete_adapter(["default", "second"]), lambda: model.delete_adapter("other"),
    ):  # fmt: skip
        change()
        assert learned(model) == before


def test_an_adapter_in_training_freezes_the_base(fresh, tmp_path, adapter):
    """Also beside one that drafts; it is what is saved then."""
    for attach in (
        lambda model: model.load_adapter(adapter, is_trainable=True),
        lambda model: model.add_adapter(hf_spec.BitaConfig(num_mask_tokens=2)),
        lambda model: get_peft_model(model, hf_spec.BitaConfig(num_mask_tokens=2)),
    ):
        for beside in (False, True):
            model: Any = fresh("llama")
            if beside:
                model.load_adapter(adapter, adapter_name="drafter")
            attach(model)
            assert learned(model) and all(".default." in name for name in learned(model))
    model = fresh("llama")
    model.load_adapter(adapter, is_trainable=True)
    model.save_pretrained(tmp_path / "saved")
    assert [one.name for one in (tmp_path / "saved").glob("*.safetensors")] == [
        "adapter_model.safetensors"
    ]
    # A PeftModel's base is frozen in any case, as only adapters are saved of it.
    loaded = PeftModel.from_pretrained(fresh("llama"), adapter)
    assert not learned(loaded)
    loaded.train()
    with pytest.raises(ValueError, match=r"loaded for inference: .* is_trainable=True to train"):
        loaded(input_ids=prompt(12), labels=prompt(12), anchors=torch.tensor([[2, 5]]))
    base = loaded.get_base_model()
    base.save_pretrained(tmp_path / "base")
    assert same(state(AutoModelForCausalLM.from_pretrained(tmp_path / "base")), state(base))
    assert not any("spec" in key for key in load_file(tmp_path / "base" / "model.safetensors"))


@pytest.mark.parametrize("first", ["lora", "ours"])
@pytest.mark.parametrize("way", ["PeftModel", "model"])
def test_a_lora_is_trained_beside_a_drafter(fresh, tmp_path, adapter, first, way):
    """It alone is trained, and saved as PEFT does."""
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model: Any = fresh("llama")
    if first == "ours":
        model.load_adapter(adapter, adapter_name="ours")
    if way == "PeftModel":
        model = get_peft_model(model, lora)
    else:
        model.add_adapter(lora)
    if first == "lora":
        base = model.get_base_model() if way == "PeftModel" else model
        base.load_adapter(adapter, adapter_name="ours")
    if way == "model":
        model.set_adapter(["default", "ours"])
    training = trainer(model, tmp_path / "run")
    training.add_callback(Rollout())
    before = {name: one.clone() for name, one in model.state_dict().items()}
    training.train()
    changed = {n for n, one in model.state_dict().items() if not torch.equal(one, before[n])}
    assert changed and all("lora_" in name for name in changed)
    training.save_model(tmp_path / "saved")
    for folder in ("saved", "run/checkpoint-2"):
        stored = load_file(tmp_path / folder / "adapter_model.safetensors")
        assert len(stored) == len([name for name in before if "lora_" in name])
        again = PeftModel.from_pretrained(fresh("llama"), tmp_path / folder).eval()
        assert tokens(again) == tokens(model.eval())


@pytest.mark.parametrize("first", ["lora", "ours"])
def test_a_lora_beside_a_drafter_is_resumed(fresh, tmp_path, adapter, first):
    """The checkpoint has both; the drafter stays active, with the options of its own folder."""

    def made() -> Any:
        torch.manual_seed(0)
        model: Any = fresh("llama")
        if first == "ours":
            model.load_adapter(adapter, adapter_name="ours")
        tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        if first == "lora":
            model.load_adapter(adapter, adapter_name="ours")
        return tuned

    whole, resumed = made(), made()
    trainer(whole, tmp_path / "run").train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert (checkpoint / "ours" / "adapter_model.safetensors").is_file()
    drafter = find_active(resumed, "MEDUSA")
    before = {name: one.clone() for name, one in drafter.tensors().items()}
    with torch.no_grad():
        for one in drafter.parameters():
            one.zero_()
    trainer(resumed, tmp_path / "run").train(resume_from_checkpoint=str(checkpoint))
    assert same(state(resumed), state(whole))
    assert find_active(resumed, "MEDUSA") is drafter and same(drafter.tensors(), before)
    assert drafter.origin.place == adapter
    assert all("lora_" in name for name in learned(resumed))
    # One of this name is needed for it.
    with pytest.raises(ValueError, match="a PeftModel of type LORA loads no adapter of type MED"):
        resumed.load_adapter(str(checkpoint / "ours"), "another")


def test_a_merged_update_is_not_saved_as_the_base(fresh, tmp_path):
    config = hf_spec.SpaceConfig(num_mask_tokens=2, update="lora")
    folder = saved(fresh("llama"), config, tmp_path / "adapter")
    model: Any = fresh("llama")
    before = state(model)
    model.load_adapter(folder)
    assert hf_spec.merge_adapter(model)
    with pytest.raises(ValueError, match="'default' is merged into the weights.*unmerge_adapter"):
        model.save_pretrained(tmp_path / "saved")
    hf_spec.unmerge_adapter(model)
    model.save_pretrained(tmp_path / "saved")
    assert same(state(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), before)
