"""The positions that a caller gives for a forward with a 4-D mask; see :mod:`.positions`."""

from __future__ import annotations

from typing import Any, TypeGuard

from torch import Tensor


class Positions:
    """The positions of the tokens and keys of the next forward."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, ...] = ()

    def set(
        self, query_positions: Tensor, key_positions: Tensor, padding: Tensor | int = 0
    ) -> None:
        """To be called before each forward whose mask is 4-D: additive ``(batch, 1, query, key)``,
        0 or negative, in the model's dtype.

        Args:
            query_positions: ``(batch, query)`` counted from each row's first token.
            key_positions: ``(batch, key)`` likewise; any where no query attends.
            padding: ``(batch, 1)`` columns before each row's first token.
        """
        self._last = query_positions, key_positions
        self.columns = query_positions + padding  # (batch, query)
        self.key_columns = key_positions + padding  # (batch, key)

    def of(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (batch, query) and (batch, key) for a forward with this 4-D mask.

        Keys that no query attends count as position 0, as padding does in Transformers: a stale
        position times a slope can overflow fp16, and inf survives the addition of the mask.
        """
        sizes = [positions.shape[-1] for positions in self._last]
        if list(mask.shape[-2:]) != sizes or not mask.is_floating_point():
            raise ValueError(
                f"a {mask.dtype} mask of shape {tuple(mask.shape)} came with {sizes} query and key "
                "positions: it must be additive, (batch, 1, query, key), with the sizes given to "
                "set_positions before the forward."
            )
        query, key = self._last
        return query, key.masked_fill((mask < 0).all(dim=-2)[:, 0], 0)


def is_tree(mask: Any) -> TypeGuard[Tensor]:
    return isinstance(mask, Tensor) and mask.dim() == 4
