"""``benchmarks/serving.py``: clients of a server, some of which go away."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from scripts import load_script
from transformers.utils.import_utils import is_serve_available

serving: Any = load_script("serving")
QUESTION = serving.Question("p", 8, "abcdefgh")


@pytest.mark.parametrize(
    ("percent", "value"), [(50, 2.0), (51, 3.0), (95, 4.0), (100, 4.0), (1, 1.0), (25, 1.0)]
)
def test_percentiles_are_values_that_so_many_do_not_exceed(percent: int, value: float) -> None:
    assert serving.percentile([4.0, 2.0, 1.0, 3.0], percent) == value
    assert serving.percentile([], percent) == 0.0


class Answers:
    """A server whose answer is in these pieces, or fails behind them."""

    def __init__(self, *pieces: str, error: Exception | None = None):
        self.given, self.error = pieces, error

    def pieces(self, question: Any) -> Iterator[str]:
        yield from self.given
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("server", "most", "outcome"),
    [
        (Answers("abcd", "efgh"), 8, {"answers": 1, "tokens": 8}),
        (Answers("abcd", "efgx"), 8, {"answers": 1, "tokens": 8, "wrong": 1}),
        (Answers("abcd"), 8, {"answers": 1, "tokens": 4, "wrong": 1}),
        (Answers("abcd", "efgh"), 3, {"left": 1, "tokens": 4}),
        (Answers("abxd", "efgh"), 3, {"left": 1, "tokens": 4, "wrong": 1}),
        (Answers("abcdefgh", "more"), 3, {"answers": 1, "tokens": 12, "wrong": 1}),
        (Answers("ab", error=RuntimeError("gone")), 8, {"errors": ["RuntimeError('gone')"]}),
    ],
    ids=["right", "wrong", "short", "left", "left wrong", "long", "failed"],
)
def test_answers_are_compared_as_far_as_they_went(
    server: Any, most: int, outcome: dict[str, Any]
) -> None:
    found = serving.Results()
    serving.ask(server, QUESTION, most, found, threading.Lock())
    names = ("answers", "left", "wrong", "tokens", "errors")
    assert {name: value for name in names if (value := getattr(found, name))} == outcome
    if "errors" not in outcome:
        assert len(found.first) == 1 and min(found.first + found.between) >= 0


@pytest.mark.environment
@pytest.mark.skipif(not is_serve_available(), reason="needs the packages of hf_spec[serve]")
def test_clients_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    serving.main(["--clients", "3", "--seconds", "1", "--new-tokens", "12", "--pause", "0.01"])
    head, line = (
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in capsys.readouterr().out.splitlines() if row[:2] == "| " and "---" not in row
    )  # fmt: skip
    found = dict(zip(head, line))
    assert int(found["answers"]) > 0 and found["wrong"] == found["errors"] == "0"
