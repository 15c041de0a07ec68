"""What steps take: every formula by hand."""

import numpy as np
import pytest

from hf_spec.policy.step_times import CLIP, DOUBT, FIRST, TIME_ALPHA, MeanTime, StepTimes


def test_times_by_hand() -> None:
    """Cold, five for the median, then averages that no stall carries away."""
    size = MeanTime()
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


def test_a_plain_step_has_its_own_time() -> None:
    times = StepTimes()
    for _ in range(5):
        times.observe(8, 1.0, 0.1)
    assert times.seconds(8) == 1.0 and times.seconds(4) is times.plain_seconds() is None
    assert times.curve([4, 8]) is None
    for _ in range(2):
        times.observe(1, 0.9)
    assert times.mean(1) == 0.9 and times.drafting_seconds == pytest.approx(0.1)


def test_sizes_between_and_beyond_those_that_are_known() -> None:
    times = StepTimes.guessed({1: 1.0, 4: 1.6, 8: 2.0})
    assert times.curve([1, 2, 4, 6, 8, 16]) == pytest.approx([1.0, 1.2, 1.6, 1.8, 2.0, 2.8])
    assert times.slope == pytest.approx(0.1)


def test_no_size_takes_longer_than_a_larger_one() -> None:
    times = StepTimes.guessed({1: 1.0, 4: 9.0, 8: 2.0})
    assert times.curve([1, 4, 8, 16]) == pytest.approx([1.0, 2.0, 2.0, 2.0])
    assert times.slope == 0.0


def test_what_little_is_known_of_is_doubted() -> None:
    times = StepTimes.guessed({1: 1.0, 32: 9.0})
    for _ in range(3):
        times.observe(8, 2.0)
    assert times.curve([8])[0] == pytest.approx(2.0 * (1 - DOUBT / 2))


def test_guesses_for_other_batches() -> None:
    """By the step tokens of all rows."""
    times = StepTimes.guessed({1: 1.0, 4: 1.6, 8: 2.0})
    assert times.elsewhere(1.0).means == pytest.approx(times.means)
    assert times.elsewhere(2.0).means == pytest.approx({1: 1.2, 4: 2.0, 8: 2.8})
    half = times.elsewhere(0.5)
    assert half.means == pytest.approx({1: 1.0, 4: 1.2, 8: 1.6})
    half.observe(4, 7.0)  # a warm-up
    assert half.mean(4) == pytest.approx(1.2)
    half.observe(4, 1.3)
    assert half.mean(4) == pytest.approx(1.3)
    assert StepTimes.guessed({1: 1.0}).elsewhere(2.0).means == {}


def test_a_stall_says_nothing_of_a_new_size() -> None:
    """Where others are known: it counts as twice what they make expect."""
    times = StepTimes.guessed({4: 1.4, 9: 1.9})
    for seconds in (9.0, 50.0):  # the first is left out
        times.observe(20, seconds)
    assert times.sizes[20].mean == pytest.approx(CLIP * 3.0)


def test_noise_does_not_move_what_is_known_of_other_sizes() -> None:
    """While only plain steps are taken: the pace and their own time would drift apart."""
    rng, times = np.random.default_rng(0), StepTimes()
    for rows in (1, 4, 9) * 12 + (1,) * 2000:
        times.observe(rows, (1.0 + 0.1 * rows) * rng.lognormal(0.0, 0.25))
    assert times.mean(4) / times.plain_seconds() == pytest.approx(1.4 / 1.1, rel=0.1)
