"""What drafters share whose candidates stand on trees of ranked predictions of future tokens.

It is what ``hf-spec tune`` needs of a drafter: how far it predicts and whether that takes probes,
its predictions at places of finished sequences, and what a step with given trees forwards.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_spec.core.probes import ProbeRows
from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.core.tree_states import TreeState, TreeStates
from hf_spec.drafting.candidates import ranked_tokens
from hf_spec.drafting.drafter import DecodingState, Draft, Drafter

#: Predictions of finished sequences that are made at once: they are vocabularies long.
AT_ONCE = 384

#: The tree of each row, the same as tensors, and the probes under its nodes.
StepRows = tuple[list[TokenTree], TreeBatch, ProbeRows | None]


class TreeSource:
    """Where the trees of a call's steps come from: here the same trees throughout.

    Args:
        states: the tree of each state, the number of tokens that are predicted.
    """

    def __init__(self, states: TreeStates):
        self._states = states

    @property
    def max_depth(self) -> int:
        """Distances that its trees use at most."""
        return self._states.max_probes

    def start(self, state: DecodingState) -> None:
        """The call's first step is near, or the batch has become smaller."""

    def states(self, state: DecodingState) -> TreeStates:
        """The trees of the step that begins now."""
        return self._states

    def look(self, depth: int) -> int:
        """Distances to predict where the tree of the step is so deep."""
        return depth

    def tokens(
        self, trees: Sequence[TokenTree], state: DecodingState, logits: Tensor,
        known: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Tokens on all nodes, as :func:`ranked_tokens`.

        Args:
            trees: of each row.
            state: the decoding.
            logits: ``(batch, distances, vocab)`` of all distances of the trees, or of more.
            known: distances that each row has predictions for; None: all.
        """
        return ranked_tokens(trees, state.root, logits)

    def observe(self, state: DecodingState, rows: int, nodes: Sequence[Sequence[int]]) -> None:
        """A step of so many rows is over, with these accepted nodes; a plain one, too."""

    def details(self) -> dict[str, Any]:
        """For ``SpecStats.details``."""
        return {}


class TreeDrafter(Drafter):
    """A drafter with trees.

    Args:
        source: gives the trees of each step.
    """

    runs_modules: ClassVar[bool] = True

    def __init__(self, model: Any, options: Any, source: TreeSource):
        super().__init__(model, options)
        self.source = source

    def start(self, state: DecodingState) -> None:
        self.source.start(state)

    def select(self, state: DecodingState, rows: Sequence[int]) -> None:
        self.source.start(state)

    def observe(self, state: DecodingState, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        self.source.observe(state, draft.num_rows, nodes)

    def details(self) -> dict[str, Any]:
        return self.source.details()

    @property
    @abstractmethod
    def distances(self) -> int:
        """Tokens behind the next one that it predicts."""

    @property
    @abstractmethod
    def per_distance(self) -> int:
        """Probes for each distance; 0: predictions take no rows, and every step knows them all."""

    @abstractmethod
    def rows(self, states: Sequence[TreeState], device: str) -> StepRows:
        """What a step forwards.

        Args:
            states: the tree of each row with its probes.
            device: of the tensors.
        """

    @abstractmethod
    def candidates(
        self, state: DecodingState, trees: list[TokenTree], depth: int
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens on all nodes, ``(batch, nodes)``, and what they were sampled from, if they were.

        Args:
            state: with the hidden states of the step before.
            trees: of each row, no deeper than ``depth``, from 1, and the row's predictions.
        """

    @abstractmethod
    def future_logits(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        """Predictions at tokens of a finished sequence, as decoding makes them behind these.

        Args:
            input_ids: ``(1, seq)``, without padding.
            places: ``(places,)`` columns of ``input_ids``.

        Yields:
            ``(some, distances, vocab)`` for some places after the other, in their order; distance
            d, from 1, is that of the token 1 + d columns behind the place.
        """

    def chain(self, input_ids: Tensor) -> list[int]:
        last = torch.tensor([input_ids.shape[1] - 1], device=input_ids.device)
        (future,) = self.future_logits(input_ids, last)
        own = self.model(input_ids).logits[0, -1:]  # the token before those that are predicted
        return torch.cat([own, future[0].to(own)]).argmax(-1).tolist()
