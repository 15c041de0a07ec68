"""What drafters share whose candidates come from heads on the final hidden state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.core.tree_states import TreeState
from hf_spec.drafting.drafter import DecodingState, Draft
from hf_spec.drafting.heads import WEIGHTS, draft_logits
from hf_spec.drafting.tree_drafter import AT_ONCE, StepRows, TreeDrafter, TreeSource
from hf_spec.model.sequences import token_hidden


class HeadDrafter(TreeDrafter):
    """Candidates are the heads' likeliest tokens; a step forwards the tree and nothing else.

    Every step knows what all heads say, so that the tree is always that of the last state.

    Args:
        weights: of the heads, as in :mod:`hf_spec.drafting.heads`.
        source: gives trees without probes, see :meth:`TreeStates.bare`. Heads past its depth are
            left out.
    """

    wants_hidden = True

    def __init__(
        self,
        model: Any,
        options: Any,
        weights: Mapping[str, Tensor],
        source: TreeSource,
    ):
        super().__init__(model, options, source)
        dtype = model.get_input_embeddings().weight.dtype  # of hidden states
        self.weights = {
            name: tensor[: source.max_depth].detach().to(dtype) for name, tensor in weights.items()
        }

    @property
    def distances(self) -> int:
        return len(self.weights[WEIGHTS])

    @property
    def per_distance(self) -> int:
        return 0

    def propose(self, state: DecodingState) -> Draft:
        tree = self.source.states(state).states[-1].tree
        depth = max(min(tree.max_depth, state.max_depth), 0) if state.hidden is not None else 0
        tree = tree.truncate(depth)
        batch = tree.batch(state.batch_size, state.root.device)
        if depth == 0:
            return Draft(batch, state.root[:, None])
        tokens, distributions = self.candidates(state, [tree] * state.batch_size, depth)
        return Draft(batch, tokens, distributions)

    def rows(self, states: Sequence[TreeState], device: str) -> StepRows:
        trees = [state.tree for state in states]
        return trees, TreeBatch.stack(trees, device), None

    def candidates(
        self, state: DecodingState, trees: list[TokenTree], depth: int
    ) -> tuple[Tensor, Tensor | None]:
        assert state.hidden is not None
        logits = self.predictions(state.hidden, self.source.look(depth))
        return self.source.tokens(trees, state, logits), None

    def predictions(self, hidden: Tensor, depth: int) -> Tensor:
        """Logits of the first heads, ``(batch, depth, vocab)``.

        Args:
            hidden: ``(batch, hidden)``.
            depth: how many heads.
        """
        used = {name: tensor[:depth] for name, tensor in self.weights.items()}
        return draft_logits(self.model, used, hidden)

    def future_logits(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        hidden = token_hidden(self.model, input_ids)[0]
        for some in places.to(hidden.device).split(max(AT_ONCE // self.distances, 1)):
            yield self.predictions(hidden[some], self.distances)
