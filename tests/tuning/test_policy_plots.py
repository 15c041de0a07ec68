"""``hf-spec plot`` of the policy, from a real benchmark's ``results.json`` and from others."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import bars, lines, ticks
from peft import get_peft_model
from tiny_checkpoint import save_checkpoint, write_prompts
from transformers import AutoModelForCausalLM

import hf_spec
from hf_spec import cli
from hf_spec.tuning.policy_plots import (
    WINDOW,
    draw_policies,
    promised_speedup,
    read_policies,
    running_mean,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a benchmark with trees chosen by the policy, fixed ones, and plain decoding."""
    root = tmp_path_factory.mktemp("decisions")
    save_checkpoint(root / "m")
    write_prompts(root / "p.jsonl", [{"prompt": text} for text in ("abab" * 4, "xyz xyz xyz")])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(root / "m", dtype=torch.float32)
    get_peft_model(model, hf_spec.MedusaConfig(num_heads=2)).save_pretrained(root / "medusa")
    (root / "medusa" / "README.md").unlink()  # PEFT's general one
    code = cli.main(
        [
            "bench", "--model", str(root / "m"), "--adapter", str(root / "medusa"),
            "--prompts", str(root / "p.jsonl"), "--dtype", "float32", "--device", "cpu",
            "--strategies", "medusa,medusa:sparse", "--max-new-tokens", "40",
            "--strategy-kwargs", 'medusa:sparse={"tree": "sparse", "fallback": false}',
            "--strategy-kwargs", 'medusa={"fallback": true}', "--output", str(root / "out"),
        ]
    )  # fmt: skip
    assert code == 0
    return root / "out"


def plot(source: Path, *more: str) -> int:
    return cli.main(["plot", str(source), *more])


def step(**changes: Any) -> dict[str, Any]:
    return {
        "candidates": 2, "step_tokens": 3, "pruned": False, "promised_tokens": 3.0, "tokens": 2,
        "promised_seconds": 0.04, "seconds": 0.05, "batch_size": 1, **changes,
    }  # fmt: skip


@pytest.fixture
def run() -> dict[str, Any]:
    """A run whose every figure is known."""
    policy = {
        "paused": True, "batch_size": 1, "plain_seconds": 0.02, "b0": 0.025, "b1": 0.001,
        "drafting_seconds": 0.001, "seconds": {"1": 0.02, "3": 0.03, "9": 0.033},
        "prediction_worth": 0.5, "came_per_promised": 0.8, "median_time_error": 0.07,
        "steps": [
            {"candidates": 0, "step_tokens": 1, "count": 5},
            {"candidates": 2, "step_tokens": 3, "count": 3},
            {"candidates": 8, "step_tokens": 9, "count": 2},
            {"candidates": 8, "step_tokens": 17, "count": 4},
        ],
        "history": [
            step(), step(candidates=8, promised_tokens=None, tokens=9),
            step(candidates=0, promised_tokens=1.0, tokens=1, promised_seconds=0.02),
        ],
    }  # fmt: skip
    return {
        "strategy": "medusa", "task": "all", "batch_size": 1, "speedup": 1.3,
        "stats": {"details": {"policy": policy}},
    }  # fmt: skip


