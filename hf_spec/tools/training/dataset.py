"""Answers as training data: those of ``hf-spec distill``, and files of the user's own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

import hf_spec
from hf_spec.adapters.config import VOCABULARY, vocab_size
from hf_spec.adapters.layer import layers_of
from hf_spec.files import read_json
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.predict.markov import common_tokens
from hf_spec.target.sequences import IGNORED
from hf_spec.tools.bench.prompts import encode_turns
from hf_spec.tools.data import (
    ANSWER_FIELDS,
    SAVED,
    TOKEN_COLUMNS,
    Named,
    Row,
    dataset_named,
    example,
    load_named,
    quiet,
    read,
)

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

#: A folder of ``hf-spec distill``: a JSON line per answer, and how they are made.
ANSWERS, PROVENANCE = "answers.jsonl", "provenance.json"
#: Answers whose tokens are compared with their texts.
COMPARED = 4
#: A column of lists: where other answers in a prompt begin and end, which are learned, too.
EARLIER = "earlier_answers"
#: How names of data files in a folder end. ``.json`` files count where there are no others, as a
#: data set may have some that describe it.
SUFFIXES = (".parquet", ".jsonl", ".json")


def spans(row: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Where the answers of a row begin and end in its tokens."""
    prompt = len(row["prompt_ids"])
    last = prompt, prompt + len(row["answer_ids"])
    return [*((start, end) for start, end in row.get(EARLIER) or ()), last]


def answers_of(rows: Iterable[Mapping[str, Any]]) -> Iterator[Sequence[int]]:
    """Token ids of all answers of rows."""
    for row in rows:
        ids = [*row["prompt_ids"], *row["answer_ids"]]
        yield from (ids[start:end] for start, end in spans(row))


