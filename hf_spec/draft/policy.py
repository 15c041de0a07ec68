"""How much is drafted. In the order of a step:

* :meth:`StepPolicy.draft_cost`: what a drafting forward must bring;
* :meth:`StepPolicy.wants_draft`: whether the step drafts, or is plain;
* :func:`amount`: how many draft tokens grow, and how deep, by what a level takes and brings;
* :meth:`StepPolicy.choose`: how many of them the step takes, and which nodes get probes;
* :meth:`StepPolicy.observe`: what the step has told of times and gains.

What is known of times, gains and probabilities is in :mod:`hf_spec.draft.learned`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

from hf_spec.core.checks import AUTO
from hf_spec.core.device import bucket
from hf_spec.core.stats import SpecStats
from hf_spec.core.tree import Tree
from hf_spec.draft.grow import Frontier, GoesOn
from hf_spec.draft.learned import ALPHA, CLIP, TICK, Array, Calibration, Learned, Setting, ratio
from hf_spec.threads import locked

# -- How far trees grow, before it is chosen what a step takes of them -----------------------------

#: Number of draft tokens of a step where it must not depend on time, and no option says it.
DEFAULT_DRAFT_TOKENS = 8
#: Depth of the deepest draft token by default, where levels take forwards.
DEPTH = 8
#: Steps without drafting until one drafts although that does not seem to pay, as the text changes.
AGAIN = 64
#: Number of draft tokens grown for the policy to choose from: mostly, and after a step that has
#: taken so many.
FEWEST, MOST = 15, 63
#: The same where levels take forwards.
GROWN = 32
#: Where levels take lookups, a tree ends at one whose paths are all less likely.
UNLIKELY = math.log(0.01)


class LevelCost(Enum):
    """What a level of a tree takes."""

    #: All is there before trees grow.
    NOTHING = "nothing"
    #: What is there is looked up for each node.
    LOOKUP = "lookup"
    #: The first level takes a forward, which makes all.
    FIRST = "first"
    #: Each level takes a forward.
    EACH = "each"

    @property
    def runs(self) -> bool:
        """Whether levels take forwards."""
        return self in (LevelCost.FIRST, LevelCost.EACH)

    def forwards(self, levels: int) -> int:
        """Forwards of so many levels."""
        return {LevelCost.FIRST: min(levels, 1), LevelCost.EACH: levels}.get(self, 0)


class Drafts(Protocol):
    """What of a predictor decides how much it drafts.

    Attributes:
        depth: tokens after the next one that it predicts.
        width: nodes of a level that go on; None for all.
        siblings: draft tokens of a level, where one node of each goes on.
        level_cost: what a level takes.
        exactly: number of draft tokens, if it is given.
        exit: what is learned of how deep they pay.
        goes_on: decides in a way of its own whether trees go on.
    """

    depth: int
    siblings: int
    level_cost: LevelCost
    exactly: int | None
    exit: DraftExit | None

    @property
    def width(self) -> int | None: ...

    @property
    def goes_on(self) -> GoesOn | None: ...


class Amount(NamedTuple):
    """How far the trees of a step grow.

    Attributes:
        tokens: number of draft tokens, at most.
        depth: depth of the deepest.
        goes_on: whether to draft the level after a frontier; None: always.
    """

    tokens: int
    depth: int
    goes_on: GoesOn | None = None


def amount(
    drafts: Drafts, last_tokens: int, depth: int, active: Sequence[bool], cost: float | None,
    reads: bool,
) -> Amount:  # fmt: skip
    """How far trees grow for the next step.

    Args:
        last_tokens: nodes with tokens of the last step that drafted.
        depth: of the deepest draft token that there may be.
        active: unfinished rows.
        cost: see :meth:`StepPolicy.draft_cost`.
        reads: whether the host may read probabilities while trees grow. It may not in programs, nor
            on a device that it runs ahead of: there, how deep trees are is decided before, by how
            often tokens at each depth were right.
    """
    tokens, rule, takes = _num_tokens(drafts, last_tokens), drafts.goes_on, drafts.level_cost
    if not depth:
        return Amount(tokens, 0)
    if rule is not None:
        return Amount(tokens, depth, ends_early(active, rule))
    if takes.runs and cost is not None:
        exit, each = drafts.exit, takes is LevelCost.EACH
        assert exit is not None
        if reads:
            rule = exit.rule(cost, each)
        else:
            depth = exit.num_levels(depth, sum(active), cost, each)
    elif takes is LevelCost.LOOKUP and reads:
        rule = is_likely
    return Amount(tokens, depth, None if rule is None else ends_early(active, rule))


def recurring_amount(
    drafts: Drafts, last_tokens: int, active: Sequence[bool], cost: float | None, grows: bool
) -> Amount:
    """:func:`amount` where programs grow the trees: of few depths, as code is made for each;
    ``grows``: whether trees are wanted."""
    depth = drafts.depth if grows else 0
    found = amount(drafts, last_tokens, depth, active, cost, reads=False)
    return found._replace(depth=min(bucket(found.depth), drafts.depth))


def _num_tokens(drafts: Drafts, last_tokens: int) -> int:
    """Number of draft tokens to grow after a step with so many nodes with tokens."""
    if drafts.width == 1:
        return drafts.siblings * drafts.depth
    if drafts.exactly is not None:
        return drafts.exactly
    if drafts.level_cost.runs:
        return GROWN
    return MOST if last_tokens > FEWEST else FEWEST


def fixed_size(num_draft_tokens: Any, timed: bool) -> int | None:
    """Draft tokens of an adaptive tree in every step, by that option; None if the policy chooses
    them, which it does not where nothing may depend on time."""
    if num_draft_tokens != AUTO:
        return int(num_draft_tokens)
    return None if timed else DEFAULT_DRAFT_TOKENS


def ends_early(active: Sequence[bool], goes_on: GoesOn) -> GoesOn:
    """A rule that gets the frontier of unfinished rows alone."""
    rows = [row for row, on in enumerate(active) if on]
    if len(rows) == len(active):
        return goes_on
    return lambda frontier: goes_on(frontier.of_rows(rows))


def is_likely(frontier: Frontier) -> bool:
    """Whether some path down to a level is likely enough to be drafted further, where levels cost
    about nothing."""
    return bool(frontier.log_probs.max() > UNLIKELY)


class DraftExit:
    """Decides when a drafter that runs a forward for each level of a tree stops: by what the next
    level brings and costs. One object serves all calls on a model, in all threads.

    Args:
        depth: depth of the deepest draft token.
    """

    def __init__(self, depth: int):
        self.calibration = Calibration(depth)
        self._idle = 0

    @locked
    def due(self) -> bool:
        """Whether this step should draft although it does not seem to pay, which is rare."""
        self._idle = (self._idle + 1) % AGAIN
        return not self._idle

    def is_worth(
        self, distance: int, paths: Sequence[float], cost: float, present: Sequence[float] = ()
    ) -> bool:
        """Whether to draft the tokens at a distance.

        Args:
            distance: the distance, from 1.
            paths: probability of each unfinished sequence that all tokens before are accepted.
            cost: tokens that the forward must bring.
            present: probability of each of them that a draft token at this distance is already in
                the tree and accepted.
        """
        rate = self.calibration.rate(distance)
        present = present or [0.0] * len(paths)
        return sum(max(path * rate - prob, 0.0) for path, prob in zip(paths, present)) > cost

    def goes_on(
        self, distance: int, paths: Sequence[float], cost: float, present: Sequence[float] = ()
    ) -> bool:
        """Whether this step drafts the tokens at a distance: those that are worth it, and sometimes
        the first ones although they are not; the arguments as of :meth:`is_worth`."""
        return self.is_worth(distance, paths, cost, present) or distance == 1 and self.due()

    def num_levels(self, most: int, rows: int, cost: float | None, per_level: bool = True) -> int:
        """How many levels pay, by how often draft tokens at each distance were right.

        Args:
            most: levels that there may be.
            rows: sequences that are not finished.
            cost: tokens that the forward of a level must bring; None while unknown, as if all pay.
            per_level: whether each level takes a forward, or the first one makes all.
        """
        found, path = most, 1.0
        for distance in range(1, most + 1):
            if cost is None:
                break
            if not self.is_worth(distance, [path] * rows, cost):
                found = distance - 1
                break
            path *= self.calibration.rate(distance)
        if found and not per_level:
            found = most
        return found or int(self.due())

    def rule(self, cost: float, per_level: bool = True) -> GoesOn:
        """Decides whether the level after a frontier pays, by its probabilities; the arguments as
        of :meth:`num_levels`."""

        def goes_on(frontier: Frontier) -> bool:
            if frontier.depth and not per_level:
                return True
            paths = frontier.log_probs.exp().sum(-1).tolist()
            return self.goes_on(frontier.depth + 1, paths, cost)

        return goes_on


# -- What a policy may choose in a step, and where probes are worth most. Knows only numbers -------

#: Numbers of draft tokens that a step may have. There are few, so that steps repeat: with the root,
#: they are powers of two, to which compiled steps are padded anyway.
TREE_SIZES = (0, 1, 3, 7, 15, 31, 63)
#: Nodes per row, on average, of a step in which the draft tokens of all rows compete.
AVERAGES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
#: Most step tokens per batch row of a step with probes.
WIDEST = 64


class Plan(NamedTuple):
    """The plan of a step.

    Attributes:
        drafted: number of the tree's likeliest draft tokens to take.
        probed: number of nodes with probes.
    """

    drafted: int = 0
    probed: int = 0


def step_size(tokens: int, probes: int) -> int:
    """The size of a step by which its time is known: nodes with tokens and probes, per row."""
    return bucket(tokens) + bucket(probes)


def plans(most: int, group: int) -> list[tuple[int, int]]:
    """Draft tokens, and nodes with probes, of the steps to choose from.

    Args:
        most: draft tokens that there are; the largest size takes them all.
        group: probes under a node that has them.
    """
    found = []
    for size in (*(size for size in TREE_SIZES[:-1] if size < most), min(most, TREE_SIZES[-1])):
        counts = {0}
        if group and not size:
            counts = {0, 1}
        elif group:  # under some of the nodes, or all; of those that are padded alike, the most
            some = [*(n for n in (1, 2, 4, 8, 16, 32) if n <= size), size + 1]
            alike = {bucket(n * group): n for n in some if step_size(1 + size, n * group) <= WIDEST}
            counts = set(alike.values()) or counts
        found += [(size, n) for n in sorted(counts)]
    return found


def shares(probs: Array, total: int) -> list[int]:
    """How many draft tokens each row takes, if the ``total`` likeliest of all rows are taken.

    Args:
        probs: ``(batch, nodes)`` probability of each path, likeliest first but for some that cannot
            be accepted, which have 0, as has padding.
    """
    rows, nodes = probs.shape
    order = np.argsort(-probs[:, 1:], axis=None, kind="stable")[:total]
    chosen = np.zeros((rows, nodes - 1), int)
    chosen.flat[order] = 1 + order % max(nodes - 1, 1)
    taken: list[int] = (chosen * (probs[:, 1:] > 0)).max(1, initial=0).tolist()
    return taken


def step_shapes(group: int, lookup: bool) -> list[tuple[int, int]]:
    """Nodes, and nodes with probes, of all steps that may be chosen where shapes recur.

    Args:
        group: probes under a node that has them.
        lookup: whether lookups may be drafted alone, without probes.
    """
    found = []
    for size in TREE_SIZES:
        counts = {n for drafted, n in plans(size, group) if drafted == size}
        found += [(1 + size, n) for n in sorted(counts | {0} if lookup else counts)]
    return found


def best_ends(probs: Array, parents: Array, count: int) -> Array:
    """``(batch, nodes)`` bool, the up to ``count`` nodes per row where a step is likeliest to end.

    Args:
        probs: ``(batch, nodes)`` probability of each path; 0 for padding, which is left out.
        parents: ``(batch, nodes)``
    """
    valid = probs > 0
    ended = np.where(valid, ends(probs, parents), -1.0)
    order = np.argsort(-ended, axis=1, kind="stable")[:, :count]
    chosen = np.zeros_like(valid)
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen & valid


def ends(probs: Array, parents: Array) -> Array:
    """``(batch, nodes)`` the probability that a step's accepted path ends at each node."""
    ended, nodes = probs.copy(), probs.shape[1]
    rows = np.arange(len(probs))[:, None]
    np.subtract.at(ended, (rows, parents[:, 1:nodes]), probs[:, 1:])
    return ended


