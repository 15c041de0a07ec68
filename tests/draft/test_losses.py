"""The loss that methods share, against loops over single predictions."""

from typing import Any

import pytest
import torch
from adapter_oracle import as_in_papers, two_answers
from conftest import Tiny
from peft import get_peft_model

from hf_spec.adapters.config import ObjectiveConfig
from hf_spec.methods.registry import get_method, methods
from hf_spec.predict.losses import (
    NEVER,
    Own,
    dynamic_weights,
    mean_loss,
    prediction_losses,
    wanted_mean,
)
from hf_spec.target.sequences import IGNORED

#: Methods with one of its losses, weighed by distances; propd's has another one added.
WEIGHING = [
    name
    for name, one in methods().items()
    if issubclass(one.adapter_config or object, ObjectiveConfig) and name != "propd"
]
BATCH, ANCHORS, DISTANCES, VOCAB = 3, 4, 2, 7


def example(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Predictions, wanted tokens (none at all in the last sequence), and the model's own logits."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, ANCHORS, DISTANCES)
    logits, own = (3 * torch.randn(*shape, VOCAB, generator=generator) for _ in range(2))
    wanted = torch.randint(VOCAB, shape, generator=generator)
    wanted[torch.rand(shape, generator=generator) < 0.3] = IGNORED
    wanted[-1] = IGNORED
    assert 0 < (wanted[:-1] == IGNORED).sum() < wanted[:-1].numel()
    return logits.to(dtype), wanted, own.to(dtype)


def test_of_the_base_its_likeliest_tokens_count() -> None:
    """Those that can be drafted, wherever they stand; the rest of its distribution is 0."""
    logits, wanted, own = example(torch.float64)
    chances, tokens = own.softmax(-1).topk(4)
    drafted = torch.tensor([0, 2, 3, 5, 6])
    columns = torch.arange(ANCHORS * DISTANCES).view(1, ANCHORS, DISTANCES).expand(BATCH, -1, -1)
    found = Own.at(columns, (chances.flatten(1, 2), tokens.flatten(1, 2).int()), drafted)
    sparse = torch.zeros_like(own).scatter(-1, tokens, chances)[..., drafted]
    places = torch.searchsorted(drafted, wanted.clamp(min=0)).clamp(max=4)
    losses = [prediction_losses(logits[..., drafted], places, one) for one in (found, Own(sparse))]
    torch.testing.assert_close(*losses)
    assert (sparse.sum(-1) < 1).any() and (sparse > 0).any(-1).all()


def test_dynamic_weights_are_parts_of_the_expected_length() -> None:
    """D-PACE: the derivatives of the expected number of accepted tokens, by the logarithms of the
    smoothed probabilities of single ones."""
    logits, wanted, _ = example(torch.float64)
    wanted[0, 0], wanted[0, 1] = torch.tensor([NEVER, 3]), torch.tensor([2, NEVER])
    losses = prediction_losses(logits, wanted)
    chances = torch.where(wanted == NEVER, 0.0, (-losses).exp())
    logs = (0.5 + 0.5 * chances).log().requires_grad_(True)
    length = (logs.cumsum(-1).exp() * (wanted != IGNORED)).sum()
    weights = dynamic_weights(losses, wanted)
    torch.testing.assert_close(weights, *torch.autograd.grad(length, logs))
    assert (dynamic_weights(-losses, wanted) <= losses.shape[2]).all()
    total = mean_loss(losses, logits, wanted, decay=None)["loss"]
    expected = wanted_mean(losses * weights, wanted, 1).sum(-1).mean()
    assert float(total) == pytest.approx(float(expected))


@pytest.mark.parametrize("name", WEIGHING)
def test_every_method_can_weigh_distances_by_what_they_add(fresh: Tiny, name: str) -> None:
    model, method = fresh("llama"), get_method(name)
    kind: Any = method.adapter_config
    config = kind(loss="hard", decay=None, **as_in_papers(kind))
    out = get_peft_model(model, config)(**two_answers())
    losses = prediction_losses(out["logits"], out["labels"])
    expected = mean_loss(losses, out["logits"], out["labels"], None, pooled=name == "ppd")["loss"]
    assert losses.shape[2] > 1 and 0 < float(expected) < float(losses.sum())
    # fp32 with other reduction orders.
    torch.testing.assert_close(out["loss"], expected, rtol=1e-5, atol=1e-5)