class AnswerDataset(Dataset[dict[str, Tensor]]):
    """Prompts with answers as training examples, with new random anchors in each epoch.

    An anchor is a token of the sequence that has probes; the tokens that these predict are in the
    answer. Anchors depend only on seed, epoch and example, so they are the same for any number of
    processes, and after an interruption.

    Args:
        rows: ``prompt_ids`` and ``answer_ids`` by index, such as a ``datasets.Dataset``; and
            perhaps :data:`EARLIER`.
        num_anchors: largest number of anchors per sequence.
        max_length: longer sequences are cut at the end; None for no limit.
        random: if False, anchors are evenly spaced and always the same.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Sequence[int]]], num_anchors: int = 64,
        max_length: int | None = None, seed: int = 0, random: bool = True,
    ):  # fmt: skip
        if num_anchors < 1:
            raise ValueError(f"num_anchors={num_anchors}: give at least 1.")
        self.rows, self.num_anchors, self.max_length = rows, num_anchors, max_length
        self.seed, self.random = seed, random
        # Shared with the workers of a data loader, which may stay for all epochs.
        self._epoch = torch.zeros((), dtype=torch.long, device="cpu").share_memory_()

    @property
    def epoch(self) -> int:
        """Whose anchors are drawn."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw other anchors. accelerate's data loaders call this in a single process."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self) -> list[int]:
        """Tokens of each example."""
        longest = self.max_length or sys.maxsize
        rows = ((row["prompt_ids"], row["answer_ids"]) for row in self.rows)
        return [min(len(prompt) + len(answer), longest) for prompt, answer in rows]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` (seq,), ``anchors`` (at most num_anchors,)."""
        row = self.rows[index]
        prompt, answer = list(row["prompt_ids"]), list(row["answer_ids"])
        ids = torch.tensor((prompt + answer)[: self.max_length], device="cpu")
        labels = torch.full_like(ids, IGNORED)
        for start, end in spans(row):
            labels[start:end] = ids[start:end]
        # The token after an anchor is certain; probes predict those that follow it.
        answered = labels != IGNORED
        places = (answered[1:-1] & answered[2:]).nonzero()[:, 0]
        if len(places) > self.num_anchors and self.random:
            chosen = torch.randperm(len(places), generator=self.generator(index), device="cpu")
            places = places[chosen[: self.num_anchors].sort().values]
        elif len(places) > self.num_anchors:
            steps = torch.arange(self.num_anchors, device="cpu") * len(places)
            places = places[steps // self.num_anchors]
        return {"input_ids": ids, "labels": labels, "anchors": places}

    def generator(self, index: int) -> torch.Generator:
        """Random numbers of an example in this epoch; of index -1 for their order."""
        # Consecutive seeds give unrelated streams of torch's generator.
        number = ((self.seed * 1_000_003) + self.epoch) * 1_000_003 + index
        return torch.Generator().manual_seed(number % 2**63)


class SimilarLengths(LengthGroupedSampler):
    """Draws batches of examples of similar length, in which there is little padding.

    Unlike those of its base, they are a function of seed and epoch, so that a training that was
    interrupted goes on with the same ones. `batch_size` counts the examples of all processes.
    """

    def __init__(self, batch_size: int, dataset: AnswerDataset):
        super().__init__(batch_size, lengths=dataset.lengths())
        self._dataset = dataset

    def __iter__(self) -> Iterator[int]:
        self.generator = self._dataset.generator(-1)
        return super().__iter__()


class NewAnchors(TrainerCallback):
    """Draws new anchors of the training data in each epoch.

    accelerate's data loaders do in a single process; in several they only notify the sampler.
    """

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        dataset = kwargs["train_dataloader"].dataset
        if isinstance(dataset, AnswerDataset):
            dataset.set_epoch(int(state.epoch or 0))


def collate(examples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Pad on the right: ``input_ids``, ``labels``, ``attention_mask`` (batch, seq) and ``anchors``.

    Missing anchors are filled with a sequence's last token, after which there is nothing to
    predict.
    """
    batch = {
        name: pad_sequence([one[name] for one in examples], batch_first=True, padding_value=fill)
        for name, fill in (("input_ids", 0), ("labels", IGNORED), ("anchors", -1))
    }
    last = torch.tensor([[len(one["input_ids"]) - 1] for one in examples], device="cpu")
    places = torch.arange(batch["input_ids"].shape[1], device="cpu")
    anchors = batch["anchors"] if batch["anchors"].shape[1] else last
    batch["attention_mask"] = (places <= last).long()
    batch["anchors"] = torch.where(anchors < 0, last, anchors)
    return batch


def read_answers(folder: str | Path, tokenizer: Any = None) -> datasets.Dataset:
    """Read the prompts and answers in a folder or a file; they stay on disk, in Arrow's format.

    Args:
        folder: what ``hf-spec distill`` wrote; or parquet or JSON files of your own, there or in
            its subfolder ``data`` (of files named as on the Hub, those of the split ``train``), or
            one such file. They have columns ``prompt_ids`` and ``answer_ids`` (lists of token ids;
            an answer ends with EOS unless it was cut off), or texts as :mod:`hf_spec.tools.data`
            reads them; or a dataset by its name, as there.
        tokenizer: makes tokens of texts, with EOS behind an answer.

    Returns:
        ``prompt_ids`` and ``answer_ids``; of texts also ``prompt``, ``answer`` and
        :data:`EARLIER`, as all turns of the assistant's are answers; of ``hf-spec distill`` all
        columns, in the order of the prompts.
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
    first = next(_rows(**sources), None)
    if first is None:
        raise ValueError(f"{str(folder)!r} is empty: its files hold no rows")
    # Tuples: datasets takes lists for parts of the data, which it shares among processes.
    stats = tuple((path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
    # Another version may make other tokens of the same texts.
    versions = hf_spec.__version__, transformers.__version__
    try:
        with quiet():
            data = datasets.Dataset.from_generator(
                _rows, gen_kwargs={**sources, "stats": (stats, versions)}, features=_columns(first)
            )
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None  # it names the place
        raise
    if not provenance:
        return data
    if len(data) != provenance["rows"]:
        raise ValueError(
            f"{str(Path(folder, ANSWERS))!r} has {len(data)} of {provenance['rows']} answers: get "
            "it again, or make it again with hf-spec distill"
        )
    data = data.select(np.argsort(data["index"][:]))
    if tokenizer is not None:
        _check_tokenizer(data, tokenizer, str(folder))
    return data


def _check_tokenizer(data: datasets.Dataset, tokenizer: Any, folder: str) -> None:
    """Raise a ValueError if the tokens of answers are not those of their texts."""
    for row in data.select(range(min(len(data), COMPARED))):
        ids, text = row["answer_ids"], row.get("answer")
        if text is not None and tokenizer.decode(ids, skip_special_tokens=True) != text:
            raise ValueError(
                f"{folder!r} was made with another tokenizer: the tokens of an answer are "
                f"{tokenizer.decode(ids[:12])!r} here, and its text is {text[:40]!r}. Make answers "
                "of this model with hf-spec distill."
            )


def _columns(row: Mapping[str, Any]) -> Any:
    """The types of columns, where those of the first row may not tell them; else None."""
    import datasets

    if EARLIER not in row:
        return None
    number, text = datasets.Value("int64"), datasets.Value("string")
    ids, found = datasets.Sequence(number), {"prompt": text, "answer": text}
    return datasets.Features(
        {**found, "prompt_ids": ids, "answer_ids": ids, EARLIER: datasets.Sequence(ids)}
    )


def split(rows: Any, held_out: int) -> tuple[datasets.Dataset, datasets.Dataset]:
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
    """The rows of files; ``stats`` tells what they were made of apart in the cache of datasets."""

    def parse(row: Row) -> list[dict[str, Any]]:
        if set(row.fields) >= set(TOKEN_COLUMNS):
            ids = {name: _ids(name, row.fields[name]) for name in TOKEN_COLUMNS}
            return [row.fields if distilled else ids]
        turns = [turn for turn in example(row).turns() if turn.answered is not None]
        if not turns:
            raise ValueError(
                f"has no answer to train on: give a text in {', '.join(ANSWER_FIELDS)}, or a last "
                "message of the assistant's"
            )
        if tokenizer is None:
            raise ValueError("holds texts: give the tokenizer of the model, too")
        return encode_turns(tokenizer, turns)

    for path in paths:
        for rows in read(path, parse):
            yield from rows


def _ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not value or any(type(token) is not int for token in value):
        raise ValueError(f"{name!r} must be a list of token ids that is not empty")
    return value


def set_vocabulary(model: nn.Module, answers: Iterable[Sequence[int]]) -> None:
    """Let adapters that draft from a part of the vocabulary draft the commonest tokens of answers.

    Until then these are the tokens of the smallest ids. Call it after the adapter is attached and
    before it is trained; adapters that draft all tokens, or were loaded for inference, stay as they
    are.

    Args:
        model: a ``PeftModel``, or a model with adapters.
        answers: token ids of each answer.
    """
    base = unwrapped(model)
    active = [
        layer.adapters[name]
        for layer in layers_of(base)
        for name in layer.active_adapters
        if name in layer.adapters and not layer.adapters[name].config.inference_mode
    ]
    for adapter in active:
        if (tokens := adapter.tensors().get(VOCABULARY)) is not None:
            adapter.set_vocabulary(common_tokens(answers, len(tokens), vocab_size(base)), base)
