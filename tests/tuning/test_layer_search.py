"""The search over layers: it finds what is there, survives being killed, and refuses to mix."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
from planted import COSTS, LAYERS, PLANTED, PROMPTS, SETTINGS, planted_model

from hf_spec.bench.prompts import Prompt
from hf_spec.tuning.layers import search as work
from hf_spec.tuning.layers import study
from hf_spec.tuning.layers.costs import Skip, Sublayers
from hf_spec.tuning.layers.objective import Evaluator
from hf_spec.tuning.layers.search import (
    SearchResult,
    baseline_choices,
    exit_choices,
    search,
    starting_points,
)
from hf_spec.tuning.layers.study import LayerStudy, Settings

pytest.importorskip("optuna")

SUBLAYERS = Sublayers(
    LAYERS, (0, 1, 2, 3), (0, 1, 2, 3), (("attention", (0, 1, 2, 3)), ("mlp", (0, 1, 2, 3)))
)
TRIALS = 30


def run(folder: Path, trials: int, settings: Settings = SETTINGS, **kwargs: Any) -> SearchResult:
    folder.mkdir(exist_ok=True)
    model, tokenizer = kwargs.pop("model", None) or planted_model()
    prompts = kwargs.pop("prompts", PROMPTS)
    kwargs = {"baselines": False, "costs": COSTS, **kwargs}
    return search(model, tokenizer, prompts, folder, settings, trials=trials, **kwargs)


@pytest.fixture
def few_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing draft exits takes longer than a few trials do."""
    monkeypatch.setattr(work, "exit_choices", lambda settings: exit_choices(settings)[:2])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    """A search that ran through."""
    return run(tmp_path_factory.mktemp("whole"), TRIALS, baselines=True)


def outline(result: SearchResult) -> list[tuple[Any, ...]]:
    """All that makes trials equal; times are their own."""
    return [
        (t.number, t.state, t.skip, t.evaluation, t.origin, t.repeat, t.prompts)
        for t in result.trials
    ]


def test_the_planted_optimum_is_found(whole: SearchResult) -> None:
    best = whole.best
    assert set(PLANTED.attention) <= set(best.skip.attention)
    assert set(PLANTED.mlp) <= set(best.skip.mlp)
    # tau is as large as with a draft that skips nothing, the largest there is.
    evaluator = SETTINGS.evaluator(*planted_model(), PROMPTS)
    evaluator.costs = COSTS
    *_, nothing = evaluator.evaluate("modelled", Skip(), SETTINGS.stop)
    *_, planted = evaluator.evaluate("modelled", PLANTED, SETTINGS.stop)
    assert best.evaluation.counts.tau == nothing.counts.tau
    assert best.evaluation.counts.acceptance == 1.0
    assert best.evaluation.value <= planted.value < 1.0
    complete = [t for t in whole.trials if t.state == "complete"]
    assert best.evaluation.value == min(t.evaluation.value for t in complete)
    assert best.evaluation.counts.tau == max(t.evaluation.counts.tau for t in complete)


def test_trials_are_of_every_kind(whole: SearchResult) -> None:
    trials = whole.trials
    assert [t.number for t in trials] == list(range(TRIALS))
    starts = starting_points(SUBLAYERS)
    assert [t.skip for t in trials[: len(starts)]] == starts
    assert {t.origin for t in trials} == {"start", "sampler", "neighbour"}
    pruned = [t for t in trials if t.state == "pruned" and not t.repeat]
    assert pruned and all(t.prompts < len(PROMPTS) for t in pruned)
    values: dict[Skip, float] = {}
    for trial in trials:
        assert trial.repeat == (trial.skip in values)
        assert values.setdefault(trial.skip, trial.evaluation.value) == trial.evaluation.value


def test_baselines_have_equal_counts(whole: SearchResult) -> None:
    rows = whole.baselines
    assert rows is not None
    assert [row["name"] for row in rows] == ["searched", "first", "middle", "last", "random"]
    assert rows[0]["value"] == whole.best.evaluation.value
    random = rows[-1]["draws"]
    assert len(random) == 3
    for row in [*rows[1:4], *random]:
        assert len(row["skip_attention"]) == len(whole.best.skip.attention)
        assert len(row["skip_mlp"]) == len(whole.best.skip.mlp)
        assert row["value"] >= rows[0]["value"]
    assert rows[-1]["value"] == pytest.approx(sum(row["value"] for row in random) / 3)


