"""Base class of drafters whose draft tokens come from heads on the final hidden state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from hf_spec.core.token_tree import TokenTree
from hf_spec.drafting.heads import HEAD_WEIGHTS, PROJECTION, WEIGHTS, head_logits, head_states
from hf_spec.drafting.options import CHAIN
from hf_spec.drafting.tree_drafter import AT_ONCE, TreeDrafter, TreeSource, chain_tree
from hf_spec.model.hidden_states import Reads, model_logits
from hf_spec.model.sequences import token_hidden
from modeling_patches.weights import placement

#: ``tree="sparse"``: rank paths, the likeliest first. On held-out answers of a 22M model they are
#: worth 0.3 % less than the 15 best nodes there (docs/methods/medusa.md).
SPARSE: tuple[tuple[int, ...], ...] = (
    (0,), (0, 0), (1,), (0, 0, 0), (2,), (0, 1), (1, 0), (0, 0, 1), (0, 0, 0, 0), (3,), (0, 2),
    (2, 0), (1, 0, 0), (0, 1, 0), (4,),
)  # fmt: skip


def sparse_tree(_: Any, depth: int) -> TokenTree:
    """15 draft tokens, most of them under likely ones."""
    return TokenTree.from_paths(SPARSE).truncate(depth)


class HeadDrafter(TreeDrafter):
    """Draft tokens are the heads' likeliest tokens; a step forwards only the tree.

    All heads predict in every step, so the tree is always that of the last state.

    Args:
        weights: the adapter's parameters, as in :mod:`hf_spec.drafting.heads`.
        source: provides trees without probes, see :meth:`TreeStates.uniform`. Heads past its depth
            are not used.
    """

    trees = {"sparse": sparse_tree, CHAIN: chain_tree}
    reads = Reads("last")
    held = (*TreeDrafter.held, "weights")

    def __init__(self, model: Any, options: Any, weights: Mapping[str, Tensor], source: TreeSource):
        super().__init__(model, options, source, weights)
        dtype = placement(model).dtype  # of hidden states
        self.weights = {
            name: weights[name][: source.max_depth].detach().to(dtype)
            for name in HEAD_WEIGHTS
            if name in weights
        }
        self.distances = len(self.weights[WEIGHTS])

    def states(self, hidden: Tensor, depth: int) -> Tensor:
        used = {name: tensor[:depth] for name, tensor in self.weights.items()}
        return head_states(used, hidden).to(hidden)

    def logits(self, states: Tensor) -> Tensor:
        if self.exact and PROJECTION not in self.weights:
            return model_logits(self.model, states, head=self.vocabulary)
        return head_logits(self.model, self.weights, states, self.vocabulary)

    def future_states(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        hidden = token_hidden(self.model, input_ids)[0]
        for some in places.to(hidden.device).split(max(AT_ONCE // self.distances, 1)):
            yield self.states(hidden[some], self.distances)
