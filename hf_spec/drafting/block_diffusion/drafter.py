"""Drafts from blocks: one forward of a small decoder per step predicts all distances."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.module import Adapter
from hf_spec.core.buckets import bucket
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult
from hf_spec.drafting.block_diffusion.network import BlockNetwork, block_sequences, visible
from hf_spec.drafting.block_diffusion.predictions import PathPredictions
from hf_spec.drafting.draft_cache import DraftCache, committed
from hf_spec.drafting.options import DraftOptions
from hf_spec.drafting.state import DecodeState
from hf_spec.drafting.tree_drafter import AT_ONCE, TreeDrafter
from hf_spec.model.hidden_states import Reads
from hf_spec.model.sequences import token_hidden


class BlockDrafter(TreeDrafter):
    """Trees of a block's likeliest tokens.

    Args:
        adapter: the adapter, of a :class:`BlockConfig`.
    """

    per_row = ("_last", "_ahead")

    def __init__(self, model: Any, options: DraftOptions, adapter: Adapter):
        config = adapter.config
        super().__init__(model, options, adapter, config.distances)
        self.network = BlockNetwork(model, adapter)
        self.markov_head = head = self.network.head
        if head is not None:
            self.make_predictions = PathPredictions
            head.top_k = config.selector_top_k if head.chooses else None
        self.reads = Reads("committed", tuple(config.layers))

    def start(self, state: DecodeState) -> None:
        super().start(state)
        graphs = state.target.graphs
        self.cache = DraftCache.beside(state, self.network, self.network.device, graphs)
        head = self.network.head
        follows = head is not None and head.reads_ahead
        #: The root, and the token ahead of it, where the head reads that.
        self._last: Tensor | None = state.root if follows else None
        self._ahead = self._last

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        self.hidden = None
        self._follow(result)
        if hidden is None:
            return
        for tokens, states, counts, known in committed(result, hidden):
            rows = self.cache.open(Tree.chain(tokens))
            self.network.append(states, rows.positions, self.cache)
            self.cache.keep(counts, known)

    def _follow(self, result: StepResult) -> None:
        if self._last is not None:
            tokens = torch.cat([self._last[:, None], result.tokens], 1)
            self._ahead = tokens.gather(1, result.counts[:, None] - 1)[:, 0]
            self._last = result.bonus

    def hidden_after(self, root: Tensor) -> Tensor:
        if self.hidden is None:
            self.hidden = self._block(root)
        return self.hidden

    def carried(self, tree: Tree) -> tuple[Sequence[Tensor], Sequence[Tensor], Hashable]:
        self.cache.reserve(bucket(tree.num_tokens) + self.network.config.block_size)
        return super().carried(tree)

    def _block(self, root: Tensor) -> Tensor:
        """``(batch, distances, features)`` of the slots that predict."""
        network, cache, first = self.network, self.cache, self.cache.lengths[:, None]
        anchors, count = root.to(network.device)[:, None], network.config.block_size
        rows = cache.open(Tree.chain(anchors.expand(-1, count)))
        positions = rows.positions
        block = torch.ones(len(first), 1, count, count, dtype=torch.bool, device=first.device)
        full, near = visible(network.config, block, first, positions, positions)
        masks = [rows.mask(visible=full[:, 0])] * 2
        for window in set(network.windows.values()):
            begin = positions - window + 1
            if network.config.sliding_window_from == "anchor":
                begin = begin[:, :1].expand_as(begin)
            masks[1] = rows.mask(begin, window, near[:, 0])
        ahead = None if self._ahead is None else self._ahead.to(network.device)[:, None]
        states = network.run(anchors, positions, masks, cache, ahead)
        cache.rollback()
        return states[:, 0]

    def states(self, hidden: Tensor, depth: int) -> Tensor:
        return hidden[:, :depth]

    def logits(self, states: Tensor) -> Tensor:
        return self.network.logits(states, self.vocabulary)

    def future_states(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        features = token_hidden(self.network.model, input_ids, layers=self.reads.layers)
        for some in places.split(max(AT_ONCE // self.distances, 1)):
            hidden = block_sequences(self.network, input_ids, None, some[None], features)
            yield hidden[0, :, : self.distances]
