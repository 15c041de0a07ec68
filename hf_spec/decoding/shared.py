"""Several calls of ``generate()`` that share their steps."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextvars import Context, copy_context
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from hf_spec.core.device import FollowsRows, bucket, follows, to_device
from hf_spec.core.stats import PHASES, SpecStats, Stopwatch
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.decoding.acceptance import Acceptance, Scorer
from hf_spec.decoding.cache_reuse import CacheOwner
from hf_spec.decoding.sequences import Recorded, Sequences, Snapshot
from hf_spec.decoding.step import Steps, details_of
from hf_spec.decoding.strategy import Strategy
from hf_spec.draft.options import samples_drafts
from hf_spec.modeling_patches.forwards import rope_ends
from hf_spec.modeling_patches.linear_attention import recurrent_rules
from hf_spec.modeling_patches.per_call import changing
from hf_spec.threads import memory

#: Statistics that a call has of the batch's steps while it had a share in them.
OF_THE_BATCH = (*(f"{name}_seconds" for name in PHASES), "num_draft_forwards", "num_plain_steps")
OF_STEPS = (*OF_THE_BATCH, "num_steps", "num_row_steps")

# -- What the loop asks of a call, asked of several ------------------------------------------------
#
# A call keeps its sequences with their criteria and streamer, its processors, its statistics and
# its errors. Cache, target, drafter, lookups and noise are of all rows: those of a call that
# arrives join them.


@dataclasses.dataclass(eq=False)
class Call:
    """A call whose prompt has run.

    Attributes:
        steps: its own, of which it takes no more.
        error: what its streamer, a criterion or a processor has raised, or why it ends early.
        context: in which these are called.
        begun: statistics of the batch when the call joined it.
        depends: what its cache's states depend on besides tokens, see :class:`TreeCache`.
    """

    steps: Steps
    error: BaseException | None = None
    context: Context = dataclasses.field(default_factory=copy_context)
    begun: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        cache = self.steps.state.cache
        self.depends = cache.inputs, cache.generated
        self.steps.owner.cache = None  # it will be in that of all

    @property
    def sequences(self) -> Sequences:
        """Its sequences."""
        return self.steps.owner.sequences

    @property
    def scorer(self) -> Scorer:
        """Its processors."""
        return self.steps.acceptance.scorer


class Place(NamedTuple):
    """A row of the batch: a call, and one of its sequences."""

    call: Call
    sequence: int


class Standing(NamedTuple):
    """A row of the batch that stands still, and makes its size one that recurs: that of a sequence
    which has left, or a copy of another one.

    Attributes:
        tokens: at which it stands.
    """

    tokens: list[int]


class CallSequences(FollowsRows):
    """The sequences of several calls, of which the loop asks what it asks of :class:`Sequences`.

    Attributes:
        places: of each row of the batch.
    """

    of_rows = ("places",)

    def __init__(self, call: Call):
        self.places: list[Place | Standing] = [Place(call, row) for row in call.sequences.rows]
        self._now: Snapshot | None = None
        self._calls: dict[Call, list[int]] | None = None  # until rows come or leave

    @property
    def rows(self) -> range:
        """The rows of the batch."""
        return range(len(self.places))

    @property
    def occupied(self) -> list[bool]:
        """Whether a row is a sequence."""
        return [isinstance(place, Place) for place in self.places]

    @property
    def calls(self) -> dict[Call, list[int]]:
        """The rows of each call."""
        if self._calls is None:
            self._calls = {}
            for row, place in enumerate(self.places):
                if isinstance(place, Place):
                    self._calls.setdefault(place.call, []).append(row)
        return self._calls

    @property
    def now(self) -> Snapshot:
        """See :attr:`Sequences.now`."""
        if self._now is None:
            rows: list[Any] = [
                None if isinstance(place, Place) else (place.tokens, False, 0)
                for place in self.places
            ]
            for call, own in self.calls.items():
                for row, (tokens, active, remaining) in zip(own, zip(*call.sequences.now)):
                    rows[row] = tokens, active and call.error is None, remaining
            self._now = Snapshot(*(list(values) for values in zip(*rows)))
        return self._now

    @property
    def eos(self) -> set[int]:
        """Tokens that end a sequence of any call."""
        return set().union(*(call.sequences.eos for call in self.calls))

    def append(self, result: HostResult, recorded: Sequence[Recorded] = ()) -> list[int]:
        """See :meth:`Sequences.append`. What a call's streamer or criteria raise is its error."""
        counts, self._now = [0] * len(self.places), None
        for call, rows in self.calls.items():
            if call.error is not None:
                continue
            own = HostResult(
                [result.path[row] for row in rows], [result.tokens[row] for row in rows],
                [result.num_probes[row] for row in rows],
            )  # fmt: skip
            shown = [
                tuple(one if one is None else one[to_device(rows, one.device)] for one in pair)
                for pair in recorded
            ]
            try:
                found = call.context.run(call.sequences.append, own, shown)
            except BaseException as error:  # also what ends a program: it is for that call's thread
                call.error = error
            else:
                for row, count in zip(rows, found):
                    counts[row] = count
        return counts

    def select(self, rows: Sequence[int]) -> None:
        copies = [row in rows[:index] for index, row in enumerate(rows)]
        standing = [Standing([*self.now.tokens[row]]) for row, copy in zip(rows, copies) if copy]
        super().select([row for row, copy in zip(rows, copies) if not copy])
        self.places += standing
        self._follow()

    def leave(self, rows: Iterable[int]) -> None:
        """Have sequences leave, of which these rows stand still from now on."""
        tokens = self.now.tokens
        for row in rows:
            self.places[row] = Standing([*tokens[row]])
        self._follow()

    def _follow(self) -> None:
        """Have the calls follow the rows."""
        self._now = self._calls = None
        for call in self.calls:
            call.sequences.select([call.sequences.rows.index(one) for one in self.of(call)])

    def of(self, call: Call) -> list[int]:
        """The sequences of a call, in the order of its rows."""
        places = (self.places[row] for row in self.calls[call])
        return [place.sequence for place in places if isinstance(place, Place)]

    def join(self, other: CallSequences) -> None:
        super().join(other)
        self._now = self._calls = None

    def show(self, tree: Tree, result: HostResult) -> None:
        """See :meth:`Sequences.show`. No streamer asks."""


