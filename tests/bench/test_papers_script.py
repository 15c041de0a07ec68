"""The papers' tables: every line can be trained and decoded as it says, and is made once."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from scripts import base_answers_and_prompts, commands_here, load_script

from hf_spec.methods.registry import get_method
from hf_spec.tools.cli.train import parse_options
from hf_spec.tools.training.train import config_fields


@pytest.fixture
def script() -> Any:
    return load_script("papers")


def test_every_option_is_one_of_its_method(script: Any) -> None:
    """Fields of the adapter's config and options of the strategy, in values that go together."""
    ours = {"--dtype"}
    for name, table in script.TABLES.items():
        names = [line.name for line in table.lines]
        assert len({*names}) == len(names), name
        for line in table.lines:
            method, *words = shlex.split(line.adapter.replace("{skip}", "[1]"))
            pairs = [*zip(words[::2], words[1::2])]
            fields = [word for pair in pairs if pair[0] not in ours for word in pair]
            chosen = get_method(method)
            fields += shlex.split("" if method == "layer_skip" else script.PAPER)
            assert chosen.adapter_config is not None
            config, _ = parse_options(fields, method, config_fields(chosen))
            made = chosen.adapter_config(**{**chosen.trained, **config})
            assert all(getattr(made, key) == value for key, value in config.items())
            chosen.parse_options(line.options)


def test_the_pages_name_tables_that_there_are(script: Any) -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = " ".join(page.read_text() for page in docs.rglob("*.md"))
    named = re.findall(r"papers\.py ((?:[a-z]+(?:-[a-z]+)*\b ?)+)", text)
    names = {name for words in named for name in words.split()}
    assert len(names) > 5 and names <= set(script.TABLES)


def test_a_table_is_made_once(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = commands_here(script, monkeypatch)
    base, answers, prompts = base_answers_and_prompts(tmp_path)
    small = script.Table("A table", script.TABLES["bita-trees"].lines[:2])
    monkeypatch.setitem(script.TABLES, "small", small)
    given = [
        "small", "--model", str(base), "--prompts", str(prompts), "--limit", "3",
        "--max-new-tokens", "6", "--dtype", "float32", "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="--answers is needed"):
        script.main(given)
    given += ["--answers", str(answers)]
    script.main(given)
    # Two trees of one adapter.
    assert [words[0] for words in run] == ["train", "bench", "bench"]
    made = json.loads((tmp_path / "out/adapters/bita-seed0/training.json").read_text())
    assert made["settings"]["seed"] == 0 and made["config"]["markov_rank"] == 0
    shown = capfd.readouterr().out
    assert "A table" in shown and "bita-seed0: top-1 " in shown
    assert "efficient5-seed0" in shown and "efficient3-seed0" in shown
    # What was interrupted is measured again.
    run.clear()
    place = tmp_path / "out/small/efficient3-seed0/results.json"
    cut = json.loads(place.read_text())
    cut["environment"]["interrupted"] = True
    place.write_text(json.dumps(cut))
    script.main(given)
    assert [words[0] for words in run] == ["bench"]
    # Nothing else is made again, and a second seed in addition.
    run.clear()
    monkeypatch.setattr(
        script.measured, "command", lambda *words: run.append(words) or copied(words)
    )
    script.main([*given, "--seeds", "2"])
    assert [words[0] for words in run] == ["train", "bench", "bench"]
    assert run[0][run[0].index("--seed") + 1] == "1"
    assert "efficient3-seed1" in capfd.readouterr().out


def copied(words: tuple[str, ...]) -> None:
    """In place of running a command for seed 1: the results of seed 0."""
    folder = words[words.index("--output") + 1]
    shutil.copytree(folder.replace("seed1", "seed0"), folder)
