"""Markov heads and draft vocabularies: tables made of weights, once per model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.adapters.config import MARKOV_HEAD, VOCABULARY, vocab_size
from hf_spec.core.device import Holds
from hf_spec.modeling_patches.weights import (
    input_features,
    is_plain,
    is_updated,
    made_once,
    output_bias,
    output_features,
    output_weight,
    placement,
)
from hf_spec.target.hidden_states import linear_logits
from hf_spec.threads import cached_property

# --------------------------------------------------------------------------------------------------
# A reduced vocabulary for drafting: the most frequent tokens, which make predictions cheaper.
#
# Predictions use the model's output embeddings; with a vocabulary of 128,000 tokens, these are a
# fifth of a model of a billion parameters. Most text uses few distinct tokens, and a draft token
# may be wrong: FR-Spec (Zhao et al., "FR-Spec: Accelerating Large-Vocabulary Language Models via
# Frequency-Ranked Speculative Sampling", 2025, section 3.2). Verification uses all tokens.

#: Columns of output embeddings, quantized or with adapters of PEFT, that are read at once.
WORDS_AT_ONCE = 64


def common_tokens(answers: Iterable[Sequence[int]], size: int, vocabulary: int) -> Tensor:
    """The most frequent tokens, ``(size,)`` int64 in ascending order.

    Args:
        answers: token ids.
        size: number of tokens; ties go to the smaller id.
        vocabulary: number of tokens in the full vocabulary.
    """
    counts: Counter[int] = Counter()
    for answer in answers:
        counts.update(answer)
    order = sorted(range(vocabulary), key=lambda token: -counts[token])
    return torch.tensor(sorted(order[:size]))


def places_of(tokens: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where tokens stand among some ids, and whether they do; both of the tokens' shape.

    Args:
        tokens: ids; negative where there is none.
        ids: ``(n,)`` ascending; None for those of the whole vocabulary.
    """
    place, known = tokens.clamp(min=0), tokens >= 0
    if ids is None:
        return place, known
    found = torch.searchsorted(ids, place).clamp(max=len(ids) - 1)
    return found, known & (ids[found] == place)


def check_tokens(tokens: Tensor, known: int) -> None:
    """Raise a ValueError unless ids ``(size,)`` ascend and are among so many."""
    ascending = bool((tokens[1:] > tokens[:-1]).all())
    low, high = int(tokens[0]), int(tokens[-1])
    if not ascending or low < 0 or high >= known:
        raise ValueError(
            f"this adapter predicts tokens {low} to {high}"
            f"{'' if ascending else ', not in ascending order'}; the model has {known}. If its "
            "vocabulary was reduced since, give the tokens back, "
            f"resize_token_embeddings({high + 1}); else the adapter is another model's, or its "
            "file is damaged."
        )


#: Parameter name of an adapter's own output embeddings.
HEAD = "lm_head.weight"


