"""What formats are made of: tables of names and fields, layers, and draft vocabularies."""

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.config import VOCABULARY, check_read_layers
from hf_spec.adapters.layer import Adapter
from hf_spec.core.checks import MAX_SIZE, check_count
from hf_spec.methods.registry import Method
from hf_spec.modeling_patches.weights import is_plain, is_updated, output_bias, output_weight
from hf_spec.predict.blocks import HEADS
from hf_spec.predict.decoder import LAYER_TYPES, SIZES, LayerType
from hf_spec.predict.markov import HEAD
from hf_spec.tools.hub import is_repository

#: Fields of an adapter's config or of another program's, and tensors by name.
Files = tuple[dict[str, Any], dict[str, Tensor]]
#: See :attr:`Reader.share`.
Share = Callable[[Any, Any, dict[str, Tensor]], tuple[Any, dict[str, Tensor]]]


@dataclass(frozen=True)
class Reader:
    """How checkpoints of other programs become adapters of a method.

    Attributes:
        wants: whether the tensor of a name belongs to the adapter; files may contain others, too.
        convert: given tensors by name and the content of the ``config.json`` beside them (empty if
            there is none), returns fields of the adapter's config and its parameters; raises a
            ValueError, which names tensor or field, if they do not fit.
        recognizes: given that ``config.json`` and the names of all tensors, whether a checkpoint
            is one of this method.
        share: given the base model, the adapter's config and parameters, returns these two without
            what the base has, too; None if all is kept.
    """

    wants: Callable[[str], bool]
    convert: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Files]
    recognizes: Callable[[Mapping[str, Any], Collection[str]], bool]
    share: Share | None = None


#: Given the base model and the active adapter, returns files by name, of JSON or of tensors, as
#: another program reads them; raises a ValueError if it cannot read such an adapter.
Writer = Callable[[Any, Adapter], dict[str, Any]]
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def formats_of(method: Method, name: str) -> Mapping[str, Any]:
    """``READERS`` or ``WRITERS`` of the module of a method's formats; empty if it has none."""
    return getattr(importlib.import_module(method.formats), name, {}) if method.formats else {}


# -- tensors -------------------------------------------------------------------------------------


