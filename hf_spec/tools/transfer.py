"""Imports published checkpoints as adapters, and exports adapters for other programs.

This module reads and writes files; methods know what the tensors mean (``Method.formats``).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from torch import Tensor

from hf_spec.adapters.checkpoint import (
    INDEX,
    PICKLE,
    WEIGHTS,
    Origin,
    check_numbers,
    complaints,
    opened,
    shards,
)
from hf_spec.adapters.layer import layer_of
from hf_spec.adapters.loading import require_active
from hf_spec.core.checks import UNFIT, check_choice, explained, first_line, names_its_files
from hf_spec.decoding.call import check_stored
from hf_spec.files import read_json, staging, write_json
from hf_spec.methods.registry import Method, methods
from hf_spec.modeling_patches.weights import FP8, SCALES, dequantized, placement, renamed
from hf_spec.tools.formats.tables import CONFIG as MODEL_CONFIG
from hf_spec.tools.formats.tables import Reader, Writer, formats_of
from hf_spec.tools.hub import CONFIG, attached, is_repository, save_adapter, write_card
from hf_spec.tools.loading import model_without_weights, quiet_hub

SAFE = ".safetensors"
#: Suffixes of checkpoint files; a name that ends in one is no repository.
SUFFIXES = (SAFE, ".pt", ".pth", ".bin", ".json")
#: Files that a model's weights may be in, and a drafter's: Medusa's and PEFT's, too.
BASE_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)  # fmt: skip
FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", WEIGHTS, PICKLE, *BASE_FILES)
#: Parameters of drafters that may be copies of the base's embeddings, and which of them.
COPIES = {"embed_tokens.weight": "get_input_embeddings", "lm_head.weight": "get_output_embeddings"}
#: Keys under which training programs keep tensors by name, beside other things.
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


def _layouts() -> dict[str, Reader]:
    """The readers of published checkpoints, by the names of methods that have one."""
    found = {name: formats_of(one, "READERS").get(name) for name, one in methods().items()}
    return {name: reader for name, reader in found.items() if reader is not None}


def importable(name: str) -> tuple[Method, Reader]:
    """A method and its reader of published checkpoints; a ValueError if there is none."""
    known = _layouts()
    check_choice("type", name, known)
    return methods()[name], known[name]


@names_its_files
def recognized(place: str) -> tuple[str, Path]:
    """The method that a published checkpoint belongs to, and its file (:func:`find_published`)."""
    known = _layouts()
    path = find_published(place, lambda name: False)  # an index names tensors without their files
    names, config = tensor_names(path), read_json(path.with_name(MODEL_CONFIG), optional=True)
    found = [name for name, reader in known.items() if reader.recognizes(config, names)]
    if len(found) != 1:
        which = f"of several types, {', '.join(found)}" if found else "of no known layout"
        raise ValueError(
            f"the checkpoint {place!r} is {which}: give --type, one of {', '.join(found or known)}"
        )
    return found[0], find_published(place, known[found[0]].wants)


def find_published(place: str, wants: Callable[[str], bool], files: Sequence[str] = FILES) -> Path:
    """The file of a published checkpoint, downloaded if needed; a ValueError if there is none.

    Args:
        place: a file; a folder; or a repository on the Hub, ``owner/name``, whose files are taken
            from the local cache where the Hub cannot be reached.
        wants: whether the tensor of a name is needed, of files that an index names.
        files: names that a folder or repository is searched for; the first one counts.
    """
    path, origin, where = Path(place), Origin(place), ""
    if path.is_file():
        return path
    quiet_hub()
    named = is_repository(place) and place.count("/") == 1 and path.suffix not in SUFFIXES
    if not path.is_dir() and not named:
        raise ValueError(f"there is no file {place!r}, nor a folder of this name")
    for name in files:
        try:
            file = origin.file(name, ask=not where)
            if file is not None:
                for shard in _shards(file, wants) if name.endswith(INDEX) else ():
                    if origin.file(shard, ask=not where) is None and where:
                        raise LocalEntryNotFoundError(shard)
                with suppress(LocalEntryNotFoundError):  # some layouts have none
                    origin.file(MODEL_CONFIG, ask=not where)
                return file
        except LocalEntryNotFoundError:  # is not asked again
            where = " in the local cache, and the Hub cannot be reached"
        except OSError as error:
            raise ValueError(f"cannot read {place!r}: {first_line(error)}") from error
    raise ValueError(
        f"the {'folder' if path.is_dir() else 'repository'} {place!r} has none of "
        f"{', '.join(files)}{where}: give the file itself"
    )


def tensor_names(path: Path) -> list[str]:
    """Names of all tensors of a checkpoint; raises the errors of :func:`read_published`."""
    if path.suffix == SAFE:
        with opened(path) as file:
            return list(file.keys())
    if path.name.endswith(INDEX):
        return list(shards(path))
    return list(read_published(path, lambda name: True))


def read_published(path: Path, wants: Callable[[str], bool]) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint whose names are wanted, without running any code in it.

    Args:
        path: a safetensors file; a file of ``torch.save``, which torch's weights-only unpickler
            reads, with the tensors by name or these under a key such as ``state_dict``; or an
            ``.index.json`` that names several such files in the same folder.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    if path.name.endswith(INDEX):
        parts = [read_published(path.parent / name, wants) for name in _shards(path, wants)]
        return {name: tensor for part in parts for name, tensor in part.items()}
    if path.suffix == SAFE:
        with opened(path) as file:
            return {name: file.get_tensor(name) for name in list(file.keys()) if wants(name)}
    tensors = _unpickled(path).items()
    return {name: value for name, value in tensors if isinstance(value, Tensor) and wants(name)}


def _unpickled(path: Path) -> dict[str, Any]:
    """What a file of ``torch.save`` holds by name, out of its wrappers."""
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling wrong bytes can raise anything
        raise ValueError(
            f"{str(path)!r} is no file of tensors by name, was cut off, or holds something else "
            "besides, which is not read since it could run code; copy it again (of a Git LFS "
            "pointer, `git lfs pull` gets the file), or have it saved as safetensors by whoever "
            "made it"
        ) from error
    for _ in WRAPPERS:  # one may be inside another
        inner = data if isinstance(data, dict) else {}
        data = next((inner[key] for key in WRAPPERS if isinstance(inner.get(key), dict)), data)
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise ValueError(f"{str(path)!r} holds a {type(data).__name__}, not tensors by name")
    return data


def _shards(path: Path, wants: Callable[[str], bool]) -> list[str]:
    """The files that an index names for wanted tensors."""
    return sorted({file for name, file in shards(path).items() if wants(name)})


def convert(
    path: Path, method_name: str, given: Mapping[str, Any] | None = None
) -> tuple[Any, dict[str, Tensor]]:
    """An adapter's config and its parameters by name, from a published checkpoint. Fields that are
    given stand in place of what the checkpoint says, or does not say."""
    method, reader = importable(method_name)
    assert method.adapter_config is not None
    with explained(f"cannot import {str(path)!r}", ValueError, RuntimeError, *UNFIT):
        # With the scales of those that are stored as 8-bit floats.
        tensors = read_published(path, lambda name: reader.wants(name.removesuffix(SCALES)))
        _dequantize(tensors)
        fields, tensors = reader.convert(
            tensors, read_json(path.with_name(MODEL_CONFIG), optional=True)
        )
        return method.adapter_config(**{**fields, **(given or {})}, inference_mode=True), tensors


def _dequantize(tensors: dict[str, Tensor]) -> None:
    """Turn 8-bit floats into bfloat16, and drop their scales."""
    for name in [name for name, tensor in tensors.items() if tensor.dtype == FP8]:
        scales = tensors.pop(name + SCALES, None)
        if scales is None:
            raise ValueError(
                f"{name!r} is of type {FP8} and has no scales ({name + SCALES!r}): take a "
                "checkpoint that is not quantized"
            )
        tensors[name] = dequantized(name, tensors[name], scales, torch.bfloat16)


def base_outline(place: str, tensors: Mapping[str, Tensor]) -> Any:
    """A base model without weights, but for the embeddings that these tensors may be copies of.

    Of its files, only those with the embeddings are read, and downloaded.
    """
    model = model_without_weights(place)
    own = {parameter: name for name, parameter in model.named_parameters()}
    modules = [getattr(model, ask)() for name, ask in COPIES.items() if name in tensors]
    wanted = {own.get(getattr(one, "weight", None)) for one in modules} - {None}
    if not wanted:
        return model
    name_of = renamed(model)

    def wants(name: str) -> bool:
        return name_of(name) in wanted

    # Files of safetensors are mapped: of their tensors, only rows that are looked at are read.
    found = read_published(find_published(place, wants, BASE_FILES), wants)
    model.load_state_dict({name_of(name): one for name, one in found.items()}, False, assign=True)
    model.tie_weights()
    return model


@names_its_files
def import_adapter(
    path: Path, method_name: str, base: Any, output: Path,
    options: dict[str, Any] | None = None, given: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write a published checkpoint (:func:`convert`) for a base model, or for the one of a name, as
    an adapter folder with a card and options; returns ``output``."""
    method, reader = importable(method_name)
    method.parse_options(options)
    check_stored(options or {}, "options")
    config, tensors = convert(path, method_name, given)
    model = base_outline(base, tensors) if isinstance(base, str) else base
    if reader.share is not None:
        config, tensors = reader.share(model, config, tensors)
    with attached(model, config, on_meta=True) as peft_model:
        adapter = layer_of(model, config.type_name).adapters["default"]
        weights = adapter.tensors()
        wrong = complaints(tensors, weights)
        if wrong:
            raise ValueError(
                f"{str(path)!r} does not fit {type(model).__name__}: {'; '.join(wrong)}. Give the "
                "base model that it was made for"
            )
        check_numbers(f"the checkpoint {str(path)!r}", tensors.items(), placement(model)[1])
        plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
        adapter.load_state_dict(plain, assign=True)  # in the file's dtype
        save_adapter(peft_model, output, method.name, options or {})
    write_card(output)
    return output


