"""The likeliest paths of ranks, likeliest first. Knows only numbers."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
RankPath = tuple[int, ...]


def likeliest_paths(table: Array, count: int) -> tuple[tuple[RankPath, ...], Array]:
    """The ``count`` likeliest rank paths, or all with nonzero probability if these are fewer.

    Exact: a path is never likelier than its parent, so the likeliest n form a tree, and no tree of
    n candidates has a larger sum. Trees of growing size are nested.

    Args:
        table: ``(distances, ranks)`` probability of each rank; a path's is the product.
        count: largest number of paths.

    Returns:
        The paths, a parent before its children and likelier ones first, and their probabilities
        ``(paths,)``.
    """
    order = np.argsort(-table, axis=1, kind="stable")
    best = np.take_along_axis(table, order, 1)
    # (-chance, path in terms of `order`): the next sibling and the first child come after it.
    heap: list[tuple[float, RankPath]] = [(-float(best[0, 0]), (0,))] if len(best) else []
    paths: list[RankPath] = []
    chances: list[float] = []
    above: dict[RankPath, float] = {(): 1.0}
    while heap and len(paths) < count:
        negative, places = heapq.heappop(heap)
        if negative == 0:
            break
        depth, parent, last = len(places), places[:-1], places[-1]
        above[places] = -negative
        paths.append(tuple(int(order[d, i]) for d, i in enumerate(places)))
        chances.append(-negative)
        if last + 1 < best.shape[1]:
            chance = above[parent] * float(best[depth - 1, last + 1])
            heapq.heappush(heap, (-chance, (*parent, last + 1)))
        if depth < len(best):
            heapq.heappush(heap, (negative * float(best[depth, 0]), (*places, 0)))
    return tuple(paths), np.array(chances)
