"""Random trees, and what their nodes see by the definition."""

import random
from collections.abc import Sequence

from hf_spec.core.shapes import ProbeGroup, Row, TokenTree

#: Two probes per distance, as PPD's ensembles have them: those of one ensemble see each other.
ENSEMBLE = ProbeGroup(
    (1, 1, 2, 2),
    ((True, False, False, False), (False, True, False, False),
     (True, False, True, True), (False, True, True, True)),
)  # fmt: skip
GROUPS = {"causal": ProbeGroup.causal(3), "ensemble": ENSEMBLE}


def random_tree(rng: random.Random, nodes: int) -> TokenTree:
    return TokenTree((-1, *(rng.randrange(node) for node in range(1, nodes))))


def random_row(rng: random.Random, nodes: int, vocab: int = 5) -> Row:
    """A tree with its likeliest nodes first, no two siblings with the same token."""
    row, taken = Row.root(rng.randrange(vocab)), set()
    while len(row.parents) < nodes:
        key = rng.randrange(len(row.parents)), rng.randrange(vocab)
        if key not in taken:
            taken.add(key)
            row.parents.append(key[0])
            row.tokens.append(key[1])
            row.probs.append(row.probs[key[0]] * rng.uniform(0.2, 1.0))
    return row.likeliest_first()


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root down to this one."""
    path = []
    while node != -1:
        path.append(node)
        node = parents[node]
    return path[::-1]


def paths_of(row: Row) -> dict[tuple[int, ...], float]:
    """Each node's probability by the tokens on its path below the root; the root's is empty."""
    return {
        tuple(row.tokens[on] for on in path_to(row.parents, node)[1:]): row.probs[node]
        for node in range(len(row.parents))
    }


def visible(
    parents: Sequence[int], group: ProbeGroup | None = None, counts: Sequence[int] = ()
) -> list[list[bool]]:
    """What each node, and then each probe, sees: its node's path, and of its own group some."""
    nodes = range(len(parents))
    probes = [(node, kind) for node, count in enumerate(counts) for kind in range(count)]
    above = [path_to(parents, node) for node in nodes]
    table = [[key in above[node] for key in nodes] + [False] * len(probes) for node in nodes]
    for node, kind in probes:
        assert group is not None
        own = [at == node and group.visible[kind][other] for at, other in probes]
        table.append([key in above[node] for key in nodes] + own)
    return table
