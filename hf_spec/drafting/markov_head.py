"""Markov head: how tokens that are known when a tree grows change the predictions.

Probes and heads predict all distances at once, before the model has chosen its own next token, the
root of the next tree, and each without the token before it. The Markov head changes the state h_d
that distance d is predicted from, first given the root r, then given the token x before it::

    h_d <- h_d + U_d silu(V_d e(r) + S_d h_d)
    h_d <- h_d + U_0 silu(V_0 e(x) + S_0 h_d)

e(x) is the base model's embedding of x, scaled to root mean square 1. The first line is computed
once per row and comes before the likeliest tokens are chosen. The second rescores a shortlist of
these for each of many tokens x: it adds the bias w(y) . U_0 silu(...) to the logits, where w(y) is
the base's output embedding of y. The base's embeddings are reused, so the matrices do not grow with
the vocabulary. The second line is a low-rank Hydra head (Ankner et al., "Hydra:
Sequentially-Dependent Draft Heads for Medusa Decoding", 2024) that looks one token back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.adapters.predicting import MARKOV_HEAD
from hf_spec.drafting.draft_vocabulary import DraftVocabulary, drafted_logits
from hf_spec.drafting.held import Holds
from hf_spec.drafting.made_once import made_once
from hf_spec.model.hidden_states import linear_logits
from hf_spec.modeling_patches.weights import input_features, placement
from hf_spec.threads import cached_property

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
            embeddings = self.model.get_input_embeddings()(tokens.to(placement(self.model).device))
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
            (known, _), device = input_features(self.model), placement(self.model).device
            ids = torch.arange(known, device=device)
            embedded = torch.cat([self._embedded(some) for some in ids.split(AT_ONCE)])
            # A view of a parameter in training requires gradients, even where none are computed:
            # hooks on all modules, as of a FlopCounterMode, fail when a module gets it.
            change = output.detach()[0].T
            biases = linear_logits(self.model, change).T.to(embedded).contiguous()
            return embedded, biases

        return made_once(embedding, (output, *modules), make)
