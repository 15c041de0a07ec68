"""Medusa heads for vLLM: the files, and vLLM itself where there is one.

``HF_SPEC_VLLM_PYTHON`` names an interpreter with vLLM up to 0.32, on the CPU.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoint import save_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_spec
from hf_spec.adapters.active import find_active
from hf_spec.bench.prompts import encode_prompts
from hf_spec.demo.demo import adapter_folders, model_folder
from hf_spec.demo.prompts import demo_prompts
from hf_spec.drafting.heads import head_logits, head_states
from hf_spec.hub.transfer import export_adapter, import_adapter

HIDDEN = 32
VARIABLE = "HF_SPEC_VLLM_PYTHON"
WORKER = Path(__file__).with_name("vllm_worker.py")
NEW_TOKENS, HEADS = 40, 4


def load(checkpoint: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    return model


class VllmBlock(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        size, bias = config["hidden_size"], config["medusa_fc_bias"]
        self.layers = nn.ModuleList(
            nn.Linear(size, size, bias=bias) for _ in range(config["num_hidden_layers"])
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return x


class VllmMedusa(nn.Module):
    """Parameters as vllm/model_executor/models/medusa.py names them, from its config.json."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        assert config["model_type"] == "medusa" and config["architectures"] == ["MedusaModel"]
        assert config["n_predict"] == config["num_heads"]
        heads = range(config["num_heads"])
        self.blocks = nn.ModuleList(VllmBlock(config) for _ in heads)
        shape = config["hidden_size"], config["vocab_size"]
        assert config["truncated_vocab_size"] == config["vocab_size"]  # else there is a token_map
        if config["original_lm_head"]:
            self.lm_head = nn.Linear(*shape, bias=False)
            self.heads = [self.lm_head for _ in heads]
        else:
            self.lm_heads = nn.ModuleList(nn.Linear(*shape, bias=False) for _ in heads)
            self.heads = list(self.lm_heads)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The tokens that are drafted, ``(n, heads)``."""
        rows = torch.stack([head(block(hidden)) for block, head in zip(self.blocks, self.heads)], 1)
        return rows.argmax(-1)


SHAPES = [
    {"num_layers": 1},
    {"num_layers": 2, "projection": "own"},
    {"num_layers": 2, "draft_vocab_size": 40, "transition_rank": 3},
    {"root_rank": 2},
]


def drafted(model: Any, weights: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each head, ``(n, heads)``, for hidden states ``(n, hidden)``."""
    return head_logits(model, weights, head_states(weights, hidden)).argmax(-1)


@pytest.mark.parametrize("fields", SHAPES, ids=["shared", "own", "some tokens", "root"])
def test_export_for_vllm_and_back(
    tmp_path: Path, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = save_checkpoint(tmp_path / "base")
    base = load(checkpoint)
    base.add_adapter(hf_spec.MedusaConfig(num_heads=2, **fields))
    weights = find_active(base, "MEDUSA").weights()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in weights.values():
            if value.is_floating_point():
                value += 0.2 * torch.randn(value.shape, generator=generator)
    base.save_pretrained(tmp_path / "adapter")
    plain = load(checkpoint)
    with caplog.at_level(logging.WARNING):
        export_adapter(tmp_path / "adapter", "vllm", plain, tmp_path / "vllm")
    partial = "transition_rank" in fields or "root_rank" in fields
    assert ("root correction are left out" in caplog.text) == partial
    assert not hasattr(plain, "spec_modules")

    described = json.loads((tmp_path / "vllm" / "config.json").read_text())
    theirs = VllmMedusa(described)
    theirs.load_state_dict(load_file(tmp_path / "vllm" / "model.safetensors"))  # names and shapes
    hidden = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2))
    assert torch.equal(theirs(hidden), drafted(base, weights, hidden))

    path = tmp_path / "vllm" / "model.safetensors"
    again = load(checkpoint)
    again.load_adapter(str(import_adapter(path, "medusa", load(checkpoint), tmp_path / "back")))
    found = find_active(again, "MEDUSA")
    assert found.config.projection == fields.get("projection", "shared")
    assert found.weights().keys() == weights.keys() & {"weights", "biases", "projections"}
    for name, value in found.weights().items():
        assert torch.equal(value, weights[name])


