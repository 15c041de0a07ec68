"""``prompt_lookup``: n-gram matches in prompt and output, several continuations in one tree.

Saxena, "Prompt Lookup Decoding" (2023), with several continuations merged into a tree.
"""

from dataclasses import dataclass

from torch import Tensor

from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.draft.drafter import Drafter
from hf_spec.draft.lookup import BatchLookup, Limits, NgramIndex, continuation_tree
from hf_spec.draft.lookup_file import history_of
from hf_spec.draft.options import DraftOptions
from hf_spec.draft.predictor import DecodeState
from hf_spec.methods.registry import Method
from hf_spec.modeling_patches.weights import vocabulary


@dataclass(frozen=True)
class PromptLookupOptions(Limits, DraftOptions):
    """Options of ``prompt_lookup``: the limits of lookups."""

    former_names = {"max_nodes": "num_draft_tokens"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram} is above max_ngram={self.max_ngram}: lower it."
            )


class PromptLookupDrafter(Drafter):
    """Looks the sequence's last tokens up in the sequence itself."""

    unused = ("tree", "lookup", "recycle")
    of_rows = ("lookups",)
    options: PromptLookupOptions

    def start(self, state: DecodeState) -> None:
        history = history_of(state.model, self.options.lookup_history)
        self.lookups = BatchLookup(self.options, state.tokens, history, vocabulary(state.model))

    def propose(self, state: DecodeState) -> Tree:
        known = [state.looked_up] if state.looked_up else []
        rows = self.lookups.lookup(state.tokens, state.active, state.max_depth, *known)
        return Tree.of_rows(rows, state.root.device)

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        self.lookups.observe(result)

    def chain(self, input_ids: Tensor) -> list[int]:
        tokens, depth = input_ids[0].tolist(), self.options.max_depth
        index = NgramIndex(self.options.min_ngram, self.options.max_ngram)
        index.update(tokens)
        row = continuation_tree(
            tokens, index.matches(tokens, 1), depth, depth, vocabulary=vocabulary(self.model)
        )
        return row.tokens[1:]


METHOD = Method(
    name="prompt_lookup",
    summary="n-gram matches in prompt and output form a tree; nothing to train",
    options=PromptLookupOptions,
    drafter=PromptLookupDrafter,
)
