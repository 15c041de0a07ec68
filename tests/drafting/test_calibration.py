"""How far predictions can be trusted: by hand, and from planted chances."""

import math
import random

import pytest

from hf_spec.drafting.calibration import ALPHA, GUESSED, LEAST, MOST, Calibration


def test_factors_and_rates_by_hand() -> None:
    one = Calibration(2)
    assert one.log_factors == [0.0, 0.0] and (one.rate(1), one.rate(2)) == (1.0, 1.0)
    came = promised = tries = GUESSED
    for share, hit in ((0.5, True), (0.25, False), (1.0, True), (0.3, False)):
        one.observe(2, share, hit)
        came, promised, tries = (
            old * (1 - ALPHA) + new for old, new in ((came, hit), (promised, share), (tries, 1))
        )
    assert one.log_factors == [0.0, pytest.approx(math.log(came / promised))]
    assert (one.rate(1), one.rate(2)) == (1.0, pytest.approx(came / tries))


@pytest.mark.parametrize(("said", "real"), [(0.9, 0.3), (0.2, 0.6), (0.5, 0.5)])
def test_factors_settle_at_what_comes_per_promise(said: float, real: float) -> None:
    """Within four standard deviations of an average with alpha; the seed is fixed."""
    rng, one = random.Random(0), Calibration(1)
    for _ in range(3000):
        one.observe(1, said, rng.random() < real)
    deviation = math.sqrt(real * (1 - real) * ALPHA / 2)
    assert math.exp(one.log_factors[0]) * said == pytest.approx(real, abs=4 * deviation)


def test_factors_are_limited() -> None:
    one = Calibration(2)
    for _ in range(5000):
        one.observe(1, 1.0, False)
        one.observe(2, 0.01, True)
    assert one.log_factors == pytest.approx([math.log(LEAST), math.log(MOST)])


#: A root with the children 5 and 6; 7 and 8 below 5; padding.
PARENTS, TOKENS = [0, 0, 0, 1, 1, 0], [9, 5, 6, 7, 8, 5]
CHANCES = [1.0, 0.5, 0.3, 0.2, 0.1, 0.0]


@pytest.mark.parametrize(
    ("emitted", "expected"),
    [
        ([5, 8, 1], [(1, 0.8, True), (2, 0.6, True)]),  # nothing was predicted behind 8
        ([5, 3, 7], [(1, 0.8, True), (2, 0.6, False)]),
        ([6, 7], [(1, 0.8, True)]),
        ([4, 5], [(1, 0.8, False)]),
        ([5], [(1, 0.8, True)]),
        ([], []),
    ],
)
def test_a_prediction_counts_where_the_tokens_before_it_came(
    emitted: list[int], expected: list[tuple[int, float, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, float, bool]] = []
    monkeypatch.setattr(Calibration, "observe", lambda self, *args: seen.append(args))
    Calibration(3).walk(PARENTS, TOKENS, CHANCES, [0.0] * 3, emitted)
    assert seen == [(distance, pytest.approx(share), hit) for distance, share, hit in expected]


def test_what_was_promised_before_it_was_calibrated() -> None:
    """Else factors would settle halfway: at the root of what comes per promise."""
    rng, one = random.Random(0), Calibration(1)
    for _ in range(3000):
        trust = one.log_factors
        chances = [1.0, 0.9 * math.exp(trust[0])]
        one.walk([0, 0], [9, 5], chances, trust, [5 if rng.random() < 0.3 else 6])
    assert 0.9 * math.exp(one.log_factors[0]) == pytest.approx(0.3, abs=0.08)
