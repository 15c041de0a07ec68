"""Candidates from n-gram matches in the prompt and the output so far.

Saxena, "Prompt Lookup Decoding" (2023), with several continuations merged into a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_spec.core.tree import TreeBatch
from hf_spec.methods.base import DecodingState, Draft, Drafter
from hf_spec.methods.prompt_lookup.index import Confidence, NgramIndex, continuation_tree
from hf_spec.methods.prompt_lookup.options import PromptLookupOptions


class PromptLookupDrafter(Drafter):
    """Looks the sequence's last tokens up in the sequence itself."""

    options: PromptLookupOptions

    def start(self, state: DecodingState) -> None:
        self._indexes = [self._index() for _ in state.tokens]
        self._confidence = [Confidence() for _ in state.tokens]
        self._sizes = [0 for _ in state.tokens]

    def propose(self, state: DecodingState) -> Draft:
        options = self.options
        depth = min(options.max_depth, state.max_depth)
        trees, rows = [], []
        for row, tokens in enumerate(state.tokens):
            matches: list[tuple[int, int]] = []
            if state.active[row] and depth > 0:
                self._indexes[row].update(tokens)
                matches = self._indexes[row].matches(tokens, options.max_matches)
            self._sizes[row] = matches[0][1] if matches else 0
            tree, candidates = continuation_tree(
                tokens, matches, depth, options.max_nodes, self._confidence[row],
                options.min_probability,
            )  # fmt: skip
            trees.append(tree)
            rows.append([tokens[-1], *candidates])
        nodes = max(map(len, rows))
        device = state.root.device
        padded = torch.tensor([row + [0] * (nodes - len(row)) for row in rows], device=device)
        return Draft(TreeBatch.stack(trees, device), padded)

    def observe(self, state: DecodingState, draft: Draft, counts: Sequence[int]) -> None:
        for row, count in enumerate(counts):
            depth = draft.tree.row_depths[row]
            if count and depth:
                self._confidence[row].observe(self._sizes[row], count - 1, depth)

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
