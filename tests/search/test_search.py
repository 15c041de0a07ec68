"""``hf-spec search``: trials, the adapter folder, one line on bad input."""

import dataclasses
import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_same
from running import configured
from tiny_checkpoint import (
    load_checkpoint,
    make_model,
    make_tokenizer,
    save_checkpoint,
    write_prompts,
)

import hf_spec
from hf_spec.tools import cli
from hf_spec.tools.bench.prompts import Prompt
from hf_spec.tools.bench.runner import Session

pytest.importorskip("optuna")
pytest.importorskip("scipy")

from hf_spec.tools import search as layers
from hf_spec.tools.search import LayerSearch, skippable, starting_points


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


def test_the_folder_works_in_every_way(made):
    model = load_checkpoint(made / "m")
    config = hf_spec.SpecConfig.from_pretrained(made / "skip")
    assert (
        config.assistant_strategy == "layer_skip"
        and config.assistant_kwargs["num_draft_tokens"] == 4
    )
    model.load_adapter(str(made / "skip"))
    ids = torch.tensor([[9, 8, 7, 9, 8, 7, 9, 8]])
    check_same(model, configured(config), ids, max_new_tokens=20)
    assert hf_spec.last_stats(model).num_draft_forwards > 0
    assert model.active_adapters() == ["default"]
    best = json.loads((made / "skip" / "search.json").read_text())["best"]
    adapter = model.peft_config["default"]
    assert (adapter.skip_attention, adapter.skip_mlp) == (best["skip_attention"], best["skip_mlp"])
    assert adapter.base_facts["num_hidden_layers"] == 2


def test_what_the_folder_holds(made):
    paths = {path.name: path for path in (made / "skip").iterdir()}
    assert paths.keys() == {
        "adapter_config.json", "adapter_model.safetensors", "generation_config.json", "README.md",
        "search.json", "results.json", "custom_generate", "study.jsonl",
    }  # fmt: skip
    for name in paths.keys() - {"study.jsonl", "custom_generate"}:
        assert paths[name].stat().st_mode & 0o044 == 0o044, f"{name} is private"
    data = json.loads((made / "skip" / "search.json").read_text())
    assert data["trials"] == 4 and data["identity"]["num_draft_tokens"] == 4
    assert {"argv", "torch", "optuna", "threads", "prompts_sha256"} <= data["environment"].keys()
    # Two of the three prompts are searched on, the other one is held out.
    assert data["identity"]["prompts"] == 2 and data["held_out"] == 1
    assert 1 <= len(data["finalists"]) <= 3
    for finalist in data["finalists"]:
        assert finalist["tokens_per_second"] > 0 and finalist["tau"] >= 1
    chosen = max(data["finalists"], key=lambda finalist: finalist["speedup"])
    assert all(data["best"][name] == chosen[name] for name in ("skip_attention", "skip_mlp"))
    card = (made / "skip" / "README.md").read_text()
    assert "measured again on 1 held-out prompts" in card and "development prompts" not in card
    measured = json.loads((made / "skip" / "results.json").read_text())["runs"]
    rows = [(row["strategy"], row["prompts"]) for row in measured if row["task"] == "all"]
    assert rows == [("generate", 1), ("layer_skip", 1)]
    assert all(row["identical"] == row["prompts"] for row in measured)


def test_other_settings_a_broken_study_no_optuna(made, monkeypatch, capsys):
    assert search(made, "--seed", "5", "--max-draft", "3") == 2
    error = capsys.readouterr().err
    assert "num_draft_tokens was 4, now 3" in error and "seed was 0, now 5" in error
    assert error.startswith("hf-spec: ") and error.count("\n") == 1
    (made / "broken").mkdir()
    (made / "broken" / "study.jsonl").write_text("{}\nnothing\n")
    assert search(made, output="broken") == 2
    error = capsys.readouterr().err
    assert "cannot use study.jsonl in" in error and error.count("\n") == 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert search(made, output="bad") == 2
    assert "pip install 'hf_spec[search]'" in capsys.readouterr().err


