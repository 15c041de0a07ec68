"""Candidates from predictions of future tokens: what drafters with probes or heads share."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_spec.core.tree import TokenTree


def ranked_tokens(tree: TokenTree, root: Tensor, logits: Tensor) -> Tensor:
    """Tokens on the nodes: a node of rank r at depth d carries the r-th likeliest token there.

    Args:
        tree: the tree of all rows; no deeper than there are predictions.
        root: ``(batch,)`` the root's token.
        logits: ``(batch, depth, vocab)`` predictions for depth 1, 2, ...

    Returns:
        ``(batch, nodes)`` int64.
    """
    if len(tree) == 1:
        return root[:, None]
    width = max(tree.ranks[1:]) + 1
    best = logits[:, : tree.max_depth].topk(width, dim=-1).indices.flatten(1)
    places = [(depth - 1) * width + rank for depth, rank in zip(tree.depths[1:], tree.ranks[1:])]
    chosen = best[:, torch.tensor(places, device=best.device)]
    return torch.cat([root[:, None], chosen.to(root.device)], dim=1)
