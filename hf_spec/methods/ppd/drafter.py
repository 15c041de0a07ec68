"""Drafts with prompt tokens in the verifying forward: PPD, sections 4.5 and 5.4.

The tree's nodes have prompt tokens. Those under the last accepted node predict the tokens after the
next one, which are the candidates of the next step. Their number is the sequence's state, and each
state may have its own tree.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_spec.adapters.active import require_active
from hf_spec.drafting.probe_drafter import ProbeDrafter
from hf_spec.methods.ppd.dynamic_tree import DYNAMIC, dynamic_source
from hf_spec.methods.ppd.options import PPDOptions
from hf_spec.methods.ppd.probes import PromptTokens
from hf_spec.policy.tree_source import tree_source


class PPDDrafter(ProbeDrafter):
    """Static or dynamic trees of the prompt tokens' likeliest tokens."""

    options: PPDOptions

    def __init__(self, model: Any, options: PPDOptions):
        adapter = require_active(model, "PPD", "ppd")
        config: Any = adapter.config
        if options.tree == DYNAMIC:
            source = dynamic_source(model, adapter)
        else:
            source = tree_source(options, model, adapter, config.num_prompt_tokens, config.num_ept)
        self.prompts = PromptTokens(adapter, source.max_depth)
        super().__init__(
            model, options, self.prompts.inputs, source, adapter.weights(), self.prompts.group
        )

    def distance_states(self, hidden: Tensor) -> Tensor:
        return self.prompts.states(hidden)

    def logits(self, states: Tensor) -> Tensor:
        return self.prompts.logits(self.model, states, self.exact, self.vocabulary)
