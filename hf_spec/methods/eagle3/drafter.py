"""The drafter of ``eagle3``, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.core import mask as masks
from hf_spec.core.tree import Tree
from hf_spec.drafting.autoregressive import AutoregressiveDrafter
from hf_spec.drafting.forward_drafter import GrowOptions
from hf_spec.drafting.grow import Frontier
from hf_spec.drafting.options import key_of
from hf_spec.methods.eagle3.network import Eagle3Network
from hf_spec.model.hidden_states import Reads


@dataclass(frozen=True)
class Eagle3Options(GrowOptions):
    """Options of ``eagle3`` (EAGLE-2, section 4.1; EAGLE-3, section 4).

    Attributes:
        width: draft tokens of a level that are continued, the likeliest ones; the paper's top-k.
    """

    width: int = 8


class Eagle3Drafter(AutoregressiveDrafter):
    """Trees of the adapter's decoder.

    With a mask token, rows of it draft the tokens at all distances in one forward ("P-EAGLE:
    Parallel-Drafting EAGLE with Scalable Training", 2026). A distance then has one
    distribution, whatever was drafted before.
    """

    options: Eagle3Options
    network: Eagle3Network

    def __init__(self, model: Any, options: Eagle3Options, adapter: ActiveAdapter):
        network = Eagle3Network(model, adapter.module)
        self.forward_per_level = network.masks is None
        self._all: Tensor | None = None  # (batch, depth, tokens) logits of all distances
        super().__init__(
            model, options, network, Reads("committed", tuple(adapter.config.layers)),
            ("eagle3", adapter.name, key_of(options)),
        )  # fmt: skip

    def level(self, frontier: Frontier) -> Tensor:
        if self.forward_per_level:
            return super().level(frontier)
        if not frontier.depth:
            self._all = self._of_all_distances()
        assert self._all is not None
        return self._all[:, frontier.depth, None]

    def _of_all_distances(self) -> Tensor:
        """Logits ``(batch, depth, tokens)``: the first of the root, the others of mask rows."""
        assert self._root is not None
        states, cache, network = self._root[0], self.cache, self.network
        if self.depth > 1:
            assert network.masks is not None
            tokens, hidden = network.masks(len(states), self.depth - 1)
            tree = Tree.chain(tokens)
            slots, positions = cache.open(tree)
            mask = masks.tree(tree.ancestors, cache.lengths, slots)
            found, _ = network.run(tokens, hidden, positions, mask, cache)
            states = torch.cat([states, found], 1)
        return network.logits(states)