class CallScorer:
    """The logits processors of several calls, of which the loop asks what it asks of
    :class:`Scorer`."""

    lockstep = False

    def __init__(self, sequences: CallSequences):
        self.sequences = sequences

    @property
    def key(self) -> Hashable:
        """See :attr:`Scorer.key`; None, too, if calls have others."""
        keys = {call.scorer.key for call in self.sequences.calls}
        return keys.pop() if len(keys) == 1 else None

    def context(self) -> list[Tensor]:
        """See :meth:`Scorer.context`."""
        calls = self.sequences.calls
        contexts = [call.scorer.context() for call in calls]
        if not any(contexts):
            return []
        count, width = len(self.sequences.places), max(ids.shape[1] for ids, _ in contexts)
        all_ids = contexts[0][0].new_zeros(count, width)
        all_spans = contexts[0][1].new_zeros(2, count)
        for rows, (ids, span) in zip(calls.values(), contexts):
            index = to_device(rows, ids.device)
            all_ids[index, : ids.shape[1]] = ids
            all_spans[:, index] = span
        return [all_ids, all_spans]

    def everywhere(self, tree: Tree, logits: Tensor, context: Sequence[Tensor] = ()) -> Tensor:
        """See :meth:`Scorer.everywhere`; for calls with one :attr:`key`."""
        call = next(iter(self.sequences.calls))
        return call.scorer.everywhere(tree, logits, context)

    @property
    def stateful(self) -> list[str]:
        """See :class:`Scorer`."""
        return [name for call in self.sequences.calls for name in call.scorer.stateful]

    @property
    def trivial(self) -> bool:
        """Whether scores are just the logits."""
        return all(call.scorer.trivial for call in self.sequences.calls)

    def __call__(
        self, logits: Tensor, suffix: Tensor, active: Sequence[bool], drafting: bool = False
    ) -> Tensor:
        """See :meth:`Scorer.__call__`. What a call's processors raise is its error."""

        def process(
            scorer: Scorer, logits: Tensor, suffix: Tensor, active: Sequence[bool]
        ) -> tuple[Tensor, list[int]]:
            return scorer(logits, suffix, active, drafting), []

        return self._by_call(process, logits, suffix, active)[0]

    def along(
        self, logits: Tensor, suffix: Tensor, active: Sequence[bool]
    ) -> tuple[Tensor, list[int]]:
        """See :meth:`Scorer.along`; likewise."""
        return self._by_call(Scorer.along, logits, suffix, active)

    def _by_call(
        self, process: Callable[..., tuple[Tensor, list[int]]], logits: Tensor, suffix: Tensor,
        active: Sequence[bool],
    ) -> tuple[Tensor, list[int]]:  # fmt: skip
        """What ``process`` makes with the scorer of each call of its rows. Those of calls whose
        processors are the same ones, and treat each row alone, are processed together: also of
        calls that have left by an error, as that may happen at any time."""
        groups: dict[Hashable, dict[Call, list[int]]] = {}
        for call, rows in self.sequences.calls.items():
            if not call.scorer.trivial:
                alike = call.scorer.key if call.scorer.rowwise else None
                groups.setdefault(alike or call, {})[call] = rows
        scores, raised, waiting = logits.float(), [], [*groups.values()]
        while waiting:
            group = waiting.pop()
            call, rows = next(iter(group)), [row for own in group.values() for row in own]
            going = [active[row] for row in rows]
            if not any(going) or (len(group) == 1 and call.error is not None):
                continue
            index = to_device(rows, logits.device)
            try:
                own, failed = call.context.run(
                    process, call.scorer, scores[index], suffix[index], going
                )
                scores = fitted(scores, own.shape[1])
                own = fitted(own, scores.shape[1])
                scores = scores.index_copy(0, index, own.to(scores))
            except BaseException as error:
                if len(group) > 1:  # whose it is
                    waiting += [{one: places} for one, places in group.items()]
                else:
                    call.error = error
            else:
                raised += [rows[place] for place in failed]
        return scores, raised