def renamed(
    tensors: Mapping[str, Tensor], prefixes: Iterable[tuple[str, str]]
) -> dict[str, Tensor]:
    """Tensors with prefixes of their names replaced, one after another; a ValueError if two have
    one name then."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (own := own_name(name, prefixes)) in found:
            raise ValueError(f"{name!r} is there twice, under different names")
        found[own] = tensor
    return found


def own_name(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """See :func:`renamed`."""
    for old, new in prefixes:
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return name


def without_copy(
    model: Any, config: Any, tensors: dict[str, Tensor], *, name: str, **changed: Any
) -> tuple[Any, dict[str, Tensor]]:
    """:attr:`Reader.share` of decoders: leaves out a matrix of embeddings if it is the base's, and
    raises a ValueError if the base's last layer is read.

    Args:
        name: of the tensor, :data:`HEAD` or input embeddings.
        changed: fields of the config without the matrix.
    """
    check_read_layers(model, config.layers or ())
    of_output, own, ids = name == HEAD, tensors.get(name), tensors.get(VOCABULARY)
    module = model.get_output_embeddings() if of_output else model.get_input_embeddings()
    rows = output_weight(model) if of_output else getattr(module, "weight", None)
    if own is None or rows is None or rows.is_meta or is_updated(module) or not is_plain(rows):
        return config, tensors
    if of_output and ids is not None:
        rows = rows[ids.to(rows.device)]
    biased = of_output and output_bias(model) is not None
    if biased or rows.shape != own.shape or not torch.equal(own.to(rows), rows):
        return config, tensors
    kept = {other: one for other, one in tensors.items() if other != name}
    return replace(config, **changed), kept


#: What is added to a draft token's index to get its id, and a mask of all ids.
OFFSETS, MASK = "d2t", "t2d"
#: Tensors with a row for each draft token.
PER_TOKEN = {HEAD, *(head.output for head in HEADS.values())}


def take_vocabulary(tensors: dict[str, Tensor], known: int, stated: int | None) -> int:
    """Replace ``d2t`` and ``t2d`` by the ids of draft tokens, of a vocabulary of ``known`` tokens;
    returns their number, as ``config.json`` has ``stated`` it, 0 for all."""
    head, marked = tensors.get(HEAD), (tensors.pop(OFFSETS, None), tensors.pop(MASK, None))
    if head is not None:
        if head.ndim != 2 or not len(head):
            raise ValueError(
                f"{HEAD!r} has shape {tuple(head.shape)}, expected (tokens, hidden_size)"
            )
        if stated and stated != len(head):
            raise ValueError(
                f"{HEAD!r} has {len(head)} rows, but draft_vocab_size={stated!r} in config.json"
            )
        stated = len(head)
    ids = _draft_ids(*marked, known, stated)
    if ids is None:
        return 0
    if len(ids) != (stated or max(len(ids), 1)):
        raise ValueError(f"{OFFSETS!r} or {MASK!r} names {len(ids)} tokens, expected {stated}")
    ids, order = ids.sort()
    if int(ids[0]) < 0 or int(ids[-1]) >= known or not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError(
            f"{OFFSETS!r} leads to ids {int(ids[0])} to {int(ids[-1])}: it must lead to {len(ids)} "
            f"different ones of the vocabulary, 0 to {known - 1}"
        )
    for name in tensors.keys() & PER_TOKEN:
        if tensors[name].shape[:1] == order.shape:  # others are complained about later
            tensors[name] = tensors[name][order]
    if len(ids) == known:
        return 0
    tensors[VOCABULARY] = ids
    return len(ids)


def _draft_ids(
    shift: Tensor | None, marks: Tensor | None, known: int, stated: int | None
) -> Tensor | None:
    """The ids of draft tokens, by `OFFSETS` or `MASK`; None if all are drafted."""
    if shift is not None:
        if shift.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{OFFSETS!r} is of type {shift.dtype}: offsets are whole numbers")
        return shift.long().flatten() + torch.arange(shift.numel(), device=shift.device)
    if not stated or stated == known:
        return None
    if marks is None or marks.dtype != torch.bool:
        raise ValueError(
            f"{stated} of {known} tokens are drafted, and there is no tensor {OFFSETS!r} that says "
            "which"
        )
    return marks.nonzero()[:, 0]


def put_vocabulary(tensors: dict[str, Tensor], known: int) -> None:
    """The inverse of :func:`take_vocabulary`."""
    ids = tensors.pop(VOCABULARY, None)
    if ids is not None:
        tensors[OFFSETS] = ids - torch.arange(len(ids), device=ids.device)
        tensors[MASK] = torch.isin(torch.arange(known, device=ids.device), ids)


# -- config.json ---------------------------------------------------------------------------------

#: The field that names the kind in speculators' format, and that with the config of its layers.
KIND, LAYERS = "speculators_model_type", "transformer_layer_config"
#: DeepSpec's field that names the layers that are read.
OF_DEEPSPEC = "target_layer_ids"
#: Types of layers that all formats have; DeepSpec's has others, too.
USUAL = ("llama", "qwen3")
#: Any value of a field.
ANY: Any = object()


def group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A group of fields; empty if there is none, ``config`` itself without a name."""
    found: Any = (config.get(name) or {}) if name else config
    if not isinstance(found, Mapping):
        raise ValueError(f"{name}={found!r} in config.json: it must be an object")
    return found


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of several groups that are not null; of those with one name, the first counts."""
    return {
        name: value for part in reversed(parts) for name, value in part.items() if value is not None
    }


def fields_of(said: Mapping[str, Any], table: Mapping[str, str]) -> dict[str, Any]:
    """Fields of ours by a table of theirs: those that are there."""
    return {ours: said[theirs] for ours, theirs in table.items() if theirs in said}


def check_known(fields: Mapping[str, Any], known: Mapping[str, Any], where: str = "") -> None:
    """Raise a ValueError for a field that is not known, or has another value than it must have."""
    for name, value in fields.items():
        if name not in known and not name.startswith("_"):
            raise ValueError(f"{where}{name}={value!r} in config.json: it is not known")
        wanted = known.get(name, ANY)
        if wanted is not ANY and value not in (wanted, None):
            raise ValueError(f"{where}{name}={value!r} in config.json: {wanted!r} is read")


def check_size(name: str, value: Any, low: int = 1, high: int = MAX_SIZE) -> None:
    """Raise a ValueError unless a field holds a number in these limits."""
    check_count(f"{name} in config.json", value, low, high)


def described(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of ``config.json`` that describes the layers."""
    if not config:
        raise ValueError(
            "there is no config.json beside it, which says what its numbers mean: take it from "
            "where the weights come from"
        )
    layers: Any = config.get(LAYERS) if config.get(KIND) else config
    if not isinstance(layers, Mapping):
        raise ValueError(f"config.json has no {LAYERS}, which describes its layers")
    return layers


