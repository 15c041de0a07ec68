"""Forwards of a call that differ from the model's own: without some layers, without some tokens in
deeper layers, with embeddings of no token, averaged exits, rotary frequencies of another length, or
another model's keys and values."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

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
from hf_spec.modeling_patches.per_call import Changes, plain, step_aside
from hf_spec.modeling_patches.weights import input_features, tensor_parallel_size

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


# -- Embeddings that are of no token ---------------------------------------------------------------
#
# The model gets ids for all of its inputs, as it makes more of these than embeddings: Gemma 4 looks
# up inputs of each layer, and gives placeholders of images the embedding of padding.


def learned_embeddings(model: Any, changes: Changes, learned: Callable[[], Tensor | None]) -> None:
    """Let the last ids of each forward stand for these embeddings, ``(batch, n, hidden)``, instead
    of tokens; None: for none."""
    step_aside(model)

    def replace(args: Any, kwargs: Any, output: Any) -> Any:
        own = learned()
        if own is None:
            return None
        return torch.cat([output[:, : output.shape[1] - own.shape[1]], own.to(output)], dim=1)

    changes.after(model.get_input_embeddings(), replace)


# -- Averages the hidden states of a decoder's last layers, instead of using only the last one's ---
#
# Everything after the layers, such as the final norm, is unchanged and runs on the average.


def averaged_exits(
    model: Any, changes: Changes, count: int, first: Callable[[], int] = lambda: 0
) -> None:
    """Replace the output of query tokens from `first` on by the mean of the last `count` layers, in
    which `first` is called; with a `count` of 1 nothing changes."""
    if count == 1:
        return
    *before, last = decoder_layers(model)[-count:]
    seen: list[Tensor] = []

    def note(args: Any, kwargs: Any, output: Any) -> None:
        seen.append(_hidden(output)[:, first() :])

    def average(args: Any, kwargs: Any, output: Any) -> Any:
        hidden = _hidden(output)
        exits = [state.to(hidden.device) for state in seen] + [hidden[:, first() :]]
        seen.clear()
        if first() == hidden.shape[1]:
            return None
        mixed = torch.cat([hidden[:, : first()], torch.stack(exits).mean(0)], dim=1)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    for layer in before:
        changes.after(layer, note)
    changes.after(last, average)


def _hidden(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


# -- Rotary frequencies that follow the length of the longest sequence: dynamic NTK, LongRoPE ------
#
# Transformers (`dynamic_rope_update`) chooses the frequencies of a forward by its largest position.
# Plain generation has one new token per sequence in it; here the caller says how long the longest
# sequence is in the plain step that a forward stands for.

#: More than any length.
_FAR = 2**60
#: Models whose plain generation computes its cache anew when frequencies change.
_RECOMPUTE = frozenset({"phi3", "phimoe", "phi4_multimodal"})


class DynamicRope:
    """Rotates the tokens of a model's forwards as plain generation does at :attr:`length`.

    Args:
        changes: those that the forwards run with.

    Attributes:
        end: the largest length with the original frequencies.
        varies: whether they change with each length beyond (dynamic NTK), or once (LongRoPE).
        length: of the longest sequence, with the first token of each in the next forward.
        limit: the largest length with the frequencies of ``length``.
        last: the largest length of the call.
        recomputes: whether the cache must be computed anew at the first token beyond ``end``.
    """

    def __init__(self, model: Any, changes: Changes):
        ends = rope_ends(model)
        self.end = min(end for end, _ in ends)
        self.varies = len(ends) > 1 or any(varies for _, varies in ends)
        self.length, self.limit, self.last, self.recomputes = 1, self.end, _FAR, False
        for module in model.modules():
            if hasattr(module, "rope_type"):
                changes.instead(module, "forward", partial(self._rotate, module))

    def move(self, length: int) -> None:
        """Set the length of the next forward."""
        self.length = length
        beyond = length if self.varies else _FAR
        self.limit = self.end if length <= self.end else beyond

    def room(self, rows: int) -> int:
        """How much deeper than the next token draft tokens may be, with so many unfinished rows.

        Plain generation changes the frequencies of all rows in one step. So rows that will pass
        ``end`` take plain steps, in which they stay together, unless there is one only.
        """
        if self.length <= self.end < self.last and rows > 1:
            return 0
        return self.limit - self.length if self.last > self.end else _FAR

    def _rotate(
        self, module: nn.Module, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        longest = torch.full_like(position_ids[..., :1], self.length - 1)
        ids = torch.cat([position_ids.clamp(max=self.limit - 1), longest], dim=-1)
        made = plain(module, "forward")(x, ids, *args, **kwargs)
        if isinstance(made, Tensor):  # complex (batch, n, features); others: cosines and sines
            return made[..., :-1, :]
        return tuple(part[..., :-1, :] for part in made)


def rope_ends(model: Any) -> set[tuple[int, bool]]:
    """Lengths up to which rotary frequencies are the original ones, and whether they change with
    each length beyond: of each kind of layer whose frequencies follow the length."""
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    found = set()
    for one in (rope, *rope.values()):
        kind = one.get("rope_type") if isinstance(one, dict) else None
        if kind == "longrope":
            found.add((one["original_max_position_embeddings"], False))
        elif kind is not None and "dynamic" in kind:
            found.add((text.max_position_embeddings, True))
    return found


def recompute_end(model: Any) -> int | None:
    """The length past which plain generation computes the whole cache anew, if it does: the Phi
    models do, when their frequencies change."""
    text = model.config.get_text_config(decoder=True)
    if text.model_type not in _RECOMPUTE or not rope_ends(model):
        return None
    return text.original_max_position_embeddings


# -- Assistants that attend to keys and values of the model that they draft for: those of Gemma 4 --
#
# They have none of their own. Transformers gives their forward `shared_kv_states`: of each layer
# type, the keys and values of the model's last layer of this type that has some of its own.


class Source(NamedTuple):
    """Where an assistant's layers of one type get their keys and values."""

    layer: int  # index of the model's layer
    window: int | None  # as of sliding-window attention; None if all tokens are seen


