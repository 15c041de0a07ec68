"""Acceptance rules against walks in plain Python, and the law of what they emit.

A toy language gives every prefix its own next-token distribution, so that a candidate scored with
the wrong prefix, a wrong residual or a reused random number changes the law of the emitted tokens.
``rejection`` is checked by chi-square: once against the target (is it lossless?), once against the
law of a single step, derived here by enumeration (does it accept as often as it should?).
"""

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch
from random_trees import random_tree
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteriaList

from hf_spec.core import verify
from hf_spec.core.shapes import ProbeGroup, TokenTree
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult
from hf_spec.decoding.sequences import Sequences

#: The law of a sequence: its probability.
Law = dict[tuple[int, ...], float]

#: Every chi-square test here has fixed seeds and fails below this p-value, so that a change of the
#: random stream (another torch) gives one false alarm in a million per comparison.
FALSE_ALARM = 1e-6
ROWS = 20_000


# -- the toy language ----------------------------------------------------------------------------


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


# -- trees and scores ----------------------------------------------------------------------------


def trees_of(parents: Sequence[int], tokens: Tensor) -> Tree:
    """The same tree with the tokens (batch, nodes) of each row."""
    return Tree.of_shapes([TokenTree(tuple(parents))] * len(tokens)).with_tokens(tokens)


def random_case(seed: int, vocab: int = 3, rows: int = 40, nodes: int = 8) -> Tree:
    """A tree per row, some nodes invalid as if the row's budget ended."""
    rng = random.Random(seed)
    trees = [random_tree(rng, rng.randint(1, nodes)) for _ in range(rows)]
    tree = Tree.of_shapes(trees)
    kept = torch.tensor([rng.randint(0, 5) for _ in trees])[:, None]
    lost = torch.tensor([[rng.random() < 0.1 for _ in range(tree.num_nodes)] for _ in trees])
    lost[:, 0] = False
    valid = tree.valid & ((tree.depths <= kept) & ~lost | (tree.depths == 0))
    tokens = torch.randint(
        vocab, (rows, tree.num_nodes), generator=torch.Generator().manual_seed(seed)
    )
    return tree.with_tokens(tokens).changed(valid=valid)


class Scores:
    """A ``ScoreFn`` over known scores (batch, nodes, vocab); rows not asked for get rubbish.

    ``asked``: the nodes asked for, per row, in order (of the first rows only: lists are slow).
    """

    def __init__(self, scores: Tensor):
        self.scores = scores
        self.asked: list[list[int]] = [[] for _ in scores[:100]]

    def __call__(self, nodes: Tensor, active: Tensor, depth: int) -> Tensor:
        assert nodes.shape == active.shape == (len(self.scores),)
        for row in active[: len(self.asked)].nonzero()[:, 0].tolist():
            assert len(self.asked[row]) == depth
            self.asked[row].append(int(nodes[row]))
        rows = torch.arange(len(nodes))
        return torch.where(active[:, None], self.scores[rows, nodes], torch.nan)


def argmax(scores: Tensor) -> Tensor:
    return scores.argmax(-1)


def by(scores: Scores, select: Callable[[Tensor], Tensor] = argmax) -> verify.ChooseFn:
    """The tokens that these scores give."""
    return lambda *asked: select(scores(*asked))


def everyone(tree: Tree) -> Tensor:
    return torch.ones(tree.batch_size, dtype=torch.bool)


def known(targets: Tensor, vocab: int) -> Scores:
    """Scores whose argmax is the target at every node."""
    return Scores(torch.nn.functional.one_hot(targets, vocab).double())


def children(tree: Tree, row: int, node: int) -> list[int]:
    parents, valid = tree.parents[row].tolist(), tree.valid[row].tolist()
    return [child for child in range(1, tree.num_nodes) if parents[child] == node and valid[child]]


def walk(tree: Tree, targets: Tensor, row: int) -> list[int]:
    """The accepted path: from the root always into the first child that carries the target."""
    path = [0]
    while True:
        wanted = int(targets[row, path[-1]])
        hits = [c for c in children(tree, row, path[-1]) if int(tree.tokens[row, c]) == wanted]
        if not hits:
            return path
        path.append(hits[0])


def assert_row(accepted: StepResult, row: int, path: list[int], emitted: list[int]) -> None:
    count = int(accepted.counts[row])
    assert accepted.path[row].tolist()[:count] == path
    assert not accepted.path[row, count:].any()
    assert accepted.tokens[row].tolist()[:count] == emitted


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


