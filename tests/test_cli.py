"""``hf-spec``: help, results, and one clear line on bad input."""

import importlib
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoint import load_checkpoint, write_prompts
from transformers.utils.import_utils import is_serve_available

import hf_spec
from hf_spec.target import packed_weights
from hf_spec.tools import cli
from hf_spec.tools.bench import runner
from hf_spec.tools.bench.prompts import BUNDLED, read_prompts
from hf_spec.tools.data import progress_bar

COMMANDS = [
    "demo", "bench", "strategies", "serve", "distill", "train", "search", "doctor",
    "check", "card", "push", "import", "export", "run",
]  # fmt: skip


@pytest.fixture
def prompts(tmp_path) -> Path:
    rows = [
        {"turns": ["abab" * 4], "category": "writing", "question_id": 7},
        {"prompt": "xyz xyz xyz", "category": "qa"},
        {"question": "one one one", "category": "qa"},
    ]
    return write_prompts(tmp_path / "prompts.jsonl", rows)


def bench(checkpoint: Path, prompts: Path | None, output: Path, *more: str) -> int:
    given = [] if prompts is None else ["--prompts", str(prompts)]
    return cli.main([
        "bench", "--model", str(checkpoint), *given, "--dtype", "float32", "--device", "cpu",
        "--max-new-tokens", "12", "--output", str(output), *more,
    ])  # fmt: skip


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_examples(command, capsys):
    assert cli.main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert "Examples:" in out and f"hf-spec {command}".strip() in out
    options = out.partition("Options:")[2]
    assert options.count("--output ") == options.count("-o, --output ")


