"""Speculative sampling: the law of what it emits.

A toy language gives every prefix its own next-token distribution, so that a draft token scored with
the wrong prefix, a wrong residual or a reused random number changes the law of the emitted tokens.
Chi-square compares it once with the target's (is it lossless?), and once with the law of a single
step, derived here by enumeration (does it accept as often as it should?).
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
import torch
from known_scores import Scores
from torch import Tensor

from hf_spec.core import verify
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult

#: The law of a sequence: its probability.
Law = dict[tuple[int, ...], float]


#: Every chi-square test here has fixed seeds and fails below this p-value, so that a change of the
#: random stream (another torch) gives one false alarm in a million per comparison.
FALSE_ALARM = 1e-6


ROWS = 20_000


class Language:
    """A next-token distribution per prefix, prefixes being numbered level by level.

    ``table(depth)``: (vocab ** depth, vocab); row ``code`` belongs to the prefix whose tokens are
    the digits of ``code`` in base ``vocab``.
    """

    def __init__(self, vocab: int, depth: int, seed: int, zeros: bool = False):
        generator = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.tables = []
        for level in range(depth + 1):
            weights = torch.rand(vocab**level, vocab, generator=generator, dtype=torch.float64)
            weights = weights + 0.15  # no cell is so rare that chi-square counts get small
            if zeros:  # as top-k does: one token per prefix is impossible
                banned = torch.randint(vocab, (vocab**level, 1), generator=generator)
                weights = weights.scatter(1, banned, 0.0)
            self.tables.append(weights / weights.sum(-1, keepdim=True))

    def next(self, prefix: Sequence[int]) -> list[float]:
        code = 0
        for token in prefix:
            code = code * self.vocab + token
        return self.tables[len(prefix)][code].tolist()

    def law(self, length: int) -> Law:
        """Probability of every sequence of this length."""
        sequences = itertools.product(range(self.vocab), repeat=length)
        return {s: math.prod(self.next(s[:i])[t] for i, t in enumerate(s)) for s in sequences}

    def at(self, tree: Tree) -> Tensor:
        """The distribution after every node: (batch, nodes, vocab)."""
        tokens = tree.tokens
        codes = torch.zeros_like(tokens)
        result = torch.zeros(*tokens.shape, self.vocab, dtype=torch.float64)
        rows = torch.arange(len(tokens))
        for node in range(tree.num_nodes):
            if node > 0:
                above = codes[rows, tree.parents[:, node]]
                codes[:, node] = above * self.vocab + tokens[:, node]
            for level, table in enumerate(self.tables):
                here = tree.depths[:, node] == level
                result[here, node] = table[codes[here, node]]
        return result


def continued(law: Law, language: Language, length: int) -> Law:
    """Sequences of any length, each cut or continued by the language to one length."""
    result: Law = defaultdict(float)
    for sequence, probability in law.items():
        todo = [(sequence[:length], probability)]
        while todo:
            prefix, weight = todo.pop()
            if len(prefix) == length:
                result[prefix] += weight
            else:
                chances = enumerate(language.next(prefix))
                todo += [((*prefix, token), weight * chance) for token, chance in chances]
    return result


def chi_square(counts: dict[tuple[int, ...], int], law: Law) -> float:
    """p-value of the counts under the law; cells that should be nearly empty are put together."""
    total = sum(counts.values())
    cells = {key: (counts.get(key, 0), total * law.get(key, 0.0)) for key in {*counts, *law}}
    impossible = [key for key, (seen, expected) in cells.items() if expected < 1e-9 and seen]
    assert not impossible, f"emitted what the target never emits: {impossible}"
    large = [cell for cell in cells.values() if cell[1] >= 10]
    rest = [cell for cell in cells.values() if cell[1] < 10]
    if (expected := sum(cell[1] for cell in rest)) > 1:
        large.append((sum(cell[0] for cell in rest), expected))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in large)
    freedom = len(large) - 1
    assert freedom >= 1
    arguments = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(arguments[0], arguments[1]))


def emitted_rows(accepted: StepResult) -> list[tuple[int, ...]]:
    pairs = zip(accepted.tokens.tolist(), accepted.counts.tolist())
    return [tuple(tokens[:count]) for tokens, count in pairs]


#: name -> parents; small enough to enumerate, with siblings, duplicates and uneven branches.
SHAPES = {
    "root": (-1,),
    "chain1": (-1, 0),
    "chain2": (-1, 0, 1),
    "siblings": (-1, 0, 0),
    "three siblings": (-1, 0, 0, 0),
    "fork below": (-1, 0, 1, 1),
    "two branches": (-1, 0, 0, 1, 2),
    "depth first": (-1, 0, 1, 0, 3),
    "breadth and depth": (-1, 0, 0, 1, 1),
}


def rejection_law(parents: Sequence[int], p: Language, q: Language) -> Law:
    """Law of one step, by enumeration of draft tokens, accepted or not (SpecInfer, alg. 2)."""
    law: Law = defaultdict(float)

    def step(node: int, last: int, now: list[float], emitted: tuple[int, ...], w: float) -> None:
        if w == 0.0:
            return
        if node == len(parents):
            for token, chance in enumerate(now):
                law[(*emitted, token)] += w * chance
            return
        if parents[node] != last:
            return step(node + 1, last, now, emitted, w)
        draft = q.next(emitted)
        residual = [max(0.0, a - b) for a, b in zip(now, draft)]
        total = sum(residual)
        after = [r / total for r in residual] if total > 0 else now
        for x, chance in enumerate(draft):
            if chance == 0.0:
                continue
            accept = min(1.0, now[x] / chance)
            longer = (*emitted, x)
            step(node + 1, node, p.next(longer), longer, w * chance * accept)
            step(node + 1, last, after, emitted, w * chance * (1 - accept))

    step(1, 0, p.next(()), (), 1.0)
    return {key: value for key, value in law.items() if value > 0}


def sampled_draft(tree: Tree, q: Language, generator: torch.Generator) -> Tree:
    """The tree with candidates drawn node by node from q, siblings independently."""
    tokens = torch.zeros(tree.parents.shape, dtype=torch.long)
    rows = torch.arange(len(tokens))
    draft = torch.full((*tokens.shape, q.vocab), torch.nan)  # column 0 is ignored
    for node in range(1, tree.num_nodes):
        above = q.at(tree.with_tokens(tokens))[rows, tree.parents[:, node]]
        draft[:, node] = above.float()
        tokens[:, node] = torch.multinomial(draft[:, node], 1, generator=generator)[:, 0]
    return tree.with_tokens(tokens, draft)


def run_rejection(tree: Tree, p: Language, q: Language, seed: int) -> StepResult:
    generator = torch.Generator().manual_seed(seed)
    tree = sampled_draft(tree, q, generator)
    scores = Scores(p.at(tree).float().log())
    accepted = verify.rejection(tree, scores, generator)
    for row, asked in enumerate(scores.asked):
        assert asked == accepted.path[row, : accepted.counts[row]].tolist()
    return accepted


def continue_rows(accepted: StepResult, language: Language, length: int, seed: int) -> Counter:
    """Counts of the rows' first tokens, rows that emitted fewer being continued by sampling."""
    rng = random.Random(seed)
    counts: Counter = Counter()
    todo = Counter(emitted_rows(accepted))
    while todo:
        row, count = todo.popitem()
        if len(row) >= length:
            counts[row[:length]] += count
        else:
            tokens = rng.choices(range(language.vocab), language.next(row), k=count)
            todo.update((*row, token) for token in tokens)
    return counts


