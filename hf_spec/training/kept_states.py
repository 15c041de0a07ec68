"""Hidden states of a frozen base model, kept on disk, so that each sequence runs through it once.

Drafters that read the base's states only (heads, decoders) see the same states in every epoch. They
are written where a training's checkpoints are, and removed with its end. A training that is resumed
reads those of its first part.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_spec.model.sequences import KEEPER

#: Share of the free disk that may be used.
MOST_OF_DISK = 0.5
#: Names and places of the sequences in a file, beside it.
INDEX = ".jsonl"


class KeptStates:
    """States of sequences by their tokens, in one file for each kind of states.

    Args:
        folder: the files' folder, which is created.
        num_tokens: of all sequences.
        num_bytes: most bytes of all files; sequences that find no room are computed each time.
        base: identifies the base's weights: files that were written with others are removed.
    """

    def __init__(self, folder: Path, num_tokens: int, num_bytes: int, base: str):
        mark = folder / "base"
        if folder.is_dir() and not (mark.is_file() and mark.read_text() == base):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(base)
        self.folder, self.num_tokens, self.num_bytes = folder, num_tokens, num_bytes
        self._files: dict[tuple[int, ...], _File] = {}

    def __call__(
        self, compute: Callable[[Tensor, Tensor], Tensor], input_ids: Tensor, mask: Tensor,
        layers: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """States ``(batch, seq, features)``; those of padding may be 0.

        Args:
            compute: gives them for some rows and their mask.
            input_ids, mask: ``(batch, seq)``; the mask is 0 for padding.
            layers: the kind of the states.
        """
        kind, real = tuple(layers), mask.bool().cpu()
        rows = [ids[own].tolist() for ids, own in zip(input_ids.cpu(), real)]
        keys = [hashlib.blake2b(repr(row).encode(), digest_size=16).hexdigest() for row in rows]
        file = self._files.get(kind) or self._opened(kind)
        new = [row for row, key in enumerate(keys) if file is None or key not in file.places]
        if not new:
            assert file is not None
            return file.read(keys, real).to(input_ids.device)
        states = compute(input_ids[new], mask[new])
        if file is None:
            room = self.num_bytes - sum(one.num_bytes for one in self._files.values())
            file = _File.made(self._path(kind), states, self.num_tokens, room)
            self._files[kind] = file
        for row, own in zip(new, states):
            file.add(keys[row], own[real[row].to(own.device)])
        if len(new) == len(keys):
            return states
        old = [row for row in range(len(keys)) if row not in new]
        whole = states.new_zeros(*input_ids.shape, states.shape[-1])
        whole[new], whole[old] = states, file.read([keys[row] for row in old], real[old]).to(states)
        return whole

    def _path(self, kind: tuple[int, ...]) -> Path:
        return self.folder / ("states" + "".join(f"-{layer}" for layer in kind))

    def _opened(self, kind: tuple[int, ...]) -> _File | None:
        """The file of an earlier part of the training."""
        path = self._path(kind)
        if not path.with_suffix(INDEX).is_file():
            return None
        self._files[kind] = _File(path)
        return self._files[kind]


class _File:
    """States of sequences, one behind the other, and where each is.

    Attributes:
        places: first token and number of tokens of each sequence.
    """

    def __init__(self, path: Path):
        lines = path.with_suffix(INDEX).read_text().splitlines()
        self._index = path.with_suffix(INDEX)
        head = json.loads(lines[0])
        self._width, self._room = head["width"], head["room"]
        dtype = getattr(torch, head["dtype"])
        flat = torch.from_file(str(path), True, self._room * self._width, dtype=dtype)
        self._states = flat.view(self._room, self._width)
        self.places: dict[str, tuple[int, int]] = {}
        self._end = 0
        for line in lines[1:]:
            try:
                key, start, count = json.loads(line)
            except ValueError:  # torn, as the process was killed
                break
            self.places[key] = start, count
            self._end = start + count
        self._write([lines[0], *(json.dumps([key, *at]) for key, at in self.places.items())])

    @classmethod
    def made(cls, path: Path, like: Tensor, num_tokens: int, num_bytes: int) -> _File:
        """A new file for at most so many tokens, of which the disk holds what is written only."""
        width = like.shape[-1]
        room = min(num_tokens, num_bytes // (width * like.element_size()))
        dtype = str(like.dtype).removeprefix("torch.")
        head = {"width": width, "room": max(room, 1), "dtype": dtype}
        path.with_suffix(INDEX).write_text(json.dumps(head) + "\n")
        return cls(path)

    @property
    def num_bytes(self) -> int:
        """What the file takes when it is full."""
        return self._states.nbytes

    def _write(self, lines: Sequence[str]) -> None:
        self._index.write_text("".join(f"{line}\n" for line in lines))

    def add(self, key: str, states: Tensor) -> None:
        """Write the states of a sequence, ``(tokens, width)``, if there is room."""
        start, end = self._end, self._end + len(states)
        if end > self._room or key in self.places:
            return
        self._states[start:end] = states.to("cpu")
        self.places[key], self._end = (start, len(states)), end
        with self._index.open("a") as index:
            index.write(json.dumps([key, start, len(states)]) + "\n")

    def read(self, keys: Sequence[str], real: Tensor) -> Tensor:
        """States of sequences whose tokens stand where ``real`` ``(batch, seq)`` is True."""
        whole = self._states.new_zeros(len(keys), real.shape[1], self._width)
        for row, key in enumerate(keys):
            start, count = self.places[key]
            whole[row][real[row]] = self._states[start : start + count]
        return whole


@contextmanager
def kept_states(trainer: Any, folder: Path, data: Sequence[Any], base: str) -> Iterator[None]:
    """Keep states in the block, a training, if they recur; afterwards they are removed, unless it
    ends with an error.

    Args:
        trainer: the training's Trainer.
        folder: of its checkpoints.
        data: ``prompt_ids`` and ``answer_ids`` of all that it runs.
        base: see :class:`KeptStates`.
    """
    args = trainer.args
    # Where layers are sharded, all processes run the base together.
    if args.num_train_epochs <= 1 or not args.kept_states or trainer.trains_base or trainer.sharded:
        yield
        return
    tokens = sum(
        min(len(prompt) + len(answer), args.max_length)
        for rows in data
        for prompt, answer in zip(rows["prompt_ids"], rows["answer_ids"])
    )
    folder.mkdir(parents=True, exist_ok=True)
    room = min(args.kept_states * 1e9, MOST_OF_DISK * shutil.disk_usage(folder).free)
    own = folder / f"states-{args.process_index}"
    token = KEEPER.set(KeptStates(own, tokens, int(room / args.world_size), base))
    try:
        yield
    finally:
        KEEPER.reset(token)
    shutil.rmtree(own, ignore_errors=True)
