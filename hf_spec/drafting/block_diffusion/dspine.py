"""DSpine's head: slots of a causal block pass on what they would draft, layer by layer.

"DSpine" (Tencent), as SpecForge trains it. Every token has a fixed *code* of length sqrt(rank), its
row of the output embeddings in a few directions. After each layer, a slot's feature f is its state
h in the space of the codes, and it gets a message of the slot before, p being that slot's feature,
or the code of the root::

    f = sqrt(rank) * unit(R_i h)
    h += rms(h) * W_i (sigmoid(G f + P p + b) * M p)

Where tokens are drafted, the last layer's message is written once more, with the code of the
drafted token as p, and among the slot's likeliest tokens the logits of that state count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.drafting.block_diffusion.head import BlockHead, Shapes, look_up, products
from hf_spec.drafting.draft_vocabulary import DraftVocabulary, drafted_logits
from hf_spec.drafting.made_once import is_plain
from hf_spec.drafting.markov_head import Remembered
from hf_spec.model.hidden_states import shapes_logits
from hf_spec.modeling_patches.weights import is_updated, output_bias, output_weight
from hf_spec.threads import cached_property

#: Name of the codes, one for each token.
CODES = "transfer_codes"
_MESSAGE, _OF_RECEIVER, _OF_SENDER = (
    f"injection.{name}.weight" for name in ("message", "receiver_gate", "predecessor_gate")
)
_BIAS = "injection.bias"


class DSpine(BlockHead):
    """Codes ``(known, rank)``; for each layer R ``(rank, hidden)``, ``injection.readouts.i``, and W
    ``(hidden, width)``, ``injection.writes.i``; of all, M, G and P ``(width, rank)`` and b."""

    held = ("vocabulary",)
    buffers = (CODES,)
    causal = chooses = True
    plain_share = 1.0

    def __init__(self, network: Any):
        super().__init__(network)
        self.vocabulary = DraftVocabulary.of(self.weights, network.model)

    @classmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        shape = config.markov_width, config.markov_rank
        return {_BIAS: shape[:1], **dict.fromkeys((_MESSAGE, _OF_RECEIVER, _OF_SENDER), shape)}

    @classmethod
    def fresh(cls, config: Any, known: int, model: Any) -> dict[str, Tensor]:
        hidden, width, rank = config.hidden_size, config.markov_width, config.markov_rank
        loads = config.inference_mode or torch.empty(0).is_meta  # its codes come from a file
        codes, directions = codes_of(None if loads else output_weight(model), known, hidden, rank)
        made = {CODES: codes, **super().fresh(config, known, model)}
        for index in range(config.num_layers):
            made[_readout(index)] = directions.clone()
            made[_write(index)] = torch.zeros(hidden, width)
        return made

    def after_layer(self, index: int, hidden: Tensor, anchors: Tensor) -> Tensor:
        root = self._code(anchors)[:, :, None]
        features = self._feature(hidden[:, :, 1:], index)
        before = torch.cat([root, features[:, :, :-1]], 2)
        changed = self._written(hidden[:, :, 1:], features, before, index)
        return torch.cat([hidden[:, :, :1], changed], 2)

    def read(self, states: Tensor, last: Tensor, ahead: Tensor | None) -> Tensor:
        """With the states before the last message."""
        return torch.cat([states, last], -1)

    def given(
        self, logits: Tensor, previous: Tensor, states: Tensor, memory: Tensor | None = None,
        among: Tensor | None = None,
    ) -> Remembered:  # fmt: skip
        states, _ = self.features(previous, states, memory)
        if among is None:
            return self._all_logits(states).to(logits), None
        if self._shapes_logits:
            found = self._all_logits(states).gather(-1, among.expand(*states.shape[:-1], -1))
        else:
            weight = self._output_weight()
            assert weight is not None
            found = products(states.to(weight), weight, among)
        return found.to(logits).masked_fill(logits == -torch.inf, -torch.inf), None

    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        """States with the drafted tokens' message."""
        last = states[..., states.shape[-1] // 2 :].to(self.weights[_MESSAGE])
        index = self.config.num_layers - 1
        written = self._written(last, self._feature(last, index), self._code(previous), index)
        return self.network.adapter.norm(written), None

    def _all_logits(self, states: Tensor) -> Tensor:
        flat, predict = states.flatten(0, -2)[None], self.network.logits
        logits = drafted_logits(self.vocabulary, lambda head: predict(flat, head))
        return logits.view(*states.shape[:-1], -1)

    def _output_weight(self) -> Tensor | None:
        """``(tokens, hidden)`` output embeddings of the drafted tokens."""
        if self.vocabulary is not None:
            return self.vocabulary.weight
        return output_weight(self.network.model)

    @cached_property
    def _shapes_logits(self) -> bool:
        """Whether logits are more than products of states and output embeddings."""
        model, weight = self.network.model, self._output_weight()
        updated = self.vocabulary is None and is_updated(model.get_output_embeddings())
        shaped = self.config.shapes_logits or shapes_logits(model)
        return updated or shaped or not is_plain(weight) or output_bias(model) is not None

    def _code(self, tokens: Tensor) -> Tensor:
        found = look_up(self.weights[CODES], tokens)
        return (found.shape[-1] ** 0.5 * found).to(self.weights[_MESSAGE])

    def _feature(self, hidden: Tensor, index: int) -> Tensor:
        found = functional.linear(hidden, self.weights[_readout(index)])
        return found.shape[-1] ** 0.5 * functional.normalize(found, dim=-1)

    def _written(self, hidden: Tensor, features: Tensor, before: Tensor, index: int) -> Tensor:
        """States with a message: all ``(..., features)``, broadcast."""
        of_receiver = functional.linear(features, self.weights[_OF_RECEIVER], self.weights[_BIAS])
        gate = of_receiver + functional.linear(before, self.weights[_OF_SENDER])
        message = gate.sigmoid() * functional.linear(before, self.weights[_MESSAGE])
        size = hidden.pow(2).mean(-1, keepdim=True).sqrt()
        return hidden + size * functional.linear(message, self.weights[_write(index)])


def _readout(index: int) -> str:
    return f"injection.readouts.{index}.weight"


def _write(index: int) -> str:
    return f"injection.writes.{index}.weight"


@torch.no_grad()
def codes_of(rows: Tensor | None, known: int, hidden: int, rank: int) -> tuple[Tensor, Tensor]:
    """Codes ``(known, rank)`` of tokens and the directions ``(rank, hidden)`` that they are read
    in: unit rows of the output embeddings, centered, in their widest directions, whitened, of
    length 1. Random ones where there are no rows, or quantized ones."""
    if rows is None or rows.is_meta or not rows.is_floating_point() or len(rows) < known:
        codes, directions = torch.randn(known, rank), torch.randn(rank, hidden) / hidden**0.5
        return functional.normalize(codes, dim=-1), directions
    rows = functional.normalize(rows[:known].float(), dim=-1)
    rows = rows - rows.mean(0)
    values, vectors = torch.linalg.eigh(rows.T @ rows)
    values, vectors = values[-rank:].clamp(min=1e-12), vectors[:, -rank:]
    return functional.normalize(rows @ vectors / values.sqrt(), dim=-1), vectors.T