LANGUAGES = {
    "near": (Language(3, 3, seed=1), Language(3, 3, seed=2)),
    "zeros": (Language(3, 3, seed=3, zeros=True), Language(3, 3, seed=4, zeros=True)),
    "two": (Language(2, 3, seed=5), Language(2, 3, seed=6)),
}


@pytest.mark.parametrize("languages", LANGUAGES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_algorithm_is_exact(shape: str, languages: str) -> None:
    p, q = LANGUAGES[languages]
    law, wanted = continued(rejection_law(SHAPES[shape], p, q), p, 3), p.law(3)
    for sequence in {*law, *wanted}:
        # Sums of at most some thousand products of doubles.
        assert law.get(sequence, 0.0) == pytest.approx(wanted.get(sequence, 0.0), abs=1e-12)


# p-values below FALSE_ALARM fail: two comparisons in each of 27 cases, so that all of these
# together raise a false alarm once in about 18,000 changes of the random stream.
@pytest.mark.parametrize("languages", LANGUAGES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rejection_emits_the_targets_law(shape: str, languages: str) -> None:
    p, q = LANGUAGES[languages]
    parents = SHAPES[shape]
    accepted = run_rejection(Tree.of_shapes([TokenTree(parents)] * ROWS), p, q, seed=11)
    assert chi_square(continue_rows(accepted, p, 3, seed=12), p.law(3)) > FALSE_ALARM
    step = Counter(emitted_rows(accepted))
    assert chi_square(step, rejection_law(parents, p, q)) > FALSE_ALARM


def test_the_code_without_its_residual_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPACE's algorithm 1, line 18, as printed: a clamp that finds nothing left makes it fall
    back to p. Proves the power of the test above."""
    p, q = LANGUAGES["near"]
    clamp = Tensor.clamp

    def broken(tensor: Tensor, *args: float, **kwargs: float) -> Tensor:
        clamped = clamp(tensor, *args, **kwargs)
        return clamped * 0 if kwargs == {"min": 0} and tensor.is_floating_point() else clamped

    monkeypatch.setattr(Tensor, "clamp", broken)
    accepted = run_rejection(Tree.of_shapes([TokenTree.chain(2)] * ROWS), p, q, seed=11)
    monkeypatch.undo()
    assert chi_square(continue_rows(accepted, p, 3, seed=12), p.law(3)) < FALSE_ALARM


def test_rejection_with_a_tree_per_row_and_invalid_nodes() -> None:
    # One false alarm in a million per comparison, as above.
    p, q = LANGUAGES["near"]
    shapes = [TokenTree(SHAPES[name]) for name in ("chain2", "two branches", "root", "siblings")]
    tree = Tree.of_shapes([shapes[row % 4] for row in range(ROWS)])
    valid = tree.valid.clone()
    valid[1::4, 2] = False  # the second branch of "two branches" is out of budget; so is its child
    valid[1::4, 4] = False
    accepted = run_rejection(tree.changed(valid=valid), p, q, seed=21)
    assert chi_square(continue_rows(accepted, p, 3, seed=22), p.law(3)) > FALSE_ALARM
    rows = emitted_rows(accepted)
    effective = [(-1, 0, 1), (-1, 0, 9, 1), (-1,), (-1, 0, 0)]  # 9: a parent never reached
    for kind, parents in enumerate(effective):
        assert chi_square(Counter(rows[kind::4]), rejection_law(parents, p, q)) > FALSE_ALARM


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    p = LANGUAGES["near"][0]
    generator = torch.Generator().manual_seed(0)
    tree = sampled_draft(Tree.of_shapes([TokenTree.chain(3)] * 2000), p, generator)
    scores = p.at(tree).log()
    draft = torch.zeros_like(scores)
    draft[:, 1:] = scores[:, :-1].softmax(-1)  # bit for bit what the rule compares it with
    accepted = verify.rejection(tree.changed(q=draft), Scores(scores), generator)
    assert (accepted.counts == 4).all()


def test_rejection_takes_its_random_numbers_from_the_generator() -> None:
    p, q = LANGUAGES["near"]
    tree = Tree.of_shapes([TokenTree(SHAPES["two branches"])] * 50)
    before = torch.random.get_rng_state()
    one, two = (run_rejection(tree, p, q, seed=5) for _ in range(2))
    assert emitted_rows(one) == emitted_rows(two)
    assert torch.equal(before, torch.random.get_rng_state())
    assert emitted_rows(one) != emitted_rows(run_rejection(tree, p, q, seed=6))
