"""``hf-spec search`` and ``hf-spec plot``: the adapter folder, and one line on bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import dots, lines
from peft import PeftModel
from running import configured
from tiny_checkpoint import save_checkpoint, write_prompts
from transformers import AutoModelForCausalLM

import hf_spec
from hf_spec import cli
from hf_spec.tuning.layers.objective import Evaluator
from hf_spec.tuning.layers.plots import draw_search, read_search

pytest.importorskip("optuna")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model ``m``, prompts ``p.jsonl`` and the search's result ``skip``."""
    root = tmp_path_factory.mktemp("search")
    save_checkpoint(root / "m")
    rows = [
        {"prompt": "abab" * 4, "category": "a"},
        {"prompt": "xyz xyz xyz", "category": "b"},
        {"prompt": "one one one", "category": "b"},
    ]
    write_prompts(root / "p.jsonl", rows)
    assert search(root) == 0
    return root


def search(root: Path, *more: str, model: str = "m", output: str = "skip") -> int:
    return cli.main(
        [
            "search", "--model", str(root / model), "--prompts", str(root / "p.jsonl"),
            "--output", str(root / output), "--dtype", "float32", "--device", "cpu",
            "--trials", "4", "--limit", "2", "--max-new-tokens", "8", "--max-draft", "4", *more,
        ]
    )  # fmt: skip


