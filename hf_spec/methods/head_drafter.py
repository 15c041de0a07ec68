"""What drafters share whose candidates come from heads on the final hidden state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_spec.core.tree import TokenTree
from hf_spec.methods.base import DecodingState, Draft, Drafter
from hf_spec.methods.candidates import ranked_tokens
from hf_spec.methods.forward import output_logits
from hf_spec.methods.heads import draft_logits
from hf_spec.methods.online_policy import OnlineTrees
from hf_spec.methods.probing import token_hidden


class HeadDrafter(Drafter):
    """Candidates are the heads' likeliest tokens; a step forwards the tree and nothing else.

    Args:
        weights: of the heads, as in :mod:`hf_spec.methods.heads`.
        tree: of every row, no deeper than there are heads.
        online: chooses the tree of each step, if it does.
    """

    wants_hidden = True

    def __init__(
        self, model: Any, options: Any, weights: Mapping[str, Tensor], tree: TokenTree,
        online: OnlineTrees | None = None,
    ):  # fmt: skip
        super().__init__(model, options)
        dtype = model.get_input_embeddings().weight.dtype  # of hidden states
        self.weights = {name: tensor.detach().to(dtype) for name, tensor in weights.items()}
        self.tree = tree
        self.online = online

    def start(self, state: DecodingState) -> None:
        if self.online is not None:
            self.online.start(state)

    def propose(self, state: DecodingState) -> Draft:
        hidden, online = state.hidden, self.online
        whole = self.tree if online is None else online.tree(state)
        depth = 0 if hidden is None else max(min(whole.max_depth, state.max_depth), 0)
        tree = whole.truncate(depth)
        batch = tree.batch(state.batch_size, state.root.device)
        if hidden is None or depth == 0:
            return Draft(batch, state.root[:, None])
        trees = [tree] * state.batch_size
        if online is not None:
            logits = self.predictions(hidden, online.look(depth))
            return Draft(batch, online.tokens(trees, state, logits))
        return Draft(batch, ranked_tokens(trees, state.root, self.predictions(hidden, depth)))

    def observe(self, state: DecodingState, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        if self.online is not None:
            self.online.observe(state, draft.num_rows, nodes)

    def details(self) -> dict[str, Any]:
        return {} if self.online is None else self.online.details()

    def predictions(self, hidden: Tensor, depth: int) -> Tensor:
        """Logits of the first heads, ``(batch, depth, vocab)``.

        Args:
            hidden: ``(batch, hidden)``.
            depth: how many heads.
        """
        used = {name: tensor[:depth] for name, tensor in self.weights.items()}
        return draft_logits(self.model, used, hidden)

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        with torch.no_grad():
            hidden = token_hidden(self.model, input_ids)[:, -1]
            heads = self.predictions(hidden, self.tree.max_depth)
            logits = torch.cat([output_logits(self.model, hidden)[:, None], heads], dim=1)
        chain = logits.argmax(-1).to(input_ids.device)
        candidates: Any = torch.cat([input_ids, chain], dim=1)
        return candidates, None
