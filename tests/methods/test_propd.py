"""PROPD: config, the early head, what it drops, and that nothing changes but the time it takes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from adapter_oracle import added, losses_one_by_one, randomise, two_answers
from conftest import VOCAB, Tiny, check_same, ragged
from peft import get_peft_model
from running import drafting
from torch.nn import functional

import hf_spec
from hf_spec.adapters.loading import find_active
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.shapes import TokenTree
from hf_spec.core.tree import Tree
from hf_spec.draft.predictor import FORWARDS
from hf_spec.methods.propd import EarlyPruning, early_states
from hf_spec.methods.registry import get_method, methods
from hf_spec.predict.decoder import DecoderConfig
from hf_spec.predict.losses import heads_loss

#: Strategies with one forward per step, and those of them whose trees it can prune.
ONE_FORWARD = [
    name for name, one in methods().items()
    if one.drafter.drafts and one.declares.runs != FORWARDS and one.wraps is None
]  # fmt: skip
PRUNED = [
    name for name in ONE_FORWARD
    if not issubclass(get_method(name).adapter_config or object, DecoderConfig)
]  # fmt: skip


def propd(**kwargs: Any) -> dict[str, Any]:
    """Every step drafts and prunes, unless the test says otherwise."""
    return drafting("propd", **{"prune": True, **kwargs})


def trained_like(model: Any, **config: Any) -> dict[str, torch.Tensor]:
    """Add an adapter with weights that matter; returns them."""
    return added(model, hf_spec.ProPDConfig(**config), "propd", 0.2, 5).tensors()


def naive_early(weights: dict, hidden: torch.Tensor) -> torch.Tensor:
    moved = hidden + hidden @ weights["early_matrix"].T + weights["early_bias"]
    return functional.rms_norm(moved, moved.shape[-1:], eps=1e-6) * weights["early_gain"]


def test_the_layer_is_recorded(fresh: Tiny) -> None:
    model = fresh()
    model.add_adapter(hf_spec.ProPDConfig())
    assert find_active(model, "PROPD").config.prune_layer == 2  # 4 in deeper models; this has 3
    with pytest.raises(ValueError, match="prune_layer=3: .* 1 to 2. The model has 3 layers"):
        fresh().add_adapter(hf_spec.ProPDConfig(prune_layer=3))


@pytest.mark.parametrize("loss", ["hard", "distillation"])
@pytest.mark.parametrize("architecture", ["llama", "cohere2"])  # cohere2 scales its logits
def test_the_early_head_s_loss(fresh: Tiny, architecture: str, loss: str) -> None:
    model = fresh(architecture)
    model.config.logit_scale = model.logit_scale = 0.5
    config = hf_spec.ProPDConfig(num_heads=2, prune_layer=1, loss=loss)
    peft_model, batch = get_peft_model(model, config), two_answers()
    weights = randomise(model, "PROPD", std=0.2)
    total = peft_model(**batch)["loss"]
    heads = heads_loss(model, find_active(model, "PROPD"), TrainingBatch(**batch))["loss"]

    def predict(ids: torch.Tensor) -> list[torch.Tensor]:
        hidden = model(ids[None], output_hidden_states=True).hidden_states[1][0, -1]
        logits = model.get_output_embeddings()(naive_early(weights, hidden))
        return [0.5 * logits if architecture == "cohere2" else logits]

    found = losses_one_by_one(model, batch, predict, first=0, hard=loss == "hard")
    means = [torch.stack([one for _, one in row]).mean() for row in found]
    # fp32 with other reduction orders.
    torch.testing.assert_close(total - heads, torch.stack(means).mean(), rtol=1e-4, atol=1e-4)


TREE = TokenTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 1, 0], [1, 0, 0]])


def naive_likely(
    model: Any, weights: dict, top_k: int,
    hidden: torch.Tensor, parents: Sequence[int], tokens: list[int],
    own: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
) -> tuple[list[bool], list[float]]:  # fmt: skip
    """One node at a time; ``own`` is what the model does behind its output embeddings."""
    likely, log_p = [True], [0.0]
    for node, parent in list(enumerate(parents))[1:]:
        logits = own(model.lm_head(naive_early(weights, hidden[parent])))
        rank = int((logits > logits[tokens[node]]).sum())
        likely.append(likely[parent] and rank < top_k)
        log_p.append(log_p[parent] + float(logits.log_softmax(-1)[tokens[node]]))
    return likely, log_p


@pytest.mark.parametrize("top_k", [1, 12, VOCAB + 5])
def test_likely_candidates_one_at_a_time(fresh: Tiny, top_k: int) -> None:
    model = fresh()
    weights = trained_like(model)
    pruning = EarlyPruning(model, weights, 1, top_k)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(4, len(TREE), 32, generator=generator)
    tokens = torch.randint(VOCAB, (4, len(TREE)), generator=generator)
    shapes = [TREE, TokenTree.chain(2), TREE, TokenTree.chain(0)]
    tree = Tree.of_shapes(shapes).with_tokens(tokens)
    with torch.no_grad():
        likely, log_p = pruning.likely(hidden, tree)
        for row, shape in enumerate(shapes):
            given, n = (hidden[row], shape.parents, tokens[row].tolist()), len(shape)
            expected = naive_likely(model, weights, top_k, *given)
            assert likely[row].tolist() == [*expected[0], *[False] * (len(TREE) - n)]
            # Sums of floats.
            assert log_p[row, :n].tolist() == pytest.approx(expected[1], abs=1e-4)
    assert torch.equal(likely, tree.valid) == (top_k > VOCAB)
    assert math.isfinite(float(early_states(pruning.weights, torch.zeros(32)).sum()))


@pytest.mark.parametrize("architecture", ["cohere2", "gemma2", "gpt2"])
def test_probabilities_are_those_of_the_model_s_own_logits(fresh: Tiny, architecture: str) -> None:
    """With a scale, or a soft cap; they are asked for in a forward, which is left as it is."""
    model = fresh(architecture)
    own = {"cohere2": lambda x: 0.3 * x, "gemma2": torch.tanh, "gpt2": lambda x: x}[architecture]
    model.logit_scale, model.config.final_logit_softcapping = 0.3, 1.0
    weights = trained_like(model, prune_layer=1)
    seen, likely = [], EarlyPruning.likely

    def noted(self: EarlyPruning, hidden: Any, tree: Any) -> Any:
        found = likely(self, hidden, tree)
        if tree.num_nodes == len(TREE) and tree.valid.all():  # all of it is within the budget
            seen.append((hidden.clone(), tree.tokens, found))
        return found

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(EarlyPruning, "likely", noted)
        paths = [list(path) for path in TREE.paths]
        check_same(model, propd(tree=paths, prune_top_k=12), **ragged())
        for hidden, tokens, found in seen:
            for row in range(len(tokens)):
                given = hidden[row], TREE.parents, tokens[row].tolist()
                expected = naive_likely(model, weights, 12, *given, own)
                assert found[0][row].tolist() == expected[0]
                assert found[1][row].tolist() == pytest.approx(expected[1], abs=1e-4)
    stats = hf_spec.last_stats(model)
    assert seen and 0 < stats.num_pruned_tokens < stats.num_drafted_tokens


@pytest.mark.parametrize("drafter", sorted({*ONE_FORWARD} - {*PRUNED}))
def test_one_that_reads_layers_is_refused(fresh: Tiny, drafter: str) -> None:
    """Draft tokens that are pruned do not reach them."""
    model: Any = fresh("llama")
    model.add_adapter(get_method(drafter).adapter_config(), "drafter")
    trained_like(model)
    model.set_adapter(["drafter", "propd"])
    message = rf"drafter='{drafter}' with prune=True: .* the states of layers \[.*another drafter"
    with pytest.raises(ValueError, match=message):
        model.generate(**ragged(), max_new_tokens=4, **propd(drafter=drafter))


@pytest.mark.parametrize("drafter", PRUNED)
def test_every_tree_drafter(fresh: Tiny, drafter: str) -> None:
    """Two adapters are active at a time: the drafter's and the early head's."""
    model = fresh("llama")
    trained = get_method(drafter).adapter_config
    if trained is not None:
        torch.manual_seed(0)
        model.add_adapter(trained(), "drafter")
        if drafter == "space":  # gated updates of rows that others leave on the way
            randomise(model, "SPACE")
    trained_like(model)
    names = [name for name in ("drafter", "propd") if name in model.peft_config]
    model.set_adapter(names)
    # As many candidates in every step, so that those of look-ups are counted beside them.
    inner = {"drafter_kwargs": {"num_draft_tokens": 8}} if trained is not None else {}
    options, drafted = {"drafter": drafter, "prune_top_k": 12, **inner}, []
    for lookup in ({}, {"lookup": True}):  # looked-up candidates are pruned, too
        check_same(model, propd(**options, **lookup), **ragged())
        stats = hf_spec.last_stats(model)
        assert stats.num_pruned_tokens > 0
        drafted.append(stats.num_drafted_tokens / stats.num_row_steps)
    assert drafter == "prompt_lookup" or drafted[1] > drafted[0]
    check_same(model, drafting("propd"), **ragged())
    assert hf_spec.last_stats(model).num_pruned_tokens == 0, "unless it is asked for"


def test_exits_before_the_layer_are_refused(fresh: Tiny) -> None:
    model = fresh("llama")
    model.add_adapter(hf_spec.PPDConfig(num_exits=2), "drafter")
    trained_like(model)
    model.set_adapter(["drafter", "propd"])
    with pytest.raises(ValueError, match="averages the last 2 of 3 layers.*after layer 2"):
        model.generate(**ragged(), **propd(drafter="ppd"))
