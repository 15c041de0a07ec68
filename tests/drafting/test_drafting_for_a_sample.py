"""Drafting with the random numbers that tokens will be sampled with."""

import time
from typing import Any

import pytest
import torch
from conftest import VOCAB, Tiny
from fake_clock import FakeClock
from running import draft_everything
from torch import Tensor

import hf_spec
from hf_spec.core import memory
from hf_spec.drafting.noise import TRUST, SamplingNoise
from hf_spec.drafting.predictions import Predictions


def gumbel(*shape: int, generator: torch.Generator) -> Tensor:
    return -torch.empty(*shape).exponential_(generator=generator).log()


class Plus:
    """A Markov head: a bias for each pair of tokens."""

    def __init__(self, table: Tensor):
        self.table = table

    def bias(self, previous: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
        rows = self.table[previous]  # (batch, distances, n, vocab)
        index = tokens[:, :, None].expand(-1, -1, previous.shape[2], -1)
        return rows.gather(-1, index)


@pytest.mark.parametrize("with_markov_head", [False, True])
def test_predictions_of_a_sample(with_markov_head: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 3, 11, generator=generator).double()
    table = torch.randn(11, 11, generator=generator).double()
    noise = gumbel(2, 3, 11, generator=generator).double()
    previous = torch.randint(11, (2, 3, 1), generator=generator)
    markov_head: Any = Plus(table) if with_markov_head else None
    found = Predictions(logits, 11, (3, 3), markov_head, logits, None, noise)
    given = logits + (table[previous[..., 0]] if with_markov_head else 0.0)
    expected = (TRUST * (given + noise)).log_softmax(-1).gather(-1, found.tokens)
    own = found.given(previous)[:, :, 0] if with_markov_head else found.log_probs
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


#: Layer whose MLP is left out of drafts.
SKIPPED = 1


@pytest.fixture
def model(fresh: Tiny, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its forwards all take the same time, and those without the last MLP none."""
    found, clock = fresh("llama_tied"), FakeClock()
    monkeypatch.setattr(time, "perf_counter", clock)

    def turn(*args: Any) -> None:
        clock.now += 1.0

    found.model.layers[SKIPPED].mlp.register_forward_pre_hook(turn)
    return found


def test_the_noise_raises_acceptance(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without one of its MLPs samples nearly as the whole one does, and what the whole one
    samples from so flat a distribution is hardly ever the likeliest token."""
    draft_everything(monkeypatch)
    prompts = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(6))
    options = {"skip_attention": [], "skip_mlp": [SKIPPED], "lookup": False, "max_draft": 6}

    def run() -> tuple[list[list[int]], float]:
        torch.manual_seed(4)
        out = model.generate(
            prompts, do_sample=True, temperature=1.5, top_k=0, max_new_tokens=40,
            eos_token_id=None, assistant_strategy="layer_skip", assistant_kwargs=options,
        )  # fmt: skip
        return out.tolist(), hf_spec.last_stats(model).mean_accepted_tokens

    texts, knowing = run()
    memory.forget(model)
    ahead = SamplingNoise.ahead
    monkeypatch.setattr(SamplingNoise, "ahead", lambda *args, **kwargs: 0 * ahead(*args, **kwargs))
    same, guessing = run()
    assert same == texts and knowing > 1.4 * guessing
