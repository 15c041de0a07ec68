"""A model's modules: its decoder, layers, sublayers and projections."""

import inspect
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import regex
from torch import nn
from transformers.generation import GenerateDecoderOnlyOutput

from hf_spec.modeling_patches.weights import features, in_use

# -- What Transformers calls the KV cache: ``cache`` from 5.24 on, ``past_key_values`` before ------
#
# The name is that of the argument of ``generate`` and of models' forwards, of the field of their
# outputs, and of the entry of ``model_kwargs``.

#: The newest name that this Transformers knows; older ones are deprecated there.
CACHE = "cache" if hasattr(GenerateDecoderOnlyOutput, "cache") else "past_key_values"


# -- Finds the parts of a causal language model: its decoder layers, sublayers and linear modules --
#
# A module that PEFT has wrapped is found inside the wrapper, under its original name.

#: Most characters of a pattern of names, and most seconds for matching all names of a model.
PATTERN_LENGTH, PATTERN_SECONDS = 1000, 2.0
#: Names of a layer's attention or recurrence, and of its MLP. ``mixer`` is either. Several in one
#: layer (Mamba beside attention, shared experts beside routed ones) form one sublayer.
MIXER_NAMES = (
    "self_attn", "attn", "attention", "self_attention", "linear_attn", "mamba", "conv", "mixer",
)  # fmt: skip
MLP_NAMES = ("mlp", "mlps", "feed_forward", "ffn", "block_sparse_moe", "shared_mlp", "mixer")
#: Layers without an MLP module: the calls it consists of, in order. OPT's family.
INLINE_MLP = ("fc1", "fc2")


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a causal language model, also inside a `PeftModel` or compiled model.

    Raises:
        ValueError: the model has an encoder, or no unique list of `num_hidden_layers` modules with
            an attention or recurrent submodule. `num_layers` counts where layers have several.
    """
    model = unwrapped(model)
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model: a decoder-only one is needed.")
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    # LongCat-Flash counts attentions as hidden layers, and has two in each layer.
    expected = getattr(config, "num_layers", None) or getattr(config, "num_hidden_layers", None)
    # An encoder of a multimodal model may be as deep as its decoder.
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    found = {
        path: module
        for path, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == expected
        and any(mixers(layer) for layer in module)
    }
    if len(found) != 1:
        what = f"several ({', '.join(found)})" if found else "none"
        raise ValueError(
            f"cannot find the decoder layers of {name}: wanted one nn.ModuleList of "
            f"num_hidden_layers={expected} modules with an attention or recurrent submodule "
            f"({', '.join(MIXER_NAMES)}), found {what}. Choose a method that needs none."
        )
    return next(iter(found.values()))


def decoder_of(model: Any) -> Any:
    """The module whose output the model computes its logits from."""
    # Some models call their head "decoder" (ModernBERT), or do not define one (Mllama).
    found = model.get_decoder()
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if found is model or not any(module is embeddings for module in found.modules()):
        children = [child for child in model.children() if child is not head]
        inside = [c for c in children if any(module is embeddings for module in c.modules())]
        found = inside[0] if inside else found
    return found


def num_layers(model: nn.Module) -> int:
    """Number of decoder layers; raises the errors of `decoder_layers`."""
    return len(decoder_layers(model))


def unwrapped(model: Any) -> Any:
    """The Transformers model inside `torch.compile`'s and PEFT's wrappers."""
    model = getattr(model, "_orig_mod", model)
    return unwrapped(model.get_base_model()) if hasattr(model, "get_base_model") else model


def takes(module: Any, name: str) -> bool:
    """Whether a module's forward takes an argument of this name. One of ``(*args, **kwargs)`` may
    pass on any; what it does with them shows in a trial."""
    parameters = inspect.signature(module.forward).parameters
    kinds = {one.kind for one in parameters.values()}
    passes_on = kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return name in parameters or passes_on


#: Outputs that configs ask for, as trainings leave them: experts' balancing loss, which needs a
#: mask of tokens, and what is looked at.
OUTPUTS = ("output_router_logits", "output_hidden_states", "output_attentions")


def only_logits(model: Any, given: Iterable[str] = ()) -> dict[str, bool]:
    """Arguments of a model's forward that turn off the :data:`OUTPUTS` that its config, or a call's
    arguments of the names ``given``, asks for. The config, which other threads read, stays."""
    configs = model.config, model.config.get_text_config(decoder=True)
    asked = [
        name for name in OUTPUTS
        if name in given or any(getattr(one, name, None) not in (None, False) for one in configs)
    ]  # fmt: skip
    parameters = inspect.signature(model.forward).parameters if asked else {}
    rest = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return {name: False for name in asked if rest or name in parameters}


def mixers(layer: nn.Module) -> list[nn.Module]:
    """A layer's attention or recurrence, or all where there are several."""
    return [module for module in _parts(layer, MIXER_NAMES) if _mixes_tokens(module)]


def mlps(layer: nn.Module) -> list[nn.Module]:
    """A layer's MLPs."""
    return [module for module in _parts(layer, MLP_NAMES) if not _mixes_tokens(module)]


