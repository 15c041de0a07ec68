"""Candidates from n-gram matches in the prompt and the output so far.

Saxena, "Prompt Lookup Decoding" (2023), with several continuations merged into a tree.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_spec.core.tree import TreeBatch
from hf_spec.methods.base import DecodingState, Draft, Drafter
from hf_spec.methods.prompt_lookup.index import NgramIndex, continuation_tree
from hf_spec.methods.prompt_lookup.options import PromptLookupOptions


class PromptLookupDrafter(Drafter):
    """Looks the sequence's last tokens up in the sequence itself."""

    options: PromptLookupOptions

    def start(self, state: DecodingState) -> None:
        self._indexes = [self._index() for _ in state.tokens]

    def propose(self, state: DecodingState) -> Draft:
        trees, rows = [], []
        depth = min(self.options.max_depth, state.max_depth)
        for row, tokens in enumerate(state.tokens):
            matches: list[tuple[int, int]] = []
            if state.active[row] and depth > 0:
                index = self._indexes[row]
                index.update(tokens)
                matches = index.matches(tokens, self.options.max_matches)
            tree, candidates = continuation_tree(tokens, matches, depth, self.options.max_nodes)
            trees.append(tree)
            rows.append([tokens[-1], *candidates])
        nodes = max(map(len, rows))
        device = state.root.device
        padded = torch.tensor([row + [0] * (nodes - len(row)) for row in rows], device=device)
        return Draft(TreeBatch.stack(trees, device), padded)

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        if not hasattr(self, "_indexes"):
            self._indexes = [self._index()]
        tokens = input_ids[0].tolist()
        self._indexes[0].update(tokens)
        matches = self._indexes[0].matches(tokens, 1)
        _, chain = continuation_tree(
            tokens, matches, self.options.max_depth, self.options.max_depth
        )
        return torch.cat([input_ids, input_ids.new_tensor([chain])], dim=1), None  # type: ignore

    def _index(self) -> NgramIndex:
        return NgramIndex(self.options.min_ngram, self.options.max_ngram)
