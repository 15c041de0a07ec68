"""A boolean (batch, 1, query, key) mask -> what this model's attention takes.

Knows the attention back ends of Transformers and how models receive masks; knows nothing of trees.
``tree_attention(model)`` is entered around forwards with such masks: it switches to a back end that
takes them, enters the architecture's own patches, and yields the converter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_patches import alibi, local_attention

logger = logging.getLogger(__name__)

#: Architecture patches; each has ``applies(model)`` and ``tree_positions(model)``.
PATCHES: tuple[Any, ...] = (alibi, local_attention)

#: Name of the attention function that keeps grouped key-value heads as they are.
GROUPED_SDPA = "grouped_sdpa"


def grouped_sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``sdpa`` for masked grouped-query attention without copying keys and values per head.

    The stock function repeats every cached key and value for each query head when there is a mask
    and more than one query: a copy of the whole cache per layer and step. Here the query heads of a
    group are folded into the query dimension instead.

    Args:
        query: ``(batch, heads, query, dim)``.
        key, value: ``(batch, kv_heads, key, dim)``.
        attention_mask: ``(batch, 1, query, key)``; other kinds take the stock function.
    """
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    special = kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None
    if attention_mask is None or attention_mask.shape[1] != 1 or heads == kv_heads or special:
        stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return stock(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    groups = heads // kv_heads
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, kv_heads, groups * length, dim), key, value,
        attn_mask=_tiled(attention_mask, groups), dropout_p=dropout, scale=scaling,
    )  # fmt: skip
    output = output.reshape(batch, heads, length, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


def _tiled(mask: Tensor, groups: int) -> Tensor:
    """``mask`` repeated along the query dimension; made once per forward, not once per layer."""
    if torch.compiler.is_compiling():
        return mask.repeat(1, 1, groups, 1)
    made = getattr(mask, "_tiled", None)
    if made is None or made.shape[2] != groups * mask.shape[2]:
        made = mask._tiled = mask.repeat(1, 1, groups, 1)  # type: ignore[attr-defined]
    return made


AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)


class TreeAttention:
    """Converter yielded by :func:`tree_attention`.

    Attributes:
        windows: sliding-window size of each kind of layer (None = full attention), keyed as the
            model's forward wants its masks; a single entry "" where it wants one mask.
        wants_positions: whether :meth:`set_positions` must be called before each forward.
    """

    def __init__(
        self, windows: dict[str, int | None], setters: list[Callable[..., None]], flex: bool
    ):
        self.windows = windows
        self.wants_positions = bool(setters)
        self._setters = setters
        self._flex = flex

    def set_positions(self, query_positions: Tensor, key_positions: Tensor) -> None:
        """Token positions (batch, query) and (batch, key), for patches that need them."""
        for setter in self._setters:
            setter(query_positions, key_positions)

    def convert(self, masks: dict[str, Tensor], dtype: torch.dtype) -> Any:
        """Boolean masks (True = attend), keyed like ``windows`` -> the forward's attention_mask."""
        made: dict[int, Any] = {}
        for mask in masks.values():
            if id(mask) not in made:
                made[id(mask)] = _block_mask(mask) if self._flex else _additive(mask, dtype)
        if "" in masks:
            return made[id(masks[""])]
        return {kind: made[id(mask)] for kind, mask in masks.items()}


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    # Additive for sdpa, too: it would otherwise convert a boolean mask again in every layer.
    # -inf, which no score outweighs; every query sees itself, so that no softmax is empty.
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, -torch.inf)


