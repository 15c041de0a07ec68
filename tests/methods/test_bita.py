"""BITA: its loss against one anchor at a time, and straightforward decoding."""

from typing import Any

import pytest
import torch
from adapter_oracle import PAPERS, added, cache_behind, losses_one_by_one, randomise, two_answers
from conftest import Tiny, check_same, prompt
from peft import get_peft_model
from running import drafting, proposals
from transformers import DynamicCache, GraniteConfig, GraniteForCausalLM

import hf_spec
from hf_spec.modeling_patches.modules import CACHE

# -- loss: eq. (1) -----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", ["deep", "shallow", "none"])
def test_loss_against_one_anchor_at_a_time(fresh: Tiny, depth: str) -> None:
    model: Any = fresh()
    if depth == "none":  # a model that divides its logits
        torch.manual_seed(0)
        sizes = {**model.config.to_dict(), "model_type": "granite", "logits_scaling": 2.0}
        model = GraniteForCausalLM(GraniteConfig(**sizes)).eval()
    config = hf_spec.BitaConfig(
        num_prompt_tokens=4, prompt_depth=depth, num_mask_tokens=2, **PAPERS
    )
    peft_model, batch = get_peft_model(model, config), two_answers()
    weights = randomise(model, "BITA", std=0.4)
    found = losses_one_by_one(model, batch, lambda ids: naive(model, ids, weights, depth))
    means = [torch.stack([loss for _, loss in row]).mean() for row in found]
    loss = peft_model(**batch)["loss"]
    torch.testing.assert_close(loss, torch.stack(means).mean(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("depth", ["deep", "shallow"])
def test_the_base_drops_nothing_out_in_training(fresh: Tiny, depth: str) -> None:
    config = hf_spec.BitaConfig(num_prompt_tokens=4, prompt_depth=depth)
    peft_model, batch = get_peft_model(fresh("gpt2"), config).train(), two_answers()
    assert peft_model.config.resid_pdrop > 0
    loss = peft_model(**batch)["loss"]
    assert torch.equal(peft_model(**batch)["loss"], loss)
    assert all(module.training for module in peft_model.modules())


@torch.no_grad()
def naive(model: Any, ids: torch.Tensor, weights: dict, depth: str) -> torch.Tensor:
    """Logits of the mask tokens behind one prefix, by stock forwards."""
    nothing = torch.empty(2, 0, 8)
    front = [(nothing, nothing)] * len(model.model.layers)
    if depth == "deep":
        front = [*zip(weights["prompt_keys"], weights["prompt_values"])]
    elif depth == "shallow":
        own = DynamicCache()
        model(inputs_embeds=weights["prompts"][None], **{CACHE: own}, use_cache=True)
        front = [(layer.keys[0], layer.values[0]) for layer in own.layers]
    cache = cache_behind(model, ids, front)
    masks, slots = weights["masks"], cache.get_seq_length()
    visible = torch.ones(len(masks), slots + len(masks)).tril(slots)
    additive = torch.zeros_like(visible).masked_fill(visible == 0, torch.finfo(torch.float32).min)
    positions = torch.arange(len(ids), len(ids) + len(masks))[None]
    return model(
        inputs_embeds=masks[None], **{CACHE: cache}, position_ids=positions,
        attention_mask=additive[None, None],
    ).logits[0]  # fmt: skip


@pytest.mark.parametrize("processed", [{}, {"no_repeat_ngram_size": 9}])
def test_masks_predict_after_typical_acceptance(fresh: Tiny, processed: dict[str, int]) -> None:
    model = fresh()
    model.add_adapter(hf_spec.BitaConfig(num_mask_tokens=2))
    given = drafting("bita", acceptance="typical", lookup=False)
    model.generate(prompt(), do_sample=False, max_new_tokens=6, **processed, **given)
    stats = hf_spec.last_stats(model)
    assert stats is not None and stats.num_drafted_tokens > 0


def test_straightforward_decoding(fresh: Tiny) -> None:
    """Figure 4: one group of masks, which does not see the candidates. Where c of these were
    accepted, its first c predictions are overtaken, and the others are the next candidates."""
    model = fresh("llama")
    model.lm_head.weight.data[3:] *= 0.01  # three tokens, so that one guess in three is right
    weights = added(model, hf_spec.BitaConfig(**PAPERS), std=0.6, seed=5).tensors()
    with proposals(hf_spec.Drafter) as seen:
        out = check_same(
            model, drafting("bita", tree="straightforward"), prompt(), max_new_tokens=40
        )
    steps = [
        (tokens, tree.without_probes.tokens[0, 1:].tolist(), tree.num_nodes)
        for tokens, tree in seen
    ]
    known: list[int] = []  # the first step has none
    for (tokens, candidates, rows), (after, *_) in zip(steps, [*steps[1:], (out[0].tolist(),)]):
        room = out.shape[1] - len(tokens) - 1  # of the budget
        assert candidates == known[:room] and rows == 1 + len(candidates) + 3
        accepted = len(after) - len(tokens) - 1
        predicted = naive(model, torch.tensor(tokens), weights, "deep").argmax(-1).tolist()
        known = predicted[accepted:]
    counts = {len(candidates) for _, candidates, _ in steps[:-3]}  # there the budget ends
    assert counts >= {1, 2, 3}  # some were accepted, or none