def test_vllm_has_no_output_biases(tmp_path: Path) -> None:
    from transformers import PhiConfig, PhiForCausalLM

    config = PhiConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = PhiForCausalLM(config)
    model.add_adapter(hf_spec.MedusaConfig())
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="PhiForCausalLM has output embeddings with a bias"):
        export_adapter(tmp_path / "adapter", "vllm", PhiForCausalLM(config), tmp_path / "vllm")


# -- vLLM itself ---------------------------------------------------------------------------------


def ask_vllm(prompts: list[list[int]], new_tokens: int, speculative: Any) -> dict[str, Any]:
    """What ``vllm_worker.py`` answers."""
    asked = {
        "model": str(model_folder()), "prompts": prompts, "max_new_tokens": new_tokens,
        "speculative": speculative,
    }  # fmt: skip
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [os.environ[VARIABLE], str(WORKER)], input=json.dumps(asked), env={**inherited, **own},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-9000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def asked() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of the demo, and what vLLM answers without speculation, somewhat longer."""
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} names no interpreter with vLLM up to 0.32")
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    texts = demo_prompts(lambda text: len(tokenizer(text)["input_ids"]))[:3]
    prompts, _ = encode_prompts(load(model_folder()), tokenizer, texts, NEW_TOKENS)
    return prompts, ask_vllm(prompts, NEW_TOKENS + HEADS, None)["tokens"]


@torch.no_grad()
def expected_counts(model: Any, weights: Any, prompts: Any, answers: Any, depth: int) -> Any:
    """Drafts until there are `NEW_TOKENS`, and how many of each depth are right.

    Like vLLM, this counts tokens of the last draft that are right and no longer wanted.
    """
    drafts, accepted = 0, [0] * depth
    for prompt, answer in zip(prompts, answers, strict=True):
        hidden = model(torch.tensor([prompt + answer]), output_hidden_states=True).hidden_states
        guesses = drafted(model, weights, hidden[-1][0]).tolist()
        place = 0  # of the token that the model itself is sure of
        while place + 1 < NEW_TOKENS:
            guess = guesses[len(prompt) - 1 + place][:depth]
            right = 0
            for token, wanted in zip(guess, answer[place + 1 :]):
                if token != wanted:
                    break
                accepted[right] += 1
                right += 1
            drafts += 1
            place += 1 + right
    return drafts, accepted


@pytest.mark.parametrize(
    ("fields", "depth"),
    [({"draft_vocab_size": 500}, HEADS), ({"projection": "own"}, 2)],
    ids=["shared", "own"],
)
def test_vllm_drafts_with_exported_heads(
    tmp_path: Path, asked: Any, fields: dict[str, Any], depth: int
) -> None:
    """Its answers stay the same, and as many drafts are accepted as our heads guess right."""
    prompts, plain = asked
    shipped = next(folder for folder in adapter_folders() if folder.name == "medusa")
    model = load(model_folder())
    model.load_adapter(str(shipped))
    trained = {name: one.clone() for name, one in find_active(model, "MEDUSA").weights().items()}
    model = load(model_folder())
    model.add_adapter(hf_spec.MedusaConfig(num_heads=HEADS, **fields))
    weights = find_active(model, "MEDUSA").weights()
    for name, value in weights.items():
        if name in trained:
            value.data.copy_(trained[name])
    model.save_pretrained(tmp_path / "adapter")
    export_adapter(tmp_path / "adapter", "vllm", load(model_folder()), tmp_path / "vllm")

    speculative = {"method": "medusa", "model": str(tmp_path / "vllm")}
    if depth != HEADS:  # else it is what config.json says
        speculative["num_speculative_tokens"] = depth
    found = ask_vllm(prompts, NEW_TOKENS, speculative)
    assert found["tokens"] == [answer[:NEW_TOKENS] for answer in plain]
    drafts, accepted = expected_counts(model, weights, prompts, plain, depth)
    assert accepted[0] > 10  # or the counts would say little
    assert (found["drafts"], found["accepted"]) == (drafts, accepted)
