"""Auto-correct decoding: SPACE, section 3.2, algorithm 1.

A step forwards k candidates with a group of k mask tokens behind the last token and behind each
candidate, eqs. (5)-(7). The group behind the last accepted token gives the next k candidates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_spec.core.tree import TokenTree
from hf_spec.core.tree_states import TreeStates
from hf_spec.methods.active_adapter import require_active
from hf_spec.methods.base import DecodingState
from hf_spec.methods.forward import model_logits
from hf_spec.methods.probe_drafter import ProbeDrafter
from hf_spec.methods.space.masks import mask_tokens
from hf_spec.methods.space.options import SpaceOptions


class SpaceDrafter(ProbeDrafter):
    """Chains of what the mask tokens predict, the likeliest tokens or samples; or online trees."""

    options: SpaceOptions

    def __init__(self, model: Any, options: SpaceOptions):
        adapter = require_active(model, "SPACE", "space")
        inputs = mask_tokens(adapter)
        count = options.count(inputs.embeddings.shape[0])
        used = replace(inputs, embeddings=inputs.embeddings[:count])
        chain = TreeStates.uniform(TokenTree.chain(count), count)
        online = options.online_trees(model, adapter, count, count)
        super().__init__(model, options, used, chain, online=online)

    def candidates(
        self, state: DecodingState, trees: list[TokenTree], depth: int
    ) -> tuple[Tensor, Tensor | None]:
        """Line 23: a token from each mask position, and its distribution, line 24, if sampled.

        q is the whole distribution after the call's processors, which see the candidates before.
        """
        samples = state.do_sample and self.options.samples
        if self.online is not None or (not samples and state.process.trivial):
            return super().candidates(state, trees, depth)
        assert state.probe_hidden is not None
        logits = model_logits(self.model, state.probe_hidden[:, :depth])  # (batch, depth, vocab)
        drafted: list[list[int]] = [[] for _ in state.tokens]
        tokens, distributions = [], []
        for place in range(depth):
            q = state.process(logits[:, place], drafted, state.active).softmax(-1)
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
