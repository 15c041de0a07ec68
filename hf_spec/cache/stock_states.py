"""The recurrent states in Transformers' own cache layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

#: ``conv`` or ``rule``, the layer, and the number of the state in it.
Place = tuple[str, int, int]


def stock_states(layers: Sequence[Any]) -> Iterator[tuple[Place, Tensor]]:
    """The states of Transformers' cache layers, ``(batch, ...)`` each."""
    for index, layer in enumerate(layers):
        for kind, name in (("conv", "conv_states"), ("rule", "recurrent_states")):
            for number, state in (getattr(layer, name, None) or {}).items():
                if state is not None:
                    yield (kind, index, number), state


def fill(layers: Sequence[Any], states: Iterable[tuple[Place, Tensor]]) -> None:
    """Copy the states into Transformers' cache layers."""
    for (kind, index, number), state in states:
        layer = layers[index]
        if kind == "conv":
            layer.has_previous_state[number] = False
            layer.update_conv_state(state, number)
        else:
            layer.update_recurrent_state(state, number)
