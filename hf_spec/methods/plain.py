"""``plain``: one token per step, without drafts: what speculation is compared with.

With recorded steps this is plain generation whose forwards are one launch each.
"""

from dataclasses import dataclass

from torch import Tensor

from hf_spec.core.tree import Tree
from hf_spec.draft.drafter import Drafter
from hf_spec.draft.options import TREE_OPTIONS, DraftOptions
from hf_spec.draft.predictor import DecodeState
from hf_spec.methods.registry import Method


@dataclass(frozen=True)
class PlainOptions(DraftOptions):
    """Options of ``plain``."""

    drafting: str = "always"  # nothing depends on time


class PlainDrafter(Drafter):
    """Drafts nothing."""

    unused = (
        *TREE_OPTIONS, "lookup", "recycle", "lookup_history", "acceptance", "typical_epsilon",
        "typical_delta",
    )  # fmt: skip

    drafts = False

    def propose(self, state: DecodeState) -> Tree:
        return Tree.roots(state.root)

    def chain(self, input_ids: Tensor) -> list[int]:
        return []


METHOD = Method(
    name="plain",
    summary="one token per step, without drafts; with recorded steps, the baseline of speculation",
    options=PlainOptions,
    drafter=PlainDrafter,
)
