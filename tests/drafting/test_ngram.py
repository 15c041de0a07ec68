"""What lookups learn of their confidence."""

from __future__ import annotations

import pytest

from hf_spec.drafting.ngram import Confidence


def test_confidence_follows_what_was_accepted() -> None:
    one = Confidence()
    assert one.first(3) == 0.5 and one.deeper == pytest.approx(0.8)
    for _ in range(98):
        one.observe(3, 4, 4)
    assert one.first(3) == pytest.approx(99 / 100) and one.deeper > 0.99
    assert one.first(2) == 0.5, "each size for itself"
    one.observe(3, 0, 4)
    assert one.first(3) == pytest.approx(99 / 101) and one.deeper > 0.99
