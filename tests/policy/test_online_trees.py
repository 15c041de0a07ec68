"""Trees chosen while decoding: every formula by brute force, and a clock that the test turns.

Simulated machines have a planted cost, simulated predictions a planted chance of every rank, so
that the best size is known. All figures are the same on every machine.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from hf_spec.core.tree import TokenTree
from hf_spec.policy.likely_paths import likeliest_paths
from hf_spec.policy.online_trees import (
    GUESSED,
    HIT_ALPHA,
    RANKS,
    UNKNOWN,
    HitRates,
    TreePlan,
    expected_length,
)
from hf_spec.policy.step_cost import (
    CLIP,
    DECAY,
    FIRST,
    PACE_ALPHA,
    SIZES,
    STALE,
    TIME_ALPHA,
    SizeTime,
    StepCost,
    fit_line,
)

# -- step times: 4.2.1 -------------------------------------------------------------------------


def test_the_line_is_that_of_least_squares() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        rows = generator.choice(64, size=6, replace=False) + 1.0
        seconds = 3.0 + 0.05 * rows + 0.1 * generator.standard_normal(6)
        weights = generator.uniform(0.01, 1, 6)
        root = np.sqrt(weights)
        table = np.stack([np.ones(6), rows], 1) * root[:, None]
        expected = np.linalg.lstsq(table, seconds * root, rcond=None)[0]
        assert fit_line(rows, seconds, weights) == pytest.approx(tuple(expected))


@pytest.mark.parametrize(
    ("rows", "seconds", "expected"),
    [
        ([4, 16], [2.0, 1.0], (1.5, 0.0)),  # larger steps are not faster
        ([1, 2], [1.0, 4.0], (0.0, 1.8)),  # nothing takes less than no time: (1 + 8) / (1 + 4)
    ],
)
def test_lines_make_sense(rows: list, seconds: list, expected: tuple[float, float]) -> None:
    found = fit_line(np.array(rows, float), np.array(seconds), np.ones(2))
    assert found == pytest.approx(expected)


def test_times_by_hand() -> None:
    """Cold, five for the median, then averages that no stall carries away."""
    size = SizeTime()
    size.add(90.0)
    assert size.mean is None
    means = []
    for seconds in (30.0, 2.0, 3.0, 1.0, 4.0):
        size.add(seconds)
        means.append(size.mean)
    assert means == [30.0, 2.0, 3.0, 2.0, 3.0] and len(size.first) == FIRST
    size.add(4.0)
    alpha = 1 / (FIRST + 1)  # a plain mean while that weighs more
    assert alpha > TIME_ALPHA and size.mean == pytest.approx((1 - alpha) * 3.0 + alpha * 4.0)
    before = size.mean
    size.add(1000.0)
    assert size.mean == pytest.approx(before * (1 + (CLIP - 1) / (FIRST + 2)))


def test_old_steps_of_a_size_count_less() -> None:
    """A size that is tried every 50 steps forgets as fast as one that is always taken."""
    size = SizeTime()
    for step in range(FIRST + 1):
        size.add(1.0, step)
    assert size.count == FIRST
    size.add(1.5, FIRST + 50)
    count = FIRST * math.exp(-50 * DECAY) + 1
    assert size.mean == pytest.approx(1.0 + 0.5 / count) and count < 1 / TIME_ALPHA
    size.add(9.0, FIRST + 51 + STALE)  # begins anew
    assert size.mean == 9.0


def test_the_pace_by_hand() -> None:
    """Half as fast for a while: sizes keep what is known, and predictions follow."""
    cost = StepCost()
    for rows, seconds in ((4, 1.0), (8, 2.0)):
        for _ in range(3):
            cost.observe(rows, seconds, 0.1)
    assert cost.pace == 1.0
    cost.observe(8, 4.0, 0.1)
    assert cost.pace == pytest.approx(2**PACE_ALPHA)
    cost.observe(8, 100.0, 0.1)  # a stall counts as twice the mean
    assert cost.pace == pytest.approx(2 ** (2 * PACE_ALPHA))
    cost = StepCost()
    for rows, seconds in ((4, 1.0), (8, 2.0)):
        for _ in range(3):
            cost.observe(rows, seconds, 0.1)
    for _ in range(40):
        cost.observe(8, 4.0, 0.2)
    assert cost.means[8] == pytest.approx(4.0, rel=1e-3)
    assert cost.seconds(4) == pytest.approx(2.2, rel=0.2)  # though it was not seen since
    assert cost.drafting_seconds == pytest.approx(0.2, rel=0.1)
    cost.observe(64, 32.0, 0.2)  # unknown sizes say nothing of the pace
    assert cost.means[8] == pytest.approx(4.0, rel=1e-3)


def test_old_sizes_count_less() -> None:
    cost = StepCost()
    for rows, seconds in ((4, 1.0), (8, 2.0), (16, 1.5)):
        for _ in range(3):
            cost.observe(rows, seconds)
    ages = np.array([6, 3, 0])
    expected = fit_line(np.array([4.0, 8, 16]), np.array([1.0, 2, 1.5]), np.exp(-DECAY * ages))
    assert cost.line == pytest.approx(expected)
    assert cost.seconds(10) == pytest.approx(expected[0] + 10 * expected[1])


def test_nothing_is_known_of_a_line_through_one_size() -> None:
    cost = StepCost()
    for _ in range(5):
        cost.observe(8, 1.0, 0.1)
    assert cost.line is cost.seconds(8) is cost.plain_seconds() is cost.median_error is None
    for _ in range(2):
        cost.observe(1, 0.9)  # plain
    assert cost.plain_seconds() == 0.9
    assert cost.seconds(8) == pytest.approx(1.0 + 0.1)  # drafting is part of what drafts


def test_a_fast_way_for_single_rows_does_not_bend_the_line() -> None:
    cost = StepCost()
    for rows, seconds in ((1, 0.5), (4, 1.4), (9, 1.9)):
        for _ in range(3):
            cost.observe(rows, seconds)
    assert cost.line == pytest.approx((1.0, 0.1)) and cost.plain_seconds() == 0.5


def test_errors_are_those_of_predictions() -> None:
    """Made before the step was seen, drafting included."""
    cost = StepCost()
    for rows, seconds in ((2, 1.0), (10, 2.0)):
        for _ in range(3):
            cost.observe(rows, seconds, 0.5)
    assert list(cost.errors) == [0.0]  # the third step of ten rows: both sizes are known
    cost.observe(10, 3.5, 0.5)
    assert cost.errors[-1] == pytest.approx(1.5 / 4.0)
    assert cost.median_error == pytest.approx(0.75 / 4.0)


def test_few_sizes_are_kept() -> None:
    cost = StepCost()
    for rows in range(1, SIZES + 10):
        for _ in range(2):
            cost.observe(rows, 1.0 + rows)
    assert len(cost.sizes) == SIZES and min(cost.sizes) == 10


def test_what_is_expected_of_larger_batches() -> None:
    cost = StepCost.guessed({4: 2.0, 8: 3.0})
    cost.drafting.mean = 0.25
    seeded = cost.seeded(4.0)
    assert seeded.line == pytest.approx((1.0, 1.0))
    assert seeded.seconds(8) == pytest.approx(9.25)
    for _ in range(2):
        seeded.observe(8, 7.0)
    assert seeded.means[8] == 7.0  # the guess gives way
    assert StepCost().seeded().line is None


def test_a_measured_plain_step_is_expected_of_other_conditions() -> None:
    """Not the line's: devices often have a faster way for a single row."""
    cost = StepCost.guessed({1: 0.5, 4: 1.4, 9: 1.9})  # 1.0 + 0.1 i, but for one row
    same, larger = cost.seeded(), cost.seeded(3.0)
    assert same.plain_seconds() == pytest.approx(0.5) and same.line == pytest.approx((1.0, 0.1))
    assert larger.plain_seconds() == pytest.approx(0.7)
    assert larger.line == pytest.approx((1.0, 0.3))