def _block_mask(mask: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    batch, _, queries, keys = mask.shape

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask[b, 0, q, k]

    made: Any = create_block_mask(visible, batch, None, queries, keys, device=str(mask.device))
    made.tree_mask = mask
    return made


def narrowed_block_mask(mask: Any, pick: Callable[[Tensor], Tensor]) -> Any:
    """A block mask made by :meth:`TreeAttention.convert`, for some of its query rows.

    Args:
        mask: the block mask.
        pick: takes these rows of a boolean mask (batch, 1, query, key).
    """
    return _block_mask(pick(mask.tree_mask))


def mask_kinds(model: Any, sliding_windows: list[int | None]) -> dict[str, int | None]:
    """Which masks the model's forward wants.

    Args:
        model: a causal language model.
        sliding_windows: window of each layer, None for full attention.

    Raises:
        ValueError: for a mixture of layers that the model does not name in its config.
    """
    distinct = set(sliding_windows)
    if len(distinct) <= 1:
        return {"": distinct.pop() if distinct else None}
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    if types is None or len(types) != len(sliding_windows):
        raise ValueError(
            f"{type(model).__name__} mixes attention windows {sliding_windows} but its config has "
            "no layer_types: masks cannot be assigned to layers. Generate without a strategy."
        )
    kinds: dict[str, int | None] = {}
    for kind, window in zip(types, sliding_windows):
        if kinds.setdefault(kind, window) != window:
            raise ValueError(f"{type(model).__name__}: layers of type {kind!r} differ in window.")
    return kinds


@contextmanager
def tree_attention(
    model: Any, sliding_windows: list[int | None], checkpointing: bool = False
) -> Iterator[TreeAttention]:
    """Prepare ``model`` for forwards with 4-D masks, and restore it afterwards.

    ``eager`` and ``flex_attention`` stay; ``sdpa`` becomes :func:`grouped_sdpa` where the model
    looks attention up by name; anything else (flash) is switched to sdpa with one warning.

    Args:
        model: the model.
        sliding_windows: window of each layer.
        checkpointing: forwards are computed again after the block, for their gradients, so that
            nothing may be prepared; ``sdpa`` then stays, too.

    Raises:
        ValueError: the model needs what it cannot have.
    """
    with ExitStack() as stack:
        current = model.config.get_text_config(decoder=True)._attn_implementation
        if checkpointing:
            patches = [patch for patch in PATCHES if patch.applies(model)]
            needed = [patch.__name__.rpartition(".")[2] for patch in patches]
            if needed or current not in ("eager", "flex_attention", "sdpa"):
                raise ValueError(
                    f"gradient_checkpointing: {type(model).__name__} takes tree masks only while "
                    f"it is prepared for them ({', '.join(needed) or current}), and activations "
                    "are computed again after that. Train without checkpointing, or with "
                    "attn_implementation='sdpa' if it is the attention."
                )
        elif current not in ("eager", "flex_attention"):
            if current != "sdpa":
                if not getattr(model, "_supports_sdpa", False):
                    raise ValueError(
                        f"attn_implementation={current!r} takes no arbitrary mask and "
                        f"{type(model).__name__} has no sdpa: load it with "
                        "attn_implementation='eager'."
                    )
                _warn_switched(current)
            by_name = getattr(model, "_supports_attention_backend", False)
            stack.enter_context(_implementation(model, GROUPED_SDPA if by_name else "sdpa"))
        setters = [
            stack.enter_context(patch.tree_positions(model))
            for patch in PATCHES
            if patch.applies(model)
        ]
        kinds = mask_kinds(model, sliding_windows)
        yield TreeAttention(kinds, setters, flex=current == "flex_attention")


_warned: set[str] = set()


def _warn_switched(current: str) -> None:
    if current not in _warned:
        _warned.add(current)
        logger.warning(
            "attn_implementation=%r takes no tree mask: speculative steps use sdpa instead "
            "(the prefill keeps %r).", current, current,
        )  # fmt: skip


@contextmanager
def _implementation(model: Any, name: str) -> Iterator[None]:
    """Set the attention back end of every sub-config for a while, without reloading anything."""
    configs = {id(module.config): module.config for module in model.modules() if _has_own(module)}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    for config, _ in before:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, value in before:
            config._attn_implementation_internal = value


def _has_own(module: Any) -> bool:
    return hasattr(getattr(module, "config", None), "_attn_implementation_internal")
