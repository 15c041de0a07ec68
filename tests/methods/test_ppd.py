"""PPD against the thesis: masks, loss, trees in every state, and what PEFT does with its adapters.

The oracle runs one place at a time by stock forwards, with masks written as the figures show them.
"""

import random
from itertools import cycle
from typing import Any

import pytest
import torch
from adapter_oracle import added, losses_one_by_one, two_answers
from conftest import VOCAB, Tiny, prompt, ragged
from method_variants import VARIANTS
from running import drafting, proposals
from transformers import DynamicCache

import hf_spec
from hf_spec.adapters.active import find_active
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree_states import TreeState, TreeStates
from hf_spec.drafting.tree_drafter import TreeSource
from hf_spec.methods.ppd import drafter as drafter_module
from hf_spec.methods.ppd.adapter import ept_group
from hf_spec.methods.ppd.adapter import loss as objective
from hf_spec.methods.ppd.drafter import PPDDrafter
from modeling_patches.cache_name import CACHE

NEW = 16
#: Everything that changes a forward, alone and together.
CONFIGS = VARIANTS["ppd"].configs
every_config = pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)


def with_adapter(model: Any, fields: dict[str, Any], seed: int = 1) -> Any:
    """A model with an adapter whose weights all matter."""
    added(model, hf_spec.PPDConfig(**fields), std=0.5, seed=seed)
    return model


# -- masks: figures 4.6 to 4.8 ------------------------------------------------------------------

#: Rows V1 to V4 of the figures: which of V1 to V4 each sees. V1 and V2 make S1, V3 and V4 make S2.
FIGURES = {
    "ensemble": ["1...", ".1..", "1.1.", ".1.1"],
    "decoder": ["1...", "11..", "111.", "1111"],
    "encoder": ["11..", "11..", "1111", "1111"],
}


@pytest.mark.parametrize("mask", FIGURES)
def test_masks_of_the_figures_and_larger_ones(mask: str) -> None:
    group = ept_group(2, 2, mask)
    assert group.offsets == (1, 1, 2, 2)
    drawn = ["".join("1" if seen else "." for seen in row) for row in group.visible]
    assert drawn == FIGURES[mask]
    group = ept_group(4, 3, mask)
    for query in range(12):
        for key in range(12):
            assert group.visible[query][key] == sees(mask, query, key, 3)


def sees(mask: str, query: int, key: int, num_ept: int) -> bool:
    """Section 4.4.3: whether an EPT attends to another; they count through, distance 1 first."""
    before, same = key // num_ept < query // num_ept, key // num_ept == query // num_ept
    if mask == "ensemble":
        return key % num_ept == query % num_ept and (before or same)
    return before or (same and (mask == "encoder" or key <= query))


# -- the oracle ---------------------------------------------------------------------------------


@torch.no_grad()
def naive(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits (m, vocab) of the prompt tokens behind ``ids`` (seq,) of a llama."""
    adapter = find_active(model, "PPD")
    config, weights = adapter.config, adapter.tensors()
    count, ept = config.num_prompt_tokens, config.num_ept
    cache = DynamicCache()
    model(input_ids=ids[None], **{CACHE: cache}, use_cache=True)
    rows = torch.full((count * ept, len(ids) + count * ept), -1e9)
    rows[:, : len(ids)] = 0
    for query in range(count * ept):
        for key in range(count * ept):
            if sees(config.ept_mask, query, key, ept):
                rows[query, len(ids) + key] = 0
    logits = model(
        inputs_embeds=weights["prompts"][None], **{CACHE: cache}, attention_mask=rows[None, None],
        position_ids=torch.tensor([[len(ids) + place // ept for place in range(count * ept)]]),
    ).logits.view(count, ept, -1)  # fmt: skip
    if config.ept_aggregation == "average":  # section 4.4.4
        return logits.mean(1)
    return (logits * weights["weights"][:, :, None]).sum(1)


# -- loss: eq. (4.1) ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind"), zip(CONFIGS.values(), cycle(["distillation", "hard"])), ids=CONFIGS
)
def test_loss_against_one_place_at_a_time(fresh: Tiny, fields: dict, kind: str) -> None:
    model = with_adapter(fresh("llama"), {**fields, "loss": kind, "decay": 0.7})
    batch = two_answers()
    found = losses_one_by_one(model, batch, lambda ids: naive(model, ids), hard=kind == "hard")
    means = [torch.stack([loss * 0.7 ** (d - 1) for d, loss in row]).mean() for row in found]
    out = objective(model, find_active(model, "PPD"), TrainingBatch(**batch))
    # fp32: other orders of summation, over logits of size about 30.
    torch.testing.assert_close(out["loss"], torch.stack(means).mean(), rtol=1e-4, atol=1e-4)


# -- fresh adapters -----------------------------------------------------------------------------


def test_prompts_start_from_text(fresh: Tiny) -> None:
    for architecture in ("llama", "gemma3"):  # the latter scales what it looks up
        model = fresh(architecture)
        model.add_adapter(hf_spec.PPDConfig(num_ept=2))
        prompts = find_active(model, "PPD").tensors()["prompts"]
        every = model.get_input_embeddings()(torch.arange(VOCAB))
        assert (prompts[:, None] == every).all(-1).any(-1).all()


# -- decoding -----------------------------------------------------------------------------------


@every_config
def test_drafts_are_the_oracle_s(fresh: Tiny, fields: dict) -> None:
    """Decoding reads the same predictions as training does, wherever a row stands."""
    model = with_adapter(fresh("llama"), fields)
    ids = prompt()
    plain = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    with proposals(PPDDrafter) as drafted:
        model.generate(ids, max_new_tokens=NEW, do_sample=False, **drafting("ppd", tree="chain"))
    checked = 0
    for known, tree in drafted:
        tokens = tree.drafted.tokens[0, 1:].tolist()
        assert plain[0, : len(known)].tolist() == known
        # The prompt tokens hung under the last token of the step before.
        expected = naive(model, torch.tensor(known[:-1])).argmax(-1).tolist()
        assert tokens == expected[: len(tokens)]
        checked += len(tokens)
    assert checked > 3


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_rows_in_different_states_of_random_trees(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    model = fresh("llama_tied")
    lengths = (12, 1, 5, 9, 2, 11)
    plain = model.generate(**ragged(lengths), max_new_tokens=NEW, do_sample=False)
    with_adapter(model, {"num_ept": 1 + seed % 2}, seed)
    source = TreeSource(states_of(random.Random(seed), 3))
    monkeypatch.setattr(drafter_module, "dynamic_source", lambda model, adapter: source)
    out = model.generate(
        **ragged(lengths), max_new_tokens=NEW, do_sample=False,
        **drafting("ppd", tree="dynamic"),
    )  # fmt: skip
    assert out.tolist() == plain.tolist()
    stats = hf_spec.last_stats(model)
    assert stats.num_drafted_tokens > stats.num_generated_tokens - stats.num_row_steps > 0


def states_of(generator: random.Random, most: int) -> TreeStates:
    """A random dynamic tree over ``most`` prompt tokens."""
    states = []
    for known in range(most + 1):
        paths: list[tuple[int, ...]] = [()]
        for _ in range(generator.randint(0, 12)):
            parent = generator.choice(paths)
            child = (*parent, generator.randint(0, 20))
            if len(child) <= known and child not in paths:
                paths.append(child)
        tree = TokenTree.from_paths(paths[1:])
        probes = tuple(generator.randint(0, most) for _ in range(len(tree)))
        states.append(TreeState(tree, (most, *probes[1:]) if known == 0 else probes))
    return TreeStates(tuple(states))
