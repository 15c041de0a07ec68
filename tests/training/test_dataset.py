"""Folders of answers: what distill writes, data of the user's own, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import EOS, make_tokenizer, write_prompts
from tokenizers import processors

from hf_spec.tools.training.dataset import read_answers, read_provenance

pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

IDS = [
    {"prompt_ids": [5, 6, 7], "answer_ids": [8, 1]},
    {"prompt_ids": [9], "answer_ids": [10, 11, 12]},
]
TEXTS = [{"prompt": "one", "answer": "two"}, {"prompt": "three?", "answer": "é"}]
#: Id of the tiny tokenizer's EOS.
END = 1


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep load_dataset out of the user's cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as a file of the kind that its name says: the folder that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write_prompts(path, rows)
    return path.parent


def distilled(folder: Path, written: list[dict[str, Any]], **made: Any) -> Path:
    write(folder / "answers.jsonl", written)
    (folder / "provenance.json").write_text(json.dumps({"model": "m", **made}))
    return folder


def test_a_folder_of_distill(tmp_path):
    """In the order of the prompts, not that of writing."""
    rows = [{**row, "prompt": "p", "index": i} for i, row in enumerate(IDS)]
    distilled(tmp_path, rows[::-1], rows=2)
    write(tmp_path / "notes.jsonl", [{"something": "else"}])  # beside it, and none of it
    assert list(read_answers(tmp_path)) == rows
    assert list(read_answers(str(tmp_path))) == rows
    assert read_provenance(tmp_path) == {"rows": 2, "model": "m"}


def test_answers_of_another_tokenizer_are_refused(tmp_path):
    own, rows = make_tokenizer(), []
    for index, text in enumerate(["one two", "three"]):
        ids = own.encode(text)
        rows.append(
            {"prompt_ids": [2], "answer_ids": ids, "answer": own.decode(ids), "index": index}
        )
    distilled(tmp_path, rows, rows=2)
    assert len(read_answers(tmp_path, own)) == 2
    distilled(tmp_path, [{**row, "answer_ids": row["answer_ids"][::-1]} for row in rows], rows=2)
    with pytest.raises(ValueError, match="was made with another tokenizer: .* hf-spec distill"):
        read_answers(tmp_path, own)


#: Files of a folder by name: rows, or the content of a file that is none of the data.
LAYOUTS: dict[str, dict[str, Any]] = {
    "parquet": {"x.parquet": IDS},
    "JSON lines": {"x.jsonl": IDS},
    "in data": {"data/x.parquet": IDS},
    "in the order of their names": {
        "b.jsonl": IDS[1:], "a.jsonl": IDS[:1], "c.jsonl": [], "README.md": "about"
    },
    "the split train of the Hub's layout": {
        "data/train-00001-of-00002.parquet": IDS[1:], "data/test-00000-of-00001.parquet": IDS,
        "data/train-00000-of-00002.parquet": IDS[:1],
    },
    "lines beside a description": {
        "train-00000-of-00002.jsonl": IDS[:1], "train-00001-of-00002.jsonl": IDS[1:],
        "dataset_infos.json": "{}",
    },
    "a JSON array": {"rows.json": json.dumps(IDS)},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_of_the_users_own(tmp_path, layout):
    for name, content in LAYOUTS[layout].items():
        if isinstance(content, str):
            (tmp_path / name).write_text(content)
        else:
            write(tmp_path / name, content)
    assert list(read_answers(tmp_path)) == IDS
    assert read_provenance(tmp_path) == {}


def test_a_single_file_that_is_written_again(tmp_path):
    """It holds tokens and texts, of which the tokens count; no earlier content is cached."""
    path = tmp_path / "x.jsonl"
    write(path, [{**ids, **text} for ids, text in zip(IDS, TEXTS)])
    write(tmp_path / "other.parquet", IDS + IDS)
    assert list(read_answers(path, make_tokenizer())) == IDS
    assert read_provenance(path) == {}
    write(path, IDS[:1])
    assert list(read_answers(path, make_tokenizer())) == IDS[:1]


@pytest.mark.parametrize("package", ["hf_spec", "transformers"])
def test_another_version_reads_texts_again(tmp_path, monkeypatch, package):
    """It may make other tokens of them; within one they are read once."""
    write(tmp_path / "x.jsonl", TEXTS[:1])
    (before,) = read_answers(tmp_path, make_tokenizer())
    other = {**before, "answer_ids": [5, END]}
    monkeypatch.setattr("hf_spec.tools.training.dataset.encode_turns", lambda *_: [other])
    assert list(read_answers(tmp_path, make_tokenizer())) == [before]
    monkeypatch.setattr(f"{package}.__version__", "99.0")
    assert list(read_answers(tmp_path, make_tokenizer())) == [other]


def test_bos_is_for_prompts_and_eos_comes_once(tmp_path):
    tokenizer = make_tokenizer(chat=False)
    a, b = ([tokenizer.convert_tokens_to_ids(letter)] for letter in "ab")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", 2)]
    )
    write(tmp_path / "x.jsonl", [{"prompt": "a", "answer": "b" + EOS}])
    (row,) = read_answers(tmp_path, tokenizer)
    assert row["prompt_ids"] == [2, *a] and row["answer_ids"] == [*b, END]
    tokenizer.eos_token = None
    write(tmp_path / "x.jsonl", [{"prompt": "a", "answer": "b"}])
    assert read_answers(tmp_path, tokenizer)[0]["answer_ids"] == b


def test_folders_of_distill_that_are_not_whole(tmp_path):
    for read in (read_answers, read_provenance):
        with pytest.raises(ValueError, match="no folder or file '.*none': hf-spec distill makes"):
            read(tmp_path / "none")
    distilled(tmp_path, IDS[:1])
    for read in (read_answers, read_provenance):
        with pytest.raises(ValueError, match="is unfinished: repeat the hf-spec distill command"):
            read(tmp_path)
    distilled(tmp_path, IDS[:1], rows=2)
    with pytest.raises(ValueError, match="answers.jsonl' has 1 of 2 answers: get it again"):
        read_answers(tmp_path)
    (tmp_path / "answers.jsonl").unlink()
    with pytest.raises(ValueError, match="cannot read '.*answers.jsonl': No such file"):
        read_answers(tmp_path)
    (tmp_path / "provenance.json").write_text("{")
    with pytest.raises(ValueError, match="provenance.json' is not JSON"):
        read_provenance(tmp_path)


def test_no_files_or_both_kinds_or_no_rows(tmp_path):
    with pytest.raises(ValueError, match=r"no data files: .* \.parquet, \.jsonl, \.json"):
        read_answers(tmp_path)
    for text in ("", "\n \n"):
        (tmp_path / "x.jsonl").write_text(text)
        with pytest.raises(ValueError, match="is empty: its files hold no rows"):
            read_answers(tmp_path)
    write(tmp_path / "x.parquet", IDS)
    with pytest.raises(ValueError, match="holds parquet and JSON lines files"):
        read_answers(tmp_path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt_ids": [1], "answer": "a"}], "1: needs one of .*; it has prompt_ids, answer$"),
        (TEXTS, " 1: holds texts: give the tokenizer of the model, too"),
        ([{"prompt_ids": [1], "answer_ids": "a"}], "1: 'answer_ids' must be a list of token ids"),
        ([{"prompt_ids": [1.5], "answer_ids": [1]}], "'prompt_ids' must be a list of token ids"),
        ([*IDS, {"prompt_ids": [1], "answer_ids": []}], "3: 'answer_ids' must be .* not empty"),
        ([*IDS, {"prompt_ids": None, "answer_ids": [1]}], "3: 'prompt_ids' must be a list"),
    ],
)
def test_columns_that_will_not_do(tmp_path, rows, message, capfd):
    write(tmp_path / "x.parquet", rows)
    with pytest.raises(ValueError, match=message):
        read_answers(tmp_path)
    assert "Failed" not in capfd.readouterr().err, "datasets tells the same, at length"
