"""What a policy may choose in a step, and where probes are worth most. Knows only numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hf_spec.core.buckets import bucket
from hf_spec.drafting.calibration import Array

#: Numbers of draft tokens that a step may have. There are few, so that steps repeat: with the root,
#: they are powers of two, to which compiled steps are padded anyway.
SIZES = (0, 1, 3, 7, 15, 31, 63)
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


def width(tokens: int, probes: int) -> int:
    """The size of a step by which its time is known: nodes with tokens and probes, per row."""
    return bucket(tokens) + bucket(probes)


def plans(most: int, group: int) -> list[tuple[int, int]]:
    """Draft tokens, and nodes with probes, of the steps to choose from.

    Args:
        most: draft tokens that there are; the largest size takes them all.
        group: probes under a node that has them.
    """
    found = []
    for size in (*(size for size in SIZES[:-1] if size < most), min(most, SIZES[-1])):
        counts = {0}
        if group and not size:
            counts = {0, 1}
        elif group:  # under some of the nodes, or all; of those that are padded alike, the most
            some = [*(n for n in (1, 2, 4, 8, 16, 32) if n <= size), size + 1]
            alike = {bucket(n * group): n for n in some if width(1 + size, n * group) <= WIDEST}
            counts = set(alike.values()) or counts
        found += [(size, n) for n in sorted(counts)]
    return found


def step_shapes(group: int, lookup: bool) -> list[tuple[int, int]]:
    """Nodes, and nodes with probes, of all steps that may be chosen where shapes recur.

    Args:
        group: probes under a node that has them.
        lookup: whether lookups may be drafted alone, without probes.
    """
    found = []
    for size in SIZES:
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
