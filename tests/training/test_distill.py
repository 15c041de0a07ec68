"""``hf-spec distill``: the rows are the model's own, once each, however the run was cut up."""

import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from peft import get_peft_model
from tiny_checkpoint import make_model, save_checkpoint, write_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import hf_spec
from hf_spec.adapters.config import weights_digest
from hf_spec.files import exclusive
from hf_spec.tools import cli
from hf_spec.tools.bench import runner
from hf_spec.tools.training import distill as work
from hf_spec.tools.training.dataset import read_answers, read_provenance

pytest.importorskip("datasets")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.usefixtures("mtp_as_shipped")

NEW, BATCH = 12, 4
#: Ids of EOS; the second is a token that the tiny model often writes, so that answers end early.
EOS = [1, 5]
ROOT = Path(__file__).parents[2]
FIRST = [
    {"turns": [f"{'abcdefg'[i % 7] * (i % 5 + 1)}{i} " * (i % 4 + 1), "unused"],
     "category": "xyz"[i % 3], "question_id": 100 + i}
    for i in range(14)
]  # fmt: skip
SECOND = [{"question": f"{i} and {i}?", "question_id": f"q{i}"} for i in range(5)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model ``m``, prompts ``a.jsonl`` and ``b.jsonl``, configs of adapters."""
    root = tmp_path_factory.mktemp("distill")
    save_checkpoint(root / "m")
    edit_json(root / "m" / "generation_config.json", eos_token_id=EOS)
    write_prompts(root / "a.jsonl", FIRST)
    write_prompts(root / "b.jsonl", SECOND)
    model = AutoModelForCausalLM.from_pretrained(root / "m")
    skip = hf_spec.LayerSkipConfig(skip_attention=[1])
    get_peft_model(model, skip).save_pretrained(root / "skip")
    hf_spec.SpecConfig("layer_skip", {"num_draft_tokens": 3}).save_pretrained(root / "skip")
    hf_spec.SpaceConfig(update="lora").save_pretrained(root / "tuned")
    hf_spec.SpecConfig("space").save_pretrained(root / "tuned")
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep load_dataset out of the user's cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def arguments(root: Path, output: Path, *more: str) -> list[str]:
    """The command, with options of ``more`` taking the place of these."""
    options = {
        "--model": str(root / "m"), "--dtype": "float32", "--device": "cpu",
        "--max-new-tokens": str(NEW), "--batch-size": str(BATCH), "--output": str(output),
    }  # fmt: skip
    if "--prompts" not in more:
        more = (*more, "--prompts", str(root / "a.jsonl"), "--prompts", str(root / "b.jsonl"))
    kept = [word for name, value in options.items() if name not in more for word in (name, value)]
    return ["distill", *kept, *more]


def distill(root: Path, output: Path, *more: str) -> int:
    return cli.main(arguments(root, output, *more))


def rows_of(output: Path) -> list[dict[str, Any]]:
    return list(read_answers(output))


def lines_of(output: Path) -> list[dict[str, Any]]:
    """The answers in the order in which they were written."""
    return [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def oracle(root: Path) -> list[dict[str, Any]]:
    """The rows, worked out with plain ``generate``, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(root / "m", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(root / "m")
    texts = [row["turns"][0] for row in FIRST] + [row["question"] for row in SECOND]
    rows = []
    for index, text in enumerate(texts):
        chat = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True
        )["input_ids"]  # fmt: skip
        out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        answer = out[0, len(prompt) :].tolist()
        given = (FIRST + SECOND)[index]
        rows.append(
            {
                "prompt_ids": prompt, "answer_ids": answer, "prompt": text,
                "answer": tokenizer.decode([i for i in answer if i > 3]),  # 0 to 3 are special
                "category": given.get("category", "default"),
                "source": "a.jsonl" if index < len(FIRST) else "b.jsonl",
                "question_id": str(given["question_id"]), "index": index,
            }
        )  # fmt: skip
    lengths = [len(row["answer_ids"]) for row in rows]
    assert min(lengths) < NEW == max(lengths), "the prompts show nothing"
    return rows


# -------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize(
    ("more", "name", "options"),
    [
        ([], "auto", {}),
        (
            ["--strategy", "prompt_lookup"],
            "prompt_lookup",
            {"drafting": "always", "num_draft_tokens": 4},
        ),
        (
            ["--batch-size", "1", "--strategy-kwargs", '{"drafting": "auto", "max_nodes": 9}'],
            "prompt_lookup",
            {"drafting": "auto", "num_draft_tokens": 9},  # by its name of today
        ),
        (["--strategy", "none"], None, {}),
        (["--adapter", "skip"], "layer_skip", {"drafting": "always", "num_draft_tokens": 3}),
    ],
)
def test_rows_are_those_of_plain_generate(
    root, oracle, tmp_path, more, name, options, capsys, monkeypatch
):
    monkeypatch.chdir(root)
    assert distill(root, tmp_path / "out", *more) == 0
    printed = capsys.readouterr().out
    assert rows_of(tmp_path / "out") == oracle
    made = read_provenance(tmp_path / "out")
    tokens = sum(len(row["answer_ids"]) for row in oracle)
    assert (made["rows"], made["answer_tokens"]) == (len(oracle), tokens)
    assert made["mean_answer_tokens"] == pytest.approx(tokens / len(oracle))
    assert made["truncated_prompts"] == 0 and made["processes"] == 1
    measured = made["measured"]
    assert measured["tokens_per_second"] == pytest.approx(tokens / measured["seconds"])
    drafts = "assistant_strategy" in made["chosen"]
    assert drafts == (name is not None)
    if options.get("drafting") != "auto":  # which goes by step times
        assert measured["tau"] > 1.0 if drafts else measured["tau"] == 1.0
    assert (made["strategy"], made["strategy_kwargs"]) == (name, options)
    assert made["adapter"] == ("skip" if name == "layer_skip" else None)
    plain = AutoModelForCausalLM.from_pretrained(root / "m")
    assert made["model_fingerprint"] == weights_digest(plain)  # adapters do not count
    for shown in (
        f"examples: {len(oracle)}", f"{tokens}", f"{measured['tokens_per_second']:.1f} tokens/s",
        f"tau {measured['tau']:.2f}", str(tmp_path / "out"),
    ):  # fmt: skip
        assert shown in printed


