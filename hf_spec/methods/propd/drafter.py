"""Drafts with a tree whose unlikely nodes are pruned after the first layers: ProPD, section 4."""

from __future__ import annotations

from typing import Any, ClassVar

from hf_spec.adapters.active import ActiveAdapter, require_active
from hf_spec.drafting.drafter import Drafter
from hf_spec.drafting.head_drafter import HeadDrafter
from hf_spec.drafting.heads import WEIGHTS
from hf_spec.drafting.tree_drafter import TreeSource
from hf_spec.drafting.wrapped_drafter import WrappedDrafter
from hf_spec.methods.propd.early_head import EarlyPruning
from hf_spec.methods.propd.online_tree import ONLINE, HitRates, OnlineTrees
from hf_spec.methods.propd.options import HEADS, ProPDOptions
from hf_spec.policy.memory import recall
from hf_spec.policy.tree_source import tree_source


class ProPDDrafter(WrappedDrafter):
    """The trees of the heads, or of another strategy, with early pruning.

    Candidates are never sampled, as pruning depends on their tokens.
    """

    runs_modules: ClassVar[bool] = True

    def __init__(self, model: Any, options: ProPDOptions):
        adapter = require_active(model, "PROPD", "propd")
        weights, config = adapter.weights(), adapter.config
        inner: Drafter
        if options.drafter == HEADS:
            source = _source(options, model, adapter, len(weights[WEIGHTS]))
            inner = HeadDrafter(model, options, weights, source)
        else:
            method = options.drafting_method()
            inner = method.drafter(model, method.parse_options(options.drafter_kwargs))
        super().__init__(inner)
        self.options = options
        self._early: EarlyPruning | None = None
        if options.prune:
            self.prunes = None if options.prune == "auto" else True
            self._check_exits(config.prune_layer)
            self.prune_layer = config.prune_layer
            self._early = EarlyPruning(
                model, weights, config.prune_layer, config.prune_top_k, options
            )

    def _check_exits(self, layer: int) -> None:
        """Raise a ValueError if prompt tokens leave the model before candidates are pruned."""
        exits = 1 if self.probe_inputs is None else self.probe_inputs.exits
        layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        if layers - exits < layer:
            raise ValueError(
                f"the drafter's adapter averages the last {exits} of {layers} layers, and "
                f"candidates are pruned behind layer {layer}: give prune=False, or train an early "
                "head for fewer layers."
            )

    @property
    def pruning(self) -> EarlyPruning | None:
        return self._early


def _source(options: ProPDOptions, model: Any, adapter: ActiveAdapter, heads: int) -> TreeSource:
    if options.tree != ONLINE:
        return tree_source(options, model, adapter, heads)
    depth = options.depth(heads)
    return OnlineTrees(recall(model, (HitRates, adapter.name, depth), lambda: HitRates(depth)))