def exporter(folder: Path, form: str) -> Writer:
    """The exporter of the adapter in a folder to a format; a ValueError if there is none."""
    kind = read_json(folder / CONFIG).get("peft_type")
    method = next((one for one in methods().values() if one.peft_type == kind), None)
    if method is None or kind is None:
        raise ValueError(
            f"{str(folder / CONFIG)!r} is of type {kind!r}, which is none of hf_spec's"
        )
    writers = formats_of(method, "WRITERS")
    if form not in writers:
        if not writers:
            raise ValueError(f"adapters of {method.name!r} cannot be exported to other programs")
        formats = ", ".join(writers)
        raise ValueError(f"adapters of {method.name!r} can be exported to {formats}, not {form!r}")
    return writers[form]


def export_adapter(folder: Path, form: str, model: Any, output: Path) -> Path:
    """Write an adapter in the format of another program, such as ``sglang``: a config and a
    safetensors file; returns ``output``."""
    make = exporter(folder, form)
    with attached(model, None, trained=folder) as peft_model:
        name = peft_model.active_peft_config.type_name
        files = make(model, require_active(model, name, name.lower()))
        old = read_json(output / MODEL_CONFIG, optional=True)
        if old and old.get("architectures") != files[MODEL_CONFIG]["architectures"]:
            raise ValueError(
                f"the {MODEL_CONFIG} in {str(output)!r} is of {old.get('architectures')}, which "
                "would be replaced. Choose another folder."
            )
        with staging(output) as temporary:
            for file, content in files.items():
                if not file.endswith(SAFE):
                    write_json(temporary / file, content, indent=2)
                    continue
                # safetensors does not store views of a shared tensor.
                plain = {name: tensor.detach().cpu().clone() for name, tensor in content.items()}
                save_file(plain, temporary / file, metadata={"format": "pt"})
    return output
