"""Candidates from n-gram matches in the prompt and the output so far.

Saxena, "Prompt Lookup Decoding" (2023), with several continuations merged into a tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.drafting.drafter import DecodingState, Draft, Drafter
from hf_spec.drafting.ngram import NgramIndex, Retrieval, continuation_tree
from hf_spec.methods.prompt_lookup.options import PromptLookupOptions


class PromptLookupDrafter(Drafter):
    """Looks the sequence's last tokens up in the sequence itself."""

    options: PromptLookupOptions

    def start(self, state: DecodingState) -> None:
        self.rows = [Retrieval(self.options) for _ in state.tokens]

    def propose(self, state: DecodingState) -> Draft:
        found: list[tuple[TokenTree, list[int]]] = [
            one.lookup(tokens, state.max_depth) if active else (TokenTree.chain(0), [])
            for one, tokens, active in zip(self.rows, state.tokens, state.active)
        ]
        nodes = max(len(tree) for tree, _ in found)
        device = state.root.device
        padded = [
            [tokens[-1], *candidates] + [0] * (nodes - 1 - len(candidates))
            for tokens, (_, candidates) in zip(state.tokens, found)
        ]
        tree = TreeBatch.stack([tree for tree, _ in found], device)
        return Draft(tree, torch.tensor(padded, device=device))

    def observe(self, state: DecodingState, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        for one, path, depth in zip(self.rows, nodes, draft.tree.row_depths):
            if path:
                one.observe(len(path) - 1, depth)

    def select(self, state: DecodingState, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def chain(self, input_ids: Tensor) -> list[int]:
        tokens, depth = input_ids[0].tolist(), self.options.max_depth
        index = NgramIndex(self.options.min_ngram, self.options.max_ngram)
        index.update(tokens)
        return continuation_tree(tokens, index.matches(tokens, 1), depth, depth)[1]
