"""Rows, table and files, from measurements whose figures are worked out by hand."""

import json
import sys
from operator import truediv

import numpy as np
import pytest

from hf_spec.core.stats import SpecStats
from hf_spec.tools.bench import results
from hf_spec.tools.bench.contenders import BASELINE, Contender
from hf_spec.tools.bench.prompts import Prompt
from hf_spec.tools.bench.results import Agreement, BenchResult, Measurement, interval

SAME, TIE, OTHER = Agreement.IDENTICAL, Agreement.DIVERGED_AT_TIE, Agreement.DIVERGED


def stats(steps: int, tokens: int, forward: float) -> SpecStats:
    return SpecStats(
        num_steps=steps, num_row_steps=steps, num_generated_tokens=tokens,
        accepted_histogram={1: steps - 1, tokens - steps + 1: 1},
        draft_seconds=0.1, forward_seconds=forward, verify_seconds=0.2, other_seconds=0.05,
    )  # fmt: skip


def measurements() -> list[Measurement]:
    plain = "generate"
    return [
        Measurement(plain, 1, [0], "qa", 2.0, [[5] * 10], 10, None, [SAME]),
        Measurement("fast", 1, [0], "qa", 1.0, [[5] * 10], 4, stats(4, 10, 0.6), [SAME]),
        Measurement(plain, 1, [1], "qa", 2.0, [[5] * 10], 10, None, [SAME]),
        Measurement("fast", 1, [1], "qa", 1.5, [[6] * 10], 8, stats(8, 10, 1.1), [TIE]),
        Measurement(plain, 1, [2], "math", 4.0, [[5] * 30], 30, None, [SAME]),
        Measurement("fast", 1, [2], "math", 5.0, [[7] * 20], 20, stats(20, 20, 4.0), [OTHER]),
    ]


def result(rows: list[Measurement]) -> BenchResult:
    prompts = [Prompt("a", "qa", 1), Prompt("b", "qa", 2), Prompt("c", "math", 3)]
    lineup = [BASELINE, Contender("fast", {"assistant_kwargs": {"acceptance": "typical"}})]
    return BenchResult(prompts, lineup, {"max_new_tokens": 30}, rows, ["a note"])


def test_rows_hold_the_figures_worked_out_by_hand():
    rows = {(row["strategy"], row["task"]): row for row in result(measurements()).rows}
    assert list(rows) == [
        ("generate", "qa"), ("generate", "math"), ("generate", "all"),
        ("fast", "qa"), ("fast", "math"), ("fast", "all"),
    ]  # fmt: skip
    qa, everything = rows["fast", "qa"], rows["fast", "all"]
    assert (qa["prompts"], qa["new_tokens"], qa["seconds"]) == (2, 20, 2.5)
    assert qa["tokens_per_second"] == pytest.approx(8.0)
    assert qa["speedup"] == pytest.approx(8.0 / 5.0)
    assert qa["tau"] == pytest.approx(20 / 12)
    assert (qa["identical"], qa["diverged_at_tie"], qa["diverged"]) == (1, 1, 0)
    assert everything["tokens_per_second"] == pytest.approx(40 / 7.5)
    assert everything["speedup"] == pytest.approx((40 / 7.5) / (50 / 8.0))
    assert everything["tau"] == pytest.approx(40 / 32)
    found = [everything[kind] for kind in ("identical", "diverged_at_tie", "diverged")]
    assert found == [1, 1, 1]
    assert rows["generate", "all"]["speedup"] == rows["generate", "all"]["tau"] == 1.0
    # Statistics are summed, and shares of the time add up.
    summed = everything["stats"]
    assert summed["num_steps"] == 32 and summed["num_generated_tokens"] == 40
    assert summed["mean_accepted_tokens"] == pytest.approx(40 / 32)
    assert summed["forward_seconds"] == pytest.approx(5.7)
    share = summed["share"]
    assert share["forward"] == pytest.approx(5.7 / 7.5)
    assert share["draft"] == pytest.approx(0.3 / 7.5)
    assert sum(share.values()) == pytest.approx(1.0)
    assert rows["generate", "qa"]["stats"] == {"num_row_steps": 20, "num_generated_tokens": 20}


