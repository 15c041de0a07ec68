"""Base class of drafters whose candidates form trees of predictions of future tokens.

It says how far a drafter predicts, whether that takes probes, and what it predicts at positions of
finished sequences.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hf_spec.core.probes import ProbeRows
from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.core.tree_states import TreeState, TreeStates
from hf_spec.drafting.draft_vocabulary import DraftVocabulary
from hf_spec.drafting.drafter import DecodingState, Draft, Drafter, emitted
from hf_spec.drafting.predictions import Predictions, Tempered
from hf_spec.drafting.root_correction import RootCorrection
from hf_spec.drafting.transition import Transition
from hf_spec.model.hidden_states import shapes_logits

#: Predictions of finished sequences that are computed at once; each is a full vocabulary long.
AT_ONCE = 384
#: Combinations of the rows' states whose tensors are cached.
KEPT_STEPS = 256

#: The tree of each row, the same as tensors, and the probes under the nodes.
StepRows = tuple[list[TokenTree], TreeBatch, ProbeRows | None]


class TreeSource:
    """Provides the trees of a call's steps; this class uses the same trees throughout.

    Args:
        states: the tree of each state, that is, for each number of predicted tokens.
    """

    #: Whether it uses probabilities; otherwise only the order of tokens.
    weighs: ClassVar[bool] = False

    def __init__(self, states: TreeStates):
        self._states = states

    @property
    def max_depth(self) -> int:
        """Largest number of distances that its trees use."""
        return self._states.max_probes

    def start(self, state: DecodingState) -> None:
        """Called before the call's first step, and after the batch has shrunk."""

    def propose(
        self, drafter: TreeDrafter, state: DecodingState, known: Sequence[int], depth: int
    ) -> Draft:
        """The draft of the current step.

        Args:
            drafter: computes predictions and attaches its probes.
            state: the decoding state.
            known: distances that each row has predictions for.
            depth: deepest candidate that any row can use.
        """
        states = self._states
        trees = [states.states[min(n, states.max_probes)].truncate(depth) for n in known]
        return drafter.stand(trees, state)

    def foresee(
        self, drafter: TreeDrafter, state: DecodingState, known: Sequence[int] | Tensor
    ) -> Tensor | None:
        """See :meth:`Drafter.foresee`.

        Args:
            drafter, state: see :meth:`propose`.
            known: distances that each row has predictions for; as a tensor, ``(batch,)``.
        """
        return None

    def observe(self, came: Sequence[Sequence[int]], taken: int) -> None:
        """Called after each step, plain ones included.

        Args:
            came: tokens that each row emitted.
            taken: number of candidates that were forwarded.
        """

    def warm(self, drafter: TreeDrafter, state: DecodingState) -> None:
        """Compile what steps with predictions run."""

    def details(self) -> dict[str, Any]:
        """For ``SpecStats.details``."""
        return {}