# -- probabilities: 4.2.2 ----------------------------------------------------------------------


def test_hits_by_hand() -> None:
    rates = HitRates(2, 3)
    table, counts = rates.cumulative.copy(), [GUESSED] * 2
    assert table[:, -1] == pytest.approx([0.55 + 0.15, 0.55 * 0.85 + 0.15])
    ranks = np.array([[0, 2], [3, UNKNOWN], [1, 1], [0, 3]])
    for row in ranks:
        for i, rank in enumerate(row):
            if rank == UNKNOWN:
                continue
            counts[i] += 1
            alpha = max(1 / counts[i], HIT_ALPHA)
            for k in range(3):
                table[i, k] = (1 - alpha) * table[i, k] + alpha * (rank <= k)
    rates.observe(ranks)
    np.testing.assert_allclose(rates.cumulative, table, rtol=1e-12)
    np.testing.assert_allclose(rates.chances.cumsum(1), table, rtol=1e-12)
    assert rates.counts.tolist() == counts


def test_hits_settle_at_the_planted_chances() -> None:
    """Within four standard deviations of an average with alpha; the seed is fixed."""
    rates = HitRates(1, 2)
    ranks = np.random.default_rng(1).choice(3, size=(4000, 1), p=[0.6, 0.3, 0.1])
    rates.observe(ranks)
    deviation = math.sqrt(0.25 * HIT_ALPHA / 2)
    np.testing.assert_allclose(rates.chances[0], [0.6, 0.3], atol=4 * deviation)


