"""Drafts with prompt tokens in the verifying forward: PPD, sections 4.5 and 5.4.

The tree's nodes have prompt tokens. Those under the last accepted node predict the tokens after the
next one, which are the draft tokens of the next step. Their number is the sequence's state, and
each state may have its own tree.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_spec.adapters.module import Adapter
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree_states import TreeStates
from hf_spec.drafting.options import CHAIN, DraftOptions, refuse
from hf_spec.drafting.probe_drafter import ProbeDrafter
from hf_spec.drafting.tree_drafter import chain_tree
from hf_spec.methods.ppd.adapter import PromptTokens
from hf_spec.methods.ppd.dynamic_tree import DYNAMIC, dynamic_states

#: Rank paths of the static tree: many at depth 1, which every step verifies, and few below.
STATIC: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,), (4,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1),
)  # fmt: skip


@dataclass(frozen=True)
class PPDOptions(DraftOptions):
    """Options of ``ppd`` (PPD, chapters 4 and 5).

    Attributes:
        tree: ``static``: ten draft tokens, all prompt tokens under each node (section 5.3).
            ``chain``: the likeliest ones only. ``dynamic``: the dynamic sparse tree of section
            5.4, which :func:`make_dynamic_tree` has made. All values in :class:`DraftOptions` are
            allowed, too.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree == DYNAMIC:
            refuse(
                self, ["max_depth"],
                f"with tree={DYNAMIC!r}, which says itself how deep it is. Leave one of the two "
                "out.",
            )  # fmt: skip


def static_tree(_: PPDOptions, depth: int) -> TokenTree:
    """The paths of `STATIC`, with the likeliest one as deep as predictions go."""
    chain = {(0,) * length for length in range(1, depth + 1)}
    return TokenTree.from_paths(sorted(chain.union(STATIC))).truncate(depth)


class PPDDrafter(ProbeDrafter):
    """Static or dynamic trees of the prompt tokens' likeliest tokens."""

    trees = {"static": static_tree, CHAIN: chain_tree, DYNAMIC: None}
    options: PPDOptions

    def __init__(self, model: Any, options: PPDOptions, adapter: Adapter):
        super().__init__(model, options, adapter, adapter.config.num_prompt_tokens)
        self.prompts = PromptTokens(adapter, self.distances)
        self.probe_inputs, self.group = self.prompts.inputs, self.prompts.group
        self.per_distance = adapter.config.num_ept

    def static_states(self, adapter: Adapter) -> TreeStates | None:
        if self.options.tree == DYNAMIC:
            return dynamic_states(self.model, adapter)
        return super().static_states(adapter)

    def distance_states(self, hidden: Tensor) -> Tensor:
        return self.prompts.states(hidden)

    def logits(self, states: Tensor) -> Tensor:
        if self.prompts.config.head == "vocabulary":
            return self.prompts.logits(self.model, states)
        return super().logits(states)
