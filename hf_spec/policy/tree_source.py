"""Resolves the option ``tree``: static trees, or trees grown while decoding."""

from __future__ import annotations

from typing import Any

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.core.memory import recall
from hf_spec.core.tree_states import TreeStates
from hf_spec.drafting.options import ADAPTIVE, AUTO, TreeOptions
from hf_spec.drafting.tree_drafter import TreeSource
from hf_spec.policy.adaptive_trees import AdaptiveTrees
from hf_spec.policy.calibration import Calibration
from hf_spec.policy.saved import saved_for
from hf_spec.policy.tempering import Tempering


def tree_source(
    options: TreeOptions, model: Any, adapter: ActiveAdapter, distances: int, probes: int = 0
) -> TreeSource:
    """The tree source that the option ``tree`` names, if it is no tree of the method's own.

    Args:
        options: the strategy's options.
        model: the model that decodes.
        adapter: the adapter that drafts.
        distances: number of future tokens that it predicts.
        probes: probes per distance under a node; 0 if predictions take no step tokens.

    Raises:
        ValueError: if trees are deeper than the adapter predicts or have a rank beyond the
            vocabulary, or if what ``hf-spec tune`` has saved cannot be read.
    """
    depth = options.depth(distances)
    if options.tree != ADAPTIVE:
        states = (TreeStates.uniform if probes else TreeStates.bare)(
            options.make_tree(distances), depth
        )
        check_states(states, "tree", model, distances)
        return TreeSource(states)
    if options.num_draft_tokens != AUTO:
        exactly: Any = options.num_draft_tokens
        return AdaptiveTrees(depth, bool(probes), exactly)

    def calibrations() -> tuple[Calibration, Calibration]:
        saved = saved_for(adapter, model, options)
        greedy = Calibration(depth) if saved is None else saved.calibration(depth)
        return greedy, Calibration(depth)

    key = adapter.config.type_name, adapter.name, depth
    return AdaptiveTrees(
        depth, bool(probes), calibrations=recall(model, (Calibration, key), calibrations),
        tempering=recall(model, (Tempering, key), Tempering),
    )  # fmt: skip


def check_states(states: TreeStates, where: str, model: Any, distances: int) -> None:
    """Raise a ValueError if trees are too deep for the adapter or their ranks too large.

    Args:
        states: the trees.
        where: what names them, for the message.
        model: the model that decodes.
        distances: number of future tokens that the adapter predicts.
    """
    if states.max_probes > distances:
        raise ValueError(
            f"{where} has states up to {states.max_probes} predicted tokens, the adapter drafts "
            f"{distances} tokens: run hf-spec tune again, or give another tree."
        )
    vocab = model.config.get_text_config(decoder=True).vocab_size
    if states.max_rank >= vocab:
        raise ValueError(
            f"{where} has a candidate of rank {states.max_rank}: ranks count from 0, and the model "
            f"has {vocab} tokens. Give another tree, or run hf-spec tune."
        )
