"""Resolves the option ``tree``: static trees, or trees grown while decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_spec.adapters.module import Adapter
from hf_spec.core.checks import check_count
from hf_spec.core.memory import recall
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree_states import TreeStates
from hf_spec.drafting.calibration import Calibration
from hf_spec.drafting.drafter import MakeTree
from hf_spec.drafting.options import ADAPTIVE, AUTO, DraftOptions


@dataclass(frozen=True)
class TreeSource:
    """What trees a drafter's steps have.

    Attributes:
        max_depth: largest number of distances that they use.
        states: static trees: that of each state, that is, for each number of predicted tokens; None
            for those that grow by the step's probabilities.
        num_draft_tokens: the option of this name, for trees that grow.
        calibrations: learned by earlier calls, greedy and sampled ones; None to use predictions
            uncorrected.
    """

    max_depth: int
    states: TreeStates | None = None
    num_draft_tokens: int | str = AUTO
    calibrations: tuple[Calibration, Calibration] | None = None


def tree_source(
    options: DraftOptions, trees: Mapping[str, MakeTree | None], model: Any,
    adapter: Adapter, distances: int, probes: int = 0,
) -> TreeSource:  # fmt: skip
    """The trees that the option ``tree`` names, unless the drafter makes them.

    Args:
        trees: see :class:`Drafter`.
        adapter: the adapter that drafts.
        distances: number of future tokens that it predicts.
        probes: probes per distance under a node; 0 if predictions take no step tokens.

    Raises:
        ValueError: if trees are deeper than the adapter predicts or have a rank beyond the
            vocabulary.
    """
    depth = drafted_depth(options, distances)
    if options.tree != ADAPTIVE:
        states = TreeStates.uniform(static_tree(options, trees, depth), depth, bool(probes))
        check_states(states, "tree", model, distances)
        return TreeSource(depth, states)
    if options.num_draft_tokens != AUTO:
        return TreeSource(depth, num_draft_tokens=options.num_draft_tokens)
    key = adapter.config.type_name, adapter.name, depth
    pair = recall(model, (Calibration, key), lambda: (Calibration(depth), Calibration(depth)))
    return TreeSource(depth, calibrations=pair)


def drafted_depth(options: DraftOptions, distances: int) -> int:
    """Number of distances that are drafted, of those that the adapter predicts; a ValueError if
    ``max_depth`` is larger."""
    if options.max_depth is not None:
        why = "The adapter predicts no more tokens."
        check_count("max_depth", options.max_depth, 1, distances, why)
    return options.max_depth or distances


def static_tree(
    options: DraftOptions, trees: Mapping[str, MakeTree | None], depth: int
) -> TokenTree:
    """The static tree of the options, over predictions of ``depth`` future tokens; a ValueError if
    the given paths are deeper."""
    if isinstance(options.tree, str):
        make = trees[options.tree]
        assert make is not None
        return make(options, depth)
    tree = TokenTree.from_paths(options.tree)
    if tree.max_depth > depth:
        raise ValueError(
            f"tree has paths of {tree.max_depth} ranks, {depth} future tokens are drafted: give "
            "shorter paths."
        )
    return tree


def check_states(states: TreeStates, where: str, model: Any, distances: int) -> None:
    """Raise a ValueError if trees are too deep for the adapter or their ranks too large.

    Args:
        where: what names the trees, for the message.
        distances: number of future tokens that the adapter predicts.
    """
    if states.max_probes > distances:
        raise ValueError(
            f"{where} has states up to {states.max_probes} predicted tokens, the adapter drafts "
            f"{distances} tokens. Give another tree."
        )
    vocab = model.config.get_text_config(decoder=True).vocab_size
    if states.max_rank >= vocab:
        raise ValueError(
            f"{where} has a draft token of rank {states.max_rank}: ranks count from 0, and the "
            f"model has {vocab} tokens. Give another tree."
        )
