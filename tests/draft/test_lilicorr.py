"""LiLiCorr's head against its formulas, one candidate at a time."""

import math
from typing import Any

import pytest
import torch
from adapter_oracle import randomise
from conftest import Tiny, prompt
from method_variants import LILICORR
from torch import Tensor

import hf_spec
from hf_spec.adapters.loading import find_active
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.methods.registry import methods
from hf_spec.predict.blocks import block_sequences
from hf_spec.predict.lilicorr import LiLiCorr
from hf_spec.target.sequences import token_hidden

BLOCK, ROOT = 5, 4  # tokens of a block, and the column of its first one
VARIANTS: dict[str, dict[str, Any]] = {
    "narrow": {},
    "as wide as the drafter": {"markov_width": 32, "lattice_heads": 4, "lattice_layers": 1},
    "draft vocabulary": {"draft_vocab_size": 20},
    "more candidates than tokens": {"selector_top_k": 70, "draft_vocab_size": 7},
    "one candidate": {"selector_top_k": 1},
    "convolutions": {"conv_kernel_size": 2, "conv_group_size": 8},
}


def made(model: Any, **fields: Any) -> tuple[Any, Any]:
    """A drafter, and its adapter of random parameters."""
    given = {"block_size": BLOCK, "num_layers": 1, "draft_vocab_size": 0, **LILICORR, **fields}
    model.add_adapter(hf_spec.DFlashConfig(**given))
    randomise(model, "DFLASH", std=0.4)
    method = methods()["dflash"]
    drafter = method.make_drafter(model, method.parse_options({}))
    return drafter.predictor, find_active(model, "DFLASH")