def takes_shared_kv(assistant: Any) -> bool:
    """Whether a model's forward is given another model's keys and values."""
    return "shared_kv_states" in inspect.signature(assistant.forward).parameters


def shared_kv_sources(model: Any, assistant: Any) -> dict[str, Source]:
    """The model's layers whose keys and values an assistant is given, by layer type.

    Raises:
        ValueError: the assistant is not one for this model.
    """
    name, own = type(assistant).__name__, type(model).__name__
    if not hasattr(assistant, "create_attention_masks"):
        raise ValueError(
            f"assistant_model={name} takes keys and values of another model, and makes its masks "
            "in a way that is not known here. Generate without assistant_strategy."
        )
    if any(parameter.is_meta for parameter in assistant.parameters()):
        raise ValueError(
            f"assistant_model={name} has offloaded weights, and its forward asks one of them for "
            "its device. Load the assistant, which is small, onto one device."
        )
    ranks = tensor_parallel_size(model)
    if ranks > 1:
        raise ValueError(
            f"assistant_model={name} attends to the keys and values of {own}, and each of the "
            f"{ranks} processes that share the model holds a part of them. Load the model in one "
            "process, or choose another strategy."
        )
    text = model.config.get_text_config(decoder=True)
    caches, layers = DynamicCache(config=text).layers, decoder_layers(model)
    kinds = getattr(text, "layer_types", None) or ()
    last = {  # a dummy stands for a layer without keys of its own
        kind: index
        for index, (kind, cache) in enumerate(zip(kinds, caches))
        if type(cache).__name__ != "DummyLayer"
    }
    width, wanted = input_features(model)[1], assistant.config.backbone_hidden_size
    wrong = [] if width == wanted else [f"it reads states of size {wanted}, and these have {width}"]
    found: dict[str, Source] = {}
    of_assistant = assistant.config.get_text_config(decoder=True).layer_types
    for kind, layer in zip(of_assistant, decoder_layers(assistant)):
        attention = mixers(layer)[0]
        index = last.get(kind)
        if index is None:
            wrong.append(f"there is no layer of type {kind!r}, whose keys it reads")
            continue
        theirs = next(iter(mixers(layers[index])), None)  # it may have one that is not known
        read, there = _shape(attention), _shape(theirs)
        if read != there:
            wrong.append(f"it reads keys {read} of type {kind!r}, and these have {there}")
        windows = (getattr(one, "sliding_window", None) for one in (attention, caches[index]))
        found[kind] = Source(index, min(filter(None, windows), default=None))
    if wrong:
        raise ValueError(
            f"assistant_model={name} is not one for this {own}: "
            f"{'; '.join(dict.fromkeys(wrong))}. Give the assistant that was made for the model."
        )
    return found


def _shape(attention: Any) -> str:
    """Heads and dimension of the keys that an attention reads, in words."""
    try:
        heads = attention.config.num_attention_heads // attention.num_key_value_groups
        return f"of {heads} heads of {attention.head_dim}"
    except AttributeError:
        return "no known shape"


def with_given_masks(assistant: Any, changes: Changes) -> None:
    """Let forwards take ``attention_mask`` as it is, one for each layer type, and run without a
    read by the host."""
    changes.instead(assistant, "create_attention_masks", lambda rows, masks, keys: masks)
    head = getattr(assistant, "masked_embedding", None)
    if head is not None:
        changes.instead(head, "forward", partial(_logits_of_likely, head))


def _logits_of_likely(head: Any, hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits of the tokens in the likeliest clusters; those of all others are 1 below the least.

    As the module does it, but for this: the least is each row's own and stays on the device.
    """
    clusters = head.centroids(hidden).topk(head.centroid_intermediate_top_k).indices
    tokens = head.token_ordering.long().view(head.num_centroids, -1)[clusters].flatten(2)
    logits = (weight[tokens] @ hidden[..., None])[..., 0]
    others = (logits.amin(-1, keepdim=True) - 1).expand(-1, -1, len(weight))
    return torch.scatter(others, -1, tokens, logits)
