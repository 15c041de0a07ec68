"""Heads on the final hidden state, one per future token, shared by all methods with heads.

Head k reads the hidden state that gives the model's next token, and predicts the token k positions
after that one (Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple
Decoding Heads", 2024, section 2.1.1): residual blocks, x + SiLU(W x + b), then a projection to the
vocabulary. Initially W = 0 and b = 0, so that every head starts as the LM head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_spec.adapters.config import ObjectiveConfig, PredictingConfig, of_tokens
from hf_spec.adapters.layer import Adapter
from hf_spec.core.checks import MAX_BLOCKS, MAX_FUTURE, choice, count, setting
from hf_spec.core.shapes import TokenTree
from hf_spec.draft.options import CHAIN
from hf_spec.modeling_patches.weights import (
    output_bias,
    output_dtype,
    output_features,
    output_weight,
    placement,
)
from hf_spec.predict.table import AT_ONCE, TablePredictor, chain_tree
from hf_spec.target.hidden_states import Reads
from hf_spec.target.sequences import token_hidden

#: Names of the parameters: blocks' weights and biases, and the projections of heads with own ones.
WEIGHTS, BIASES, PROJECTION = HEAD_WEIGHTS = "weights", "biases", "projections"


@dataclass
class HeadsConfig(ObjectiveConfig, PredictingConfig):
    """Config of an adapter with heads.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    num_heads: int = setting(4, "Heads, each drafting one future token.", count(1, MAX_FUTURE))
    num_layers: int = setting(1, "Residual blocks of each head.", count(1, MAX_BLOCKS))
    projection: str = setting(
        "shared",
        "shared: heads use the model's output embeddings. own: each head trains a copy of them, "
        "num_heads * vocabulary * hidden parameters.",
        choice("shared", "own"),
    )
    loss: str = "hard"
    decay: float | None = 0.8

    @property
    def reads_head(self) -> bool:
        return self.projection == "shared"

    def check_base(self, model: nn.Module) -> None:
        """Raise ValueError if `model` has no output embeddings that the heads can start from."""
        super().check_base(model)
        output_features(model)
        quantized = output_dtype(model) is None
        if self.projection == "own" and not self.inference_mode and quantized:
            raise ValueError(
                "projection='own' starts from the output embeddings, which are quantized here: "
                "choose projection='shared', or load the model without quantization."
            )


class HeadsAdapter(Adapter):
    """``weights`` (heads, layers, hidden, hidden) and ``biases`` (heads, layers, hidden) of the
    blocks; with own projections ``projections`` (heads, vocab, hidden)."""

    def __init__(self, config: HeadsConfig, model: Any) -> None:
        super().__init__(config, model)
        hidden, _ = output_features(model)
        heads, layers = config.num_heads, config.num_layers
        tensors = {
            WEIGHTS: torch.zeros(heads, layers, hidden, hidden),
            BIASES: torch.zeros(heads, layers, hidden),
        }
        if config.projection == "own":
            if config.inference_mode:  # the weights are loaded later
                tensors[PROJECTION] = torch.zeros(heads, config.known_tokens(model), hidden)
            else:
                weight = output_weight(model)
                assert weight is not None
                rows = weight.detach()[: config.known_tokens(model)]
                tensors[PROJECTION] = rows.expand(heads, -1, -1)
        self.hold({**tensors, **config.fresh_shared(model, heads)})


def head_states(weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    """Apply the heads' blocks to final hidden states.

    Args:
        weights: the adapter's parameters; leave out heads by slicing them.
        hidden: ``(..., hidden)``.

    Returns:
        ``(..., heads, hidden)`` in the parameters' dtype, on their device.
    """
    blocks, biases = weights[WEIGHTS], weights[BIASES]
    states = hidden.to(blocks).reshape(-1, hidden.shape[-1]).expand(len(blocks), -1, -1)
    for layer in range(blocks.shape[1]):  # of all heads at once
        made = torch.baddbmm(biases[:, layer, None], states, blocks[:, layer].mT)
        states = states + functional.silu(made)
    return states.unflatten(1, hidden.shape[:-1]).movedim(0, -2)


def projected(model: Any, projections: Tensor, states: Tensor) -> Tensor:
    """Own projections of ``states`` (..., heads, hidden), with the model's bias if it has one.

    Tokens that the model has gained since get the lowest logits, and lost ones none.
    """
    # Some models' final states are in float32 (Falcon-Mamba).
    each = zip(states.to(projections).unbind(-2), projections)
    logits = torch.stack([functional.linear(x, weight, None) for x, weight in each], dim=-2)
    logits = of_tokens(model, logits, torch.finfo(logits.dtype).min)
    bias = output_bias(model)
    return logits if bias is None else logits + bias.to(logits)


#: ``tree="sparse"``: rank paths, the likeliest first. On held-out answers of a 22M model they are
#: worth 0.3 % less than the 15 best nodes there (docs/methods/medusa.md).
SPARSE: tuple[tuple[int, ...], ...] = (
    (0,), (0, 0), (1,), (0, 0, 0), (2,), (0, 1), (1, 0), (0, 0, 1), (0, 0, 0, 0), (3,), (0, 2),
    (2, 0), (1, 0, 0), (0, 1, 0), (4,),
)  # fmt: skip


def sparse_tree(_: Any, depth: int) -> TokenTree:
    """15 draft tokens, most of them under likely ones."""
    return TokenTree.from_paths(SPARSE).truncate(depth)


class HeadPredictor(TablePredictor):
    """Draft tokens are the heads' likeliest tokens; a step forwards only the tree.

    All heads predict in every step, so the tree is always that of the last state.

    Heads for distances that are not drafted are not used.

    Args:
        adapter: of a :class:`HeadsConfig`.
    """

    trees = {"sparse": sparse_tree, CHAIN: chain_tree}
    reads = Reads("last")
    held = (*TablePredictor.held, "weights")

    def __init__(self, model: Any, options: Any, adapter: Adapter):
        super().__init__(model, options, adapter, adapter.config.num_heads)
        dtype = placement(model).dtype  # of hidden states
        self.weights = {
            name: weight[: self.depth].detach().to(dtype)
            for name, weight in adapter.tensors().items()
            if name in HEAD_WEIGHTS
        }

    def states(self, hidden: Tensor, depth: int) -> Tensor:
        used = {name: tensor[:depth] for name, tensor in self.weights.items()}
        return head_states(used, hidden).to(hidden)

    def logits(self, states: Tensor) -> Tensor:
        if PROJECTION in self.weights:
            return projected(self.model, self.weights[PROJECTION], states)
        return super().logits(states)

    def future_states(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        hidden = token_hidden(self.model, input_ids)[0]
        for some in places.to(hidden.device).split(max(AT_ONCE // self.depth, 1)):
            yield self.states(hidden[some], self.depth)