def test_choices_by_position() -> None:
    choices = list(baseline_choices(SUBLAYERS, Skip((0, 3), (2,))))
    assert choices[:3] == [
        ("first", 0, Skip((0, 1), (0,))),
        ("middle", 0, Skip((1, 2), (1,))),
        ("last", 0, Skip((2, 3), (3,))),
    ]
    assert [(name, seed) for name, seed, _ in choices[3:]] == [("random", i) for i in range(3)]
    for one in starting_points(SUBLAYERS):
        assert len(one) and set(one.attention) | set(one.mlp) <= set(range(LAYERS))


def test_draft_exits_are_compared(whole: SearchResult) -> None:
    assert [row["draft_exit"] for row in whole.exits].count("threshold") == 4  # table 4
    fixed = [row["max_draft"] for row in whole.exits if row["draft_exit"] == "fixed"]
    assert fixed == [1, 2, 4, 6]  # table 3, up to max_draft
    assert len(whole.exits) == len(exit_choices(SETTINGS))
    least = min(row["value"] for row in whole.exits)
    chosen = [row for row in whole.exits if row["best"]]
    assert len(chosen) == 1 and chosen[0]["value"] == least
    assert whole.options() == {"max_draft": SETTINGS.max_draft}
    # Drafts of four that are always accepted: twelve tokens come as 1 (prefill) + 5 + 5 + 1.
    four = next(r for r in whole.exits if (r["draft_exit"], r["max_draft"]) == ("fixed", 4))
    assert four["acceptance"] == 1.0 and four["tau"] == pytest.approx(12 / 4)


@pytest.mark.usefixtures("few_exits")
def test_the_best_are_judged_on_other_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [Prompt("two one two one"), Prompt("bcbcbc")]
    alone = run(tmp_path / "alone", 14)
    assert alone.finalists == [] and alone.exits[0]["value"] == alone.best.evaluation.value
    result = run(tmp_path / "both", 14, held_out=others, baselines=True)
    assert outline(result) == outline(alone), "trials do not see them"
    ranked = sorted(
        (t for t in result.trials if t.state == "complete" and not t.repeat),
        key=lambda t: (t.evaluation.value, -len(t.skip), t.number),
    )
    rows = result.finalists
    assert [row["trial"] for row in rows] == [t.number for t in ranked[:5]] and len(rows) == 5
    held = SETTINGS.evaluator(*planted_model(), others)
    held.costs = COSTS
    for row, trial in zip(rows, ranked):
        *_, value = held.evaluate("modelled", trial.skip, SETTINGS.stop)
        assert row["value"] == value.value and row["development"] == trial.evaluation.value
        assert row["prompts"] == 2 and row["counts"]["prompts"] == 2
    chosen = min(rows, key=lambda row: row["value"])
    assert result.best.number == chosen["trial"]
    assert result.exits[0]["value"] == chosen["value"]
    assert result.baselines is not None and result.baselines[0]["value"] == chosen["value"]
    assert result.baselines[1]["counts"]["prompts"] == 2
    assert result.to_dict()["held_out"] == rows

    # A choice that owes its place to the prompts of the search gives way to a better one.
    original = Evaluator.evaluate

    def spoiled(self: Evaluator, objective: str, skip: Skip, stop: Any) -> Any:
        for value in original(self, objective, skip, stop):
            worse = len(self.ids) == 1 and skip == ranked[0].skip
            yield dataclasses.replace(value, value=9.0) if worse else value

    monkeypatch.setattr(Evaluator, "evaluate", spoiled)
    other = run(tmp_path / "both", 14, held_out=others[:1])
    assert other.best.number != ranked[0].number and other.finalists[0]["value"] == 9.0


# -- stopping and continuing ---------------------------------------------------------------------

KILLED = """
import os, signal
from pathlib import Path
from planted import COSTS, PROMPTS, SETTINGS, planted_model
from hf_spec.tuning.layers.objective import Evaluator
from hf_spec.tuning.layers.search import search
original, calls = Evaluator.speculate, 0
def speculate(self, *args):
    global calls
    calls += 1
    if calls == {calls}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, *args)
Evaluator.speculate = speculate
search(*planted_model(), PROMPTS, Path({folder!r}), SETTINGS, trials=30, costs=COSTS)
"""


def test_a_killed_search_ends_like_one_that_ran_through(
    whole: SearchResult, tmp_path: Path
) -> None:
    done = forks.run(KILLED.format(calls=35, folder=str(tmp_path)))
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = LayerStudy(tmp_path, study.study_identity(
        planted_model()[0], PROMPTS, SETTINGS
    ))  # fmt: skip
    finished = before.trials
    before.close()
    assert 8 < len(finished) < TRIALS  # past the starting points, in the middle of a trial
    assert [t.evaluation for t in finished] == [t.evaluation for t in whole.trials[: len(finished)]]
    result = run(tmp_path, TRIALS)
    assert outline(result) == outline(whole)
    assert result.costs == whole.costs and result.exits == whole.exits


