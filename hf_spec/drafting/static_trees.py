"""Static trees: those that the option ``tree`` names, and whether they fit an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_spec.adapters.module import Adapter
from hf_spec.adapters.predicting import VOCABULARY
from hf_spec.core.checks import check_count
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree_states import TreeStates
from hf_spec.drafting.drafter import MakeTree
from hf_spec.drafting.options import DraftOptions


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


def check_states(
    states: TreeStates, where: str, model: Any, adapter: Adapter, distances: int
) -> None:
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
    drafted = adapter.tensors().get(VOCABULARY)
    whose, tokens = "adapter predicts", 0 if drafted is None else len(drafted)
    if drafted is None:
        whose, tokens = "model has", model.config.get_text_config(decoder=True).vocab_size
    if states.max_rank >= tokens:
        raise ValueError(
            f"{where} has a draft token of rank {states.max_rank}: ranks count from 0, and the "
            f"{whose} {tokens} tokens. Give another tree."
        )
