"""The loss that methods share, against loops over single predictions."""

import math

import pytest
import torch

from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.drafting.losses import (
    NEVER,
    Ahead,
    Own,
    dynamic_weights,
    mean_loss,
    prediction_losses,
    wanted_mean,
)
from hf_spec.model.sequences import IGNORED

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


def naive(logits: list[float], token: int, own: list[float] | None) -> float:
    def log_softmax(row: list[float]) -> list[float]:
        total = math.log(sum(map(math.exp, row)))
        return [value - total for value in row]

    p = log_softmax(logits)
    if token == IGNORED:
        return 0.0
    if own is None:
        return -p[token]
    return sum(math.exp(b) * (b - a) for a, b in zip(p, log_softmax(own)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("distilled", [False, True])
def test_losses_are_those_of_single_predictions(dtype: torch.dtype, distilled: bool) -> None:
    logits, wanted, own = example(dtype)
    precise = torch.promote_types(dtype, torch.float32)
    losses = prediction_losses(
        logits, wanted, Own(own.to(precise).softmax(-1)) if distilled else None
    )
    assert losses.dtype == precise
    for place in torch.cartesian_prod(*map(torch.arange, wanted.shape)):
        at = tuple(place.tolist())
        expected = naive(logits[at].tolist(), int(wanted[at]), own[at].tolist() * distilled or None)
        # Sums of seven terms of up to about 10, in float32 at least.
        assert float(losses[at]) == pytest.approx(expected, abs=1e-5)


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
    total = mean_loss(losses, logits, wanted, decay=None)["loss"]
    expected = wanted_mean(losses * weights, wanted, 1).sum(-1).mean()
    assert float(total) == pytest.approx(float(expected))


def test_ignored_places_get_no_gradient() -> None:
    logits, wanted, own = example(torch.float32)
    logits.requires_grad_(True)
    losses = prediction_losses(logits, wanted, Own(own.softmax(-1)))
    wanted_mean(losses, wanted, (1, 2)).sum().backward()
    assert logits.grad is not None
    assert not logits.grad[wanted == IGNORED].any()
    assert logits.grad[wanted != IGNORED].abs().sum(-1).min() > 0


def test_means_are_over_what_is_wanted() -> None:
    logits, wanted, _ = example(torch.float64)
    losses = prediction_losses(logits, wanted)
    by_sequence, by_distance = wanted_mean(losses, wanted, (1, 2)), wanted_mean(losses, wanted, 1)
    assert by_sequence.shape == (BATCH,) and by_distance.shape == (BATCH, DISTANCES)
    for row in range(BATCH - 1):
        real = wanted[row] != IGNORED
        assert float(by_sequence[row]) == pytest.approx(float(losses[row][real].mean()))
        for distance in range(DISTANCES):
            some = losses[row, :, distance][real[:, distance]]
            assert float(by_distance[row, distance]) == pytest.approx(float(some.mean()))
    assert by_sequence[-1] == 0 and not by_distance[-1].any()


def test_what_follows_an_anchor() -> None:
    ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    labels = ids.masked_fill(ids < 12, IGNORED)
    batch = TrainingBatch(ids, labels, torch.tensor([[0, 1, 3, 5]]))
    ahead = Ahead.of(batch, 3, ids.device)
    assert ahead.wanted.tolist() == [[[12, 13, 14], [13, 14, 15], [15, -100, -100], [-100] * 3]]
    assert ahead.columns.tolist() == [[[1, 2, 3], [2, 3, 4], [4, 5, 5], [5] * 3]]
    assert torch.equal(ahead.before, ids[0][ahead.columns])
    assert Ahead.of(batch, 1, ids.device, first=0).wanted.tolist() == [[[-100], [12], [14], [-100]]]
