"""Reads a model's layers for multi-token prediction from the checkpoint that it was loaded from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_spec.adapters.checkpoint import Origin, complaints
from hf_spec.core.checks import first_line
from hf_spec.core.memory import memory
from modeling_patches.modules import decoder_layers, num_layers
from modeling_patches.mtp import BLOCK, MtpLayers, converted, dtypes, is_mtp, layout_of
from modeling_patches.weights import device_of, placement

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
#: Fields of configs that tell the number of these layers.
COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
#: What safetensors calls the types of numbers that are read.
FLOATS = ("BF16", "F16", "F32", "F64")


def mtp_layers(model: Any) -> MtpLayers:
    """The layers, on the model's device and in its dtype; read once, and again if these change.

    Args:
        model: a causal language model, loaded from a local folder or from the Hub.

    Raises:
        ValueError: its checkpoint has no such layers, cannot be read, or does not fit the model.
    """
    place = device_of(decoder_layers(model)[-1]), placement(model).dtype
    known = memory(model)
    found: tuple[Any, MtpLayers] | None = known.get(MtpLayers)
    if found is None or found[0] != place:
        found = known[MtpLayers] = place, _read(model, *place)
    return found[1]


def _read(model: Any, device: torch.device, dtype: torch.dtype) -> MtpLayers:
    name, below = type(model).__name__, num_layers(model)
    place, files = _files(model, below)
    layout = layout_of(files, below)
    if not files or layout is None:
        text = model.config.get_text_config(decoder=True)
        said = [f"{one}={value}" for one in COUNTS if (value := getattr(text, one, None))]
        but = f", although its config says {said[0]}" if said else ""
        what = f"has no layers for multi-token prediction{but}"
        if files:
            what = (
                f"has layers for multi-token prediction under names that are not known, such as "
                f"{min(files)!r}"
            )
        raise ValueError(
            f"assistant_strategy='mtp': the checkpoint of {name}, {place!r}, {what}. Choose "
            "another strategy."
        )
    sources: dict[tuple[int, str], str] = {}
    shared: dict[str, str] = {}
    unknown = []
    for source in files:
        layer, own = layout.parse(source, below) or (None, "")
        if layer is not None and own:
            sources[layer, own] = source
        elif own:
            shared[own] = source
        elif own is not None:  # a copy is not needed
            unknown.append(source)
    count = 1 + max((layer for layer, _ in sources), default=0)
    for layer in range(count):
        sources |= {(layer, own): source for own, source in shared.items()}
    with ExitStack() as stack:
        opened = {}
        for path in sorted(set(files.values())):
            with _readable(path):
                opened[path] = stack.enter_context(safe_open(path, framework="pt"))
        layers = MtpLayers(model, count, any(".experts." in own for _, own in sources))
        expected = layers.layers.state_dict()

        def gather(read: Any) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            for layer in range(count):
                parts = {
                    own: read(opened[files[source]], source, files[source])
                    for (number, own), source in sources.items() if number == layer
                }  # fmt: skip
                block = {
                    own.removeprefix(BLOCK): value
                    for own, value in parts.items() if own.startswith(BLOCK)
                }  # fmt: skip
                found |= {
                    f"{layer}.{own}": value
                    for own, value in parts.items() if not own.startswith(BLOCK)
                }  # fmt: skip
                stacked = converted(model, block)
                found |= {f"{layer}.{BLOCK}{own}": value for own, value in stacked.items()}
            return found

        # Names and shapes first: nothing large is read of what does not fit.
        wrong = [f"unknown tensor {one!r}" for one in unknown[:1]]
        wrong += complaints(gather(_described), expected)
        if wrong:
            released = {f"{layer}.{own}": source for (layer, own), source in sources.items()}
            for own, source in released.items():
                wrong = [text.replace(repr(own), repr(source)) for text in wrong]
            raise ValueError(
                f"the layers for multi-token prediction of {place!r} do not fit {name}: "
                f"{'; '.join(wrong)} ({BLOCK.rstrip('.')} is the decoder layer). Download the "
                "checkpoint again, or choose another strategy."
            )
        kept = dtypes(model)
        state = {
            own: value.to(device, kept.get(own.partition(BLOCK)[2], dtype)).contiguous()
            for own, value in gather(_tensor).items()
        }
    layers.layers.load_state_dict(state, assign=True)
    layers.rotary.to(device)
    return layers.requires_grad_(False).eval()


def _described(file: Any, name: str, path: Path) -> Tensor:
    """A tensor's shape, without numbers."""
    part = file.get_slice(name)
    if part.get_dtype() not in FLOATS:
        raise ValueError(
            f"{str(path)!r}: {name!r} is stored as {part.get_dtype()}; layers for multi-token "
            f"prediction are read from {', '.join(FLOATS)}. Take a checkpoint that is not "
            "quantized, or choose another strategy."
        )
    return torch.empty(part.get_shape(), dtype=torch.float32, device="meta")


def _tensor(file: Any, name: str, path: Path) -> Tensor:
    with _readable(path):
        found: Tensor = file.get_tensor(name)
    return found


def _files(model: Any, below: int) -> tuple[str, Mapping[str, Path]]:
    """Where the checkpoint is, and the file of each of its tensors of these layers.

    Args:
        below: number of the model's layers.
    """
    place = checkpoint_of(model)
    if not place:
        raise ValueError(
            f"assistant_strategy='mtp': {type(model).__name__} was not loaded from a checkpoint, "
            "whose layers for multi-token prediction would draft. Load it with from_pretrained."
        )
    commit = getattr(model.config, "_commit_hash", None)
    origin = Origin(place, {} if commit is None else {"revision": commit})
    index = _file(origin, INDEX)
    if index is not None:
        names = _shards(index)
        wanted = {name: file for name, file in names.items() if is_mtp(name, below)}
        paths = {file: _file(origin, file) for file in set(wanted.values())}
        missing = [file for file, path in paths.items() if path is None]
        if missing:
            raise ValueError(
                f"{place!r} has no {min(missing)!r}, which {INDEX} names: download it again."
            )
        return place, {name: path for name, file in wanted.items() if (path := paths[file])}
    single = _file(origin, SINGLE)
    if single is None:
        raise ValueError(
            f"assistant_strategy='mtp': {place!r} has neither {INDEX} nor {SINGLE}: layers for "
            "multi-token prediction are read from safetensors only, never from a pickle, which "
            "can run code. Choose another strategy."
        )
    with _readable(single), safe_open(single, framework="pt") as file:
        return place, {name: single for name in list(file.keys()) if is_mtp(name, below)}


def checkpoint_of(model: Any) -> str:
    """The folder or repository that a model was loaded from; empty for none."""
    return str(getattr(model.config, "name_or_path", None) or model.name_or_path or "")


def _file(origin: Origin, name: str) -> Path | None:
    """A file of a checkpoint; the Hub is asked only for what has not been downloaded."""
    try:
        return origin.file(name, ask=False) or origin.file(name)
    except OSError as error:
        raise ValueError(f"cannot read {name} of {origin.place!r}: {first_line(error)}") from error


def _shards(index: Path) -> dict[str, str]:
    """The name of each tensor's file."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(index)!r} is no index of tensors (a JSON object with 'weight_map'): download it "
            "again."
        ) from error
    for file in set(names.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{str(index)!r} names {file!r}, which is no safetensors file.")
    return names


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise a ValueError within the block where safetensors cannot read a file."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{str(path)!r} is no safetensors file, or was cut off ({first_line(error)}): "
            "download it again."
        ) from error
