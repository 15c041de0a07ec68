"""LiLiCorr's head: a small transformer over the likeliest tokens of all slots of a block.

"LiLiCorr: Lightweight Likelihood Correlation of Parallel Drafts for Speculative Decoding" (arXiv
2608.20530), as SGLang 0.5.23 runs it, whose names the tensors have. The k likeliest tokens of every
slot, its *candidates*, form a lattice. Candidate c of rank r in slot s, with log-probability l
among all tokens, begins as::

    x = T e(c) + H h_s + MLP(norm [l, exp l, l - l of rank 0, r / (k - 1), 1 if r = 0]) + S_s + R_r

e is the base's embedding, h_s the slot's state, and S and R are learned. A few layers of attention
among all candidates follow, whose scores get a bias for each head and distance of slots, and one
more within a slot. With the norm of x and a = norm(C c), from the context c of the last committed
token that has features::

    f = silu(F [x; a; x * a])
    in = unit(I f),  out = unit(O f),  and  out = unit(A a)  of the root

Candidate j after candidate i of the slot before scores scale * out_i . in_j. The authors draft the
best candidate of each slot, given that of the slot before. Trees need probabilities: here scores
share out, by softmax, what the block's own logits give to the candidates of a slot together. Other
tokens keep theirs. A candidate remains the likeliest token, so that a chain is the authors'.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.predict.block_heads import BlockHead, Shapes
from hf_spec.predict.markov import Remembered

#: Prefix of the names of its tensors.
PREFIX = "lilicorr."
#: Numbers that the MLP reads of a candidate.
FEATURES = 5
_DISTANCES = "relative_slot_bias"


class LiLiCorr(BlockHead):
    """The vectors in and out have ``markov_rank`` features, the lattice's states ``markov_width``;
    k is ``selector_top_k``. T is missing where the lattice is as wide as the drafter."""

    held = ("vocabulary",)
    of_masks: ClassVar[bool] = True
    reads_context: ClassVar[bool] = True
    by_rank: ClassVar[bool] = True
    plain_share = 1.0

    @classmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        hidden, rank, width = config.hidden_size, config.markov_rank, config.markov_width
        matrices = {
            "pass_hidden_proj": (width, hidden), "context_proj": (width, hidden),
            "feature_mlp.up_proj": (width, FEATURES), "feature_mlp.down_proj": (width, width),
            "factor_input_proj": (width, 3 * width), "in_head": (rank, width),
            "out_head": (rank, width), "anchor_out_head": (rank, width),
        }  # fmt: skip
        others: Shapes = {
            "feature_norm.weight": (FEATURES,), "feature_norm.bias": (FEATURES,),
            "output_norm.weight": (width,), "anchor_norm.weight": (width,),
            "slot_embedding": (1, 1, config.block_size - 1, 1, width),
            "rank_embedding": (1, 1, 1, config.selector_top_k, width),
            _DISTANCES: (config.lattice_heads, 2 * config.block_size - 1),
            "same_slot_bias": (config.lattice_heads,),
        }  # fmt: skip
        if width != hidden:
            matrices["token_proj"] = width, hidden
        for index in range(config.lattice_layers):
            layer, inner = f"layers.{index}.", int(width * config.lattice_mlp_ratio)
            matrices |= {
                f"{layer}attn.out_proj": (width, width), f"{layer}mlp.up_proj": (inner, width),
                f"{layer}mlp.down_proj": (width, inner),
            }  # fmt: skip
            others |= {
                f"{layer}attn.in_proj_weight": (3 * width, width),
                f"{layer}attn.in_proj_bias": (3 * width,),
                f"{layer}attn_norm.weight": (width,), f"{layer}mlp_norm.weight": (width,),
            }  # fmt: skip
        for name, shape in matrices.items():
            others |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return {PREFIX + name: shape for name, shape in others.items()}

    @classmethod
    def fresh(cls, config: Any, known: int, model: Any) -> dict[str, Tensor]:
        """One that has not been trained shares out probability at random."""
        made = super().fresh(config, known, model)
        for name, tensor in made.items():
            if name.endswith("norm.weight"):
                made[name] = torch.ones_like(tensor)
            elif name == PREFIX + _DISTANCES:
                made[name] = torch.zeros_like(tensor)
        return made

    def read(
        self, states: Tensor, last: Tensor, ahead: Tensor | None, context: Tensor | None
    ) -> Tensor:
        """With the context of the last committed token."""
        assert context is not None
        return torch.cat([states, context[:, :, None].expand_as(states)], -1)

    def prepare(self, logits: Tensor, among: Tensor, states: Tensor) -> Tensor:
        """``(..., distances, k * k + k)`` float32: the logarithm of the share of each candidate
        after each one of the slot before, and the ids of these; -1 before the first slot."""
        count = min(self.config.selector_top_k, logits.shape[-1])
        among = among[..., :count]
        chosen = logits.gather(-1, among).float()
        log_probs = chosen - logits.float().logsumexp(-1, keepdim=True)
        ids = among if self.vocabulary is None else self.vocabulary.tokens.to(among.device)[among]
        scores = self._scores(log_probs, ids, states)
        before = functional.pad(ids[..., :-1, :], (0, 0, 1, 0), value=-1)
        # Ids are below 2 ** 24, up to which float32 is exact.
        return torch.cat([scores.log_softmax(-1).flatten(-2), before.to(scores)], -1)

    def along(self, logits: Tensor, previous: Tensor, states: Tensor) -> Tensor:
        among = logits.topk(min(self.config.selector_top_k, logits.shape[-1])).indices
        states = self.prepare(logits, among, states)
        given, _ = self.given(logits.gather(-1, among), previous, states, None, among)
        return logits.scatter(-1, among, given)

    def given(
        self, logits: Tensor, previous: Tensor, states: Tensor, memory: Tensor | None = None,
        among: Tensor | None = None,
    ) -> Remembered:  # fmt: skip
        """Of the tokens ``among``, likeliest first, with states that are prepared. After a token
        that is no candidate of the slot before, all keep their logits."""
        count = min(self.config.selector_top_k, logits.shape[-1])
        pairs = states[..., : count * count].unflatten(-1, (count, count))
        after, _ = self.features(previous, states[..., count * count :], memory)
        shares = torch.einsum("...i,...ij->...j", after, pairs)
        best = logits[..., :count].float()
        shared = best.logsumexp(-1, keepdim=True) + shares
        changed = torch.where(after.any(-1, keepdim=True), shared, best).to(logits)
        rest = logits[..., count:].expand(*changed.shape[:-1], -1)
        return torch.cat([changed, rest], -1), None

    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        """``(..., k)`` which candidate of the slot before, of the ids in ``states``, was drafted:
        1 for that one. All count alike before the first slot, where all have the same shares."""
        found = ((states == previous[..., None]) | (states < 0)).to(states)
        return found / found.sum(-1, keepdim=True).clamp(min=1), None

    def _scores(self, log_probs: Tensor, ids: Tensor, states: Tensor) -> Tensor:
        """``(..., slots, k, k)`` float32, of candidates after those of the slot before.

        Args:
            log_probs: ``(..., slots, k)`` of the candidates.
            ids: of their shape.
            states: ``(..., slots, 2 * hidden)`` of :meth:`read`.
        """
        hidden, context = states.to(self._weight("slot_embedding")).chunk(2, -1)
        found = self._lattice(log_probs, self.network.embedded(ids), hidden)
        root = self._norm("anchor_norm", self._linear("context_proj", context[..., :1, None, :]))
        joined = torch.cat([found, root.expand_as(found), found * root], -1)
        factors = functional.silu(self._linear("factor_input_proj", joined))
        incoming, outgoing = self._unit("in_head", factors), self._unit("out_head", factors)
        first = self._unit("anchor_out_head", root).expand_as(outgoing[..., :1, :, :])
        before = torch.cat([first, outgoing[..., :-1, :, :]], -3)
        return self.config.lattice_scale * (before @ incoming.transpose(-1, -2)).float()

    def _lattice(self, log_probs: Tensor, embedded: Tensor, hidden: Tensor) -> Tensor:
        """``(..., slots, k, width)`` normed states of the candidates."""
        slots, count = log_probs.shape[-2:]
        if f"{PREFIX}token_proj.weight" in self.weights:
            embedded = self._linear("token_proj", embedded)
        found = embedded + self._linear("pass_hidden_proj", hidden)[..., None, :]
        found = found + self._mlp("feature_mlp", self._numbers(log_probs))
        found = found + self._weight("slot_embedding")[0, 0, :slots]
        found = found + self._weight("rank_embedding")[0, 0, :, :count]
        flat, bias = found.flatten(0, -4).flatten(1, 2), self._bias(slots, count)
        for index in range(self.config.lattice_layers):
            layer = f"layers.{index}."
            flat = flat + self._attended(layer, self._norm(f"{layer}attn_norm", flat), bias)
            flat = flat + self._mlp(f"{layer}mlp", self._norm(f"{layer}mlp_norm", flat))
        return self._norm("output_norm", flat).view(found.shape)

    def _numbers(self, log_probs: Tensor) -> Tensor:
        """``(..., slots, k, 5)`` what the MLP reads of the candidates, normed."""
        count = log_probs.shape[-1]
        ranks = torch.arange(count, device=log_probs.device).expand_as(log_probs)
        gap, share = log_probs - log_probs[..., :1], ranks / max(count - 1, 1)
        numbers = torch.stack([log_probs, log_probs.exp(), gap, share, (ranks == 0).float()], -1)
        weight, bias = (self._weight(f"feature_norm.{name}") for name in ("weight", "bias"))
        return functional.layer_norm(numbers.to(weight), weight.shape, weight, bias)

    def _bias(self, slots: int, count: int) -> Tensor:
        """``(heads, slots * k, slots * k)`` of attention scores."""
        of_distance, of_slot = self._weight(_DISTANCES), self._weight("same_slot_bias")
        slot = torch.arange(slots * count, device=of_slot.device) // count
        apart = slot[:, None] - slot
        same = (apart == 0).to(of_slot) * of_slot[:, None, None]
        return of_distance[:, apart + self.config.block_size - 1] + same

    def _attended(self, layer: str, inputs: Tensor, bias: Tensor) -> Tensor:
        names = [f"{PREFIX}{layer}attn.in_proj_{name}" for name in ("weight", "bias")]
        parts = self.linear(names, inputs).unflatten(-1, (3, self.config.lattice_heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self._linear(f"{layer}attn.out_proj", found.transpose(1, 2).flatten(2))

    def _weight(self, name: str) -> Tensor:
        return self.weights[PREFIX + name]

    def _linear(self, name: str, inputs: Tensor) -> Tensor:
        return self.linear([f"{PREFIX}{name}.weight", f"{PREFIX}{name}.bias"], inputs)

    def _mlp(self, name: str, inputs: Tensor) -> Tensor:
        inner = functional.silu(self._linear(f"{name}.up_proj", inputs))
        return self._linear(f"{name}.down_proj", inner)

    def _norm(self, name: str, inputs: Tensor) -> Tensor:
        weight = self._weight(f"{name}.weight").to(inputs)
        return functional.rms_norm(inputs, weight.shape, weight, self.config.rms_norm_eps)

    def _unit(self, name: str, inputs: Tensor) -> Tensor:
        return functional.normalize(self._linear(name, inputs), dim=-1, eps=self.config.lattice_eps)
