"""Imports published checkpoints as adapters, and exports adapters for other programs.

This module reads and writes files; methods know what the tensors mean (``Method.published``,
``Method.exports``).
"""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import require_active
from hf_spec.adapters.checkpoint import (
    WEIGHTS,
    Origin,
    check_numbers,
    complaints,
    read_weights,
    tensor_facts,
)
from hf_spec.core.checks import first_line
from hf_spec.core.limits import MAX_SHARED
from hf_spec.files import write_atomically
from hf_spec.hub.card import write_card
from hf_spec.hub.folder import (
    CONFIG,
    attached,
    is_repository,
    read_json,
    save_adapter,
    staging,
)
from hf_spec.methods.registry import Export, Method, Published, methods
from modeling_patches.weights import placement

#: Suffix of files that map tensors to checkpoint files.
INDEX = ".index.json"
SAFE = ".safetensors"
#: Suffixes of checkpoint files; a name that ends in one is no repository.
SUFFIXES = (SAFE, ".pt", ".pth", ".bin", ".json", ".gz")
#: Keys under which training programs keep tensors by name, beside other things.
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
#: First bytes of what is often taken for a checkpoint, and what to do about it.
NOT_YET = {
    b"\x1f\x8b": "is compressed by gzip: unpack it first",
    b"version https://git-lfs": "is a Git LFS pointer: get the file itself by `git lfs pull`, or "
    "`hf download`",
}  # fmt: skip
#: Most names of tensors shown of a file that has none of those wanted.
SHOWN = 5


def importable(name: str) -> tuple[Method, Published]:
    """A method and its reader of published checkpoints.

    Raises:
        ValueError: there is no such method, or it cannot read published checkpoints.
    """
    method = methods().get(name)
    if method is None or method.published is None:
        known = ", ".join(name for name, one in methods().items() if one.published is not None)
        raise ValueError(f"no published layout of {name!r} is known; choose one of {known}.")
    return method, method.published


def find_published(place: str, published: Published) -> Path:
    """The file of a published checkpoint, downloaded if needed.

    Args:
        place: a file; a folder; or a repository on the Hub, ``owner/name``, whose files are taken
            from the local cache where the Hub cannot be reached.
        published: names the files that a folder or repository is searched for.

    Raises:
        ValueError: there is no such file.
    """
    path = Path(place)
    wanted = ", ".join(published.files)
    if path.is_dir():
        for name in published.files:
            if (path / name).is_file():
                return path / name
        here = sorted(one.name for one in path.iterdir())[:SHOWN]
        raise ValueError(
            f"the folder {place!r} has none of {wanted}; it has {', '.join(here) or 'no files'}. "
            "Give the file itself"
        )
    if path.is_file():
        return path
    if not is_repository(place) or place.count("/") != 1 or path.suffix in SUFFIXES:
        raise ValueError(f"there is no file {place!r}, nor a folder of this name")
    return _downloaded(place, published)


def _downloaded(repository: str, published: Published) -> Path:
    """:func:`find_published` for a repository on the Hub."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    source, unreachable = Origin(repository), None
    for name in published.files:
        try:
            path = source.file(name)
            if path is not None and name.endswith(INDEX):
                for shard in _shards(path, published.wants):
                    source.file(shard)
        except LocalEntryNotFoundError as error:  # another one may have been downloaded before
            unreachable = error
        except OSError as error:
            raise ValueError(f"cannot read {repository!r}: {first_line(error)}") from error
        else:
            if path is not None:
                return path
    if unreachable is not None:
        raise ValueError(
            f"the Hub cannot be reached, and of {repository!r} none of "
            f"{', '.join(published.files)} is in the local cache"
        ) from unreachable
    raise ValueError(
        f"the repository {repository!r} has none of {', '.join(published.files)}: download its "
        "file and give that"
    )


def read_published(path: Path, wants: Callable[[str], bool]) -> dict[str, Tensor]:
    """Read tensors of a checkpoint by name, without running any code in it.

    Args:
        path: a safetensors file; a file of ``torch.save``, which torch's weights-only unpickler
            reads, with the tensors by name or these under a key such as ``state_dict``; or an
            ``.index.json`` that names several such files in the same folder.
        wants: whether to read the tensor of a name.

    Raises:
        ValueError: there is no such file, it is of another format, or it holds anything besides
            tensors by name.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    if path.name.endswith(INDEX):
        return _read_index(path, wants)
    with path.open("rb") as file:
        start = file.read(32)
    for magic, problem in NOT_YET.items():
        if start.startswith(magic):
            raise ValueError(f"{str(path)!r} {problem}")
    if path.suffix == SAFE:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                return {name: file.get_tensor(name) for name in names if wants(name)}
        except SafetensorError as error:
            raise ValueError(f"{str(path)!r} is no safetensors file: {error}") from error
    _check_archive(path)
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling wrong bytes can raise anything
        raise ValueError(
            f"{str(path)!r} is no file of tensors by name, was cut off, or holds something else "
            "besides, which is not read since it could run code: copy it again, or have it saved "
            "as safetensors by whoever made it"
        ) from error
    for _ in WRAPPERS:  # one may be inside another
        inner = data if isinstance(data, dict) else {}
        data = next((inner[key] for key in WRAPPERS if isinstance(inner.get(key), dict)), data)
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise ValueError(f"{str(path)!r} holds a {type(data).__name__}, not tensors by name")
    tensors = {
        name: value for name, value in data.items() if isinstance(value, Tensor) and wants(name)
    }
    _check_sizes(path, tensors)
    return tensors


