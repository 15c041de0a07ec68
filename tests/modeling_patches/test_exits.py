"""Averaged exits: against the layers' own outputs, read one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import prompt
from running import added
from transformers import PreTrainedModel

from modeling_patches.exits import averaged_exits
from modeling_patches.modules import decoder_layers

#: The module that runs on what the layers give, before the output embeddings.
NORMS = {"llama": "norm", "gpt2": "ln_f", "falcon_alibi": "ln_f", "gpt_neo": "ln_f"}


def layer_outputs(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(
            lambda m, a, out: seen.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in decoder_layers(model)
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    return seen


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("architecture", NORMS)
def test_rows_leave_the_layers_as_a_mean(
    tiny: Callable[..., PreTrainedModel], architecture: str, count: int
) -> None:
    model, ids = tiny(architecture), prompt(9, 2)
    mean = torch.stack(layer_outputs(model, ids)[-count:]).mean(0)
    norm = getattr(model.get_decoder(), NORMS[architecture])
    expected = model.get_output_embeddings()(norm(mean))
    plain = model(ids).logits
    with added(averaged_exits, model, count, lambda: 4):
        for _ in range(2):  # nothing is left over from the forward before
            logits = model(ids).logits
            assert torch.equal(logits[:, :4], plain[:, :4])
            # The mean of three states is rounded in another order.
            torch.testing.assert_close(logits[:, 4:], expected[:, 4:], rtol=1e-5, atol=1e-5)
    assert torch.equal(model(ids).logits, plain)


@torch.no_grad()
def test_compiled_layers_run_uncompiled(fresh: Callable[..., PreTrainedModel]) -> None:
    model, ids = fresh("llama"), prompt(6)
    with added(averaged_exits, model, 2):
        expected = model(ids).logits
    for layer in model.model.layers:
        layer.compile(backend="eager")
    with added(averaged_exits, model, 2):
        assert torch.equal(model(ids).logits, expected)
