"""Skips chosen attention and MLP sublayers of a causal language model in some of its forwards.

A skipped sublayer computes nothing, writes nothing to the KV cache and adds nothing to the residual
stream: the model behaves as if the sublayer's output projection were zero. That is the drafting
model of self-speculative decoding (Draft & Verify, Zhang et al., 2023). The modelling code is not
changed, and other forwards of the model, also in other threads, run in full.

This module knows neither caches nor decoding. Transformers takes a cache's length from its first
layer, so callers that skip the attention of layer 0 must pass `position_ids` and masks that do not
depend on it.
"""

import inspect
import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from modeling_patches.per_call import Changes, step_aside

_ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")
# Several of them in one layer (shared experts beside routed ones) form one sublayer.
_MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "shared_mlp")
# Layers without an MLP module: the calls it consists of, in order. OPT's family.
_INLINE_MLP = ("fc1", "fc2")

# Norms of a layer -> (those that only serve attention, those that only serve the MLP). A norm that
# feeds both (parallel residual) serves neither alone. A set of norms that is not here keeps all its
# norms running: that costs a little and is never wrong.
_NORMS: dict[frozenset[str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    frozenset(attention) | frozenset(mlp) | frozenset(shared): (attention, mlp)
    for attention, mlp, shared in (
        # llama, qwen, mistral, mixtral, phi3, starcoder2, stablelm, gpt_neox, bloom, falcon-rw
        (("input_layernorm",), ("post_attention_layernorm",), ()),
        # gemma2, gemma3
        (
            ("input_layernorm", "post_attention_layernorm"),
            ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
            (),
        ),
        # olmo2: norms only after the sublayers
        (("post_attention_layernorm",), ("post_feedforward_layernorm",), ()),
        # glm4
        (
            ("input_layernorm", "post_self_attn_layernorm"),
            ("post_attention_layernorm", "post_mlp_layernorm"),
            (),
        ),
        (("ln_1",), ("ln_2",), ()),  # gpt2, gpt_neo, gpt_bigcode
        (("norm_1",), ("norm_2",), ()),  # mpt
        (("ln_attn",), ("ln_mlp",), ()),  # falcon-40b
        (("self_attn_layer_norm",), ("final_layer_norm",), ()),  # opt
        ((), (), ("input_layernorm",)),  # phi, cohere, falcon-7b, stablelm with parallel residual
        ((), (), ("ln_1",)),  # gptj, codegen
    )
}
# Layer attributes saying that a norm stands *in* the residual stream (OPT-350m, a Bloom variant).
# Such norms run even when both sublayers are skipped.
_NORM_IN_RESIDUAL = {
    "do_layer_norm_before": False,
    "apply_residual_connection_post_layernorm": True,
}
# MLPs that return (hidden states, something) where others return hidden states.
_PAIR_RETURNING_MLPS = {"GptOssMLP"}

_Stub = Callable[..., Any]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal language model, also inside a `PeftModel` or compiled model.

    Raises:
        ValueError: the model has an encoder, or no unique list of `num_hidden_layers` modules with
            an attention submodule.
    """
    model = _unwrap(model)
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is an encoder-decoder model; layer skipping needs a decoder-only one."
        )
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    expected = getattr(config, "num_hidden_layers", None)
    found = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == expected
        and any(_child(layer, _ATTENTION_NAMES) is not None for layer in module)
    }
    if len(found) > 1:  # a multimodal model whose encoder is as deep as its decoder
        get_decoder = getattr(model, "get_decoder", None)
        inside = {id(m) for m in get_decoder().modules()} if get_decoder is not None else set()
        found = {path: module for path, module in found.items() if id(module) in inside} or found
    if len(found) != 1:
        what = f"several ({', '.join(found)})" if found else "none"
        raise ValueError(
            f"cannot find the decoder layers of {name}: wanted one nn.ModuleList of "
            f"num_hidden_layers={expected} modules with an attention submodule "
            f"({', '.join(_ATTENTION_NAMES)}), found {what}. Skipping "
            "layers does not support this architecture."
        )
    return next(iter(found.values()))


def sublayers(layer: nn.Module) -> list[list[nn.Module]]:
    """The modules of a decoder layer's attention, and those of its MLP, dense or shared.

    Routed experts are left out, as each of them sees only some of the tokens.
    """
    attention = _child(layer, _ATTENTION_NAMES)
    inline = [getattr(layer, name) for name in _INLINE_MLP if hasattr(layer, name)]
    mlp = _child(layer, _MLP_NAMES)
    dense = [] if mlp is None else [child for name, child in mlp.named_children()
                                    if "expert" not in name]  # fmt: skip
    return [[] if attention is None else [attention], dense or inline]


def num_layers(model: nn.Module) -> int:
    """Number of decoder layers; raises the errors of `decoder_layers`."""
    return len(decoder_layers(model))


class LayerSkipper:
    """Skips sublayers of `model`: `skipper.changes.run(model, ...)`.

    Build a new one after modules of the model were replaced, such as OPT's `fc1` by a LoRA.

    Args:
        model: a decoder-only model of Transformers, or a `PeftModel` around one.
        skip_attention: indices of the layers whose attention is skipped.
        skip_mlp: indices of the layers whose MLP is skipped.

    Attributes:
        replaced: the modules that do not run.

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
            _refuse_shared_cache(_unwrap(model))
        step_aside(_unwrap(model))

        self.replaced: list[nn.Module] = []
        self._stubs: list[tuple[nn.Module, _Stub]] = []
        for index in sorted({*self.skip_attention, *self.skip_mlp}):
            layer = layers[index]
            stubs: list[tuple[nn.Module, _Stub]] = []
            if index in self.skip_attention:
                stubs += _attention_stubs(layer, index)
            if index in self.skip_mlp:
                stubs += _mlp_stubs(layer, index)
            if index in self.skip_attention and index in self.skip_mlp and _is_plain(layer):
                stubs.append((layer, _EmptyLayer(layer)))
            self._stubs += stubs
            self.replaced += [module for module, _ in stubs]

    @cached_property
    def changes(self) -> Changes:
        """The changes for forwards without these sublayers."""
        changes = Changes()
        for module, stub in self._stubs:
            changes.instead(module, "forward", stub)
        return changes


# ---------------------------------------------------------------------------------------- finding


def _unwrap(model: Any) -> Any:
    """The Transformers model inside `torch.compile`'s and PEFT's wrappers."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _child(layer: nn.Module, names: Sequence[str]) -> nn.Module | None:
    return next((m for m in (getattr(layer, n, None) for n in names) if m is not None), None)


def _checked(name: str, indices: Sequence[int], count: int) -> tuple[int, ...]:
    """`indices`, sorted; a ValueError names the first invalid one."""
    rule = (
        f"{name} must list distinct layer indices from 0 to {count - 1} "
        f"(the model has {count} layers)"
    )
    seen: set[int] = set()
    for value in indices:
        try:
            index = operator.index(value)
        except TypeError:
            index = -1
        if isinstance(value, bool) or not 0 <= index < count:
            raise ValueError(f"{rule}, got {value!r}. Remove or correct it.")
        if index in seen:
            raise ValueError(f"{rule}, got {index} twice. Remove one.")
        seen.add(index)
    return tuple(sorted(seen))


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


def _norms(layer: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Norms that serve only the attention and only the MLP; None if the norms are unknown."""
    if any(getattr(layer, name, None) is value for name, value in _NORM_IN_RESIDUAL.items()):
        return None
    names = (n for n, m in layer.named_children() if "norm" in type(m).__name__.lower())
    return _NORMS.get(frozenset(names))


def _is_plain(layer: nn.Module) -> bool:
    """Whether the layer has only attention, MLP and known norms.

    Only then do hidden states stay the same when both sublayers are skipped. Cross-attention, Mamba
    branches, per-layer embeddings and scales are examples of further parts.
    """
    if _norms(layer) is None or [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]:
        return False
    known = {*_ATTENTION_NAMES, *_MLP_NAMES, *_INLINE_MLP}
    return all(
        name in known or "norm" in type(module).__name__.lower() or not any(module.parameters())
        for name, module in layer.named_children()
    )


# ------------------------------------------------------------------------------------------ stubs


def _attention_stubs(layer: nn.Module, index: int) -> list[tuple[nn.Module, _Stub]]:
    attention = _child(layer, _ATTENTION_NAMES)
    if attention is None:
        raise _missing(layer, index, "attention", _ATTENTION_NAMES)
    nothing = _nothing(attention)

    def forward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return nothing(*args, **kwargs), None  # (output, attention weights)

    norms = (_norms(layer) or ((), ()))[0]
    return [(attention, forward), *((getattr(layer, name), _same) for name in norms)]


def _mlp_stubs(layer: nn.Module, index: int) -> list[tuple[nn.Module, _Stub]]:
    norms = (_norms(layer) or ((), ()))[1]
    stubs: list[tuple[nn.Module, _Stub]] = [(getattr(layer, name), _same) for name in norms]
    mlps = [m for m in (getattr(layer, name, None) for name in _MLP_NAMES) if m is not None]
    for mlp in mlps:
        nothing = _nothing(mlp)
        pair = type(mlp).__name__ in _PAIR_RETURNING_MLPS
        stubs.append((mlp, _with_none(nothing) if pair else nothing))
    if not mlps:
        first, last = (getattr(layer, name, None) for name in _INLINE_MLP)
        if first is None or last is None:
            raise _missing(layer, index, "MLP", (*_MLP_NAMES, *_INLINE_MLP))
        # Only the activation between them still runs, on the narrow hidden states.
        stubs += [(first, _same), (last, _zeros)]
    return stubs


def _same(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the hidden states unchanged; further arguments (caches, masks) are ignored."""
    return args[0] if args else kwargs["hidden_states"]


def _zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros_like(_same(*args, **kwargs))


def _nothing(sublayer: nn.Module) -> Callable[..., torch.Tensor]:
    """A stub that contributes nothing: zeros, or the residual if the sublayer adds that itself."""
    parameters = list(inspect.signature(type(sublayer).forward).parameters)
    if "residual" not in parameters:
        return _zeros
    position = parameters.index("residual") - 1  # without self

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        return args[position] if len(args) > position else kwargs["residual"]

    return forward


def _with_none(stub: Callable[..., torch.Tensor]) -> _Stub:
    return lambda *args, **kwargs: (stub(*args, **kwargs), None)


class _EmptyLayer:
    """Replaces a whole decoder layer and returns the hidden states unchanged.

    Depending on architecture and release of Transformers, layers return a tensor, or a tuple that
    starts with one. So the first call runs the emptied layer and checks.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._rest: tuple[None, ...] | None = None  # what follows the hidden states in a tuple
        self._learnt = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._learnt:
            # The class's forward, as a hook of accelerate would fetch weights that are not needed.
            output = type(self._layer).forward(self._layer, *args, **kwargs)
            self._rest = (None,) * (len(output) - 1) if isinstance(output, tuple) else None
            self._learnt = True
            return output
        hidden_states = _same(*args, **kwargs)
        return hidden_states if self._rest is None else (hidden_states, *self._rest)