def _check_archive(path: Path) -> None:
    """Raise a ValueError if an archive unpacks to more than its own size.

    ``torch.save`` does not compress, and a small file must not fill the memory.
    """
    if not zipfile.is_zipfile(path):  # the older format of torch.save is no archive
        return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    size = sum(member.file_size for member in members)
    if any(member.compress_type != zipfile.ZIP_STORED for member in members) or (
        size > path.stat().st_size
    ):
        raise ValueError(
            f"{str(path)!r} has {path.stat().st_size} bytes and unpacks to {size}: it is no file "
            "of torch.save, which compresses nothing. Have it saved again by whoever made it"
        )


def _check_sizes(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raise a ValueError unless all tensors are dense and stored in the file as a whole."""
    for name, tensor in tensors.items():
        plain = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
        if not plain or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(
                f"{str(path)!r}: {name!r} of shape {tuple(tensor.shape)} is no plain tensor, or "
                "larger than what is stored of it"
            )
    size, most = sum(tensor.nbytes for tensor in tensors.values()), path.stat().st_size * MAX_SHARED
    if size > most:
        raise ValueError(
            f"{str(path)!r}: tensors that share their numbers take {size} bytes, at most "
            f"{MAX_SHARED} times the file's are read"
        )


def _shards(path: Path, wants: Callable[[str], bool]) -> list[str]:
    """The files that an index names for the tensors that are wanted."""
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{str(path)!r} has no weight_map")
    names = sorted({str(file) for name, file in places.items() if wants(name)})
    for name in names:
        if Path(name).name != name or name.endswith(INDEX):
            raise ValueError(f"{str(path)!r} names {name!r}, which is no file beside it")
    return names


def _read_index(path: Path, wants: Callable[[str], bool]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in _shards(path, wants):
        tensors |= read_published(path.parent / name, wants)
    return tensors


def import_adapter(
    path: Path,
    method_name: str,
    model: Any,
    output: Path,
    options: dict[str, Any] | None = None,
) -> Path:
    """Write a published checkpoint as an adapter folder with a card.

    Args:
        path: see :func:`read_published`.
        method_name: the method that the checkpoint belongs to.
        model: the base model that it was trained for; unchanged afterwards.
        output: the adapter folder.
        options: options of the strategy, stored with the adapter.

    Returns:
        ``output``.

    Raises:
        ValueError: the file cannot be read, or does not fit the model.
    """
    method, published = importable(method_name)
    method.parse_options(options)
    assert method.adapter_config is not None
    others: list[str] = []

    def wants(name: str) -> bool:
        wanted = published.wants(name)
        if not wanted:
            others.append(name)
        return wanted

    found: dict[str, Tensor] | None = None
    try:
        found = read_published(path, wants)
        fields, tensors = published.convert(found)
        config = method.adapter_config(**fields)
    except ValueError as error:
        has = "" if found is None or found else f"; {_listed(others)}"
        raise ValueError(f"cannot import {str(path)!r}: {error}{has}") from error
    with attached(model, config) as peft_model:
        weights = require_active(model, config.type_name, method.name).weights()
        wrong = complaints(tensor_facts(tensors), tensor_facts(weights))
        if wrong:
            raise ValueError(
                f"{str(path)!r} does not fit {type(model).__name__}: {'; '.join(wrong)}. Give the "
                "base model that it was made for"
            )
        check_numbers(f"the checkpoint {str(path)!r}", tensors.items(), placement(model)[1])
        for name, parameter in weights.items():
            parameter.data = tensors[name].contiguous()  # in the file's dtype
        save_adapter(peft_model, output, method.name, options or {})
    write_card(output)
    return output


def _listed(names: list[str]) -> str:
    """What a file has, for an error."""
    if not names:
        return "it has no tensors"
    more = f" and {len(names) - SHOWN} others" if len(names) > SHOWN else ""
    return f"it has {', '.join(repr(name[:80]) for name in names[:SHOWN])}{more}"


def exporter(folder: Path, form: str) -> Export:
    """The exporter of the adapter in a folder to a format.

    Raises:
        ValueError: the folder has no adapter of hf_spec, or its type has no such format.
    """
    kind = read_json(folder / CONFIG).get("peft_type")
    for method in methods().values():
        if getattr(method.adapter_config, "type_name", None) == kind:
            if form in method.exports:
                return method.exports[form]
            if not method.exports:
                raise ValueError(f"adapters of {method.name!r} cannot be exported")
            known = ", ".join(method.exports)
            raise ValueError(
                f"adapters of {method.name!r} can be exported as {known}, not {form!r}"
            )
    raise ValueError(f"{str(folder / CONFIG)!r} is of type {kind!r}, which is none of hf_spec's")


def export_adapter(folder: Path, form: str, model: Any, output: Path) -> Path:
    """Write an adapter in the format of another program: a config and a safetensors file.

    Args:
        folder: the adapter folder.
        form: name of the format, such as ``sglang``.
        model: the base model; unchanged afterwards.
        output: the folder to write.

    Returns:
        ``output``.

    Raises:
        ValueError: the folder has no adapter, or its type cannot be written in this format.
    """
    from peft import PeftModel
    from safetensors.torch import save_file

    form_of = exporter(folder, form)
    path = folder / WEIGHTS
    if not path.is_file() or not read_weights(path):
        raise ValueError(f"{str(folder)!r} holds no {WEIGHTS}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks Transformers in an old way
        peft_model = PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False)
    config: Any = peft_model.active_peft_config
    try:
        adapter = require_active(model, config.type_name, config.type_name.lower())
        description, tensors = form_of.make(model, adapter)
        with staging(output) as temporary:
            # safetensors does not store views of a shared tensor.
            plain = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            save_file(plain, temporary / form_of.weights, metadata={"format": "pt"})
            write_atomically(temporary / form_of.config, json.dumps(description, indent=2))
    finally:
        peft_model.unload()
    return output
