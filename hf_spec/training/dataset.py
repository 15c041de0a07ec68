"""Reads folders of prompts and answers: those of ``hf-spec distill``, and the user's own.

:mod:`hf_spec.data` says what files may hold. This module knows tokenizers, but no models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_spec.bench.environment import package_version
from hf_spec.bench.prompts import encode, encode_answer
from hf_spec.core.checks import first_line
from hf_spec.data import ANSWER_FIELDS, Message, Row, example, plain_text, read, read_rows
from hf_spec.hub.folder import read_json

if TYPE_CHECKING:
    from datasets import Dataset

#: A finished folder of ``hf-spec distill`` holds these two, an unfinished one the folder of parts.
DATA, PROVENANCE, PARTS = "data/train-{:05d}-of-{:05d}.parquet", "provenance.json", "parts"
#: A file of several on the Hub: its split, its number and how many there are.
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?")
ID_COLUMNS = ("prompt_ids", "answer_ids")
#: How names of data files in a folder end. ``.json`` files count where there are no others, as a
#: dataset may have some that describe it.
PARQUET, LINES, ARRAYS = (".parquet",), (".jsonl", ".jsonl.gz"), (".json", ".json.gz")
SUFFIXES = (*PARQUET, *LINES, *ARRAYS)


def read_answers(folder: str | Path, tokenizer: Any = None) -> Dataset:
    """Read the prompts and answers in a folder or a file.

    They stay on disk: ``datasets`` keeps them in its cache as files that are mapped into memory.

    Args:
        folder: what ``hf-spec distill`` wrote; or parquet or JSON files of your own, there or in
            its subfolder ``data``, with columns ``prompt_ids`` and ``answer_ids`` (lists of token
            ids; an answer ends with EOS unless it was cut off), or texts as :mod:`hf_spec.data`
            reads them. Of a folder with the Hub's layout (``train-00000-of-00002.parquet``, or
            ``configs`` in its README.md) the split ``train`` is read. Or one such file.
        tokenizer: makes tokens of texts: the prompt by the chat template where there is one, the
            answer without BOS and with EOS behind it. Not needed where there are tokens.

    Returns:
        ``prompt_ids``, ``answer_ids`` and all other columns of files with tokens; of texts also
        ``prompt`` and ``answer``.

    Raises:
        ValueError: there is no such place, it is unfinished, files are missing, a row has no prompt
            or no answer, or holds other values or nothing in a column.
    """
    folder = Path(folder)
    begins = {path: next(read_rows(path), None) for path in _files(folder)}
    firsts = [row for row in begins.values() if row is not None]
    if not firsts:
        raise ValueError(f"{str(folder)!r} is empty: its files hold no rows")
    files = [path for path, row in begins.items() if row is not None]
    if set(firsts[0].fields) >= set(ID_COLUMNS):
        data = _load(files, folder)
    else:
        texts = _load(files, folder, texts=True)
        if tokenizer is None:
            raise ValueError(f"{str(folder)!r} holds texts: give the tokenizer of the model, too")
        data = texts.map(
            lambda row: _tokenised(tokenizer, row), remove_columns=["place", "history"],
            desc="tokens",
        )  # fmt: skip
    _check(data, folder)
    return data


def read_provenance(folder: str | Path) -> dict[str, Any]:
    """How ``hf-spec distill`` generated a folder; empty for the user's own data.

    Raises:
        ValueError: there is no such place, or it is unfinished.
    """
    folder = Path(folder)
    if folder.is_file():
        return {}
    _check_finished(folder)
    path = folder / PROVENANCE
    return read_json(path) if path.is_file() else {}


def _check_finished(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"there is no folder or file {str(folder)!r}: hf-spec distill makes one")
    if (folder / PARTS).is_dir() and not (folder / PROVENANCE).is_file():
        raise ValueError(
            f"{str(folder)!r} is unfinished: repeat the hf-spec distill command that began it, "
            "which goes on where it stopped"
        )


def _files(folder: Path) -> list[Path]:
    """The data files of a folder, all of one format; or the file itself."""
    if folder.is_file():
        return [folder]
    _check_finished(folder)
    if (folder / PROVENANCE).is_file():
        return _shards(folder, list(folder.glob("data/*.parquet")) or [folder / DATA.format(0, 1)])
    if "configs" in _metadata(folder):
        return _configured(folder)
    inside = sorted([*folder.glob("*"), *folder.glob("data/*")])
    parquet, lines, arrays = (
        [path for path in inside if _suffix(path) in kind] for kind in (PARQUET, LINES, ARRAYS)
    )
    found = parquet or lines or arrays
    if not found or (parquet and lines):
        holds = "parquet and JSON lines" if found else "no data"
        raise ValueError(
            f"{str(folder)!r} holds {holds} files: it must hold files of one kind, "
            f"{', '.join(SUFFIXES)}"
        )
    return _shards(folder, found)


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)


def _shards(folder: Path, files: Sequence[Path]) -> list[Path]:
    """The files of the split ``train`` in their order; all files unless their names are the Hub's.

    Raises:
        ValueError: there are other splits only, or a file of the split is missing.
    """
    stems = [(path.name.removesuffix(_suffix(path) or ""), path) for path in files]
    names = [(match, path) for stem, path in stems if (match := SHARD.fullmatch(stem))]
    if not names:
        return list(files)
    numbers = {int(match[2]): path for match, path in names if match[1] == "train"}
    if not numbers:
        splits = ", ".join(sorted({match[1] for match, _ in names}))
        raise ValueError(f"{str(folder)!r} holds the splits {splits}: it must hold train")
    count = max(int(match[3]) for match, _ in names if match[1] == "train")
    place = min(numbers.values())
    wanted = [
        place.with_name(f"train-{number:05}-of-{count:05}{_suffix(place)}")
        for number in range(count)
    ]
    ordered = [numbers.get(number, path) for number, path in enumerate(wanted)]
    for path in ordered:
        if not path.is_file():
            name = path.relative_to(folder)
            raise ValueError(
                f"{str(folder)!r} lacks {name}: make it again with hf-spec distill, or get it again"
            )
    return ordered


def _metadata(folder: Path) -> dict[str, Any]:
    """What stands at the head of the folder's README.md."""
    from huggingface_hub import metadata_load

    card = folder / "README.md"
    return (metadata_load(card) if card.is_file() else None) or {}