@pytest.mark.usefixtures("few_exits")
@pytest.mark.parametrize("place", ["enqueue_trial", "ask", "tell"])
def test_a_search_interrupted_anywhere(
    place: str, whole: SearchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after something was written, or before it was."""
    import optuna

    original, calls = getattr(optuna.Study, place), 0

    def stop(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4 and place == "tell":
            raise KeyboardInterrupt
        result = original(self, *args, **kwargs)
        if calls == 4:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, place, stop)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, 10)
    assert outline(run(tmp_path, 10)) == outline(whole)[:10]


@pytest.mark.usefixtures("few_exits")
def test_trials_are_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    first = run(tmp_path, 5, progress=lambda done, total, best: seen.append((done, total)))
    assert seen == [(done, 5) for done in range(6)]
    more = run(tmp_path, 8)
    assert outline(more)[:5] == outline(first) and len(more.trials) == 8

    def refuse(*_: Any) -> None:
        pytest.fail("something was evaluated again")

    monkeypatch.setattr(Evaluator, "speculate", refuse)
    monkeypatch.setattr(Evaluator, "measure_costs", refuse)
    again = run(tmp_path, 6)
    assert outline(again) == outline(more) and again.exits == more.exits


@pytest.mark.usefixtures("few_exits")
def test_other_settings_are_refused(tmp_path: Path) -> None:
    run(tmp_path, 1)
    other = dataclasses.replace(SETTINGS, max_draft=5, seed=7)
    with pytest.raises(ValueError, match=r"max_draft was 6, now 5") as caught:
        run(tmp_path, 2, other)
    assert "seed was 1, now 7" in str(caught.value) and "another folder" in str(caught.value)
    assert "max_new_tokens" not in str(caught.value)
    with pytest.raises(ValueError, match=r"objective was 'modelled', now 'measured'"):
        run(tmp_path, 2, dataclasses.replace(SETTINGS, objective="measured"))
    with pytest.raises(ValueError, match=r"prompts_sha256 was '.*', now '.*'"):
        run(tmp_path, 2, prompts=[*PROMPTS[:2], PROMPTS[0]])
    model, tokenizer = planted_model()
    model.model.layers[0].mlp.up_proj.weight.data += 0.01
    with pytest.raises(ValueError, match=r"model_fingerprint was '.*', now '.*'"):
        run(tmp_path, 2, model=(model, tokenizer))
    model, tokenizer = planted_model()
    with pytest.raises(ValueError, match=r"dtype was 'float32', now 'bfloat16'"):
        run(tmp_path, 2, model=(model.bfloat16(), tokenizer))
    assert len(run(tmp_path, 2).trials) == 2  # none of these left a trace


@pytest.mark.usefixtures("few_exits")
def test_a_second_search_in_the_folder_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys, time, filelock\n"
        f"lock = filelock.FileLock({str(tmp_path / 'study.db.lock')!r}); lock.acquire()\n"
        "print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        try:
            with pytest.raises(ValueError, match="another search is running in"):
                run(tmp_path, 1)
        finally:
            os.kill(other.pid, signal.SIGKILL)
    assert len(run(tmp_path, 1).trials) == 1  # a killed process leaves no lock


def test_a_broken_study_is_reported(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_text("not a database, but long enough to look at " * 100)
    with pytest.raises(ValueError, match=r"cannot use study.db in .*give another folder"):
        run(tmp_path, 1)


@pytest.mark.usefixtures("few_exits")
def test_objectives_and_samplers(tmp_path: Path) -> None:
    measured = dataclasses.replace(SETTINGS, objective="measured", max_new_tokens=4)
    result = run(tmp_path / "measured", 2, measured, prompts=PROMPTS[:1])
    assert result.costs is None and result.best.evaluation.value > 0
    drawn = run(tmp_path / "random", 12, dataclasses.replace(SETTINGS, sampler="random"))
    sampled = [t.skip for t in drawn.trials if t.origin == "sampler"]
    assert len(sampled) > 2 and len(set(sampled)) == len(sampled)  # a draw of its own each time


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objective": "guessed"}, "objective='guessed': choose one of modelled, measured"),
        ({"sampler": "grid"}, "sampler='grid': choose one of tpe, random"),
        ({"max_draft": 0}, "max_draft=0"),
        ({"max_new_tokens": 1}, "max_new_tokens=1"),
        ({"target_acceptance": 1.5}, "target_acceptance=1.5"),
        ({"temperature": 0.7}, "temperature needs do_sample"),
    ],
)
def test_bad_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**fields)


def test_without_optuna(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_spec\[search\]'"):
        LayerStudy(tmp_path, {})
