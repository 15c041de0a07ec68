"""Reads a model's layers for multi-token prediction from the checkpoint that it was loaded from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.checkpoint import Origin, complaints, opened, shards
from hf_spec.core.checks import explained, first_line
from hf_spec.core.memory import memory
from hf_spec.core.tree import Tree
from hf_spec.drafting.draft_cache import DraftCache
from hf_spec.methods.mtp.network import MtpNetwork
from hf_spec.modeling_patches.attention_masks import runs_kernel
from hf_spec.modeling_patches.fp8 import FP8, SCALES, check_scales, dequantized
from hf_spec.modeling_patches.modules import decoder_layers, decoder_of, num_layers
from hf_spec.modeling_patches.mtp import (
    BLOCK,
    Layout,
    MtpLayers,
    dtypes,
    gathered,
    is_mtp,
    layout_of,
)
from hf_spec.modeling_patches.mtp_blocks import recipe_of
from hf_spec.modeling_patches.weights import device_of, loaded, placement

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
#: What safetensors calls the types of numbers that are read, and that of 8-bit floats, which are
#: read if there are scales.
FLOATS, EIGHT_BITS = ("BF16", "F16", "F32", "F64"), "F8_E4M3"


def mtp_layers(model: Any) -> MtpLayers:
    """The layers, on the model's device and in its dtype; read once, and again if these change.

    Raises:
        ValueError: its checkpoint has no such layers, cannot be read, or does not fit the model.
    """
    # A module with weights of its own knows the device, also where these are offloaded.
    last = decoder_layers(model)[-1]
    leaf = next((one for one in last.modules() if [*one.parameters(False)]), last)
    place = device_of(leaf), placement(model).dtype
    known = memory(model)
    found: tuple[Any, MtpLayers] | None = known.get(MtpLayers)
    if found is None or found[0] != place:
        found = place, _read(model, *place)
        _check_that_they_run(model, found[1])
        known[MtpLayers] = found
    return found[1]


@torch.no_grad()
def _check_that_they_run(model: Any, layers: MtpLayers) -> None:
    """Raise a ValueError if the layers do not run on two tokens, and on two more."""
    network = MtpNetwork(model, layers)
    cache = DraftCache(network.num_layers, 1, network.weight.device)
    cache.packs = runs_kernel(model)
    tokens = torch.zeros(1, 2, dtype=torch.long, device=network.weight.device)
    hidden = torch.zeros(1, 2, network.weight.shape[0], device=network.weight.device)
    tree = Tree.chain(tokens)
    try:
        for _ in range(2):
            rows = cache.open(tree)
            network.run_true(tokens, network.features(hidden), None, rows, cache)
            cache.commit([2])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        block = type(layers.layers[0].mtp_block).__name__
        raise ValueError(
            f"{type(model).__name__}: {block} does not run as a layer for multi-token prediction: "
            f"a trial raised {type(error).__name__}: {first_line(error)} Choose another strategy."
        ) from error


def _read(model: Any, device: torch.device, dtype: torch.dtype) -> MtpLayers:
    name, below = type(model).__name__, num_layers(model)
    place, files = _files(model, below)
    layout = layout_of(files, below)
    if layout is None:
        named = f" under names that are known, but {min(files)!r}" if files else ""
        raise ValueError(
            f"assistant_strategy='mtp': the checkpoint of {name}, {place!r}, has no layers for "
            f"multi-token prediction{named}. Choose another strategy."
        )
    scales = {one + SCALES for one in files}
    plain = {one: path for one, path in files.items() if one not in scales}
    num_parts = recipe_of(model).num_parts
    sources, unknown = _sources(plain, layout, below, num_parts)
    sparse = any(".experts." in own for _, own in sources)
    layers = MtpLayers(model, 1 + max(layer for layer, _ in sources), sparse)

    # Names and shapes first: nothing large is read of what does not fit.
    wrong = [f"unknown tensor {one!r}" for one in unknown[:1]]
    norms = _final_norms(model, len(layers.layers)) if layout.final_norm else {}
    shapes = gathered(model, sources, partial(_shape, files)) | norms
    wrong += complaints(shapes, layers.layers.state_dict())
    if wrong:
        for (layer, own), source in sources.items():
            wrong = [text.replace(repr(f"{layer}.{own}"), repr(source)) for text in wrong]
        raise ValueError(
            f"the layers for multi-token prediction of {place!r} do not fit {name}: "
            f"{'; '.join(wrong)} ({BLOCK.rstrip('.')} is the block between them). Download the "
            "checkpoint again, or choose another strategy."
        )
    kept = dtypes(model, num_parts)
    state = {
        own: value.to(device, kept.get(own.partition(BLOCK)[2], dtype)).contiguous()
        for own, value in (gathered(model, sources, partial(_tensor, files, dtype)) | norms).items()
    }
    layers.layers.load_state_dict(state, assign=True)
    left = [own for own, tensor in layers.named_buffers() if tensor.is_meta]
    if left:
        raise ValueError(
            f"{name}: the buffer {left[0]!r} of its decoder layers is made when they are built, "
            "which is not known here. Choose another strategy."
        )
    layers.place(device)
    return layers.requires_grad_(False).eval()


def _sources(
    files: Mapping[str, Path], layout: Layout, below: int, num_parts: int
) -> tuple[dict[tuple[int, str], str], list[str]]:
    """What tensors are called in the checkpoint, by layer and name in ``MtpLayer``; and those of
    these layers that the layout does not know."""
    of_layers: dict[tuple[int, str], str] = {}
    of_all: dict[str, str] = {}
    unknown = []
    for source in files:
        parsed = layout.parse(source, below, num_parts)
        if parsed is None:
            unknown.append(source)
        elif (own := parsed[1]) is not None:
            if (layer := parsed[0]) is None:
                of_all[own] = source
            else:
                of_layers[layer, own] = source
    count = 1 + max((layer for layer, _ in of_layers), default=0)
    shared = {(layer, own): of_all[own] for layer in range(count) for own in of_all}
    return of_layers | shared, unknown


def _final_norms(model: Any, count: int) -> dict[str, Tensor]:
    """The model's final norm for this number of layers, by names as of ``gathered``: its own
    memory, into which ``load_state_dict`` writes, unless it is offloaded."""
    norm = decoder_of(model).norm
    with loaded(norm):
        own = {name: one.detach() for name, one in norm.named_parameters()}
    return {f"{index}.post_norm.{name}": own[name] for index in range(count) for name in own}


def _shape(files: Mapping[str, Path], name: str) -> Tensor:
    """A tensor's shape, without numbers."""
    scales = name + SCALES
    with opened(files[name]) as file:
        part = file.get_slice(name)
        kind, shape = part.get_dtype(), part.get_shape()
    if kind == EIGHT_BITS and scales in files:
        with opened(files[scales]) as file:
            found = file.get_slice(scales).get_shape()
        try:
            check_scales(name, shape, found)
        except ValueError as error:
            raise ValueError(f"{str(files[name])!r}: {error}. Download it again.") from error
    elif kind not in FLOATS:
        raise ValueError(
            f"{str(files[name])!r}: {name!r} is stored as {kind}; layers for multi-token "
            f"prediction are read from {', '.join(FLOATS)}, and {EIGHT_BITS} with scales "
            f"({scales!r}). Take a checkpoint that is not quantized, or choose another strategy."
        )
    return torch.empty(shape, dtype=torch.float32, device="meta")


