"""Base class of drafters whose draft tokens form trees of predictions of future tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_spec.adapters.module import Adapter
from hf_spec.core.host_tree import HostTree
from hf_spec.core.memory import recall
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.transfer import to_device
from hf_spec.core.tree import Tree
from hf_spec.core.tree_states import TreeStates
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.drafting.calibration import Calibration
from hf_spec.drafting.draft_vocabulary import DraftVocabulary
from hf_spec.drafting.drafter import MODULES
from hf_spec.drafting.grow import grow
from hf_spec.drafting.growth import GrowingDrafter
from hf_spec.drafting.markov_head import ConditionalHead, MarkovHead
from hf_spec.drafting.options import ADAPTIVE, AUTO, CHAIN, fixed_size
from hf_spec.drafting.predictions import Predictions, levels
from hf_spec.drafting.state import DecodeState
from hf_spec.drafting.static_trees import check_states, drafted_depth, static_tree
from hf_spec.model.hidden_states import model_logits, output_logits, shapes_logits
from hf_spec.model.programs import DraftProgram

#: Predictions of finished sequences that are computed at once; each is a full vocabulary long.
AT_ONCE = 384
#: Number of draft tokens grown for the policy to choose from: mostly, and after a step that has
#: taken so many.
FEWEST, MOST = 15, 63
#: Combinations of the rows' states whose tensors are cached.
KEPT_STEPS = 256


def chain_tree(_: Any, depth: int) -> TokenTree:
    """The likeliest token of each distance."""
    return TokenTree.chain(depth)


class TreeDrafter(GrowingDrafter):
    """A drafter that says how far it predicts, whether that takes probes, and what it predicts.

    Args:
        adapter: the adapter that drafts; it may have a Markov head and a vocabulary.
        distances: number of future tokens that it predicts.

    Attributes:
        static: the tree of each state, that is, for each number of predicted tokens; None for trees
            that grow by the step's probabilities.
        per_distance: probes per distance; 0 if predictions take no step tokens, so that every step
            has all of them.
        vocabulary: the tokens that are predicted; None for all.
        make_predictions: class of its predictions, with the arguments of :class:`Predictions`.
        hidden: what :attr:`reads` asks for; None while it is unknown.
        num_predicted: distances that each row has predictions for; a tensor ``(batch,)`` if the
            host does not know.
    """

    trees = {CHAIN: chain_tree}
    unused = ()
    runs = MODULES
    per_distance: int = 0
    held: ClassVar[Sequence[str]] = ("markov_head", "vocabulary")
    make_predictions: Callable[..., Predictions] = Predictions

    def __init__(self, model: Any, options: Any, adapter: Adapter, distances: int):
        super().__init__(model, options)
        self.distances, weights = drafted_depth(options, distances), adapter.tensors()
        self.static = self.static_states(adapter)
        if self.static is not None:
            self.distances = self.static.max_probes
        self.policy_chooses = self.static is None and options.num_draft_tokens == AUTO
        self._key = Calibration, adapter.config.type_name, adapter.name, self.distances
        self._most = FEWEST
        self.markov_head: ConditionalHead | None = MarkovHead.of(weights, model)
        self.vocabulary = DraftVocabulary.of(weights, model)
        self._steps: dict[Hashable, tuple[list[TokenTree], Tree]] = {}
        self.hidden: Tensor | None = None
        self.num_predicted: Any = ()

    @property
    def token_ids(self) -> Tensor | None:
        """``(tokens,)`` int64 ids that it predicts, ascending; None for all."""
        return None if self.vocabulary is None else self.vocabulary.tokens

    @property
    def weighs(self) -> bool:
        """Whether its trees use probabilities; otherwise only the order of tokens."""
        return self.static is None

    def static_states(self, adapter: Adapter) -> TreeStates | None:
        """:attr:`static`, of at most :attr:`distances`.

        Raises:
            ValueError: if trees are deeper than this, or have a rank beyond the vocabulary.
        """
        if self.options.tree == ADAPTIVE:
            return None
        tree = static_tree(self.options, self.trees, self.distances)
        states = TreeStates.uniform(tree, self.distances, bool(self.per_distance))
        check_states(states, "tree", self.model, adapter, self.distances)
        return states

    def start(self, state: DecodeState) -> None:
        # Where nothing may depend on time, nor may drafts depend on earlier calls.
        if state.timed and self.policy_chooses and self.weighs:
            key = *self._key, state.do_sample  # sampled text is harder to predict
            self.calibration = recall(self.model, key, lambda: Calibration(self.distances))
        self.exactly = fixed_size(self.options.num_draft_tokens, state.timed)
        _ = self.token_ids  # rows are made before they replace the output embeddings
        self.num_predicted = [self.distances] * state.batch_size

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        self.hidden = hidden

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        if self.hidden is not None:
            self.hidden = self.hidden[to_device(rows, self.hidden.device)]
        self.num_predicted = [self.num_predicted[row] for row in rows]
        self._steps.clear()

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        if self._trees is not None:
            self._most = MOST if tree.num_tokens > FEWEST else FEWEST
        super().observe(state, tree, result)

    def program(self, state: DecodeState, tree: Tree, grows: bool) -> DraftProgram | None:
        if not grows:
            return None
        if self.static is not None:
            return self.grows(state, tree, 0, 0, kind=self.static)
        # Those of the step after this one, as :meth:`observe` will say.
        count = self.exactly or (MOST if tree.num_tokens > FEWEST else FEWEST)
        return self.grows(state, tree, count, self.distances)

    def propose(self, state: DecodeState) -> Tree:
        depth = max(min(max(self.num_predicted), state.max_depth), 0)
        if self.static is not None:
            return self.static_trees(state, self.static, depth)
        if depth:
            tree = self.grown(state, partial(self._grow, state, depth))
        else:  # the device has the roots already
            zeros = np.zeros((state.batch_size, 1), np.int64)
            tokens = np.array([row[-1:] for row in state.tokens])
            host = HostTree(zeros + 1.0, zeros, zeros, tokens)
            tree = Tree.roots(state.root).changed(
                host=host, ranked=True, whole=self.exactly is not None
            )
        if self.exactly is None or not self.per_distance:
            return tree
        assert tree.host is not None
        ahead = ((tree.host.probs > 0) * self.distances).tolist()  # padding has no probability
        return self.attach_probes(tree, ahead)

    def _grow(self, state: DecodeState, depth: int, trust: Sequence[float]) -> Tensor:
        count = self.exactly or self._most
        sampled = state.noise if self.weighs else None
        noise = None if sampled is None else sampled.ahead(depth, self.token_ids)
        return grow(self.levels(state.root, depth, count, noise), state.root, count, depth, trust)

    def static_trees(self, state: DecodeState, states: TreeStates, depth: int) -> Tree:
        """The trees of the rows' states, no deeper than this, with their tokens and probes."""
        trees = [states.states[min(n, states.max_probes)] for n in self.num_predicted]
        if state.grown is None:  # else tokens are of whole trees
            trees = [one.truncate(depth) for one in trees]
        key, device = tuple(trees), str(state.root.device)
        if key not in self._steps:
            if len(self._steps) == KEPT_STEPS:
                self._steps.pop(next(iter(self._steps)))
            alone = [one.tree for one in trees]
            empty = Tree.of_shapes(alone, device)
            self._steps[key] = alone, self.attach_probes(empty, [one.probes for one in trees])
        alone, empty = self._steps[key]
        if empty.num_tokens == 1:
            return empty.with_tokens(state.root[:, None])
        if state.grown is None:
            return empty.with_tokens(*self.draft_tokens(state, alone, empty.max_depth))
        drafted = state.grown.packed.chunk(4, dim=1)[2][:, 1 : empty.num_tokens]
        return empty.with_tokens(torch.cat([state.root[:, None], drafted.long()], 1))

    def packed_trees(self, root: Tensor, *args: Any) -> Tensor:
        states, known = self.static, self.num_predicted
        if states is None:
            return super().packed_trees(root, *args)
        if not isinstance(known, Tensor):
            known = torch.full_like(root, self.distances)
        trees = tuple(one.tree for one in states.states)
        deepest, index = max(tree.max_depth for tree in trees), known.clamp(max=states.max_probes)
        parents, depths, ranks = (part[index] for part in levels(trees, str(root.device)))
        shapes = parents, depths, ranks
        tokens = self.levels(root, deepest, 1 + states.max_rank).ranked(shapes, deepest, root)
        return Tree.packed(parents, depths, tokens, torch.zeros(tokens.shape, device=root.device))

    def draft_tokens(
        self, state: DecodeState, trees: list[TokenTree], depth: int
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens of all nodes, ``(batch, nodes)``, and their distributions if they are sampled.

        Args:
            trees: the tree of each row, no deeper than ``depth``, from 1, and the row's
                predictions.
        """
        width = 1 + max(max(tree.ranks) for tree in trees)
        predictions = self.levels(state.root, depth, width)
        shapes = levels(tuple(trees), str(predictions.device))
        return predictions.ranked(shapes, depth, state.root), None

    def levels(
        self, root: Tensor, depth: int, width: int, noise: Tensor | None = None
    ) -> Predictions:
        """Predictions from the hidden states of the previous step.

        Args:
            root: ``(batch,)`` tokens.
            depth: number of distances, at most those that are known.
            width: tokens to keep per distance.
            noise: see :class:`Predictions`, over :attr:`vocabulary`; for calls that sample.
        """
        states = self.states(self.hidden_after(root), depth)
        return self._predictions(states, root, self.num_predicted, width, noise)

    def hidden_after(self, root: Tensor) -> Tensor:
        """:attr:`hidden`, now that the root ``(batch,)`` is known."""
        assert self.hidden is not None
        return self.hidden

    def given_root(self, states: Tensor, root: Tensor) -> Tensor:
        """:meth:`states` given the root, where the adapter has a Markov head."""
        return states if self.markov_head is None else self.markov_head.given_root(states, root)

    def _predictions(
        self, states: Tensor, root: Tensor, known: Sequence[int] | Tensor, width: int,
        noise: Tensor | None = None,
    ) -> Predictions:  # fmt: skip
        states = self.given_root(states, root)
        made: Predictions = self.make_predictions(
            self.logits(states), width, known, self.markov_head, states, self.token_ids, noise
        )
        return made

    def given(self, states: Tensor, previous: Tensor) -> Tensor:
        """Logits ``(batch, depth, tokens)`` of all tokens of :attr:`vocabulary`, from
        :meth:`states`, if the token before each distance is known, ``(batch, depth)``; first the
        root."""
        states = self.given_root(states, previous[:, 0])
        logits = self.logits(states)
        if self.markov_head is None:
            return logits
        return self.markov_head.along(logits, previous, states)

    @abstractmethod
    def states(self, hidden: Tensor, depth: int) -> Tensor:
        """``(batch, depth, hidden)`` states that the distances are predicted from."""

    def logits(self, states: Tensor) -> Tensor:
        """Logits ``(batch, depth, tokens)`` of :meth:`states`, over :attr:`vocabulary` if it has
        one. The model's scaling and soft cap are applied only if :attr:`exact`."""
        if self.exact:
            return model_logits(self.model, states, head=self.vocabulary)
        return output_logits(self.model, states, self.vocabulary)

    @property
    def exact(self) -> bool:
        """Whether the magnitude of logits matters and the model scales or caps them."""
        return (self.weighs or self.markov_head is not None) and shapes_logits(self.model)

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
        """Predictions at tokens of a finished sequence, whose other tokens are the root and, with a
        Markov head, those before each distance.

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
            logits = self.given(states, before)
            done += len(states)
            yield logits if self.vocabulary is None else self.vocabulary.of_all(logits)

    def chain(self, input_ids: Tensor) -> list[int]:
        last = torch.tensor([input_ids.shape[1] - 1], device=input_ids.device)
        # The token before those that are predicted.
        own = self.model(input_ids).logits[:, -1:].argmax(-1).to(input_ids.device)
        (states,) = self.future_states(torch.cat([input_ids, own], dim=1), last)
        own = own[0].to(states.device)
        predictions = self._predictions(states, own, (self.distances,), 1)
        chain = levels((TokenTree.chain(self.distances),), str(predictions.device))
        return predictions.ranked(chain, self.distances, own)[0].tolist()
