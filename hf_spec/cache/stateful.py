"""What recurrent layers of Transformers' models ask of their cache, also in training."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from hf_spec.cache.recurrent import RecurrentStates
from hf_spec.core.tree import Tree
from hf_spec.modeling_patches.linear_attention import recurrent_rules
from hf_spec.modeling_patches.support import one_token


class OpenBlock(NamedTuple):
    """The block of nodes that forwards are about to write."""

    start: int  # slot of its first node, if rows are equally long
    slots: Tensor | None  # (batch, n) slot of each node otherwise
    end: int  # number of slots that attention sees, without the front slots
    front: bool = False  # whether attention sees the front slots, too
    tree: Tree | None = None  # the nodes; None where plain generation appends tokens
    first: int = 0  # nodes of the tree that are written before this block


class StatefulCache(Cache):
    """A cache that may hold recurrent states."""

    recurrent: RecurrentStates | None = None  # None if no layer has any
    block: OpenBlock | None = None  # None if none is open

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


class SequenceCache(StatefulCache):
    """Keys and values that a forward over whole sequences appends, for training, beside recurrent
    states that are its own: nothing is committed, and gradients flow through what it holds."""

    def __init__(self, states: RecurrentStates):
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.recurrent, self.block = states, OpenBlock(0, None, 0)


def sequence_cache(states: RecurrentStates | None) -> Cache:
    """An empty cache; ``states`` as of :func:`states_before`."""
    return DynamicCache() if states is None else SequenceCache(states)


@torch.no_grad()
def states_before(model: Any, batch_size: int) -> RecurrentStates | None:
    """The recurrent states before the first token of sequences; None if the model has none."""
    rules = recurrent_rules(model)
    if not rules:
        return None
    states = RecurrentStates(rules, 1)
    # The model's own code makes states of its shapes.
    states.take_over(one_token(model).layers, [0])
    for tensor in states.snapshot.tensors:
        tensor.zero_()
    states.select([0] * batch_size)
    return states
