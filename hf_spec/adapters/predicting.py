"""Base of adapters that predict future tokens: draft vocabularies, Markov heads, prefix KV."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_spec.adapters.base_model import facts_of
from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.core.checks import SHARE, check_count, choice, count, setting
from hf_spec.core.limits import MAX_RANK, MAX_SHAPE, MAX_SIZE
from hf_spec.modeling_patches.support import kv_shape
from hf_spec.modeling_patches.weights import input_features, output_features, placement

#: Parameter names of the Markov head: matrices from embeddings, to states and from states.
MARKOV_HEAD = "markov_embedding", "markov_output", "markov_state"
#: Parameter name of the predicted tokens, if these are not all tokens.
VOCABULARY = "draft_vocabulary"


@dataclass
class ObjectiveConfig(SpecPeftConfig):
    """Config of an adapter whose training says what its predictions learn from, and which count."""

    loss: str = setting(
        "distillation",
        "distillation: KL divergence from the base's own distributions. hard: cross-entropy of the "
        "answers' tokens.",
        choice("distillation", "hard"),
    )
    decay: float | None = setting(
        None,
        "Weight of a distance in the loss, relative to that of the distance before; null: what it "
        "adds to the expected number of accepted tokens (D-PACE).",
        SHARE,
    )


@dataclass
class VocabularyConfig(SpecPeftConfig):
    """Config of an adapter that may have a draft vocabulary of its own."""

    draft_vocab_size: int | None = setting(
        None,
        "Number of tokens that can be drafted, the commonest of the training answers; 0: all, as "
        "in the paper. Default: a quarter of the vocabulary.",
        count(0, MAX_SIZE),
    )

    @property
    def reads_head(self) -> bool:
        """Whether it can predict some tokens only."""
        return True

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        if self.draft_vocab_size is None:  # trained adapters say what they have
            part = self.reads_head and not self.inference_mode
            self.draft_vocab_size = vocab_size(model) // 4 if part else 0
        if self.draft_vocab_size and not self.reads_head:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size}: this adapter predicts tokens by a "
                "matrix of its own, which has them all. Leave it out."
            )
        if self.draft_vocab_size:
            why = "The model has no more tokens. Take fewer, or 0 for all."
            check_count("draft_vocab_size", self.draft_vocab_size, 0, vocab_size(model), why)

    def known_tokens(self, model: nn.Module) -> int:
        """Number of tokens that matrices of a loaded adapter have rows for: those of the model, or
        those that it had before its vocabulary grew."""
        now = facts_of(model).get("vocab_size", 0)
        before: int = (self.base_facts or {}).get("vocab_size", now)
        return before if before < now else vocab_size(model)

    def fresh_vocabulary(self) -> dict[str, Tensor]:
        """``draft_vocabulary`` (tokens,), int64 ids in ascending order, if not all are predicted:
        at first the smallest ids, which tend to be the most frequent tokens."""
        size = self.draft_vocab_size
        return {VOCABULARY: torch.arange(size)} if size else {}


@dataclass
class PredictingConfig(VocabularyConfig):
    """Config of an adapter that may have a Markov head and a vocabulary of its own."""

    markov_rank: int = setting(
        128,
        "Rank of the Markov head, which conditions predictions on the root and on the token "
        "before; 0: none, as in the paper.",
        count(0, MAX_RANK),
    )
    markov_learning_rate: float = setting(3e-3, "Peak learning rate of the Markov head.", SHARE)

    def learning_rates(self) -> dict[str, float]:
        return {"markov": self.markov_learning_rate} if self.markov_rank else {}

    def fresh_shared(self, model: nn.Module, distances: int) -> dict[str, Tensor]:
        """Parameters of a new adapter that predicts so many tokens after the next one.

        The Markov head, unless its rank is 0, with matrices for the token before and for the root
        at each distance: ``markov_embedding`` (1 + distances, rank, embedding), ``markov_output``
        (1 + distances, hidden, rank) and ``markov_state`` (1 + distances, rank, hidden). At first
        it adds 0. And :meth:`fresh_vocabulary`."""
        tensors = self.fresh_vocabulary()
        if rank := self.markov_rank:
            embedding, hidden = input_features(model)[1], output_features(model)[0]
            matrices = (
                torch.randn(1 + distances, rank, embedding) / embedding**0.5,
                torch.zeros(1 + distances, hidden, rank),
                torch.randn(1 + distances, rank, hidden) / hidden**0.5,
            )
            tensors.update(zip(MARKOV_HEAD, matrices))
        return tensors


@dataclass
class PrefixKVConfig(PredictingConfig):
    """Base of configs of adapters with a prefix KV, which has the shape of the base's KV cache."""

    num_layers: int | None = setting(
        None, "Layers of the base's cache (recorded).", count(1, MAX_SHAPE)
    )
    num_kv_heads: int | None = setting(
        None, "Key-value heads of the base (recorded).", count(1, MAX_SHAPE)
    )
    head_dim: int | None = setting(
        None, "Dimension of the base's heads (recorded).", count(1, MAX_SHAPE)
    )

    def record_shape(self, model: nn.Module) -> None:
        """Record the shape of the base's cache, unless a loaded adapter already has it."""
        if not (self.inference_mode and self.num_layers):
            self.num_layers, self.num_kv_heads, self.head_dim = kv_shape(model)

    def fresh_states(self, name: str, slots: int, std: float) -> dict[str, Tensor]:
        """``<name>_keys`` and ``<name>_values``, ``(layers, kv_heads, slots, head_dim)`` each."""
        assert self.num_layers and self.num_kv_heads and self.head_dim
        shape = (self.num_layers, self.num_kv_heads, slots, self.head_dim)
        return {f"{name}_{part}": torch.randn(shape) * std for part in ("keys", "values")}


def text_embeddings(model: Any, count: int) -> Tensor:
    """Input embeddings of random tokens, ``(count, hidden)``: where probes begin.

    Smaller vectors are enlarged by normalization layers, and so are their gradients: low-rank
    updates beside them then learn from noise first.
    """
    (tokens, width), device = input_features(model), placement(model).device
    ids = torch.randint(tokens, (count,))
    if ids.is_meta or device.type == "meta":  # only shapes are needed
        return torch.empty(count, width)
    with torch.no_grad():
        return model.get_input_embeddings()(ids.to(device)).float()


def of_tokens(model: Any, logits: Tensor, missing: float) -> Tensor:
    """Logits ``(..., tokens)`` of all tokens of a model: those of the adapter's, which are the
    first ones, and `missing` for tokens that only the model has."""
    return nn.functional.pad(logits, (0, vocab_size(model) - logits.shape[-1]), value=missing)


def vocab_size(model: Any) -> int:
    """Number of tokens that the model computes logits for."""
    return output_features(model)[1]
