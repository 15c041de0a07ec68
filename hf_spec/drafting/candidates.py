"""Candidates from predictions of future tokens: what drafters with probes or heads share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hf_spec.core.tree import TokenTree


def ranked_tokens(trees: Sequence[TokenTree], root: Tensor, logits: Tensor) -> Tensor:
    """Tokens on the nodes: a node of rank r at depth d carries the r-th likeliest token there.

    Args:
        trees: the tree of each row; no deeper than there are predictions.
        root: ``(batch,)`` the root's token.
        logits: ``(batch, depth, vocab)`` predictions for depth 1, 2, ...

    Returns:
        ``(batch, nodes)`` int64; any tokens on the padding of smaller trees.
    """
    width = max(max(tree.ranks) for tree in trees) + 1
    if max(map(len, trees)) == 1:
        return root[:, None]
    return tokens_at(trees, root, logits.topk(width, dim=-1).indices)


def distribution(scores: Tensor) -> Tensor:
    """Softmax of a draft's scores ``(..., vocab)``, to be sampled from.

    All tokens alike where numbers have overflown on the way: a draft may come from any.
    """
    return scores.softmax(-1).nan_to_num(1 / scores.shape[-1])


def tokens_at(trees: Sequence[TokenTree], root: Tensor, best: Tensor) -> Tensor:
    """The same, from the likeliest tokens.

    Args:
        trees, root: as above.
        best: ``(batch, depth, width)`` ids for depth 1, 2, ..., the likeliest first; wider than the
            trees' largest rank.
    """
    if max(map(len, trees)) == 1:
        return root[:, None]
    places = _places(tuple(trees), best.shape[-1], str(best.device))
    chosen = best.flatten(1).gather(1, places)
    return torch.cat([root[:, None], chosen.to(root.device)], dim=1)


@lru_cache(maxsize=1024)
def _places(trees: tuple[TokenTree, ...], width: int, device: str) -> Tensor:
    """Where the token of each candidate stands among ``width`` tokens per depth: (batch, nodes)."""
    most = max(map(len, trees)) - 1
    rows = []
    for tree in trees:
        row = [(d - 1) * width + r for d, r in zip(tree.depths[1:], tree.ranks[1:])]
        rows.append(row + [0] * (most - len(row)))
    return torch.tensor(rows, device=device)
