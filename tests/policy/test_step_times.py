"""What steps take: every formula by brute force or by hand."""

import numpy as np
import pytest

from hf_spec.policy.step_times import (
    CLIP,
    FIRST,
    SIZES,
    TIME_ALPHA,
    UNKNOWN,
    SizeTime,
    StepTimes,
    fit_line,
)


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
    assert alpha > TIME_ALPHA and size.mean == pytest.approx(3.0 ** (1 - alpha) * 4.0**alpha)
    before = size.mean
    size.add(1000.0)
    assert size.mean == pytest.approx(before * CLIP ** (1 / (FIRST + 2)))


def test_times_with_another_alpha_and_lambda() -> None:
    """Alpha: how fast a mean follows. Lambda: a size that has not been taken for long counts less,
    in the line and in its own mean."""
    for alpha in (TIME_ALPHA, 0.9):
        times = StepTimes(alpha=alpha)
        for seconds in [1.0] * 40 + [1.5]:
            times.observe(8, seconds)
        normalized = times.sizes[8].mean
        assert normalized == pytest.approx(1.5**alpha, rel=0.05)
    slopes = []
    for decay in (0.0, 0.5):
        times = StepTimes(decay=decay)
        for rows, seconds in ((2, 1.0), (4, 2.0), (8, 4.0), (16, 5.0)):
            for _ in range(20):
                times.observe(rows, seconds)
        times.pace, times._line = 1.0, UNKNOWN
        slopes.append(times.line[1])
    assert slopes[1] < 0.7 * slopes[0]  # of the last two sizes alone: 1 / 8 per token


def test_nothing_is_known_of_a_line_through_one_size() -> None:
    times = StepTimes()
    for _ in range(5):
        times.observe(8, 1.0, 0.1)
    assert times.line is times.seconds(8) is times.plain_seconds() is None
    for _ in range(2):
        times.observe(1, 0.9)  # plain
    assert times.plain_seconds() == 0.9
    assert times.seconds(8) == pytest.approx(1.0 + 0.1)  # drafting is part of what drafts


def test_a_fast_way_for_single_rows_does_not_bend_the_line() -> None:
    times = StepTimes()
    for rows, seconds in ((1, 0.5), (4, 1.4), (9, 1.9)):
        for _ in range(3):
            times.observe(rows, seconds)
    assert times.line == pytest.approx((1.0, 0.1)) and times.plain_seconds() == 0.5


def test_few_sizes_are_kept() -> None:
    times = StepTimes()
    for rows in range(1, SIZES + 10):
        for _ in range(2):
            times.observe(rows, 1.0 + rows)
    assert len(times.sizes) == SIZES and min(times.sizes) == 10


def test_a_measured_plain_step_is_expected_of_other_conditions() -> None:
    """Not the line's: devices often have a faster way for a single row."""
    times = StepTimes.guessed({1: 0.5, 4: 1.4, 9: 1.9})  # 1.0 + 0.1 i, but for one row
    same, larger = times.elsewhere(1.0, scale=1.0), times.elsewhere(1.0, scale=3.0)
    assert same.plain_seconds() == pytest.approx(0.5) and same.line == pytest.approx((1.0, 0.1))
    assert larger.plain_seconds() == pytest.approx(0.7)
    assert larger.line == pytest.approx((1.0, 0.3))


def test_a_stall_says_nothing_of_a_new_size() -> None:
    """Where others are known: it counts as twice what they make expect."""
    times = StepTimes.guessed({4: 1.4, 9: 1.9})  # 1.0 + 0.1 i
    for seconds in (9.0, 50.0):  # the first is left out
        times.observe(20, seconds)
    assert times.sizes[20].mean == pytest.approx(CLIP * 3.0)


def test_plain_steps_of_smaller_batches_take_their_share_at_least() -> None:
    """Also where rows are so dear that the line falls below nothing."""
    times = StepTimes.guessed({1: 1.0, 4: 120.0, 8: 240.0})
    assert times.elsewhere(0.5, scale=0.5).plain_seconds() == pytest.approx(0.5)


def test_noise_does_not_move_what_is_known_of_other_sizes() -> None:
    """While only plain steps are taken: the pace and their own time would drift apart."""
    rng, times = np.random.default_rng(0), StepTimes()
    for rows in (1, 4, 9) * 12 + (1,) * 2000:
        times.observe(rows, (1.0 + 0.1 * rows) * rng.lognormal(0.0, 0.25))
    assert times.curve(9)[4] / times.plain_seconds() == pytest.approx(1.4 / 1.1, rel=0.1)
