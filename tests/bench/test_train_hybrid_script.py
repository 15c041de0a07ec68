"""The hybrid model of the benchmarks, made out of a Llama."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scripts import load_script
from tiny_checkpoint import save_checkpoint, write_prompts
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("train_hybrid_model")


def make_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_a_hybrid_starts_from_a_llama(script: ModuleType) -> None:
    llama = make_llama()
    for layer in llama.model.layers:  # norms that are not the initial ones
        torch.nn.init.uniform_(layer.input_layernorm.weight, 0.5, 1.5)
        torch.nn.init.uniform_(layer.post_attention_layernorm.weight, 0.5, 1.5)
    hybrid = script.convert(llama)
    assert hybrid.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert {name for name, p in hybrid.named_parameters() if p.requires_grad} == {
        name
        for name, _ in hybrid.named_parameters()
        if ".linear_attn." in name or ".self_attn." in name
    }
    # Without mixers both models are the same.
    with torch.no_grad():
        for layer in llama.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        for layer in hybrid.model.layers:
            mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
            (mixer.out_proj if hasattr(mixer, "out_proj") else mixer.o_proj).weight.zero_()
        input_ids = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(1))
        ours, theirs = hybrid(input_ids=input_ids).logits, llama(input_ids=input_ids).logits
    torch.testing.assert_close(ours, theirs)


def test_full_attention_gives_the_values_of_the_llama(script: ModuleType) -> None:
    """Normalized keys and queries weigh tokens otherwise: with one token there is one weight."""
    llama = make_llama()
    theirs, ours = llama.model.layers[3].self_attn, script.convert(llama).model.layers[3].self_attn
    hidden = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(1))
    rotary = llama.model.rotary_emb(hidden, torch.zeros(2, 1, dtype=torch.long))
    with torch.no_grad():
        torch.testing.assert_close(
            ours(hidden, position_embeddings=rotary, attention_mask=None)[0],
            theirs(hidden, position_embeddings=rotary, attention_mask=None)[0],
        )


def test_training_goes_on_from_its_checkpoint(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two steps, and two more in a second run, are the four of one run; the loss falls."""
    monkeypatch.setattr(script, "SEQ_LENGTH", 16)
    monkeypatch.setattr(script, "HELD_OUT", 2)
    monkeypatch.setattr(script, "WARMUP_STEPS", 1)
    monkeypatch.setattr(script, "SAVE_EVERY", 2)
    monkeypatch.setattr(script, "LOG_EVERY", 1)
    llama = make_llama()
    stream = torch.randint(40, (160,), generator=torch.Generator().manual_seed(1))

    class Interrupted(Exception):
        pass

    def run(checkpoint: Path, ends_at: int | None = None) -> list[dict[str, float]]:
        torch.manual_seed(0)
        hybrid = script.convert(llama)

        def loss(*args: Any) -> Any:
            nonlocal ends_at
            if ends_at == 0:
                raise Interrupted
            ends_at = None if ends_at is None else ends_at - 1
            return distillation_loss(*args)

        distillation_loss = script.distillation_loss
        with monkeypatch.context() as patched:
            patched.setattr(script, "distillation_loss", loss)
            history: list[dict[str, float]] = script.train(hybrid, llama, stream, 4, checkpoint)
        return history

    whole = run(tmp_path / "whole.pt")
    with pytest.raises(Interrupted):
        run(tmp_path / "parts.pt", ends_at=3)
    assert torch.load(tmp_path / "parts.pt")["step"] == 2
    assert run(tmp_path / "parts.pt") == whole
    assert [row["step"] for row in whole] == [1, 2, 3, 4, 4]
    assert whole[3]["loss"] < whole[0]["loss"]


def test_it_writes_a_checkpoint(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "SEQ_LENGTH", 48)
    monkeypatch.setattr(script, "HELD_OUT", 2)
    folder = save_checkpoint(tmp_path / "llama", layers=4)
    rows = [{"question": "a b", "answer": "c"}, {"prompt": "b", "completion": "a c"}] * 30
    write_prompts(tmp_path / "data.jsonl", rows)
    script.main([
        str(folder), str(tmp_path / "out"), str(tmp_path / "data.jsonl"), "--steps", "1",
    ])  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.model_type == "qwen3_5_text" and model.dtype == torch.bfloat16
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["history"][-1]["step"] == 1


def test_rows_without_an_answer_are_refused(script: ModuleType, tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "data.jsonl", [{"question": "a", "completion": 3}])
    with pytest.raises(ValueError, match="data.jsonl, line 1: a row has a question or prompt, and"):
        script.conversations([data])