def _tensor(files: Mapping[str, Path], dtype: torch.dtype, name: str) -> Tensor:
    """A tensor; one that is stored as 8-bit floats in this dtype."""
    with opened(files[name]) as file:
        found: Tensor = file.get_tensor(name)
    if found.dtype != FP8:
        return found
    scales = name + SCALES
    with opened(files[scales]) as file:
        return dequantized(name, found, file.get_tensor(scales), dtype)


def _files(model: Any, below: int) -> tuple[str, Mapping[str, Path]]:
    """Where the checkpoint is, and the file of each of its tensors of the layers above."""
    place = str(getattr(model.config, "name_or_path", None) or model.name_or_path or "")
    if not place:
        raise ValueError(
            f"assistant_strategy='mtp': {type(model).__name__} was not loaded from a checkpoint, "
            "whose layers for multi-token prediction would draft. Load it with from_pretrained."
        )
    commit = getattr(model.config, "_commit_hash", None)
    origin = Origin(place, {} if commit is None else {"revision": commit})
    found = _file(origin, INDEX, SINGLE)
    if found is None:
        raise ValueError(
            f"assistant_strategy='mtp': {place!r} has neither {INDEX} nor {SINGLE}: layers for "
            "multi-token prediction are read from safetensors only, never from a pickle, which "
            "can run code. Choose another strategy."
        )
    if found.name == SINGLE:
        with opened(found) as file:
            names = list(file.keys())
        return place, {name: found for name in names if is_mtp(name, below)}
    wanted = {name: file for name, file in shards(found).items() if is_mtp(name, below)}
    paths = {file: _file(origin, file) for file in set(wanted.values())}
    missing = [file for file, path in paths.items() if path is None]
    if missing:
        raise ValueError(
            f"{place!r} has no {min(missing)!r}, which {INDEX} names: download it again."
        )
    return place, {name: path for name, file in wanted.items() if (path := paths[file])}


def _file(origin: Origin, *names: str) -> Path | None:
    """The first of these files of a checkpoint that there is; the Hub is asked only if none of them
    has been downloaded."""
    with explained(f"cannot read {' or '.join(names)} of {origin.place!r}", OSError):
        found = (origin.file(name, ask) for ask in (False, True) for name in names)
        return next(filter(None, found), None)
