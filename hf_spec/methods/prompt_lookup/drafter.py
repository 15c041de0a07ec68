"""Candidates from n-gram matches in the prompt and the output so far.

Saxena, "Prompt Lookup Decoding" (2023), with several continuations merged into a tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.drafting.drafter import Drafter
from hf_spec.drafting.lookup import BatchLookup
from hf_spec.drafting.ngram import NgramIndex, continuation_tree
from hf_spec.drafting.state import DecodeState
from hf_spec.methods.prompt_lookup.options import PromptLookupOptions


class PromptLookupDrafter(Drafter):
    """Looks the sequence's last tokens up in the sequence itself."""

    options: PromptLookupOptions

    def start(self, state: DecodeState) -> None:
        self.lookups = BatchLookup(self.options, state.batch_size)

    def propose(self, state: DecodeState) -> Tree:
        return Tree.of_rows(self.lookups.lookup(state), state.root.device)

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        self.lookups.observe(result)

    def select(self, rows: Sequence[int]) -> None:
        self.lookups.select(rows)

    def chain(self, input_ids: Tensor) -> list[int]:
        tokens, depth = input_ids[0].tolist(), self.options.max_depth
        index = NgramIndex(self.options.min_ngram, self.options.max_ngram)
        index.update(tokens)
        return continuation_tree(tokens, index.matches(tokens, 1), depth, depth).tokens[1:]
