"""The drafter of ``eagle3``, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import require_active
from hf_spec.core.checks import check_count
from hf_spec.core.limits import MAX_DRAFT_TOKENS
from hf_spec.core.memory import recall
from hf_spec.core.tree import Tree
from hf_spec.drafting.autoregressive import AutoregressiveDrafter, block_mask
from hf_spec.drafting.grow import Frontier
from hf_spec.drafting.options import DraftOptions, key_of
from hf_spec.drafting.state import DecodeState
from hf_spec.methods.eagle3.network import Eagle3Network
from hf_spec.model.hidden_states import Reads
from hf_spec.policy.draft_exit import DraftExit
from hf_spec.policy.tempering import Tempering

#: Depth of the deepest draft token by default.
DEPTH = 8


@dataclass(frozen=True)
class Eagle3Options(DraftOptions):
    """Options of ``eagle3`` (EAGLE-2, section 4.1; EAGLE-3, section 4).

    Attributes:
        tree: ``adaptive``: the likeliest paths, grown level by level. ``chain``: the likeliest
            tokens only.
        max_depth: depth of the deepest draft token; None for 8. Each level is one forward.
        width: draft tokens of a level that are continued, the likeliest ones; the paper's top-k.
    """

    width: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("width", self.width, high=MAX_DRAFT_TOKENS)
        if self.max_depth is not None:
            check_count("max_depth", self.max_depth, high=MAX_DRAFT_TOKENS)


class Eagle3Drafter(AutoregressiveDrafter):
    """Trees of the adapter's decoder.

    With a mask token, rows of it draft the tokens at all distances in one forward ("P-EAGLE:
    Parallel-Drafting EAGLE with Scalable Training", 2026). A distance then has one
    distribution, whatever was drafted before.
    """

    options: Eagle3Options
    network: Eagle3Network

    def __init__(self, model: Any, options: Eagle3Options):
        adapter = require_active(model, "EAGLE3", "eagle3")
        depth = options.max_depth or DEPTH
        self._key = "eagle3", adapter.name, key_of(options)
        self.forward_per_level = adapter.config.mask_token_id is None
        self._all: Tensor | None = None  # (batch, depth, tokens) logits of all distances
        super().__init__(
            model, options, Eagle3Network(model, adapter.module),
            Reads("committed", tuple(adapter.config.layers)), depth, options.width,
            recall(model, (DraftExit, self._key), lambda: DraftExit(depth)), Tempering(),
        )  # fmt: skip

    def start(self, state: DecodeState) -> None:
        super().start(state)
        if state.do_sample:  # other drafts are right
            key = *self._key, "sampled"
            self.exit = recall(self.model, (DraftExit, key), lambda: DraftExit(self.depth))
            self.tempering = recall(self.model, (Tempering, key), Tempering)

    def level(self, frontier: Frontier) -> Tensor:
        if self.forward_per_level:
            return super().level(frontier)
        if not frontier.depth:
            self._all = self._of_all_distances()
        assert self._all is not None
        return self._all[:, frontier.depth, None]

    def _of_all_distances(self) -> Tensor:
        """Logits ``(batch, depth, tokens)``: the first of the root, the others of mask rows."""
        assert self._root is not None and self.cache is not None
        states, cache, network = self._root[0], self.cache, self.network
        if self.depth > 1:
            tokens, hidden = network.masks(len(states), self.depth - 1)
            tree = Tree.chain(tokens)
            mask = block_mask(cache, tree.ancestors, cache.begin(tree))
            positions = cache.lengths[:, None] + tree.depths
            found, _ = network.run(tokens, hidden, positions, mask, cache)
            states = torch.cat([states, found], 1)
        return network.logits(states)
