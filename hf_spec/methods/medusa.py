"""``medusa``: heads on the hidden state of the last accepted token predict the next tokens.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads"
(2024), section 2.1.

Published heads are read, too. The known layouts name the tensors of head k, from 0, with L blocks,
as follows. Names may have the prefix ``medusa_head.``, ``medusa_heads.`` or ``medusa.``; other
tensors, such as the base model's, are ignored.

* Medusa-1 (``medusa_lm_head.pt``, such as medusa-vicuna-7b-v1.3): ``k.j.linear.weight`` and
  ``k.j.linear.bias`` of block j, and ``k.L.weight``, the head's own projection. A model that was
  trained together with its heads (medusa-1.0-vicuna-7b-v1.5) contains the same tensors as
  ``medusa_head.k.j.linear.weight`` and so on.
* ``"version": "2"`` of the same repository's config: blocks only, for a shared projection.
* vLLM: ``blocks.k.layers.j.weight``, ``blocks.k.layers.j.bias`` or none, ``lm_heads.k.weight`` or
  a shared projection, which is the base's.
* TensorRT-LLM and ModelOpt: ``k.medusa_layers.j.linear.weight`` and so on, ``k.lm_head.weight``.
* LMDeploy's converter: ``medusa.k.j.linear.0.weight`` and ``.bias``, ``medusa.k.L.0.weight``, where
  0 is the rank; weights are transposed.

Medusa's training script builds the L blocks of a head from one module, so its files contain L equal
copies, which are read as separate blocks.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.predicting import TRAINED
from hf_spec.core.limits import MAX_BLOCKS, MAX_FUTURE
from hf_spec.drafting.heads import (
    BIASES,
    PROJECTION,
    WEIGHTS,
    HeadDrafter,
    HeadsAdapter,
    HeadsConfig,
)
from hf_spec.drafting.losses import heads_loss
from hf_spec.drafting.options import DraftOptions
from hf_spec.methods.registry import Method, Published
from hf_spec.policy.tree_source import tree_source


@dataclass
class MedusaConfig(HeadsConfig):
    """Heads on the final hidden state, one per future token."""

    type_name: ClassVar[str] = "MEDUSA"


@dataclass(frozen=True)
class MedusaOptions(DraftOptions):
    """Options of ``medusa`` (Medusa, sections 2.1.2 and 2.3.3), which are those of all strategies.

    Attributes:
        tree: ``sparse``: 15 draft tokens, most of them under likely ones. ``chain``: each head's
            likeliest token only, as in blockwise parallel decoding. Or what :class:`DraftOptions`
            says; rank paths are Medusa's choices.
    """


class MedusaDrafter(HeadDrafter):
    """Trees of the heads' likeliest tokens."""

    options: MedusaOptions

    def __init__(self, model: Any, options: MedusaOptions, adapter: ActiveAdapter):
        weights = adapter.weights()
        source = tree_source(options, self.trees, model, adapter, len(weights[WEIGHTS]))
        super().__init__(model, options, weights, source)


_PREFIX = r"(?:module\.)?(?:(?:.+\.)?medusa(?:_heads?)?\.)?"
#: Head, block and part.
_BLOCK = re.compile(
    _PREFIX + r"(?:(\d+)\.(?:medusa_layers\.)?(\d+)\.linear\.|blocks\.(\d+)\.layers\.(\d+)\.)"
    r"(weight|bias)"
)
#: Head, and the number of blocks before it.
_PROJECTION = re.compile(_PREFIX + r"(?:(\d+)\.(\d+)|lm_heads\.(\d+)|(\d+)\.lm_head)\.weight")
#: Head and block, rank, and part, of LMDeploy.
_BY_RANK = re.compile(r"medusa\.(\d+\.\d+\.(?:linear\.)?)(\d+)\.(weight|bias)")
#: Files that hold heads, the first one of these in a folder.
FILES = (
    "medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors",
    "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "rank0.safetensors",
)  # fmt: skip

#: (head, block) or (head,)
_Key = tuple[int, ...]


def wants(name: str) -> bool:
    return any(kind.fullmatch(name) for kind in (_BLOCK, _PROJECTION, _BY_RANK))


