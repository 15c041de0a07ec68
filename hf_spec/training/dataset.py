"""Reads prompts with answers: those of ``hf-spec distill``, and files of the user's own.

:mod:`hf_spec.data` says what files may hold. This module knows tokenizers, but no models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_spec.bench.prompts import encode, encode_answer
from hf_spec.core.checks import first_line
from hf_spec.data import ANSWER_FIELDS, Row, example, read
from hf_spec.hub.folder import read_json

if TYPE_CHECKING:
    from datasets import Dataset

#: A folder of ``hf-spec distill``: a JSON line per answer, and how they are made.
ANSWERS, PROVENANCE = "answers.jsonl", "provenance.json"
ID_COLUMNS = ("prompt_ids", "answer_ids")
#: How names of data files in a folder end. ``.json`` files count where there are no others, as a
#: data set may have some that describe it.
SUFFIXES = ((".parquet",), (".jsonl", ".jsonl.gz"), (".json", ".json.gz"))


def read_answers(folder: str | Path, tokenizer: Any = None) -> Dataset:
    """Read the prompts and answers in a folder or a file; they stay on disk, in Arrow's format.

    Args:
        folder: what ``hf-spec distill`` wrote; or parquet or JSON files of your own, there or in
            its subfolder ``data`` (of files named as on the Hub, those of the split ``train``), or
            one such file. They have columns ``prompt_ids`` and ``answer_ids`` (lists of token ids;
            an answer ends with EOS unless it was cut off), or texts as :mod:`hf_spec.data` reads
            them.
        tokenizer: makes tokens of texts: the prompt by the chat template where there is one, the
            answer without BOS and with EOS behind it. Not needed where there are tokens.

    Returns:
        ``prompt_ids`` and ``answer_ids``; of texts also ``prompt`` and ``answer``; of ``hf-spec
        distill`` all columns, in the order of the prompts.

    Raises:
        ValueError: there is no such place, it is unfinished, it is empty, or a row has no prompt,
            no answer, or other values in a column; the message names the place.
    """
    import datasets

    folder = Path(folder)
    made = read_provenance(folder)
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the errors below say enough
    try:
        if made:
            path = str(folder / ANSWERS)
            data = datasets.load_dataset("json", data_files=path, split="train")
        else:
            # The cache goes by the arguments, so they tell one content of a file from another.
            stats = [(path.absolute(), path.stat()) for path in _files(folder)]
            content: dict[str, Any] = {
                "files": [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats],
                "tokenizer": tokenizer,
            }
            if next(_rows(**content), None) is None:
                raise ValueError(f"{str(folder)!r} is empty: its files hold no rows")
            data = datasets.Dataset.from_generator(_rows, gen_kwargs=content)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        datasets_own = isinstance(error, datasets.exceptions.DatasetsError)
        cause = error.__cause__ or error if datasets_own else error
        if type(cause) is ValueError:  # of the reader, which names the place
            raise cause from None
        raise ValueError(f"cannot read the data in {str(folder)!r}: {first_line(cause)}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
    if made and len(data) != made["rows"]:
        raise ValueError(
            f"{str(folder / ANSWERS)!r} has {len(data)} of {made['rows']} answers: get it again, "
            "or make it again with hf-spec distill"
        )
    return data.select(np.argsort(data["index"][:])) if made else data


def read_provenance(folder: str | Path) -> dict[str, Any]:
    """How ``hf-spec distill`` generated a folder; empty for the user's own data.

    Raises:
        ValueError: there is no such place, or it is unfinished.
    """
    folder = Path(folder)
    if not folder.exists():
        raise ValueError(f"there is no folder or file {str(folder)!r}: hf-spec distill makes one")
    path = folder / PROVENANCE
    made = read_json(path) if path.is_file() else {}
    if made and "rows" not in made:
        raise ValueError(
            f"{str(folder)!r} is unfinished: repeat the hf-spec distill command that began it, "
            "which goes on where it stopped"
        )
    return made


def _files(folder: Path) -> list[Path]:
    """The data files of a folder, all of one format, in the order of their names."""
    if folder.is_file():
        return [folder]
    inside = sorted([*folder.glob("*"), *folder.glob("data/*")])
    kinds = [[path for path in inside if path.name.endswith(kind)] for kind in SUFFIXES]
    parquet, lines, arrays = kinds
    found = parquet or lines or arrays
    if not found or (parquet and lines):
        raise ValueError(
            f"{str(folder)!r} holds {'parquet and JSON lines' if found else 'no data'} files: it "
            f"must hold files of one kind, {', '.join(end for kind in SUFFIXES for end in kind)}"
        )
    return [path for path in found if path.name.startswith("train-")] or found


def _rows(files: Sequence[tuple[str, int, int]], tokenizer: Any = None) -> Iterator[dict[str, Any]]:
    def parse(row: Row) -> dict[str, Any]:
        if set(row.fields) >= set(ID_COLUMNS):
            return {name: _ids(name, row.fields[name]) for name in ID_COLUMNS}
        found = example(row.fields)
        if found.reference is None:
            raise ValueError(
                f"has no answer to train on: give a text in {', '.join(ANSWER_FIELDS)}, or a last "
                "message of the assistant's"
            )
        if tokenizer is None:
            raise ValueError("holds texts: give the tokenizer of the model, too")
        return {
            "prompt": found.full_text, "answer": found.reference,
            "prompt_ids": encode(tokenizer, found.text, found.history),
            "answer_ids": encode_answer(tokenizer, found.reference),
        }  # fmt: skip

    for path, *_ in files:
        yield from read(path, parse)


def _ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not value or any(type(one) is not int for one in value):
        raise ValueError(f"{name!r} must be a list of token ids that is not empty")
    return value
