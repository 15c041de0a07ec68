"""Converts masks (batch, 1, query, key) to the format that a model's attention takes.

This module knows the attention back ends of Transformers and how models receive masks, but no
trees. :class:`TreeAttention` converts masks and provides the changes that such forwards need: a
back end that takes the masks, and the architecture's own patches.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_spec.modeling_patches.fingerprint import is_users_attention
from hf_spec.modeling_patches.per_call import Changes, Replaceable, step_aside
from hf_spec.modeling_patches.weights import placement

logger = logging.getLogger(__name__)

#: The attention whose trees run in the kernel of :mod:`.tree_attention`; all else runs in sdpa.
TREE_ATTENTION = "tree_attention"


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, divides: bool = False, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention under masks of trees or of ``sdpa``, by the first of these that has it: the kernel
    of :mod:`.tree_attention`, for packed masks; the model's own eager attention, for ``softcap``
    and ``s_aux`` (sinks); ``sdpa``.

    With a mask and several queries, the stock ``sdpa`` repeats the KV of a layer for each query
    head in each step. Here, under a tree's mask, the query heads of a group are folded into the
    query dimension instead.

    Args:
        query: ``(batch, heads, query, dim)``.
        key, value: ``(batch, kv_heads, key, dim)``.
        divides: whether rows of different lengths attend in parts, see :func:`parts_of`.
        attention_mask: of a tree, packed or what is added to scores ``(batch, 1, query, key)``;
            boolean, or None, as for ``sdpa``.
    """
    options = {"dropout": dropout, "scaling": scaling, **kwargs}
    (batch, heads, length, dim), kv_heads = query.shape, key.shape[1]
    if attention_mask is not None and attention_mask.dtype == torch.int64:
        if not dropout and all(kwargs.get(name) is None for name in _NOT_IN_KERNEL):
            from hf_spec.modeling_patches.tree_attention import tree_attention

            scale = dim**-0.5 if scaling is None else scaling
            cap, near = kwargs.get("softcap") or 0.0, kwargs.get("sliding_window") or 0
            sinks = kwargs.get("s_aux")
            return tree_attention(query, key, value, attention_mask, sinks, scale, cap, near), None
        attention_mask = _dense(attention_mask, key.shape[2], query.dtype)
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        added = _eager_mask(attention_mask, query, key.shape[2])
        eager = _eager_attention(module)
        return eager(module, query, key, value, added, **options)
    mask, groups = attention_mask, heads // kv_heads
    if mask is None or mask.dtype == torch.bool or mask.shape[1] != 1:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    parts = _parts(mask) if divides else [(slice(0, batch), key.shape[2])]
    if groups == 1 and len(parts) == 1:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    folded, added = query.reshape(batch, kv_heads, groups * length, dim), _tiled(mask, groups)
    outputs = [
        torch.nn.functional.scaled_dot_product_attention(
            folded[rows], key[rows, :, :width], value[rows, :, :width],
            attn_mask=added[rows, :, :, :width], dropout_p=dropout, scale=scaling,
        )
        for rows, width in parts
    ]  # fmt: skip
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    output = output.reshape(batch, heads, length, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


def _eager_mask(mask: Tensor | None, query: Tensor, keys: int) -> Tensor:
    """What eager attention adds to scores, by a mask as :func:`attend` takes it."""
    if mask is None:  # causal, and no key before the first query but for one query
        shape = 1, 1, query.shape[2], keys
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(keys - query.shape[2])
    if mask.dtype != torch.bool:
        return mask
    # As in masks of eager attention: padding sees nothing, and its softmax must not be empty.
    return _added(mask, query.dtype).clamp_(min=torch.finfo(query.dtype).min)


AttentionInterface.register(TREE_ATTENTION, attend)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)

#: Arguments of attention functions that the kernel has not: chosen keys.
_NOT_IN_KERNEL = ("indices", "block_indices", "sinks")


