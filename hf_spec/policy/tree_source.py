"""Resolves the option ``tree``: trees that are given, tuned, or chosen while decoding."""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.core.memory import recall
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree_states import TreeStates
from hf_spec.drafting.options import ADAPTIVE, AUTO, ONLINE, TUNED, TreeOptions, is_dynamic
from hf_spec.drafting.state import DecodeState
from hf_spec.drafting.tree_drafter import TreeSource
from hf_spec.policy.adaptive_trees import AdaptiveTrees
from hf_spec.policy.calibration import Calibration
from hf_spec.policy.online_trees import HitRates, OnlineTrees
from hf_spec.policy.tempering import Tempering
from hf_spec.policy.tuned_trees import TREE_FILE, Device, TunedTrees, measurements, read_trees

#: Placeholder for tuned trees until the call's first step.
ROOT_ONLY = TreeStates.uniform(TokenTree.chain(0), 0)


class TunedSource(TreeSource):
    """Tuned trees: those of the nearest device, batch size and context length.

    Args:
        model: the model that decodes.
        trees: the trees of all devices.
    """

    def __init__(self, model: Any, trees: TunedTrees):
        super().__init__(ROOT_ONLY)  # until the call's first step
        self._model, self.trees = model, trees

    @property
    def max_depth(self) -> int:
        return self.trees.max_probes

    def start(self, state: DecodeState) -> None:
        context = max(state.cache.host_lengths)
        self._states = self.trees.select(Device.of(self._model), state.batch_size, context)


def tree_source(
    options: TreeOptions, model: Any, adapter: ActiveAdapter, distances: int, probes: int = 0
) -> TreeSource:
    """The tree source that the option ``tree`` names.

    Args:
        options: the strategy's options.
        model: the model that decodes.
        adapter: the adapter that drafts; tuned trees are stored beside its weights.
        distances: number of future tokens that it predicts.
        probes: probes per distance under a node; 0 if predictions take no step tokens.

    Raises:
        ValueError: if trees are deeper than the adapter predicts or have a rank beyond the
            vocabulary, or if there are no tuned trees or they cannot be read.
    """
    if options.tree in (ADAPTIVE, ONLINE):
        depth = options.depth(distances)
        key = adapter.config.type_name, adapter.name, depth
        if options.tree == ONLINE:
            hits = recall(model, (HitRates, key), lambda: _hits(model, adapter, depth))
            return OnlineTrees(depth, bool(probes), hits)
        if options.candidates != AUTO:
            exactly: Any = options.candidates
            return AdaptiveTrees(depth, bool(probes), exactly)
        calibrations = recall(
            model, (Calibration, key), lambda: (Calibration(depth), Calibration(depth))
        )
        tempering = recall(model, (Tempering, key), Tempering)
        return AdaptiveTrees(depth, bool(probes), calibrations=calibrations, tempering=tempering)
    if options.tree == TUNED:
        path = adapter.file_beside(TREE_FILE)
        if path is None:
            raise ValueError(
                f"tree='tuned': there is no {TREE_FILE} where the adapter {adapter.name!r} was "
                "loaded from. Run hf-spec tune on its folder and load it again, or name another "
                "tree."
            )
        trees = read_trees(path)
        _check(trees, TREE_FILE, model, distances)
        return TunedSource(model, trees)
    if is_dynamic(options.tree):
        states = TreeStates.from_json(options.tree)
    else:
        depth = options.depth(distances)
        tree = options.make_tree(distances)
        states = (TreeStates.uniform if probes else TreeStates.bare)(tree, depth)
    _check(states, "tree", model, distances)
    return TreeSource(states)


def _hits(model: Any, adapter: ActiveAdapter, depth: int) -> HitRates:
    """Hit rates measured for the adapter, or a guess."""
    found = measurements(adapter, Device.of(model), 1, 0)
    if found is None:
        return HitRates(depth)
    return HitRates.measured(np.array(found.accuracies), depth)


def _check(trees: TreeStates | TunedTrees, where: str, model: Any, distances: int) -> None:
    """Raise ValueError if the trees are too deep for the adapter or their ranks too large."""
    if trees.max_probes > distances:
        raise ValueError(
            f"{where} has states up to {trees.max_probes} predicted tokens, the adapter drafts "
            f"{distances} tokens: run hf-spec tune again, or give another tree."
        )
    vocab = model.config.get_text_config(decoder=True).vocab_size
    if trees.max_rank >= vocab:
        raise ValueError(
            f"{where} has a candidate of rank {trees.max_rank}: ranks count from 0, and the model "
            f"has {vocab} tokens. Give another tree, or run hf-spec tune."
        )
