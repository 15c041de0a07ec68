"""EAGLE-3's decoder against what speculators computed, through the drafter's own steps."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_same
from naive_cache import row_of
from peft import get_peft_model
from running import drafting
from safetensors.torch import load_file
from step_by_hand import chain, commit, frontier, started
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

from hf_spec.adapters.loading import find_active
from hf_spec.methods.eagle3 import Eagle3Config, Eagle3Network
from hf_spec.predict.losses import Own, prediction_losses, unrolled
from hf_spec.tools.transfer import convert

FIXTURES = Path(__file__).parent.parent / "fixtures" / "drafters" / "eagle3"
NAMES = ["tiny-llama", "tiny-llama-original", "tiny-llama-before-fc", "tiny-qwen3-31"]
#: Between implementations in float32; values are of the size of 1.
NEAR: dict[str, Any] = {"atol": 1e-5, "rtol": 0.0}

every_fixture = pytest.mark.parametrize("name", NAMES)


@cache
def base() -> Any:
    """A model of the shape of the fixtures' bases, whose states are read from files."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, pad_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


class Fixture:
    """A drafter of a fixture, and the fixture's tensors."""

    def __init__(self, name: str):
        self.io = load_file(FIXTURES / name / "io.safetensors")
        self.log = json.loads((FIXTURES / name / "meta.json").read_text())["log"]
        config, tensors = convert(FIXTURES / name / "model.safetensors", "eagle3")
        self.model = base()
        self.model.add_adapter(config, name)
        self.adapter = find_active(self.model, "EAGLE3")
        for key, weight in self.adapter.tensors().items():
            weight.data.copy_(tensors[key])
        self.ids, self.features = self.io["ids"], self.io["base.features"]

    def steps(self, drafter: Any) -> Iterator[tuple[int, int]]:
        """The recorded steps, after each of which the drafter has states of so many tokens."""
        done = 0
        for step, entry in enumerate(self.log):
            end = entry["committed"] - 1
            commit(drafter, self.ids, self.features, [(done, end)])
            yield step, end
            done = end


@pytest.fixture
def fixture(name: str) -> Any:
    made = Fixture(name)
    with torch.no_grad():
        yield made
    made.model.delete_adapter(name)


@every_fixture
def test_chains_after_partial_acceptance(fixture: Any, name: str) -> None:
    drafter = started("eagle3", fixture.model)
    for step, _ in fixture.steps(drafter):
        tokens, logits = chain(drafter)
        assert tokens.tolist() == fixture.io[f"step{step}.chain_tokens"].tolist()
        torch.testing.assert_close(logits, fixture.io[f"step{step}.chain_logits"], **NEAR)
        keys, _ = row_of(drafter.cache, 0, 0)
        torch.testing.assert_close(keys, fixture.io[f"step{step}.cache_keys"][0], **NEAR)


@every_fixture
def test_tree(fixture: Any, name: str) -> None:
    drafter, io = started("eagle3", fixture.model), fixture.io
    commit(drafter, fixture.ids, fixture.features, [(0, 13)])
    logits = drafter.level(frontier(0, fixture.ids[:, 13:14]))[:, 0]
    best = logits.topk(3).indices
    best = best if drafter.token_ids is None else drafter.token_ids[best]
    assert best[0].tolist() == io["tree.tokens"][:3].tolist()
    for level in range(3):
        nodes = slice(3 * level, 3 * level + 3)
        above = (io["tree.parents"][nodes] - 3 * (level - 1)).clamp(min=0) * (level > 0)
        tokens = io["tree.tokens"][None, nodes]
        logits = drafter.level(frontier(level + 1, tokens, above[None]))
        torch.testing.assert_close(logits[0], io["tree.logits"][nodes], **NEAR)


