"""Drop rows of a forward after its first layers; the deeper layers run on those that are left.

Before each deeper layer a hook narrows the hidden states and all that has one entry per row:
attention masks, position ids, rotary tables. Behind the last layer zeros make up for the rows that
went, since some models (GPT-2's family) insist on as many rows as came in. Whoever uses it says
which rows stay, and sees to it that the cache takes fewer keys from then on. This file knows
neither trees nor caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modeling_patches.attention_masks import narrowed_block_mask
from modeling_patches.layer_skip import decoder_layers
from modeling_patches.per_call import Changes, refuse_compiled

#: From hidden states (batch, rows, hidden) to the rows that stay, (batch, kept); None: all.
Choose = Callable[[Tensor], Tensor | None]


def early_pruning(model: Any, changes: Changes, layer: int, choose: Choose) -> None:
    """Let rows of a forward that `choose` does not keep end before a layer.

    The rows that stay are the first of the final hidden states; behind them stand zeros.

    Args:
        model: a causal language model.
        changes: what this is added to.
        layer: the first layer that runs on fewer rows, so the number of layers that run on all.
        choose: called with the hidden states before that layer, once per forward.

    Raises:
        ValueError: the model has no layer of this number behind its first, or layers are compiled.
    """
    layers = decoder_layers(model)
    if not 1 <= layer < len(layers):
        raise ValueError(
            f"layer={layer}: the model has {len(layers)} layers, so rows can be dropped after 1 to "
            f"{len(layers) - 1} of them."
        )
    refuse_compiled(model, "early pruning")
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
        # Hidden states come narrow from the layer before.
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

    `(batch, rows, hidden)`: what an early prediction head reads.
    """
    seen: list[Tensor] = []

    def note(args: tuple, kwargs: dict) -> None:
        seen[:] = [args[0] if args else kwargs["hidden_states"]]

    changes.before(decoder_layers(model)[layer], note)
    return seen


class _Narrowing:
    """Narrows what has one entry per row; what all layers share is narrowed once."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self._size = (0, 0)
        self._made: dict[int, tuple[Any, Any]] = {}

    def begin(self, batch: int, rows: int, kept: Tensor | None) -> None:
        """A forward of so many rows that keeps these, (batch, kept)."""
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
        """Hidden states (batch, kept, hidden) with zeros behind them, as many rows as came in."""
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
        """The rows that stay, along `dim`; one entry for all of the batch becomes one for each."""
        assert self.rows is not None
        rows = self.rows.to(value.device)
        if rows.shape[0] == 1:
            return value.index_select(dim, rows[0])
        shape = [rows.shape[0], *value.shape[1:]]
        shape[dim] = rows.shape[1]
        index = rows.view(rows.shape[0], *[1] * (dim - 1), -1, *[1] * (value.ndim - dim - 1))
        return value.expand(rows.shape[0], *value.shape[1:]).gather(dim, index.expand(shape))
