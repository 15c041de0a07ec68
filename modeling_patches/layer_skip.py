"""Skips chosen attention and MLP sublayers of a causal language model in some of its forwards.

A skipped sublayer computes nothing, writes nothing to the KV cache and adds nothing to the residual
stream: the model behaves as if the sublayer's output projection were zero. That is the drafting
model of self-speculative decoding (Draft & Verify, Zhang et al., 2023). The modelling code is not
changed, and other forwards of the model, also in other threads, run in full.

This module knows neither caches nor decoding. Transformers takes a cache's length from its first
layer, so callers that skip the attention of layer 0 must pass `position_ids` and masks that do not
depend on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modeling_patches.modules import (
    ATTENTION_NAMES,
    INLINE_MLP,
    MLP_NAMES,
    child_of,
    decoder_layers,
    unwrapped,
)
from modeling_patches.per_call import Changes, step_aside

#: MLPs that return (hidden states, something) where others return hidden states.
_PAIR_RETURNING_MLPS = {"GptOssMLP"}


class LayerSkipper:
    """Skips sublayers of `model`: `skipper.changes.run(model, ...)`.

    Build a new one after modules of the model were replaced, such as OPT's `fc1` by a LoRA.

    Args:
        model: a decoder-only model of Transformers, or a `PeftModel` around one.
        skip_attention: indices of the layers whose attention is skipped.
        skip_mlp: indices of the layers whose MLP is skipped.

    Attributes:
        changes: the changes for forwards without these sublayers.
        replaced: the sublayers' modules, which do not run.

    Raises:
        ValueError: an index is duplicate or not an integer in `0 .. num_layers - 1`, or the layers
            or sublayers cannot be found.
    """

    def __init__(
        self, model: nn.Module, skip_attention: Sequence[int] = (), skip_mlp: Sequence[int] = ()
    ) -> None:
        layers = decoder_layers(model)
        self.num_layers = len(layers)
        self.skip_attention = _checked("skip_attention", skip_attention, self.num_layers)
        self.skip_mlp = _checked("skip_mlp", skip_mlp, self.num_layers)
        if self.skip_attention:
            _refuse_shared_cache(unwrapped(model))
        stubs = [stub for index in self.skip_attention for stub in _attention(layers[index], index)]
        stubs += [stub for index in self.skip_mlp for stub in _mlp(layers[index], index)]
        self.replaced = [module for module, _ in stubs]
        empty = [layers[index] for index in self.skip_attention if index in self.skip_mlp]
        step_aside(unwrapped(model))
        self.changes = Changes()
        for module, stub in stubs:
            self.changes.instead(module, "forward", stub)
        for layer in empty:
            self.changes.instead(layer, "forward", _EmptyLayer(layer))


def _checked(name: str, indices: Sequence[int], count: int) -> tuple[int, ...]:
    """`indices`, sorted; a ValueError names the first invalid one."""
    for place, index in enumerate(indices):
        if type(index) is not int or not 0 <= index < count or index in indices[:place]:
            raise ValueError(
                f"{name} must list distinct layer indices from 0 to {count - 1} (the model has "
                f"{count} layers), got {index!r} in {list(indices)}. Remove or correct it."
            )
    return tuple(sorted(indices))


def _refuse_shared_cache(model: Any) -> None:
    """Refuse models with layers that read another layer's KV (gemma3n), which may be skipped."""
    config = model.config.get_text_config(decoder=True)
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    if shared:
        raise ValueError(
            f"{type(model).__name__} shares the KV of earlier layers with its last {shared} "
            "layers, so no attention can be skipped. Leave skip_attention empty; skip_mlp works."
        )


def _missing(layer: nn.Module, index: int, what: str, names: Sequence[str]) -> ValueError:
    children = ", ".join(name for name, _ in layer.named_children())
    return ValueError(
        f"layer {index} ({type(layer).__name__}) has no {what} submodule to skip: looked for "
        f"{', '.join(names)}, it has {children}. Take {index} out of skip_{what.lower()}."
    )


# ------------------------------------------------------------------------------------------ stubs

Stubs = list[tuple[nn.Module, Callable[..., Any]]]


def _attention(layer: nn.Module, index: int) -> Stubs:
    attention = child_of(layer, ATTENTION_NAMES)
    if attention is None:
        raise _missing(layer, index, "attention", ATTENTION_NAMES)
    return [(attention, _with_none(_nothing(attention)))]  # (output, attention weights)


def _mlp(layer: nn.Module, index: int) -> Stubs:
    mlps = [m for m in (getattr(layer, name, None) for name in MLP_NAMES) if m is not None]
    if mlps:
        pairs = [type(mlp).__name__ in _PAIR_RETURNING_MLPS for mlp in mlps]
        nothing = [_nothing(mlp) for mlp in mlps]
        return [(m, _with_none(f) if pair else f) for m, f, pair in zip(mlps, nothing, pairs)]
    first, last = (getattr(layer, name, None) for name in INLINE_MLP)
    if first is None or last is None:
        raise _missing(layer, index, "MLP", (*MLP_NAMES, *INLINE_MLP))
    # Only the activation between them still runs, on the narrow hidden states.
    return [(first, _same), (last, _zeros)]


def _same(*args: Any, **kwargs: Any) -> Tensor:
    """Return the hidden states unchanged; further arguments (caches, masks) are ignored."""
    return args[0] if args else kwargs["hidden_states"]


def _zeros(*args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros_like(_same(*args, **kwargs))


def _nothing(sublayer: nn.Module) -> Callable[..., Tensor]:
    """A stub that contributes nothing: zeros, or the residual if the sublayer adds that itself."""
    parameters = list(inspect.signature(type(sublayer).forward).parameters)
    if "residual" not in parameters:
        return _zeros
    position = parameters.index("residual") - 1  # without self

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return args[position] if len(args) > position else kwargs["residual"]

    return forward


def _with_none(stub: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (stub(*args, **kwargs), None)


class _EmptyLayer:
    """A decoder layer without attention and MLP, which is left out if nothing else is in it.

    The first forward runs the emptied layer. If that returns its input, the next ones do not run it
    at all. Norms in the residual stream, cross-attention, Mamba branches and scales are examples of
    what else may be in it.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._is_identity: bool | None = None
        self._rest: tuple[None, ...] | None = None  # what follows the hidden states in a tuple

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _same(*args, **kwargs)
        if self._is_identity:
            return hidden if self._rest is None else (hidden, *self._rest)
        # The class's forward, as a hook of accelerate would fetch weights that are not needed.
        output = type(self._layer).forward(self._layer, *args, **kwargs)
        if self._is_identity is None and not torch.compiler.is_compiling():
            first = output[0] if isinstance(output, tuple) else output
            self._is_identity = torch.equal(first, hidden)
            self._rest = (None,) * (len(output) - 1) if isinstance(output, tuple) else None
        return output
