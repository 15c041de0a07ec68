"""Forwards that leave out layers, or tokens in deeper layers."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_spec.modeling_patches.linear_attention import entries, keeps_states
from hf_spec.modeling_patches.modules import (
    INLINE_MLP,
    MIXER_NAMES,
    MLP_NAMES,
    decoder_layers,
    mixers,
    mlps,
    unwrapped,
)
from hf_spec.modeling_patches.per_call import Changes, step_aside

# -- Skips chosen attention and MLP sublayers of a causal language model in some of its forwards ---
#
# A recurrence, such as Mamba or linear attention, counts as attention, alone or beside it. A
# skipped sublayer computes nothing, writes nothing to the KV cache and adds nothing to the residual
# stream: the model behaves as if the sublayer's output projection were zero. That is the drafting
# model of self-speculative decoding (Draft & Verify, Zhang et al., 2023). The modeling code is not
# changed, and other forwards of the model, also in other threads, run in full.
#
# Transformers takes a cache's length from its first layer, so callers that skip the attention of
# layer 0 must pass `position_ids` and masks that do not depend on it.

#: MLPs that return (hidden states, something) where others return hidden states.
_PAIR_RETURNING_MLPS = {"GptOssMLP"}


class LayerSkipper:
    """Skips sublayers of `model`: `skipper.changes.run(model, ...)`.

    Build a new one after modules of the model were replaced, such as OPT's `fc1` by a LoRA.

    Args:
        model: a decoder-only model of Transformers, or a `PeftModel` around one.
        skip_attention, skip_mlp: distinct indices of the layers in which these are skipped.

    Attributes:
        changes: the changes for forwards without these sublayers.
        replaced: the sublayers' modules, which do not run.

    Raises:
        ValueError: there is no such layer, or the layers or sublayers cannot be found.
    """

    def __init__(
        self, model: nn.Module, skip_attention: Sequence[int] = (), skip_mlp: Sequence[int] = ()
    ) -> None:
        layers = decoder_layers(model)
        for name, indices in (("skip_attention", skip_attention), ("skip_mlp", skip_mlp)):
            unknown = [index for index in indices if not 0 <= index < len(layers)]
            if unknown:
                raise ValueError(
                    f"{name}={list(indices)}: the model has {len(layers)} layers, from 0 to "
                    f"{len(layers) - 1}. Remove or correct {unknown[0]}."
                )
        base = unwrapped(model)
        shared = getattr(base.config.get_text_config(decoder=True), "num_kv_shared_layers", 0)
        if skip_attention and shared:  # layers that read another one's KV (gemma3n)
            raise ValueError(
                f"{type(base).__name__} shares the KV of earlier layers with its last {shared} "
                "layers, so no attention can be skipped. Leave skip_attention empty; skip_mlp "
                "works."
            )
        stubs: dict[tuple[nn.Module, str], Callable[..., Any]] = {}
        for index in skip_attention:
            stubs |= _attention(layers[index], index)
        for index in skip_mlp:
            stubs |= _mlp(layers[index], index)
        self.replaced = [module for module, _ in stubs]
        for index in {*skip_attention} & {*skip_mlp}:
            stubs[layers[index], "forward"] = _EmptyLayer(layers[index])
        step_aside(base)
        self.changes = Changes()
        for (module, method), stub in stubs.items():
            self.changes.instead(module, method, stub)


# -- stubs ---------------------------------------------------------------------------------------


def _attention(layer: nn.Module, index: int) -> dict[tuple[nn.Module, str], Callable[..., Any]]:
    if not (found := mixers(layer)):
        raise _missing(layer, index, "attention", MIXER_NAMES)
    return {(m, "forward"): _nothing(m, pair=not keeps_states(m)) for m in found}


def _mlp(layer: nn.Module, index: int) -> dict[tuple[nn.Module, str], Callable[..., Any]]:
    if found := mlps(layer):
        pairs = _PAIR_RETURNING_MLPS
        return {(m, "forward"): _nothing(m, pair=type(m).__name__ in pairs) for m in found}
    first, last = (getattr(layer, name, None) for name in INLINE_MLP)
    if first is None or last is None:
        raise _missing(layer, index, "MLP", (*MLP_NAMES, *INLINE_MLP))
    # Only the activation between them still runs, on the narrow hidden states, which the modules'
    # hooks (low-rank updates, steering) don't expect: the whole calls are left out.
    return {(first, "_call_impl"): _hidden_states, (last, "_call_impl"): _nothing(last)}


def _missing(layer: nn.Module, index: int, what: str, names: Sequence[str]) -> ValueError:
    children = ", ".join(name for name, _ in layer.named_children())
    return ValueError(
        f"layer {index} ({type(layer).__name__}) has no {what} submodule to skip: looked for "
        f"{', '.join(names)}, it has {children}. Take {index} out of skip_{what.lower()}."
    )


def _hidden_states(*args: Any, **kwargs: Any) -> Tensor:
    """The hidden states that a layer or sublayer is called with."""
    return args[0] if args else kwargs["hidden_states"]


def _nothing(sublayer: nn.Module, pair: bool = False) -> Callable[..., Any]:
    """A forward that adds nothing: zeros, or the residual if the sublayer adds that itself."""
    names = list(inspect.signature(type(sublayer).forward).parameters)[1:]
    place = names.index("residual") if "residual" in names else None

    def forward(*args: Any, **kwargs: Any) -> Any:
        if place is None:
            output = torch.zeros_like(_hidden_states(*args, **kwargs))
        else:
            output = args[place] if len(args) > place else kwargs["residual"]
        return (output, None) if pair else output

    return forward


class _EmptyLayer:
    """The forward of a decoder layer without attention and MLP, which is left out if its first run
    returns its input: if it has no norm in the residual stream, cross-attention, scale, ..."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._num_outputs: int | None = None  # of a layer that is left out, if it returns a tuple
        self._is_identity: bool | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden_states(*args, **kwargs)
        if self._is_identity:
            rest = self._num_outputs
            return hidden if rest is None else (hidden, *[None] * (rest - 1))
        # The class's forward, as a hook of accelerate would fetch weights that are not needed.
        output = type(self._layer).forward(self._layer, *args, **kwargs)
        if self._is_identity is None and not torch.compiler.is_compiling():
            several = isinstance(output, tuple)
            self._is_identity = torch.equal(output[0] if several else output, hidden)
            self._num_outputs = len(output) if several else None
        return output


