"""Finds the active adapter of a type on a model, for drafters and training."""

from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hf_spec.adapters.layer import layer_of, layers_of
from hf_spec.adapters.loading import load_unattached
from hf_spec.adapters.module import Adapter
from hf_spec.modeling_patches.modules import unwrapped


def find_active(model: nn.Module, peft_type: str, place: str | None = None) -> Adapter | None:
    """The active adapter of a type such as "LAYER_SKIP"; None if there is none, or adapters are
    disabled. The model may be a `PeftModel` or the base model, compiled or not.

    Args:
        place: folder or repository of an adapter that is taken instead, and need not be attached.

    Raises:
        ValueError: several adapters of the type are active, or the weights of the active one have
            not been loaded; or the adapter at `place` cannot be used.
    """
    if place is not None:
        named = load_unattached(unwrapped(model), place)
        if named.config.peft_type != peft_type:
            raise ValueError(
                f"adapter={place!r} is of type {named.config.type_name}, one of {peft_type} is "
                f"needed: name the strategy {named.config.strategy!r}, or 'auto'."
            )
        return named
    layer = layer_of(unwrapped(model), peft_type)
    if layer is None or layer.disable_adapters:
        return None
    # Adapters of other types are active on the same model.
    active = [name for name in layer.active_adapters if name in layer.adapters]
    if len(active) > 1:
        raise ValueError(
            f"{len(active)} adapters of type {peft_type} are active ({', '.join(active)}), one is "
            f"needed. Choose it with model.set_adapter({_to_set(model, layer, active[0])!r})."
        )
    if not active:
        return None
    found: Adapter = layer.adapters[active[0]]
    unloaded = [name for name, weight in found.tensors().items() if weight.is_meta]
    if unloaded:
        raise ValueError(
            f"the {peft_type} adapter {found.name!r} was attached without its weights "
            f"({', '.join(unloaded)}): load it with model.load_adapter(...), or attach it without "
            "low_cpu_mem_usage."
        )
    return found


def require_active(
    model: nn.Module, peft_type: str, strategy: str, place: str | None = None
) -> Adapter:
    """The active adapter of `peft_type`, as `find_active` says; a ValueError if there is none."""
    active = find_active(model, peft_type, place)
    if active is not None:
        return active
    layer = layer_of(unwrapped(model), peft_type)
    remedy = f"load one with model.load_adapter(...), or train one: `hf-spec train {strategy}`"
    if layer is not None and layer.adapters:
        name = min(layer.adapters)
        wanted = _to_set(model, layer, name)
        remedy = f"activate {name!r} with enable_adapters() or set_adapter({wanted!r})"
    else:
        others = active_types(model)
        if others:
            strategies = " or ".join(repr(one) for one in others.values())
            remedy = f"{', '.join(others)} is active: name {strategies}, or 'auto'; or {remedy}"
    raise ValueError(
        f"assistant_strategy={strategy!r} needs an active adapter of type {peft_type}: {remedy}."
    )


def active_types(model: nn.Module) -> dict[str, str]:
    """The types of the active adapters of hf_spec, and the strategies that draft with them."""
    found = {}
    for layer in layers_of(unwrapped(model)):
        active = [] if layer.disable_adapters else layer.active_adapters
        for name in (name for name in active if name in layer.adapters):
            config = layer.adapters[name].config
            if config.strategy is not None:
                found[config.type_name] = config.strategy
    return found


def _to_set(model: nn.Module, layer: Any, name: str) -> str | list[str]:
    """What `set_adapter` must be given to activate one adapter of a layer and leave those of other
    types, such as a LoRA, active: Transformers turns off all that it does not name."""
    others = sorted(active_names(model).difference(layer.adapters))
    return [*others, name] if others else name


def active_names(model: nn.Module) -> set[str]:
    """Names of all active adapters, of hf_spec and others."""
    layers = [one for one in unwrapped(model).modules() if isinstance(one, BaseTunerLayer)]
    return {name for one in layers if not one.disable_adapters for name in one.active_adapters}


def fine_tunes(model: nn.Module) -> list[str]:
    """Names of the active adapters that are not of hf_spec, such as a LoRA: they are what the model
    is, and stay active whichever adapter drafts."""
    ours = {name for layer in layers_of(unwrapped(model)) for name in layer.adapters}
    return sorted(active_names(model) - ours)


def merge_adapter(model: nn.Module, safe_merge: bool = False) -> bool:
    """Merge the updates of the active adapters of hf_spec into the model's weights.

    Unmerged, the updates of a SPACE adapter cost time in every forward. Mask tokens and output stay
    the same. :func:`unmerge_adapter`, disabling the adapter, deleting it or switching to another
    one restores the weights bit for bit, from a copy kept until then.

    Args:
        model: a `PeftModel`, or a model that has loaded adapters itself.
        safe_merge: whether to refuse results that are not finite.

    Returns:
        Whether there was anything to merge.

    Raises:
        ValueError: if the weights cannot be changed: they are quantized, offloaded or shared.
    """
    base = unwrapped(model)
    layers = [one for one in layers_of(base) if {*one.updating()} - {*one.merged_adapters}]
    for layer in layers:
        layer.merge_into(base, safe_merge)
    return bool(layers)


def unmerge_adapter(model: nn.Module) -> None:
    """Undo :func:`merge_adapter`; does nothing if nothing is merged."""
    for layer in layers_of(unwrapped(model)):
        layer.unmerge_from_base()
