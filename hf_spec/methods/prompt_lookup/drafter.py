"""Candidates from n-gram matches in the prompt and the output so far.

Saxena, "Prompt Lookup Decoding" (2023), with several continuations merged into a tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_spec.drafting.drafter import DecodingState, Draft, Drafter, emitted
from hf_spec.drafting.ngram import NgramIndex, continuation_tree
from hf_spec.drafting.retrieval import NOTHING, Retrieval, draft_of
from hf_spec.methods.prompt_lookup.options import PromptLookupOptions


class PromptLookupDrafter(Drafter):
    """Looks the sequence's last tokens up in the sequence itself."""

    options: PromptLookupOptions

    def start(self, state: DecodingState) -> None:
        self.rows = [Retrieval(self.options) for _ in state.tokens]

    def propose(self, state: DecodingState) -> Draft:
        depth = state.max_depth
        found = [
            one.lookup(tokens, depth)
            if active
            else NOTHING._replace(tokens=tokens[-1:])  # a finished sequence may still cache it
            for one, tokens, active in zip(self.rows, state.tokens, state.active)
        ]
        return draft_of(found, state.root.device)

    def observe(self, state: DecodingState, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        for one, tokens in zip(self.rows, emitted(state, nodes)):
            one.observe(tokens)

    def select(self, state: DecodingState, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def chain(self, input_ids: Tensor) -> list[int]:
        tokens, depth = input_ids[0].tolist(), self.options.max_depth
        index = NgramIndex(self.options.min_ngram, self.options.max_ngram)
        index.update(tokens)
        return continuation_tree(tokens, index.matches(tokens, 1), depth, depth)[1]