# -- Decides how much to draft in each step: draft tokens, probes, or a plain step -----------------
#
# The value of a step is its expected number of tokens, 1 plus the sum of the draft tokens'
# probabilities, minus what its time would otherwise yield: rho T, where rho is the recent number of
# tokens per second (a semi-Markov decision process of average reward; Howard, "Dynamic Programming
# and Markov Processes", 1960, chapter 7). The policy takes the step of the largest value; a plain
# step is one of the choices.
#
# If predictions come from probes, a step that ends at a node without probes leaves the next step
# without predictions. Predictions are worth h tokens: the difference between the values of a step
# with and without them, learned while decoding. A probe group under a node is thus worth h times
# the probability that the step ends there. This is PPD's dynamic sparse tree (section 5.4), decided
# in every step.
#
# Whatever is expected, drafting stays within a budget (:class:`Budget`).
#
# This module knows probabilities, step tokens and seconds, but no models. docs/inside/policy.md has
# the measurements.


class StepPolicy:
    """Decides for one call, with what earlier calls of the model have learned.

    Args:
        stats: the call's statistics; counts the plain steps that it chooses.
        learned: what was learned about the strategy on the model; updated.
        setting: see :attr:`Learned.settings`.
        enabled: if False, every step drafts.
        recorded: whether steps are known to be recorded from the first one on.
    """

    def __init__(
        self, stats: SpecStats, learned: Learned, setting: tuple[int, int, str],
        enabled: bool = True, recorded: bool = False,
    ):  # fmt: skip
        self.stats, self.learned, self.enabled = stats, learned, enabled
        #: What a step takes says nothing of others where some are recorded and some are not: the
        #: next one is chosen by the times of its kind, which is that of the last one.
        self._key, self._recorded = setting, recorded or _recorded(setting) in learned.settings
        self.setting = self._own()
        self._paused = False
        self._drafts = False  # whether this step's trees were chosen
        self._competed = False  # whether rows have competed for them
        self._before = 0.0, 0  # seconds of drafting, and forwards
        self._steps: Counter[tuple[float, float]] = Counter()
        if enabled:
            self.begin()

    @locked
    def begin(self) -> None:
        """Called when another text begins."""
        self.learned.budget.begin()
        self._paused = self.enabled and self.learned.budget.paused

    def move(self, rows: int) -> None:
        """Go on with a smaller batch."""
        self._key = rows, *self._key[1:]
        self.setting = self._own()

    def _own(self) -> Setting:
        """What is known of steps of this kind."""
        return self.learned.setting(_recorded(self._key) if self._recorded else self._key)

    def _turn(self, recorded: bool, size: float, seconds: float) -> None:
        """Go by the times of steps that are recorded, or by those of eager ones, as this one is. It
        tells how much faster others will be that are not recorded yet."""
        before, self._recorded = self.setting.times, recorded
        self.setting, known = self._own(), before.seconds(size)
        if recorded and known:
            self.setting.times.guess(before, min(seconds / known, 1.0))
            self.setting.sizes_to_time.clear()

    # -- before a step -----------------------------------------------------------------------

    @locked
    def wants_draft(self, lookup: bool = False) -> bool:
        """Whether the step that begins now drafts: lookups alone (``lookup``: if there are any)
        while the strategy is :attr:`paused`."""
        self._before = self.stats.draft_seconds, self.stats.num_draft_forwards
        plain = self.enabled and self.setting.times_plain() or self.paused and not lookup
        self.stats.num_plain_steps += plain
        self._drafts = self._competed = False
        return not plain

    @property
    def paused(self) -> bool:
        """Whether the strategy's own draft tokens and probes have not paid of late. It stays the
        same in a step, whatever other calls learn meanwhile."""
        return self._paused

    @locked
    def draft_cost(self) -> float | None:
        """Tokens that one more drafting forward must bring to pay: what its time, and that of
        another draft token in the step, would otherwise yield. None while unknown, or if nothing
        may depend on time."""
        times, rate = self.setting.times, self.setting.tokens_per_second.value
        seconds = times.draft_forward_seconds
        if not self.enabled or rate is None or seconds is None or len(times.means) < 2:
            return None
        return rate * (seconds + times.slope)

    @locked
    def choose(
        self,
        tree: Tree,
        active: Sequence[bool],
        limits: Sequence[int],
        group: int = 0,
        competes: bool = False,
    ) -> tuple[Tree, Array | None]:
        """Reduce the trees to the draft tokens that the step takes.

        Args:
            tree: the proposed trees; unchanged if they are to be forwarded whole, their
                probabilities are unknown, or nothing may depend on time.
            active: unfinished rows.
            limits: depth of the deepest draft token that each row can use.
            group: number of probes under a node that has them.
            competes: whether the draft tokens of all rows compete for the step's places, where
                padding of trees that are smaller than others takes no time.

        Returns:
            The trees, and ``(batch, nodes)`` bool, the nodes that get probes; None if none does.
        """
        host, self._drafts = tree.host, True
        if host is None or not tree.ranked or tree.whole or not self.enabled:
            return tree, None
        deep = np.where(active, limits, -1)[:, None]
        probs = np.where(host.depths <= deep, host.probs, 0.0)
        group = 0 if self.paused else group
        self._competed = competes and tree.batch_size > 1 and not group
        if self._competed:
            return tree.likeliest(shares(probs, self._most_valuable(probs))), None
        plan = self._best(probs, host.parents, group)
        tree = tree.likeliest([plan.drafted] * len(probs))
        if not plan.probed:
            return tree, None
        nodes = tree.num_tokens
        return tree, best_ends(probs[:, :nodes], host.parents[:, :nodes], plan.probed)

    def _best(self, probs: Array, parents: Array, group: int) -> Plan:
        """The plan of the largest value; ``probs`` are of paths, likeliest first, ``group`` is the
        number of probes under a node that has them."""
        setting, learned, sums = self.setting, self.learned, probs.sum(0)
        live, most = float(sums[0]), int(np.flatnonzero(sums > 0).max(initial=0))
        expected: list[float] = sums.cumsum().tolist()
        choices = plans(most, group)
        costs = self._costs([step_size(1 + size, n * group) for size, n in choices], live)
        if costs is None:
            size = min(self._to_time(most), most)
            probed = next(n for drafted, n in reversed(choices) if drafted <= size)
            return Plan(size, probed)
        values = [
            expected[size] + learned.prediction_value * _at_probes(probs, parents, size, n) - cost
            for (size, n), cost in zip(choices, costs.tolist())
        ]
        best = int(np.argmax(values))
        if group and most:
            # Next to a step without predictions, which has them in the one after.
            change = (values[best] - values[choices.index((0, 1))]) / live
            value = learned.prediction_value + ALPHA * (change - learned.prediction_value)
            learned.prediction_value = min(max(value, 0.0), float(probs.shape[1]))
        size, n = choices[best]
        if group and not most and not n:
            n = int(setting.retries["probes"].due())
        elif n:
            setting.retries.pop("probes", None)
        self.stats.num_plain_steps += not best and most > 0
        return Plan(size, n)

    def _most_valuable(self, probs: Array) -> int:
        """Number of draft tokens of all rows in the step of the largest value; ``probs``: see
        :func:`shares`."""
        rows, likeliest = len(probs), np.sort(probs[:, 1:], axis=None)[::-1]
        live, most = float(probs[:, 0].sum()), int((likeliest > 0).sum())
        few = [int(average * rows) - rows for average in AVERAGES]
        choices = [*(total for total in few[:-1] if total < most), min(most, few[-1])]
        costs = self._costs([_average(rows + total, rows) for total in choices], live)
        if costs is None:
            return min(self._to_time(most) * rows, most)
        expected = live + np.concatenate([[0.0], likeliest.cumsum()])
        best = int(np.argmax(expected[choices] - costs))
        self.stats.num_plain_steps += not best and most > 0
        return choices[best]

    def _costs(self, sizes: Sequence[float], live: float) -> Array | None:
        """What the time of steps of these sizes would otherwise yield, in tokens; None if a size is
        to be timed. ``live``: number of unfinished rows."""
        setting = self.setting
        seconds = setting.times.curve(sizes)
        if setting.sizes_to_time or seconds is None:
            return None
        plain = setting.times.plain_seconds()
        return seconds * (setting.tokens_per_second.value or live / max(plain or 0.0, TICK))

    def _to_time(self, most: int) -> int:
        """Draft tokens of each row in a step that is to be timed, of which there are ``most``."""
        waiting = self.setting.sizes_to_time
        return waiting.popleft() if waiting and most else TREE_SIZES[2]

    # -- after a step ------------------------------------------------------------------------

    @locked
    def observe(
        self, tree: Tree, emitted: Sequence[int], seconds: float, recorded: bool = False
    ) -> None:
        """Learn from a finished step.

        Args:
            tree: what it forwarded.
            emitted: tokens per batch row, 0 for one that was already finished.
            seconds: what it took.
            recorded: whether it was recorded.
        """
        counts = [count for count in emitted if count]
        tokens, live = sum(counts), len(counts)
        drafted, size = self._size(tree)
        drafting = self.stats.draft_seconds - self._before[0]
        if recorded != self._recorded:
            self._turn(recorded, size, seconds - drafting)
        setting, times = self.setting, self.setting.times
        forwards = self.stats.num_draft_forwards - self._before[1]
        expected, usual = times.seconds(size), times.drafting_seconds
        if expected is not None:  # by the steps before it, if they tell
            expected += drafting if usual is None else min(drafting, CLIP * usual)
        typical = self._drafts and not self.paused
        times.observe(size, seconds - drafting, drafting if typical else None, forwards)
        setting.tokens_per_second.add(tokens, seconds)
        self._steps[(drafted, size)] += 1
        if size == 1:
            setting.retries["plain"].steps = 0
        plain, budget = times.plain_seconds(), self.learned.budget
        if not self.enabled or not live:
            return
        if not self._drafts or self._paused:
            budget.wait()
        elif plain:
            # Nothing is cheaper than a plain step. A stall says nothing, nor does a warm-up: what
            # differs from the expectation counts within bounds, alike in both directions, as noise
            # would otherwise look like a cost.
            usual = max(expected or plain, plain)
            budget.charge(tokens / live, ratio(seconds, usual) * usual / plain, live)
        self._paused = budget.paused

    def _size(self, tree: Tree) -> tuple[float, float]:
        """Draft tokens per row of a forward, and the size by which its time is known."""
        rows, nodes = tree.batch_size, tree.num_tokens
        if not self._competed:
            return nodes - 1, step_size(nodes, tree.num_probes)
        total = rows + sum(tree.row_sizes) if tree.is_ragged else rows * nodes
        size = _average(total, rows)
        return size - 1, size

    @locked
    def details(self) -> dict[str, Any]:
        """Entries for ``SpecStats.details``, as JSON types: the choices and their inputs."""
        times = self.setting.times
        return {
            "policy": {
                "paused": self.enabled and self.learned.budget.paused,
                "batch_size": self._key[0],
                "plain_seconds": times.plain_seconds(),
                "drafting_seconds": times.drafting_seconds,
                "draft_forward_seconds": times.draft_forward_seconds,
                "seconds": {str(rows): spent for rows, spent in times.means.items()},
                "prediction_value": self.learned.prediction_value,
                "steps": [
                    {"draft_tokens": n, "step_tokens": rows, "count": count}
                    for (n, rows), count in sorted(self._steps.items())
                ],
            }
        }


def _average(total: int, rows: int) -> float:
    """The least of :data:`AVERAGES` with so many nodes."""
    found = (average for average in AVERAGES if total <= average * rows)
    return next(found, AVERAGES[-1])


def _recorded(setting: tuple[int, int, str]) -> tuple[int, int, str]:
    """The key of the same setting where steps are recorded."""
    rows, context, device = setting
    return rows, context, f"{device}, recorded"


def _at_probes(probs: Array, parents: Array, size: int, count: int) -> float:
    """Rows of a step with so many draft tokens that are expected to end at one of its ``count``
    best nodes."""
    if not count:
        return 0.0
    return float(np.sort(ends(probs[:, : size + 1], parents), axis=1)[:, -count:].sum())