def test_interrupted(made, monkeypatch, capsys):
    """In the third trial, and again in the measurements; finished trials count."""
    original, left = Session.generate, 0

    def interrupt(self: Session, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    for calls in (6, 8):
        left = calls
        with monkeypatch.context() as patch:
            patch.setattr(Session, "generate", interrupt)
            assert search(made, output="again") == 130
        said = capsys.readouterr().err
        assert "the same command continues the search" in said and "Traceback" not in said
        assert layers.optuna.logging.get_verbosity() == logging.ERROR  # of a failed trial
        assert not (made / "again" / "search.json").exists()
    assert search(made, "--held-out", "0", output="again") == 0
    data = json.loads((made / "again" / "search.json").read_text())
    study = layers.open_study(made / "again")
    ended = [one for one in study.trials if one.state.name == "COMPLETE"]
    assert len(ended) == 4 and data["held_out"] == 0
    assert "development prompts" in (made / "again" / "README.md").read_text()


LAYERS = 4
PROMPTS = [Prompt("abab" * 4), Prompt("xyz xyz xyz")]
#: Their output projections are zero: leaving them out changes nothing, and saves time.
PLANTED = {"skip_attention": [1, 2], "skip_mlp": [0, 3]}


@pytest.fixture(scope="module")
def planted() -> tuple[Any, Any]:
    model = make_model(seed=3, layers=LAYERS)
    for layer in PLANTED["skip_attention"]:
        model.model.layers[layer].self_attn.o_proj.weight.data.zero_()
    for layer in PLANTED["skip_mlp"]:
        model.model.layers[layer].mlp.down_proj.weight.data.zero_()
    model.lm_head.weight.data.mul_(8)  # sure of itself, so that the exit lets drafts grow long
    model.generation_config.eos_token_id = None
    return model, make_tokenizer()


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds by what was run: 1 for a step, 0.02 for a drafting forward and each sublayer of it
    that is not skipped."""
    original = Session.generate

    def timed(self: Session, contender: Any, prompts: Any, *most: Any, **kwargs: Any) -> Any:
        options = contender.kwargs.get("assistant_kwargs")
        if options is not None:  # every step drafts, as the policy would go by the real clock
            own = {**contender.kwargs, "assistant_kwargs": {**options, **layers.TRIAL_OPTIONS}}
            contender = dataclasses.replace(contender, kwargs=own)
        _, rows, steps, stats = original(self, contender, prompts, *most, **kwargs)
        seconds = float(steps)
        if stats is not None:
            kept = 2 * LAYERS - len(options["skip_attention"]) - len(options["skip_mlp"])
            seconds += 0.02 * (1 + kept) * stats.num_draft_forwards
        return seconds, rows, steps, stats

    monkeypatch.setattr(Session, "generate", timed)


def test_it_finds_what_is_planted(planted, ticking, tmp_path, monkeypatch):
    """Starting points skip other sublayers; only the planted ones cost nothing to leave out."""
    work = LayerSearch(*planted, PROMPTS, tmp_path, max_new_tokens=10, num_draft_tokens=4)
    told: list[tuple[int, int]] = []
    bar = nullcontext(lambda done, total, note: told.append((done, total)))
    monkeypatch.setattr(layers, "progress_bar", lambda title: bar)
    work.search(16)
    assert told == [(n, 16) for n in range(17)]
    (best,) = work.ranked(1)
    found = work.choice(best.params)
    assert sum(map(len, found.values())) >= 3
    assert all(set(found[kind]) <= set(PLANTED[kind]) for kind in PLANTED)
    choice, entries, bench = work.confirm(PROMPTS)
    assert len(entries) == 3 and len({json.dumps(one, sort_keys=True) for one in entries}) == 3
    assert bench.overall("layer_skip")["speedup"] > 1.5
    assert max(one["speedup"] for one in entries) == next(
        one["speedup"] for one in entries if one["skip_mlp"] == choice["skip_mlp"]
        and one["skip_attention"] == choice["skip_attention"]
    )  # fmt: skip


def test_starting_points_are_choices_of_the_model(planted, tmp_path):
    sublayers = skippable(planted[0])
    assert sublayers == {"skip_attention": [0, 1, 2, 3], "skip_mlp": [0, 1, 2, 3]}
    points = starting_points(sublayers)
    assert {"skip_attention": [1, 3], "skip_mlp": [1, 3]} in points
    for one in points:
        assert any(one.values())
        assert all(set(found) <= set(sublayers[kind]) for kind, found in one.items())
    small = starting_points({"skip_attention": [0], "skip_mlp": []})
    assert all(any(one.values()) for one in small)
    with pytest.raises(ValueError, match="nothing to search on: no prompts"):
        LayerSearch(*planted, [], tmp_path)
