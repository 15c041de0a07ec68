"""Logits made of final hidden states are the model's own, whatever it does behind its decoder."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from architectures import build
from conftest import ARCHITECTURES, prompt
from transformers import PreTrainedModel

from hf_spec.methods.forward import decoder_of, final_hidden, model_logits, output_logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_model_logits_are_the_models_own(
    tiny: Callable[..., PreTrainedModel], architecture: str
) -> None:
    model = tiny(architecture)
    before = set(vars(model.get_decoder()))
    with torch.no_grad(), final_hidden(model) as seen:
        expected = model(prompt(9, 2)).logits
        hidden = seen[0]
        assert torch.equal(model_logits(model, hidden), expected)
        part = model_logits(model, hidden[:, 3:5])
    # Products of other shapes may be summed in another order.
    torch.testing.assert_close(part, expected[:, 3:5], rtol=1e-5, atol=1e-5)
    assert set(vars(model.get_decoder())) == before


@pytest.mark.parametrize("architecture", ["modernbert-decoder", "mllama", "gemma4"])
def test_the_decoder_of_models_that_name_another_module(architecture: str) -> None:
    model = build(architecture)
    with torch.no_grad(), final_hidden(model) as seen:
        model(prompt(9, 2))
    assert seen[0].shape == (2, 9, 32)
    assert decoder_of(model) is model.model or decoder_of(model) is model.model.language_model


def test_scales_and_soft_caps_count(fresh: Callable[..., PreTrainedModel]) -> None:
    """`output_logits` leaves them out."""
    hidden = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    model = fresh("cohere2")
    model.logit_scale = 0.25
    with torch.no_grad():
        assert torch.equal(model_logits(model, hidden), 0.25 * output_logits(model, hidden))
        model = fresh("gemma2")
        cap = model.config.final_logit_softcapping = 2.0
        expected = cap * torch.tanh(output_logits(model, hidden) / cap)
        torch.testing.assert_close(model_logits(model, hidden), expected)


def test_what_was_there_is_restored_and_gradients_flow(
    fresh: Callable[..., PreTrainedModel],
) -> None:
    model = fresh("llama")
    hidden = torch.randn(1, 2, 32, requires_grad=True)

    def patched(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the decoder ran")

    model.model.forward = patched
    model_logits(model, hidden).sum().backward()
    assert hidden.grad is not None and model.lm_head.weight.grad is not None
    assert model.model.forward is patched
    model.lm_head.forward = patched
    with pytest.raises(RuntimeError):
        model_logits(model, hidden)
    assert model.model.forward is patched
