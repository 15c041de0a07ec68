"""Auto-correct decoding: SPACE, section 3.2, algorithm 1.

A step forwards k candidates with a group of k mask tokens behind the last token and behind each
candidate, eqs. (5)-(7). The group behind the last accepted token gives the next k candidates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import require_active
from hf_spec.core.tree import TokenTree
from hf_spec.core.tree_states import TreeStates
from hf_spec.drafting.candidates import distribution
from hf_spec.drafting.drafter import DecodingState
from hf_spec.drafting.options import ONLINE
from hf_spec.drafting.probe_drafter import ProbeDrafter
from hf_spec.drafting.tree_drafter import TreeSource
from hf_spec.methods.space.masks import mask_tokens
from hf_spec.methods.space.options import SpaceOptions
from hf_spec.model.hidden_states import model_logits
from hf_spec.policy.online_policy import OnlineTrees
from hf_spec.policy.online_trees import MAX_ROWS


class SpaceDrafter(ProbeDrafter):
    """Chains of what the mask tokens predict, the likeliest tokens or samples; or online trees."""

    options: SpaceOptions

    def __init__(self, model: Any, options: SpaceOptions):
        adapter = require_active(model, "SPACE", "space")
        inputs = mask_tokens(adapter)
        count = options.count(inputs.embeddings.shape[0])
        used = replace(inputs, embeddings=inputs.embeddings[:count])
        source = TreeSource(TreeStates.uniform(TokenTree.chain(count), count))
        if options.tree == ONLINE:
            source = OnlineTrees(model, adapter, count, 1, options.max_rows or MAX_ROWS)
        super().__init__(model, options, used, source)

    def candidates(
        self, state: DecodingState, trees: list[TokenTree], depth: int
    ) -> tuple[Tensor, Tensor | None]:
        """Line 23: a token from each mask position, and its distribution, line 24, if sampled.

        q is the whole distribution after the call's processors, which see the candidates before.
        """
        samples = state.do_sample and self.options.samples
        if self.options.tree == ONLINE or (not samples and state.process.trivial):
            return super().candidates(state, trees, depth)
        assert state.probe_hidden is not None
        logits = model_logits(self.model, state.probe_hidden[:, :depth])  # (batch, depth, vocab)
        drafted: list[list[int]] = [[] for _ in state.tokens]
        tokens, distributions = [], []
        for place in range(depth):
            q = distribution(state.process(logits[:, place], drafted, state.active))
            token = torch.multinomial(q, 1) if samples else q.argmax(-1, keepdim=True)
            for row, chosen in zip(drafted, token[:, 0].tolist()):
                row.append(chosen)
            tokens.append(token)
            distributions.append(q)
        columns = [state.root[:, None], *(token.to(state.root.device) for token in tokens)]
        if not samples:
            return torch.cat(columns, dim=1), None
        nothing = torch.zeros_like(distributions[0])  # of the root
        return torch.cat(columns, dim=1), torch.stack([nothing, *distributions], dim=1)
