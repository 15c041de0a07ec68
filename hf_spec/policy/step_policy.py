"""Decides how much to draft in each step: draft tokens, probes, or a plain step.

The value of a step is its expected number of tokens, 1 plus the sum of the draft tokens'
probabilities, minus what its time would otherwise yield: rho T, where rho is the recent number of
tokens per second (a semi-Markov decision process of average reward; Howard, "Dynamic Programming
and Markov Processes", 1960, chapter 7). The policy takes the step of the largest value; a plain
step is one of the choices.

If predictions come from probes, a step that ends at a node without probes leaves the next step
without predictions. Predictions are worth h tokens: the difference between the values of a step
with and without them, learned while decoding. A probe group under a node is thus worth h times the
probability that the step ends there. This is PPD's dynamic sparse tree (section 5.4), decided in
every step.

Whatever is expected, drafting stays within a budget (:mod:`hf_spec.policy.budget`).

This module knows probabilities, step tokens and seconds, but no models. docs/inside/policy.md has
the measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_spec.core.memory import locked
from hf_spec.core.stats import SpecStats
from hf_spec.core.tree import Tree
from hf_spec.drafting.calibration import Array
from hf_spec.drafting.drafter import Drafter
from hf_spec.policy.learned import ALPHA, Learned
from hf_spec.policy.plans import SIZES, Plan, best_ends, ends, plans, width
from hf_spec.policy.step_times import CLIP, TICK, ratio


class StepPolicy:
    """Decides for one call, with what earlier calls of the model have learned.

    Args:
        stats: the call's statistics; counts the plain steps that it chooses.
        learned: what was learned about the strategy on the model; updated.
        setting: see :attr:`Learned.settings`.
        enabled: if False, every step drafts.
    """

    def __init__(
        self, stats: SpecStats, learned: Learned, setting: tuple[int, int, str],
        enabled: bool = True,
    ):  # fmt: skip
        self.stats, self.learned, self.enabled = stats, learned, enabled
        self._key, self.setting = setting, learned.setting(setting)
        self._drafts = False  # whether this step's trees were chosen
        self._before = 0.0, 0  # seconds of drafting, and forwards
        self._steps: Counter[tuple[int, int]] = Counter()
        if enabled:
            self.begin()

    @locked
    def begin(self) -> None:
        """Called when another text begins."""
        self.learned.budget.begin()

    def move(self, rows: int) -> None:
        """Go on with a smaller batch."""
        self._key = rows, *self._key[1:]
        self.setting = self.learned.setting(self._key)

    # -- before a step -----------------------------------------------------------------------

    @locked
    def drafts(self, lookup: bool = False) -> bool:
        """Whether the step that begins now drafts: lookups alone (``lookup``: if there are any)
        while the strategy is :attr:`paused`."""
        self._before = self.stats.draft_seconds, self.stats.num_draft_forwards
        plain = self.enabled and self.setting.times_plain() or self.paused and not lookup
        self.stats.num_plain_steps += plain
        self._drafts = False
        return not plain

    @property
    def paused(self) -> bool:
        """Whether the strategy's own draft tokens and probes have not paid of late."""
        return self.enabled and self.learned.budget.paused

    @locked
    def draft_cost(self) -> float | None:
        """Tokens that one more drafting forward must bring to pay: what its time, and that of
        another draft token in the step, would otherwise yield. None while unknown, or if nothing
        may depend on time."""
        times, rate = self.setting.times, self.setting.rate.value
        seconds = times.drafted_seconds
        if not self.enabled or rate is None or seconds is None or len(times.means) < 2:
            return None
        return rate * (seconds + times.slope)

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
            limits: depth of the deepest draft token that each row can use.
        """
        host, self._drafts = tree.host, True
        if host is None or not tree.ranked or tree.whole or not self.enabled:
            return tree
        deep = np.where(active, limits, -1)[:, None]
        probs = np.where(host.depths <= deep, host.probs, 0.0)
        group = 0 if self.paused else len(drafter.group)
        plan = self._best(probs, host.parents, group)
        tree = tree.likeliest(plan.drafted)
        if not plan.probed:
            return tree
        nodes = tree.num_tokens
        probed = best_ends(probs[:, :nodes], host.parents[:, :nodes], plan.probed)
        return drafter.attach_probes(tree, (probed * drafter.distances).tolist())

    def _best(self, probs: Array, parents: Array, group: int) -> Plan:
        """The plan of the largest value; ``probs`` are of paths, likeliest first, ``group`` is the
        number of probes under a node that has them."""
        setting, learned, sums = self.setting, self.learned, probs.sum(0)
        live, most = float(sums[0]), int(np.flatnonzero(sums > 0).max(initial=0))
        expected: list[float] = sums.cumsum().tolist()
        choices = plans(most, group)
        costs = setting.times.curve([width(1 + size, n * group) for size, n in choices])
        if setting.sizes_to_time or costs is None:
            size = setting.sizes_to_time.popleft() if setting.sizes_to_time and most else SIZES[2]
            size = min(size, most)
            probed = next(n for drafted, n in reversed(choices) if drafted <= size)
            return Plan(size, probed)
        plain = setting.times.plain_seconds()
        # What the time of a step would otherwise yield, in tokens.
        costs *= setting.rate.value or live / max(plain or 0.0, TICK)
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

    # -- after a step ------------------------------------------------------------------------

    @locked
    def observe(self, tree: Tree, emitted: Sequence[int], seconds: float) -> None:
        """Learn from a finished step that forwarded a tree, and took so many seconds; ``emitted``
        are tokens per batch row, 0 for one that was already finished."""
        counts = [count for count in emitted if count]
        tokens, live = sum(counts), len(counts)
        drafted, size = tree.num_tokens - 1, width(tree.num_tokens, tree.num_probes)
        setting, times = self.setting, self.setting.times
        drafting = self.stats.draft_seconds - self._before[0]
        forwards = self.stats.num_draft_forwards - self._before[1]
        expected, usual = times.seconds(size), times.drafting_seconds
        if expected is not None:  # by the steps before it, if they tell
            expected += drafting if usual is None else min(drafting, CLIP * usual)
        typical = self._drafts and not self.paused
        times.observe(size, seconds - drafting, drafting if typical else None, forwards)
        setting.rate.add(tokens, seconds)
        self._steps[(drafted, size)] += 1
        if size == 1:
            setting.retries["plain"].steps = 0
        plain, budget = times.plain_seconds(), self.learned.budget
        if not self.enabled or not live:
            return
        if not self._drafts or budget.paused:
            budget.wait()
        elif plain:
            # Nothing is cheaper than a plain step. A stall says nothing, nor does a warm-up: what
            # differs from the expectation counts within bounds, alike in both directions, as noise
            # would otherwise look like a cost.
            usual = max(expected or plain, plain)
            budget.charge(tokens / live, ratio(seconds, usual) * usual / plain, live)

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
                "drafted_seconds": times.drafted_seconds,
                "seconds": {str(rows): spent for rows, spent in times.means.items()},
                "prediction_value": self.learned.prediction_value,
                "steps": [
                    {"draft_tokens": n, "step_tokens": rows, "count": count}
                    for (n, rows), count in sorted(self._steps.items())
                ],
            }
        }


def _at_probes(probs: Array, parents: Array, size: int, count: int) -> float:
    """Rows of a step with so many draft tokens that are expected to end at one of its ``count``
    best nodes."""
    if not count:
        return 0.0
    return float(np.sort(ends(probs[:, : size + 1], parents), axis=1)[:, -count:].sum())
