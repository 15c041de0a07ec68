"""Drafters whose predictions of several distances grow trees."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from hf_spec.adapters.config import VOCABULARY
from hf_spec.adapters.layer import Adapter
from hf_spec.core.checks import check_count
from hf_spec.core.device import to_device
from hf_spec.core.memory import recall
from hf_spec.core.shapes import ProbeGroup, TokenTree, TreeStates
from hf_spec.core.tree import HostTree, Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.draft.drafter import MODULES, Drafter, MakeTree
from hf_spec.draft.grow import Calibration, Expands, grow
from hf_spec.draft.options import ADAPTIVE, AUTO, CHAIN, DraftOptions, fixed_size
from hf_spec.draft.state import DecodeState, Grown
from hf_spec.predict.draft_cache import TracedDraftCache
from hf_spec.predict.markov import (
    ConditionalHead,
    DraftVocabulary,
    Holds,
    MarkovHead,
    replace_in,
    tensors_in,
)
from hf_spec.predict.table import Predictions, levels
from hf_spec.target.graphs import DraftProgram
from hf_spec.target.hidden_states import Reads, model_logits, output_logits, shapes_logits
from hf_spec.target.sequences import probe_sequences
from hf_spec.target.target import ProbeInputs

# --------------------------------------------------------------------------------------------------
# Drafters of trees that grow by their draft tokens' own probabilities, and what these teach.


class GrowingDrafter(Drafter, Holds):
    """A drafter whose trees grow by probabilities; in a program, unless it is :attr:`outside`, as
    the host decides nothing meanwhile.

    Attributes:
        calibration: learned of such trees, and learning; None to take probabilities as they are.
        exactly: number of draft tokens, with which trees are forwarded whole; None if the policy
            chooses among them.
        cache: a KV cache of its own; None if it has none.
        per_row: names of attributes with what :meth:`advance` makes of each sequence from what is
            there: tensors ``(batch, ...)``, tuples of them, or None. They follow the batch, and a
            program takes them and gives them anew.
    """

    calibration: Calibration | None = None
    exactly: int | None = None
    cache: Any = None
    per_row: ClassVar[Sequence[str]] = ()
    _next_trust: Sequence[float] = ()  # :attr:`trust` of trees that a program grows
    #: This step's trees and their :attr:`trust`. Lookups may be merged into what is forwarded.
    _trees: tuple[HostTree, Sequence[float]] | None = None

    @property
    def trust(self) -> Sequence[float]:
        """Terms to add to log-probabilities, per distance."""
        return () if self.calibration is None else self.calibration.log_factors

    def grown(self, state: DecodeState, make: Callable[[Sequence[float]], Tensor]) -> Tree:
        """The step's trees: those that a program has grown, or new ones, which ``make`` packs
        (:func:`grow`), given :attr:`trust`."""
        grown, trust = state.grown, self._next_trust
        if grown is None:
            trust = self.trust
            grown = Grown(make(trust))
        tree, host = state.received(grown)
        self._trees = host, trust
        return tree if self.exactly is None else tree.changed(whole=True)

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        trees, self._trees = self._trees, None
        if trees is not None and self.calibration is not None:
            self.calibration.learn(*trees, result.tokens)

    def select(self, rows: Sequence[int]) -> None:
        if self.cache is not None:
            self.cache.select(rows)
        of_rows = tensors_in(self, self.per_row)
        replace_in(self, self.per_row, (one[to_device(rows, one.device)] for one in of_rows))

    def release(self) -> list[Tensor]:
        return [] if self.cache is None else self.cache.states.release()

    # -- programs ------------------------------------------------------------------------------

    @property
    def token_ids(self) -> Tensor | None:
        """``(tokens,)`` int64 ids that it predicts, ascending; None for all."""
        return None

    def levels(self, root: Tensor, depth: int, width: int, noise: Tensor | None) -> Expands:
        """What a tree grows from; not asked for if drafting is :attr:`outside`.

        Args:
            root: ``(batch,)`` tokens.
            depth: number of levels, from 1.
            width: largest number of children that a node may need.
            noise: ``(batch, depth, tokens)`` what draft tokens, of :attr:`token_ids`, will be
                sampled with, see :func:`as_sampled`; None if they are not sampled.
        """
        raise NotImplementedError

    def carried(self, tree: Tree) -> tuple[Sequence[Tensor], Sequence[Tensor], Hashable]:
        """What a program for a step with this tree works with: tensors in fixed memory, others, and
        a key of all else that matters besides shapes."""
        cache, of_rows = self.cache, tensors_in(self, self.per_row)
        if cache is None:
            return self.tensors(), of_rows, None
        return [*self.tensors(), *cache.tensors()], [cache.lengths, *of_rows], cache.layout

    def traced(self, tensors: Sequence[Tensor], in_place: bool) -> Self:
        """A copy that works with these tensors in place of those of :meth:`carried`; ``in_place``:
        see :meth:`TreeCache.traced_with`."""
        parts = iter(tensors)
        own = self.using(parts)
        if self.cache is not None:
            held = [next(parts) for _ in self.cache.tensors()]
            own.cache = TracedDraftCache(self.cache, held, next(parts), in_place)
        replace_in(own, self.per_row, parts)
        return own

    @property
    def num_kept(self) -> int:
        """Number of tensors that :meth:`kept` gives."""
        return len(self.kept())

    def kept(self) -> Sequence[Tensor]:
        """What :meth:`received` gets besides the trees."""
        return tensors_in(self, self.per_row)

    def received(self, found: Sequence[Tensor], result: StepResult) -> None:
        replace_in(self, self.per_row, found[1:])
        if self.cache is not None:
            assert result.host is not None
            self.cache.commit(result.host.counts)

    def packed_trees(
        self, root: Tensor, noise: Tensor | None, trust: Tensor, count: int, depth: int,
        expanded: int | None,
    ) -> Tensor:  # fmt: skip
        """What a program makes, packed; the arguments as of :meth:`levels` and :func:`grow`."""
        levels = self.levels(root, depth, count, noise)
        return grow(levels, root, count, depth, trust, expanded)

    def grows(
        self, state: DecodeState, tree: Tree, count: int, depth: int, expanded: int | None = None,
        kind: Hashable = None,
    ) -> DraftProgram:  # fmt: skip
        """See :meth:`program`.

        Args:
            count, depth, expanded: see :func:`grow`.
            kind: what :meth:`packed_trees` depends on besides these, and shapes.
        """
        graphs = state.target.graphs
        assert graphs is not None
        in_place = not graphs.compiles
        buffers, changing, key = self.carried(tree)
        self._next_trust = self.trust or [0.0] * max(depth, 1)

        def function(
            tensors: Sequence[Tensor], result: StepResult, hidden: Tensor | None,
            noise: Tensor | None,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            *own, trust = tensors
            drafting, root = self.traced(own, in_place), result.bonus
            drafting.advance(result, hidden)
            if noise is not None and drafting.token_ids is not None:
                noise = noise[..., drafting.token_ids]
            made = drafting.packed_trees(root, noise, trust, count, depth, expanded)
            return made, *drafting.kept()

        inputs = [*changing, to_device(self._next_trust, state.root.device)]
        key = "draft tree", key, count, depth, expanded, kind, len(buffers)
        return DraftProgram(key, buffers, inputs, function, depth, 1 + self.num_kept)


# -- Static trees: those that the option ``tree`` names, and whether they fit an adapter -----------


def drafted_depth(options: DraftOptions, distances: int) -> int:
    """Number of distances that are drafted, of those that the adapter predicts; a ValueError if
    ``max_depth`` is larger."""
    if options.max_depth is not None:
        why = "The adapter predicts no more tokens."
        check_count("max_depth", options.max_depth, 1, distances, why)
    return options.max_depth or distances


def static_tree(
    options: DraftOptions, trees: Mapping[str, MakeTree | None], depth: int
) -> TokenTree:
    """The static tree of the options, over predictions of ``depth`` future tokens; a ValueError if
    the given paths are deeper."""
    if isinstance(options.tree, str):
        make = trees[options.tree]
        assert make is not None
        return make(options, depth)
    tree = TokenTree.from_paths(options.tree)
    if tree.max_depth > depth:
        raise ValueError(
            f"tree has paths of {tree.max_depth} ranks, {depth} future tokens are drafted: give "
            "shorter paths."
        )
    return tree


def check_states(
    states: TreeStates, where: str, model: Any, adapter: Adapter, distances: int
) -> None:
    """Raise a ValueError if trees are too deep for the adapter or their ranks too large.

    Args:
        where: what names the trees, for the message.
        distances: number of future tokens that the adapter predicts.
    """
    if states.max_probes > distances:
        raise ValueError(
            f"{where} has states up to {states.max_probes} predicted tokens, the adapter drafts "
            f"{distances} tokens. Give another tree."
        )
    drafted = adapter.tensors().get(VOCABULARY)
    whose, tokens = "adapter predicts", 0 if drafted is None else len(drafted)
    if drafted is None:
        whose, tokens = "model has", model.config.get_text_config(decoder=True).vocab_size
    if states.max_rank >= tokens:
        raise ValueError(
            f"{where} has a draft token of rank {states.max_rank}: ranks count from 0, and the "
            f"{whose} {tokens} tokens. Give another tree."
        )


# -- Base class of drafters whose draft tokens form trees of predictions of future tokens ----------

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


# -- Base class of drafters with probes under the nodes of their trees -----------------------------


class ProbeDrafter(TreeDrafter):
    """Draft tokens are predicted by the probes under the last accepted node.

    A new one sets :attr:`probe_inputs`, with one embedding per probe of the group. Its probes are
    one per distance, each seeing those before it, unless it sets another :attr:`group`, of those
    of distance 1 first, :attr:`per_distance` for each.
    """

    reads = Reads("probes")
    per_distance = 1
    probe_inputs: ProbeInputs

    def __init__(self, model: Any, options: Any, adapter: Adapter, distances: int):
        super().__init__(model, options, adapter, distances)
        self.group = ProbeGroup.causal(self.distances)

    def start(self, state: DecodeState) -> None:
        super().start(state)
        self.num_predicted = [0] * state.batch_size

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        super().advance(result, hidden)
        if result.host is None:
            self.num_predicted = result.num_probes.div(self.per_distance, rounding_mode="floor")
        else:
            self.num_predicted = [n // self.per_distance for n in result.host.num_probes]

    def program(self, state: DecodeState, tree: Tree, grows: bool) -> DraftProgram | None:
        return super().program(state, tree, grows) if tree.num_probes else None

    def received(self, found: Sequence[Tensor], result: StepResult) -> None:
        super().received(found, result)
        assert result.host is not None
        self.num_predicted = [n // self.per_distance for n in result.host.num_probes]

    def states(self, hidden: Tensor, depth: int) -> Tensor:
        return self.distance_states(hidden[:, : depth * self.per_distance])

    def distance_states(self, hidden: Tensor) -> Tensor:
        """Combine final hidden states of probes, ``(batch, probes, hidden)``, into one state per
        distance, ``(batch, distances, hidden)``."""
        return hidden

    def attach_probes(self, tree: Tree, ahead: Sequence[Sequence[int]]) -> Tree:
        if not any(map(any, ahead)):
            return tree
        counts = [[n * self.per_distance for n in row] for row in ahead]
        return tree.attach_probes(self.group, counts)

    def future_states(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        for some in places.split(max(AT_ONCE // len(self.group), 1)):
            probed = probe_sequences(
                self.model, input_ids, None, some[None], self.group, self.probe_inputs
            )
            yield self.distance_states(probed.probe_hidden[0])