def test_strategies_and_the_version(capsys):
    assert cli.main(["strategies", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == hf_spec.strategies()
    assert cli.main(["strategies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*hf_spec.strategies(), "auto"]
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hf-spec {hf_spec.__version__}\n"


def test_strategies_of_installed_packages(capsys, monkeypatch):
    monkeypatch.setattr("hf_spec.tools.cli.doctor.entry_points", lambda group: [group])
    monkeypatch.setattr(hf_spec, "strategies", lambda: {"installed": "of a package"})
    assert cli.main(["strategies", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"installed": "of a package"}


def test_bench_prints_a_table_and_writes_everything(checkpoint, prompts, tmp_path, capsys):
    code = bench(
        checkpoint, prompts, tmp_path / "out",
        "--strategies", "prompt_lookup,transformers:prompt_lookup,layer_skip",
        "--strategy-kwargs", 'layer_skip={"skip_attention": [1]}', "--batch-size", "1,2",
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    for expected in ("prompt_lookup", "transformers:prompt_lookup", "layer_skip", "speedup"):
        assert expected in printed.out
    assert "left out at batch size 2" in printed.out
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    environment = data["environment"]
    assert environment["model"] == str(checkpoint) and environment["prompts"] == str(prompts)
    assert environment["dtype"] == "float32" and environment["settings"]["batch_sizes"] == [1, 2]
    everything = [row for row in data["runs"] if row["task"] == "all"]
    assert [row["strategy"] for row in everything] == [
        "generate", "prompt_lookup", "transformers:prompt_lookup", "layer_skip",
        "generate", "prompt_lookup", "layer_skip",
    ]  # fmt: skip
    assert all(row["identical"] == row["prompts"] == 3 for row in everything)


def test_bench_with_an_adapter(checkpoint, prompts, tmp_path, capsys):
    adapter, model = tmp_path / "adapter", load_checkpoint(checkpoint)
    model.add_adapter(hf_spec.LayerSkipConfig(skip_attention=[1], skip_mlp=[]))
    model.save_pretrained(adapter)
    options = {"drafting": "always"}  # what steps take here is noise
    hf_spec.SpecConfig("layer_skip", options).save_pretrained(adapter)
    assert bench(checkpoint, prompts, tmp_path / "out", "--adapter", str(adapter), "--json") == 0
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    assert json.loads(capsys.readouterr().out) == data["runs"]
    rows = {row["strategy"]: row for row in data["runs"] if row["task"] == "all"}
    assert set(rows) == {"generate", "layer_skip"}  # the adapter's strategy, without naming it
    assert rows["layer_skip"]["identical"] == 3
    assert rows["layer_skip"]["stats"]["num_draft_forwards"] > 0


def test_bench_packs_weights_where_it_pays(checkpoint, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(packed_weights, "SMALLEST", dict.fromkeys(packed_weights.SMALLEST, 1))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    packed = []
    for more in ([], ["--no-pack-weights"]):
        assert bench(checkpoint, prompts, tmp_path, "--limit", "1", *more) == 0
        data = json.loads((tmp_path / "results.json").read_text())
        packed.append(data["environment"]["settings"]["packed_bytes"] > 0)
    assert packed == [torch.backends.mkldnn.is_available(), False]


def test_bench_without_a_file_takes_prompts_of_its_own(checkpoint, tmp_path, capsys):
    more = ["--limit", "6", "--max-new-tokens", "2", "--by-task"]
    assert bench(checkpoint, None, tmp_path, *more) == 0
    printed = capsys.readouterr().out
    assert "measure yours with --prompts FILE" in printed
    tasks = {row["task"] for row in json.loads((tmp_path / "results.json").read_text())["runs"]}
    assert tasks == {"question", "writing", "math", "code", "summary", "editing", "all"}
    assert all(task in printed for task in tasks)
    found = Counter(one.category for one in read_prompts(BUNDLED))
    assert found == dict.fromkeys(tasks - {"all"}, 4)


@pytest.mark.parametrize("terminated", [False, True])
def test_interrupted_bench_writes_what_it_has(
    checkpoint, prompts, tmp_path, monkeypatch, capsys, terminated
):
    original, calls = runner.Session.generate, 0

    def interrupt(self, *args, **kwargs):
        nonlocal calls
        calls += 1
        if calls in (1, 7):  # at once; after two warm-up calls, one whole batch, one call
            if not terminated:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGTERM)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(runner.Session, "generate", interrupt)
    (tmp_path / "results.json").write_text("earlier")
    assert bench(checkpoint, prompts, tmp_path) == 130
    assert (tmp_path / "results.json").read_text() == "earlier"
    assert "nothing was written" in capsys.readouterr().err
    assert bench(checkpoint, prompts, tmp_path) == 130
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["environment"]["interrupted"] is True
    assert {row["prompts"] for row in data["runs"]} == {1}
    assert "interrupted after 3 of 6 calls" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strategies", "layer_skip"], "hf-spec: layer_skip: "),
        (["--assistant", "/no"], "cannot load model '/no': there is no su"),
        (["--device", "warp"], "cannot load model"),
        (["--model", "{prompts.parent}"], "the folder has no config.json"),
        (["--adapter", "{adapter}", "--strategies", "prompt_lookup"],
         "is for strategy 'layer_skip', which does not take part"),
    ],
)  # fmt: skip
def test_what_is_found_out_while_loading_ends_in_one_line(
    checkpoint, prompts, tmp_path, capsys, more, message
):
    adapter = tmp_path / "adapter"
    hf_spec.LayerSkipConfig(skip_attention=[1]).save_pretrained(adapter)
    more = [word.format(prompts=prompts, adapter=adapter) for word in more]
    assert bench(checkpoint, prompts, tmp_path / "out", *more) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_interrupt_is_said(interrupts, monkeypatch, capsys):
    """Of commands that have nothing to say of their own; with Ctrl-C and with SIGTERM."""
    for raised in (signal.SIGINT, signal.SIGTERM):
        monkeypatch.setattr(
            "hf_spec.tools.cli.doctor._summaries", lambda which=raised: signal.raise_signal(which)
        )
        assert cli.main(["strategies"]) == 130
        assert capsys.readouterr().err == "hf-spec: interrupted\n"


def test_progress_in_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("answers") as update:
        update(3, 10, note="5 tokens/s")
    shown = capsys.readouterr().err
    assert "answers:  30%" in shown and "3/10" in shown and "5 tokens/s" in shown


def test_the_command_line_says_what_it_needs(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"needs typer; run: pip install 'hf_spec\[cli\]'"):
        importlib.reload(cli)


def test_missing_arguments(capsys):
    assert cli.main([]) == 2
    assert "Usage: hf-spec" in capsys.readouterr().out
    assert cli.main(["bench"]) == 2
    assert "Missing option '--model'" in capsys.readouterr().err
    assert cli.main(["doctor", "some/model"]) == 2
    assert "(some/model) (did you mean --model?)" in capsys.readouterr().err
    assert cli.main(["doctor", "--model", "some/model", "more"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_serve_says_what_is_missing(monkeypatch, capsys):
    # None in sys.modules makes the import fail.
    monkeypatch.setattr("hf_spec.tools.cli.serve.require", lambda *_: None)
    monkeypatch.setitem(sys.modules, "transformers.cli.transformers", None)
    assert cli.main(["serve", "some/model"]) == 2
    errors = [capsys.readouterr().err]
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["serve", "some/model", "--port", "1"]) == 2
    errors.append(capsys.readouterr().err)
    assert all("pip install 'hf_spec[serve]'" in one and one.count("\n") == 1 for one in errors)
    assert "fastapi, openai, pydantic" in errors[1]


def test_serve_hands_all_other_arguments_over(monkeypatch):
    given, prepared = [], []

    class Program:
        port = SimpleNamespace(opts=["--port"], secondary_opts=[])
        commands = {"serve": SimpleNamespace(params=[port])}

        def __call__(self, arguments, **_):
            given.append(arguments)

    stock = SimpleNamespace(app=Program())
    monkeypatch.setitem(sys.modules, "transformers.cli.transformers", stock)
    nothing = dict.fromkeys(("on_request", "on_metrics", "tell"), lambda *_: None)
    served = SimpleNamespace(on_load=prepared.append, **nothing)
    monkeypatch.setitem(sys.modules, "hf_spec.modeling_patches.served_models", served)
    monkeypatch.setattr("hf_spec.tools.cli.serve.require", lambda *_: None)
    assert cli.main(["serve", "some/model", "--port", "1"]) == 0
    assert cli.main(["serve", "--port", "1", "--strategy", "none", "some/model"]) == 0
    assert len(prepared) == 2
    assert given == [["serve", "some/model", "--port", "1"], ["serve", "--port", "1", "some/model"]]


@pytest.mark.skipif(not is_serve_available(), reason="needs the packages of hf_spec[serve]")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("some/model --strateg plain", "No such option: --strateg (did you mean '--strategy'?)"),
        ("some/model --adaptor=x", "No such option: --adaptor (did you mean '--adapter'?)"),
        ("./nowhere --port 1", "cannot load model './nowhere': there is no such folder"),
    ],
)
def test_serve_checks_what_it_hands_over(capsys, words, message):
    assert cli.main(["serve", *words.split()]) == 2
    assert capsys.readouterr().err == f"hf-spec: {message}\n"  # and nothing of strategies


def test_an_unexpected_error_keeps_its_traceback(monkeypatch):
    def fail():
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("hf_spec.tools.cli.doctor._summaries", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        cli.main(["strategies"])
