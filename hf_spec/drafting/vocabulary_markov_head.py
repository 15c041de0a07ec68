"""Markov heads in the space of logits: how drafted tokens change the predictions of those after
them.

A block drafter predicts all distances at once, each without the tokens drafted before it. DSpark
("DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation", 2026)
adds W2 u to the logits of a slot, where u depends on the token before it, p, and, in some kinds,
on the slot's state h and on the tokens before p::

    vanilla   u = W1[p]
    gated     u = sigmoid(G [h; W1[p]] + b) * W1[p]
    rnn       g, c, o = J [s; W1[p]; h] + b
              s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c),  u = tanh(o)
    selector  u = W1[p] * P h

The last one is DFlash 2's, which chooses among each slot's k tokens of the largest logits only.

DSpark's head of confidence says how likely a slot's likeliest token is accepted, if all before it
are: sigmoid(w [h; W1[p]] + b), or without W1[p]. Trees are grown by that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.drafting.grow import Children, Frontier
from hf_spec.drafting.markov_head import ConditionalHead
from hf_spec.drafting.noise import as_sampled
from hf_spec.drafting.predictions import Predictions, likeliest
from hf_spec.model.hidden_states import states_at

SELECTOR = "selector"
#: Names of an adapter's parameters by kind: W1, W2, then G, J or P and the bias.
_OURS = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
NAMES: dict[str, tuple[str, ...]] = {
    "vanilla": _OURS,
    "gated": (*_OURS, "markov_head.gate_proj.weight", "markov_head.gate_proj.bias"),
    "rnn": (*_OURS, "markov_head.joint_proj.weight", "markov_head.joint_proj.bias"),
    SELECTOR: tuple(f"candidate_selector.{name}" for name in (
        "predecessor_codebook", "successor_codebook", "hidden_projection.weight"
    )),
}  # fmt: skip
#: Those of the head of confidence.
CONFIDENCE = "confidence_head.proj.weight", "confidence_head.proj.bias"


def fresh(kind: str, rank: int, hidden: int, known: int, drafted: int) -> dict[str, Tensor]:
    """Parameters of a new head by name, which at first adds 0, given how many tokens may come
    before (``known``) and how many are predicted (``drafted``)."""
    more: dict[str, list[tuple[int, ...]]] = {
        "gated": [(rank, hidden + rank), (rank,)],
        "rnn": [(3 * rank, 2 * rank + hidden), (3 * rank,)],
        SELECTOR: [(rank, hidden)],
    }
    first, after, *rest = [(known, rank), (drafted, rank), *more.get(kind, [])]
    made = [torch.randn(first) / rank**0.5, torch.zeros(after)]
    for shape in rest:
        made.append(
            torch.zeros(shape) if len(shape) == 1 else torch.randn(shape) / shape[-1] ** 0.5
        )
    return dict(zip(NAMES[kind], made))


class VocabularyMarkovHead(ConditionalHead):
    """A Markov head; gradients flow to its parameters.

    Args:
        kind: see above.
        weights: its parameters in the order of :data:`NAMES`: W1 ``(known, rank)`` and W2
            ``(tokens, rank)``; G ``(rank, hidden + rank)`` and its bias, J ``(3 * rank, 2 * rank +
            hidden)`` and its bias, or P ``(rank, hidden)``.
        top_k: of a selector, the number of tokens of each slot that it chooses among; None for all,
            as in training.
        confidence_head: w ``(1, hidden)`` or ``(1, hidden + rank)`` and b ``(1,)``; empty if there
            is none.
    """

    held = ("weights", "confidence_head")

    def __init__(
        self, kind: str, weights: Sequence[Tensor], top_k: int | None = None,
        confidence_head: Sequence[Tensor] = (),
    ):  # fmt: skip
        self.kind, self.weights, self.top_k = kind, tuple(weights), top_k
        self.confidence_head, self.remembers = tuple(confidence_head), kind == "rnn"

    @classmethod
    def of(
        cls, kind: str, weights: Mapping[str, Tensor], top_k: int | None = None
    ) -> VocabularyMarkovHead | None:
        """The one among an adapter's parameters, if it has one."""
        if NAMES[kind][0] not in weights:
            return None
        own = [weights[name] for name in NAMES[kind]]
        return cls(kind, own, top_k, [weights[name] for name in CONFIDENCE if name in weights])

    def given(
        self, logits: Tensor, previous: Tensor, states: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`ConditionalHead`; logits are -inf for those that are not chosen among."""
        _, after, *more = self.weights
        before = self._embedded(previous)
        states = states.to(before).expand(*before.shape[:-1], -1)
        if self.kind == "gated":
            gate = functional.linear(torch.cat([states, before], -1), *more)
            before = gate.sigmoid() * before
        elif self.kind == "rnn":
            memory = torch.zeros_like(before) if memory is None else memory
            joint = torch.cat([memory, before, states], -1)
            gate, new, out = functional.linear(joint, *more).chunk(3, -1)
            memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * new.tanh()
            before = out.tanh()
        elif self.kind == SELECTOR:
            before = before * functional.linear(states, *more)
        given = logits + functional.linear(before, after).to(logits)
        if self.kind == SELECTOR and self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[..., -1:]
            given = given.masked_fill(logits < least, -torch.inf)
        return given, memory

    def confidence(self, previous: Tensor, states: Tensor) -> Tensor | None:
        """``(...)`` how likely the likeliest token is accepted; None without a head of confidence.
        ``previous`` and ``states`` are as in :meth:`given`."""
        if not self.confidence_head:
            return None
        before = self._embedded(previous)
        states = states.to(before).expand(*before.shape[:-1], -1)
        weight, bias = self.confidence_head
        seen = states if weight.shape[1] == states.shape[-1] else torch.cat([states, before], -1)
        return functional.linear(seen, weight, bias)[..., 0].sigmoid()

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Rows of W1."""
        first = self.weights[0]
        # Tokens that the model has gained since have no row.
        return functional.embedding(tokens.to(first.device).clamp(max=len(first) - 1), first)


class PathPredictions(Predictions):
    """Predictions given the tokens drafted before, each by all logits of its distance.

    Args:
        markov_head: how the tokens before change the predictions.
        logits, width, known, states, ids, noise: see :class:`Predictions`.
    """

    def __init__(
        self, logits: Tensor, width: int, known: Sequence[int] | Tensor,
        markov_head: VocabularyMarkovHead, states: Tensor, ids: Tensor | None = None,
        noise: Tensor | None = None,
    ):  # fmt: skip
        super().__init__(logits, width, known, ids=ids, noise=noise)
        self._logits, self._head, self._hidden = logits, markov_head, states
        self._memory: Tensor | None = None  # (batch, n, rank) after the frontier's nodes

    def expand(self, frontier: Frontier) -> Children | None:
        place, previous = frontier.depth, frontier.tokens
        if place >= self.distances:
            return None
        memory = self._memory if place else None
        if memory is not None:
            memory = states_at(memory, frontier.parents)
        states = self._hidden[:, place, None]
        logits, self._memory = self._head.given(
            self._logits[:, place, None], previous, states, memory
        )
        if self._noise is not None:
            logits = as_sampled(logits, self._noise[:, place, None])
        chosen, log_probs = likeliest(logits, self.tokens.shape[-1])
        sure = self._head.confidence(previous, states)
        if sure is not None and self._noise is None:
            log_probs = with_confidence(log_probs, sure)
        tokens = chosen if self._ids is None else self._ids[chosen]
        return Children(tokens, self.where_known(log_probs, place))


def with_confidence(log_probs: Tensor, confidence: Tensor) -> Tensor:
    """Log-probabilities ``(..., width)`` of which the first, the largest, is replaced by a
    confidence ``(...)`` in [0, 1]; the others share the rest as before, none becomes the largest.
    """
    first, others = log_probs[..., :1], log_probs[..., 1:]
    # Of all other tokens together, those that are not listed included.
    among = others - torch.log1p(-first.exp().clamp(max=1 - 1e-6))
    second = among[..., :1].exp() if others.shape[-1] else torch.zeros_like(first)
    sure = confidence[..., None].to(first).clamp(max=1 - 1e-6)
    sure = torch.maximum(sure, second / (1 + second))
    return torch.cat([sure.log(), among + torch.log1p(-sure)], -1)
