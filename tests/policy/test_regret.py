"""How much the policy loses against the better of plain decoding and drafting in every step.

A simulated strategy on a clock that the simulation turns: a drafting step costs as much as ``cost``
plain steps and emits ``gain`` tokens per row on average, with 20 % noise on all times.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_clock import FakeClock

from hf_spec.core.host_tree import Row
from hf_spec.core.stats import SpecStats
from hf_spec.core.tree import Tree
from hf_spec.policy.learned import Learned
from hf_spec.policy.step_policy import StepPolicy

DEPTH = 6


class Plain:
    """A drafter without probes that cannot prune."""

    num_probes = distances = 0
    prunes = False


def tokens_of_row(rng: random.Random, gain: float) -> int:
    """1 to ``DEPTH + 1`` emitted tokens, ``gain`` on average: each draft token is accepted with the
    same probability."""
    low, high = 0.0, 1.0
    for _ in range(30):  # bisection
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**k for k in range(DEPTH + 1)) < gain else (low, rate)
    count = 1
    while count <= DEPTH and rng.random() < low:
        count += 1
    return count


def speedup(
    cost: float, gain: float, batch: int, calls: int, new: int = 128, seeds: int = 3,
    promised: float | None = None,
) -> float:  # fmt: skip
    """Over plain decoding, the first call being the first of a process.

    Args:
        promised: predicted probability of each draft token, given that the one before was right;
            None if the strategy's trees are fixed.
    """
    drafter: Any = Plain()
    chain = range(DEPTH + 1)
    probs = [1.0] * (DEPTH + 1) if promised is None else [promised**k for k in chain]
    row = Row([max(k - 1, 0) for k in chain], list(chain), probs)
    trees = Tree.of_rows([row] * batch, "cpu")
    if promised is None:
        trees = trees.changed(host=None)
    clock = FakeClock()
    began, baseline = clock.now, 0
    for seed in range(seeds):
        rng, learned = random.Random(seed), Learned()

        def turn(seconds: float, rng: random.Random = rng) -> None:
            clock.now += seconds * max(rng.gauss(1.0, 0.2), 0.2)

        for _ in range(calls):
            stats = SpecStats()
            policy = StepPolicy(stats, learned, (batch, 7, "cpu"))
            left = [new] * batch
            while all(left):
                start, tree = clock.now, Tree.roots(trees.tokens[:, 0])
                if policy.drafts():
                    turn((cost - 1) / 2)
                    stats.draft_seconds += clock.now - start
                    tree = policy.choose(trees, drafter, [True] * batch, left)
                turn(1.0 + (cost - 1) / 2 * (tree.num_tokens - 1) / DEPTH)
                size = tree.num_tokens
                counts = [min(tokens_of_row(rng, gain), size, rest) for rest in left]
                mean = min(sum(counts) / batch, *left)  # rows of a batch go on together
                left = [max(rest - mean, 0) if rest - mean > 0.5 else 0 for rest in left]
                baseline += mean
                policy.observe(tree, counts, clock.now - start)
    return baseline / (clock.now - began)


if __name__ == "__main__":
    print("promised cost gain | batch 1: first call, 8 calls | batch 8: first call, 8 calls | best")
    for promised in (None, 0.6):
        for cost, gain in CASES if "CASES" in globals() else (
            (1.1, 1.0), (1.5, 1.0), (2.0, 1.0), (3.0, 1.0), (6.0, 1.0), (1.3, 1.1), (2.0, 1.7),
            (1.5, 1.5), (1.3, 1.5), (1.3, 2.0), (1.5, 3.0), (2.0, 4.0),
        ):  # fmt: skip
            found = [
                speedup(cost, gain, batch, calls, promised=promised, seeds=6 if calls == 8 else 30)
                for batch in (1, 8)
                for calls in (1, 8)
            ]
            print(
                promised,
                cost,
                gain,
                *(f"{one:.3f}" for one in found),
                f"{max(gain / cost, 1):.3f}",
                flush=True,
            )
