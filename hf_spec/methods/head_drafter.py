"""What drafters share whose candidates come from heads on the final hidden state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.core.tree_states import TreeState, TreeStates
from hf_spec.methods.base import DecodingState, Draft
from hf_spec.methods.candidates import ranked_tokens
from hf_spec.methods.forward import output_logits
from hf_spec.methods.heads import WEIGHTS, draft_logits
from hf_spec.methods.online_policy import OnlineTrees
from hf_spec.methods.probing import token_hidden
from hf_spec.methods.tree_drafter import AT_ONCE, StepRows, TreeDrafter
from hf_spec.methods.tuned_trees import TunedTrees


class HeadDrafter(TreeDrafter):
    """Candidates are the heads' likeliest tokens; a step forwards the tree and nothing else.

    Every step knows what all heads say, so that the tree is always that of the last state.

    Args:
        weights: of the heads, as in :mod:`hf_spec.methods.heads`.
        states: trees without probes, see :meth:`TreeStates.bare`; or those tuned for several
            devices. Heads past their last state are left out.
        online: chooses the tree of each step, if it does.
    """

    wants_hidden = True

    def __init__(
        self,
        model: Any,
        options: Any,
        weights: Mapping[str, Tensor],
        states: TreeStates | TunedTrees,
        online: OnlineTrees | None = None,
    ):
        super().__init__(model, options, states, online)
        dtype = model.get_input_embeddings().weight.dtype  # of hidden states
        self.weights = {
            name: tensor[: states.max_probes].detach().to(dtype) for name, tensor in weights.items()
        }

    @property
    def distances(self) -> int:
        return len(self.weights[WEIGHTS])

    @property
    def per_distance(self) -> int:
        return 0

    def propose(self, state: DecodingState) -> Draft:
        online = self.online
        tree = self.states.states[-1].tree if online is None else online.tree(state)
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
        if self.online is not None:
            logits = self.predictions(state.hidden, self.online.look(depth))
            return self.online.tokens(trees, state, logits), None
        return ranked_tokens(trees, state.root, self.predictions(state.hidden, depth)), None

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

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        with torch.no_grad():
            hidden = token_hidden(self.model, input_ids)[:, -1]
            heads = self.predictions(hidden, self.distances)
            logits = torch.cat([output_logits(self.model, hidden)[:, None], heads], dim=1)
        chain = logits.argmax(-1).to(input_ids.device)
        candidates: Any = torch.cat([input_ids, chain], dim=1)
        return candidates, None