def load(root: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(root / "m", dtype=torch.float32)
    model.generation_config.pad_token_id = 0
    return model.eval()


@pytest.mark.parametrize("words", ["search", "plot", "card", "push"])
def test_help_has_examples(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert "Examples:" in out and f"hf-spec {words}" in out


def test_the_folder_is_complete(made: Path) -> None:
    names = {path.name for path in (made / "skip").iterdir()}
    assert names == {
        "adapter_config.json", "adapter_model.safetensors", "generation_config.json", "README.md",
        "search.json", "results.json", "search.png", "layers.png", "custom_generate", "study.db",
        "study.db.lock",
    }  # fmt: skip
    for path in (made / "skip").iterdir():
        if path.name not in ("study.db", "study.db.lock", "custom_generate"):
            assert path.stat().st_mode & 0o044 == 0o044, f"{path.name} is private"


def test_the_folder_works_in_every_way(made: Path) -> None:
    ids = torch.tensor([[9, 8, 7, 9, 8, 7, 9, 8]])
    model = load(made)
    plain = model.generate(ids, max_new_tokens=20, do_sample=False)
    config = hf_spec.SpecConfig.from_pretrained(made / "skip")
    assert config.assistant_strategy == "layer_skip" and config.assistant_kwargs["max_draft"] <= 4
    options = {"max_new_tokens": 20, "do_sample": False}
    data = json.loads((made / "skip" / "search.json").read_text())

    model.load_adapter(str(made / "skip"))
    ours = model.generate(ids, **configured(config), **options)
    assert torch.equal(ours, plain)
    stats = hf_spec.last_stats(model)
    assert stats.num_draft_forwards > 0
    assert model.active_adapters() == ["default"]
    adapter = model.peft_config["default"]
    assert adapter.skip_attention == data["best"]["skip_attention"]
    assert adapter.skip_mlp == data["best"]["skip_mlp"]
    assert adapter.base_facts["num_hidden_layers"] == 2

    wrapped = PeftModel.from_pretrained(load(made), made / "skip")
    assert torch.equal(wrapped.generate(ids, **configured(config), **options), plain)


def test_bench_takes_the_folder(made: Path, tmp_path: Path) -> None:
    arguments = [
        "bench", "--model", str(made / "m"), "--prompts", str(made / "p.jsonl"), "--adapter",
        str(made / "skip"), "--dtype", "float32", "--max-new-tokens", "8", "--limit", "1",
        "--device", "cpu", "--output", str(tmp_path),
    ]  # fmt: skip
    assert cli.main(arguments) == 0
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [row["strategy"] for row in runs if row["task"] == "all"] == ["plain", "layer_skip"]


def test_everything_is_in_the_json(made: Path) -> None:
    data = json.loads((made / "skip" / "search.json").read_text())
    assert len(data["trials"]) == 4 and data["settings"]["objective"] == "modelled"
    assert {"argv", "torch", "optuna", "threads", "prompts_sha256"} <= data["environment"].keys()
    assert [row["name"] for row in data["baselines"]] == [
        "searched", "first", "middle", "last", "random",
    ]  # fmt: skip
    assert {row["draft_exit"] for row in data["draft_exit"]} == {"adaptive", "threshold", "fixed"}
    assert data["costs"]["plain"] > 0 and data["layers"] == 2
    # Two of the three prompts are searched on, the other one is held out.
    assert data["identity"]["prompts"] == 2 and data["held_out"][0]["prompts"] == 1
    assert "development prompts" not in (made / "skip" / "README.md").read_text()
    measured = json.loads((made / "skip" / "results.json").read_text())["runs"]
    assert [row["prompts"] for row in measured if row["task"] == "all"] == [1, 1]
    assert all(row["identical"] == row["prompts"] for row in measured)


def test_plots_can_be_drawn_again(made: Path, tmp_path: Path) -> None:
    """From the JSON alone; what they show is tested in test_layer_plots.py."""
    assert cli.main(["plot", str(made / "skip"), "--output", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "search.png", "layers.png", "policy.png",
    }  # fmt: skip
    data = read_search(made / "skip")
    left, right = draw_search(data).get_axes()
    numbers = [one["number"] for one in data["trials"]]
    assert sorted(x for points in dots(left).values() for x, _ in points) == numbers
    best = data["best"]
    assert lines(right)["best"] == [(best["skipped"], best["speedup"])]


def test_plot_needs_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plot", str(tmp_path)]) == 2
    assert "has nothing to draw: search.json of hf-spec search" in capsys.readouterr().err
    for text, message in (("{", "is not JSON"), ("{}", "is not the result of hf-spec search")):
        (tmp_path / "search.json").write_text(text)
        assert cli.main(["plot", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_continuing_with_other_settings(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert search(made, "--seed", "5", "--target-acceptance", "0.5") == 2
    error = capsys.readouterr().err
    assert "target_acceptance was 0.85, now 0.5" in error and "seed was 0, now 5" in error
    assert error.startswith("hf-spec: ") and error.count("\n") == 1


def test_interrupted(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, original = 0, Evaluator.speculate

    def interrupt(self: Evaluator, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 16:
            raise KeyboardInterrupt
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "speculate", interrupt)
        assert search(made, output="again") == 130
    assert "the same command continues the search" in capsys.readouterr().err
    assert not (made / "again" / "search.json").exists()
    assert search(made, "--no-baselines", "--held-out", "0", output="again") == 0
    data = json.loads((made / "again" / "search.json").read_text())
    assert [one["number"] for one in data["trials"]] == [0, 1, 2, 3]
    assert data["baselines"] is None and data["held_out"] == []
    assert "development prompts" in (made / "again" / "README.md").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--objective", "guessed"], "--objective 'guessed': choose one of modelled, measured"),
        (["--sampler", "grid"], "--sampler 'grid': choose one of tpe, random"),
        (["--dtype", "int3"], "--dtype 'int3'"),
        (["--target-acceptance", "2"], "--target-acceptance 2.0"),
        (["--temperature", "0.7"], "--temperature needs --do-sample"),
        (["--trials", "0"], "--trials"),
        (["--held-out", "2"], "--held-out 2: of 3 prompts 2 are searched on, which leaves 1"),
        (["--prompts", "/nowhere.jsonl"], "cannot read '/nowhere.jsonl': No such file"),
        (["--model", "/nowhere"], "cannot load model '/nowhere': there is no such folder"),
        (["--output", "/dev/null"], "cannot write to --output"),
    ],
)
def test_bad_input_ends_in_one_line(
    made: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert search(made, *more, output="bad") == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("hf-spec: ") and error.count("\n") == 1


def test_without_optuna(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert search(made, output="bad") == 2
    assert "pip install 'hf_spec[search]'" in capsys.readouterr().err


def test_progress_tells_of_better_choices(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no terminal: a line for each, and nothing else."""
    from hf_spec.cli.search import search_bar
    from hf_spec.tuning.layers.costs import Skip
    from hf_spec.tuning.layers.objective import Counts, Evaluation
    from hf_spec.tuning.layers.study import Trial

    counts = Counts(1, 12, 4)
    best = Trial(0, "complete", Skip((1,), ()), Evaluation(0.5, counts), "start", False, 1, 0.1)
    with search_bar() as (progress, status):
        status("searching")
        progress(0, 3, None)
        progress(1, 3, best)
        progress(2, 3, best)
    assert capsys.readouterr().err == (
        "trial 1 of 3: best 2.00x, tau 3.00, skips 1 attention + 0 MLP\n"
    )
