"""Reads files of prompts and answers: those of ``hf-spec distill``, and the user's own.

This module knows tokenizers, but no models.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_spec.bench.prompts import encode, encode_answer
from hf_spec.core.checks import first_line
from hf_spec.hub.folder import read_json

if TYPE_CHECKING:
    from datasets import Dataset

#: A finished folder of ``hf-spec distill`` holds these two, an unfinished one the folder of parts.
DATA, PROVENANCE, PARTS = "data/train-{:05d}-of-{:05d}.parquet", "provenance.json", "parts"
#: A file of several on the Hub: its split, its number and how many there are.
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?")
#: Tokens, and the texts that they can be made from.
ID_COLUMNS, TEXT_COLUMNS = ("prompt_ids", "answer_ids"), ("prompt", "answer")
#: Name of the format in ``datasets`` by file suffix.
FORMATS = {"parquet": "parquet", "jsonl": "json"}


def read_answers(folder: str | Path, tokenizer: Any = None) -> Dataset:
    """Read the prompts and answers in a folder or a file.

    They stay on disk: ``datasets`` keeps them in its cache as files that are mapped into memory.

    Args:
        folder: what ``hf-spec distill`` wrote; or parquet or JSON lines files of your own, there or
            in its subfolder ``data``, with columns ``prompt_ids`` and ``answer_ids`` (lists of
            token ids; an answer ends with EOS unless it was cut off), or texts ``prompt`` and
            ``answer``. Of a folder with the Hub's layout (``train-00000-of-00002.parquet``, or
            ``configs`` in its README.md) the split ``train`` is read. Or one such file.
        tokenizer: makes tokens of texts: the prompt as a chat turn where there is a chat template,
            the answer without BOS and with EOS behind it. Not needed where there are tokens.

    Returns:
        ``prompt_ids``, ``answer_ids`` and all other columns of the files.

    Raises:
        ValueError: there is no such place, it is unfinished, files or columns are missing, or a
            column holds other values or is empty somewhere.
    """
    folder = Path(folder)
    data = _load(_files(folder), folder)
    columns = set(data.column_names)
    if not columns >= set(ID_COLUMNS):
        if not columns >= set(TEXT_COLUMNS):
            raise ValueError(
                f"{str(folder)!r} has the columns {', '.join(data.column_names)}: it needs "
                "prompt_ids and answer_ids, or the texts prompt and answer"
            )
        _check(data, TEXT_COLUMNS, folder)
        if tokenizer is None:
            raise ValueError(f"{str(folder)!r} holds texts: give the tokenizer of the model, too")
        data = data.map(lambda row: _tokenised(tokenizer, row), desc="tokens")
    _check(data, ID_COLUMNS, folder)
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
    wanted = " or ".join(f".{suffix}" for suffix in FORMATS)
    if folder.is_file():
        if folder.suffix.removeprefix(".") not in FORMATS:
            raise ValueError(f"{str(folder)!r} must be a {wanted} file, or a folder of such files")
        return [folder]
    _check_finished(folder)
    if (folder / PROVENANCE).is_file():
        return _shards(folder, list(folder.glob("data/*.parquet")) or [folder / DATA.format(0, 1)])
    if "configs" in _metadata(folder):
        return _configured(folder)
    places = [path for path in (folder, folder / "data") if path.is_dir()]
    found = {
        suffix: sorted(path for place in places for path in place.glob(f"*.{suffix}"))
        for suffix in FORMATS
    }
    formats = [suffix for suffix, paths in found.items() if paths]
    if len(formats) != 1:
        holds = " and ".join(f".{suffix}" for suffix in formats) or "no"
        raise ValueError(f"{str(folder)!r} holds {holds} files: it must hold {wanted} files")
    return _shards(folder, found[formats[0]])


def _shards(folder: Path, files: Sequence[Path]) -> list[Path]:
    """The files of the split ``train`` in their order; all files unless their names are the Hub's.

    Raises:
        ValueError: there are other splits only, or a file of the split is missing.
    """
    names = [(match, path) for path in files if (match := SHARD.fullmatch(path.stem))]
    if not names:
        return list(files)
    numbers = {int(match[2]): path for match, path in names if match[1] == "train"}
    if not numbers:
        splits = ", ".join(sorted({match[1] for match, _ in names}))
        raise ValueError(f"{str(folder)!r} holds the splits {splits}: it must hold train")
    count = max(int(match[3]) for match, _ in names if match[1] == "train")
    place = min(numbers.values())
    wanted = [place.with_name(f"train-{n:05}-of-{count:05}{place.suffix}") for n in range(count)]
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
    if any(path.suffix != files[0].suffix or path.suffix[1:] not in FORMATS for path in files):
        wanted = " or ".join(f".{suffix}" for suffix in FORMATS)
        raise ValueError(f"{str(folder)!r}: the files of the split train must all be {wanted}")
    return files


def _load(files: Sequence[Path], folder: Path) -> Dataset:
    import datasets

    kind = FORMATS[files[0].suffix.removeprefix(".")]
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error below says enough
    data: Any = []
    try:
        names = [str(path) for path in files if _holds_something(path)]
        if names:
            data = datasets.load_dataset(kind, data_files=names, split="train")
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = first_line(error.__cause__ or error)
        raise ValueError(f"cannot read the data in {str(folder)!r}: {reason}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
    if not len(data):
        raise ValueError(f"{str(folder)!r} is empty: its files hold no rows")
    return data


def _holds_something(path: Path) -> bool:
    """Whether a file has any data; load_dataset fails on files without."""
    import pyarrow.parquet as parquet

    if path.suffix == ".parquet":
        return parquet.read_metadata(path).num_rows > 0
    with path.open("rb") as lines:
        return any(line.strip() for line in lines)


def _tokenised(tokenizer: Any, row: dict[str, Any]) -> dict[str, list[int]]:
    answer = encode_answer(tokenizer, row["answer"])
    return {"prompt_ids": encode(tokenizer, row["prompt"]), "answer_ids": answer}


def _check(data: Dataset, columns: Sequence[str], folder: Path) -> None:
    """Raise a ValueError unless each entry of the columns holds tokens or text, and is not empty.

    Nothing can be learned from an empty answer or an empty prompt.
    """
    import pyarrow.compute as compute
    from pyarrow import types

    for name in columns:
        column = data.data.column(name)
        kind = column.type
        if name in ID_COLUMNS:
            is_list = types.is_list(kind) or types.is_large_list(kind)
            right = is_list and types.is_integer(kind.value_type)
            wanted, measure = "lists of token ids", compute.list_value_length
        else:
            right = types.is_string(kind) or types.is_large_string(kind)
            wanted, measure = "texts", compute.utf8_length
        if not right:
            raise ValueError(f"{str(folder)!r}: {name} must hold {wanted}, it holds {kind}")
        row = compute.index(compute.fill_null(measure(column), 0), 0).as_py()
        if row >= 0:
            raise ValueError(f"{str(folder)!r}: {name} is empty in row {row} (from 0); remove it")