class TreeDrafter(Drafter):
    """A drafter with trees.

    Args:
        source: provides the trees of each step.
        weights: the adapter's parameters; its transition, root correction and vocabulary may be
            among them.

    Attributes:
        distances: number of tokens after the next one that it predicts.
        per_distance: probes per distance; 0 if predictions take no step tokens, so that every step
            has all of them.
        vocabulary: the tokens that are predicted; None for all.
    """

    runs_modules: ClassVar[bool] = True
    per_distance: int = 0

    def __init__(self, model: Any, options: Any, source: TreeSource, weights: Mapping[str, Tensor]):
        super().__init__(model, options)
        self.source = source
        self.transition = Transition.of(weights, model)
        self.correction = RootCorrection.of(weights, model)
        self.vocabulary = DraftVocabulary.of(weights, model)
        self._steps: dict[Hashable, StepRows] = {}

    def start(self, state: DecodingState) -> None:
        self.source.start(state)

    def select(self, state: DecodingState, rows: Sequence[int]) -> None:
        self._steps.clear()
        self.source.start(state)

    def observe(self, state: DecodingState, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        self.source.observe(emitted(state, nodes), draft.tree.num_nodes - 1)

    def warm(self, state: DecodingState) -> None:
        self.source.warm(self, state)

    def details(self) -> dict[str, Any]:
        return self.source.details()

    def propose(self, state: DecodingState) -> Draft:
        known = self.known(state)
        return self.source.propose(self, state, known, max(min(max(known), state.max_depth), 0))

    def foresee(self, state: DecodingState) -> Tensor | None:
        known = self.foreknown(state)
        return None if known is None else self.source.foresee(self, state, known)

    def stand(self, trees: Sequence[TreeState], state: DecodingState) -> Draft:
        """A draft of these trees and their probes.

        Args:
            trees: the tree of each row, no deeper than the row's predictions.
            state: the state with the hidden states of the previous step.
        """
        key, device = tuple(trees), str(state.root.device)
        if key not in self._steps:
            if len(self._steps) == KEPT_STEPS:
                self._steps.pop(next(iter(self._steps)))
            shapes = [one.tree for one in trees]
            batch = TreeBatch.stack(shapes, device)
            self._steps[key] = shapes, batch, self.hang(batch, [one.probes for one in trees])
        shapes, batch, probes = self._steps[key]
        tokens, distributions = state.root[:, None], None
        if batch.num_nodes > 1:
            tokens, distributions = self.candidates(state, shapes, batch.max_depth)
        return Draft(batch, tokens, distributions, probes)

    def candidates(
        self, state: DecodingState, trees: list[TokenTree], depth: int
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens of all nodes, ``(batch, nodes)``, and their distributions if they are sampled.

        Args:
            state: the state with the hidden states of the previous step.
            trees: the tree of each row, no deeper than ``depth``, from 1, and the row's
                predictions.
        """
        width = 1 + max(max(tree.ranks) for tree in trees)
        return self.predict(state, depth, width).ranked(trees, state.root), None

    @abstractmethod
    def known(self, state: DecodingState) -> tuple[int, ...]:
        """Distances that each row has predictions for."""

    @abstractmethod
    def foreknown(self, state: DecodingState) -> Sequence[int] | Tensor | None:
        """:meth:`known` before the host knows it; None if there are no predictions."""

    def predict(
        self, state: DecodingState, depth: int, width: int,
        known: Sequence[int] | Tensor | None = None, tempered: Tempered | None = None,
    ) -> Predictions:  # fmt: skip
        """Predictions from the hidden states of the previous step.

        Args:
            state: the decoding state.
            depth: number of distances, at most those that are known.
            width: tokens to keep per distance.
            known: distances that each row has predictions for; None for :meth:`known`.
            tempered: changes the logits, over :attr:`vocabulary`; for calls that sample.
        """
        known = self.known(state) if known is None else known
        return self.predictions(self.seen(state), state.root, known, depth, width, tempered)

    def predictions(
        self, seen: Tensor, root: Tensor, known: Sequence[int] | Tensor, depth: int, width: int,
        tempered: Tempered | None = None,
    ) -> Predictions:  # fmt: skip
        """:meth:`predict` as a function of tensors.

        Args:
            seen: see :meth:`seen`.
            root: ``(batch,)`` tokens.
            known: distances that each row has predictions for; as a tensor, ``(batch,)``.
        """
        states = self.corrected(self.states(seen, depth), root)
        return self._predictions(states, known, width, tempered)

    def corrected(self, states: Tensor, root: Tensor) -> Tensor:
        """States given the root, where the adapter has a root correction.

        Args:
            states: ``(batch, depth, hidden)``, see :meth:`states`.
            root: ``(batch,)`` tokens.
        """
        return states if self.correction is None else self.correction(states, root)

    def _predictions(
        self, states: Tensor, known: Sequence[int] | Tensor, width: int,
        tempered: Tempered | None = None,
    ) -> Predictions:  # fmt: skip
        ids = None if self.vocabulary is None else self.vocabulary.tokens
        return Predictions(
            self.logits(states), width, known, self.transition, states, ids, tempered
        )

    def given(self, seen: Tensor, previous: Tensor) -> Tensor:
        """Logits of all tokens of :attr:`vocabulary` if the tokens before are known.

        Args:
            seen: see :meth:`seen`.
            previous: ``(batch, depth)`` the token before each distance; first the root.

        Returns:
            ``(batch, depth, tokens)``
        """
        states = self.corrected(self.states(seen, previous.shape[1]), previous[:, 0])
        logits = self.logits(states)
        if self.transition is None:
            return logits
        if self.vocabulary is None:
            return logits + self.transition.logits(previous, states)
        return logits + self.vocabulary.linear(self.transition.change(previous, states))

    @abstractmethod
    def seen(self, state: DecodingState) -> Tensor:
        """Hidden states of the previous step; the first dimension is the batch."""

    @abstractmethod
    def states(self, seen: Tensor, depth: int) -> Tensor:
        """``(batch, depth, hidden)`` states that the distances are predicted from.

        Args:
            seen: see :meth:`seen`.
            depth: number of distances.
        """

    def made(self) -> dict[str, Tensor]:
        """Tensors derived from the model's for this call that :meth:`predictions` reads. They are
        inputs of compiled code."""
        parts = self.transition, self.correction, self.vocabulary
        made = [part.made() for part in parts if part is not None]
        return {name: tensor for part in made for name, tensor in part.items()}

    def using(self, made: Mapping[str, Tensor]) -> Self:
        """A copy that reads these tensors in place of :meth:`made`."""
        own = copy.copy(self)
        own.transition = None if self.transition is None else self.transition.using(made)
        own.correction = None if self.correction is None else self.correction.using(made)
        own.vocabulary = None if self.vocabulary is None else self.vocabulary.using(made)
        return own

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Logits ``(batch, depth, tokens)`` of :meth:`states`, over :attr:`vocabulary` if it has
        one. The model's scaling and soft cap are applied only if :attr:`exact`."""

    @property
    def exact(self) -> bool:
        """Whether the magnitude of logits matters and the model scales or caps them."""
        return (self.source.weighs or self.transition is not None) and shapes_logits(self.model)

    @abstractmethod
    def future_states(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        """:meth:`states` at tokens of a finished sequence.

        Args:
            input_ids: ``(1, seq)``, without padding.
            places: ``(places,)`` columns of ``input_ids``.

        Yields:
            ``(some, distances, hidden)`` for consecutive parts of ``places``, in order.
        """

    def future_logits(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        """Predictions at tokens of a finished sequence, as in decoding.

        The sequence's tokens are the root and, with a transition, what stands before each distance.

        Args:
            input_ids, places: see :meth:`future_states`.

        Yields:
            ``(some, distances, vocab)``; distance d, from 1, predicts the token 1 + d columns
            after the place.
        """
        done, ids = 0, input_ids[0]
        for states in self.future_states(input_ids, places):
            some = places[done : done + len(states), None].to(ids.device)
            at = some + torch.arange(1, self.distances + 1, device=ids.device)
            before = ids[at.clamp(max=len(ids) - 1)].to(states.device)
            states = self.corrected(states, before[:, 0])
            logits = self.logits(states)
            if self.vocabulary is not None:
                logits = self.vocabulary.of_all(logits)
            if self.transition is not None:
                logits = logits + self.transition.logits(before, states)
            done += len(states)
            yield logits

    def chain(self, input_ids: Tensor) -> list[int]:
        last = torch.tensor([input_ids.shape[1] - 1], device=input_ids.device)
        (states,) = self.future_states(input_ids, last)
        # The token before those that are predicted.
        own = self.model(input_ids).logits[0, -1:].argmax(-1).to(states.device)
        predictions = self._predictions(self.corrected(states, own), (self.distances,), 1)
        return predictions.ranked([TokenTree.chain(self.distances)], own)[0].tolist()
