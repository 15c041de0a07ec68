"""The drafter of a call: state in, trees out, feedback."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_spec.core.device import FollowsRows, is_async, to_device
from hf_spec.core.pruning import Pruning
from hf_spec.core.shapes import HostTree, ProbeGroup, Row, TokenTree
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.draft.grow import GoesOn, grow, levels_of, ranked
from hf_spec.draft.learned import Array
from hf_spec.draft.options import ADAPTIVE, TREE_OPTIONS, DraftOptions
from hf_spec.draft.policy import amount, recurring_amount
from hf_spec.draft.predictor import DecodeState, Grown, MakeTree, Predictor
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.target.graphs import DraftProgram
from hf_spec.target.hidden_states import Predicted, Read, Reads
from hf_spec.target.target import ProbeInputs

#: What a step has committed, and what is read of it.
Outcome = tuple[StepResult, Read]
#: Combinations of the rows' static trees whose tensors are cached.
KEPT_STEPS = 256


class _Asked:
    """An attribute that a drafter asks its predictor for; one without has this value, or its own.

    Args:
        value: that of drafters that say nothing else.
    """

    def __init__(self, value: Any):
        self._value = value

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, drafter: Drafter | None, owner: type) -> Any:
        predictor = None if drafter is None else drafter.predictor
        return self._value if predictor is None else getattr(predictor, self._name)


def _asked(value: Any) -> Any:
    return _Asked(value)


class Drafter(FollowsRows, CandidateGenerator):
    """Proposes draft trees. One instance serves one ``generate()`` call.

    With a :class:`Predictor`, trees grow from its predictions, and nothing is left to define. One
    without declares the hidden states that it ``reads``, and defines :meth:`advance` if it reads
    any, :meth:`propose`, and :meth:`chain` for stock assisted decoding.

    Attributes that it shares with :class:`Predictor` (``reads``, ``trees``, ``unused``,
    ``can_sample``, ``policy_chooses``, ``runs``, ``probe_inputs``, ``group``, ``depth``,
    ``drafting``, ``beside``, ``outside``) are its predictor's; one without declares its own, of
    which ``depth`` is that of its probes.

    Args:
        predictor: what trees grow from.

    Raises:
        ValueError: the option ``tree`` asks for a static tree, and the predictor has none.

    Attributes:
        drafts: whether it ever drafts anything.
        pruning: how unlikely draft tokens are dropped in deeper layers, if some steps do so. Which
            ones depends on their tokens, so a pruned tree must not carry distributions.
        also: another predictor, whose candidates join the trees that grow; None if there is none.
    """

    reads: Reads = _asked(Reads())
    of_rows: ClassVar[Sequence[str]] = ("predictor", "also")
    trees: Mapping[str, MakeTree | None] = _asked({})
    unused: Sequence[str] = _asked(TREE_OPTIONS)
    drafts: ClassVar[bool] = True
    can_sample: bool = _asked(False)
    policy_chooses: bool = _asked(False)
    runs: str = _asked("")
    probe_inputs: ProbeInputs | None = _asked(None)
    group: ProbeGroup = _asked(ProbeGroup.causal(0))
    depth: int = _asked(0)
    drafting: Changes | None = _asked(None)
    beside: Sequence[nn.Module] = _asked(())
    outside: str | None = _asked(None)
    pruning: Pruning | None = None
    predictor: Predictor | None = None
    also: Predictor | None = None

    def __init__(
        self, model: PreTrainedModel, options: DraftOptions, predictor: Predictor | None = None
    ):
        if predictor is not None:
            _check_static(options, predictor)
        self.model, self.predictor = model, predictor
        self.options: Any = options  # of the method's own class
        self._last_tokens = 0  # nodes with tokens of the last step that drafted
        self._next_trust: Sequence[float] = ()  # of the trees that a program grows
        #: This step's trees and their trust. Lookups may be merged into what is forwarded.
        self._trees: tuple[HostTree, Sequence[float]] | None = None
        self._static: dict[Hashable, tuple[tuple[TokenTree, ...], Tree]] = {}

    def add(self, other: Predictor) -> None:
        """Let candidates of another predictor, which reads no hidden states, join the trees."""
        self.also = other
        self.reads = replace(self.reads, predicted=True)

    @property
    def kind_of_forward(self) -> Hashable:
        """What its forwards need besides a tree. Each kind is checked and compiled once."""
        inputs, predictor = self.probe_inputs, self.predictor
        probes = inputs and (len(inputs.embeddings), inputs.num_front, inputs.exits)
        return probes, self.reads, self.pruning and self.pruning.layer, predictor and predictor.kind

    def attach_probes(self, tree: Tree, ahead: Sequence[Sequence[int]]) -> Tree:
        """The step's trees with probes.

        Args:
            tree: the draft tree of each sequence.
            ahead: number of distances to predict after each node, per sequence.
        """
        return tree if self.predictor is None else self.predictor.attach_probes(tree, ahead)

    def start(self, state: DecodeState) -> None:
        """Called once, before the prompt's :meth:`advance`."""
        for one in self._predictors:
            one.start(state)

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        """Called when tokens have been committed, in the prompt, whose tokens are then the accepted
        nodes, or a step: once before the next step drafts, for the rows that are left then.

        Args:
            result: the committed nodes, and the token that follows each of them.
            hidden: what :attr:`reads` asks for: ``(batch, features)`` of the last node; or
                ``(batch, nodes, features)`` of the ``result.counts`` nodes, or of the last one's
                ``result.num_probes`` probes, with arbitrary values behind them. None if there is
                nothing to read. Rows of finished sequences are arbitrary.
        """
        if self.predictor is not None:
            self.predictor.advance(result, hidden)

    def step(self, state: DecodeState, outcome: Outcome | None, grows: bool) -> None:
        """The end of a step, or of the prompt: take in what was committed, and grow the next trees.

        Called as soon as the next step begins, so that what it is and which rows are left is known.
        :meth:`program` does the same within a recorded or compiled step.

        Args:
            state: the state after the step; :attr:`DecodeState.grown` is set.
            outcome: what was committed; None if a program has taken it in.
            grows: whether trees are wanted.
        """
        if outcome is not None:
            result, read = outcome
            self.advance(result, read.hidden)
            _learn(self._predictors, result, read)
        if self.predictor is not None:
            state.grown = self._grow(state, self.predictor) if grows else None

    def grown(self, state: DecodeState) -> Grown:
        """Trees for the step that follows the prompt, as a :meth:`program` would have grown them;
        the root alone where it could not."""
        predictor, root = self.predictor, state.root
        assert predictor is not None
        found = self._grow(state, predictor)
        if isinstance(found, Grown) and predictor.static is not None:  # cut to what is left
            shapes, _ = self._shapes(predictor, None, root.device)
            return Grown(_ranked(predictor, root, shapes))
        if isinstance(found, Grown):
            return found
        none = torch.zeros(len(root), 1, device=root.device)
        return Grown(Tree.packed(none - 1, none, root[:, None], none))

    def propose(self, state: DecodeState) -> Tree:
        """The draft trees of the step that begins; just the roots if there is nothing to draft.
        With a predictor, these are those that have grown."""
        predictor, grown = self.predictor, state.grown
        if predictor is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no predictor: give one, or define propose()."
            )
        assert grown is not None
        if isinstance(grown, Tree):
            return grown
        if predictor.static is not None:
            _, tree = self._shapes(predictor, grown.depth, state.root.device)
            drafted = grown.packed.chunk(4, dim=1)[2][:, 1 : tree.num_tokens]
            return tree.with_tokens(torch.cat([state.root[:, None], drafted.long()], 1))
        tree, host = state.received(grown)
        self._trees = host, grown.trust
        predictor.proposed(state.root)
        return self._whole(tree, predictor)

    def continued(self, state: DecodeState, known: Sequence[Row]) -> Sequence[Row]:
        """What is known to follow each sequence, such as forced tokens, and what follows that."""
        for one in self._predictors:
            known = one.continued(state, known)
        return known

    def program(self, state: DecodeState, tree: Tree, grows: bool) -> DraftProgram | None:
        """:meth:`step` as a function of tensors; None if there is nothing to do. Not asked for if
        drafting is :attr:`outside`.

        Args:
            state: the state before the step.
            tree: the step's trees.
            grows: whether trees of the next step are wanted.
        """
        predictor = self.predictor
        if predictor is None or not predictor.ready(tree, grows):
            return None
        count, depth = 0, 0
        if predictor.static is None:
            # Those of the step after this one.
            rows, cost = state.active, state.draft_cost
            count, depth, _ = recurring_amount(predictor, tree.num_tokens, rows, cost, grows)
            state.stats.num_draft_forwards += predictor.level_cost.forwards(depth)
        predictor.reserve(tree, depth)
        predictors = self._predictors
        buffers = [tensor for one in predictors for tensor in one.tensors()]
        changing = [tensor for one in predictors for tensor in one.changing()]
        self._next_trust = predictor.trust or [0.0] * max(depth, 1)

        def function(
            tensors: Sequence[Tensor], result: StepResult, read: Read, noise: Tensor | None
        ) -> tuple[Tensor, ...]:
            *given, trust = tensors
            fixed, rest = iter(given[: len(buffers)]), iter(given[len(buffers) :])
            every, root = [one.using(fixed, rest) for one in predictors], result.bonus
            own = every[0]
            own.advance(result, read.hidden)
            _learn(every, result, read)
            if own.static is None:
                both = _of_tokens(noise, own), noise
                packed = _likeliest(every, root, both, trust, count, depth)
            else:
                trees = tuple(one.tree for one in own.static.states)
                packed = _ranked(own, root, trees, _known(own, root))
            return packed, *(tensor for one in every for tensor in one.renewed())

        inputs = [*changing, to_device(self._next_trust, state.root.device)]
        layouts = tuple(one.layout for one in predictors)
        own_key = layouts, predictor.width, predictor.static, len(buffers)
        key = "draft tree", *own_key, count, depth
        return DraftProgram(key, buffers, inputs, function, depth, predictor.reads_cache)

    def received(
        self, state: DecodeState, found: Sequence[Tensor], numbers: Array | None,
        result: StepResult, grows: bool,
    ) -> None:  # fmt: skip
        """Called after a step with what its :meth:`program` has found, in place of :meth:`step`.

        Args:
            numbers: the first of these on the host; None if it is still to be transferred.
        """
        packed, *renewed = found
        rest = iter(renewed)
        for one in self._predictors:
            one.received(rest, result)
        state.grown = Grown(packed, numbers, self._next_trust) if grows else None

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        """Called after each step.

        Args:
            state: the state after the step.
            tree: what was forwarded; just the root in a plain step.
            result: what each sequence accepted, without what a stop cut off; nothing if it was
                finished before. Its paths are of what pruning left of the tree.
        """
        predictor, trees = self.predictor, self._trees
        if predictor is None:
            return
        if trees is not None:
            self._last_tokens, self._trees = tree.num_tokens, None
            if predictor.calibration is not None:
                predictor.calibration.learn(*trees, result.tokens)
        predictor.observe(state, tree, result)

    def select(self, rows: Sequence[int]) -> None:
        """Called between two steps when finished sequences have left the batch.

        A drafter that keeps state per sequence names it in ``of_rows``, or selects it here.

        Args:
            rows: batch row ``i`` is the former ``rows[i]``, in any order; see
                :class:`FollowsRows`.
        """
        self._static.clear()
        super().select(rows)

    def join(self, other: Self) -> None:
        """Called between two steps when the sequences of another call have joined the batch: they
        come last. One that selects state joins it here.

        Args:
            other: their drafter, with the same options; it is not used again.
        """
        self._static.clear()
        self._last_tokens = max(self._last_tokens, other._last_tokens)
        super().join(other)

    def complete(self, state: DecodeState) -> None:
        """Called before sequences of another call join these, or these join others: what was put
        off is to be done."""
        if self.predictor is not None:
            self.predictor.complete(state)

    def release(self) -> list[Tensor]:
        """The buffers that compiled code of later calls may use, once the call is over."""
        return [tensor for one in self._predictors for tensor in one.release()]

    def details(self) -> dict[str, Any]:
        """Entries for ``SpecStats.details``."""
        return {} if self.predictor is None else self.predictor.details()

    # -- trees -------------------------------------------------------------------------------

    @property
    def _predictors(self) -> list[Predictor]:
        return [one for one in (self.predictor, self.also) if one is not None]

    def _grow(self, state: DecodeState, predictor: Predictor) -> Grown | Tree:
        """The next trees, by what the host knows."""
        depth, root = max(min(predictor.reach, state.max_depth), 0), state.root
        chain = predictor.chosen(state, depth) if depth else None
        if predictor.static is not None:
            shapes, empty = self._shapes(predictor, depth, root.device)
            if empty.num_tokens == 1:
                return empty.with_tokens(root[:, None])
            if chain is not None:
                return empty.with_tokens(chain.tokens, chain.q)
            return Grown(_ranked(predictor, root, shapes), depth=depth)
        if chain is not None:
            return chain
        if not depth:
            return self._whole(_roots(state), predictor)
        predictor.catch_up(state)
        reads, rows, cost = not is_async(root.device), state.active, state.draft_cost
        count, depth, goes_on = amount(predictor, self._last_tokens, depth, rows, cost, reads)
        noise, trust = self._noise(state, predictor, depth), predictor.trust
        packed = _likeliest(self._predictors, root, noise, trust, count, depth, goes_on)
        state.stats.num_draft_forwards += predictor.forwards
        predictor.forwards = 0
        return Grown(packed, trust=trust)

    def _noise(
        self, state: DecodeState, predictor: Predictor, depth: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """What draft tokens so deep will be sampled with: the predictor's own, and all, if another
        one's join them."""
        if state.noise is None or not predictor.weighs or not depth:
            return None, None
        if self.also is None:
            return state.noise.ahead(depth, predictor.token_ids), None
        every = state.noise.ahead(depth)
        return _of_tokens(every, predictor), every

    def _whole(self, tree: Tree, predictor: Predictor) -> Tree:
        """Trees that have grown, with all probes if they are forwarded whole."""
        if predictor.exactly is None:
            return tree
        tree = tree.changed(whole=True)
        if not predictor.per_distance:
            return tree
        assert tree.host is not None
        ahead = ((tree.host.probs > 0) * self.depth).tolist()  # padding has no probability
        return self.attach_probes(tree, ahead)

    def _shapes(
        self, predictor: Predictor, depth: int | None, device: torch.device
    ) -> tuple[tuple[TokenTree, ...], Tree]:
        """The static trees of the rows' states, cut to a depth, and the same with probes and
        without tokens."""
        states = predictor.static
        assert states is not None
        trees = [states.states[min(n, states.max_probes)] for n in predictor.num_predicted]
        if depth is not None:
            trees = [one.truncate(depth) for one in trees]
        key = tuple(trees)
        if key not in self._static:
            if len(self._static) == KEPT_STEPS:
                self._static.pop(next(iter(self._static)))
            shapes = tuple(one.tree for one in trees)
            empty = Tree.of_shapes(shapes, device)
            self._static[key] = shapes, self.attach_probes(empty, [one.probes for one in trees])
        return self._static[key]

    # -- stock assisted decoding, at batch size 1 ----------------------------------------------

    def chain(self, input_ids: Tensor) -> list[int]:
        """The likeliest tokens after a sequence, ``(1, seq)`` without padding."""
        if self.predictor is None:
            raise NotImplementedError(f"{type(self).__name__} does not define chain()")
        return self.predictor.chain(input_ids)

    @torch.no_grad()
    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """``(1, seq + candidates)`` ids ``(1, seq)`` followed by :meth:`chain`, and no logits."""
        chain = input_ids.new_tensor([self.chain(input_ids)])
        candidates: Any = torch.cat([input_ids, chain], dim=1)
        return candidates, None

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        """Stock decoding reports matches here."""


def _check_static(options: DraftOptions, predictor: Predictor) -> None:
    """Raise a ValueError if a static tree is asked for, and trees would grow all the same."""
    tree, known, kind = options.tree, predictor.trees, type(predictor).__name__
    own_way = isinstance(tree, str) and known.get(tree) is None  # adaptive ones are, too
    if predictor.static is None and not own_way:
        raise ValueError(
            f"tree={tree!r}: {kind} names such trees in `trees`, but its `static` is None, so that "
            f"they would grow by probabilities. Give tree={ADAPTIVE!r}, or define `static` there."
        )


def _learn(predictors: Sequence[Predictor], result: StepResult, read: Read) -> None:
    """See :meth:`Predictor.learn`."""
    if read.predicted is not None:
        found = Predicted.unpacked(read.predicted.to(result.counts.device))
        for one in predictors:
            one.learn(result, found)


def _of_tokens(noise: Tensor | None, predictor: Predictor) -> Tensor | None:
    """Of the noise of all tokens that of those that a predictor predicts."""
    if noise is None or predictor.token_ids is None:
        return noise
    return noise[..., predictor.token_ids]


def _likeliest(
    predictors: Sequence[Predictor], root: Tensor, noise: tuple[Tensor | None, Tensor | None],
    trust: Sequence[float] | Tensor, count: int, depth: int, goes_on: GoesOn | None = None,
) -> Tensor:  # fmt: skip
    """The likeliest trees, packed; the arguments as of :func:`grow` and :meth:`Predictor.levels`.
    The noise is that of the first one's tokens, and that of all for the others."""
    predictor, *others = predictors
    own, every = noise
    levels = predictor.levels(root, depth, count, own)
    for other in others:
        levels = other.joined(levels, every)
    packed = grow(levels, root, count, depth, trust, predictor.width, goes_on)
    predictor.finish()
    return packed


def _ranked(
    predictor: Predictor, root: Tensor, trees: tuple[TokenTree, ...], rows: Tensor | None = None
) -> Tensor:
    """Static trees, packed: that of each row, or of these ``rows (batch,)`` one by number."""
    shapes = levels_of(trees, str(root.device))
    parents, depths, ranks = shapes if rows is None else (part[rows] for part in shapes)
    deepest, width = max(tree.max_depth for tree in trees), 1 + max(max(t.ranks) for t in trees)
    levels = predictor.levels(root, deepest, width, None)
    tokens = ranked(levels, (parents, depths, ranks), deepest, root)
    return Tree.packed(parents, depths, tokens, torch.zeros(tokens.shape, device=root.device))


def _known(predictor: Predictor, root: Tensor) -> Tensor:
    """``(batch,)`` the state of each row, as recorded code knows it."""
    known, states = predictor.num_predicted, predictor.static
    assert states is not None
    if not isinstance(known, Tensor):
        known = torch.full_like(root, predictor.depth)
    return known.clamp(max=states.max_probes)


def _roots(state: DecodeState) -> Tree:
    """The roots alone, which the device has already."""
    zeros = np.zeros((state.batch_size, 1), np.int64)
    tokens = np.array([row[-1:] for row in state.tokens])
    host = HostTree(zeros + 1.0, zeros, zeros, tokens)
    return Tree.roots(state.root).changed(host=host, ranked=True)
