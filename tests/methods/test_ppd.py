"""PPD against the thesis: masks, loss, trees in every state, and what PEFT does with its adapters.

The oracle runs one place at a time by stock forwards, with masks written as the figures show them.
"""

import random
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_oracle import PAPERS, added, cache_behind, losses_one_by_one, two_answers
from conftest import VOCAB, Tiny, check_same, prompt, ragged
from method_variants import VARIANTS
from running import drafting, proposals
from tiny_checkpoint import make_model
from trained import SETTINGS, answers
from transformers import TrainerCallback

import hf_spec
from hf_spec.adapters.config import MARKOV_HEAD
from hf_spec.adapters.loading import find_active
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.shapes import TokenTree, TreeState, TreeStates
from hf_spec.methods import ppd as drafter_module
from hf_spec.methods.ppd import ept_group
from hf_spec.methods.ppd import loss as objective
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.tools.hub import write_card
from hf_spec.tools.training.train import train

#: Everything that changes a forward, alone and together.
CONFIGS = VARIANTS["ppd"].configs
every_config = pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)


def with_adapter(model: Any, fields: dict[str, Any], seed: int = 1) -> Any:
    """A model with an adapter whose weights all matter."""
    added(model, hf_spec.PPDConfig(**PAPERS, **fields), std=0.5, seed=seed)
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
    count, ept, prefix = config.num_prompt_tokens, config.num_ept, config.num_prefix_tokens
    nothing = torch.empty(len(model.model.layers), 2, 0, 8)
    front = (weights[f"prefix_{one}"] if prefix else nothing for one in ("keys", "values"))
    cache = cache_behind(model, ids, zip(*front))
    rows = torch.full((count * ept, count * prefix + len(ids) + count * ept), -1e9)
    for query in range(count * ept):
        for slot in range(count * prefix):  # figure 4.4
            if slot // prefix == query // ept:
                rows[query, slot] = 0
        for token in range(len(ids)):
            rows[query, count * prefix + token] = 0
        for key in range(count * ept):
            if sees(config.ept_mask, query, key, ept):
                rows[query, count * prefix + len(ids) + key] = 0
    layers: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(
            lambda m, a, out: layers.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in model.model.layers
    ]
    model(
        inputs_embeds=weights["prompts"][None], **{CACHE: cache},
        attention_mask=rows[None, None],
        position_ids=torch.tensor([[len(ids) + place // ept for place in range(count * ept)]]),
    )  # fmt: skip
    for handle in handles:
        handle.remove()
    hidden = model.model.norm(torch.stack(layers[-config.num_exits :]).mean(0))[0]
    if config.head == "residual":
        assert ept == 1
        matrix = weights.get("head")
        if matrix is None:
            matrix = weights["head_up"] @ weights["head_down"]
        hidden = hidden + torch.nn.functional.silu(hidden @ matrix.T + weights["head_bias"])
    logits = model.lm_head(hidden)
    if config.head == "vocabulary":
        logits = logits + hidden @ weights["head"].T
    logits = logits.view(count, ept, -1)  # section 4.4.4
    if config.ept_aggregation == "average":
        return logits.mean(1)
    return (logits * weights["weights"][:, :, None]).sum(1)


# -- loss: eq. (4.1) ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind"), [*zip(CONFIGS.values(), cycle(["distillation", "hard"]))], ids=CONFIGS
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


def test_heads_start_as_the_base_s_own(fresh: Tiny) -> None:
    found = []
    for name in ("plain", "vocabulary", "residual", "low rank"):
        model = fresh()
        torch.manual_seed(0)
        model.add_adapter(hf_spec.PPDConfig(**CONFIGS[name]))
        found.append(naive(model, prompt()[0]))
    assert all(torch.equal(found[0], one) for one in found[1:])
    with pytest.raises(ValueError, match="num_exits=4: .* from 1 to 3. As the model's layers"):
        fresh().add_adapter(hf_spec.PPDConfig(num_exits=4))


# -- decoding -----------------------------------------------------------------------------------


@every_config
def test_drafts_are_the_oracle_s(fresh: Tiny, fields: dict) -> None:
    """Decoding reads the same predictions as training does, wherever a row stands."""
    model = with_adapter(fresh("llama"), fields)
    with proposals(hf_spec.Drafter) as drafted:
        check_same(model, drafting("ppd", tree="chain"), prompt())
    checked = 0
    for known, tree in drafted:
        tokens = tree.without_probes.tokens[0, 1:].tolist()
        # The prompt tokens hung under the last token of the step before.
        expected = naive(model, torch.tensor(known[:-1])).argmax(-1).tolist()
        assert tokens == expected[: len(tokens)]
        checked += len(tokens)
    assert checked > 3


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_rows_in_different_states_of_random_trees(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    fields = {"num_ept": 1 + seed % 2, "num_prefix_tokens": seed % 3}
    model, states = with_adapter(fresh("llama_tied"), fields, seed), states_of(seed, 3)
    monkeypatch.setattr(drafter_module, "dynamic_states", lambda model, adapter: states)
    check_same(model, drafting("ppd", tree="dynamic"), **ragged((12, 1, 5, 9, 2, 11)))
    stats = hf_spec.last_stats(model)
    assert stats.num_drafted_tokens > stats.num_generated_tokens - stats.num_row_steps > 0


def states_of(seed: int, most: int) -> TreeStates:
    """A random dynamic tree over ``most`` prompt tokens."""
    generator, states = random.Random(seed), []
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


# -- training -----------------------------------------------------------------------------------


class Watch(TrainerCallback):
    """Notes after each step which parameters differ from what they were before it."""

    def __init__(self) -> None:
        self.moved: list[set[str]] = []
        self.before: dict[str, torch.Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found = find_active(kwargs["model"], "PPD").tensors()
        self.before = {name: value.detach().clone() for name, value in found.items()}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found = find_active(kwargs["model"], "PPD").tensors()
        self.moved.append({k for k, v in found.items() if not torch.equal(v, self.before[k])})


@pytest.mark.parametrize("stages", [1, 2])
def test_the_head_is_trained_in_the_second_stage(tmp_path: Path, stages: int) -> None:
    """Section 4.4.2; gradients are accumulated, so that the stages are those of whole steps."""
    settings = {
        **SETTINGS, "max_steps": 4, "eval_steps": 4, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-3,
    }  # fmt: skip
    watch, config = Watch(), {"head": "residual", "head_stages": stages}
    train(make_model(), answers(12, 12), "ppd", tmp_path, config, settings, callbacks=[watch])
    # The other parts of the Markov head have gradients once its output is not zero.
    first, late = {"markov_output"}, {*MARKOV_HEAD}
    head, markov_head = {"head", "head_bias"}, [first, late, late, late]
    heads = [head] * 4 if stages == 1 else [set(), set(), head, head]
    # The cosine schedule ends at a rate of zero, but after the last step.
    assert watch.moved == [{"prompts"} | one | two for one, two in zip(heads, markov_head)]
    card = write_card(tmp_path).read_text()
    assert "3 learned prompt tokens" in card and "a residual head of their own" in card
    assert "They have learned its distributions" in card
