"""Drops query tokens of a forward after its first layers; deeper layers run on the others.

Before each deeper layer, a hook narrows the hidden states and everything with one entry per query
token: attention masks, position ids, rotary tables. After the last layer, zeros replace the dropped
tokens, since some models (GPT-2's family) require the original number. The caller chooses which
tokens stay, and makes the cache take fewer keys from then on. This module knows no trees or caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modeling_patches.attention_masks import narrowed_block_mask
from modeling_patches.modules import decoder_layers
from modeling_patches.per_call import Changes

#: From hidden states (batch, tokens, hidden) to the indices to keep, (batch, kept); None for all.
Choose = Callable[[Tensor], Tensor | None]


def early_pruning(model: Any, changes: Changes, layer: int, choose: Choose) -> None:
    """Drop the query tokens that `choose` does not keep before a layer.

    The kept tokens come first in the final hidden states, followed by zeros.

    Args:
        model: a causal language model.
        changes: the changes that this is added to.
        layer: the first layer that runs on fewer tokens, so the number of layers that run on all.
        choose: called with the hidden states before that layer, once per forward.

    Raises:
        ValueError: if the model has no such layer after its first.
    """
    layers = decoder_layers(model)
    if not 1 <= layer < len(layers):
        raise ValueError(
            f"layer={layer}: the model has {len(layers)} layers, so rows can be dropped after 1 to "
            f"{len(layers) - 1} of them."
        )
    narrowing = _Narrowing()

    def decide(args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        hidden = args[0] if args else kwargs["hidden_states"]
        narrowing.begin(hidden.shape[0], hidden.shape[1], choose(hidden))
        if narrowing.rows is None:
            return None
        return narrowing(args), {name: narrowing(value) for name, value in kwargs.items()}

    def narrow(args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if narrowing.rows is None:
            return None
        # Hidden states are already narrowed by the previous layer.
        named = {
            name: value if name == "hidden_states" else narrowing(value)
            for name, value in kwargs.items()
        }
        return args[:1] + narrowing(args[1:]), named

    def widen(args: tuple, kwargs: dict, output: Any) -> Any:
        if narrowing.rows is None:
            return None
        if isinstance(output, tuple):
            return (narrowing.widened(output[0]), *output[1:])
        return narrowing.widened(output)

    deeper = [*layers][layer:]
    changes.before(deeper[0], decide)
    for one in deeper[1:]:
        changes.before(one, narrow)
    changes.after(deeper[-1], widen)


def layer_input(model: Any, changes: Changes, layer: int) -> list[Tensor]:
    """A list that each forward fills with the hidden states before a layer.

    `(batch, tokens, hidden)`: the input of an early prediction head.
    """
    seen: list[Tensor] = []

    def note(args: tuple, kwargs: dict) -> None:
        seen[:] = [args[0] if args else kwargs["hidden_states"]]

    changes.before(decoder_layers(model)[layer], note)
    return seen


class _Narrowing:
    """Narrows inputs with one entry per query token; those that all layers share only once."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self._size = (0, 0)
        self._made: dict[int, tuple[Any, Any]] = {}

    def begin(self, batch: int, rows: int, kept: Tensor | None) -> None:
        """Begin a forward.

        Args:
            batch: batch size.
            rows: number of query tokens.
            kept: ``(batch, kept)`` indices of the tokens to keep; None for all.
        """
        self._size, self.rows, self._made = (batch, rows), kept, {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self(one) for one in value)
        if not isinstance(value, Tensor) and not hasattr(value, "tree_mask"):
            return value
        if id(value) not in self._made:
            # The original is kept, too, so that no other object can take its id.
            self._made[id(value)] = value, self._narrow(value)
        return self._made[id(value)][1]

    def widened(self, hidden: Tensor) -> Tensor:
        """Hidden states (batch, kept, hidden), padded with zeros to the original length."""
        missing = self._size[1] - hidden.shape[1]
        return torch.nn.functional.pad(hidden, (0, 0, 0, missing))

    def _narrow(self, value: Any) -> Any:
        assert self.rows is not None
        if not isinstance(value, Tensor):
            return narrowed_block_mask(value, lambda mask: self._pick(mask, 2))
        batch, rows = self._size
        if value.ndim not in (2, 3, 4) or value.shape[0] not in (1, batch):
            return value
        dim = 2 if value.ndim == 4 else 1
        return self._pick(value, dim) if value.shape[dim] == rows else value

    def _pick(self, value: Tensor, dim: int) -> Tensor:
        """Select the kept tokens along `dim`; a batch dimension of 1 is expanded."""
        assert self.rows is not None
        rows = self.rows.to(value.device)
        if rows.shape[0] == 1:
            return value.index_select(dim, rows[0])
        shape = [rows.shape[0], *value.shape[1:]]
        shape[dim] = rows.shape[1]
        index = rows.view(rows.shape[0], *[1] * (dim - 1), -1, *[1] * (value.ndim - dim - 1))
        return value.expand(rows.shape[0], *value.shape[1:]).gather(dim, index.expand(shape))