def fitted(scores: Tensor, width: int) -> Tensor:
    """Scores ``(batch, vocab)`` of at least ``width`` tokens; those that they leave out are
    impossible."""
    missing = width - scores.shape[1]
    return pad(scores, (0, missing), value=float("-inf")) if missing > 0 else scores


def refusal(
    strategy: Strategy, owner: CacheOwner, scorer: Scorer, several_ranks: bool = False
) -> str | None:
    """Why a call cannot share its steps; None if it can.

    Args:
        several_ranks: whether several processes decode together.
    """
    model, options, drafter = strategy.model, strategy.options, strategy.drafter
    parts = [one for one in (drafter, drafter.predictor) if one is not None and not follows(one)]
    reasons = {
        "several processes decode together": several_ranks,
        "hooks or changed code of the model may tell rows or tokens apart": (
            strategy.rows_stay or strategy.alone
        ),
        "its code runs with changes of another feature": changing(),
        "its cache is the caller's": owner.callers,
        "its cache is returned, with recurrent states": (
            owner.wanted and bool(recurrent_rules(model))
        ),
        f"the state of {', '.join(scorer.stateful)} is of several rows": scorer.lockstep,
        "earlier answers draft it (history)": options.history is not None,
        "acceptance='typical' depends on what is drafted": options.acceptance == "typical",
        "its draft tokens are sampled": samples_drafts(options, strategy.samples),
        "rotary frequencies follow the longest sequence": bool(rope_ends(model)),
        f"{', '.join(type(one).__name__ for one in parts)} defines select(), not join()": (
            bool(parts)
        ),
        "the acceptance of draft tokens is a benchmark's": Acceptance in memory(model),
        "its streamer looks at the steps": hasattr(owner.sequences.streamer, "see_step"),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def kind_of(steps: Steps) -> Hashable:
    """Calls of one kind may share steps."""
    strategy, drafter = steps.strategy, steps.strategy.drafter
    return (
        strategy.kind, strategy.samples, strategy.timed, strategy.lookup, steps.state.target.inputs,
        drafter.kind_of_forward, tuple(map(id, drafter.beside)), steps.acceptance.wants,
        strategy.graphs and strategy.graphs.kind,
    )  # fmt: skip


class SharedSteps(Steps):
    """Takes the steps of several calls of one kind.

    Where steps are recorded or compiled, the batch has a power of two of rows: sequences that have
    ended stand still until others take their rows, and a batch that grows is filled up with copies.

    Args:
        first: one of them.
    """

    replaces = True

    def __init__(self, first: Call):
        own, strategy = first.steps, first.steps.strategy
        own.settle()
        self.sequences = CallSequences(first)
        stats = SpecStats(strategy.method.name)
        scorer: Any = CallScorer(self.sequences)
        own.policy.stats = stats
        # Each call keeps its noise, to give back what it does not need.
        noise = copy.copy(own.state.noise)
        state = dataclasses.replace(
            own.state, sequences=self.sequences, process=scorer, stats=stats, noise=noise
        )
        acceptance = copy.copy(own.acceptance)
        acceptance.scorer, acceptance.noise = scorer, noise
        owner: Any = SimpleNamespace(sequences=self.sequences)
        watch = Stopwatch(stats, strategy.model.device)
        super().__init__(state, strategy, acceptance, own.policy, watch, owner, None, None)
        first.begun = self._counted()

    @property
    def num_sequences(self) -> int:
        """The sequences that have rows in the batch."""
        return sum(self.sequences.occupied)

    @property
    def calls(self) -> list[Call]:
        """The calls that have rows in the batch."""
        return list(self.sequences.calls)

    def admit(self, call: Call) -> None:
        """Have the rows of another call join, in place of those that stand still."""
        self.settle()
        call.steps.settle()
        sequences: Any = CallSequences(call)
        call.steps.state.sequences, call.begun = sequences, self._counted()
        taken, graphs = self.sequences.occupied, self.strategy.graphs
        if not all(taken):
            left = max(sum(taken), len(taken) - len(sequences.places))
            self.select(places_taken(taken, left))
        self.strategy.run(self.state.join, call.steps.state)
        self.policy.move(self.state.batch_size)
        if graphs is not None:
            graphs.spare(call.steps.state.drafter.release(), self.state.cache.states.nbytes)

    def _fit(self) -> None:
        """Have a number of rows that recurs."""
        taken = self.sequences.occupied
        size, left = len(taken), bucket(sum(taken))
        if left < size:
            self.select(places_taken(taken, left))
        elif left > size:
            self.select([*range(size), *[0] * (left - size)])

    def warm(self) -> None:
        self._fit()
        super().warm()

    def take(self) -> None:
        if self.strategy.graphs is not None:
            self._fit()
        for call in self.calls:
            call.steps.state.stats.num_steps += 1
        super().take()

    def release(self) -> list[Call]:
        """Have the rows of calls leave that have ended; returns these calls. Of the others, rows of
        finished sequences leave, too, unless the cache with them is returned."""
        calls, stays = self.sequences.calls, [*self.sequences.now.active]
        graphs = self.strategy.graphs
        for call, rows in calls.items():
            if call.steps.owner.wanted and any(stays[row] for row in rows):
                for row in rows:
                    stays[row] = True
        leave = [row for rows in calls.values() for row in rows if not stays[row]]
        if not leave:
            return []
        for call, rows in calls.items():
            if call.error is None and not any(stays[row] for row in rows):
                self._give_back(call, rows)
        if any(stays) and graphs is None:
            self.select(places_taken(stays))
        else:
            self.sequences.leave(leave)
        ended = [call for call in calls if call not in set(self.calls)]
        for call in ended:
            self._tell(call)
        if graphs is not None and not self.calls:
            graphs.spare([*self.state.cache.states.release(), *self.state.drafter.release()], 0)
        return ended

    def _give_back(self, call: Call, rows: Sequence[int]) -> None:
        """Give a call its cache, if it is returned."""
        owner = call.steps.owner
        if owner.wanted:
            in_order = sorted(zip(self.sequences.of(call), rows))
            owner.take_from(self.state.cache, [row for _, row in in_order])
            if owner.cache is not None:
                owner.cache.inputs, owner.cache.generated = call.depends

    @property
    def code(self) -> dict[str, int]:
        """How much code was made for the steps, and how often it ran; empty if there is none."""
        graphs = self.strategy.graphs
        return {} if graphs is None else {name: graphs.counts[name] for name in ("made", "runs")}

    def _counted(self) -> dict[str, Any]:
        """What is known of the batch's steps so far."""
        return {**vars(self.state.stats), **self.code}

    def _tell(self, call: Call) -> None:
        """Add to a call's statistics what is known of the batch's steps alone."""
        stats, batch = call.steps.state.stats, self._counted()
        since = {name: batch[name] - call.begun[name] for name in OF_STEPS}
        for name in OF_THE_BATCH:
            vars(stats)[name] += since[name]
        stats.other_seconds -= sum(since[f"{name}_seconds"] for name in PHASES)
        stats.details = details_of(self)
        if self.code:
            stats.details["compiled"] |= {
                name: batch[name] - call.begun[name] for name in self.code
            }
        stats.details["shared"] = {"rows": since["num_row_steps"] / max(since["num_steps"], 1)}

    def _record(self, row: int, *counts: int) -> None:
        super()._record(row, *counts)
        place = self.sequences.places[row]
        assert isinstance(place, Place)
        place.call.steps.state.stats.record(*counts)


def take_filled_up(steps: Steps, warms_up: bool) -> None:
    """Take all steps of a call alone, with a number of rows that recurs; ``warms_up``: see
    :meth:`Steps.warm`."""
    call = Call(steps)
    shared = SharedSteps(call)
    if warms_up:
        shared.warm()
    while shared.calls:
        shared.take()
        if call.error is not None:
            raise call.error
        shared.release()
    del steps.state.stats.details["shared"]


def places_taken(active: Sequence[bool], left: int | None = None) -> list[int]:
    """The rows that a batch keeps, ``left`` or just the active ones, in their new order: the last
    ones take the places of those that have finished, so that few move."""
    left = sum(active) if left is None else left
    rows, behind = list(range(left)), [row for row in range(left, len(active)) if active[row]]
    for row in range(left):
        if not active[row] and behind:
            rows[row] = behind.pop()
    return rows
