"""A PPD adapter's parameters as inputs of a forward, and the predictions of its prompt tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.predicting import of_tokens
from hf_spec.core.probes import ProbeGroup
from hf_spec.model.hidden_states import Head, model_logits, output_logits
from hf_spec.model.probe_inputs import ProbeInputs


@lru_cache(maxsize=64)
def ept_group(distances: int, num_ept: int, mask: str) -> ProbeGroup:
    """EPTs of all prompt tokens, those of distance 1 first (section 4.4.3, figures 4.6 to 4.8).

    Args:
        distances: number of prompt tokens.
        num_ept: EPTs per prompt token.
        mask: ``ensemble``, ``decoder`` or ``encoder``.
    """
    places = [(distance, number) for distance in range(distances) for number in range(num_ept)]
    sees = {
        "ensemble": lambda q, k: k[1] == q[1] and k[0] <= q[0],
        "decoder": lambda q, k: k <= q,
        "encoder": lambda q, k: k[0] <= q[0],
    }[mask]
    visible = tuple(tuple(sees(query, key) for key in places) for query in places)
    return ProbeGroup(tuple(distance + 1 for distance, _ in places), visible)


class PromptTokens:
    """Applies an adapter's parameters; gradients flow to them.

    Args:
        adapter: the active adapter.
        distances: number of prompt tokens to use; None for all.

    Attributes:
        group: the EPTs under a node.
        inputs: their inputs of a forward.
    """

    def __init__(self, adapter: ActiveAdapter, distances: int | None = None):
        self.config: Any = adapter.config
        self.weights: Mapping[str, Tensor] = adapter.weights()
        self.distances: int = distances or self.config.num_prompt_tokens
        self.group = ept_group(self.distances, self.config.num_ept, self.config.ept_mask)
        prefix = self.config.num_prefix_tokens
        front, seen = [], None
        if prefix:
            slots = self.distances * prefix
            keys, values = self.weights["prefix_keys"], self.weights["prefix_values"]
            front = list(zip(keys[:, :, :slots].unbind(0), values[:, :, :slots].unbind(0)))
            # Figure 4.4: prompt token i attends to the prefix tokens i only.
            own = torch.eye(self.distances, dtype=torch.bool, device=keys.device)
            seen = own.repeat_interleave(self.config.num_ept, 0).repeat_interleave(prefix, 1)
        embeddings = self.weights["prompts"][: len(self.group)]
        self.inputs = ProbeInputs(embeddings, front, seen, self.config.num_exits)

    def states(self, hidden: Tensor) -> Tensor:
        """Combine EPTs into the states that predict, one per prompt token.

        EPTs are combined before the output embeddings, which are linear: this equals the weighted
        sum of logits of section 4.4.4, except that a bias of the output embeddings counts once.

        Args:
            hidden: ``(batch, n * EPTs, hidden)`` final hidden states of the probes under n nodes,
                with all EPTs of each distance.

        Returns:
            ``(batch, n * distances, hidden)``.
        """
        config, weights = self.config, self.weights
        if config.num_ept > 1:
            each = hidden.unflatten(1, (-1, config.num_ept))
            if config.ept_aggregation == "average":
                hidden = each.mean(2)
            else:
                count = each.shape[1]
                share = weights["weights"][: self.distances].to(hidden)
                share = share.repeat(-(-count // self.distances), 1)[:count]
                hidden = (each * share[:, :, None]).sum(2)
        if config.head == "residual":
            names = ("head",) if config.head_rank is None else ("head_down", "head_up")
            inner = hidden
            for name in names:
                inner = torch.nn.functional.linear(inner, weights[name].to(hidden))
            hidden = hidden + torch.nn.functional.silu(inner + weights["head_bias"].to(hidden))
        return hidden

    def logits(
        self, model: Any, states: Tensor, exact: bool = True,
        head: Head | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits that the prompt tokens predict, ``(batch, n, tokens)``.

        Args:
            model: the base model.
            states: ``(batch, n, hidden)`` from :meth:`states`.
            exact: whether to apply the model's scaling and soft cap; False may skip operations that
                keep the order of logits.
            head: replaces the base's output embeddings.
        """
        if self.config.head == "vocabulary":  # added to logits, so their scale matters
            own = states @ self.weights["head"].to(states).T
            return model_logits(model, states) + of_tokens(model, own, 0.0)
        if exact:
            return model_logits(model, states, head=head)
        return output_logits(model, states, head)