def layer_type(
    layers: Mapping[str, Any], types: Collection[str], default: str | None, deepspec: bool
) -> LayerType:
    """The type of a checkpoint's layers, one of ``types``; other types are named after the base,
    and the layers of the type ``default``, if there is one."""
    name = layers.get("model_type")
    kind = LAYER_TYPES.get(str(name))
    if kind is None or kind.name not in types:
        if default is None:
            known = ", ".join(types)
            raise ValueError(f"model_type={name!r} in config.json: layers of {known} are read")
        kind = LAYER_TYPES[default]
    if kind.name not in USUAL and not deepspec:
        raise ValueError(
            f"config.json has model_type={name!r}: such layers are read with {OF_DEEPSPEC}, as "
            "DeepSpec writes them"
        )
    return kind


def layer_fields(layers: Mapping[str, Any], kind: LayerType) -> dict[str, Any]:
    """Fields of :class:`DecoderConfig` that describe layers."""
    layers = kind.flat(layers)
    for name in ("hidden_size", "num_attention_heads"):
        check_size(name, layers.get(name))
    heads, dim = layers["num_attention_heads"], layers.get("head_dim")
    return {
        "architecture": kind.name,
        "num_layers": layers.get("num_hidden_layers", 1),
        "embedding_scale": kind.embedding_scale(layers["hidden_size"]),
        **{name: layers.get(name) for name in SIZES},
        "num_key_value_heads": layers.get("num_key_value_heads") or heads,
        "head_dim": layers["hidden_size"] // heads if dim is None else dim,
        "hidden_act": layers.get("hidden_act", "silu"),
        "rms_norm_eps": layers.get("rms_norm_eps", 1e-6),
        "rope_parameters": layers["rope_parameters"],
        **{name: layers[name] for name in kind.own},
    }


def written_layers(config: Any, known: int) -> dict[str, Any]:
    """The inverse of :func:`layer_fields`: the config of layers of a model with so many tokens."""
    return {
        "model_type": config.architecture,
        **{name: getattr(config, name) for name in config.of_layers},
        "num_hidden_layers": config.num_layers,
        "rope_parameters": dict(config.layer_config().rope_parameters),
        "vocab_size": known,
        "tie_word_embeddings": False,
    }


def numbered(layers: Any, first: int) -> list[int]:
    """Layers as ``output_hidden_states`` numbers them, of which ``first`` is the one with number 0
    in a format."""
    if not isinstance(layers, list) or not layers or any(type(one) is not int for one in layers):
        raise ValueError(f"config.json has no list of the base's layers that are read: {layers!r}")
    return [one + first for one in layers]


def speculators_config(
    model: Any, config: Any, kind: str, architecture: str, drafted: int, layers: dict[str, Any]
) -> dict[str, Any]:
    """What ``config.json`` of all of speculators' drafters begins with, as its version 0.9.0 writes
    it, which vLLM reads; ``drafted`` is the number of draft tokens of a step."""
    names = [config.base_model_name_or_path, model.config.name_or_path]
    verifier = next(filter(is_repository, names), None) or next(filter(None, names), None)
    return {
        "architectures": [architecture],
        KIND: kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy",
            "proposal_methods": [{
                "proposal_type": "greedy", "speculative_tokens": drafted, "accept_tolerance": 0.0,
                "verifier_accept_k": 1,
            }],
            "verifier": {
                "name_or_path": verifier,
                "architectures": model.config.architectures or [type(model).__name__],
            },
        },
        LAYERS: layers,
        "tie_word_embeddings": False,
    }  # fmt: skip


def refuse(cases: Mapping[str, Any]) -> None:
    """Raise a ValueError with the first message that is true."""
    for message, wrong in cases.items():
        if wrong:
            raise ValueError(message)
