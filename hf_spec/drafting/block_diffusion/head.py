"""What the head of a block drafter is: how drafted tokens change the predictions of those after
them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.adapters.predicting import vocab_size
from hf_spec.drafting.markov_head import ConditionalHead, Remembered

#: Shapes of tensors by name.
Shapes = dict[str, tuple[int, ...]]


class BlockHead(ConditionalHead):
    """A head of a block, whose slots are predicted from without the tokens drafted before them.

    A new one defines :meth:`shapes` and :meth:`features`, and stands in the table
    :data:`~hf_spec.drafting.block_diffusion.heads.HEADS`.

    Args:
        network: the :class:`~hf_spec.drafting.block_diffusion.network.BlockNetwork`.

    Attributes:
        buffers: names of tensors that are not trained.
        output: name of the tensor with a row for each token that is drafted; empty if there is
            none.
        causal: whether blocks have to be causal.
        reads_ahead: whether :meth:`read` needs the token ahead of a block's first.
        weights: the adapter's tensors by name; gradients flow to its parameters.
        chooses: whether drafted tokens are chosen among the likeliest of a slot only.
        top_k: of how many of these; None for all, as in training.
    """

    buffers: ClassVar[Collection[str]] = ()
    output: ClassVar[str] = ""
    causal: ClassVar[bool] = False
    reads_ahead: ClassVar[bool] = False
    chooses: ClassVar[bool] = False

    def __init__(self, network: Any):
        self.network, self.weights = network, network.adapter.tensors()
        self.config = network.config
        self.top_k: int | None = None

    @classmethod
    @abstractmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        """Shapes of its tensors by name.

        Args:
            config: the :class:`BlockConfig`, with the shape of the base recorded.
            known: how many tokens may come before.
        """

    @classmethod
    def fresh(cls, config: Any, known: int, model: Any) -> dict[str, Tensor]:
        """Tensors of a new head on a base model by name, with which it changes nothing: random
        matrices, whose outputs are of the size of their inputs, and zeros."""
        made = {}
        for name, shape in cls.shapes(config, known).items():
            random = len(shape) == 2 and name != cls.output
            made[name] = torch.randn(shape) / shape[-1] ** 0.5 if random else torch.zeros(shape)
        return made

    def given(
        self, logits: Tensor, previous: Tensor, states: Tensor, memory: Tensor | None = None,
        among: Tensor | None = None,
    ) -> Remembered:  # fmt: skip
        """See :class:`ConditionalHead`; of the tokens ``among``, ``(..., k)``, or of all. Logits of
        tokens that the model has gained since stay as they are."""
        features, memory = self.features(previous, states, memory)
        weight = self.weights[self.output]
        if among is None:
            change = products(features, weight, None)
            change = functional.pad(change, (0, logits.shape[-1] - len(weight)))
        elif len(weight) < (self.config.draft_vocab_size or vocab_size(self.network.model)):
            change = products(features, weight, among.clamp(max=len(weight) - 1))
            change = change.masked_fill(among >= len(weight), 0.0)
        else:
            change = products(features, weight, among)
        return logits + change.to(logits), memory

    @abstractmethod
    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        """What the rows of :attr:`output` are multiplied with, and the memory of the tokens after;
        see :meth:`given`."""

    def linear(self, names: Sequence[str], inputs: Tensor) -> Tensor:
        """The product with a matrix, and the bias if there is one, of these names."""
        return functional.linear(inputs, *(self.weights[name] for name in names))

    def after_layer(self, index: int, hidden: Tensor, anchors: Tensor) -> Tensor:
        """What becomes of a layer's output.

        Args:
            index: of the layer.
            hidden: ``(batch, blocks, block_size, hidden)``
            anchors: ``(batch, blocks)`` first tokens of the blocks.
        """
        return hidden

    def read(self, states: Tensor, last: Tensor, ahead: Tensor | None) -> Tensor:
        """What :meth:`given` gets of blocks: their states, and more features if it needs some.

        Args:
            states: ``(batch, blocks, block_size, hidden)`` that logits are computed from.
            last: the last layer's output, before :meth:`after_layer`.
            ahead: ``(batch, blocks)`` tokens ahead of the blocks, if :attr:`reads_ahead`.
        """
        return states

    def along(self, logits: Tensor, previous: Tensor, states: Tensor) -> Tensor:
        """With -inf for tokens that it does not choose among."""
        given = super().along(logits, previous, states)
        if self.top_k is None:
            return given
        least = logits.topk(min(self.top_k, logits.shape[-1])).values[..., -1:]
        return given.masked_fill(logits < least, -torch.inf)

    def confidence(self, previous: Tensor, states: Tensor) -> Tensor | None:
        """``(...)`` how likely the likeliest token is accepted, if those before it are; None if it
        does not know. ``previous`` and ``states`` are as in :meth:`given`."""
        return None


def drafted(config: Any, known: int) -> int:
    """How many tokens are drafted, of so many."""
    return config.draft_vocab_size or known


def look_up(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of a table. Tokens that the model has gained since have none: they get the last one."""
    return functional.embedding(tokens.to(table.device).clamp(max=len(table) - 1), table)


def products(states: Tensor, weight: Tensor, among: Tensor | None) -> Tensor:
    """Of states ``(..., n, features)`` with all rows of a matrix, or those ``among`` ``(..., 1 or
    n, k)``: ``(..., n, rows or k)``."""
    if among is None:
        return functional.linear(states, weight)
    return torch.einsum("...kh,...h->...k", weight[among], states)
