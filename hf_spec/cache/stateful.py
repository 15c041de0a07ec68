"""What recurrent layers of Transformers' models ask of their cache."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from transformers.cache_utils import Cache

from hf_spec.cache.recurrent import RecurrentStates
from hf_spec.core.tree import Tree


class OpenBlock(NamedTuple):
    """The block of nodes that forwards are about to write.

    Attributes:
        start: the slot of its first node, if rows are equally long.
        slots: ``(batch, n)`` slot of each node otherwise.
        end: number of slots that attention sees, without the front slots.
        front: whether attention sees the front slots, too.
        tree: the nodes; None where plain generation appends tokens.
        first: nodes of the tree that are written before this block.
    """

    start: int
    slots: Tensor | None
    end: int
    front: bool = False
    tree: Tree | None = None
    first: int = 0


class StatefulCache(Cache):
    """A cache that may hold recurrent states.

    Attributes:
        recurrent: the states; None if no layer has any.
        block: the open block of nodes, if one is open.
    """

    recurrent: RecurrentStates | None = None
    block: OpenBlock | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution; None in a block, whose nodes run by other rules."""
        return self._in_block().copy("conv", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._in_block().copy("rule", layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        states = self._in_block()
        states.run_next(layer_idx, state_idx)
        if states.plain:
            states.append(layer_idx, state_idx, conv_states)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        states = self._in_block()
        if states.plain:
            states.replace(layer_idx, state_idx, recurrent_states)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's name of :meth:`get_recurrent_state`."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """MiniMax's name of :meth:`update_recurrent_state`."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return self._in_block().plain

    def _in_block(self) -> RecurrentStates:
        if self.recurrent is None or self.block is None:
            raise ValueError(
                "TreeCache: recurrent layers continue what generate(assistant_strategy=...) "
                "returned, and only in another such call. Elsewhere start without a cache."
            )
        return self.recurrent
