"""Prompt tokens that the method's author has published become an adapter."""

from pathlib import Path

import pytest
import torch
from conftest import check_same
from peft import PromptTuningConfig, get_peft_model, get_peft_model_state_dict
from running import configured
from safetensors.torch import save_file
from tiny_checkpoint import make_model

import hf_spec
from hf_spec.adapters.loading import find_active
from hf_spec.tools.hub import check_complete
from hf_spec.tools.transfer import import_adapter


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_prompt_embeddings(tmp_path: Path, suffix: str) -> None:
    """The layout of PEFT's prompt tuning, from which the author's code derives."""
    tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    state = get_peft_model_state_dict(get_peft_model(make_model(), tuning))
    path = tmp_path / f"adapter_model{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    model = make_model()
    output = import_adapter(path, "ppd", model, tmp_path / "ppd")
    check_complete(output)
    model.load_adapter(str(output))
    adapter = find_active(model, "PPD")
    assert adapter.config.num_prompt_tokens == 3
    assert torch.equal(adapter.tensors()["prompts"], state["prompt_embeddings"])
    config = hf_spec.SpecConfig.from_pretrained(output)
    check_same(model, configured(config), torch.tensor([[5, 9, 17, 40]]))


def test_what_is_no_prompt_tokens(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    for shape, message in (
        ((4,), "no tensor 'prompt_embeddings'"), ((4, 7), "does not fit LlamaForCausalLM")
    ):  # fmt: skip
        save_file({"prompt_embeddings": torch.zeros(shape)}, path)
        with pytest.raises(ValueError, match=message):
            import_adapter(path, "ppd", make_model(), tmp_path / "ppd")
