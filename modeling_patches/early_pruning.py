"""Drops query tokens of a forward after its first layers; deeper layers run on the others.

Before each deeper layer, a hook narrows the hidden states and everything with one entry per query
token: attention masks, position ids, rotary tables. After the last layer, zeros replace the dropped
tokens, since some models (GPT-2's family) require the original number. The caller chooses which
tokens stay, and makes the cache take fewer keys from then on. This module knows no trees or caches.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_spec.modeling_patches.modules import decoder_layers
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.modeling_patches.recurrences import entries

#: From hidden states (batch, tokens, hidden) to the indices to keep, (batch, kept); None for all.
Choose = Callable[[Tensor], Tensor | None]


def early_pruning(model: Any, changes: Changes, layer: int, choose: Choose) -> None:
    """Drop the query tokens that `choose` does not keep before a layer.

    The kept tokens come first in the final hidden states, followed by zeros.

    Args:
        layer: the first layer that runs on fewer tokens, so the number of layers that run on all.
        choose: called with the hidden states before that layer, once per forward.

    Raises:
        ValueError: if the model has no such layer after its first.
    """
    layers = decoder_layers(model)
    if not 1 <= layer < len(layers):
        raise ValueError(
            f"layer={layer}: the model has {len(layers)} layers, so tokens can be dropped after 1 "
            f"to {len(layers) - 1} of them."
        )
    narrowing: _Narrowing | None = None

    def decide(args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        nonlocal narrowing
        hidden = args[0] if args else kwargs["hidden_states"]
        tokens = choose(hidden)
        narrowing = None if tokens is None else _Narrowing(hidden, tokens)
        if narrowing is None:
            return None
        return narrowing(args), {name: narrowing(value) for name, value in kwargs.items()}

    def narrow(args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if narrowing is None:
            return None
        # Hidden states are already narrowed by the previous layer.
        named = {
            name: value if name == "hidden_states" else narrowing(value)
            for name, value in kwargs.items()
        }
        return args[:1] + narrowing(args[1:]), named

    def widen(args: tuple, kwargs: dict, output: Any) -> Any:
        if narrowing is None:
            return None
        if isinstance(output, tuple):
            return (narrowing.widened(output[0]), *output[1:])
        return narrowing.widened(output)

    first, *others = [*layers][layer:]
    changes.before(first, decide)
    for other in others:
        changes.before(other, narrow)
    changes.after(layers[-1], widen)


def layer_input(model: Any, changes: Changes, layer: int) -> list[Tensor]:
    """A list that forwards fill with the hidden states `(batch, tokens, hidden)` before a layer."""
    seen: list[Tensor] = []

    def note(args: tuple, kwargs: dict) -> None:
        seen[:] = [args[0] if args else kwargs["hidden_states"]]

    changes.before(decoder_layers(model)[layer], note)
    return seen


class _Narrowing:
    """Narrows inputs with one entry per query token; those that all layers share only once."""

    def __init__(self, hidden: Tensor, kept: Tensor) -> None:
        self._batch, self._tokens = hidden.shape[:2]
        self._kept = kept
        #: By id: the original, so that no other object can take its id, and what it became.
        self._made: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self, value))
        if id(value) not in self._made:
            if isinstance(value, Tensor) and value.ndim in (2, 3, 4):
                dim = 2 if value.ndim == 4 else 1
                per_token = value.shape[0] in (1, self._batch) and value.shape[dim] == self._tokens
                narrowed = entries(value, self._kept.to(value.device), dim) if per_token else value
            else:
                return value
            self._made[id(value)] = value, narrowed
        return self._made[id(value)][1]

    def widened(self, hidden: Tensor) -> Tensor:
        """Padded with zeros to the original length."""
        return torch.nn.functional.pad(hidden, (0, 0, 0, self._tokens - hidden.shape[1]))
