"""A few random calls of ``generate`` and sequences of calls on one model; as many as it is told are
run by ``tests/random_cases.py``."""

import os

import pytest
import random_sequences
from covering import EVERY_CASE
from method_variants import VARIANTS
from random_cases import AROUND, CRITERIA, FORMS, MODELS, RUNS, draw, pairs, run

pytestmark = pytest.mark.usefixtures("recorded")

COUNT = 300 if os.environ.get(EVERY_CASE) else 12
#: Of each kind of models; Hypothesis begins with the simplest one, which has no call.
SEQUENCES = 40 if os.environ.get(EVERY_CASE) else 3


@pytest.mark.parametrize("number", range(COUNT))
def test_a_strategy_gives_the_tokens_of_plain_generation(number: int) -> None:
    outcome = run(draw(number))
    assert outcome.result in ("exact", "refused", "invalid"), outcome.note


@pytest.mark.parametrize("kind", MODELS)
def test_so_does_each_call_of_a_sequence(kind: str) -> None:
    assert random_sequences.play(SEQUENCES, kind=kind)["exact"]


@pytest.mark.parametrize("name", [name for name, one in VARIANTS.items() if one.hitting])
def test_variants_whose_drafts_are_accepted_have_some(name: str) -> None:
    outcome = run(next(pairs())._replace(name=name, variant=VARIANTS[name].hitting))
    assert outcome.result == "exact" and outcome.accepted, outcome.note


def test_everything_is_drawn() -> None:
    cases = [draw(number) for number in range(4000)]
    assert {(case.name, case.variant) for case in cases} == set(RUNS)
    assert {(case.kind, case.model) for case in cases} == {
        (kind, model) for kind, models in MODELS.items() for model in models
    }
    assert {case.turn for case in cases} == {None, "tree", "dynamic"}
    assert {len(case.rows) for case in cases} == {1, 2, 3, 4}
    for name, values in (("around", AROUND), ("criteria", CRITERIA), ("form", FORMS)):
        assert {getattr(case, name) for case in cases} == {*values}
    assert {(name, value) for case in cases for name, value in case.more.items()} == {
        ("recycle", True), ("recycle", False), ("forced", False),
        *(("max_rows", most) for most in (1, 2, 3)),
    }  # fmt: skip
    for condition in ("compiled", "matched", "removed", "watched"):
        assert 0 < sum(bool(getattr(case, condition)) for case in cases) < len(cases) / 4