def test_provenance_of_a_limited_run(root, oracle, tmp_path, monkeypatch):
    commit = property(lambda config: "0123abcd", lambda config, value: None)
    monkeypatch.setattr(LlamaConfig, "_commit_hash", commit, raising=False)
    output = tmp_path / "out"
    assert distill(root, output, "--seed", "3", "--limit", "8") == 0
    shown = {path.name for path in output.iterdir()} - {".lock"}
    assert shown == {"answers.jsonl", "provenance.json"}
    made = read_provenance(output)
    assert (made["model"], made["model_revision"]) == (str(root / "m"), "0123abcd")
    assert [*made["prompts"].values()] == ["a.jsonl", "b.jsonl"]
    assert (made["limit"], made["seed"], made["batch_size"]) == (8, 3, BATCH)
    assert made["generation_config"]["eos_token_id"] == EOS
    environment = made["environment"]
    assert environment["torch"] == torch.__version__ and environment["device"] == "cpu"
    assert {"transformers", "peft", "hf_spec", "python", "date"} <= environment.keys()
    assert str(root / "a.jsonl") not in json.dumps(made)  # folders are private
    # The limit takes evenly from all categories.
    rows = rows_of(output)
    assert [row["index"] for row in rows] == list(range(8))
    assert Counter(row["category"] for row in rows) == {"x": 2, "y": 2, "z": 2, "default": 2}
    answers = [row["answer_ids"] for row in rows]
    chosen = {row["prompt"] for row in rows}
    assert answers == [row["answer_ids"] for row in oracle if row["prompt"] in chosen]


def test_batches_hold_each_prompt_once_and_similar_lengths():
    assert work.batches([5, 9, 1, 9, 7, 3, 2], 3) == [[1, 3, 4], [0, 5, 6], [2]]


# ------------------------------------------------------------------------------- turns of chats

