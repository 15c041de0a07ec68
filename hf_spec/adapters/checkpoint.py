"""Weights on disk, and the checks that those of an adapter pass before a model gets them.

Pickles can run code and are never read. This module knows no models or PEFT types.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_spec.core.checks import first_line
from hf_spec.files import read_json

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
#: Prefix of the names of an adapter's tensors on disk.
PEFT_PREFIX = "base_model.model."
#: Suffix of files that name the file of each tensor.
INDEX = ".index.json"
#: Most complaints shown of each kind; an unrelated file has one per tensor.
SHOWN = 3
#: Types that loading casts.
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True)
class Origin:
    """Where an adapter comes from: a folder, or a repository on the Hub, with other arguments of
    `huggingface_hub.hf_hub_download` (subfolder, revision, token).

    The first file of a repository sets the revision to its commit, so that all files are of one
    commit, whatever is pushed meanwhile.
    """

    place: str
    download: dict[str, Any] = field(default_factory=dict)
    _asked: dict[str, Path | None] = field(default_factory=dict)

    def file(self, name: str, ask: bool = True) -> Path | None:
        """The local path of a file; None if there is none.

        A local folder is searched each time. The Hub is asked once for each file, and not without
        `ask`, when only downloaded files are found. An OSError if it cannot be reached, or refuses.
        """
        if os.path.isdir(self.place):
            path = Path(self.place, self.download.get("subfolder") or "", name)
            return path if path.is_file() else None
        if name not in self._asked:
            found = self._on_hub(name, ask)
            if not ask:
                return found
            self._asked[name] = found
        return self._asked[name]

    def _on_hub(self, name: str, ask: bool) -> Path | None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
        from transformers.utils.hub import extract_commit_hash

        download = self.download if ask else {**self.download, "local_files_only": True}
        try:
            path = Path(hf_hub_download(self.place, name, **download))
        except RemoteEntryNotFoundError:
            return None
        except LocalEntryNotFoundError:
            if ask:
                raise
            return None
        if (commit := extract_commit_hash(str(path), None)) is not None:
            self.download["revision"] = commit
        return path

    def weights(self) -> Path:
        """The file of weights; a ValueError if there is none in safetensors."""
        path = self.file(WEIGHTS)
        if path is None:
            raise ValueError(
                f"{self.place!r} holds no {WEIGHTS}: weights of hf_spec's adapters are read from "
                f"safetensors only, never from a pickle such as {PICKLE}, which can run code. Save "
                "the adapter again with save_pretrained, or ask whoever made it to."
            )
        return path


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise a ValueError within the block where safetensors cannot read a file."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"{str(path)!r} is no safetensors file, or was cut off ({first_line(error)}): copy or "
            "download it again (of a Git LFS pointer, `git lfs pull` gets the file)."
        ) from error


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, of which tensors are read one by one."""
    from safetensors import safe_open

    with readable(path), safe_open(path, framework="pt") as file:
        yield file


def shards(index: Path) -> dict[str, str]:
    """The name of each tensor's file, by an index beside these files; a ValueError if it names
    something else."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{str(index)!r} has no weight_map: download it again.")
    for file in map(str, places.values()):
        if Path(file).name != file or file.endswith(INDEX):
            raise ValueError(f"{str(index)!r} names {file!r}, which is no file beside it.")
    return {name: str(file) for name, file in places.items()}


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file of weights."""
    from safetensors.torch import load_file

    with readable(path):
        return load_file(path)


def check_weights(
    kind: str, stored: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Raise a ValueError unless stored tensors, named without :data:`PEFT_PREFIX`, are those of an
    adapter of a type, and finite in the model's dtype."""
    if wrong := complaints(stored, expected):
        raise ValueError(
            f"these weights do not fit the config of this {kind} adapter: {'; '.join(wrong)}. "
            f"adapter_config.json and {WEIGHTS} must be of the same adapter: save, copy or "
            "download both again."
        )
    check_numbers(f"the {kind} adapter", stored.items(), dtype)


def complaints(
    stored: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> list[str]:
    """Reasons why stored tensors cannot be loaded as the expected ones; empty if they can.

    Names and shapes must be the same. A tensor of one of `FLOATS` may be of any of them; any other
    must be of the type expected.
    """
    missing = [f"no tensor {name!r}" for name in expected if name not in stored]
    unknown = [f"unknown tensor {name!r}" for name in stored if name not in expected]
    wrong = []
    for name, wanted in expected.items():
        found = stored.get(name, wanted)
        # A tensor sharded over processes (DeepSpeed's stage 3) has no entries here.
        if found.shape != wanted.shape and wanted.shape != (0,):
            shapes = tuple(found.shape), tuple(wanted.shape)
            wrong.append(f"{name!r} has shape {shapes[0]}, expected {shapes[1]}")
        elif found.dtype != wanted.dtype and not {found.dtype, wanted.dtype} <= FLOATS:
            wrong.append(f"{name!r} is of type {found.dtype}, expected {wanted.dtype}")
    result = []
    for kind in (missing, wrong, unknown):
        result += kind[:SHOWN]
        if len(kind) > SHOWN:
            result.append(f"{len(kind) - SHOWN} more such")
    return result


def check_numbers(
    adapter: str, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    """Raise a ValueError unless all values of an adapter are finite in the model's dtype.

    It reads the minimum and maximum of each tensor, with a single synchronization.

    Args:
        adapter: the adapter's name for errors.
        tensors: with their names, all on one device; only floating-point ones are checked.
        dtype: the model's.
    """
    ends = {
        name: torch.stack(tensor.detach().aminmax()).to(dtype)
        for name, tensor in tensors
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta
    }
    finite = torch.stack(list(ends.values())).isfinite().all(-1).tolist() if ends else []
    wrong = [repr(name) for name, right in zip(ends, finite) if not right]
    if wrong:
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{', '.join(wrong[:SHOWN])}{' and others' if len(wrong) > SHOWN else ''} of {adapter} "
            f"have numbers that are NaN, infinite, or not finite in {kind}, the model's type "
            f"(largest: {torch.finfo(dtype).max:.3g}): take a sound copy, or train the adapter "
            "again; if it was made for a wider type, load the model in that."
        )
