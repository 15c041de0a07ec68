"""A reduced vocabulary for drafting: the most frequent tokens, which make predictions cheaper.

Predictions use the model's output embeddings; with a vocabulary of 128,000 tokens, these are a
fifth of a model of a billion parameters. Most text uses few distinct tokens, and a draft token may
be wrong: FR-Spec (Zhao et al., "FR-Spec: Accelerating Large-Vocabulary Language Models via
Frequency-Ranked Speculative Sampling", 2025, section 3.2). Verification uses all tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.adapters.predicting import VOCABULARY, vocab_size
from hf_spec.drafting.held import Holds
from hf_spec.drafting.made_once import is_plain, made_once
from hf_spec.model.hidden_states import linear_logits
from hf_spec.modeling_patches.weights import is_updated, output_bias, output_features, output_weight
from hf_spec.threads import cached_property

#: Columns of output embeddings, quantized or with adapters of PEFT, that are read at once.
AT_ONCE = 64


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
            f"{'' if ascending else ', not in ascending order'}; the model has {known}: it was "
            "made for another model, or its file is damaged. Load it on its own model; if that has "
            f"lost tokens since, give them back: resize_token_embeddings({high + 1})."
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
            own = own[: vocab_size(model)]  # which may have lost tokens
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
            weight, bias = output_weight(self.model), output_bias(self.model)
            # Where weights are sharded, some are empty between forwards.
            whole = weight is not None and is_plain(weight) and len(weight) >= known
            if weight is not None and whole and not is_updated(head):
                tokens = tokens.to(weight.device)
                rows = weight.detach()[tokens]
            else:
                width, _ = output_features(self.model)
                parts = torch.eye(width, device=tokens.device).split(AT_ONCE)
                made = [linear_logits(self.model, part).to(tokens.device) for part in parts]
                rows = torch.cat([part[:, tokens] for part in made]).T.contiguous()
            own = None if bias is None else bias.detach()[tokens.to(bias.device)]
            return _Rows(tokens, rows, own)

        if self._weight is not None:
            return made_once(self._weight, (), make)
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
