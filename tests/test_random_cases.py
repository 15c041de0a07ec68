"""A few random calls of ``generate`` and sequences of calls on one model; as many as it is told are
run by ``tests/random_cases.py``."""

import json
import os
from pathlib import Path

import pytest
import random_cases
import random_sequences
from conftest import VOCAB
from covering import EVERY_CASE
from random_cases import MODELS, RUNS, draw, run

from hf_spec.core import verify

COUNT = 300 if os.environ.get(EVERY_CASE) else 12
#: Attention, images, states; each kind of cache.
SEQUENCES = range(100) if os.environ.get(EVERY_CASE) else (1, 12, 26, 29, 1683)


@pytest.mark.parametrize("number", range(COUNT))
def test_a_strategy_gives_the_tokens_of_plain_generation(number: int) -> None:
    outcome = run(draw(number))
    assert outcome.result in ("exact", "refused", "invalid"), outcome.note


@pytest.mark.parametrize("seed", SEQUENCES)
def test_so_does_each_call_of_a_sequence(seed: int) -> None:
    found = random_sequences.run_sequence(seed)
    assert found["result"] == "exact", "\n".join([found["note"], *found["events"]])
    assert found["calls"]["exact"]


def test_everything_is_drawn() -> None:
    cases = [draw(number) for number in range(4000)]
    assert {(case.name, case.variant) for case in cases} == set(RUNS)
    assert {(case.kind, case.model) for case in cases} == {
        (kind, model) for kind, models in MODELS.items() for model in models
    }
    assert {case.turn for case in cases} == {None, "tree", "dynamic"}
    assert {len(case.rows) for case in cases} == {1, 2, 3, 4}
    for condition in ("compiled", "matched", "removed"):
        assert 0 < sum(bool(getattr(case, condition)) for case in cases) < len(cases) / 4


def test_a_wrong_token_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = verify.match
    monkeypatch.setattr(verify, "match", lambda tree, best: right(tree, (best + 1) % VOCAB))
    case = draw(0)._replace(
        kind="attention", model="llama", name="prompt_lookup", variant="tree", turn=None,
        rows=[(0, 9)] * 2, settings={"max_new_tokens": 6, "do_sample": False}, matched=False,
    )  # fmt: skip
    monkeypatch.setattr(random_cases, "draw", lambda number, kinds: case._replace(number=number))
    output = tmp_path / "cases.jsonl"
    assert random_cases.main(["--sequences", "1", "--first", "26"]) == 1
    assert "'different': 1} of 1 sequences" in capsys.readouterr().out
    for count in (1, 2):  # the second goes on where the first stopped
        assert random_cases.main(["--count", str(count), "--output", str(output)]) == 1
        assert f"'different': {count}" in capsys.readouterr().out
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["number"] for line in lines] == [0, 1]
    assert [line["result"] for line in lines] == ["different"] * 2
    assert lines[0]["note"] == "turn 0, row 0, token 0"