def panels(runs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Axes of a figure by title; what has none is the dots' own."""
    found: dict[str, list[Any]] = {}
    for axes in draw_policies(runs).get_axes():
        found.setdefault(axes.get_title(), []).append(axes)
    return found


def test_sizes_are_bars_of_steps_by_candidates(run: dict[str, Any]) -> None:
    (axes,) = panels([run])["trees chosen"]
    assert bars(axes) == [5, 3, 6]  # both kinds of 8 together
    assert ticks(axes) == ["plain", "2", "8"]


def test_step_times_are_a_line_means_and_the_plain_step(run: dict[str, Any]) -> None:
    (axes,) = panels([run])["step time T(n)"]
    drawn = lines(axes)
    assert drawn["plain step"] == [(1, 20.0)]
    assert drawn["measured"] == [(3, pytest.approx(30.0)), (9, pytest.approx(33.0))]
    assert drawn["b0 + b1 n"] == [(1, pytest.approx(26.0)), (9, pytest.approx(34.0))]


def test_promises_stand_beside_what_came_of_them(run: dict[str, Any]) -> None:
    """Steps without a promise, as those of fixed trees, show their size only."""
    drawn = panels([run])
    (axes,) = drawn["predicted and emitted"]
    assert lines(axes)[f"predicted, mean of {WINDOW}"] == [(0, 3.0), (2, 2.0)]
    assert lines(axes)[f"emitted, mean of {WINDOW}"] == [(0, 2.0), (2, 1.5)]
    (dots,) = drawn[""]
    assert lines(dots)["chosen"] == [(0, 2), (1, 8), (2, 0)]


def test_running_means() -> None:
    values = [float(n) for n in range(40)]
    assert running_mean(values)[:3] == [0.0, 0.5, 1.0]
    assert running_mean(values)[39] == sum(range(40 - WINDOW, 40)) / WINDOW


def test_promised_beside_measured_speedup(run: dict[str, Any]) -> None:
    """Tokens per row over the time that was promised; here 4 tokens in 60 ms, plain 20 ms each."""
    policy = run["stats"]["details"]["policy"]
    assert promised_speedup(policy) == pytest.approx(4 * 0.02 / 0.06)
    (axes,) = panels([run])["speedup"]
    assert bars(axes) == pytest.approx([4 / 3, 1.3])

    larger = copy.deepcopy(policy)
    larger["history"].append(step(batch_size=4, promised_tokens=40.0))  # of a batch that shrank
    assert promised_speedup(larger) == promised_speedup(policy)
    assert promised_speedup({**policy, "plain_seconds": None}) is None
    assert promised_speedup({**policy, "history": [step(promised_tokens=None)]}) is None


def test_titles_say_how_far_promises_held(run: dict[str, Any]) -> None:
    figure = draw_policies([run, {**run, "strategy": "other"}])
    titles = [part.get_suptitle() for part in figure.subfigs]
    assert titles[0] == (
        "medusa, batch 1; 0.80 tokens emitted per predicted one; median error of step times 7%; "
        "paused at the end"
    )
    assert titles[1].startswith("other") and titles[2] == ""


def test_a_benchmark_can_be_drawn(results: Path, tmp_path: Path) -> None:
    runs = read_policies(results)
    assert [run["strategy"] for run in runs] == ["medusa", "medusa:sparse"]
    assert plot(results) == 0
    assert (results / "policy.png").is_file()
    assert plot(results, "-o", str(tmp_path / "new" / "folder")) == 0
    assert (tmp_path / "new" / "folder" / "policy.png").is_file()

    for run, axes in zip(runs, panels(runs)["trees chosen"]):
        steps = run["stats"]["details"]["policy"]["steps"]
        drawn = sum(bars(axes))
        assert drawn == sum(one["count"] for one in steps) > 0
    fixed = panels(runs)["predicted and emitted"][1]
    assert not any(lines(fixed).values())  # a static tree promises nothing


def test_the_start_of_a_call_can_be_drawn(run: dict[str, Any]) -> None:
    """Where nothing was known yet."""
    run["stats"]["details"]["policy"].update(
        b0=None, b1=None, seconds={}, history=[], steps=[], plain_seconds=None,
        came_per_promised=None, median_time_error=None, paused=False,
    )  # fmt: skip
    drawn = panels([run])
    assert list(lines(drawn["step time T(n)"][0]).values()) == [[]]
    assert bars(drawn["speedup"][0]) == [0.0, 1.3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "results.json of hf-spec bench"),
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "is no result of hf-spec bench"),
        ({"runs": [{"task": "all", "stats": {}}]}, "has no run with a policy"),
    ],
)
def test_what_cannot_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, message: str
) -> None:
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "results.json").write_text(text)
    assert plot(tmp_path) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "policy.png").exists()