def linear(weights: dict[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    return weights[f"lilicorr.{name}.weight"] @ inputs + weights[f"lilicorr.{name}.bias"]


def mlp(weights: dict[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    inner = linear(weights, f"{name}.up_proj", inputs)
    return linear(weights, f"{name}.down_proj", inner * inner.sigmoid())


def norm(weights: dict[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    size = (inputs.pow(2).mean() + 1e-6).sqrt()
    return inputs / size * weights[f"lilicorr.{name}.weight"]


def unit(inputs: Tensor) -> Tensor:
    return inputs / max(float(inputs.norm()), 1e-6)


def scores_of(
    model: Any, adapter: Any, hidden: Tensor, logits: Tensor, context: Tensor, ids: list[int]
) -> tuple[list[list[int]], list[Any]]:
    """Places of the candidates of each slot, among the ids that can be drafted, and the score of
    each after each one of the slot before; of the first slot after the root."""
    config, weights = adapter.config, adapter.tensors()
    slots, count = len(hidden), min(config.selector_top_k, logits.shape[-1])
    embeddings = model.get_input_embeddings().weight
    candidates = [row.argsort(descending=True)[:count].tolist() for row in logits]
    lattice: list[tuple[int, Tensor]] = []
    for slot in range(slots):
        log_probs = logits[slot].log_softmax(-1)
        first = float(log_probs[candidates[slot][0]])
        for rank, place in enumerate(candidates[slot]):
            own = float(log_probs[place])
            share = rank / (count - 1) if count > 1 else 0.0
            numbers = torch.tensor([own, math.exp(own), own - first, share, float(rank == 0)])
            numbers = (numbers - numbers.mean()) / (numbers.var(unbiased=False) + 1e-5).sqrt()
            numbers = numbers * weights["lilicorr.feature_norm.weight"]
            numbers = numbers + weights["lilicorr.feature_norm.bias"]
            state = embeddings[ids[place]]
            if "lilicorr.token_proj.weight" in weights:
                state = linear(weights, "token_proj", state)
            state = state + linear(weights, "pass_hidden_proj", hidden[slot])
            state = state + mlp(weights, "feature_mlp", numbers)
            state = state + weights["lilicorr.slot_embedding"][0, 0, slot, 0]
            state = state + weights["lilicorr.rank_embedding"][0, 0, 0, rank]
            lattice.append((slot, state))
    for layer in range(config.lattice_layers):
        lattice = attended(weights, config, f"layers.{layer}.", lattice)
    anchor = norm(weights, "anchor_norm", linear(weights, "context_proj", context))
    incoming, outgoing = [], []
    for _, state in lattice:
        state = norm(weights, "output_norm", state)
        inner = linear(weights, "factor_input_proj", torch.cat([state, anchor, state * anchor]))
        inner = inner * inner.sigmoid()
        incoming.append(unit(linear(weights, "in_head", inner)))
        outgoing.append(unit(linear(weights, "out_head", inner)))
    root, scores = unit(linear(weights, "anchor_out_head", anchor)), []
    for slot in range(slots):
        after = outgoing[(slot - 1) * count : slot * count] if slot else [root]
        own = incoming[slot * count : (slot + 1) * count]
        scores.append([[config.lattice_scale * float(x @ y) for y in own] for x in after])
    return candidates, scores


def attended(
    weights: dict[str, Tensor], config: Any, layer: str, lattice: list[tuple[int, Tensor]]
) -> list[tuple[int, Tensor]]:
    """One layer: each candidate sees all of them."""
    width, heads = config.markov_width, config.lattice_heads
    size, rows = width // heads, []
    for slot, state in lattice:
        inner = norm(weights, f"{layer}attn_norm", state)
        row = weights[f"lilicorr.{layer}attn.in_proj_weight"] @ inner
        rows.append((slot, row + weights[f"lilicorr.{layer}attn.in_proj_bias"]))
    found = []
    for place, (slot, state) in enumerate(lattice):
        parts = []
        for head in range(heads):
            some = slice(head * size, (head + 1) * size)
            query, scored = rows[place][1][:width][some], []
            for other, row in rows:
                score = query @ row[width : 2 * width][some] / size**0.5
                distance = slot - other + config.block_size - 1
                score = score + weights["lilicorr.relative_slot_bias"][head, distance]
                if other == slot:
                    score = score + weights["lilicorr.same_slot_bias"][head]
                scored.append(score)
            shares = torch.stack(scored).softmax(0)
            parts.append(sum(x * row[2 * width :][some] for x, (_, row) in zip(shares, rows)))
        state = state + linear(weights, f"{layer}attn.out_proj", torch.cat(parts))
        inner = norm(weights, f"{layer}mlp_norm", state)
        found.append((slot, state + mlp(weights, f"{layer}mlp", inner)))
    return found


@pytest.mark.parametrize("slots", [BLOCK - 1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_probabilities_are_those_of_the_formulas(fresh: Tiny, variant: str, slots: int) -> None:
    """Given candidates of each slot, and given a token that is none, after which the block's own
    logits count; also of the first slots alone."""
    model, ids = fresh("llama"), prompt(9)
    predictor, adapter = made(model, **VARIANTS[variant])
    states = block_sequences(predictor.network, ids, None, torch.tensor([[ROOT - 1]]))
    states = states[0, :, :slots]
    logits, hidden = predictor.logits(states)[0], states[0, :, :32]
    features = token_hidden(model, ids, None, tuple(adapter.config.layers))[0, ROOT - 1]
    context = adapter.hidden_norm(adapter.fc(features))
    drafted = range(61) if predictor.token_ids is None else predictor.token_ids.tolist()
    candidates, scores = scores_of(model, adapter, hidden, logits, context, list(drafted))
    for rank in (*range(min(len(candidates[0]), 3)), None):
        before = [int(ids[0, ROOT])]
        for slot in range(slots - 1):
            others = [x for x in range(61) if x not in [drafted[y] for y in candidates[slot]]]
            before.append(others[0] if rank is None else drafted[candidates[slot][rank]])
        found = predictor.given(states, torch.tensor([before]))[0]
        for slot in range(slots):
            expected = logits[slot].clone()
            if not slot or rank is not None:
                places = candidates[slot]
                own = torch.tensor(scores[slot][rank if slot and rank else 0])
                expected[places] = own.log_softmax(-1) + expected[places].logsumexp(-1)
            torch.testing.assert_close(found[slot], expected, rtol=0.0, atol=2e-5)


def test_training_reaches_all_of_it(fresh: Tiny) -> None:
    """The loss is the cross-entropy with the head and without it; all of the head's tensors, and
    the drafter's layers through the candidates' probabilities, get gradients."""
    model, ids = fresh("llama"), prompt(12)
    predictor, adapter = made(model, selector_top_k=61, loss="hard", decay=0.8)
    anchors = torch.tensor([[2, 4]])
    batch = TrainingBatch(ids, ids, anchors)
    found = methods()["dflash"].objective(model, adapter, batch)
    states = block_sequences(predictor.network, ids, None, anchors)[0]
    expected, weight = torch.tensor(0.0), adapter.config.decay
    plain, given = predictor.logits(states), []
    for row, anchor in enumerate(anchors[0].tolist()):
        tokens = ids[:, anchor + 1 : anchor + BLOCK]
        given.append(predictor.given(states[row, None], tokens)[0])
    for distance in range(BLOCK - 1):
        for row, anchor in enumerate(anchors[0].tolist()):
            wanted = ids[0, anchor + 2 + distance]
            for logits in (plain[row, distance], given[row][distance]):
                loss = -logits.log_softmax(-1)[wanted] / anchors.shape[1]
                expected = expected + loss * weight ** (distance + 1)
    torch.testing.assert_close(found["loss"], expected)
    found["loss"].backward()
    for name, tensor in adapter.named_parameters():
        assert tensor.grad is not None and tensor.grad.any(), name
    head: Any = LiLiCorr(predictor.network)
    fresh_ones = head.fresh(adapter.config, 61, model)
    assert fresh_ones["lilicorr.output_norm.weight"].eq(1).all()
    assert not fresh_ones["lilicorr.relative_slot_bias"].any()