# -- match ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [2, 3, 6])
@pytest.mark.parametrize("seed", range(8))
def test_match_and_match_along_equal_a_walk(seed: int, vocab: int) -> None:
    tree = random_case(seed, vocab)
    tokens = tree.tokens
    targets = torch.randint(vocab, tokens.shape, generator=torch.Generator().manual_seed(seed + 99))
    at_once = verify.match(tree, targets)
    runs = []
    for early_exit in (False, True):
        scores = known(targets, vocab)
        runs.append((verify.match_along(tree, by(scores), everyone(tree), early_exit), scores))
    assert at_once.path.shape == at_once.tokens.shape == (len(tokens), tree.max_depth + 1)
    for row in range(len(tokens)):
        path = walk(tree, targets, row)
        last = int(targets[row, path[-1]])
        emitted = [*(int(tokens[row, node]) for node in path[1:]), last]
        assert_row(at_once, row, path, emitted)
        for along, scores in runs:
            assert_row(along, row, path, emitted)
            assert scores.asked[row] == path  # along the accepted path only, in order


# -- rejection -----------------------------------------------------------------------------------


def rejection_law(parents: Sequence[int], p: Language, q: Language) -> Law:
    """Law of one step, by enumeration of candidates and of accept or reject (SpecInfer, alg. 2)."""
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


def sampled_draft(tree: Tree, q: Language) -> Tree:
    """The tree with candidates drawn node by node from q, siblings independently."""
    tokens = torch.zeros(tree.parents.shape, dtype=torch.long)
    rows = torch.arange(len(tokens))
    draft = torch.full((*tokens.shape, q.vocab), torch.nan)  # column 0 is ignored
    for node in range(1, tree.num_nodes):
        above = q.at(tree.with_tokens(tokens))[rows, tree.parents[:, node]]
        draft[:, node] = above.float()
        tokens[:, node] = torch.multinomial(draft[:, node], 1)[:, 0]
    return tree.with_tokens(tokens, draft)


def run_rejection(
    tree: Tree, p: Language, q: Language, seed: int, early_exit: bool = False
) -> StepResult:
    torch.manual_seed(seed)
    tree = sampled_draft(tree, q)
    scores = Scores(p.at(tree).float().log())
    accepted = verify.rejection(tree, scores, everyone(tree), early_exit)
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
    torch.manual_seed(0)
    tree = sampled_draft(Tree.of_shapes([TokenTree.chain(3)] * 2000), p)
    scores = p.at(tree).log()
    draft = torch.zeros_like(scores)
    draft[:, 1:] = scores[:, :-1].softmax(-1)  # bit for bit what the rule compares it with
    accepted = verify.rejection(tree.changed(q=draft), Scores(scores), everyone(tree))
    assert (accepted.counts == 4).all()


def test_asking_early_changes_nothing() -> None:
    """A chain's random numbers are the same; in a tree, an early exit leaves out useless draws."""
    p, q = LANGUAGES["near"]
    tree = Tree.of_shapes([TokenTree.chain(3)] * 50)
    one, two = (run_rejection(tree, p, q, seed=5, early_exit=early) for early in (False, True))
    assert emitted_rows(one) != [] and one.counts.tolist() == two.counts.tolist()
    accepted = run_rejection(Tree.of_shapes([TokenTree((-1, 0, 0, 1, 2))] * ROWS), p, q, 11, True)
    assert chi_square(continue_rows(accepted, p, 3, seed=12), p.law(3)) > FALSE_ALARM


@pytest.mark.parametrize("early_exit", [False, True])
def test_finished_rows_and_rows_in_lockstep(early_exit: bool) -> None:
    tree = Tree.chain(torch.tensor([[0, 1, 2, 0]] * 3))
    targets = torch.tensor([[1, 2, 0, 1], [1, 2, 1, 1], [1, 2, 0, 1]])
    active = torch.tensor([True, True, False])
    for lockstep, counts in ((False, [4, 3, 1]), (True, [3, 3, 1])):
        scores = known(targets, 3)
        found = verify.match_along(tree, by(scores), active, early_exit, lockstep)
        assert found.counts.tolist() == counts
        assert scores.asked[0] == [*range(counts[0])] and not scores.asked[2]
    q = torch.nn.functional.one_hot(tree.tokens, 3).float()
    log_p = known(targets, 3).scores.float().log()
    found = verify.rejection(tree.changed(q=q), Scores(log_p), active, early_exit)
    assert found.counts.tolist() == [4, 3, 1]
    assert found.bonus.tolist() == [1, 1, 0]


# -- typical -------------------------------------------------------------------------------------


def naive_typical(tree: Tree, chances: Tensor, row: int, epsilon: float, delta: float) -> list[int]:
    """The definition: accepted nodes, then the longest path, then the likeliest."""
    best, best_key = [0], (1, 0.0)
    todo = [([0], 0.0)]
    while todo:
        path, likelihood = todo.pop(0)
        if (len(path), likelihood) > best_key:
            best, best_key = path, (len(path), likelihood)
        p = chances[row, path[-1]].tolist()
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        limit = min(epsilon, delta * math.exp(-entropy))
        for child in children(tree, row, path[-1]):
            chance = p[int(tree.tokens[row, child])]
            if chance > limit:
                todo.append(([*path, child], likelihood + math.log(chance)))
    return best


