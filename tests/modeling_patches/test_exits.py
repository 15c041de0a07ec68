"""Averaged exits: against the layers' own outputs, read one by one."""

from typing import Any

import pytest
import torch
from conftest import Tiny, prompt
from running import added

from modeling_patches.exits import averaged_exits
from modeling_patches.modules import decoder_layers
from modeling_patches.per_call import Changes

#: The module that runs on what the layers give, before the output embeddings.
NORMS = {"llama": "norm", "gpt2": "ln_f", "falcon": "ln_f"}


def layer_outputs(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    changes = Changes()
    for layer in decoder_layers(model):
        changes.after(layer, lambda a, k, out: seen.append(out[0] if type(out) is tuple else out))
    changes.run(model, ids)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("architecture", NORMS)
def test_rows_leave_the_layers_as_a_mean(tiny: Tiny, architecture: str, count: int) -> None:
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
