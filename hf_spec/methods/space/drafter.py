"""Auto-correct decoding: SPACE, section 3.2, algorithm 1.

A step forwards k draft tokens with a group of k mask tokens after the last token and after each
draft token, eqs. (5)-(7). The group after the last accepted token gives the next k draft tokens.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.module import Adapter
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.verify import sample
from hf_spec.drafting.markov_head import MarkovHead
from hf_spec.drafting.options import ADAPTIVE, AUTO, CHAIN, DraftOptions, samples_drafts
from hf_spec.drafting.predictions import distribution
from hf_spec.drafting.probe_drafter import ProbeDrafter
from hf_spec.drafting.state import DecodeState
from hf_spec.methods.space.adapter import mask_tokens
from hf_spec.model.hidden_states import model_logits


@dataclass(frozen=True)
class SpaceOptions(DraftOptions):
    """Options of ``space`` (SPACE, section 3.2).

    Attributes:
        tree: ``chain``: one draft token for each mask token, as in the paper. All values in
            :class:`DraftOptions` are allowed, too. Only draft tokens of a chain can be sampled, so
            ``acceptance="rejection"`` uses a chain instead of an adaptive tree.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.acceptance != "rejection" or self.tree == CHAIN:
            return
        if self.tree != ADAPTIVE or self.num_draft_tokens != AUTO:
            raise ValueError(
                f"acceptance='rejection' with tree={self.tree!r}, whose draft tokens are not "
                "sampled. Use tree='chain', or acceptance='match', which is exact for them."
            )


class SpaceDrafter(ProbeDrafter):
    """Trees of the mask tokens' predictions, or chains of likeliest or sampled tokens."""

    markov_head: MarkovHead | None

    can_sample = True
    options: SpaceOptions

    def __init__(self, model: Any, options: SpaceOptions, adapter: Adapter):
        if options.acceptance == "rejection":
            options = replace(options, tree=CHAIN)
        super().__init__(model, options, adapter, adapter.config.num_mask_tokens)
        inputs = mask_tokens(adapter)
        self.probe_inputs = replace(inputs, embeddings=inputs.embeddings[: self.distances])

    def start(self, state: DecodeState) -> None:
        super().start(state)
        if self._by_scores(state):
            self.outside = "the call's processors choose draft tokens"

    def _by_scores(self, state: DecodeState) -> bool:
        """Whether draft tokens are chosen by what the call's processors make of predictions."""
        samples = samples_drafts(self.options, state.do_sample)
        return self.options.tree == CHAIN and (samples or not state.process.trivial)

    def draft_tokens(
        self, state: DecodeState, trees: list[TokenTree], depth: int
    ) -> tuple[Tensor, Tensor | None]:
        """A token from each mask position (line 23), with its distribution q (line 24) if sampled.

        q is the whole distribution after the call's processors, which see the earlier draft tokens.
        """
        if not self._by_scores(state):
            return super().draft_tokens(state, trees, depth)
        samples = samples_drafts(self.options, state.do_sample)
        assert self.hidden is not None
        states = self.given_root(self.hidden[:, :depth], state.root)
        logits = model_logits(self.model, states)  # (batch, depth, vocab)
        tokens, distributions = [state.root.to(logits.device)], []
        for place in range(depth):
            own = logits[:, place]
            if self.markov_head is not None:
                own = own + self.markov_head.logits(tokens[-1], states[:, place]).to(own)
            drafted = torch.stack(tokens, 1)[:, 1:]
            q = distribution(state.process(own, drafted, state.active, drafting=True))
            tokens.append(sample(q).clamp(min=0) if samples else q.argmax(-1))
            distributions.append(q)
        columns = torch.stack([token.to(state.root.device) for token in tokens], dim=1)
        if not samples:
            return columns, None
        nothing = torch.zeros_like(distributions[0])  # of the root
        return columns, torch.stack([nothing, *distributions], dim=1)
