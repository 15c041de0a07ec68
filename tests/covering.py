"""A few cases of many in which each pair of values still occurs: most faults need no more than two.

``pytest --every-case``, or ``make test-all``, runs all of them.
"""

import os
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case", bound=Sequence[Hashable])

#: In the environment, so that workers of pytest-xdist choose the same cases.
EVERY_CASE = "HF_SPEC_EVERY_CASE"


def covering(
    cases: Iterable[Case], tested: Callable[..., Iterable[Hashable]] | None = None
) -> list[Case]:
    """Choose cases that together test what all of them test.

    Args:
        cases: values of the same parameters: their product, or the part of it that makes sense.
        tested: given a case's values, what it tests; by default each pair of them.

    Returns:
        The chosen cases, in the order given; the same in every run.
    """
    every = list(cases)
    if os.environ.get(EVERY_CASE):
        return every
    tests = [set(tested(*case) if tested else pairs(*case)) for case in every]
    missing: set[Hashable] = set().union(*tests)
    # At random, so that what need not be paired comes in turns; the seed is fixed.
    order = random.Random(0).sample(range(len(every)), len(every))
    # What a case adds only shrinks: the first whose count is still right adds the most.
    heap = [(-len(tests[place]), turn, place) for turn, place in enumerate(order)]
    heapify(heap)
    chosen = []
    while missing:
        count, turn, place = heap[0]
        added = tests[place] & missing
        if -count == len(added):
            heappop(heap)
            chosen.append(place)
            missing -= added
        else:
            heapreplace(heap, (-len(added), turn, place))
    return [every[place] for place in sorted(chosen)]


def pairs(*values: Hashable) -> list[Hashable]:
    """Each pair of these values, with their places."""
    return list(combinations(enumerate(values), 2))
