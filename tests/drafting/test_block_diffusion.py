"""Block drafters against what other programs compute: tests/fixtures/drafters/block_diffusion."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.verify import StepResult
from hf_spec.drafting.block_diffusion.network import block_sequences
from hf_spec.tools.hub.transfer import importable

OURS = Path(__file__).parents[1] / "fixtures" / "drafters" / "block_diffusion"
SHARED = Path(__file__).parents[2].parent / "shared" / "drafters"
#: Variants that are copied, and others.
SMALL = [
    "dflash/tiny-llama-draft-vocab", "dflash/tiny-qwen3-window", "dspark/tiny-llama-gated",
    "dspark/tiny-qwen3-rnn", "dflash2/tiny-llama",
]  # fmt: skip
LARGE = [
    "dflash/tiny-llama", "dflash/tiny-llama-one-layer", "dspark/tiny-llama-vanilla",
    "dspark/tiny-llama-fill",
]  # fmt: skip
#: Rounding of float32: the programs agree to 2e-6.
CLOSE = {"rtol": 0.0, "atol": 1e-5}


def folder_of(name: str) -> Path:
    for root in (OURS, SHARED):
        if (root / name).is_dir():
            return root / name
    pytest.skip(f"../shared/drafters/{name} is not there")


@cache
def base_of(name: str) -> Any:
    """A model with the embeddings of a fixture's base: the rest of it is not run."""
    kind = "qwen3" if "qwen3" in name else "llama"
    own, shared = OURS / f"base-{kind}.safetensors", SHARED / f"base/tiny-{kind}/model.safetensors"
    weights = load_file(own if own.is_file() else shared)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    model.get_input_embeddings().weight.data = weights["model.embed_tokens.weight"].float()
    model.get_output_embeddings().weight.data = weights["lm_head.weight"].float()
    return model


def drafter_of(name: str, layout: str = "drafter") -> Any:
    """A drafter of chains with an imported checkpoint."""
    kind = name.partition("/")[0].removesuffix("2")
    (method, reader), folder = importable(kind), folder_of(name) / layout
    tensors, model = load_file(folder / "model.safetensors"), base_of(name)
    tensors = {key: value for key, value in tensors.items() if reader.wants(key)}
    config = json.loads((folder / "config.json").read_text())
    fields, weights = reader.convert(tensors, config)
    adapter = f"{name}/{layout}".replace("/", "-")
    if adapter not in getattr(model, "peft_config", {}):
        model.add_adapter(method.adapter_config(**fields), adapter)
        module = model.spec_modules[f"type_{method.name}"].adapters[adapter]
        module.load_state_dict(weights)
    model.set_adapter(adapter)
    return method.make_drafter(model, method.parse_options({"tree": "chain"}))


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "drafter") for name in SMALL + LARGE] + [("dflash/tiny-llama", "drafter_zlab_layout")],
)
@torch.no_grad()
def test_a_block_is_that_of_the_reference(name: str, layout: str) -> None:
    """Context of several steps, each with some accepted tokens; the block's states and logits; and
    the chain of a Markov head."""
    drafter = drafter_of(name, layout)
    io, done = load_file(folder_of(name) / "io.safetensors"), 0
    log = json.loads((folder_of(name) / "meta.json").read_text())["log"]
    state = SimpleNamespace(
        batch_size=2, max_depth=99, noise=None, active=[True] * 2, cache=TreeCache(1, 2, "cpu"),
        target=SimpleNamespace(graphs=None),
    )  # fmt: skip
    drafter.start(state)
    for step, entry in enumerate(log):
        committed = entry["committed"]
        count, root = committed - 1 - done, io["ids"][:, committed - 1].expand(2)
        # The second row gets its first context in two parts.
        counts = torch.tensor([count, count])
        features = io[f"step{step}.features"].float().expand(2, -1, -1)
        if not step:
            half = torch.tensor([count, 3])
            drafter.advance(result(features, half), features)
            rest = features.clone()
            rest[1, : count - 3] = features[1, 3:]
            features, counts = rest, torch.tensor([0, count - 3])
        drafter.advance(result(features, counts), features)
        state.root = root
        tree = drafter.propose(state)
        first = io[f"step{step}.hidden"].shape[1] - drafter.network.config.distances
        for row in range(2):
            expected = io[f"step{step}.hidden"][0, first:].float()
            torch.testing.assert_close(drafter.hidden[row], expected, **CLOSE)
            logits = drafter.logits(drafter.hidden)[row]
            torch.testing.assert_close(logits, io[f"step{step}.logits"][0, first:].float(), **CLOSE)
            keys = io[f"step{step}.cache_keys"][0, :, : committed - 1].float()
            own = drafter.cache.layers[0].keys[row, :, : committed - 1]
            torch.testing.assert_close(own, keys, **CLOSE)
        assert tree.tokens[:, 1:].tolist() == io[f"step{step}.draft_tokens"].tolist() * 2
        if f"step{step}.candidate_ids" in io:
            ids, scores = (
                io[f"step{step}.candidate_{x}"].expand(2, -1, -1) for x in ("ids", "scores")
            )
            previous = torch.cat([root[:, None], tree.tokens[:, 1:-1]], 1)
            given = drafter.given(drafter.hidden, previous)
            torch.testing.assert_close(given.gather(-1, ids), scores.float(), **CLOSE)
            assert given.isfinite().sum(-1).unique().tolist() == [ids.shape[-1]]
        if f"step{step}.biased_logits" in io:
            previous = io[f"step{step}.previous_tokens"].expand(2, -1)
            sure = drafter.markov_head.confidence(previous, drafter.hidden)
            expected = (
                io[f"step{step}.confidence_logits"].float().sigmoid().reshape(1, -1).expand(2, -1)
            )
            torch.testing.assert_close(sure, expected, **CLOSE)
            given = drafter.given(drafter.hidden, previous)
            expected = io[f"step{step}.biased_logits"].float().expand(2, -1, -1)
            torch.testing.assert_close(given, expected, **CLOSE)
        done = committed - 1


def result(features: Tensor, counts: Tensor) -> StepResult:
    path = torch.arange(features.shape[1]).expand(len(features), -1)
    return StepResult(path, counts, torch.zeros_like(path), *[torch.zeros_like(counts)] * 3)


@pytest.mark.parametrize("name", SMALL + LARGE)
@torch.no_grad()
def test_training_runs_the_blocks_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Blocks at several anchors of a sequence at once, in two rows with padding on either side."""
    drafter = drafter_of(name)
    io, network = load_file(folder_of(name) / "io.safetensors"), drafter.network
    ids, features = io["ids"], io["base.features"].float()
    padded = torch.zeros(2, ids.shape[1] + 3, dtype=torch.long)
    states = features.new_zeros(2, ids.shape[1] + 3, features.shape[2])
    mask = torch.zeros_like(padded)
    anchors = io["train.anchors"].long() - 1  # speculators' anchor is the block's first token
    for row, start in enumerate((0, 3)):
        padded[row, start : start + ids.shape[1]] = ids[0]
        states[row, start : start + ids.shape[1]] = features[0]
        mask[row, start : start + ids.shape[1]] = 1
    module = "hf_spec.drafting.block_diffusion.network.token_hidden"
    monkeypatch.setattr(module, lambda *_: states)
    both = torch.stack([anchors, anchors + 3])
    hidden = block_sequences(network, padded, mask, both)
    first = io["train.hidden"].shape[1] - hidden.shape[2]
    expected = io["train.hidden"][:, first:].float()
    for row in range(2):
        torch.testing.assert_close(hidden[row], expected, **CLOSE)
