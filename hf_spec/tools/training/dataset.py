"""Reads prompts with answers: those of ``hf-spec distill``, and files of the user's own.

:mod:`hf_spec.tools.data` says what files may hold. This module knows tokenizers, but no models.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_spec.files import read_json
from hf_spec.tools.bench.prompts import encode, encode_answer
from hf_spec.tools.data import (
    ANSWER_FIELDS,
    SAVED,
    TOKEN_COLUMNS,
    Named,
    Row,
    dataset_named,
    example,
    load_named,
    read,
)

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

#: A folder of ``hf-spec distill``: a JSON line per answer, and how they are made.
ANSWERS, PROVENANCE = "answers.jsonl", "provenance.json"
#: How names of data files in a folder end. ``.json`` files count where there are no others, as a
#: data set may have some that describe it.
SUFFIXES = (".parquet", ".jsonl", ".json")


def read_answers(folder: str | Path, tokenizer: Any = None) -> Dataset:
    """Read the prompts and answers in a folder or a file; they stay on disk, in Arrow's format.

    Args:
        folder: what ``hf-spec distill`` wrote; or parquet or JSON files of your own, there or in
            its subfolder ``data`` (of files named as on the Hub, those of the split ``train``), or
            one such file. They have columns ``prompt_ids`` and ``answer_ids`` (lists of token ids;
            an answer ends with EOS unless it was cut off), or texts as :mod:`hf_spec.tools.data`
            reads them; or a dataset by its name, as there.
        tokenizer: makes tokens of texts, with EOS behind an answer.

    Returns:
        ``prompt_ids`` and ``answer_ids``; of texts also ``prompt`` and ``answer``; of ``hf-spec
        distill`` all columns, in the order of the prompts.
    """
    import datasets

    provenance, named = read_provenance(folder), _by_name(folder)
    if named is None:
        paths = [Path(folder, ANSWERS)] if provenance else _files(Path(folder))
        places = [str(path.absolute()) for path in paths]
    else:
        paths = [Path(file["filename"]) for file in load_named(named).cache_files]
        places = [str(folder)]
    sources: dict[str, Any] = {
        "paths": places, "tokenizer": tokenizer, "distilled": bool(provenance),
    }  # fmt: skip
    if next(_rows(**sources), None) is None:
        raise ValueError(f"{str(folder)!r} is empty: its files hold no rows")
    # A tuple: datasets takes lists for parts of the data, which it shares among processes.
    stats = tuple((path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the errors below say enough
    try:
        data = datasets.Dataset.from_generator(_rows, gen_kwargs={**sources, "stats": stats})
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None  # it names the place
        raise
    finally:
        datasets.logging.set_verbosity(verbosity)
    if not provenance:
        return data
    if len(data) != provenance["rows"]:
        raise ValueError(
            f"{str(Path(folder, ANSWERS))!r} has {len(data)} of {provenance['rows']} answers: get "
            "it again, or make it again with hf-spec distill"
        )
    return data.select(np.argsort(data["index"][:]))


def split(rows: Any, held_out: int) -> tuple[Dataset, Dataset]:
    """Split what :func:`read_answers` returns into examples to train on and examples to hold out.

    The same rows are always held out: `held_out` of them, but at most a quarter, which the log
    says, and at least one. A ValueError if there are less than two rows.
    """
    most = max(len(rows) // 4, 1)
    if len(rows) < 2:
        raise ValueError(
            f"the data has {len(rows)} row: training needs at least 2, one to train on and one to "
            "hold out"
        )
    if most < held_out:
        logger.warning(
            f"held_out={held_out}: of {len(rows)} answers {most} are held out, at most a quarter"
        )
    parts = rows.train_test_split(test_size=min(held_out, most), seed=0)
    return parts["train"], parts["test"]


def read_provenance(folder: str | Path) -> dict[str, Any]:
    """How ``hf-spec distill`` generated a folder; empty for the user's own data. A ValueError if
    there is no such place, or it is unfinished."""
    if _by_name(folder) is not None:
        return {}
    folder = Path(folder)
    if not folder.exists():
        raise ValueError(f"there is no folder or file {str(folder)!r}: hf-spec distill makes one")
    provenance = read_json(folder / PROVENANCE, optional=True)
    if provenance and "rows" not in provenance:
        raise ValueError(
            f"{str(folder)!r} is unfinished: repeat the hf-spec distill command that began it, "
            "which goes on where it stopped"
        )
    return provenance


def _by_name(folder: str | Path) -> Named | None:
    """The dataset of this name; None for files, and for folders of files."""
    named = dataset_named(folder)
    if named is None or named.on_hub or named.split or named.column:
        return named
    return named if any(Path(named.place, name).is_file() for name in SAVED) else None


def _files(folder: Path) -> list[Path]:
    """The data files of a folder, all of one format, in the order of their names."""
    if folder.is_file():
        return [folder]
    inside = sorted([*folder.glob("*"), *folder.glob("data/*")])
    parquet, lines, arrays = (
        [path for path in inside if path.name.endswith(kind)] for kind in SUFFIXES
    )
    found = parquet or lines or arrays
    if not found or (parquet and lines):
        raise ValueError(
            f"{str(folder)!r} holds {'parquet and JSON lines' if found else 'no data'} files: it "
            f"must hold files of one kind, {', '.join(SUFFIXES)}"
        )
    return [path for path in found if path.name.startswith("train-")] or found


def _rows(
    paths: Sequence[str], tokenizer: Any, distilled: bool, stats: Any = None
) -> Iterator[dict[str, Any]]:
    """The rows of files; ``stats`` tells the contents of a file apart in the cache of datasets."""

    def parse(row: Row) -> dict[str, Any]:
        if set(row.fields) >= set(TOKEN_COLUMNS):
            ids = {name: _ids(name, row.fields[name]) for name in TOKEN_COLUMNS}
            return row.fields if distilled else ids
        prompt = example(row)
        if prompt.reference is None:
            raise ValueError(
                f"has no answer to train on: give a text in {', '.join(ANSWER_FIELDS)}, or a last "
                "message of the assistant's"
            )
        if tokenizer is None:
            raise ValueError("holds texts: give the tokenizer of the model, too")
        return {
            "prompt": prompt.full_text, "answer": prompt.reference,
            "prompt_ids": encode(tokenizer, prompt.text, prompt.history),
            "answer_ids": encode_answer(tokenizer, prompt.reference),
        }  # fmt: skip

    for path in paths:
        yield from read(path, parse)


def _ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not value or any(type(token) is not int for token in value):
        raise ValueError(f"{name!r} must be a list of token ids that is not empty")
    return value
