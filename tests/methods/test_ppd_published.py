"""Prompt tokens that the method's author has published become an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from running import configured
from safetensors.torch import save_file
from tiny_checkpoint import make_model

import hf_spec
from hf_spec.adapters.active import find_active
from hf_spec.hub.folder import check_complete
from hf_spec.hub.transfer import import_adapter


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_prompt_embeddings(tmp_path: Path, suffix: str) -> None:
    """As PEFT's prompt tuning stores them: one tensor (prompt tokens, hidden)."""
    embeddings = torch.randn(3, 32)
    path = tmp_path / f"adapter_model{suffix}"
    state = {"prompt_embeddings": embeddings}
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    model = make_model()
    output = import_adapter(path, "ppd", model, tmp_path / "ppd")
    check_complete(output)
    model.load_adapter(str(output))
    adapter = find_active(model, "PPD")
    assert adapter.config.num_prompt_tokens == 3
    assert torch.equal(adapter.weights()["prompts"], embeddings)
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
