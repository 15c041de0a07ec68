"""Trees that are chosen while decoding: dynamic token tree generation (ProPD, section 4.2).

What a step of i rows takes is a line in i, fitted to the steps so far; how often predictions are
right is counted as the tokens come in. Of the trees of the likeliest paths the size of the largest
expected speed is taken. Knows shapes, counts and times; nothing of models.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hf_spec.core.tree import TokenTree
from hf_spec.policy.likely_paths import Array, RankPath, likeliest_paths
from hf_spec.policy.step_cost import StepCost

#: Most rows of a step, unless the user says.
MAX_ROWS = 64

# -- probabilities: 4.2.2
#: alpha of the hits. The first hits weigh more, as in a plain mean.
HIT_ALPHA = 1 / 128
#: Hits that the guess before the first one, and that accuracies measured before, stand for.
GUESSED, MEASURED = 16, 64
#: K, ranks that are told apart.
RANKS = 16
#: Rank of a token that is not known. Ranks from K on are misses.
UNKNOWN = -1

# -- sizes: 4.2.3
#: Steps until the tree is thought over again: at first, and doubled each time up to the last.
EVERY = (8, 32)
#: The same while no tree pays.
WAIT = 512
#: The tree is changed for a speed so much larger. Trees repeat, and so do their tensors.
GAIN = 0.005
#: From plain steps to a tree it takes so much more: what a line says of small trees is rough.
LEAVE = 0.05
#: Steps of each of two sizes at the start, and of another size before the tree is thought over.
WARM_UP, BOUT = 3, 3
#: Plain steps before the first choice, if there were none: the first is left out.
PLAIN = 2
#: Sizes beyond the largest known are tried step by step: up to so many times as large.
GROWTH = 2
#: Weight of the newest step in the mean speed of a tree.
SPEED_ALPHA = 1 / 32
#: Decisions that are remembered, for people.
HISTORY = 64


# ---------------------------------------------------------------------------------- probabilities


class HitRates:
    """P_i^k: how often the right token is among the k likeliest at distance i (section 4.2.2).

    Args:
        depth: distances.
        ranks: K.

    Attributes:
        cumulative: ``(depth, K)`` P, at [i - 1, k - 1].
        counts: ``(depth,)`` hits and misses that it stands for.
    """

    def __init__(self, depth: int, ranks: int = RANKS):
        # A guess after trained heads and probes: the first rank falls off with the distance, the
        # others hardly (docs/medusa.md).
        first = np.broadcast_to(0.55 * 0.85 ** np.arange(depth)[:, None], (depth, 1))
        others = np.broadcast_to(0.1 / np.arange(1, ranks), (depth, ranks - 1))
        guess = np.concatenate([first, others], axis=1)
        self.cumulative: Array = guess.cumsum(1)
        self.counts: Array = np.full(depth, GUESSED)

    @classmethod
    def measured(cls, accuracies: Array, depth: int, ranks: int = RANKS) -> HitRates:
        """From measured p, ``(distances, ranks)``; distances that it lacks are guessed."""
        rates = cls(depth, ranks)
        table = accuracies[:depth, :ranks]
        table = np.pad(table, [(0, 0), (0, ranks - table.shape[1])])
        rates.cumulative[: len(table)] = table.cumsum(1)
        rates.counts[: len(table)] = MEASURED
        return rates

    def observe(self, ranks: Array) -> None:
        """P <- (1 - alpha) P + alpha [the token is among the k likeliest], one after the other.

        Args:
            ranks: ``(n, depth)`` rank of the right token in each prediction, in order of time: from
                0, K for a miss, ``UNKNOWN`` where the token is not known.
        """
        depth, width = self.cumulative.shape
        for i in range(depth):
            known = ranks[ranks[:, i] != UNKNOWN, i]
            if not len(known):
                continue
            alpha = np.maximum(HIT_ALPHA, 1 / (self.counts[i] + 1 + np.arange(len(known))))
            kept = np.cumprod((1 - alpha)[::-1])[::-1]  # of what was known before each
            weights = alpha * np.append(kept[1:], 1.0)
            hits = known[:, None] <= np.arange(width)  # (n, K)
            self.cumulative[i] = kept[0] * self.cumulative[i] + weights @ hits
            self.counts[i] += len(known)

    @property
    def chances(self) -> Array:
        """``(depth, K)`` p_i^k = P_i^k - P_i^(k-1)."""
        return np.diff(self.cumulative, axis=1, prepend=0.0).clip(min=0.0)


def expected_length(tree: TokenTree, chances: Array) -> float:
    """l: tokens that a step of this tree emits, the root's included: the sum of all products."""
    reach = [1.0]
    for depth, rank, parent in zip(tree.depths[1:], tree.ranks[1:], tree.parents[1:]):
        reach.append(reach[parent] * float(chances[depth - 1, rank]))
    return math.fsum(reach)


# ------------------------------------------------------------------------------------------ sizes


