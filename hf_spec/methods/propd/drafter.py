"""Draft with a tree whose unlikely nodes end behind the first layers: ProPD, section 4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hf_spec.adapters.active import require_active
from hf_spec.drafting.drafter import DecodingState, Draft, Drafter
from hf_spec.drafting.head_drafter import HeadDrafter
from hf_spec.drafting.heads import WEIGHTS
from hf_spec.drafting.wrapped_drafter import WrappedDrafter
from hf_spec.methods.propd.early_head import EarlyPruning
from hf_spec.methods.propd.options import HEADS, ProPDOptions
from hf_spec.policy.memory import recall
from hf_spec.policy.switch import Switch
from hf_spec.policy.tree_source import tree_source


class ProPDDrafter(WrappedDrafter):
    """The heads' trees, or another strategy's, with early pruning.

    Candidates are given, never sampled: which of them are left depends on their tokens.
    """

    runs_modules: ClassVar[bool] = True

    def __init__(self, model: Any, options: ProPDOptions):
        adapter = require_active(model, "PROPD", "propd")
        weights, config = adapter.weights(), adapter.config
        inner: Drafter
        if options.drafter == HEADS:
            source = tree_source(options, model, adapter, len(weights[WEIGHTS]))
            inner = HeadDrafter(model, options, weights, source)
        else:
            method = options.drafting_method()
            inner = method.drafter(model, method.parse_options(options.drafter_kwargs))
        super().__init__(inner)
        self.options = options
        self._early: EarlyPruning | None = None
        self._prunes = False
        self._switch: Switch | None = None
        self._latest: Switch | None = None
        if options.prune:
            self._check_exits(config.prune_layer)
            self.prune_layer = config.prune_layer
            self._early = EarlyPruning(
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

    @property
    def pruning(self) -> EarlyPruning | None:
        return self._early if self._prunes else None

    def propose(self, state: DecodingState) -> Draft:
        draft = self.inner.propose(state)
        self._before = state.stats.step_seconds
        self._prunes = self._early is not None
        self._switch = None
        if self.options.prune == "auto" and draft.tree.num_nodes > 1:
            longest = max(state.cache.host_lengths)
            setting = (
                Switch, state.strategy, state.batch_size, longest.bit_length(),
                draft.num_rows.bit_length(),
            )  # fmt: skip
            self._switch = recall(self.model, setting, Switch)
            self._prunes = self._switch.prunes()
        return draft

    def observe(self, state: DecodingState, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        if self._switch is not None and draft.tree.num_nodes > 1:
            self._latest = self._switch
            live = [len(path) for path in nodes if path]
            seconds = state.stats.step_seconds - self._before
            tokens = sum(live) / max(len(live), 1)
            self._switch.observe(self._prunes, seconds, tokens)
        super().observe(state, draft, nodes)

    def details(self) -> dict[str, Any]:
        found = self.inner.details()
        if self._latest is not None:
            found = {**found, "pruning_pays": self._latest.pays}
        return found