def test_measured_accuracies_are_where_it_starts() -> None:
    table = np.array([[0.5, 0.2], [0.4, 0.1]])
    rates = HitRates.measured(table, 3, 4)
    np.testing.assert_allclose(rates.chances[:2, :2], table)
    assert not rates.chances[:2, 2:].any() and rates.chances[2].any()
    np.testing.assert_allclose(HitRates.measured(table, 1, 1).chances, [[0.5]])


def test_figure_6() -> None:
    """'b' in 'ab' is worth 0.6, 'e' in 'abe' 0.06; the tree of 'abd' and 'ac' 1.88 tokens.

    'a' is the root, which is certain. The text leaves open what c and d are: 0.1 and 0.3 fit.
    """
    chances = np.array([[0.6, 0.1], [0.3, 0.1]])  # b, c; d, e
    worth = dict(zip(*likeliest_paths(chances, 6)))
    assert worth[0,] == pytest.approx(0.6) and worth[0, 1] == pytest.approx(0.06)
    assert expected_length(TokenTree.from_paths([[0], [0, 0], [1]]), chances) == pytest.approx(1.88)


# -- trees -------------------------------------------------------------------------------------


def all_trees(paths: list[tuple[int, ...]], count: int) -> list[TokenTree]:
    """Every tree of so many candidates."""
    found = []
    for chosen in itertools.combinations(paths, count):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            found.append(TokenTree.from_paths(chosen))
    return found


def test_best_first_is_best_of_all() -> None:
    chances = np.array([[0.5, 0.3], [0.2, 0.45], [0.6, 0.1]])  # a second rank above a first, too
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(2), repeat=depth)]
    paths, products = likeliest_paths(chances, 5)
    for count in range(1, 6):
        tree = TokenTree.in_order(paths[:count])  # a parent stands before its child: nested
        best = max(expected_length(one, chances) for one in all_trees(every, count))
        assert expected_length(tree, chances) == pytest.approx(best)
        assert best == pytest.approx(1 + products[:count].sum())


# -- simulations -------------------------------------------------------------------------------

#: Chances of a trained adapter's ranks.
CHANCES = np.array([0.6, 0.45, 0.35, 0.25])[:, None] * np.array(
    [1.0, 0.3, 0.12, 0.08, 0.05] + [0.02] * 5 + [0.0] * (RANKS - 10)
)
POOR = 0.02 * CHANCES


def simulate(
    plan: TreePlan,
    seconds: Callable[[int], float],
    steps: int,
    chances: np.ndarray = CHANCES,
    seed: int = 0,
    noise: float = 0.1,
) -> list[int]:
    """Take steps; returns the sizes in rows. One step in a hundred stalls."""
    rng = random.Random(seed)
    cumulative = chances.cumsum(1)
    pending: list[list[int]] = []
    sizes = []
    known = len(chances)
    for _ in range(steps):
        if plan.is_due and pending:
            plan.hits.observe(np.array(pending))
            pending = []
        tree, ahead = plan.next()
        if plan.per_distance:
            tree, known = tree.truncate(known), ahead if len(tree) > 1 else 0
        ranks = [int((rng.random() >= row).sum()) for row in cumulative]
        depth = node = 0
        child = {(tree.parents[n], tree.ranks[n]): n for n in range(1, len(tree))}
        while depth < len(ranks) and (node := child.get((node, ranks[depth]), 0)):
            depth += 1
        rows = len(tree) * (1 + known * plan.per_distance)
        if rows > 1:
            pending.append(ranks[:known] + [UNKNOWN] * (len(ranks) - known))
        stall = 10.0 if rng.random() < 0.01 else 1.0
        spent = seconds(rows) * rng.lognormvariate(0.0, noise) * stall
        plan.observe(rows, spent, 0.02 if rows > 1 else None, depth + 1.0)
        sizes.append(rows)
    return sizes