@dataclass
class Speed:
    """What a tree has given, averaged over its steps: tokens per row, and seconds."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        # Both start from 0 alike, which the quotient does not see.
        self.tokens += SPEED_ALPHA * (tokens - self.tokens)
        self.seconds += SPEED_ALPHA * (seconds - self.seconds)

    @property
    def value(self) -> float | None:
        """Tokens per second and row; None before the first step."""
        return self.tokens / self.seconds if self.seconds else None


class Shape(NamedTuple):
    """What a row forwards.

    Attributes:
        tree: its nodes.
        ahead: distances that probes predict under each node; 0 if predictions take no rows. No tree
            is deeper than what the step before it has predicted.
    """

    tree: TokenTree
    ahead: int


def check_rows(max_rows: int, per_distance: int) -> None:
    """Raise ValueError if not even one candidate fits.

    Args:
        max_rows: most rows of a step.
        per_distance: probes under each node for each distance; 0 if predictions take no rows.
    """
    if max_rows < 2 * (1 + per_distance):
        raise ValueError(
            f"max_rows={max_rows}: a step with one candidate has {2 * (1 + per_distance)} rows "
            "with this adapter; raise it."
        )


class TreePlan:
    """Chooses the tree for one batch size, context length and device.

    Args:
        hits: how often predictions are right; shared with other conditions.
        cost: what is known of step times.
        per_distance: probes under each node for each distance that is to be predicted; 0 if
            predictions take no rows.
        max_rows: most rows of a step, nodes and probes.

    Attributes:
        shape: the tree chosen; the root alone while no tree pays.

    Raises:
        ValueError: not even one candidate fits into ``max_rows``.
    """

    def __init__(
        self, hits: HitRates, cost: StepCost | None = None, per_distance: int = 0,
        max_rows: int = MAX_ROWS,
    ):  # fmt: skip
        check_rows(max_rows, per_distance)
        self.hits, self.cost = hits, cost or StepCost()
        self.per_distance, self.max_rows = per_distance, max_rows
        ahead = range(1, len(hits.cumulative) + 1) if per_distance else [0]
        #: By distances predicted, nodes of the largest tree.
        self._most = {n: max_rows // (1 + n * per_distance) for n in ahead}
        self._most = {n: most for n, most in self._most.items() if most >= 2}
        furthest = max(self._most)
        small, large = (max(self._most[furthest] // part, 2) for part in (16, 4))
        first = (small, large) if small < large else (1, large)
        self._first = [(nodes, furthest) for nodes in first]
        #: By distances predicted, the likeliest paths when the tree was chosen, so that trees
        #: repeat.
        self._paths = {n: self._likeliest(n)[0] for n in self._most}
        self.shape = self._sized(large, furthest)
        #: Sizes of the next steps: nodes, and distances predicted.
        self._queue: deque[tuple[int, int]] = deque()
        self._every, self._due = EVERY[0], 0
        self._turn = -1
        self._speed = Speed()
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._tried = self.cost.line is None
        if self._tried:
            self._queue.extend(self._first * WARM_UP)

    def rows(self, nodes: int, ahead: int) -> int:
        """Rows of a tree of so many nodes, the root included; alone it goes without probes."""
        return 1 if nodes == 1 else nodes * (1 + ahead * self.per_distance)

    @property
    def chosen_rows(self) -> int:
        """Rows of the chosen tree."""
        return self.rows(len(self.shape.tree), self.shape.ahead)

    @property
    def is_due(self) -> bool:
        """Whether the next tree depends on what is known of hits."""
        return not self._queue and self._tried and self.cost.steps >= self._due

    def next(self) -> Shape:
        """The tree of the next step."""
        if not self._queue and self.cost.steps >= self._due:
            if self.cost.line is None:
                self._queue.extend(self._first)
            elif not self._tried:
                self._explore()
            elif 1 not in self.cost.means:  # nobody took plain steps
                self._queue.extend([(1, 0)] * PLAIN)
            else:
                self._choose()
        if self._queue:
            return self._sized(*self._queue.popleft())
        return self.shape

    def observe(self, rows: int, seconds: float, drafting: float | None, tokens: float) -> None:
        """A step is over, drafted or plain: as :meth:`StepCost.observe`, and its tokens per row."""
        self.cost.observe(rows, seconds, drafting)
        if rows == self.chosen_rows:
            self._speed.add(tokens, seconds + (drafting or 0.0))

    def _likeliest(self, ahead: int) -> tuple[tuple[RankPath, ...], Array]:
        """Paths and their chances where so many distances are predicted."""
        return likeliest_paths(self.hits.chances[: ahead or None], self._most[ahead] - 1)

    def _sized(self, nodes: int, ahead: int) -> Shape:
        paths = self._paths[ahead][: nodes - 1] if nodes > 1 else ()
        return Shape(TokenTree.in_order(paths), ahead)

    def _explore(self) -> None:
        """Steps of another size: a line needs two, and where none pays that may have changed.

        In turns about twice the nodes, half of them and, where probes could predict further than
        they do, as many with one distance more, whose hits are otherwise not seen.
        """
        self._tried = True
        tree, ahead = self.shape
        if len(tree) == 1:
            found = self._paths_and_speeds()
            self._paths = {n: paths for n, (paths, _) in found.items()}
            best = max(
                (speed, nodes, ahead)
                for ahead, (_, speeds) in found.items()
                for nodes, speed in enumerate([*speeds[1:], 0.0], 2)
            )
            self._queue.extend([best[1:]] * BOUT)
            return
        power, self._turn = math.log2(len(tree)), self._turn + 1
        wider = 2 ** (math.floor(power) + 1), ahead
        turns = [wider, (2 ** (math.ceil(power) - 1), ahead)]
        if ahead + 1 in self._most:
            turns.append((len(tree), ahead + 1))
        nodes, ahead = turns[self._turn % len(turns)]
        if nodes <= self._most[ahead]:
            self._queue.extend([(nodes, ahead)] * BOUT)

    def _paths_and_speeds(self) -> dict[int, tuple[tuple[RankPath, ...], Array]]:
        """By distances predicted, the likeliest paths and v = l(i) / T(i) of the trees of 1, 2, ...
        nodes, as far as is known."""
        limit = GROWTH * max(self.cost.means)
        found = {}
        for ahead in self._most:
            paths, chances = self._likeliest(ahead)
            lengths = np.concatenate([[1.0], 1.0 + np.cumsum(chances)])
            sizes = [n for n in range(1, len(lengths) + 1)
                     if n <= 2 or self.rows(n, ahead) <= limit]  # fmt: skip
            found[ahead] = paths, lengths[: len(sizes)] / self._seconds(sizes, ahead)
        return found

    def _seconds(self, sizes: list[int], ahead: int) -> Array:
        """``(sizes,)`` T of trees of so many nodes."""
        seconds: Array = self.cost.seconds(np.array([self.rows(n, ahead) for n in sizes], float))
        alone, plain = [n == 1 for n in sizes], self.cost.plain_seconds()
        assert plain is not None
        return np.where(alone, plain, seconds).clip(min=1e-12)

    def _choose(self) -> None:
        """The size of the largest expected speed, if that is clearly larger than this tree's."""
        found = self._paths_and_speeds()
        ahead = max(found, key=lambda n: float(found[n][1].max()))
        speeds = found[ahead][1]
        best = int(speeds.argmax())
        self._note()
        tree, of = self.shape
        length = expected_length(tree, self.hits.chances)
        expected = length / float(self._seconds([len(tree)], of)[0])
        gain = GAIN if len(tree) > 1 else LEAVE
        if speeds[best] > (1 + gain) * expected:
            self._paths = {n: paths for n, (paths, _) in found.items()}
            self.shape = self._sized(1 + best, ahead)
            self._speed, expected = Speed(), float(speeds[best])
            self._every = EVERY[0] if best else EVERY[1]
        alone = len(self.shape.tree) == 1
        self.history.append({"step": self.cost.steps, "predicted": expected, "measured": None,
                             "rows": self.chosen_rows})  # fmt: skip
        self._tried = False
        self._due = self.cost.steps + self._every
        self._every = min(2 * self._every, WAIT if alone else EVERY[1])

    def _note(self) -> None:
        """Beside what was expected of the tree, what it has given."""
        if self.history:
            self.history[-1]["measured"] = self._speed.value

    def like_this(self, scale: float) -> TreePlan:
        """A plan for other conditions that starts from this one.

        Args:
            scale: batch size there over that here, by which rows cost more.
        """
        cost = self.cost.seeded(scale)
        plan = TreePlan(self.hits, cost, self.per_distance, self.max_rows)
        if self.history:
            plan.shape, plan._paths = self.shape, self._paths
        return plan

    def details(self) -> dict[str, Any]:
        """For ``SpecStats.details``: JSON types, a few kilobytes at most."""
        self._note()
        line, seconds = self.cost.line, None
        tree, ahead = self.shape
        length = expected_length(tree, self.hits.chances)
        if line is not None:
            seconds = float(self._seconds([len(tree)], ahead)[0])
        return {
            "rows": self.chosen_rows,
            "candidates": tree.num_candidates,
            "depth": tree.max_depth,
            "b0": None if line is None else line[0],
            "b1": None if line is None else line[1],
            "drafting": self.cost.drafting_seconds,
            "seconds": {str(rows): spent for rows, spent in self.cost.means.items()},
            "median_error": self.cost.median_error,
            "hits": [[round(p, 3) for p in row] for row in self.hits.cumulative.tolist()],
            "predicted_tokens": length,
            "predicted_speed": None if seconds is None else length / seconds,
            "measured_speed": self._speed.value,
            "history": [dict(one) for one in self.history],
        }
