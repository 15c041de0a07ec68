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
from hf_spec.drafting.held import Holds
from hf_spec.drafting.noise import as_sampled
from hf_spec.drafting.predictions import Predictions, likeliest
from hf_spec.model.hidden_states import states_at

#: Prefixes of the names of an adapter's parameters.
PREFIX, SELECTOR_PREFIX = "markov_head.", "candidate_selector."
W1, W2 = "markov_w1.weight", "markov_w2.weight"
GATE, JOINT = ("gate_proj.weight", "gate_proj.bias"), ("joint_proj.weight", "joint_proj.bias")
#: W1 and W2 of a selector, and P.
SELECTOR = ("predecessor_codebook", "successor_codebook")
PROJECTION = "hidden_projection.weight"
#: The head of confidence.
CONFIDENCE = "confidence_head.proj.weight", "confidence_head.proj.bias"


def prefix(kind: str) -> str:
    """Prefix of the parameters of a kind."""
    return SELECTOR_PREFIX if kind == "selector" else PREFIX


def matrices(kind: str) -> tuple[str, str]:
    """Names of W1 and W2 of a kind."""
    return SELECTOR if kind == "selector" else (W1, W2)


def shapes(
    kind: str, rank: int, hidden: int, known: int, drafted: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters by name, given how many tokens may come before (``known``) and how
    many are predicted (``drafted``)."""
    before, after = matrices(kind)
    found: dict[str, tuple[int, ...]] = {before: (known, rank), after: (drafted, rank)}
    if kind == "gated":
        found |= zip(GATE, ((rank, hidden + rank), (rank,)))
    elif kind == "rnn":
        found |= zip(JOINT, ((3 * rank, 2 * rank + hidden), (3 * rank,)))
    elif kind == "selector":
        found[PROJECTION] = rank, hidden
    return found


def fresh(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Parameters of a new head, which at first adds 0."""
    return {
        name: torch.zeros(shape)
        if name in (W2, SELECTOR[1]) or len(shape) == 1
        else torch.randn(shape) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }


class Transitions(Holds):
    """A Markov head; gradients flow to its parameters.

    Args:
        kind: see above.
        weights: its parameters: W1 ``(known, rank)`` and W2 ``(tokens, rank)``; G ``(rank, hidden +
            rank)`` and its bias, J ``(3 * rank, 2 * rank + hidden)`` and its bias, or P ``(rank,
            hidden)``.
        top_k: of a selector, the number of tokens of each slot that it chooses among; None for all,
            as in training.
        sure: w ``(1, hidden)`` or ``(1, hidden + rank)`` and b ``(1,)`` of the head of confidence;
            empty if there is none.
    """

    held = ("weights", "sure")

    def __init__(
        self, kind: str, weights: Mapping[str, Tensor], top_k: int | None = None,
        sure: Sequence[Tensor] = (),
    ):  # fmt: skip
        self.kind, self.weights, self.top_k, self.sure = kind, dict(weights), top_k, tuple(sure)
        self._before, self._after = matrices(kind)

    @classmethod
    def of(
        cls, kind: str, weights: Mapping[str, Tensor], top_k: int | None = None
    ) -> Transitions | None:
        """The one among an adapter's parameters, if it has one."""
        start = prefix(kind)
        own = {
            name.removeprefix(start): tensor
            for name, tensor in weights.items()
            if name.startswith(start)
        }
        sure = [weights[name] for name in CONFIDENCE if name in weights]
        return cls(kind, own, top_k, sure) if own else None

    def given(
        self, logits: Tensor, previous: Tensor, states: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits given the tokens before.

        Args:
            logits: ``(..., tokens)``
            previous: ``(...)`` the token before each.
            states: ``(..., hidden)`` that give the logits.
            memory: ``(..., rank)`` what is remembered of the tokens before that one; None at the
                root, and in kinds that remember nothing.

        Returns:
            ``(..., tokens)`` logits, -inf for those that are not chosen among, and the memory of
            the tokens after.
        """
        own, before = self.weights, self._embedded(previous)
        states = states.to(before).expand(*before.shape[:-1], -1)
        if self.kind == "gated":
            gate = functional.linear(torch.cat([states, before], -1), *(own[x] for x in GATE))
            before = gate.sigmoid() * before
        elif self.kind == "rnn":
            memory = torch.zeros_like(before) if memory is None else memory
            joint = torch.cat([memory, before, states], -1)
            gate, new, out = functional.linear(joint, *(own[x] for x in JOINT)).chunk(3, -1)
            memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * new.tanh()
            before = out.tanh()
        elif self.kind == "selector":
            before = before * functional.linear(states, own[PROJECTION])
        given = logits + functional.linear(before, own[self._after]).to(logits)
        if self.kind == "selector" and self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[..., -1:]
            given = given.masked_fill(logits < least, -torch.inf)
        return given, memory

    def confidence(self, previous: Tensor, states: Tensor) -> Tensor | None:
        """``(...)`` how likely the likeliest token is accepted; None without a head of confidence.
        ``previous`` and ``states`` are as in :meth:`given`."""
        if not self.sure:
            return None
        before = self._embedded(previous)
        states = states.to(before).expand(*before.shape[:-1], -1)
        weight, bias = self.sure
        seen = states if weight.shape[1] == states.shape[-1] else torch.cat([states, before], -1)
        return functional.linear(seen, weight, bias)[..., 0].sigmoid()

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Rows of W1."""
        first = self.weights[self._before]
        # Tokens that the model has gained since have no row.
        return functional.embedding(tokens.to(first.device).clamp(max=len(first) - 1), first)

    def given_root(self, states: Tensor, root: Tensor) -> Tensor:
        """The states, which do not depend on the root."""
        return states

    def along(
        self, logits: Tensor, previous: Tensor, states: Tensor, vocabulary: object = None
    ) -> Tensor:
        """:meth:`given` of consecutive distances, ``(..., distances, tokens)``; the first token of
        ``previous`` is the root. The vocabulary is not needed."""
        found, memory = [], None
        for place in range(previous.shape[-1]):
            own, memory = self.given(
                logits[..., place, :], previous[..., place], states[..., place, :], memory
            )
            found.append(own)
        return torch.stack(found, dim=-2)


class Conditional(Predictions):
    """Predictions given the tokens drafted before, each by all logits of its distance.

    Args:
        transitions: how the tokens before change the predictions.
        logits, width, known, states, ids, noise: see :class:`Predictions`.
    """

    def __init__(
        self, logits: Tensor, width: int, known: Sequence[int] | Tensor, transitions: Transitions,
        states: Tensor, ids: Tensor | None = None, noise: Tensor | None = None,
    ):  # fmt: skip
        super().__init__(logits, width, known, ids=ids, noise=noise)
        self._logits, self._transitions, self._hidden = logits, transitions, states
        self._depends = True
        self._memory: Tensor | None = None  # (batch, n, rank) after the frontier's nodes

    def expand(self, frontier: Frontier) -> Children | None:
        place, previous = frontier.depth, frontier.tokens
        if place >= self.distances:
            return None
        memory = self._memory if place else None
        if memory is not None:
            memory = states_at(memory, frontier.parents)
        states = self._hidden[:, place, None]
        logits, self._memory = self._transitions.given(
            self._logits[:, place, None], previous, states, memory
        )
        if self._noise is not None:
            logits = as_sampled(logits, self._noise[:, place, None])
        chosen, log_probs = likeliest(logits, self.tokens.shape[-1])
        sure = self._transitions.confidence(previous, states)
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