def unpacked(mask: Tensor, slots: int) -> Tensor:
    """The boolean mask ``(batch, 1, query, slots)``, True = attend, of a packed one.

    Args:
        mask: ``(batch, 1, query, 2 + 2 * words)`` int64. A query sees the slots from the first
            number to before the second, and of each word, which is a pair of numbers, slot
            ``first + j`` where bit ``j`` of ``second`` is set. All but the first number and the
            bits are the same for all queries of a row.
    """
    slot, column = torch.arange(slots, device=mask.device), mask[..., None]
    seen = (slot >= column[:, :, :, 0]) & (slot < column[:, :, :, 1])
    for word in range(2, mask.shape[3], 2):
        bit = slot - column[:, :, :, word]
        is_set = (column[:, :, :, word + 1] >> bit.clamp(0, 63)) & 1 != 0
        seen = seen | (is_set & (bit >= 0) & (bit < 64))
    return seen


def _dense(mask: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """What a packed mask adds to scores; made once per forward, not once per layer."""
    made: Tensor | None = getattr(mask, "_dense", None)
    if made is None or made.shape[3] != slots or made.dtype != dtype:
        made = mask._dense = _added(unpacked(mask, slots), dtype)  # type: ignore[attr-defined]
    return made


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as numbers to be added to scores."""
    # -inf, which no score outweighs; every query sees itself, so that no softmax is empty.
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, -torch.inf)


def _eager_attention(module: Any) -> Any:
    """The eager attention of the file that a module's class, or a base of it, comes from."""
    name = "eager_attention_forward"  # in all of Transformers' files of models
    files = (vars(sys.modules[cls.__module__]) for cls in type(module).__mro__)
    return next(file[name] for file in files if name in file)


def _tiled(mask: Tensor, groups: int) -> Tensor:
    """``mask`` repeated along the query dimension; made once per forward, not once per layer."""
    made = getattr(mask, "_tiled", None)
    if made is None or made.shape[2] != groups * mask.shape[2]:
        made = mask._tiled = mask.repeat(1, 1, groups, 1)  # type: ignore[attr-defined]
    return made


#: What a call of attention costs on a CPU, in keys of a row that it could read instead. On two
#: cores of an AMD EPYC, with 9 heads of 64: 12 to 30 us a call, 0.09 to 0.16 us a key.
CALL = 256
#: Widths are multiples of this many keys, as kernels want aligned masks.
ALIGNED = 16

#: Rows of a batch, and how many keys the longest of them sees.
Part = tuple[slice, int]


def parts_of(widths: Sequence[int], most: int) -> list[Part]:
    """Neighboring rows of a batch that attend together, so that short rows do not read what is
    masked for them, at the least cost.

    Args:
        widths: keys that each row reads.
        most: keys that there are.
    """
    widths = [min(-(-width // ALIGNED) * ALIGNED, most) for width in widths]
    if len(widths) * max(widths) - sum(widths) <= CALL:
        return [(slice(0, len(widths)), most)]
    best: list[tuple[int, list[Part]]] = [(0, [])]  # of the first rows
    for end in range(1, len(widths) + 1):
        longest, found = 0, []
        for first in range(end - 1, -1, -1):
            longest = max(longest, widths[first])
            found.append((best[first][0] + (end - first) * longest + CALL, first, longest))
        cost, first, longest = min(found)
        best.append((cost, [*best[first][1], (slice(first, end), longest)]))
    return best[-1][1]


def _parts(mask: Tensor) -> list[Part]:
    """:func:`parts_of` what is added to scores; made once per forward, not once per layer."""
    made: list[Part] | None = getattr(mask, "_parts", None)
    if made is None:
        most = mask.shape[3]
        seen = (mask > -torch.inf).any(2)[:, 0].int()
        widths = most - seen.flip(1).argmax(1)
        made = mask._parts = parts_of(widths.tolist(), most)  # type: ignore[attr-defined]
    return made


#: Kinds of layers with a recurrent state and no attention, as configs name them.
RECURRENT = ("linear_attention", "conv", "mamba")
#: Attention beside a recurrent state, and what some models call its masks.
BESIDE_STATES = {"hybrid": "full_attention"}


class Local(NamedTuple):
    """What a layer of local attention sees: the query's position and those right before it, a
    sliding window; or its own chunk of a sequence that is cut into chunks of this size."""

    size: int
    chunked: bool = False


class TreeAttention:
    """How a model runs forwards with 4-D masks: masks are converted, and ``changes`` run.

    ``eager`` and functions that the user has registered stay as they are; ``sdpa`` becomes
    :func:`attend` where the model looks attention up by name, and so does, with one warning,
    anything else but ``tree_attention``: flash takes no such mask, and flex would be compiled for
    trees of every size, which on CPUs takes minutes or fails.

    Args:
        checkpointing: whether forwards are recomputed for their gradients, which rules out changes;
            ``sdpa`` then stays, too.
        beside: the model that this one drafts for; if trees of it run in the kernel, those of this
            one do so in the place of ``sdpa``, too.

    Attributes:
        locals: what each kind of layer sees (None = all), keyed as the model's forward wants its
            masks; a single entry "" where it wants one mask.
        packs: whether masks of trees are packed, see :func:`unpacked`.
        takes_ragged: whether queries may come without padding.
        divides: whether rows of different lengths attend in parts. The host reads how long they
            are, so that this is for a CPU, and for forwards that are not recorded or compiled.
        ragged: what puts their padding back in the running forward (``pad_heads``), and takes it
            from the output (``unpad``); None if there is padding. Keys, values and masks have it.
        changes: the changes that forwards run with.

    Raises:
        ValueError: if the model's attention needs changes that are ruled out, or is
            ``tree_attention`` and there is no such kernel for it.
    """

    def __init__(self, model: Any, checkpointing: bool = False, beside: Any = None) -> None:
        step_aside(model)
        self.locals = local_attention(model)
        self.changes = Changes()
        self.takes_ragged = self.divides = False
        self.ragged: Any = None
        current = _text(model)._attn_implementation
        users = is_users_attention(current)
        #: Whether masks stay boolean: those of a user's function that takes the masks of sdpa.
        self._boolean = users and ALL_MASK_ATTENTION_FUNCTIONS.get(current) is sdpa_mask
        self.packs = runs_kernel(model) and not checkpointing
        check_attention(model)
        if beside is not None and runs_kernel(beside) and current == "sdpa":
            self.packs = _no_kernel(model) is None
        if checkpointing:
            if not users and current not in ("eager", "sdpa", TREE_ATTENTION):
                raise ValueError(
                    f"gradient_checkpointing with attention {current!r}, which takes tree masks "
                    "only with changes of ours: activations are computed again without them. Train "
                    "without checkpointing, or with attn_implementation='sdpa'."
                )
        elif not users and current not in ("eager", TREE_ATTENTION):
            self._take_over(model, current)

    def _take_over(self, model: Any, current: str) -> None:
        """Let attention that is looked up by name take tree masks."""
        by_name = self.packs or getattr(model, "_supports_attention_backend", False)
        if by_name and current in ALL_ATTENTION_FUNCTIONS:
            stock = ALL_ATTENTION_FUNCTIONS[current]
            if not isinstance(stock, Replaceable):
                stock = Replaceable(AttentionInterface, current, stock)
                AttentionInterface.register(current, stock)
            self.changes.instead(AttentionInterface, current, self._attend)
            self.takes_ragged = not _chooses_keys(model)
            if current != "sdpa":
                _warn_switched(current)
        elif current != "sdpa":
            raise ValueError(
                f"attn_implementation={current!r} takes no arbitrary mask, and "
                f"{type(model).__name__} chooses its attention when it is built: load it with "
                "attn_implementation='sdpa' or 'eager'."
            )

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """:func:`attend` with queries ``(1, heads, tokens, dim)`` where they are :attr:`ragged`."""
        ragged, kwargs["divides"] = self.ragged, self.divides
        if ragged is None:
            return attend(module, query, key, value, *args, **kwargs)
        output, weights = attend(module, ragged.pad_heads(query), key, value, *args, **kwargs)
        return ragged.unpad(output), weights

    def convert(self, masks: dict[str, Tensor], dtype: torch.dtype) -> Any:
        """Masks, boolean (True = attend) or packed, keyed like ``locals`` -> the forward's
        attention_mask."""
        made = {id(mask): mask for mask in masks.values()}
        for key, mask in made.items():
            # Additive for sdpa, too: it would otherwise convert a boolean mask in every layer.
            if mask.dtype == torch.bool and not self._boolean:
                made[key] = _added(mask, dtype)
        if "" in masks:
            return made[id(masks[""])]
        by_kind = {kind: made[id(mask)] for kind, mask in masks.items()}
        by_kind |= {kind: by_kind[name] for kind, name in BESIDE_STATES.items() if name in by_kind}
        return by_kind | dict.fromkeys(RECURRENT)  # which take no mask of a tree


#: Compute capability of the first NVIDIA GPUs that the kernel runs on.
OLDEST = 8, 0


def runs_kernel(model: Any) -> bool:
    """Whether trees of a model are to run in the kernel of :mod:`.tree_attention`."""
    return bool(_text(model)._attn_implementation == TREE_ATTENTION)


def attention_beside(model: Any, supports_sdpa: bool = True) -> str:
    """The attention of layers that draft beside a model."""
    if runs_kernel(model):
        return TREE_ATTENTION
    return "sdpa" if supports_sdpa else "eager"


def check_attention(model: Any) -> None:
    """Check that trees of a model can run in the kernel of :mod:`.tree_attention`, if its attention
    is ``tree_attention``.

    Raises:
        ValueError: they cannot; the message says why.
    """
    if runs_kernel(model) and (why := _no_kernel(model)):
        raise ValueError(
            f"attn_implementation={TREE_ATTENTION!r}: {why}. Give attn_implementation='sdpa'."
        )


def _chooses_keys(model: Any) -> bool:
    """Whether a model's attention is indexed: it chooses the keys that each query sees."""
    layers = DynamicCache(config=_text(model)).layers
    return any(type(layer).__name__ == "DynamicIndexedLayer" for layer in layers)


def _no_kernel(model: Any) -> str | None:
    """Why trees of a model cannot run in the kernel; None if they can."""
    name, device = type(model).__name__, placement(model).device
    if "ALL_ATTENTION_FUNCTIONS" not in vars(sys.modules[type(model).__module__]):
        return f"{name} has attention of its own"
    if _chooses_keys(model):
        return f"{name} chooses the keys that each query sees"
    if importlib.util.find_spec("triton") is None:
        return "its kernel needs Triton (pip install triton), which is not installed"
    from hf_spec.modeling_patches.tree_attention import INTERPRETS

    if device.type not in ("cuda", "xpu") and not (INTERPRETS and device.type == "cpu"):
        return f"its kernel is for GPUs, and the model is on {device}"
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST:  # 64 nodes do not fit into the shared memory of older ones
            return f"its kernel needs compute capability 8.0, and {device} has {capability}"
    return None


def _text(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def local_attention(model: Any) -> dict[str, Local | None]:
    """The masks that the model's forward expects: see :attr:`TreeAttention.locals`.

    Raises:
        ValueError: for a mixture of layers that the model does not name in its config.
    """
    text = _text(model)
    layers = DynamicCache(config=text).layers
    kinds = getattr(text, "layer_types", None) or [""] * len(layers)
    found: dict[str, Local | None] = {}
    for kind, layer in zip(kinds, layers):
        kind = BESIDE_STATES.get(kind, kind)
        if kind in RECURRENT or type(layer).__name__ == "DummyLayer":
            continue  # no attention, or that to the KV of an earlier layer of its type
        local = None
        if getattr(layer, "is_sliding", False):  # so is the cache layer of chunked attention
            local = Local(layer.sliding_window, kind == "chunked_attention")
        if found.setdefault(kind, local) != local:
            raise ValueError(
                f"{type(model).__name__}: layers of type {kind!r} (layer_types in its config) "
                "differ in attention window: masks cannot be assigned to layers. Generate without "
                "a strategy."
            )
    distinct = set(found.values())
    return {"": distinct.pop() if distinct else None} if len(distinct) <= 1 else found


def window_sizes(model: Any) -> list[int]:
    """The windows or chunks, in tokens, of a model's kinds of layers that have one."""
    return [local.size for local in local_attention(model).values() if local is not None]


def sees_beyond_windows(model: Any, width: int) -> bool:
    """Whether tokens of a prompt of this width see others that the windows of the model's cache
    drop: it slides, and none of the model's code makes masks that do, as in Moshi. The states of
    such a prompt are others if it runs in parts."""
    if not any(size < width for size in window_sizes(model)):
        return False
    code = {sys.modules.get(type(module).__module__) for module in model.modules()}
    names = {name for module in code if module is not None for name in vars(module)}
    return not any("mask" in name and re.search("sliding|chunk|generate", name) for name in names)


@functools.cache  # once for each
def _warn_switched(current: str) -> None:
    logger.warning(
        "attn_implementation=%r is not used for tree masks: speculative steps use sdpa instead "
        "(the prefill keeps %r).", current, current,
    )  # fmt: skip