def convert(
    tensors: Mapping[str, Tensor], _: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields of ``MedusaConfig`` and the adapter's parameters, from published tensors by name.

    Raises:
        ValueError: there are no heads, or tensors are missing, duplicate or do not fit together.
    """
    parts: dict[str, dict[_Key, Tensor]] = {"weight": {}, "bias": {}}
    projections: dict[_Key, Tensor] = {}
    ends: dict[int, int] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name!r} is of type {tensor.dtype}: heads are floating point.")
        if match := _BY_RANK.fullmatch(name):
            place, rank, part = match.groups()
            if int(rank[:9]):
                raise ValueError(f"{name!r}: heads split over ranks are not read, only rank 0.")
            name, tensor = place + part, tensor.T if tensor.ndim == 2 else tensor
        if match := _BLOCK.fullmatch(name):
            *numbers, part = match.groups()
            _put(parts[part], _key(name, *(n for n in numbers if n is not None)), name, tensor)
        elif match := _PROJECTION.fullmatch(name):
            head, end, *others = match.groups()
            key = _key(name, *(number for number in (head, *others, end) if number is not None))
            _put(projections, key[:1], name, tensor)
            if end is not None:
                ends[key[0]] = key[1]
    blocks = parts["weight"]
    if not blocks:
        raise ValueError(
            "it holds no heads: no '0.0.linear.weight' nor 'blocks.0.layers.0.weight', with "
            "'medusa_head.' or the like before it"
        )
    heads, layers = (1 + max(key[at] for key in blocks) for at in (0, 1))
    wanted = [(head, layer) for head in range(heads) for layer in range(layers)]
    hidden = next(iter(blocks.values())).shape[-1]
    weights = _stacked("block", blocks, wanted, (hidden, hidden))
    biases = weights.new_zeros(len(wanted), hidden)
    if parts["bias"]:
        biases = _stacked("bias", parts["bias"], wanted, (hidden,))
    result = {WEIGHTS: weights, BIASES: biases}
    result = {name: one.unflatten(0, (heads, layers)) for name, one in result.items()}
    shared = not projections or (set(projections) == {(0,)} and heads > 1)  # a copy of the base's
    if not shared:
        for head, end in ends.items():
            if end != layers:
                raise ValueError(
                    f"head {head} has its projection behind {end} blocks, but {layers} blocks."
                )
        vocab = len(next(iter(projections.values())))
        keys = [(head,) for head in range(heads)]
        result[PROJECTION] = _stacked("projection", projections, keys, (vocab, hidden))
    projection = "shared" if shared else "own"
    return {"num_heads": heads, "num_layers": layers, "projection": projection}, result


def _key(name: str, *numbers: str) -> _Key:
    """The numbers in a tensor's name: the head, and the block or the number of blocks."""
    key = tuple(int(number[:9]) for number in numbers)
    if any(number > most for number, most in zip(key, (MAX_FUTURE - 1, MAX_BLOCKS))):
        raise ValueError(
            f"{name[:80]!r}: at most {MAX_FUTURE} heads of {MAX_BLOCKS} blocks each are read."
        )
    return key


def _put(found: dict[_Key, Tensor], key: _Key, name: str, tensor: Tensor) -> None:
    if key in found:
        raise ValueError(f"{name!r} is there twice, under different names.")
    found[key] = tensor


def _stacked(
    what: str, found: Mapping[_Key, Tensor], wanted: Sequence[_Key], shape: tuple[int, ...]
) -> Tensor:
    """One tensor of those of all heads, which must have them all, of this shape."""
    for key in wanted:
        if key not in found:
            block = f", block {key[1]}" if len(key) > 1 else ""
            raise ValueError(f"head {key[0]}{block} has no {what}, others have one.")
        if found[key].shape != shape:
            raise ValueError(
                f"a tensor of head {key[0]} has shape {tuple(found[key].shape)}, expected {shape}."
            )
    unknown = found.keys() - set(wanted)
    if unknown:
        raise ValueError(f"there is a {what} of head {min(unknown)[0]}, which has no blocks.")
    return torch.stack([found[key] for key in wanted])


METHOD = Method(
    name="medusa",
    summary="heads on the final hidden state predict the next tokens",
    options=MedusaOptions,
    drafter=MedusaDrafter,
    adapter_config=MedusaConfig,
    adapter_module=HeadsAdapter,
    objective=heads_loss,
    needs_adapter=True,
    training={"learning_rate": 3e-3, "num_train_epochs": 8},
    trained=TRAINED,
    published=Published(wants, convert, FILES),
)
