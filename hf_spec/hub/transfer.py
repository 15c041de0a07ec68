"""Imports published checkpoints as adapters, and exports adapters for other programs.

This module reads and writes files; methods know what the tensors mean (``Method.published``,
``Method.exports``).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import require_active
from hf_spec.adapters.checkpoint import check_numbers, complaints
from hf_spec.core.checks import first_line
from hf_spec.files import write_atomically
from hf_spec.hub.card import write_card
from hf_spec.hub.folder import CONFIG, attached, is_repository, read_json, save_adapter, staging
from hf_spec.methods.registry import Export, Method, Published, methods
from modeling_patches.weights import placement

#: Suffix of files that map tensors to checkpoint files.
INDEX = ".index.json"
SAFE = ".safetensors"
#: Suffixes of checkpoint files; a name that ends in one is no repository.
SUFFIXES = (SAFE, ".pt", ".pth", ".bin", ".json")
#: Keys under which training programs keep tensors by name, beside other things.
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
#: What to do about a file that cannot be read.
AGAIN = "copy it again (of a Git LFS pointer, `git lfs pull` gets the file)"


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
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    path, wanted = Path(place), ", ".join(published.files)
    if path.is_file():
        return path
    if path.is_dir():
        found = [path / name for name in published.files if (path / name).is_file()]
        if not found:
            raise ValueError(f"the folder {place!r} has none of {wanted}. Give the file itself")
        return found[0]
    if not is_repository(place) or place.count("/") != 1 or path.suffix in SUFFIXES:
        raise ValueError(f"there is no file {place!r}, nor a folder of this name")
    where = ""
    for name in published.files:
        try:
            file = Path(hf_hub_download(place, name))
            for shard in _shards(file, published.wants) if name.endswith(INDEX) else ():
                hf_hub_download(place, shard)
            return file
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError):
                where = " in the local cache, and the Hub cannot be reached"
        except OSError as error:
            raise ValueError(f"cannot read {place!r}: {first_line(error)}") from error
    raise ValueError(
        f"the repository {place!r} has none of {wanted}{where}: download its file and give that"
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
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    if path.name.endswith(INDEX):
        parts = [read_published(path.parent / name, wants) for name in _shards(path, wants)]
        return {name: tensor for part in parts for name, tensor in part.items()}
    try:
        if path.suffix == SAFE:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                return {name: file.get_tensor(name) for name in names if wants(name)}
        data = torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is no safetensors file: {error}; {AGAIN}") from error
    except Exception as error:  # unpickling wrong bytes can raise anything
        raise ValueError(
            f"{str(path)!r} is no file of tensors by name, was cut off, or holds something else "
            f"besides, which is not read since it could run code; {AGAIN}, or have it saved as "
            "safetensors by whoever made it"
        ) from error
    for _ in WRAPPERS:  # one may be inside another
        inner = data if isinstance(data, dict) else {}
        data = next((inner[key] for key in WRAPPERS if isinstance(inner.get(key), dict)), data)
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise ValueError(f"{str(path)!r} holds a {type(data).__name__}, not tensors by name")
    return {
        name: value for name, value in data.items() if isinstance(value, Tensor) and wants(name)
    }


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
    try:
        fields, tensors = published.convert(read_published(path, published.wants))
        config = method.adapter_config(**fields)
    except ValueError as error:
        raise ValueError(f"cannot import {str(path)!r}: {error}") from error
    with attached(model, config) as peft_model:
        weights = require_active(model, config.type_name, method.name).weights()
        wrong = complaints(tensors, weights)
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


def exporter(folder: Path, form: str) -> Export:
    """The exporter of the adapter in a folder to a format.

    Raises:
        ValueError: the folder has no adapter of hf_spec, or its type has no such format.
    """
    kind = read_json(folder / CONFIG).get("peft_type")
    method = next((one for one in methods().values() if one.peft_type == kind), None)
    if method is None or kind is None:
        raise ValueError(
            f"{str(folder / CONFIG)!r} is of type {kind!r}, which is none of hf_spec's"
        )
    if form not in method.exports:
        known = f"only as {', '.join(method.exports)}" if method.exports else "as nothing else"
        raise ValueError(f"adapters of {method.name!r} can be exported {known}, not as {form!r}")
    return method.exports[form]


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
