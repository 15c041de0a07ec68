"""``prompt_lookup``: the index against rescanning, the tree against continuations written out."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_spec.core.shapes import Row
from hf_spec.core.verify import HostResult
from hf_spec.draft.lookup import (
    WEIGHT_PER_NGRAM,
    Confidence,
    Match,
    NgramIndex,
    continuation_tree,
)
from hf_spec.methods.prompt_lookup import PromptLookupDrafter, PromptLookupOptions

Matches = list[Match]
Path = tuple[int, ...]


def rescan(tokens: list[int], smallest: int, largest: int, limit: int) -> Matches:
    """All earlier places where the sequence's end occurs, found by looking everywhere."""
    found: dict[int, int] = {}
    for size in range(largest, smallest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                found.setdefault(end, size)
    return [Match(end, size) for end, size in found.items()][:limit]


def sequence(rng: random.Random, length: int, alphabet: int) -> list[int]:
    return [rng.randrange(alphabet) for _ in range(length)]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (2, 3), (3, 3)], ids=str)
@pytest.mark.parametrize("alphabet", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_matches_equal_a_rescan_while_the_sequence_grows(
    seed: int, alphabet: int, sizes: tuple[int, int]
) -> None:
    rng = random.Random(seed)
    index, tokens = NgramIndex(*sizes), []
    for _ in range(25):
        tokens = tokens + sequence(rng, rng.randint(0, 4), alphabet)
        index.update(tokens)
        for limit in (1, 3, 100):
            assert index.matches(tokens, limit) == rescan(tokens, *sizes, limit)


def continuation(tokens: list[int], end: int, depth: int) -> list[int]:
    """What followed at ``end``; past the sequence's end, what was just copied there."""
    longer = list(tokens)
    for step in range(depth):
        longer.append(longer[end + step])
    return longer[len(tokens) :]


def probabilities(
    tokens: list[int], matches: Matches, depth: int, first: float, deeper: float
) -> dict[Path, float]:
    """Estimated probability of every candidate path."""
    shares = [WEIGHT_PER_NGRAM**size / (1 + order) for order, (_, size, _) in enumerate(matches)]
    result: dict[Path, float] = {}
    for (end, _, _), share in zip(matches, shares):
        copied = continuation(tokens, end, depth)
        for level in range(1, depth + 1):
            path = tuple(copied[:level])
            part = first * deeper ** (level - 1) * share / sum(shares)
            result[path] = result.get(path, 0.0) + part
    return result


def learned(seed: int) -> Confidence:
    rng, confidence = random.Random(seed), Confidence()
    for _ in range(rng.randint(0, 6)):
        depth = rng.randint(1, 8)
        confidence.observe(rng.randint(1, 4), rng.randint(0, depth), depth)
    return confidence


def token_paths(row: Row) -> list[Path]:
    paths: list[Path] = [()]
    for parent, token in list(zip(row.parents, row.tokens))[1:]:
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("floor", [0.0, 0.05])
@pytest.mark.parametrize("max_nodes", [1, 4, 15, 1000])
@pytest.mark.parametrize("max_depth", [1, 3, 10])
@pytest.mark.parametrize("seed", range(3))
def test_the_tree_holds_the_most_probable_continuations(
    seed: int, max_depth: int, max_nodes: int, floor: float
) -> None:
    rng, confidence = random.Random(seed), learned(seed)
    tokens = sequence(rng, rng.randint(2, 40), rng.choice([1, 2, 4]))
    matches = rescan(tokens, 1, 4, limit=8)
    row = continuation_tree(tokens, matches, max_depth, max_nodes, confidence, floor)
    paths = token_paths(row)
    first = confidence.first(matches[0][1]) if matches else 0.0
    weights = probabilities(tokens, matches, max_depth, first, confidence.deeper)
    likely = sorted((w for w in weights.values() if w >= floor), reverse=True)
    assert row.tokens[0] == tokens[-1]
    assert len(paths) == min(max_nodes, len(likely))
    assert max(row.depths) <= max_depth
    assert len(set(paths)) == len(paths)  # no two siblings carry the same token
    assert set(paths) <= set(weights)
    for path in paths:
        if len(path) > 1:
            assert path[:-1] in paths
            assert weights[path[:-1]] > weights[path]
    # Best first, and each node is said to be as probable as it is.
    assert row.probs == pytest.approx([1.0, *(weights[path] for path in paths)])
    assert row.probs[1:] == pytest.approx(likely[: len(paths)])


def test_equally_probable_nodes_still_form_a_tree() -> None:
    """After a long perfect run a child is as probable as its parent, to the last bit."""
    confidence = Confidence()
    for _ in range(1000):
        confidence.observe(1, 5, 5)
    assert confidence.deeper == 1.0
    row = continuation_tree([1, 2, 3, 1], [Match(1, 1)], 6, 3, confidence)
    assert (row.parents, row.tokens) == ([-1, 0, 1, 2], [1, 2, 3, 1])


@pytest.mark.parametrize("seed", range(10))
def test_confidence_follows_what_was_accepted(seed: int) -> None:
    rng, confidence = random.Random(seed), Confidence()
    steps: list[tuple[int, int, int]] = []
    for _ in range(30):
        depth = rng.randint(1, 6)
        steps.append((rng.randint(1, 3), rng.randint(0, depth), depth))
        confidence.observe(*steps[-1])
        for size in (1, 2, 3, 4):  # one success in two trials, and those seen
            seen = [accepted > 0 for n, accepted, _ in steps if n == size]
            assert confidence.first(size) == (sum(seen) + 1) / (len(seen) + 2)
        assert 0.0 < confidence.deeper <= 1.0


#: As much of a model as drafting looks at: how many tokens it has.
MODEL = SimpleNamespace(
    get_input_embeddings=lambda: torch.nn.Embedding(9, 1), get_output_embeddings=lambda: None
)


def drafter(**options: float) -> PromptLookupDrafter:
    return PromptLookupDrafter(model=MODEL, options=PromptLookupOptions(**options))


def state_of(rows: list[list[int]], active: list[bool], max_depth: int) -> Any:
    """As much of a DecodeState as drafting looks at."""
    root = torch.tensor([row[-1] for row in rows])
    return SimpleNamespace(
        tokens=rows, active=active, max_depth=max_depth, root=root, batch_size=len(rows),
        model=MODEL, looked_up=(),
    )  # fmt: skip


def test_rows_are_drafted_for_themselves() -> None:
    rng = random.Random(1)
    rows = [sequence(rng, length, 3) for length in (20, 9, 1, 14)]
    active = [True, True, True, False]
    one = drafter(max_depth=6, num_draft_tokens=7)
    confidences = [Confidence() for _ in rows]
    state = state_of(rows, active, max_depth=4)
    one.start(state)
    for _ in range(6):
        tree = one.propose(state)
        assert tree.q is None and tree.host is not None
        drafted, emitted = tree.host.rows(tree.row_sizes), []
        for row, tokens in enumerate(rows):
            matches = rescan(tokens, 1, 4, 8) if active[row] else []
            wanted = continuation_tree(
                tokens, matches, 4, 7, confidences[row], one.options.min_probability
            )
            # The root of a finished row, too: it may be cached.
            assert drafted[row] == wanted
            paths = [(), *token_paths(wanted)]
            came = [*rng.choice(paths), rng.randrange(3)] if active[row] else []
            right = max(k for k in range(len(came) + 1) if tuple(came[:k]) in paths)
            if len(wanted.tokens) > 1:
                depth = min(max(wanted.depths), len(came))
                confidences[row].observe(matches[0][1], right, depth)
            emitted.append(came)
        for tokens, came in zip(rows, emitted):
            tokens += came
        state = state_of(rows, active, max_depth=4)
        one.observe(state, tree, HostResult([[]] * 4, emitted, [0] * 4))
        for own, confidence in zip(one.lookups.rows, confidences):
            assert vars(own.confidence) == vars(confidence)


@pytest.mark.parametrize("dtype", [torch.long, torch.int32])
def test_get_candidates_appends_the_best_chain(dtype: torch.dtype) -> None:
    rng, one, tokens = random.Random(3), drafter(max_depth=6), [4, 5, 6]
    for _ in range(12):
        candidates, logits = one.get_candidates(torch.tensor([tokens], dtype=dtype))
        matches = rescan(tokens, 1, 4, 1)
        chain = continuation(tokens, matches[0][0], 6) if matches else []
        assert logits is None and candidates.dtype == dtype
        assert candidates.tolist() == [tokens + chain]
        tokens = tokens + sequence(rng, rng.randint(1, 3), 4)
