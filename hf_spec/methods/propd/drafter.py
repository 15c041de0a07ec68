"""Draft with a tree whose unlikely nodes end behind the first layers: ProPD, section 4."""

from __future__ import annotations

import dataclasses
from typing import Any

from hf_spec.methods.base import DecodingState, Draft, Drafter
from hf_spec.methods.head_drafter import HeadDrafter
from hf_spec.methods.heads import BIASES, PROJECTION, WEIGHTS
from hf_spec.methods.peft_bridge import require_active
from hf_spec.methods.propd.early_head import EarlyPruning
from hf_spec.methods.propd.options import HEADS, ProPDOptions
from hf_spec.methods.wrapped_drafter import WrappedDrafter


class ProPDDrafter(WrappedDrafter):
    """The heads' trees, or another strategy's, with early pruning.

    Candidates count as given, not as sampled: which of them are left depends on their tokens.
    """

    def __init__(self, model: Any, options: ProPDOptions):
        adapter = require_active(model, "PROPD", "propd")
        weights, config = adapter.weights(), adapter.config
        inner: Drafter
        if options.drafter == HEADS:
            names = (WEIGHTS, BIASES, PROJECTION)
            heads = {name: weights[name] for name in names if name in weights}
            inner = HeadDrafter(model, options, heads, options.make_tree(len(heads[WEIGHTS])))
        else:
            method = options.drafting_method()
            inner = method.drafter(model, method.parse_options(options.drafter_kwargs))
        super().__init__(inner)
        self.options = options
        if options.prune:
            self._check_exits(config.prune_layer)
            self.pruning = EarlyPruning(
                model, weights, config.prune_layer, config.prune_top_k, options
            )

    def _check_exits(self, layer: int) -> None:
        """Raise ValueError where prompt tokens leave the model before candidates are pruned."""
        exits = 1 if self.probe_inputs is None else self.probe_inputs.exits
        layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        if layers - exits < layer:
            raise ValueError(
                f"the drafter's adapter averages the last {exits} of {layers} layers, and "
                f"candidates are pruned behind layer {layer}: give prune=False, or train an early "
                "head for fewer layers."
            )

    def propose(self, state: DecodingState) -> Draft:
        draft = self.inner.propose(state)
        return dataclasses.replace(draft, distributions=None) if self.options.prune else draft
