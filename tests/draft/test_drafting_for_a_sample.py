"""Drafting with the random numbers that tokens will be sampled with."""

from typing import Any

import pytest
import torch
from adapter_oracle import randomise
from conftest import VOCAB, Tiny
from running import draft_everything

import hf_spec
from hf_spec import threads
from hf_spec.target.noise import SamplingNoise


@pytest.mark.parametrize("name", ["layer_skip", "eagle3"])
def test_the_noise_raises_acceptance(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A model without one of its MLPs samples nearly as the whole one does, and what the whole one
    samples from so flat a distribution is hardly ever the likeliest token. Of a draft vocabulary,
    the noise is found by its tokens' ids."""
    model: Any = fresh("llama_tied")
    options = {"skip_attention": [], "skip_mlp": [1], "lookup": False, "num_draft_tokens": 6}
    if name == "eagle3":
        options = {"num_draft_tokens": 8}
        model.add_adapter(hf_spec.Eagle3Config(draft_vocab_size=40))
        randomise(model, "EAGLE3")
    draft_everything(monkeypatch)
    prompts = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(6))

    def run() -> tuple[list[list[int]], float]:
        torch.manual_seed(4)
        out = model.generate(
            prompts, do_sample=True, temperature=1.5, top_k=0, max_new_tokens=40,
            eos_token_id=None, assistant_strategy=name, assistant_kwargs=options,
        )  # fmt: skip
        return out.tolist(), hf_spec.last_stats(model).mean_accepted_tokens

    texts, knowing = run()
    threads.forget(model)
    ahead = SamplingNoise.ahead
    monkeypatch.setattr(SamplingNoise, "ahead", lambda *args, **kwargs: 0 * ahead(*args, **kwargs))
    same, guessing = run()
    assert same == texts and knowing > 1.4 * guessing


@pytest.mark.parametrize("recycle", [False, True])
def test_the_noise_of_a_draft_vocabulary_is_that_of_its_tokens(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, recycle: bool
) -> None:
    """No logarithms of other tokens are taken, unless candidates among all tokens join trees."""
    model: Any = fresh("llama_tied")
    model.add_adapter(hf_spec.Eagle3Config(draft_vocab_size=40))
    sizes, ahead = set(), SamplingNoise.ahead

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = ahead(*args, **kwargs)
        sizes.add(found.shape[-1])
        return found

    monkeypatch.setattr(SamplingNoise, "ahead", noted)
    model.generate(
        torch.randint(3, VOCAB, (2, 9)), do_sample=True, max_new_tokens=8,
        assistant_strategy="eagle3", assistant_kwargs={"drafting": "always", "recycle": recycle},
    )  # fmt: skip
    assert sizes == {VOCAB if recycle else 40}