@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.3, 1.0), (0.5, 0.6), (1.0, 0.9)])
@pytest.mark.parametrize("seed", range(8))
def test_typical_equals_its_definition(seed: int, epsilon: float, delta: float) -> None:
    vocab = 4
    tree = random_case(seed, vocab)
    tokens = tree.tokens
    generator = torch.Generator().manual_seed(seed + 7)
    logits = 2.0 * torch.randn(*tokens.shape, vocab, generator=generator)
    banned = torch.randint(vocab, (*tokens.shape, 1), generator=generator)
    logits = logits.scatter(2, banned, -torch.inf)  # as a warper leaves them
    accepted = verify.typical(tree, logits, argmax, everyone(tree), epsilon, delta)
    chances = logits.double().softmax(-1)
    for row in range(len(tokens)):
        path = naive_typical(tree, chances, row, epsilon, delta)
        bonus = int(logits[row, path[-1]].argmax())
        assert_row(accepted, row, path, [*(int(tokens[row, n]) for n in path[1:]), bonus])
    assert len(set(accepted.counts.tolist())) > 1


# -- probes, and the host ------------------------------------------------------------------------


def test_every_rule_gives_the_probes_of_the_last_accepted_node() -> None:
    tree = trees_of((-1, 0, 0, 2), torch.tensor([[0, 0, 1, 2]] * 3)).attach_probes(
        ProbeGroup.causal(3), [[1, 2, 3, 0], [0, 1, 2, 3], [3, 0, 1, 2]]
    )
    targets = torch.tensor([[1, 0, 2, 0], [0, 2, 0, 0], [2, 0, 0, 0]])
    scores = known(targets, 3).scores.log()
    q, rows = torch.full((3, 4, 3), 1 / 3), everyone(tree)
    for result in (
        verify.match(tree, targets),
        verify.match_along(tree, by(Scores(scores)), rows),
        verify.typical(tree, scores, argmax, rows),
        verify.rejection(tree.changed(q=q), Scores(scores), rows),
    ):
        assert result.path[:, :3].tolist() == [[0, 2, 3], [0, 1, 0], [0, 0, 0]]
        assert result.num_probes.tolist() == [0, 1, 3]
        assert result.last.tolist() == [3, 1, 0]
        assert result.bonus.tolist() == [0, 2, 2]
    roots = Tree.roots(torch.tensor([9])).attach_probes(ProbeGroup.causal(3), [[2]])
    assert verify.match(roots, torch.tensor([[1]])).num_probes.tolist() == [2]


@pytest.mark.parametrize("more", [None, [[0.5, -1.0], [2.0, 2**24 - 1.0]]])
def test_the_result_on_the_host(more: list[list[float]] | None) -> None:
    """Whatever stands past the counts; tokens are exact beside float32 numbers."""
    large = 2**24 - 1
    result = StepResult(
        torch.tensor([[0, 2, 5], [0, 7, 7]]), torch.tensor([3, 1]),
        torch.tensor([[large, 3, 4], [6, 0, 0]]), torch.tensor([2, 0]), torch.tensor([5, 0]),
        torch.tensor([4, 6]),
    )  # fmt: skip
    host, numbers = result.to_host(None if more is None else torch.tensor(more))
    assert host == ([[0, 2, 5], [0]], [[large, 3, 4], [6]], [2, 0])
    assert numbers is None if more is None else numbers.tolist() == more


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_probabilities_that_are_not_finite_are_refused_as_by_torch(value: float) -> None:
    """On the host, once the token is to be emitted; what drafters read before is a token."""
    scores = torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(0))
    scores[1] = value
    with pytest.raises(RuntimeError) as plain:
        torch.multinomial(scores[:, 0].softmax(-1), 1)
    tree = Tree.roots(torch.tensor([1, 2]))
    criteria = StoppingCriteriaList([MaxLengthCriteria(5)])

    def select(scores: Tensor) -> Tensor:
        return verify.sample(scores.softmax(-1))

    for active in (everyone(tree), torch.tensor([True, False])):
        for result in (
            verify.match_along(tree, by(Scores(scores), select), active),
            verify.rejection(tree.changed(q=torch.zeros(2, 1, 5)), Scores(scores), active),
            verify.typical(tree, scores, select, active),
        ):
            assert (result.bonus >= 0).all()
            sequences = Sequences(torch.ones(2, 1, dtype=torch.long), None, criteria)
            if not active[1]:
                sequences.select([0])
                sequences.append(result.to_host()[0])
                continue
            with pytest.raises(RuntimeError) as ours:
                sequences.append(result.to_host()[0])
            assert str(ours.value) == str(plain.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_likeliest_token_is_that_of_argmax(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randint(0, 5, (3, 4, 50)).to(dtype)  # with ties
    logits[0, 1, 7] = torch.nan
    logits[2, 3] = -torch.inf
    assert verify.likeliest(logits).tolist() == logits.argmax(-1).tolist()
