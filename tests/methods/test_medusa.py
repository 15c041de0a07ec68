"""MEDUSA: config, heads, loss, trees, and the hidden states that drafters are given."""

from itertools import product
from typing import Any

import pytest
import torch
from adapter_oracle import PAPERS, added, losses_one_by_one, randomise, two_answers
from conftest import CLOSE, VOCAB, Tiny, check_same, prompt, ragged
from covering import covering
from peft import get_peft_model
from running import drafting
from torch.nn import functional

import hf_spec
from hf_spec.adapters.loading import find_active
from hf_spec.draft.policy import StepPolicy
from hf_spec.draft.predictor import DecodeState
from hf_spec.methods.registry import methods
from hf_spec.predict.table import PROJECTION, head_states, projected
from hf_spec.target.hidden_states import output_logits
from hf_spec.target.sequences import token_hidden


def naive_states(weights: dict, head: int, hidden: torch.Tensor) -> torch.Tensor:
    """Section 2.1.1, one head and block at a time."""
    for weight, bias in zip(weights["weights"][head], weights["biases"][head]):
        hidden = hidden + functional.silu(hidden @ weight.T + bias)
    return hidden


def test_own_projections_need_weights_to_start_from(fresh: Tiny) -> None:
    model = fresh()
    output = model.get_output_embeddings()
    output.weight = torch.nn.Parameter(output.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="quantized here: choose projection='shared'"):
        model.add_adapter(hf_spec.MedusaConfig(projection="own"))
    model.add_adapter(hf_spec.MedusaConfig())


# -- heads: section 2.1.1 ----------------------------------------------------------------------


@pytest.mark.parametrize("projection", ["shared", "own"])
@pytest.mark.parametrize("architecture", ["llama", "opt", "phi"])  # phi's LM head has a bias
def test_fresh_heads_predict_as_the_lm_head(
    fresh: Tiny, architecture: str, projection: str
) -> None:
    model = fresh(architecture)
    expected = model(prompt()).logits[:, -1]
    model.add_adapter(hf_spec.MedusaConfig(num_layers=2, projection=projection))
    weights = find_active(model, "MEDUSA").tensors()
    states = head_states(weights, token_hidden(model, prompt())[:, -1])
    if projection == "own":
        logits = projected(model, weights[PROJECTION], states)
    else:
        logits = output_logits(model, states)
    # fp32 with other reduction orders.
    torch.testing.assert_close(logits, expected[:, None].expand(-1, 4, -1), rtol=1e-5, atol=1e-5)


# -- loss: section 2.2.1 -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "projection", "loss"),  # cohere2 scales its logits
    covering(product(["llama", "cohere2"], ["shared", "own"], ["hard", "distillation"])),
)
def test_loss_against_one_place_at_a_time(
    fresh: Tiny, architecture: str, projection: str, loss: str
) -> None:
    model = fresh(architecture)
    model.config.logit_scale = model.logit_scale = 0.5
    config = hf_spec.MedusaConfig(
        num_heads=2, decay=0.7, loss=loss, projection=projection, **PAPERS
    )
    peft_model, batch = get_peft_model(model, config), two_answers()
    weights = randomise(model, "MEDUSA", std=0.2)

    def predict(ids: torch.Tensor) -> list[torch.Tensor]:
        hidden = model(ids[None], output_hidden_states=True).hidden_states[-1][0, -1]
        states = [naive_states(weights, head, hidden) for head in (0, 1)]
        if projection == "own":
            return [matrix @ state for matrix, state in zip(weights["projections"], states)]
        scale = 0.5 if architecture == "cohere2" else 1.0
        return [scale * model.get_output_embeddings()(state) for state in states]

    expected = []
    for row in losses_one_by_one(model, batch, predict, hard=loss == "hard"):
        of_heads = [torch.stack([one for d, one in row if d == head]).mean() for head in (1, 2)]
        expected.append(0.7 * of_heads[0] + 0.7**2 * of_heads[1])
    out = peft_model(**batch)
    torch.testing.assert_close(out["loss"], torch.stack(expected).mean(), rtol=1e-4, atol=1e-4)
    assert out["logits"].shape == (2, 3, 2, VOCAB)
    first = batch["input_ids"][0].tolist()
    assert out["labels"][0].tolist() == [[-100, first[4]], [first[9], first[10]], [-100, -100]]


@pytest.mark.parametrize(
    ("architecture", "kwargs"),
    [
        ("llama", {}), ("gemma3", {"lookup": True}), ("opt", {"tree": "sparse"}),
        ("gpt2", {"tree": "chain"}), ("opt", {}),
    ],
)  # fmt: skip
def test_the_drafter_sees_the_last_accepted_nodes_hidden_state(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, architecture: str, kwargs: dict[str, Any]
) -> None:
    """In every step, the one behind the prompt included: of the token before the root, also after
    steps that did not draft."""
    model = fresh(architecture)
    added(model, hf_spec.MedusaConfig(), std=0.3, seed=5)
    turns = iter([True, False, True] * 100)
    monkeypatch.setattr(StepPolicy, "wants_draft", lambda *_: next(turns))
    seen: list[tuple[list[list[int]], list[bool], torch.Tensor]] = []
    drafter = methods()["medusa"].drafter
    propose = drafter.propose

    def noted(self: Any, state: DecodeState) -> Any:
        seen.append(
            ([list(row) for row in state.tokens], list(state.active), self.predictor.hidden)
        )
        return propose(self, state)

    monkeypatch.setattr(drafter, "propose", noted)
    check_same(model, drafting("medusa", **kwargs), **ragged())
    assert len(seen) > 3
    for tokens, active, hidden in seen:
        for row, ids in enumerate(tokens):
            if active[row]:
                expected = token_hidden(model, torch.tensor([ids[:-1]]))[0, -1]
                torch.testing.assert_close(hidden[row], expected, **CLOSE)


def test_typical_acceptance_takes_what_exact_acceptance_refuses(fresh: Tiny) -> None:
    """Untrained heads repeat the model's own prediction: mostly wrong, often not unlikely."""
    model = fresh()
    model.add_adapter(hf_spec.MedusaConfig())
    steps = {}
    for rule, more in (("match", {}), ("typical", {"typical_epsilon": 0.01})):
        torch.manual_seed(0)
        model.generate(
            prompt(), do_sample=True, max_new_tokens=40,
            **drafting("medusa", acceptance=rule, tree="sparse", **more),
        )  # fmt: skip
        steps[rule] = hf_spec.last_stats(model).num_steps
    assert steps["typical"] < steps["match"]
