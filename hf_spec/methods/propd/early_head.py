"""Early pruning of candidates by the early prediction head: ProPD, section 4.1.

The head maps hidden states after the first layers to final ones, for the model's own output
embeddings: ``gain * rms_norm(h + A h + b)``, the form of the tuned lens (Belrose et al., "Eliciting
Latent Predictions from Transformers with the Tuned Lens", 2023). On a 22M model, after layer 4, its
50 likeliest tokens contain the model's own at 82 % of positions; a residual block as in Medusa's
heads reaches 73 % (docs/methods/propd.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.core.pruning import connected
from hf_spec.core.tree import Tree
from hf_spec.methods.propd.options import ProPDOptions
from hf_spec.model.hidden_states import model_logits, states_at
from modeling_patches.weights import placement

#: Names of the head's parameters: A (hidden, hidden), b (hidden,) and gain (hidden,).
MATRIX, BIAS, GAIN = "early_matrix", "early_bias", "early_gain"
EPSILON = 1e-6


def early_states(weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    """Apply the early head to hidden states, ``(..., hidden)``, in its parameters' dtype."""
    hidden = hidden.to(weights[MATRIX])
    moved = hidden + functional.linear(hidden, weights[MATRIX], weights[BIAS])
    wide = moved.to(torch.promote_types(moved.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return wide.to(moved.dtype) * weights[GAIN]


class EarlyPruning:
    """Drops candidates that are unlikely by the early head, and their subtrees.

    Args:
        model: the base model.
        weights: the adapter's parameters.
        layer: number of layers before the head.
        top_k: the adapter's ``prune_top_k``; that of the options takes precedence.
        options: the strategy's options.
    """

    def __init__(
        self, model: Any, weights: Mapping[str, Tensor], layer: int, top_k: int,
        options: ProPDOptions,
    ):  # fmt: skip
        dtype = placement(model).dtype  # of hidden states
        names = (MATRIX, BIAS, GAIN)
        self.model = model
        self.weights = {name: weights[name].detach().to(dtype) for name in names}
        self.layer = layer
        self.top_k = options.prune_top_k or top_k

    def likely(self, hidden: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
        """See :class:`hf_spec.model.target.Pruning`."""
        inner, place = (part.to(hidden.device) for part in _inner(tree))
        tokens = tree.tokens.to(hidden.device)
        # Only nodes with children need predictions.
        states = early_states(self.weights, states_at(hidden, inner)).to(hidden)
        logits = model_logits(self.model, states).float()
        own = logits.flatten(1).gather(1, place * logits.shape[-1] + tokens)
        count = min(self.top_k, logits.shape[-1])
        least = logits.topk(count, dim=-1).values[..., -1].gather(1, place)
        log_p = own - logits.logsumexp(-1).gather(1, place)
        log_p[:, 0] = 0.0
        wanted, log_p = (own >= least).to(tree.valid.device), log_p.to(tree.valid.device)
        return connected(tree, wanted), (tree.ancestors * log_p[:, None, :]).sum(-1)


def _inner(tree: Tree) -> tuple[Tensor, Tensor]:
    """Nodes with children, ``(batch, inner)`` int64, padded with roots, and for each node the index
    of its parent among them, ``(batch, tokens)``, arbitrary for the root."""
    rows = [
        sorted({0, *parents[1 : size + 1]})
        for parents, size in zip(tree.parents.tolist(), tree.row_sizes)
    ]
    most = max(map(len, rows))
    inner = torch.tensor(
        [row + [0] * (most - len(row)) for row in rows], device=tree.parents.device
    )
    place = torch.zeros_like(tree.parents)
    order = torch.arange(most, device=inner.device).expand_as(inner)
    # Ascending, padding last: the padding must not overwrite the root's index, which is 0.
    real = torch.tensor([len(row) for row in rows], device=inner.device)[:, None] > order
    place.scatter_add_(1, inner, order * real)
    return inner, place.gather(1, tree.parents.clamp(min=0))
