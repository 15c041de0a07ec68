"""Decides how much to draft in each step: candidates, probes, pruning, or a plain step.

The value of a step is its expected number of tokens, 1 plus the sum of the candidates'
probabilities, minus what its time would otherwise yield: rho T, where rho is the recent number of
tokens per second (a semi-Markov decision process of average reward; Howard, "Dynamic Programming
and Markov Processes", 1960, chapter 7). The policy takes the step of the largest value; a plain
step is one of the choices.

If predictions come from probes, a step that ends at a node without probes leaves the next step
without predictions. Predictions are worth h tokens: the difference between the values of a step
with and without them, learned while decoding. A probe group under a node is thus worth h times the
probability that the step ends there. This is PPD's dynamic sparse tree (section 5.4), decided in
every step.

This module knows probabilities, step tokens and seconds, but no models. docs/inside/policy.md has
the measurements.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_spec.core.memory import locked
from hf_spec.core.stats import SpecStats
from hf_spec.core.tree import Tree
from hf_spec.drafting.drafter import Drafter
from hf_spec.policy.adaptive_trees import best_ends, ends
from hf_spec.policy.calibration import Array
from hf_spec.policy.learned import ALPHA, WARM_UP, Learned, Setting
from hf_spec.policy.step_times import CLIP, StepTimes

#: Numbers of candidates that a step may have. There are few, so that steps repeat, above all
#: compiled ones.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
#: The same if shapes are padded to powers of two.
FIXED = (1, 3, 7, 15, 31, 63)
#: Step tokens per batch row of the widest step in that case.
WIDEST = 64
#: Steps after which both are tried again, in case larger steps only once seemed expensive.
AFRESH = 64
#: Least duration of a step; clocks may be coarse.
TICK = 1e-9
#: Number of recent decisions kept for reports.
HISTORY = 128


@dataclass(frozen=True)
class Plan:
    """The plan of a step.

    Attributes:
        candidates: number of the tree's likeliest candidates to take.
        probed: number of nodes with probes.
        promised: expected number of emitted tokens of all rows; 0 if unknown.
    """

    candidates: int = 0
    probed: int = 0
    promised: float = 0.0


def explore(setting: Setting) -> None:
    """Have the next drafting steps of a setting try every size, for their times."""
    setting.tries.extend([(size, max(size // 4, 1)) for size in SIZES] * (WARM_UP + 1))


class StepPolicy:
    """Decides for one call, with what earlier calls of the model have learned.

    Args:
        stats: the call's statistics; counts the plain steps that it chooses.
        learned: what was learned about the strategy on the model; updated.
        setting: batch size, context length and device.
        enabled: if False, every step drafts.
        width: number of step tokens of a forward with given numbers of nodes and probes; more than
            their sum if shapes are padded.

    Attributes:
        lookups_only: whether drafting steps use only look-ups, as everything else is paused.
        prunes: whether the step prunes unlikely draft tokens.
    """

    def __init__(
        self, stats: SpecStats, learned: Learned, setting: tuple[int, int, str],
        enabled: bool = True, width: Callable[[int, int], int] = operator.add,
    ):  # fmt: skip
        self.stats = stats
        self.learned = learned
        self.enabled = enabled
        self.width = width
        self._padded = width(3, 0) > 3
        self.setting = learned.setting(setting)
        self._key = setting
        self._plan: Plan | None = None
        self._live = 1
        self._before = 0.0, 0  # seconds of drafting, and forwards
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._taken: Counter[tuple[int, int]] = Counter()
        self.lookups_only = self.prunes = False
        if enabled:
            learned.guard.begin()
            learned.lookups.begin()

    # -- before a step -----------------------------------------------------------------------

    @locked
    def drafts(self, looks_up: bool = False) -> bool:
        """Whether the step that begins now drafts.

        Args:
            looks_up: whether look-ups alone are possible (:attr:`lookups_only`).
        """
        self._plan, self.prunes = None, False
        self._before = self.stats.draft_seconds, self.stats.num_draft_forwards
        paused = self.enabled and self.learned.guard.paused
        self.lookups_only = paused and looks_up and not self.learned.lookups.paused
        plain = (paused and not self.lookups_only) or (self.enabled and self.setting.plain_is_due())
        self.stats.num_fallback_steps += plain
        return not plain

    @property
    def prefetches(self) -> bool:
        """Whether the next step may draft more than look-ups, as far as is known before this one
        is over."""
        return not (self.enabled and self.learned.guard.paused)

    @locked
    def draft_cost(self) -> float | None:
        """Tokens that one more drafting forward must bring to pay: what its time, and that of
        another candidate in the step, would otherwise yield. None while unknown, or if nothing may
        depend on time."""
        times, rate = self.setting.times, self.setting.rate.value
        seconds, line = times.drafted_seconds, times.line
        if not self.enabled or rate is None or seconds is None or line is None:
            return None
        return rate * (seconds + line[1])

    @locked
    def choose(
        self, tree: Tree, drafter: Drafter, active: Sequence[bool], limits: Sequence[int]
    ) -> Tree:
        """Reduce the trees to the draft tokens that the step takes, and attach probes.

        Args:
            tree: the proposed trees; unchanged if they are to be forwarded whole, their
                probabilities are unknown, or nothing may depend on time.
            drafter: attaches probes.
            active: unfinished rows.
            limits: depth of the deepest candidate that each row can use.
        """
        self._live = sum(active)
        host = tree.host
        if host is None or tree.whole or not self.enabled:
            self._plan = plan = Plan(tree.num_tokens - 1)
            self.prunes = self._prunes(drafter.prunes, plan, self._width_of(tree))
            return tree
        deep = np.where(active, limits, -1)[:, None]
        likely = np.where(host.depths <= deep, host.probs, 0.0)
        group = 0 if self.lookups_only else drafter.num_probes
        self._plan = plan = self._best(likely, host.parents, group, drafter.prunes)
        width = self.width(1 + plan.candidates, plan.probed * group)
        self.prunes = self._prunes(drafter.prunes, plan, width)
        tree = tree.likeliest(plan.candidates)
        if not plan.probed:
            return tree
        nodes = tree.num_tokens
        ends = best_ends(likely[:, :nodes], host.parents[:, :nodes], plan.probed)
        return drafter.attach_probes(tree, (ends * drafter.distances).tolist())

    @locked
    def count(self, chances: Sequence[float], live: int) -> int:
        """How many candidates the step takes if the candidates of all rows are packed together.

        Args:
            chances: probabilities of the candidates of all rows, likeliest first.
            live: number of unfinished rows.
        """
        self._live = live
        likely = np.array([[1.0, *chances]])
        self._plan = self._best(likely, np.zeros_like(likely), 0, False)
        return self._plan.candidates

    def _best(self, likely: Array, parents: Array, group: int, prunes: bool | None) -> Plan:
        """The plan of the largest value.

        Args:
            likely: ``(batch, nodes)`` probability of each path, likeliest first.
            parents: ``(batch, nodes)``
            group: probes under a node that has them.
            prunes: whether the step prunes; None if this is decided later.
        """
        setting = self.setting
        times = setting.pruned if prunes else setting.times
        plain = setting.times.plain_seconds()
        sums: list[float] = likely.sum(0).tolist()
        sums[0] = float(self._live)
        while len(sums) > 1 and sums[-1] <= 0:
            sums.pop()
        most, line = len(sums) - 1, times.line
        if not most:
            looks = group and setting.looks(self.width(1, group), self.learned.worth * self._live)
            return Plan(0, int(looks), float(self._live))
        setting.settled += 1
        if setting.settled > AFRESH or line is None and not setting.tries:
            setting.tries.extend(self.learned.first_sizes(self._key[0])[:2])
        if setting.tries:
            setting.settled = 0
            candidates, probed = setting.tries.popleft()
            candidates = min(candidates - self._padded, most)
            if self._padded or not group:
                probed = self._counts(candidates, group)[0]
            probed = min(probed, candidates + 1)
            return Plan(candidates, probed, sum(sums[: candidates + 1]))
        assert line is not None
        rate = setting.rate.value or self._live / max(plain or line[0], TICK)
        worth = self.learned.worth
        curve = times.curve(self.width(1 + most, (1 + most) * group))
        costs = [rate * seconds for seconds in curve]  # tokens that the time would yield
        value, candidates, probed, promised = -np.inf, 0, 0, 0.0
        sizes = [size for size in SIZES if size < most] + [most]
        if self._padded:
            sizes = [size for size in FIXED if size < most] + [min(most, FIXED[-1])]
        for size in sizes:
            expected, held = sum(sums[: size + 1]), [0.0]
            if group:
                gains = np.sort(ends(likely[:, : size + 1], parents), axis=1)[:, ::-1].sum(0)
                held += gains.cumsum().tolist()
            found = max(
                (expected + worth * held[n] - costs[self.width(1 + size, n * group)], n)
                for n in self._counts(size, group)
            )
            if found[0] > value:
                (value, probed), candidates, promised = found, size, expected
        without = -np.inf if plain is None else self._live - rate * plain
        if group:
            look = self._live * (1 + worth) - costs[self.width(1, group)]
            self.learned.worth += ALPHA * ((max(value, without) - look) / self._live - worth)
            self.learned.worth = min(max(self.learned.worth, 0.0), float(likely.shape[1]))
        if value < without:
            self.stats.num_fallback_steps += 1
            return Plan(promised=float(self._live))
        return Plan(candidates, probed, promised)

    def shapes(self, group: int, looks_up: bool = False) -> list[tuple[int, int]]:
        """Nodes, and nodes with probes, of all steps that may be chosen if shapes are padded.

        Args:
            group: probes under a node that has them.
            looks_up: whether there are look-ups, which may also be drafted alone.
        """
        found = [(1, 0), *([(1, 1)] if group else [])]
        for size in FIXED:
            counts = self._counts(size, group) + ([0] if group and looks_up else [])
            found += [(1 + size, count) for count in counts]
        return found

    def _counts(self, size: int, group: int) -> list[int]:
        """Numbers of nodes with probes to choose from, for a step with ``size`` candidates."""
        if not group:
            return [0]
        if not self._padded:
            return [0, *(count for count in SIZES if count <= size), size + 1]
        # As many probes as nodes, or twice as many.
        nodes = self.width(1 + size, 0)
        counts = [min(max(n // group, 1), size + 1) for n in (nodes, 2 * nodes)]
        fit = [count for count in counts if self.width(1 + size, count * group) <= WIDEST]
        return sorted(set(fit)) or [0]

    def _prunes(self, wanted: bool | None, plan: Plan, tokens: int) -> bool:
        """Whether the step prunes unlikely candidates; if ``wanted`` is None, whether that pays."""
        if wanted is not None or not plan.candidates:
            return bool(wanted and plan.candidates)
        drafted = plan.promised - self._live if plan.promised else self._live
        return self.setting.prunes(tokens, drafted)

    # -- after a step ------------------------------------------------------------------------

    @locked
    def observe(self, tree: Tree, emitted: Sequence[int], seconds: float) -> None:
        """Learn from a finished step.

        Args:
            tree: what was forwarded.
            emitted: tokens per batch row; 0 for a row that was already finished.
            seconds: duration of the step.
        """
        live = [count for count in emitted if count]
        self.note(
            tree.num_tokens - 1, self._width_of(tree), sum(live), len(live), seconds, self.prunes
        )

    @locked
    def note(
        self, candidates: int, rows: int, tokens: int, live: int, seconds: float,
        pruned: bool = False,
    ) -> None:  # fmt: skip
        """:meth:`observe` in numbers.

        Args:
            candidates: candidates per batch row; of the whole batch if packed.
            rows: step tokens of the forward, counted alike.
            tokens: emitted tokens.
            live: rows that emitted tokens.
            seconds: duration of the step.
            pruned: whether unlikely candidates were pruned.
        """
        setting, plan = self.setting, self._plan
        drafting = self.stats.draft_seconds - self._before[0]
        forwards = self.stats.num_draft_forwards - self._before[1]
        times = setting.pruned if pruned else setting.times
        mostly = plan is not None and not self.lookups_only  # typical drafting
        expected = self._expected(times, rows, drafting)
        times.observe(rows, max(seconds - drafting, TICK), drafting if mostly else None, forwards)
        setting.times.pace = setting.pruned.pace = times.pace  # both share the machine's pace
        setting.rate.add(tokens, seconds)
        setting.wide = setting.wide + 1 if rows > 1 else 0
        self._taken[(candidates, rows)] += 1
        guard, lookups = self.learned.guard, self.learned.lookups
        if self.enabled and guard.paused:
            guard.refill()
            if plan is None and lookups.paused:
                lookups.refill()
        if plan is None:
            return
        if candidates:
            drafted = plan.promised - self._live if plan.promised else live
            setting.kept[pruned].add(tokens - live, drafted, ALPHA / 4)
        plain = setting.times.plain_seconds()
        self.history.append({
            "candidates": candidates, "step_tokens": rows, "pruned": pruned,
            "promised_tokens": plan.promised or None, "tokens": tokens,
            "promised_seconds": expected or seconds, "seconds": seconds, "batch_size": live,
        })  # fmt: skip
        # While nobody knows how long a step should take, it may be a stall or a warm-up.
        if self.enabled and plain and expected and live:
            # Nothing is cheaper than a plain step; if it seems so, the machine sped up.
            # Measured times: estimates drift apart if one kind of step pauses for long.
            account = lookups if self.lookups_only else guard
            account.book(tokens / live, max(min(seconds, CLIP * expected) / plain, 1.0))

    def _expected(self, times: StepTimes, rows: int, drafting: float) -> float | None:
        """Seconds that a step should take, by those before it; None while they do not tell."""
        if rows > 1 and times.line is not None:
            return times.seconds(rows)
        forward = self.setting.times.plain_seconds() if rows == 1 else times.mean(rows)
        return None if forward is None else forward + drafting

    def _width_of(self, tree: Tree) -> int:
        return self.width(tree.num_tokens, tree.num_probes)

    def move(self, setting: tuple[int, int, str]) -> None:
        """Switch to another setting, such as a smaller batch."""
        self._key = setting
        self.setting = self.learned.setting(setting)

    @locked
    def details(self) -> dict[str, Any]:
        """Entries for ``SpecStats.details``, as JSON types: the choices and their inputs."""
        times, line = self.setting.times, self.setting.times.line
        plain = times.plain_seconds()
        promised = sum(one["promised_tokens"] or 0.0 for one in self.history)
        came = sum(one["tokens"] for one in self.history if one["promised_tokens"])
        return {
            "policy": {
                "paused": self.enabled and self.learned.guard.paused,
                "batch_size": self._key[0],
                "plain_seconds": plain,
                "b0": None if line is None else line[0],
                "b1": None if line is None else line[1],
                "drafting_seconds": times.drafting_seconds,
                "drafted_seconds": times.drafted_seconds,
                "seconds": {str(rows): spent for rows, spent in times.means.items()},
                "prediction_worth": self.learned.worth,
                "came_per_promised": came / promised if promised else None,
                "median_time_error": times.median_error,
                "steps": [
                    {"candidates": n, "step_tokens": rows, "count": count}
                    for (n, rows), count in sorted(self._taken.items())
                ],
                "history": list(self.history),
            }
        }
