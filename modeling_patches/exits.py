"""Several exits of a decoder averaged: the last layers' hidden states instead of the last one's.

What follows the layers, the final norm among it, is the model's own and runs on the average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from modeling_patches.layer_skip import decoder_layers


@contextmanager
def averaged_exits(model: Any, count: int, first: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """For the block, rows from `first` on leave the layers as the mean of what the last `count` do.

    Args:
        model: a causal language model.
        count: exits; 1 changes nothing.
        first: first row, of the forwards in the block, that is averaged; asked in the last layers.

    Raises:
        RuntimeError: the model ran no hooks, because it is compiled as a whole.
    """
    if count == 1:
        yield
        return
    *before, last = decoder_layers(model)[-count:]
    seen: list[Tensor] = []
    runs = 0

    def note(module: Any, args: Any, output: Any) -> None:
        seen.append(_hidden(output)[:, first() :])

    def average(module: Any, args: Any, output: Any) -> Any:
        nonlocal runs
        runs += 1
        hidden = _hidden(output)
        exits = [state.to(hidden.device) for state in seen] + [hidden[:, first() :]]
        seen.clear()
        mixed = torch.cat([hidden[:, : first()], torch.stack(exits).mean(0)], dim=1)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    handles = [layer.register_forward_hook(note) for layer in before]
    handles.append(last.register_forward_hook(average))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if not runs:
        raise RuntimeError(
            f"the last {count} layers' states cannot be averaged in a model that is compiled as a "
            "whole: use it without torch.compile."
        )


def _hidden(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
