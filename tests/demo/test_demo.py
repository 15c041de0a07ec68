"""The demo on a tiny model: prompts from held-out modules, files, equality."""

from __future__ import annotations

import json
import re

import pytest
from drawn import bars, labels, ticks
from drawn import texts as texts_of
from tiny_checkpoint import make_tokenizer, save_checkpoint

from hf_spec import cli
from hf_spec.bench.contenders import read_adapters
from hf_spec.bench.prompts import encode_answer
from hf_spec.demo import demo, prompts
from hf_spec.demo.prompts import HELD_OUT, modeling_files, read_source
from hf_spec.hub.folder import check_complete


def words(text: str) -> int:
    return len(text.split())


def test_prompts_are_classes_of_held_out_models(monkeypatch):
    monkeypatch.setattr(prompts, "MIN_TOKENS", 40)
    monkeypatch.setattr(prompts, "PROMPT_TOKENS", 90)
    found = prompts.demo_prompts(words)
    assert found == prompts.demo_prompts(words)
    sources = {path.name: read_source(path) for path in modeling_files(held_out=True)}
    assert set(sources) == {f"modeling_{name}.py" for name in HELD_OUT}
    for prompt in found:
        name, place = str(prompt.question_id).split(", line ")
        assert 40 <= words(prompt.text) <= 90
        assert sources[name].endswith(prompt.text + prompt.reference) and prompt.reference
        before = sources[name].removesuffix(prompt.text + prompt.reference)
        assert before.count("\n") == int(place) - 1
        first = prompt.text.splitlines()[0]
        assert prompt.text.endswith("\n") and first.startswith("class ")
    assert len({prompt.text for prompt in found}) == len(found) > len(HELD_OUT)
    # A small --limit already sees different files.
    assert len({str(prompt.question_id).split(",")[0] for prompt in found[:6]}) == 6


def test_training_files_are_the_other_models():
    own, others = modeling_files(held_out=True), modeling_files()
    assert not {*own} & {*others} and len(others) > 100
    assert {path.parent.name for path in own} == {*HELD_OUT}
    assert read_source(own[0]).startswith('"""')  # no licence


@pytest.fixture
def tiny_model(tmp_path, monkeypatch):
    """A tiny model in place of the shipped one, without adapters, and prompts that fit it: it has
    a token per byte and a context of 256."""
    folder = save_checkpoint(tmp_path / "model", chat=False)
    monkeypatch.setattr(demo, "model_folder", lambda: folder)
    monkeypatch.setattr(demo, "adapter_folders", list)
    monkeypatch.setattr(prompts, "MIN_TOKENS", 20)
    monkeypatch.setattr(prompts, "PROMPT_TOKENS", 160)


