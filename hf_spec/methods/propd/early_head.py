"""Early pruning of candidates by the early prediction head: ProPD, section 4.1.

The head maps hidden states after the first layers to final ones, for the model's own output
embeddings: ``gain * rms_norm(h + A h + b)``, the form of the tuned lens (Belrose et al., "Eliciting
Latent Predictions from Transformers with the Tuned Lens", 2023). On a 22M model, after layer 4, its
50 likeliest tokens contain the model's own at 82 % of positions; a residual block as in Medusa's
heads reaches 73 % (docs/methods/propd.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.core.pruning import connected
from hf_spec.core.tree import TreeBatch
from hf_spec.methods.propd.options import ProPDOptions
from hf_spec.model.hidden_states import model_logits, output_logits, states_at

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
        options: the strategy's options, with the criterion.
    """

    def __init__(
        self, model: Any, weights: Mapping[str, Tensor], layer: int, top_k: int,
        options: ProPDOptions,
    ):  # fmt: skip
        dtype = model.get_input_embeddings().weight.dtype  # of hidden states
        names = (MATRIX, BIAS, GAIN)
        self.model = model
        self.weights = {name: weights[name].detach().to(dtype) for name in names}
        self.layer = layer
        self.top_k = options.prune_top_k or top_k
        self.options = options

    def alive(self, hidden: Tensor, tokens: Tensor, tree: TreeBatch) -> Tensor:
        """See :class:`hf_spec.model.tree_forward.Pruning`."""
        inner, place = (part.to(hidden.device) for part in tree.inner)
        tokens = tokens.to(hidden.device)
        # Only nodes with children need predictions.
        states = early_states(self.weights, states_at(hidden, inner)).to(hidden)
        if self.options.prune_criterion == "top_k":
            return self._among_top(output_logits(self.model, states), tokens, place, tree)
        return self._probable(model_logits(self.model, states), tokens, place, tree)

    def _among_top(self, logits: Tensor, tokens: Tensor, place: Tensor, tree: TreeBatch) -> Tensor:
        """``(batch, nodes)`` bool by rank; only the order of ``logits`` matters."""
        count = min(self.top_k, logits.shape[-1])
        least = logits.topk(count, dim=-1).values[..., -1].gather(1, place)
        own = _of_tokens(logits, tokens, place)
        return connected(tree, (own >= least).to(tree.valid.device))

    def _probable(self, logits: Tensor, tokens: Tensor, place: Tensor, tree: TreeBatch) -> Tensor:
        """``(batch, nodes)`` bool by the marginal probability of each node's path."""
        options = self.options
        log_p = _of_tokens(logits.float().log_softmax(-1), tokens, place)
        log_p[:, 0] = 0.0
        log_p = log_p.to(tree.valid.device)
        path = (tree.ancestors * log_p[:, None, :]).sum(-1)
        wanted = path >= math.log(options.prune_probability)
        if options.prune_keep is not None and options.prune_keep < tree.num_nodes - 1:
            # No path is likelier than its prefixes; among equals, these come first.
            path = path.masked_fill(~tree.valid, -torch.inf)
            order = path.argsort(dim=-1, descending=True, stable=True)
            best = order[:, : options.prune_keep + 1]
            wanted &= torch.zeros_like(wanted).scatter_(1, best, True)
        return connected(tree, wanted)


def _of_tokens(values: Tensor, tokens: Tensor, place: Tensor) -> Tensor:
    """``(batch, nodes)`` for each node, its token's entry in the parent's ``values``.

    Args:
        values: ``(batch, inner, vocab)`` of the nodes with children.
        tokens: ``(batch, nodes)``
        place: ``(batch, nodes)`` index of each node's parent in ``values``.
    """
    return values.flatten(1).gather(1, place * values.shape[-1] + tokens)
