"""Logits made of final hidden states are the model's own, whatever it does behind its decoder."""

import pytest
import torch
from architectures import build
from conftest import ARCHITECTURES, Tiny, prompt
from running import added, fingerprint

from hf_spec.modeling_patches.modules import decoder_of
from hf_spec.target.hidden_states import captured, model_logits, output_logits, shapes_logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_model_logits_are_the_models_own(tiny: Tiny, architecture: str) -> None:
    model = tiny(architecture)
    left = []
    with torch.no_grad(), added(captured, model) as seen:
        expected = model(prompt(9, 2)).logits
        hidden = seen[0]
        for _ in range(2):
            assert torch.equal(model_logits(model, hidden), expected)
            left.append(fingerprint(model))
        part = model_logits(model, hidden[:, 3:5])
        assert torch.equal(model(prompt(9, 2)).logits, expected)
    # Products of other shapes may be summed in another order.
    torch.testing.assert_close(part, expected[:, 3:5], rtol=1e-5, atol=1e-5)
    assert left[0] == left[1] == fingerprint(model), "another use adds nothing"


@pytest.mark.parametrize("architecture", ["modernbert-decoder", "mllama", "gemma4"])
def test_the_decoder_of_models_that_name_another_module(architecture: str) -> None:
    model = build(architecture)
    with torch.no_grad(), added(captured, model) as seen:
        model(prompt(9, 2))
    assert seen[0].shape == (2, 9, 32)
    assert decoder_of(model) is model.model or decoder_of(model) is model.model.language_model


def test_scales_and_soft_caps_count(fresh: Tiny) -> None:
    """`output_logits` leaves them out. Biases of the head count for nothing."""
    for architecture in ("llama", "gpt2", "phi", "opt", "gemma3", "cohere2"):
        assert not shapes_logits(fresh(architecture)), architecture  # cohere2: a scale of 1
    assert shapes_logits(fresh("llama").to(torch.bfloat16)) is False
    hidden = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    scaled, capped = fresh("cohere2"), fresh("gemma2")
    scaled.logit_scale = 0.25
    assert shapes_logits(scaled) and shapes_logits(capped)
    cap = capped.config.final_logit_softcapping = 2.0
    with torch.no_grad():
        assert torch.equal(model_logits(scaled, hidden), 0.25 * output_logits(scaled, hidden))
        expected = cap * torch.tanh(output_logits(capped, hidden) / cap)
        torch.testing.assert_close(model_logits(capped, hidden), expected)


def test_what_was_there_still_runs_and_gradients_flow(fresh: Tiny) -> None:
    model = fresh("llama")
    hidden = torch.randn(1, 2, 32, requires_grad=True)

    def patched(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a patched module ran")

    model.model.forward = patched
    model_logits(model, hidden).sum().backward()
    assert hidden.grad is not None and model.lm_head.weight.grad is not None
    with pytest.raises(RuntimeError, match="a patched module ran"):
        model(prompt())
    model.lm_head.forward = patched
    with pytest.raises(RuntimeError, match="a patched module ran"):
        model_logits(model, hidden)
    del model.lm_head.forward
    with pytest.raises(RuntimeError, match="a patched module ran"):
        model(prompt())
    assert model_logits(model, hidden).shape == (1, 2, 61)