# -- Drops query tokens of a forward after its first layers; deeper layers run on the others -------
#
# Before each deeper layer, a hook narrows the hidden states and everything with one entry per query
# token: attention masks, position ids, rotary tables. After the last layer, zeros replace the
# dropped tokens, since some models (GPT-2's family) require the original number. The caller chooses
# which tokens stay, and makes the cache take fewer keys from then on.

#: From hidden states (batch, tokens, hidden) to the indices to keep, (batch, kept); None for all.
Choose = Callable[[Tensor], Tensor | None]


def early_pruning(model: Any, changes: Changes, layer: int, choose: Choose) -> None:
    """Drop the query tokens that `choose` does not keep before a layer.

    The kept tokens come first in the final hidden states, followed by zeros.

    Args:
        layer: the first layer that runs on fewer tokens, so the number of layers that run on all.
        choose: called with the hidden states before that layer, once per forward.

    Raises:
        ValueError: if the model has no such layer after its first.
    """
    layers = decoder_layers(model)
    if not 1 <= layer < len(layers):
        raise ValueError(
            f"layer={layer}: the model has {len(layers)} layers, so tokens can be dropped after 1 "
            f"to {len(layers) - 1} of them."
        )
    narrowing: _Narrowing | None = None

    def decide(args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        nonlocal narrowing
        hidden = _hidden_states(*args, **kwargs)
        tokens = choose(hidden)
        narrowing = None if tokens is None else _Narrowing(hidden, tokens)
        if narrowing is None:
            return None
        return narrowing(args), {name: narrowing(value) for name, value in kwargs.items()}

    def narrow(args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if narrowing is None:
            return None
        # Hidden states are already narrowed by the previous layer.
        named = {
            name: value if name == "hidden_states" else narrowing(value)
            for name, value in kwargs.items()
        }
        return args[:1] + narrowing(args[1:]), named

    def widen(args: tuple, kwargs: dict, output: Any) -> Any:
        if narrowing is None:
            return None
        if isinstance(output, tuple):
            return (narrowing.widened(output[0]), *output[1:])
        return narrowing.widened(output)

    first, *others = [*layers][layer:]
    changes.before(first, decide)
    for other in others:
        changes.before(other, narrow)
    changes.after(layers[-1], widen)


def layer_input(model: Any, changes: Changes, layer: int) -> list[Tensor]:
    """A list that forwards fill with the hidden states `(batch, tokens, hidden)` before a layer."""
    seen: list[Tensor] = []

    def note(args: tuple, kwargs: dict) -> None:
        seen[:] = [_hidden_states(*args, **kwargs)]

    changes.before(decoder_layers(model)[layer], note)
    return seen


class _Narrowing:
    """Narrows inputs with one entry per query token; those that all layers share only once."""

    def __init__(self, hidden: Tensor, kept: Tensor) -> None:
        self._batch, self._tokens = hidden.shape[:2]
        self._kept = kept
        #: By id: the original, so that no other object can take its id, and what it became.
        self._made: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self, value))
        if not isinstance(value, Tensor) or value.ndim not in (2, 3, 4):
            return value
        if id(value) not in self._made:
            dim = 2 if value.ndim == 4 else 1
            per_token = value.shape[0] in (1, self._batch) and value.shape[dim] == self._tokens
            narrowed = entries(value, self._kept.to(value.device), dim) if per_token else value
            self._made[id(value)] = value, narrowed
        return self._made[id(value)][1]

    def widened(self, hidden: Tensor) -> Tensor:
        """Padded with zeros to the original length."""
        return torch.nn.functional.pad(hidden, (0, 0, 0, self._tokens - hidden.shape[1]))
