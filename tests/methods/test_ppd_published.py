"""Prompt tokens that the method's author has published become an adapter."""

from pathlib import Path

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model, get_peft_model_state_dict
from running import configured
from safetensors.torch import save_file
from tiny_checkpoint import make_model

import hf_spec
from hf_spec.adapters.active import find_active
from hf_spec.tools.hub.folder import check_complete
from hf_spec.tools.hub.transfer import import_adapter


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
    ids = torch.tensor([[5, 9, 17, 40]])
    config = hf_spec.SpecConfig.from_pretrained(output)
    plain = make_model().generate(ids, max_new_tokens=12, do_sample=False)
    ours = model.generate(ids, max_new_tokens=12, do_sample=False, **configured(config))
    assert ours.tolist() == plain.tolist()


def test_what_is_no_prompt_tokens(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    save_file({"prompt_embeddings": torch.zeros(4)}, path)
    with pytest.raises(ValueError, match="no tensor 'prompt_embeddings'"):
        import_adapter(path, "ppd", make_model(), tmp_path / "ppd")
    save_file({"prompt_embeddings": torch.zeros(4, 7)}, path)
    with pytest.raises(ValueError, match="does not fit LlamaForCausalLM"):
        import_adapter(path, "ppd", make_model(), tmp_path / "ppd")
