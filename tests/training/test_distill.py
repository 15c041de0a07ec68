"""``hf-spec distill``: the rows are the model's own, once each, however the run was cut up."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from tiny_checkpoint import CONTEXT, make_model, make_tokenizer, save_checkpoint, write_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_spec
from hf_spec import cli
from hf_spec.adapters.base_model import fingerprint
from hf_spec.bench import session
from hf_spec.files import exclusive
from hf_spec.training import distill as work
from hf_spec.training.dataset import read_answers, read_provenance

pytest.importorskip("datasets")
pytest.importorskip("accelerate")

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
    for folder, strategy, config in (
        ("skip", "layer_skip", hf_spec.LayerSkipConfig()),
        ("tuned", "space", hf_spec.SpaceConfig(update="lora")),
    ):
        config.save_pretrained(root / folder)
        hf_spec.SpecConfig(assistant_strategy=strategy).save_pretrained(root / folder)
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep load_dataset out of the user's cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails the test."""

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)


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
        ([], "prompt_lookup", {"drafting": "always", "max_nodes": 4}),
        (
            ["--batch-size", "1", "--strategy-kwargs", '{"drafting": "auto", "max_nodes": 9}'],
            "prompt_lookup",
            {"drafting": "auto", "max_nodes": 9},
        ),
        (["--strategy", "none"], None, {}),
        (
            ["--strategy", "layer_skip", "--strategy-kwargs", '{"skip_attention": [1]}'],
            "layer_skip",
            {"drafting": "always", "skip_attention": [1]},
        ),
    ],
)
def test_rows_are_those_of_plain_generate(
    root: Path, oracle: list[dict[str, Any]], tmp_path: Path, more: list[str], name: str | None,
    options: dict[str, Any], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert distill(root, tmp_path / "out", *more) == 0
    printed = capsys.readouterr().out
    assert rows_of(tmp_path / "out") == oracle
    made = json.loads((tmp_path / "out" / "provenance.json").read_text())
    tokens = sum(len(row["answer_ids"]) for row in oracle)
    assert (made["rows"], made["answer_tokens"]) == (len(oracle), tokens)
    assert made["mean_answer_tokens"] == pytest.approx(tokens / len(oracle))
    assert made["truncated_prompts"] == 0 and made["processes"] == 1
    measured = made["measured"]
    assert measured["tokens_per_second"] == pytest.approx(tokens / measured["seconds"])
    assert measured["tau"] == 1.0 if name is None else measured["tau"] > 1.0
    assert (made["strategy"], made["strategy_kwargs"]) == (name, options)
    for shown in (
        f"examples: {len(oracle)}", f"{tokens}", f"{measured['tokens_per_second']:.1f} tokens/s",
        f"tau {measured['tau']:.2f}", str(tmp_path / "out"),
    ):  # fmt: skip
        assert shown in printed


def test_where_the_rows_come_from(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = AutoModelForCausalLM.from_pretrained

    def load(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        model.config._commit_hash = "0123abcd"
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    output = tmp_path / "out"
    assert distill(root, output, "--seed", "3", "--limit", "1") == 0
    shown = {path.name for path in output.iterdir()} - {".lock"}
    assert shown == {"answers.jsonl", "provenance.json"}
    made = json.loads((output / "provenance.json").read_text())
    assert (made["model"], made["model_revision"]) == (str(root / "m"), "0123abcd")
    assert made["model_fingerprint"] == fingerprint(load(root / "m", dtype=torch.float32))
    assert made["prompts"] == {
        hashlib.sha256((root / name).read_bytes()).hexdigest(): name
        for name in ("a.jsonl", "b.jsonl")
    }
    settings = {
        "limit": 1, "max_new_tokens": NEW, "batch_size": BATCH, "dtype": "float32", "seed": 3,
        "do_sample": False, "temperature": None, "adapter": None,
    }  # fmt: skip
    assert {name: made[name] for name in settings} == settings
    assert made["generation_config"]["eos_token_id"] == EOS
    environment = made["environment"]
    assert environment["torch"] == torch.__version__ and environment["device"] == "cpu"
    assert {"transformers", "peft", "hf_spec", "python", "date"} <= environment.keys()
    # The folder of the prompts is nobody's business.
    assert str(root / "a.jsonl") not in json.dumps(made)


def test_the_tokenizers_hash() -> None:
    first, same, other = (make_tokenizer(chat) for chat in (True, True, False))
    assert work.tokenizer_sha256(first) == work.tokenizer_sha256(same)
    assert work.tokenizer_sha256(first) != work.tokenizer_sha256(other)
    before = work.tokenizer_sha256(same)
    same(["a", "bcd"], padding=True, truncation=True, max_length=2)  # leaves settings behind
    assert work.tokenizer_sha256(same) == before
    same.add_tokens(["new"])
    assert work.tokenizer_sha256(same) != before


def test_a_limit_spreads_over_categories(
    root: Path, oracle: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert distill(root, tmp_path / "out", "--limit", "8") == 0
    rows = rows_of(tmp_path / "out")
    assert [row["index"] for row in rows] == list(range(8))
    categories = [row["category"] for row in rows]
    assert {name: categories.count(name) for name in set(categories)} == {
        "x": 2, "y": 2, "z": 2, "default": 2,
    }  # fmt: skip
    by_text = {row["prompt"]: row["answer_ids"] for row in oracle}
    assert all(row["answer_ids"] == by_text[row["prompt"]] for row in rows)
    places = [list(by_text).index(row["prompt"]) for row in rows]
    assert places == sorted(places)


def test_a_prompt_that_does_not_fit_is_cut(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = write_prompts(tmp_path / "p.jsonl", [{"prompt": "short"}, {"prompt": "long " * CONTEXT}])
    assert distill(root, tmp_path / "out", "--prompts", str(long)) == 0
    assert "examples: 2, 1 of them with a cut prompt" in capsys.readouterr().out
    short, cut = rows_of(tmp_path / "out")
    assert len(cut["prompt_ids"]) + NEW <= CONTEXT < len(cut["prompt"])
    template = make_tokenizer().apply_chat_template(
        [{"role": "user", "content": ""}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert cut["prompt_ids"][:1] == template[:1] and cut["prompt_ids"][-2:] == template[-2:]
    made = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert made["truncated_prompts"] == 1
    model = AutoModelForCausalLM.from_pretrained(root / "m", dtype=torch.float32).eval()
    for row in (short, cut):
        ids = torch.tensor([row["prompt_ids"]])
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert out[0, ids.shape[1] :].tolist() == row["answer_ids"]


def test_without_a_chat_template(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "m", tmp_path / "m")
    make_tokenizer(chat=False).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    assert distill(root, tmp_path / "out", "--model", str(tmp_path / "m"), "--limit", "3") == 0
    tokenizer = make_tokenizer(chat=False)
    for row in rows_of(tmp_path / "out"):
        assert row["prompt_ids"] == tokenizer(row["prompt"])["input_ids"]


def test_with_an_adapter(root: Path, oracle: list[dict[str, Any]], tmp_path: Path) -> None:
    from peft import get_peft_model

    model = AutoModelForCausalLM.from_pretrained(root / "m")
    config = hf_spec.LayerSkipConfig(skip_attention=[1])
    get_peft_model(model, config).save_pretrained(tmp_path / "skip")
    options = {"max_draft": 3}
    spec = hf_spec.SpecConfig(assistant_strategy="layer_skip", assistant_kwargs=options)
    spec.save_pretrained(tmp_path / "skip")
    assert distill(root, tmp_path / "out", "--adapter", str(tmp_path / "skip")) == 0
    assert rows_of(tmp_path / "out") == oracle
    made = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert made["strategy"] == "layer_skip" and made["adapter"] == str(tmp_path / "skip")
    assert made["strategy_kwargs"] == {**options, "drafting": "always"}
    assert made["measured"]["tau"] > 1.0
    assert made["model_fingerprint"] == fingerprint(model)  # adapters do not count


def test_batches_hold_each_prompt_once_and_similar_lengths() -> None:
    assert work.batches([5, 9, 1, 9, 7, 3, 2], 3) == [[1, 3, 4], [0, 5, 6], [2]]


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


@pytest.mark.parametrize("torn", [0, 700])
def test_killed_while_writing(
    root: Path, oracle: list[dict[str, Any]], tmp_path: Path, torn: int,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Before a batch, or behind some of its lines."""
    output = tmp_path / "out"
    with killed_after(2, torn):
        distill(root, output)
    assert (output / "answers.jsonl").read_bytes().endswith(b"\n") == (torn == 0)
    for read in (read_answers, read_provenance):
        with pytest.raises(ValueError, match="is unfinished: repeat the hf-spec distill command"):
            read(output)
    calls, original = [], session.Session.generate

    def generate(self: Any, contender: Any, prompts: Any) -> Any:
        calls.append(len(prompts))
        return original(self, contender, prompts)

    monkeypatch.setattr(session.Session, "generate", generate)
    assert distill(root, output) == 0
    assert len(calls) == -(-len(oracle) // BATCH) - 2
    assert rows_of(output) == oracle and len(lines_of(output)) == len(oracle)
    assert ("the last line was cut off and is made again" in caplog.text) == (torn > 0)


def test_interrupted_by_the_user(
    root: Path, oracle: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    original, calls = session.Session.generate, 0

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "generate", interrupt)
        assert distill(root, tmp_path / "out") == 130
    assert "interrupted; the same command continues" in capsys.readouterr().err
    assert len(lines_of(tmp_path / "out")) == 2 * BATCH
    assert distill(root, tmp_path / "out") == 0
    assert rows_of(tmp_path / "out") == oracle


def test_a_finished_folder_is_left_alone(
    root: Path, finished: Path, no_model: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    assert distill(root, finished) == 0
    assert capsys.readouterr().out == f"finished before, with the same settings: {finished}\n"
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


SAMPLED = ("--do-sample", "--temperature", "0.9", "--top-k", "50", "--seed", "5")


@pytest.fixture(scope="module")
def sampled(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a sampled run without interruption."""
    output = tmp_path_factory.mktemp("sampled")
    assert distill(root, output, *SAMPLED) == 0
    return rows_of(output)


def test_sampling_depends_on_the_seed_alone(
    root: Path, oracle: list[dict[str, Any]], sampled: list[dict[str, Any]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert sampled != oracle
    assert [row["prompt_ids"] for row in sampled] == [row["prompt_ids"] for row in oracle]
    assert distill(root, tmp_path / "other", *SAMPLED[:-1], "6") == 0
    assert rows_of(tmp_path / "other") != sampled
    # Not on interruptions.
    output = tmp_path / "out"
    for batches, torn in ((1, 0), (1, 700)):
        with killed_after(batches, torn):
            distill(root, output, *SAMPLED)
    assert (output / "answers.jsonl").read_bytes().count(b"\n") > 2 * BATCH
    assert distill(root, output, *SAMPLED) == 0
    assert rows_of(output) == sampled
    # Nor on time: leaving out drafts that do not pay would change who draws what.
    now, steps = 0.0, random.Random(0)

    def perf_counter() -> float:
        nonlocal now
        now += steps.expovariate(1.0)
        return now

    monkeypatch.setattr(time, "perf_counter", perf_counter)
    assert distill(root, tmp_path / "slow", *SAMPLED) == 0
    assert rows_of(tmp_path / "slow") == sampled


# ------------------------------------------------------------------------------ several processes


@pytest.mark.environment
def test_two_processes(root: Path, tmp_path: Path) -> None:
    """Through ``accelerate launch``: the rows of one process."""
    more = (*SAMPLED, "--batch-size", "7")  # three batches
    assert distill(root, tmp_path / "one", *more) == 0
    # On a CPU, accelerate starts one process only unless it is told that there are several.
    launch = ["--multi_gpu", "--num_processes", "2", "-m", "hf_spec.cli"]
    done = forks.run(
        "from accelerate.commands.launch import main; main()",
        *launch, *arguments(root, tmp_path / "out", *more), cwd=ROOT,
        environment={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("examples: ") == 1, "one process speaks for all"
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "one")
    made = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert made["processes"] == 2


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
        (["--dtype", "bfloat16"], "dtype was 'float32', now 'bfloat16'"),
        (["--seed", "1", "--strategy", "none"], "strategy was 'prompt_lookup', now None"),
        (["--strategy-kwargs", '{"max_nodes": 5}'], "'max_nodes': 5}"),
        (["--do-sample", "--top-p", "0.5"], "top_p was None, now 0.5"),
        (["--model", "/elsewhere"], "now '/elsewhere'"),
        (["--prompts", "b.jsonl"], "prompts was {"),
    ],
)
def test_other_settings_are_refused(
    root: Path, unfinished: Path, finished: Path, no_model: None, more: list[str], change: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
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


def test_prompts_that_have_changed_are_refused(
    root: Path, finished: Path, tmp_path: Path, no_model: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        shutil.copy(root / name, tmp_path)
    same = ["--prompts", str(tmp_path / "a.jsonl"), "--prompts", str(tmp_path / "b.jsonl")]
    assert distill(root, finished, *same) == 0  # another folder, the same prompts
    (tmp_path / "b.jsonl").write_text((root / "b.jsonl").read_text() + "\n")
    assert distill(root, finished, *same) == 2
    assert "prompts was {" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: make_model(seed=1).save_pretrained(folder),
            "model_fingerprint was ",
        ),
        (
            lambda folder: edit_json(folder / "generation_config.json", eos_token_id=7),
            "generation_config was ",
        ),
        (
            lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
            "tokenizer_sha256 was ",
        ),
    ],
)
def test_a_model_that_has_changed_is_refused(
    root: Path, unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], Any], message: str,
) -> None:  # fmt: skip
    """Under the same name; that shows only when it is loaded."""
    model = tmp_path / "m"
    shutil.copytree(root / "m", model)
    output = tmp_path / "out"
    shutil.copytree(unfinished, output)
    edit_json(output / "provenance.json", model=str(model))
    more = ("--model", str(model))
    change(model)
    assert distill(root, output, *more) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    shutil.rmtree(model)
    shutil.copytree(root / "m", model)
    assert distill(root, output, *more) == 0


def test_folders_of_others(
    root: Path, tmp_path: Path, no_model: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with exclusive(tmp_path / ".lock", ""):
        assert distill(root, tmp_path) == 2
    assert "another hf-spec distill is writing to" in capsys.readouterr().err
    theirs = tmp_path / "answers.jsonl"
    theirs.write_text("theirs")
    assert distill(root, tmp_path) == 2
    assert "is not of hf-spec distill: give another --output" in capsys.readouterr().err
    assert theirs.read_text() == "theirs"


def test_a_line_that_cannot_be_read(
    root: Path, unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = Path(shutil.copytree(unfinished, tmp_path / "out"))
    lines = (output / "answers.jsonl").read_text().splitlines(keepends=True)
    (output / "answers.jsonl").write_text("".join([lines[0], "\0\0\n", *lines[2:]]))
    assert distill(root, output) == 2
    assert "answers.jsonl, line 2: not JSON" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strategy", "fastest"], "unknown strategy 'fastest'; choose from none, "),
        (["--strategy-kwargs", "{"], "not JSON"),
        (["--strategy-kwargs", '{"colour": 1}'], "has no option 'colour'"),
        (["--strategy-kwargs", '{"max_ngram": 0}'], "max_ngram"),
        (["--strategy-kwargs", '{"acceptance": "typical"}'], "changes the answers"),
        (["--strategy", "none", "--strategy-kwargs", "{}"], "--strategy-kwargs needs a strategy"),
        (["--strategy", "none", "--adapter", "/a"], "cannot read adapter '/a'"),
        (["--dtype", "int3"], "--dtype 'int3': choose from auto, bfloat16"),
        (["--temperature", "0.7"], "--temperature needs --do-sample"),
        (["--do-sample", "--temperature", "0"], "--temperature=0.0: must be a number in (0.0"),
        (["--do-sample", "--top-p", "1.5"], "--top-p=1.5: must be a number in (0.0, 1.0]"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--prompts", "/nowhere.jsonl"], "cannot read '/nowhere.jsonl': No such file"),
        (["--output", "/dev/null"], "cannot write to --output"),
        (["--adapter", "skip", "--strategy", "prompt_lookup"], "is for strategy 'layer_skip'"),
        (["--adapter", "skip", "--strategy", "none"], "--adapter needs a strategy"),
        (["--adapter", "tuned"], "changes the answers, which are to be the model's own"),
        (["--strategy", "medusa"], "strategy 'medusa' needs a trained adapter: give --adapter"),
        (["--prompts", "a.jsonl", "--prompts", "a.jsonl"], "a.jsonl' are given twice"),
        (["--frobnicate"], "No such option: --frobnicate"),
    ],
)
def test_bad_input_ends_in_one_line(
    root: Path, tmp_path: Path, no_model: None, capsys: pytest.CaptureFixture[str],
    more: list[str], message: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(root)
    assert distill(root, tmp_path / "out", *more) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("hf-spec: ") and error.count("\n") == 1


def test_what_only_the_model_tells(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    for more, message in (
        (("--model", "/nowhere"), "cannot load model '/nowhere': there is no such folder\n"),
        (("--device", "warp"), "cannot load model"),
        (("--max-new-tokens", str(CONTEXT)), f"={CONTEXT} leaves no room for a prompt"),
    ):
        assert distill(root, output, *more) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    # What failed before its first answer leaves nothing to be continued.
    assert distill(root, output, "--limit", "1") == 0


def test_missing_packages(
    root: Path, tmp_path: Path, no_model: None, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert distill(root, tmp_path) == 2
    error = capsys.readouterr().err
    assert "(accelerate, datasets)" in error and "pip install 'hf_spec[train]'" in error