def speeds(
    seconds: Callable[[int], float], per_distance: int = 0, chances: np.ndarray = CHANCES
) -> dict[tuple[int, int], float]:
    """The true speed by nodes and distances predicted."""
    found = {}
    for ahead in range(1, len(chances) + 1) if per_distance else [0]:
        products = likeliest_paths(chances[: ahead or None], 63)[1]
        found[1, ahead] = 1.0 / seconds(1)
        for nodes in range(2, min(64 // (1 + ahead * per_distance), len(products) + 1) + 1):
            rows = nodes * (1 + ahead * per_distance)
            found[nodes, ahead] = (1 + products[: nodes - 1].sum()) / (seconds(rows) + 0.02)
    return found


def reached(plan: TreePlan, true: dict[tuple[int, int], float]) -> float:
    """Speed of the chosen tree's size."""
    return true[len(plan.shape.tree), plan.shape.ahead]


def line(slope: float) -> Callable[[int], float]:
    return lambda rows: 1.0 - slope + slope * rows


@pytest.mark.parametrize("probes", [0, 1, 2])
@pytest.mark.parametrize("slope", [0.001, 0.01, 0.03, 0.1])
def test_the_size_of_the_largest_speed_is_found(slope: float, probes: int) -> None:
    true = speeds(line(slope), probes)
    shares, errors = [], []
    for seed in range(6):
        plan = TreePlan(HitRates(4), per_distance=probes)
        simulate(plan, line(slope), 500, seed=seed)
        speed = reached(plan, true)
        shares.append(speed / max(true.values()))
        errors.append(plan.cost.median_error)
        assert plan.details()["predicted_speed"] == pytest.approx(speed, rel=0.25)
    # What is missing: hysteresis, and that averages over some hundred steps are not exact, least
    # those of distances that are looked at now and then only.
    assert np.mean(shares) > (0.95 if probes else 0.97) and min(shares) > 0.92, shares
    # Noise of 10 % has a median of 6.7 %.
    assert np.median(errors) < 0.1


def test_sizes_differ_from_machine_to_machine() -> None:
    sizes = []
    for slope in (0.001, 0.01, 0.03, 0.1):
        plan = TreePlan(HitRates(4))
        simulate(plan, line(slope), 500)
        sizes.append(len(plan.shape.tree))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 4 * sizes[-1], sizes


@pytest.mark.parametrize(("slope", "later", "share"), [
    (0.01, 0.04, 0.95), (0.04, 0.01, 0.95),
    # Rows that become 33 times dearer are no longer the same machine; it takes longer.
    (0.003, 0.1, 0.9), (0.1, 0.003, 0.9),
])  # fmt: skip
def test_a_machine_that_changes_is_followed(slope: float, later: float, share: float) -> None:
    true, shares = speeds(line(later)), []
    for seed in range(6):
        plan = TreePlan(HitRates(4))
        simulate(plan, line(slope), 400, seed=seed)
        simulate(plan, line(later), 400, seed=seed + 100)
        shares.append(reached(plan, true) / max(true.values()))
    assert np.mean(shares) > share, shares


class Wavering:
    """A machine with other work: half as fast and worse for some twenty steps at a time."""

    def __init__(self, slope: float, seed: int):
        self.of, self.rng, self.pace = line(slope), random.Random(seed), 0.0

    def __call__(self, rows: int) -> float:
        self.pace = 0.95 * self.pace + self.rng.gauss(0.0, 0.1)
        return self.of(rows) * math.exp(self.pace)


def test_other_work_on_the_machine_slows_all_sizes_alike() -> None:
    true, shares, errors = speeds(line(0.02)), [], []
    for seed in range(6):
        plan = TreePlan(HitRates(4))
        simulate(plan, Wavering(0.02, seed), 600, seed=seed)
        shares.append(reached(plan, true) / max(true.values()))
        errors.append(plan.cost.median_error)
    assert np.mean(shares) > 0.97 and min(shares) > 0.92, shares
    # Nobody foresees the 10 % of noise, nor the next change of pace.
    assert np.median(errors) < 0.13, errors


def test_the_root_alone_where_no_tree_pays() -> None:
    """Small trees are tried again now and then; what steps really cost is the controller's."""
    shares = []
    for seed in range(6):
        plan = TreePlan(HitRates(4))
        sizes = simulate(plan, line(0.2), 1000, POOR, seed=seed)
        shares.append(sizes[200:].count(1) / 800)
    assert np.mean(shares) > 0.8 and min(shares) > 0.7, shares
    plan = TreePlan(HitRates(4))
    simulate(plan, line(1.0), 300, POOR)
    assert plan.shape.tree == TokenTree.chain(0) and plan.details()["candidates"] == 0
    # And when predictions get better, that is found out.
    simulate(plan, line(0.02), 1500, CHANCES, seed=1)
    assert len(plan.shape.tree) >= 4


def test_trees_repeat() -> None:
    plan = TreePlan(HitRates(4))
    simulate(plan, line(0.02), 400)
    trees = set()
    for _ in range(20):
        simulate(plan, line(0.02), 20, seed=_)
        trees.add(plan.shape.tree)
    assert len(trees) <= 5


def test_most_rows() -> None:
    """Where rows cost nothing, trees fill what they are allowed."""
    for per_distance, most in ((0, 20), (1, 20), (2, 20), (3, 8)):
        plan = TreePlan(HitRates(4), per_distance=per_distance, max_rows=most)
        sizes = simulate(plan, line(0.0001), 300)
        assert 0.7 * most < max(sizes) <= most
    with pytest.raises(ValueError, match="max_rows=7: a step with one candidate has 8 rows"):
        TreePlan(HitRates(4), per_distance=3, max_rows=7)


def test_probes_predict_as_far_as_it_pays() -> None:
    """Rows that are dear leave room for a candidate or two, and nothing for far distances."""
    aheads = []
    for slope in (0.001, 0.05):
        plan = TreePlan(HitRates(4), per_distance=1)
        simulate(plan, line(slope), 600)
        aheads.append(plan.shape.ahead)
        true = speeds(line(slope), 1)
        assert reached(plan, true) > 0.93 * max(true.values())
    assert aheads[0] > aheads[1] >= 1
    # Distances that were not predicted for long are looked at again and found worth it.
    simulate(plan, line(0.001), 1000, seed=1)
    assert plan.shape.ahead > aheads[1]


def test_sizes_grow_step_by_step() -> None:
    """Where steps beyond 40 rows take twice as long, no line through small sizes says so."""

    def cliff(rows: int) -> float:
        return line(0.002)(rows) * (1 if rows <= 40 else 2)

    plan = TreePlan(HitRates(4))
    sizes = simulate(plan, cliff, 600)
    first = [size for n, size in enumerate(sizes) if size > max(sizes[:n], default=0)]
    assert all(b <= 2 * a for a, b in zip(first[2:], first[3:]))
    assert len(plan.shape.tree) <= 40


def test_a_new_setting_starts_from_a_like_one() -> None:
    plan = TreePlan(HitRates(4))
    simulate(plan, line(0.01), 300)
    other = plan.like_this(1.0)
    assert other.shape.tree == plan.shape.tree
    sizes = simulate(other, line(0.01), 40, seed=3)
    assert min(sizes) > 4  # nothing is tried that is known to be slow
    larger = plan.like_this(8.0)
    simulate(larger, line(0.08), 40, seed=3)
    assert len(larger.shape.tree) < len(plan.shape.tree)


def test_details_are_small() -> None:
    plan = TreePlan(HitRates(4))
    json.dumps(plan.details())
    simulate(plan, line(0.01), 5000)
    assert len(json.dumps(plan.details())) < 12_000