@pytest.mark.parametrize("name", ["tiny-llama"])
def test_training_time_test(fixture: Any, name: str) -> None:
    """speculators' logits and losses, whose chains begin everywhere, with decay 1."""
    io, steps, seq = fixture.io, 3, fixture.ids.shape[1]
    network = Eagle3Network(fixture.model, fixture.adapter)
    anchors = torch.arange(seq - 1)[None]
    logits = unrolled(network, fixture.ids, fixture.features, anchors, steps)
    sums = dict.fromkeys(("kl", "ce"), 0.0)
    for step in range(steps):
        # Chains that leave the text are not compared.
        count = seq - 1 - step
        torch.testing.assert_close(
            logits[0, :count, step], io["train.logits"][step, :count], **NEAR
        )
        targets = io["base.logits"][:, 1 + step :, network.token_ids]
        for kind in sums:
            own = targets[:, :count]
            given = None if kind == "ce" else Own(own.softmax(-1))
            losses = prediction_losses(logits[:, :count, step], own.argmax(-1), given)
            sums[kind] += losses.mean()
    torch.testing.assert_close(sums["kl"], io["train.loss.kl_div"], **NEAR)
    torch.testing.assert_close(sums["ce"], io["train.loss.ce"], **NEAR)


@pytest.mark.parametrize("name", ["peagle-tiny-llama", "peagle-tiny-qwen3"])
def test_parallel_drafts(fixture: Any, name: str) -> None:
    """P-EAGLE: mask rows behind the true ones, whose logits no draft token changes; in training,
    too."""
    drafter, io = started("eagle3", fixture.model), fixture.io
    for step, end in fixture.steps(drafter):
        tokens, logits = chain(drafter)
        assert tokens[:, :4].tolist() == io[f"step{step}.draft_tokens"].tolist()
        torch.testing.assert_close(logits[:, :4], io[f"step{step}.logits"][:, -4:], **NEAR)
        assert drafter.cache.host_lengths == [end]
        anchors = torch.tensor([[end - 1]])
        trained = unrolled(drafter.network, fixture.ids, fixture.features, anchors, 4)
        torch.testing.assert_close(trained[:, 0], io[f"step{step}.logits"][:, -4:], **NEAR)


def test_a_base_whose_embeddings_are_narrower_than_its_states() -> None:
    """As those of OPT-350m: the decoder has the embeddings' width and reads the states'."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=61, hidden_size=32, word_embed_proj_dim=16, ffn_dim=48, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=64, do_layer_norm_before=False, init_std=0.2,
    )  # fmt: skip
    model = get_peft_model(
        AutoModelForCausalLM.from_config(config).eval(), Eagle3Config(draft_vocab_size=0)
    )
    ids = torch.arange(3, 15)[None]
    out = model(input_ids=ids, labels=ids, anchors=torch.tensor([[4, 6]]))
    assert out["loss"].isfinite() and out["logits"].shape == (1, 2, 7, 61)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    check_same(model, drafting("eagle3"), input_ids=ids, **settings)


def test_states_of_each_layer_count_alike_however_large_they_are() -> None:
    """By default, which RMS norms of each layer's own do, at first with weights of 1; an adapter
    of the paper takes them as they are."""
    model, states = base(), torch.randn(1, 5, 3, 64)
    larger = states * torch.tensor([1.0, 1000.0, 0.1])[:, None]
    for config, alike in ((Eagle3Config(), True), (Eagle3Config(fc_norm=False), False)):
        model.add_adapter(config, "sized")
        network = Eagle3Network(model, find_active(model, "EAGLE3"))
        with torch.no_grad():
            once, then = (network.features(one.flatten(2)) for one in (states, larger))
            normed = states / states.pow(2).mean(-1, keepdim=True).sqrt()
            expected = normed.flatten(2) @ network.adapter.fc.weight.T
        model.delete_adapter("sized")
        assert torch.allclose(once, then, atol=1e-2 * float(once.abs().max())) is alike
        if alike:
            torch.testing.assert_close(once, expected, atol=1e-4, rtol=1e-4)