def _parts(layer: nn.Module, names: Iterable[str]) -> Iterator[nn.Module]:
    """Submodules of these names; those in a list one by one."""
    for name in names:
        found = getattr(layer, name, None)
        if isinstance(found, nn.ModuleList):
            yield from found
        elif found is not None:
            yield found


def _mixes_tokens(sublayer: nn.Module) -> bool:
    return "attention_mask" in inspect.signature(type(in_use(sublayer)).forward).parameters


def linear_modules(
    model: nn.Module, targets: str | Sequence[str] | None = None
) -> dict[str, nn.Module]:
    """Linear modules of a causal language model, by name: those of its decoder and its head, not of
    an encoder for images or sounds.

    Args:
        model: the model itself, not a `PeftModel` around it.
        targets: the modules to find, like PEFT's `target_modules`: a list of names, or of ends of
            names after a dot; or a regular expression that matches whole names. None and
            "all-linear" stand for all linear modules inside the decoder layers.

    Raises:
        ValueError: nothing matches, a name in the list matches nothing, or the regular expression
            is invalid or takes too long.
    """
    roots = decoder_of(model), model.get_output_embeddings()  # type: ignore[operator]
    text = {id(module) for root in roots if root is not None for _, module in walk(root)}
    everything = {name: m for name, m in walk(model) if _is_linear(m) and id(m) in text}
    matches = _matches(model, targets, everything)
    unmatched = [target for target, names in matches.items() if not names]
    if unmatched or not matches:
        last = sorted({name.rpartition(".")[2] for name in everything})
        raise ValueError(
            f"no linear module of {type(model).__name__} matches "
            f"{', '.join(map(repr, unmatched or ['']))}: name linear modules, such as "
            f"{', '.join(last[:8]) or 'none here'}, or give a regular expression for whole "
            "names."
        )
    found = {name for names in matches.values() for name in names}
    return {name: module for name, module in everything.items() if name in found}


def _matches(
    model: nn.Module, targets: str | Sequence[str] | None, modules: Mapping[str, nn.Module]
) -> dict[str, list[str]]:
    """The names of the modules that each of the targets stands for."""
    if targets is None or targets == "all-linear":
        inside = {id(module) for module in decoder_layers(model).modules()}
        return {"the decoder layers": [n for n, m in modules.items() if id(m) in inside]}
    if isinstance(targets, str):
        return {targets: _matching(targets, modules)}
    return {end: [n for n in modules if f".{n}".endswith(f".{end}")] for end in targets}


def output_projections(model: nn.Module) -> dict[str, nn.Module]:
    """The last linear module of each decoder layer, which writes to the residual stream, by name.

    That of its MLP; of its attention or recurrence where the MLP has none, as with routed experts.
    Raises a ValueError if there is none.
    """
    width = model.config.get_text_config(decoder=True).hidden_size  # type: ignore[union-attr, operator]
    names = {id(module): name for name, module in walk(model)}
    found: dict[str, nn.Module] = {}
    for layer in decoder_layers(model):
        # Routed experts are left out, as each of them sees only some of the tokens.
        children = (pair for mlp in mlps(layer) for pair in mlp.named_children())
        dense = [module for name, module in children if "expert" not in name]
        inline = [getattr(layer, name) for name in INLINE_MLP if hasattr(layer, name)]
        inside = [
            module
            for part in (*mixers(layer), *(dense or inline))
            for _, module in walk(part)
            if _is_linear(module) and (features(module) or (0, 0))[1] == width
        ]
        found |= {names[id(module)]: module for module in inside[-1:]}
    if not found:
        raise ValueError(
            f"no linear module of {type(model).__name__} is the last of an attention or an MLP: "
            "name them in target_modules."
        )
    return found


def compiled(pattern: str) -> regex.Pattern[str]:
    """A regular expression of module names; raises a ValueError if it is invalid or too long."""
    shown = repr(pattern if len(pattern) <= 80 else f"{pattern[:77]}...")
    if len(pattern) > PATTERN_LENGTH:
        raise ValueError(
            f"the pattern {shown} has {len(pattern)} characters: at most {PATTERN_LENGTH} are "
            "tried. Give a list of names."
        )
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError) as error:
        raise ValueError(f"{shown} is no regular expression: {error}.") from error


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that match; `regex`, as some patterns take exponential time and `re` no timeout."""
    expression, end = compiled(pattern), time.monotonic() + PATTERN_SECONDS

    def matches(name: str) -> bool:
        remaining = max(end - time.monotonic(), 1e-3)
        return expression.fullmatch(name, timeout=remaining) is not None

    try:
        return list(filter(matches, names))
    except TimeoutError as error:
        raise ValueError(
            f"the pattern {pattern!r} takes longer than {PATTERN_SECONDS:g} seconds to match the "
            "names of the model's modules: simplify it, or give a list of names."
        ) from error


def _is_linear(module: nn.Module) -> bool:
    """Whether a module returns only a product; routers of experts return more."""
    returns = str(inspect.signature(type(module).forward).return_annotation)
    return features(module) is not None and "tuple" not in returns.lower()


def walk(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules with their names; a PEFT wrapper is replaced by the module that it wraps."""
    module = in_use(module)
    yield name, module
    for child_name, child in module.named_children():
        yield from walk(child, f"{name}.{child_name}" if name else child_name)
