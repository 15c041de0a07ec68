"""All main tables: each is made once, with its command, and the rest after an interruption."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripts import load_script
from tiny_checkpoint import save_checkpoint, write_prompts
from transformers import AutoTokenizer

from hf_spec.tools import cli
from hf_spec.tools.bench.prompts import encode, read_prompts

STRATEGIES = ["prompt_lookup", "transformers:prompt_lookup"]


@pytest.fixture
def script() -> Any:
    return load_script("all")


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    rows = [
        {"category": kind, "turns": [f"{kind} {n} and {n + 1} " * 3]}
        for kind in ("sums", "words")
        for n in range(4)
    ]
    return [
        "--model", str(save_checkpoint(tmp_path / "base", layers=1)),
        "--prompts", str(write_prompts(tmp_path / "p.jsonl", rows)), "--limit", "4",
        "--max-new-tokens", "4", "--threads", "1", "--dtype", "float32", "--batch-sizes", "1,2",
        "--contexts", "100,9999", "--output", str(tmp_path / "out"),
    ]  # fmt: skip


@pytest.fixture
def run(script: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders that commands of this process have written."""
    made: list[str] = []

    def in_this_process(*words: str) -> None:
        more = ["--backend", "eager"] if "--compile" in words else []
        assert cli.main([*words, *more]) == 0
        made.append(Path(words[-1]).name)

    monkeypatch.setattr(script.measured, "command", in_this_process)
    return made


def tables_of(page: str) -> dict[str, list[list[str]]]:
    """The cells of each table by its title."""
    found = {}
    for part in page.split("\n## ")[1:]:
        title, lines = part.splitlines()[0], part.splitlines()
        rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
        found[title] = [[cell.strip() for cell in row] for row in rows if row[0] != "---"]
    return found


def test_tables_are_made_once(
    script: Any, given: list[str], run: list[str], tmp_path: Path, capsys: Any
) -> None:
    script.main([*given, "--only", "batches"])
    kinds = ("greedy", "0.7", "1.0")
    batches = [f"batches-{kind}-{size}" for kind in kinds for size in (1, 2)]
    assert run == ["0", *batches]  # a trial comes first
    said = capsys.readouterr().out
    assert "left out: prompts of 9999 tokens" in said
    assert re.search(r"batches-0\.7-2: about \d+ s\n.*in all: about \d+ \w+", said, re.S)
    assert "batches-greedy-1 done, about" in said
    # The same prompts for all sizes, which fill the largest batch.
    even = (tmp_path / "out" / "prompts-batches.jsonl").read_text().splitlines()
    assert [json.loads(line)["category"] for line in even] == ["sums"] * 2 + ["words"] * 2

    # What has been measured stays, also on the page; what was interrupted does not.
    del run[:]
    place = tmp_path / "out" / batches[0] / "results.json"
    results = json.loads(place.read_text())
    results["environment"]["interrupted"] = True
    place.write_text(json.dumps(results))
    script.main([*given, "--only", "batches,tasks,contexts,compiled"])
    assert run == ["100", batches[0], "tasks", "context-100", "compiled"]
    page = (tmp_path / "out" / "figures.md").read_text()
    assert page.count("```bash\nhf-spec bench --model") == 6
    assert "left" in capsys.readouterr().out
    assert re.search(r"Outputs: \d+ as in .*, 0 different otherwise\. .* 1 thread, float32", page)
    found = tables_of(page)
    greedy = found["Batch sizes, greedy"]
    assert greedy[0] == ["batch 1", "batch 2"]
    assert [row[0] for row in greedy[1:]] == ["`generate`", *(f"`{name}`" for name in STRATEGIES)]
    assert all(cell.endswith("tokens/s") for cell in greedy[1][1:])
    speed = r"\d+\.\d\dx \(\d+\.\d\d\)"
    assert all(re.match(speed, cell) for cell in greedy[2][1:])
    assert re.match(speed, greedy[3][1]) and len(greedy[3]) == 2  # it takes no batches
    assert [row[0] for row in found["Each task"]] == ["task", "sums", "words", "all"]
    assert found["Lengths of the prompt"][0] == ["100 tokens"]
    assert len(found["Compiled steps"][1]) == len(found["Compiled steps"][2]) == 5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    long = read_prompts(tmp_path / "out" / "prompts-100.jsonl")
    lengths = [len(encode(tokenizer, one.text, one.history)) for one in long]
    assert len(long) == 4 and all(90 < length <= 100 for length in lengths)

    del run[:]
    script.main(given)
    assert run == []


def test_a_step_that_fails_does_not_stop_the_others(
    script: Any, given: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    def failing(*words: str) -> None:
        if Path(words[-1]).name == "context-100":
            raise SystemExit("hf-spec bench failed: no memory")
        assert cli.main([*words]) == 0

    monkeypatch.setattr(script.measured, "command", failing)
    with pytest.raises(SystemExit, match="not measured:\ncontext-100: .*no memory"):
        script.main([*given, "--only", "contexts,tasks"])
    assert "## Each task" in (tmp_path / "out" / "figures.md").read_text()


def test_vllm_is_beside_them_where_it_is(
    script: Any, given: list[str], run: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[list[str]] = []
    stock = script.subprocess.run

    def vllm(words: list[str], **how: Any) -> Any:
        if not words[1].endswith("vllm.py"):
            return stock(words, **how)
        asked.append(words)
        return SimpleNamespace(returncode=0, stdout="| vLLM | 12.0 |\n", stderr="")

    monkeypatch.setattr(script.subprocess, "run", vllm)
    for _ in range(2):
        script.main([*given, "--only", "vllm", "--vllm-python", "python-of-vllm"])
    ((_, program, *words),) = asked
    assert Path(program).name == "vllm.py"
    load_script("vllm").parse(words)  # it takes these arguments
    page = (tmp_path / "out" / "figures.md").read_text()
    assert "python benchmarks/vllm.py --vllm-python" in page and "| vLLM | 12.0 |" in page


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--only", "speed"], "--only speed: choose from batches, tasks"),
        (["--only", "vllm"], "--only vllm needs --vllm-python"),
        (["--strategies", "nothing"], "strategy='nothing'"),
        (["--batch-sizes", "8"], "no category has 8 prompts, which a batch of 8 needs"),
    ],
)
def test_bad_arguments(
    script: Any, given: list[str], more: list[str], message: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as error:
        script.main([*given, *more])
    assert message in capsys.readouterr().err + str(error.value)