def test_groups_of_a_suite_have_the_same_weight(tmp_path, table_of):
    """Whatever their numbers of prompts and tokens are; and tau is known without the prefill."""
    made = result(measurements())
    made.settings["protocol"] = {"suite": "some-suite"}
    rows = {(row["strategy"], row["task"]): row for row in made.rows}
    qa, math, everything = (rows["fast", task] for task in ("qa", "math", "all"))
    assert qa["tau_without_prefill"] == pytest.approx((20 - 2) / (12 - 2))
    assert math["tau_without_prefill"] == pytest.approx((20 - 1) / (20 - 1))
    assert everything["tau_without_prefill"] == pytest.approx((18 / 10 + 1) / 2)
    assert everything["tau"] == pytest.approx((20 / 12 + 1) / 2)
    assert everything["speedup"] == pytest.approx((8.0 / 5.0 + 4.0 / 7.5) / 2)
    assert rows["generate", "all"]["tau_without_prefill"] == 1.0
    printed = table_of(made, 80)
    assert "prompts: qa 2, math 1" in printed and "with prefill" in printed
    assert "1.80  1.00  1.40          1.33" in printed
    results.write_chart(tmp_path / "tau.svg", made)
    assert "<svg" in (tmp_path / "tau.svg").read_text()
    bars = made.plot()
    heights = [round(bar.get_height(), 2) for bar in bars.patches]
    assert heights == [1.8, 1.0, 1.4]
    assert [label.get_text() for label in bars.get_xticklabels()] == ["qa", "math", "mean"]


def test_intervals_are_of_prompts_and_paired(table_of):
    """A machine that slows down by half slows all contenders: the speedup is as sure as before."""
    made = []
    for index in range(8):
        pace = 1 + index % 2
        made += [
            Measurement("generate", 1, [index], "qa", 2.0 * pace, [[5] * 10], 10, None, [SAME]),
            Measurement("fast", 1, [index], "qa", 1.0 * pace, [[5] * 10], 4 + index % 3),
        ]
    rows = {row["strategy"]: row for row in result(made).rows if row["task"] == "all"}
    assert rows["fast"]["speedup_interval"] == pytest.approx([2.0, 2.0])
    low, high = rows["fast"]["tau_interval"]
    assert 10 / 6 < low < rows["fast"]["tau"] < high < 10 / 4
    assert rows["generate"]["speedup_interval"] is None
    assert rows["generate"]["tau_interval"] == pytest.approx([1.0, 1.0])
    shown = table_of(result(made), 200)
    assert "2.00x (2.00-2.00)" in shown and f"({low:.2f}-{high:.2f})" in shown
    assert "2.00-2.00" not in table_of(result(made), 40, terminal=True), "there is no room"
    assert "2.00-2.00" in table_of(result(made), 40), "a file has room"
    assert all(row["tau_interval"] is None for row in result(measurements()).rows)  # too few


def test_intervals_cover_what_they_say():
    """The true ratio of 2 lies in 95 of 100; of 300 that are 285, and five sigma less are 266."""
    draw, inside = np.random.default_rng(0), 0
    for _ in range(300):
        steps = draw.integers(5, 40, 40)
        low, high = interval(truediv, steps * draw.normal(2.0, 0.4, 40), steps)
        inside += low <= 2.0 <= high
    assert 266 <= inside <= 300


@pytest.mark.parametrize("width", [40, 80, 200])
def test_table_shows_every_figure_at_any_width(width, table_of):
    text = table_of(result(measurements()), width, by_task=True, terminal=True)
    for expected in ("fast (lossy)", "math", "1.60x", "8.0", "1.67", "a note"):
        assert expected in text
    assert "1 identical, 1 at ties, 1 diverged" in text and "3 identical\n" in text
    assert "time of fast: draft 4%, forward 76%" in text
    assert "…" not in text


@pytest.fixture
def table_of(monkeypatch, capsys):
    """The printed table, in a file or a terminal of some width."""

    def printed(bench, width, by_task=False, terminal=False):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
        print(results.described(bench, by_task))
        return capsys.readouterr().out

    return printed


def test_results_file_has_the_documented_keys(tmp_path):
    bench = result(measurements())
    results.write_results(tmp_path / "new" / "results.json", bench, {"python": "3"})
    data = json.loads((tmp_path / "new" / "results.json").read_text())
    assert data["runs"] == bench.rows
    assert set(data["runs"][0]) == {
        "strategy", "task", "batch_size", "baseline", "prompts", "new_tokens", "seconds",
        "tokens_per_second", "speedup", "speedup_interval", "tau", "tau_interval", "identical",
        "tau_without_prefill", "diverged_at_tie", "diverged", "stats", "synthetic_acceptance",
    }  # fmt: skip
    assert data["calls"][1] == {
        "strategy": "fast", "batch_size": 1, "prompts": [0], "seconds": 1.0, "new_tokens": 10,
        "row_steps": 4,
    }  # fmt: skip
    assert data["environment"]["python"] == "3"
    assert data["environment"]["interrupted"] is False
