"""An index of n-grams over one growing sequence, and the tree of their continuations.

Each new token is indexed once per n-gram size; a look-up costs what it returns, however long the
sequence is. Plain lists and dictionaries: sequences are short and single look-ups dominate.
"""

from __future__ import annotations

from hf_spec.core.tree import TokenTree


class NgramIndex:
    """Where each n-gram of a sequence ends.

    Args:
        min_ngram, max_ngram: sizes that are indexed.
    """

    def __init__(self, min_ngram: int, max_ngram: int):
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 0

    def update(self, tokens: list[int]) -> None:
        """Index the n-grams that ``tokens`` has more than at the last call."""
        for end in range(self._indexed + 1, len(tokens) + 1):
            for size in self.sizes:
                if size <= end:
                    self._ends.setdefault(tuple(tokens[end - size : end]), []).append(end)
        self._indexed = len(tokens)

    def matches(self, tokens: list[int], limit: int) -> list[tuple[int, int]]:
        """Earlier places where the sequence's end occurs: ``(end, size)``, longest n-gram first.

        Among equal sizes the latest comes first; each place is named once, with its longest match.
        """
        found: list[tuple[int, int]] = []
        seen: set[int] = set()
        here = len(tokens)
        for size in self.sizes:
            if size > here:
                continue
            for end in reversed(self._ends.get(tuple(tokens[here - size :]), ())):
                if end == here or end in seen:
                    continue
                seen.add(end)
                found.append((end, size))
                if len(found) == limit:
                    return found
        return found


def continuation_tree(
    tokens: list[int], matches: list[tuple[int, int]], max_depth: int, max_nodes: int
) -> tuple[TokenTree, list[int]]:
    """Merge the continuations of the matches into one tree.

    A continuation that reaches the end of the sequence goes on with its own first tokens, so that
    a loop is continued at any depth. Nodes are weighted by the matches that pass through them,
    longer n-grams counting more, and the ``max_nodes`` heaviest are kept.

    Returns:
        The tree and its candidates' tokens (the root's is not among them).
    """
    # One trie node is [parent, token, weight, depth]; children are found by (parent, token).
    trie: list[tuple[int, int, int]] = [(-1, -1, 0)]
    weights: list[float] = [0.0]
    children: dict[tuple[int, int], int] = {}
    here = len(tokens)
    for order, (end, size) in enumerate(matches):
        weight = WEIGHT_PER_NGRAM**size / (1 + order)
        parent = 0
        period = here - end
        for depth in range(1, max_depth + 1):
            place = end + depth - 1
            token = tokens[place] if place < here else tokens[end + (depth - 1) % period]
            key = (parent, token)
            node = children.get(key)
            if node is None:
                node = children[key] = len(trie)
                trie.append((parent, token, depth))
                weights.append(0.0)
            weights[node] += weight * DECAY**depth
            parent = node
    # A parent weighs more than its child, so the heaviest nodes form a tree.
    best = sorted(range(1, len(trie)), key=lambda node: -weights[node])[:max_nodes]
    best.sort(key=lambda node: trie[node][2])
    place_of = {0: 0}
    parents, kept = [-1], []
    for node in best:
        place_of[node] = len(parents)
        parents.append(place_of[trie[node][0]])
        kept.append(trie[node][1])
    return TokenTree.from_parents(parents), kept


#: How much more a match counts per token of its n-gram, and what a level deeper takes off.
WEIGHT_PER_NGRAM = 4.0
DECAY = 0.8