def test_demo_shows_steps(tmp_path, tiny_model, capsys):
    code = cli.main(
        [
            "demo", "--output", str(tmp_path / "out"), "--limit", "1",
            "--max-new-tokens", "24", "--dtype", "float32", "--show-steps",
        ]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    counts = re.findall(r"(\S+): (\d+) tokens in (\d+) steps", printed.out)
    found = {name: (int(tokens), int(steps)) for name, tokens, steps in counts}
    assert found["plain"][0] == found["plain"][1] == found["prompt_lookup"][0] > 0
    assert found["prompt_lookup"][1] <= found["prompt_lookup"][0]


def test_demo_writes_table_chart_and_results(tmp_path, tiny_model, capsys):
    output = tmp_path / "out"
    code = cli.main(
        [
            "demo", "--output", str(output), "--limit", "3",
            "--max-new-tokens", "24", "--dtype", "float32",
        ]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "Every output equals plain generate's." in printed.out
    assert "3 prompts, up to 24 new tokens each, plainly and with prompt_lookup\n" in printed.err
    assert "prompt_lookup" in printed.out and "speedup" in printed.out
    assert re.search(r"Repeated passages of 8 tokens.*: \d+% of what .*, \d+% of", printed.out)
    data = json.loads((output / "results.json").read_text())
    everything = {row["strategy"]: row for row in data["runs"] if row["task"] == "all"}
    assert set(everything) == {"plain", "prompt_lookup"}
    assert all(row["identical"] == row["prompts"] == 3 for row in everything.values())
    assert (output / "speed.png").is_file()


def test_chart_and_sample_text(tiny_model):
    result = demo.run_demo(2, 16, "float32")
    (axes,) = demo.draw_chart(result.bench).get_axes()
    rows = {row["strategy"]: row for row in result.bench.runs() if row["task"] == "all"}
    assert ticks(axes) == list(rows) == ["plain", "prompt_lookup"]
    assert bars(axes) == [row["tokens_per_second"] for row in rows.values()]
    assert labels(axes)[2] == "tokens per second"
    assert texts_of(axes) == [
        f"{row['speedup']:.2f}x\ntau {row['tau']:.2f}" for row in rows.values()
    ]

    given, written = result.sample
    assert given in [prompt.text for prompt in result.bench.prompts]
    tokenizer = make_tokenizer(chat=False)
    texts = [
        tokenizer.decode(m.rows[0], skip_special_tokens=True) for m in result.bench.measurements
    ]
    assert written in texts


def test_the_share_of_repeated_passages(tiny_model):
    assert demo.repeated_share([[1, 2, 3, 1, 2, 3, 1]], 3) == 2 / 5
    assert demo.repeated_share([[1, 2, 3], [1, 2, 3]], 3) == 0  # of the same text only
    assert demo.repeated_share([[1, 2, 3, 4], [5] * 4], 2) == 2 / 6
    assert demo.repeated_share([[1, 2], []], 3) == 0
    result = demo.run_demo(2, 16, "float32")
    plain = [item.rows[0] for item in result.bench.measurements if item.stats is None]
    tokenizer = make_tokenizer(chat=False)
    sources = [encode_answer(tokenizer, p.reference) for p in result.bench.prompts]
    sources = [ids[: len(own)] for ids, own in zip(sources, plain)]
    assert result.repeated == (demo.repeated_share(plain), demo.repeated_share(sources))
    assert len(plain) == 2 and result.repeated[1] < 1


def test_a_difference_is_an_error(tmp_path, tiny_model, monkeypatch, capsys):
    monkeypatch.setattr(demo.DemoResult, "all_identical", False)
    arguments = ["demo", "--output", str(tmp_path), "--limit", "1"]
    assert cli.main([*arguments, "--max-new-tokens", "4", "--dtype", "float32"]) == 2
    assert "an output differs from plain generate's" in capsys.readouterr().err


def test_the_shipped_model_and_adapters(tmp_path, capsys):
    folder = demo.model_folder()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 16 * 2**20
    arguments = ["demo", "--output", str(tmp_path), "--limit", "1", "--max-new-tokens", "16"]
    assert cli.main(arguments) == 0, capsys.readouterr().err
    data = json.loads((tmp_path / "results.json").read_text())
    names = {row["strategy"] for row in data["runs"]}
    adapters = read_adapters(map(str, demo.adapter_folders()))
    assert names >= {"plain", "prompt_lookup", *(adapter.strategy for adapter in adapters)}
    assert {row["baseline"] for row in data["runs"]} == {"plain"}  # none changes the model
    assert not any(row["diverged"] for row in data["runs"])


def test_the_shipped_adapters_are_complete():
    """But for what `hf-spec push` renders; their weights are files of the package."""
    folders = demo.adapter_folders()
    assert len(folders) >= 6
    for folder in folders:
        check_complete(folder)


def test_a_missing_model_is_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "MODEL_FOLDER", "no_such_model")
    assert cli.main(["demo", "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "the demo model is missing from" in error and "benchmarks/train_demo_model.py" in error
    assert error.count("\n") == 1


def test_bad_options(tmp_path, capsys):
    assert cli.main(["demo", "--dtype", "float3", "--output", str(tmp_path)]) == 2
    assert "--dtype 'float3'" in capsys.readouterr().err