def _configured(folder: Path) -> list[Path]:
    """The files that the default config of the folder's README.md gives to the split ``train``."""
    import datasets

    try:
        splits = datasets.load_dataset_builder(str(folder)).config.data_files
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ValueError(
            f"cannot read the configs of {str(folder)!r}: {first_line(error)}"
        ) from error
    if "train" not in (splits or {}):
        raise ValueError(f"{str(folder)!r}: its README.md names no files for the split train")
    files = [Path(path) for path in splits["train"]]
    kinds = {_suffix(path) for path in files}
    if None in kinds or len(kinds) != 1:
        raise ValueError(
            f"{str(folder)!r}: the files of the split train must be of one kind, "
            f"{', '.join(SUFFIXES)}"
        )
    return files


def _load(files: Sequence[Path], folder: Path, texts: bool = False) -> Dataset:
    """The rows of files; of texts, as :func:`_text_rows` makes them."""
    import datasets

    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error below says enough
    try:
        if not texts and _suffix(files[0]) in PARQUET:
            names = [str(path) for path in files]
            return datasets.load_dataset("parquet", data_files=names, split="train")
        text = datasets.Value("string")
        columns = {
            "prompt": text, "answer": text, "history": [{"role": text, "content": text}],
            "place": text,
        }  # fmt: skip
        # The cache goes by the arguments, so they tell one content of a file from another.
        stats = [(path.absolute(), path.stat()) for path in files]
        content = {
            "files": [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats],
            "version": package_version("hf_spec"),
        }
        return datasets.Dataset.from_generator(
            _text_rows if texts else _id_rows, gen_kwargs=content,
            features=datasets.Features(columns) if texts else None,
        )  # fmt: skip
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        cause = error.__cause__ or error
        if type(cause) is ValueError:  # of the reader, which names the place
            raise cause from None
        raise ValueError(f"cannot read the data in {str(folder)!r}: {first_line(cause)}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)


def _id_rows(files: Sequence[tuple[str, int, int]], version: str) -> Iterator[dict[str, Any]]:
    for path, *_ in files:
        for row in read_rows(path):
            yield row.fields


def _text_rows(files: Sequence[tuple[str, int, int]], version: str) -> Iterator[dict[str, Any]]:
    for path, *_ in files:
        yield from read(path, _texts)


def _texts(row: Row) -> dict[str, Any]:
    found = example(row.fields)
    if found.answer is None:
        raise ValueError(
            f"has no answer to train on: give a text in {', '.join(ANSWER_FIELDS)}, or a last "
            "message of the assistant's"
        )
    history = [message._asdict() for message in found.history]
    return {
        "prompt": found.text, "answer": found.answer, "history": history, "place": row.place,
    }  # fmt: skip


def _tokenised(tokenizer: Any, row: dict[str, Any]) -> dict[str, Any]:
    history = [Message(**message) for message in row["history"]]
    try:
        prompt_ids = encode(tokenizer, row["prompt"], history)
    except ValueError as error:
        raise ValueError(f"{row['place']}: {error}") from error
    answer_ids = encode_answer(tokenizer, row["answer"])
    prompt = plain_text(row["prompt"], history)
    return {"prompt": prompt, "prompt_ids": prompt_ids, "answer_ids": answer_ids}


def _check(data: Dataset, folder: Path) -> None:
    """Raise a ValueError unless each prompt and each answer has tokens.

    Nothing can be learned from an empty answer or an empty prompt.
    """
    import pyarrow.compute as compute
    from pyarrow import types

    for name in ID_COLUMNS:
        column = data.data.column(name)
        kind = column.type
        is_list = types.is_list(kind) or types.is_large_list(kind)
        if not is_list or not types.is_integer(kind.value_type):
            raise ValueError(
                f"{str(folder)!r}: {name} must hold lists of token ids, it holds {kind}"
            )
        lengths = compute.fill_null(compute.list_value_length(column), 0)
        row = compute.index(lengths, 0).as_py()
        if row >= 0:
            raise ValueError(f"{str(folder)!r}: {name} is empty in row {row} (from 0); remove it")
