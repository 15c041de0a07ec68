"""The cache of a forward over whole sequences, for training: nothing is committed, and gradients
flow through what it holds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from hf_spec.cache.convert import with_layers
from hf_spec.cache.recurrent import RecurrentStates
from hf_spec.cache.stateful import OpenBlock, StatefulCache
from modeling_patches.linear_attention import recurrent_rules
from modeling_patches.support import one_token


class SequenceCache(StatefulCache):
    """Keys and values that a forward appends, beside recurrent states that are its own.

    Args:
        states: those of the model's recurrent layers.
    """

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
    states.take_over(with_layers(one_token(model)).layers, [0])
    for tensor in states.version.tensors:
        tensor.zero_()
    states.select([0] * batch_size)
    return states