class DraftVocabulary(Holds):
    """The part of the output embeddings that an adapter predicts tokens with, or its own ones.

    Args:
        tokens: ``(size,)`` int64 ids.
        model: the base model.
        weight: ``(size, hidden)`` the adapter's own output embeddings of these tokens; None for
            the model's.

    Raises:
        ValueError: if the model lacks some of these tokens.
    """

    held = ("_rows",)

    def __init__(self, tokens: Tensor, model: Any, weight: Tensor | None = None):
        self.model, self._tokens, self._weight = model, tokens, weight

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], model: Any) -> DraftVocabulary | None:
        """The one among an adapter's parameters; None if the model's output embeddings predict all
        tokens."""
        tokens, own = weights.get(VOCABULARY), weights.get(HEAD)
        if tokens is None and own is not None:
            known = vocab_size(model)
            if len(own) > known:  # it has lost tokens
                own = own[:known]
            tokens = torch.arange(len(own), device=own.device)
        return None if tokens is None else cls(tokens, model, own)

    @property
    def is_own(self) -> bool:
        """Whether it has output embeddings of its own."""
        return self._weight is not None

    @property
    def is_of_base(self) -> bool:
        """Whether its output embeddings are the model's, and these are not trained."""
        head = self.model.get_output_embeddings()
        return not (self.is_own or any(one.requires_grad for one in head.parameters()))

    @property
    def tokens(self) -> Tensor:
        """``(size,)`` int64 ids, on the device of the output embeddings."""
        return self._rows.tokens

    @property
    def weight(self) -> Tensor:
        """``(size, hidden)`` rows of the output embeddings."""
        return self._rows.weight

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits ``(..., size)`` of final hidden states; replaces the output embeddings."""
        rows = self._rows
        return functional.linear(hidden.to(rows.weight), rows.weight, rows.bias)

    def of_all(self, logits: Tensor) -> Tensor:
        """Expand logits ``(..., size)`` to ``(..., vocab)``; other tokens get -inf."""
        everything = logits.new_full((*logits.shape[:-1], vocab_size(self.model)), -torch.inf)
        everything[..., self.tokens.to(logits.device)] = logits
        return everything

    @cached_property
    @torch.no_grad()
    def _rows(self) -> _Rows:
        head = self.model.get_output_embeddings()

        def make() -> _Rows:
            # Not itself, which owns what is made.
            tokens, known = self._tokens.detach(), vocab_size(self.model)
            check_tokens(tokens, known)
            if self._weight is not None:
                return _Rows(tokens.to(self._weight.device), self._weight.detach(), None)
            tokens = tokens.clone()
            weight, bias = output_weight(self.model), output_bias(self.model)
            # Where weights are sharded, some are empty between forwards.
            whole = weight is not None and is_plain(weight) and len(weight) >= known
            if weight is not None and whole and not is_updated(head):
                tokens = tokens.to(weight.device)
                rows = weight.detach()[tokens]
            else:
                width, _ = output_features(self.model)
                parts = torch.eye(width, device=tokens.device).split(WORDS_AT_ONCE)
                made = [linear_logits(self.model, part).to(tokens.device) for part in parts]
                rows = torch.cat([part[:, tokens] for part in made]).T.contiguous()
            own = None if bias is None else bias.detach()[tokens.to(bias.device)]
            return _Rows(tokens, rows, own)

        if self._weight is not None:
            return made_once(self._weight, (), make, in_place=False)
        return made_once(self._tokens, (head,), make)


def drafted_logits(
    vocabulary: DraftVocabulary | None, predict: Callable[[DraftVocabulary | None], Tensor]
) -> Tensor:
    """Logits ``(..., tokens)`` of a draft vocabulary's tokens; None for all. ``predict`` gives
    those by its output embeddings, or for None those by others: of its tokens, or of all."""
    if vocabulary is None:
        return predict(None)
    tokens = vocabulary.tokens  # made before its rows replace the output embeddings
    logits = predict(vocabulary if vocabulary.is_of_base else None)
    return logits if logits.shape[-1] == len(tokens) else logits[..., tokens.to(logits.device)]


class _Rows(NamedTuple):
    """Rows of the output embeddings."""

    tokens: Tensor
    weight: Tensor
    bias: Tensor | None


# -- Markov head: how tokens that are known when a tree grows change the predictions ---------------
#
# Probes and heads predict all distances at once, before the model has chosen its own next token,
# the root of the next tree, and each without the token before it. The Markov head changes the state
# h_d that distance d is predicted from, first given the root r, then given the token x before it::
#
#     h_d <- h_d + U_d silu(V_d e(r) + S_d h_d)
#     h_d <- h_d + U_0 silu(V_0 e(x) + S_0 h_d)
#
# e(x) is the base model's embedding of x, scaled to root mean square 1. The first line is computed
# once per row and comes before the likeliest tokens are chosen. The second rescores a shortlist of
# these for each of many tokens x: it adds the bias w(y) . U_0 silu(...) to the logits, where w(y)
# is the base's output embedding of y. The base's embeddings are reused, so the matrices do not grow
# with the vocabulary. The second line is a low-rank Hydra head (Ankner et al., "Hydra:
# Sequentially-Dependent Draft Heads for Medusa Decoding", 2024) that looks one token back.

#: Tokens whose embeddings are projected at once.
AT_ONCE = 8192


#: Logits, or what gives them, and what is remembered of the tokens so far, if anything.
Remembered = tuple[Tensor, Tensor | None]


class ConditionalHead(Holds, ABC):
    """How the tokens before change predictions, which are of all distances at once.

    Attributes:
        remembers: whether tokens further back than the one before count.
        plain_share: share of the loss without the token before, next to that given it.
    """

    remembers: bool = False
    plain_share: ClassVar[float] = 0.0

    def given_root(self, states: Tensor, root: Tensor) -> Tensor:
        """The states given the root.

        Args:
            states: ``(..., distances, hidden)``, of the first distances.
            root: ``(...)`` tokens.

        Returns:
            ``(..., distances, hidden)`` in the dtype of the states.
        """
        return states

    @abstractmethod
    def given(
        self, logits: Tensor, previous: Tensor, states: Tensor, memory: Tensor | None = None
    ) -> Remembered:
        """Logits given the tokens before.

        Args:
            logits: ``(..., tokens)``
            previous: ``(...)`` the token before each.
            states: ``(..., hidden)`` that give the logits, :meth:`given_root`.
            memory: ``(..., rank)`` what is remembered of the tokens before that one; None at the
                root, and of heads that remember nothing.

        Returns:
            ``(..., tokens)`` logits, and the memory of the tokens after.
        """

    def along(self, logits: Tensor, previous: Tensor, states: Tensor) -> Tensor:
        """:meth:`given` of consecutive distances, ``(..., distances, tokens)``; the first token of
        ``previous`` is the root."""
        if not self.remembers:
            return self.given(logits, previous, states)[0]
        found, memory = [], None
        for place in range(previous.shape[-1]):
            own, memory = self.given(
                logits[..., place, :], previous[..., place], states[..., place, :], memory
            )
            found.append(own)
        return torch.stack(found, dim=-2)


class MarkovHead(ConditionalHead):
    """Applies an adapter's Markov head; gradients flow to its parameters.

    Args:
        weights: the adapter's parameters: V ``(1 + distances, rank, embedding)``, U ``(1 +
            distances, hidden, rank)`` and S ``(1 + distances, rank, hidden)``; entry 0 is for the
            token before, the others are for the root.
        model: the base model, whose embeddings are used.
    """

    held = ("weights", "_tables")
    plain_share = 0.3  # which trains the shortlists

    def __init__(self, weights: Mapping[str, Tensor], model: Any):
        self.weights = tuple(weights[name] for name in MARKOV_HEAD)  # V, U and S
        self.model, self.vocabulary = model, DraftVocabulary.of(weights, model)
        self._device = placement(model).device

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], model: Any) -> MarkovHead | None:
        """The one among an adapter's parameters, if it has one."""
        return cls(weights, model) if MARKOV_HEAD[0] in weights else None

    def given_root(self, states: Tensor, root: Tensor) -> Tensor:
        embedding, output, state = (part[1 : 1 + states.shape[-2]] for part in self.weights)
        inner = functional.linear(self._unit_embeddings(root), embedding.flatten(0, 1))
        inner = inner.unflatten(-1, embedding.shape[:2])
        inner = inner + torch.einsum("...dh,drh->...dr", states.to(state), state)
        moved = torch.einsum("...dr,dhr->...dh", functional.silu(inner), output)
        return states + moved.to(states)

    def given(
        self, logits: Tensor, previous: Tensor, states: Tensor, memory: Tensor | None = None
    ) -> Remembered:
        bias = drafted_logits(self.vocabulary, partial(self.logits, previous, states))
        return logits + bias.to(logits), None

    def logits(
        self, previous: Tensor, states: Tensor, vocabulary: DraftVocabulary | None = None
    ) -> Tensor:
        """The bias ``(..., vocab)`` of all tokens, or of those of a vocabulary.

        Args:
            previous: ``(...)`` previous tokens.
            states: ``(..., hidden)`` that give the logits to which the bias is added.
        """
        inner = functional.silu(self._embedded(previous) + self._projected(states))
        change = functional.linear(inner, self.weights[1][0])
        if vocabulary is None:
            return linear_logits(self.model, change)
        return functional.linear(change.to(vocabulary.weight), vocabulary.weight)

    def bias(self, previous: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
        """The bias of a few tokens, given each of several previous tokens.

        Args:
            previous: ``(batch, distances, n)`` previous tokens.
            states: ``(batch, distances, hidden)`` that the distances are predicted from.
            tokens: ``(batch, distances, width)``

        Returns:
            ``(batch, distances, n, width)``
        """
        embedded, biases = self._tables
        device = embedded.device
        projected = self._projected(states)[:, :, None].to(device)
        inner = functional.silu(functional.embedding(previous.to(device), embedded) + projected)
        return inner @ functional.embedding(tokens.to(device), biases).transpose(-1, -2)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """V_0 e(x), ``(..., rank)``, of tokens ``(...)``."""
        return functional.linear(self._unit_embeddings(tokens), self.weights[0][0])

    def _projected(self, states: Tensor) -> Tensor:
        """S_0 h, ``(..., rank)``."""
        state = self.weights[2][0]
        return functional.linear(states.to(state), state)

    def _unit_embeddings(self, tokens: Tensor) -> Tensor:
        """e(x) of tokens ``(...)``: ``(..., embedding)``, without gradients."""
        with torch.no_grad():
            embeddings = self.model.get_input_embeddings()(tokens.to(self._device))
            embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
            scaled = functional.rms_norm(embeddings, embeddings.shape[-1:], eps=1e-12)
        return scaled.to(self.weights[0])

    @cached_property
    @torch.no_grad()
    def _tables(self) -> tuple[Tensor, Tensor]:
        """V_0 e(x) and U_0 w(y) of all tokens, ``(vocab, rank)`` each, computed once: a step needs
        about a thousand."""
        embedding, output, _ = self.weights
        modules = self.model.get_input_embeddings(), self.model.get_output_embeddings()

        def make() -> tuple[Tensor, Tensor]:
            known, _ = input_features(self.model)
            ids = torch.arange(known, device=self._device)
            embedded = torch.cat([self._embedded(some) for some in ids.split(AT_ONCE)])
            # A view of a parameter in training requires gradients, even where none are computed:
            # hooks on all modules, as of a FlopCounterMode, fail when a module gets it.
            change = output.detach()[0].T
            biases = linear_logits(self.model, change).T.to(embedded).contiguous()
            return embedded, biases

        return made_once(embedding, (output, *modules), make)
