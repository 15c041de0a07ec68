"""Drafting with the random numbers that tokens will be sampled with."""

import time
from typing import Any

import pytest
import torch
from conftest import VOCAB, Tiny
from fake_clock import FakeClock
from running import draft_everything

import hf_spec
from hf_spec.core import memory
from hf_spec.drafting.noise import SamplingNoise

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
