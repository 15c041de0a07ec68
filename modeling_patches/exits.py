"""Averages the hidden states of a decoder's last layers, instead of using only the last one's.

Everything after the layers, such as the final norm, is unchanged and runs on the average.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_spec.modeling_patches.modules import decoder_layers
from hf_spec.modeling_patches.per_call import Changes


def averaged_exits(
    model: Any, changes: Changes, count: int, first: Callable[[], int] = lambda: 0
) -> None:
    """Replace the output of query tokens from `first` on by the mean of the last `count` layers, in
    which `first` is called; with a `count` of 1 nothing changes."""
    if count == 1:
        return
    *before, last = decoder_layers(model)[-count:]
    seen: list[Tensor] = []

    def note(args: Any, kwargs: Any, output: Any) -> None:
        seen.append(_hidden(output)[:, first() :])

    def average(args: Any, kwargs: Any, output: Any) -> Any:
        hidden = _hidden(output)
        exits = [state.to(hidden.device) for state in seen] + [hidden[:, first() :]]
        seen.clear()
        if first() == hidden.shape[1]:
            return None
        mixed = torch.cat([hidden[:, : first()], torch.stack(exits).mean(0)], dim=1)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    for layer in before:
        changes.after(layer, note)
    changes.after(last, average)


def _hidden(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
