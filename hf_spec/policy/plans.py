"""The plans that a step may follow, and where probes are worth most. Knows only numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hf_spec.drafting.calibration import Array

#: Numbers of draft tokens that a step may have. There are few, so that steps repeat, above all
#: compiled ones.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
#: The same if shapes are padded to powers of two.
FIXED = (1, 3, 7, 15, 31, 63)
#: Step tokens per batch row of the widest step in that case.
WIDEST = 64


@dataclass(frozen=True)
class Plan:
    """The plan of a step.

    Attributes:
        drafted: number of the tree's likeliest draft tokens to take.
        probed: number of nodes with probes.
        expected: expected number of emitted tokens of all rows; 0 if unknown.
    """

    drafted: int = 0
    probed: int = 0
    expected: float = 0.0


@dataclass(frozen=True)
class Shapes:
    """The sizes to choose from.

    Attributes:
        width: number of step tokens of a forward with given numbers of nodes and probes; more than
            their sum if shapes are padded.
    """

    width: Callable[[int, int], int]

    @property
    def padded(self) -> bool:
        return self.width(3, 0) > 3

    def sizes(self, most: int) -> list[int]:
        """Numbers of draft tokens, the last being all ``most`` of them."""
        if self.padded:
            most = min(most, FIXED[-1])
        return [size for size in (FIXED if self.padded else SIZES) if size < most] + [most]

    def probed(self, size: int, group: int) -> list[int]:
        """Numbers of nodes with ``group`` probes each, in a step with ``size`` draft tokens."""
        if not group:
            return [0]
        if not self.padded:
            return [0, *(count for count in SIZES if count <= size), size + 1]
        # As many probes as nodes, or twice as many.
        nodes = self.width(1 + size, 0)
        counts = [min(max(n // group, 1), size + 1) for n in (nodes, 2 * nodes)]
        fit = [count for count in counts if self.width(1 + size, count * group) <= WIDEST]
        return sorted(set(fit)) or [0]

    def all(self, group: int, lookup: bool) -> list[tuple[int, int]]:
        """Nodes, and nodes with probes, of all steps that may be chosen if shapes are padded.

        Args:
            group: probes under a node that has them.
            lookup: whether lookups may be drafted alone, without probes.
        """
        found = [(1, 0), *([(1, 1)] if group else [])]
        for size in FIXED:
            counts = self.probed(size, group) + ([0] if group and lookup else [])
            found += [(1 + size, count) for count in counts]
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
