"""What a training says while it runs and when it is over."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_clock import FakeClock
from tiny_checkpoint import save_checkpoint
from trained import SETTINGS, answers, as_options

from hf_spec.core.checks import duration
from hf_spec.tools import cli
from hf_spec.tools.training import report as module
from hf_spec.tools.training.report import Report, outcome

#: What is held out is decoded at the end, too.
SHORT = {**SETTINGS, "held_out": 1, "served_prompts": 1}
STATE = SimpleNamespace(
    max_steps=400, eval_steps=100, global_step=0, is_world_process_zero=True, log_history=[]
)


def run(report: Report, clock: FakeClock, steps: int, seconds: float = 2.0) -> SimpleNamespace:
    """The first step takes longer."""
    args = SimpleNamespace(disable_tqdm=True, max_minutes=None)
    control = SimpleNamespace(should_training_stop=False)
    report.on_train_begin(args, STATE, control)
    for step in range(1, steps + 1):
        clock.now += 10.0 if step == 1 else seconds
        STATE.global_step = step
        report.trainer.done = step / STATE.max_steps
        report.on_step_end(args, STATE, control)
    return args


def test_lines_of_a_training(monkeypatch, capsys) -> None:
    clock = FakeClock()
    monkeypatch.setattr(module.time, "monotonic", clock)
    report = Report(SimpleNamespace(done=0.0))
    args = run(report, clock, 100)
    shares = {"eval_acceptance_1": 0.771, "eval_acceptance_2": 0.5}
    for tau in (2.0, 1.5):
        metrics = {"eval_loss": 3.14159, "eval_tau": tau, **shares}
        report.on_evaluate(args, STATE, None, metrics=metrics)
    assert capsys.readouterr().out.splitlines() == [
        "step 100 of 400: tau 2.00, the best so far; accepted 77% 50%; loss 3.14; 3 min, "
        "10 min left",
        "step 100 of 400: tau 1.50; accepted 77% 50%; loss 3.14; 3 min, 10 min left",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(42.4, "42 s"), (89, "89 s"), (601, "10 min"), (12_000, "3 h 20 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_what_came_out() -> None:
    record = {
        "data": {"rows": 2000, "held_out": 32}, "settings": {"steps": 1500}, "seconds": 600.0,
        "timed_steps": 1500, "best": {"eval_tau": 2.754, "step": 1400},
    }  # fmt: skip
    lines = outcome(record)
    assert lines[0] == "trained on 2,000 answers, 1,500 steps in 10 min; 32 answers held out"
    assert lines[1].startswith("tau 2.75 on held-out prompts, at step 1,400: so many tokens per")
    resumed = outcome({**record, "timed_steps": 300})[0]
    assert "1,500 steps, the last 300 in 10 min; 32" in resumed
    assert len(outcome({**record, "best": None})) == 1


def test_the_command_says_what_came_out_and_what_is_next(tmp_path: Path, capsys) -> None:
    checkpoint, data, output = save_checkpoint(tmp_path / "m"), tmp_path / "d", tmp_path / "out"
    data.mkdir()
    rows = "".join(json.dumps(row) + "\n" for row in answers())
    (data / "answers.jsonl").write_text(rows)
    command = ["train", "medusa", *as_options(checkpoint, data, **SHORT, num_heads=2)]
    command += ["--output", str(output)]
    assert cli.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    told = [line.split(":")[0] for line in lines[:2]]
    assert told == ["step 3 of 6", "step 6 of 6"] and "{" not in "".join(lines)
    assert lines[-2] == f"adapter: {output}"
    assert lines[-1] == f"try: hf-spec bench --model {checkpoint} --adapter {output} --by-task"