USER, TOOL = {"role": "user", "content": "ab"}, {"role": "tool", "content": "42"}
SAYS = {"role": "assistant", "content": "what the file says"}
CALL = {
    "role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}],
}  # fmt: skip
#: The first has no answer to its end; in the second a tool is called.
CHATS = [
    [{"role": "system", "content": "s"}, USER, SAYS, {**USER, "content": "c"}, SAYS, USER],
    [USER, CALL, TOOL, SAYS, {**USER, "content": "d?"}, SAYS],
    [{**USER, "content": "one turn"}],
    [USER, SAYS, {**USER, "content": "e e"}, SAYS],
]
CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.tool_calls %}[{{ m.tool_calls[0].function.name }}]{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def talking(root: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with a model for chats and the chats, and the answers to all turns, worked out with
    plain ``generate``."""
    folder = root / "talking"
    shutil.copytree(root / "m", folder / "m")
    model = AutoModelForCausalLM.from_pretrained(folder / "m", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "m")
    tokenizer.chat_template = CALLS
    tokenizer.save_pretrained(folder / "m")
    write_prompts(folder / "chats.jsonl", [{"messages": chat} for chat in CHATS])
    rows = []
    for line, chat in enumerate(CHATS, start=1):
        messages: list[Any] = []
        for message in [*chat, *([SAYS] if chat[-1]["role"] == "user" else [])]:
            if message["role"] != "assistant":
                messages.append(message)
                continue
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )["input_ids"]  # fmt: skip
            out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
            answer = out[0, len(prompt) :].tolist()
            text = tokenizer.decode([i for i in answer if i > 3])
            rows.append((line, prompt, answer))
            messages.append(message if "tool_calls" in message else {**SAYS, "content": text})
    return folder, [
        {"prompt_ids": prompt, "answer_ids": answer, "question_id": str(line), "index": index}
        for index, (line, prompt, answer) in enumerate(rows)
    ]


def said(output: Path) -> list[dict[str, Any]]:
    names = ("prompt_ids", "answer_ids", "question_id", "index")
    return [{name: row[name] for name in names} for row in rows_of(output)]


def test_every_turn_is_answered_after_the_model_s_own_answers(talking, tmp_path, caplog):
    """Also if it is interrupted within the second turns. By default the last turns are answered, in
    chats as the file has them; prompts that the template refuses are left out."""
    folder, oracle = talking
    more = ("--prompts", str(folder / "chats.jsonl"), "--batch-size", "2")
    assert distill(folder, tmp_path / "all", *more, "--turns", "all") == 0
    assert said(tmp_path / "all") == oracle and read_provenance(tmp_path / "all")["rows"] == 9
    with killed_after(3, torn=50):
        distill(folder, tmp_path / "cut", *more, "--turns", "all")
    assert distill(folder, tmp_path / "cut", *more, "--turns", "all") == 0
    assert lines_of(tmp_path / "cut") == lines_of(tmp_path / "all")
    assert distill(folder, tmp_path / "last", *more) == 0
    last = said(tmp_path / "last")
    assert [row["question_id"] for row in last] == ["1", "2", "3", "4"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "m")
    assert "what the file says" in tokenizer.decode(last[3]["prompt_ids"])
    assert distill(folder, tmp_path / "last", *more, "--turns", "all") == 2


def test_rows_that_a_template_refuses_are_left_out(talking, tmp_path, caplog, capsys):
    folder, oracle = talking
    shutil.copytree(folder / "m", tmp_path / "m")
    start = "{% for m in messages %}"
    refuses = start + "{{ raise_exception('no tools') if m.role == 'tool' }}"
    (tmp_path / "m" / "chat_template.jinja").write_text(CALLS.replace(start, refuses))
    more = ("--prompts", str(folder / "chats.jsonl"), "--turns", "all")
    assert distill(tmp_path, tmp_path / "out", *more) == 0
    assert "left out: 1; the first: " in caplog.text and "chats.jsonl, line 2: " in caplog.text
    expected = [row for row in oracle if row["question_id"] != "2"]
    assert said(tmp_path / "out") == [{**row, "index": i} for i, row in enumerate(expected)]
    only = write_prompts(tmp_path / "only.jsonl", [{"messages": CHATS[1]}])
    assert distill(tmp_path, tmp_path / "none", "--prompts", str(only)) == 2
    assert "only.jsonl, line 1: the tokenizer's chat template refuses" in capsys.readouterr().err
    assert distill(tmp_path, tmp_path / "none", "--turns", "first") == 2
    assert "--turns='first'" in capsys.readouterr().err


# ---------------------------------------------------------------------------------- interruptions


class Killed(BaseException):
    """Stands for the end of the process: nothing in the code catches it."""


@contextmanager
def killed_after(batches: int, torn: int = 0) -> Iterator[None]:
    """The process ends when so many batches are written, and so many bytes of the next one."""
    original, made = work.AnswerFolder.add, 0

    def add(self: Any, rows: Any) -> None:
        nonlocal made
        original(self, rows)
        made += 1
        if made > batches:
            size = self.answers.stat().st_size - sum(len(json.dumps(row)) + 1 for row in rows)
            os.truncate(self.answers, size + torn)
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work.AnswerFolder, "add", add)
        with pytest.raises(Killed):
            yield


def test_continues_where_it_was_killed(root, oracle, tmp_path, caplog, monkeypatch, capsys):
    """Behind some lines of a batch, and by the user between two batches."""
    output = tmp_path / "out"
    with killed_after(1, torn=700):
        distill(root, output)
    assert not (output / "answers.jsonl").read_bytes().endswith(b"\n")
    for read in (read_answers, read_provenance):
        with pytest.raises(ValueError, match="is unfinished: repeat the hf-spec distill command"):
            read(output)
    calls, original = 0, runner.Session.generate

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(runner.Session, "generate", interrupt)
    assert distill(root, output) == 130
    assert "interrupted; the same command continues" in capsys.readouterr().err
    assert caplog.text.count("the last line was cut off and is made again") == 1
    assert len(lines_of(output)) == 2 * BATCH
    calls = 2
    assert distill(root, output) == 0
    assert calls - 2 == -(-len(oracle) // BATCH) - 2, "finished batches are not made again"
    assert rows_of(output) == oracle and len(lines_of(output)) == len(oracle)


def test_a_finished_folder_is_left_alone(root, finished, tmp_path, no_model, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    for name in ("a.jsonl", "b.jsonl"):
        shutil.copy(root / name, tmp_path)
    same = ["--prompts", str(tmp_path / "a.jsonl"), "--prompts", str(tmp_path / "b.jsonl")]
    assert distill(root, finished, *same) == 0  # another folder, the same prompts
    assert capsys.readouterr().out == f"finished before, with the same settings: {finished}\n"
    (tmp_path / "b.jsonl").write_text((root / "b.jsonl").read_text() + "\n")
    assert distill(root, finished, *same) == 2
    assert "prompts was {" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


SAMPLED = ("--do-sample", "--temperature", "0.9", "--top-k", "50", "--seed", "5")


def test_sampling_depends_on_the_seed_alone(root, oracle, tmp_path, monkeypatch):
    assert distill(root, tmp_path / "whole", *SAMPLED) == 0
    sampled = rows_of(tmp_path / "whole")
    assert sampled != oracle
    assert [row["prompt_ids"] for row in sampled] == [row["prompt_ids"] for row in oracle]
    assert distill(root, tmp_path / "other", *SAMPLED[:-1], "6") == 0
    assert rows_of(tmp_path / "other") != sampled
    # Each batch has a seed of its own: the same prompt again gets another answer.
    again = write_prompts(tmp_path / "again.jsonl", [{"prompt": "abc"}] * 3)
    more = ("--batch-size", "1", "--prompts", str(again))
    assert distill(root, tmp_path / "again", *SAMPLED, *more) == 0
    assert len({tuple(row["answer_ids"]) for row in rows_of(tmp_path / "again")}) == 3
    # Neither on interruptions nor on time: leaving out drafts that do not pay would change who
    # draws what.
    with killed_after(1, torn=700):
        distill(root, tmp_path / "out", *SAMPLED)
    now, steps = 0.0, random.Random(0)

    def perf_counter() -> float:
        nonlocal now
        now += steps.expovariate(1.0)
        return now

    monkeypatch.setattr(time, "perf_counter", perf_counter)
    assert distill(root, tmp_path / "out", *SAMPLED) == 0
    assert rows_of(tmp_path / "out") == sampled


# ------------------------------------------------------------------------------ several processes


@pytest.mark.environment
def test_two_processes(root, tmp_path):
    """Through ``accelerate launch``: the rows of one process."""
    more = (*SAMPLED, "--batch-size", "7")  # three batches
    assert distill(root, tmp_path / "one", *more) == 0
    # On a CPU, accelerate starts one process only unless it is told that there are several.
    launch = ["--multi_gpu", "--num_processes", "2", "-m", "hf_spec.tools.cli"]
    done = forks.run(
        "from accelerate.commands.launch import main; main()",
        *launch, *arguments(root, tmp_path / "out", *more), cwd=ROOT,
        environment={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("examples: ") == 1, "one process speaks for all"
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "one")
    assert read_provenance(tmp_path / "out")["processes"] == 2


# --------------------------------------------------------------------------------- other settings


@pytest.fixture(scope="module")
def unfinished(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its first batch."""
    output = tmp_path_factory.mktemp("unfinished")
    with killed_after(1):
        distill(root, output)
    return output


@pytest.fixture(scope="module")
def finished(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("finished")
    assert distill(root, output) == 0
    return output


@pytest.mark.parametrize(
    ("more", "change"),
    [
        (["--max-new-tokens", "8"], "max_new_tokens was 12, now 8"),
        (["--limit", "5", "--batch-size", "2"], "limit was None, now 5; batch_size was 4, now 2"),
        (["--seed", "1", "--strategy", "none"], "strategy was 'auto', now None"),
        (["--do-sample", "--top-p", "0.5"], "top_p was None, now 0.5"),
        (["--model", "/elsewhere"], "now '/elsewhere'"),
    ],
)
def test_other_settings_are_refused(
    root, unfinished, finished, no_model, more, change, capsys, monkeypatch
):
    monkeypatch.chdir(root)
    for output in (unfinished, finished):
        before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
        assert distill(root, output, *more) == 2
        error = capsys.readouterr().err
        start = f"hf-spec: {str(output)!r} holds answers made with other settings ("
        assert error.startswith(start) and error.count("\n") == 1
        assert all(part in error for part in change.split("; "))
        assert error.endswith("repeat its settings, or give another --output\n")
        assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_a_model_that_has_changed_is_refused(root, unfinished, tmp_path, capsys):
    """Under the same name; that shows only when it is loaded."""
    model, output = tmp_path / "m", tmp_path / "out"
    shutil.copytree(root / "m", model)
    shutil.copytree(unfinished, output)
    edit_json(output / "provenance.json", model=str(model))
    make_model(seed=1).save_pretrained(model)
    edit_json(model / "generation_config.json", eos_token_id=7)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert distill(root, output, "--model", str(model)) == 2
    error = capsys.readouterr().err
    assert error.count("hf-spec:") == 1
    for name in ("model_fingerprint", "generation_config", "tokenizer_sha256"):
        assert f"{name} was " in error
    shutil.rmtree(model)
    shutil.copytree(root / "m", model)
    assert distill(root, output, "--model", str(model)) == 0


def test_folders_of_others_and_damaged_ones(root, unfinished, tmp_path, capsys):
    with exclusive(tmp_path / ".lock", ""):
        assert distill(root, tmp_path) == 2
    assert "another hf-spec distill is writing to" in capsys.readouterr().err
    theirs = tmp_path / "answers.jsonl"
    theirs.write_text("theirs")
    assert distill(root, tmp_path) == 2
    assert "is not of hf-spec distill: give another --output" in capsys.readouterr().err
    assert theirs.read_text() == "theirs"
    lines = (unfinished / "answers.jsonl").read_text().splitlines(keepends=True)
    theirs.write_text("".join([lines[0], "\0\0\n", *lines[2:]]))
    shutil.copy(unfinished / "provenance.json", tmp_path)
    assert distill(root, tmp_path) == 2
    assert "answers.jsonl, line 2: not JSON" in capsys.readouterr().err
