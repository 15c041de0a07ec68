"""Taking over the states of Transformers' caches, and giving them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache

from hf_spec.cache.buffers import aligned, signature
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core import mask as masks
from hf_spec.modeling_patches.fingerprint import origin
from hf_spec.modeling_patches.support import LAYERS

#: Packages whose methods of caches are Transformers' own.
_STOCK = ("transformers.", "torch.", "abc.", "typing.")


def take_over(
    cache: TreeCache, source: DynamicCache, mask: Tensor | None = None, more: int | None = None,
    front: int = 0, seq: int | None = None,
) -> None:  # fmt: skip
    """Take over the states of a prefill, which is emptied layer by layer: never are both whole.

    Args:
        cache: a new cache.
        source: a cache of full-attention or sliding-window layers.
        mask: ``(batch, seq)`` bool, True for real tokens; None if all are. Padding is dropped,
            wherever it is.
        more: most tokens that may follow in a row; None if that is not known.
        front: front slots to allocate (rounded up); see :meth:`AttentionStates.set_front`.
        seq: tokens in each row, padding included, if no layer of ``source`` has keys.
    """
    held = {
        (index, name): tensor
        for index, layer in enumerate(source.layers)
        for name, tensor in _held(layer).items()
    }
    count = source.get_seq_length() if held or seq is None else seq
    order, lengths = None, [count] * cache.batch_size
    if mask is not None:
        mask = mask.bool()
        lengths = mask.sum(-1).tolist()
        # Real tokens first, in order: slot j of a row gets its j-th real token.
        order = torch.argsort(~mask, dim=-1, stable=True)[:, : max(lengths)]
    windowed = any(tensor.shape[2] < count for tensor in held.values())
    cache.set_lengths(lengths, lengths if windowed else None)
    states, layers = cache.states, source.layers
    states.windows = _windows(layers)
    states.front, states.limit = aligned(front), None if more is None else cache.max_length + more
    states.reserve(states.ahead(cache.max_length))
    left = Counter(index for index, _ in held)
    kinds = {key: signature(one, states.windows.get(key[0])) for key, one in held.items()}
    held.clear()
    for members in states.allocate(kinds):
        columns = _columns(cache, states.slots(states.windows.get(members[0][0])), order, count)
        for index, name in members:
            layer = layers[index]
            _copy_in(cache.layers[index].views[name], _held(layer)[name], columns, count)
            left[index] -= 1
            if not left[index]:
                _free(layer)
    if cache.recurrent is not None:
        cache.recurrent.take_over(layers, cache.host_lengths)


def _windows(layers: Sequence[Any]) -> dict[int, int]:
    """The windows of layers that slide, by their index."""
    sliding = ((i, layer) for i, layer in enumerate(layers) if getattr(layer, "is_sliding", False))
    return {index: layer.sliding_window for index, layer in sliding}


def _columns(cache: TreeCache, slots: int, order: Tensor | None, count: int) -> Tensor | None:
    """``(batch, slots)`` columns of the source, of ``count``, for the slots of a buffer; None if
    they are the same. ``order``: ``(batch, tokens)`` those of real tokens, None if all are."""
    if order is None and slots >= count:
        return None
    columns = masks.places(cache.lengths, slots)[:, : cache.max_length]
    return columns if order is None else order.gather(1, columns.clamp(max=order.shape[1] - 1))


def unpack_into(cache: TreeCache, target: DynamicCache) -> None:
    """Fill a user's ``DynamicCache`` in place, as plain generation would have left it.

    Layers that already hold states are left alone: they were never taken over, or are filled.

    Args:
        cache: holds the states of rows of one length, which it loses layer by layer unless compiled
            code of other calls will use its buffers.
        target: the cache to fill; sliding layers keep only their window.
    """
    seq = cache.uniform_length()
    if cache.recurrent is not None:
        for (kind, place, number), state in cache.recurrent.states():
            stock = target.layers[place]
            if kind == "conv":
                stock.has_previous_state[number] = False
                stock.update_conv_state(state, number)
            else:
                stock.update_recurrent_state(state, number)
    cache.states.leave_to_layers()
    for own, layer in zip(cache.layers, target.layers):
        if not own.is_initialized or not (layer.keys is None or layer.values is None):
            continue
        slides = getattr(layer, "is_sliding", False)
        first = max(seq - layer.sliding_window + 1, 0) if slides else 0
        states = {name: own.held(name, first, seq) for name in own.with_front}
        if not layer.is_initialized:
            layer.lazy_initialization(states["keys"], states["values"])
        if (index_keys := states.pop("indexer_keys", None)) is not None:
            layer.lazy_initialization_indexer(index_keys)
            layer.indexer_keys = index_keys[:, 0]
        if slides:
            layer.cumulative_length = seq
        layer.keys, layer.values = states["keys"], states["values"]
        if cache.states.is_empty:
            own.detach()


def check_packable(cache: Cache) -> None:
    """Raise a ValueError, with the cache or layer type, unless :func:`take_over` can take it, and
    it does nothing but keep states: its own methods are called no more."""
    remedy = "Pass a DynamicCache, the TreeCache of an earlier call, or no cache."
    if not isinstance(cache, Cache) or getattr(cache, "offloading", False):
        kind = "an offloaded cache" if isinstance(cache, Cache) else type(cache).__name__
        raise ValueError(f"the given cache is {kind}: it cannot hold a tree. {remedy}")
    kinds: list[Any] = [type(layer) for layer in getattr(cache, "layers", ())]
    kinds += filter(None, [getattr(cache, "layer_class_to_replicate", None)])
    for kind in kinds:
        # Subclasses of the dynamic layer quantize, compress, or are a user's.
        name = kind.__name__
        if name not in LAYERS or kind is not getattr(cache_utils, name, None):
            static = " For compiled steps give cache_implementation='static' instead."
            raise ValueError(
                f"the given cache has a layer of type {name}: rows cannot be rolled back there. "
                f"{remedy}{static if 'Static' in name else ''}"
            )
    leaves_out = "strategies keep states in a cache of their own, which would leave that out."
    if type(cache) not in (Cache, DynamicCache):
        raise ValueError(
            f"the given cache is of type {type(cache).__name__}, which may do more than keep "
            f"states: {leaves_out} {remedy}"
        )
    if replaced := sorted(_replaced(cache, *cache.layers)):
        raise ValueError(
            f"methods of the given cache are not Transformers' own ({', '.join(replaced)}): "
            f"{leaves_out} Generate without assistant_strategy."
        )
    lengths = {
        layer.keys.shape[2] for layer in cache.layers
        if getattr(layer, "keys", None) is not None and not getattr(layer, "is_sliding", False)
    }  # fmt: skip
    if len(lengths) > 1:
        raise ValueError(
            f"layers of the given cache hold {sorted(lengths)} keys: some attend to an image and "
            "not to tokens, and a tree's nodes go to all of them. Generate without "
            "assistant_strategy."
        )


def _replaced(*things: Any) -> set[str]:
    """Methods of caches and layers, or of their classes, that somebody has replaced."""
    kinds = {kind for thing in things for kind in type(thing).__mro__}
    names = {
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType) and not origin(value).startswith(_STOCK)
    }
    return names | {
        f"{type(thing).__name__}.{name}"
        for thing in things
        for name, value in vars(thing).items()
        if callable(value) and callable(getattr(type(thing), name, None))
    }


def _held(layer: Any) -> dict[str, Tensor]:
    """What a Transformers layer of attention holds, ``(batch, heads, kept, dim)`` each."""
    if getattr(layer, "keys", None) is None:
        return {}
    held = {"keys": layer.keys, "values": layer.values}
    if getattr(layer, "indexer_keys", None) is not None:
        held["indexer_keys"] = layer.indexer_keys[:, None]
    return held


def _free(layer: Any) -> None:
    for name in _held(layer):
        setattr(layer, name, None)


def _copy_in(target: Tensor, source: Tensor, columns: Tensor | None, seq: int) -> None:
    """Copy and pack states ``(batch, heads, kept, dim)``, the last ``kept`` of ``seq`` columns;
    ``columns`` ``(batch, slots)``: where each slot's state is, None if columns are slots.

    Slots of what a sliding layer dropped are outside every later query's window.
    """
    first = seq - source.shape[2]
    if columns is not None:
        places = (columns.to(source.device) - first).clamp(0, source.shape[2] - 1)
        source, first = source.take_along_dim(places[:, None, :, None], 2), 0
    target[:, :, first : first + source.shape[2]].copy_(source)
