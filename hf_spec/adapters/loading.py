"""Loading, naming, activating and merging adapters."""

import copy
import dataclasses
import inspect
import os
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from peft import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
    PeftConfig,
    PeftModel,
    inject_adapter_in_model,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.integrations.peft import PeftAdapterMixin
from transformers.utils.loading_report import LoadStateDictInfo

from hf_spec.adapters.checkpoint import CONFIG, WEIGHTS, Origin, read_weights, readable
from hf_spec.adapters.config import SpecPeftConfig, replacing_adapter, write_companions
from hf_spec.adapters.layer import Adapter, layer_of, layers_of
from hf_spec.core.checks import UNFIT, explained
from hf_spec.files import is_path, read_json
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.modeling_patches.per_call import patch_method
from hf_spec.modeling_patches.weights import placement, same_draws, vocabulary
from hf_spec.threads import locked, memory

# -- The ways in which adapters are loaded, for those of hf_spec; others pass through --------------
#
# PEFT and Transformers have no hooks for what is needed here, so that their methods are wrapped:
# weights are read from safetensors only, a load that fails leaves the model as it was, and an
# adapter knows where it came from. `PreTrainedModel.load_adapter` goes PEFT's way, so that the
# weights of every load pass `SpecTuner._remap_adapter_state_dict_for_load`, which checks them.


@patch_method(PeftModel, "from_pretrained")
def load_new(original: Any, cls: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """`PeftModel.from_pretrained`, which attaches an adapter before it reads the weights."""
    place = kwargs["model_id"] if "model_id" in kwargs else next(iter(args), None)
    origin = None if place is None else _origin(place, kwargs)
    ours = _ours(origin, kwargs.get("config"))  # which says what is wrong
    if ours is not None and origin is not None:
        kwargs |= origin.download  # with the commit of what was read
    with unchanged_on_error(unwrapped(model)):
        return original(cls, model, *args, **kwargs)


@patch_method(PeftModel, "load_adapter")
def load_into(
    original: Any, self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> Any:
    """`PeftModel.load_adapter`, of a new adapter or into one that is attached."""
    origin = _origin(model_id, kwargs)
    config = _ours(origin, self.peft_config.get(adapter_name))
    if config is None:
        return original(self, model_id, adapter_name, *args, **kwargs)
    if config.peft_type != self.peft_type:
        base = unwrapped(self)
        layer = layer_of(base, config.type_name)
        if layer is not None and adapter_name in layer.adapters:
            # Of a checkpoint: PEFT saves it beside the adapter in training, and the Trainer reads
            # all. Its options are still those of where it came from.
            adapter: Adapter = layer.adapters[adapter_name]
            stored = read_weights(origin.weights())
            return adapter.load_state_dict(adapter.from_file(stored, placement(base).dtype))
        own = getattr(self.peft_type, "value", self.peft_type)
        raise ValueError(
            f"a PeftModel of type {own} loads no adapter of type {config.type_name}: load it onto "
            f"the base model, which may have both: model.get_base_model().load_adapter("
            f"{str(model_id)!r}, adapter_name={adapter_name!r})."
        )
    with unchanged_on_error(unwrapped(self)), readable(origin.weights()):
        kwargs |= origin.download  # with the commit of these weights
        result = original(self, model_id, adapter_name, *args, **kwargs)
    _note(self, adapter_name, origin)
    return result


@patch_method(PeftAdapterMixin, "load_adapter")
def load_directly(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`PreTrainedModel.load_adapter`, which knows no checks of PEFT's tuners."""
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    origin, name = _asked(given), given["adapter_name"] or "default"
    config: Any = _ours(origin, given["peft_config"])
    taken, swaps = name in getattr(self, "peft_config", {}), given["hotswap"] is True
    if config is not None and taken and not swaps:
        raise ValueError(
            f"the model already has an adapter named {name!r}: give this one another name, such as "
            f"adapter_name={type(config).type_name.lower()!r}, or drop that one first, "
            f"model.delete_adapter({name!r})."
        )
    if config is None or swaps:
        return original(self, *args, **kwargs)
    weights = given["adapter_state_dict"]
    if weights is None and origin is not None:
        weights = read_weights(origin.weights())
    config.inference_mode = not given["is_trainable"]
    with unchanged_on_error(self):
        inject_adapter_in_model(config, self, name)
        # PEFT's own function fails beside a LoRA that has trained tokens.
        tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
        named = tuner._remap_adapter_state_dict_for_load(self, config, name, weights or {})
        self.load_state_dict(named, strict=False)
    self._hf_peft_config_loaded = True
    if origin is not None:
        _note(self, name, origin)
    if config.inference_mode:
        self.eval()
    fields = [item.name for item in dataclasses.fields(LoadStateDictInfo)]
    lists: dict[str, Any] = {"error_msgs": [], "conversion_errors": {}}
    return LoadStateDictInfo(**{field: lists.get(field, set()) for field in fields})


#: Adapters kept for a model that calls have named: those that were named last.
NAMED = 4


def load_unattached(base: Any, place: str) -> Adapter:
    """An adapter that drafts for a base model without being attached to it.

    It is read once, and again when the files of a folder, or the model's vocabulary, have changed.
    :data:`NAMED` are kept.

    Args:
        place: its folder, or its repository on the Hub.

    Raises:
        ValueError: it is none of hf_spec, it changes the base's weights, or its files are broken.
    """
    state = _state(base, place)
    adapter = _kept(base, place, state)
    if adapter is None:  # another thread may be faster
        adapter = _kept(base, place, state, _read_unattached(base, place))
    device, dtype = placement(base)  # the base may have moved since
    return adapter.to(device, dtype)


def _state(base: Any, place: str) -> Hashable:
    """What a read adapter is for: the size of the vocabulary, and the files of a folder."""
    files = []
    for name in (CONFIG, WEIGHTS):
        with suppress(OSError, ValueError):  # which a name of no file is
            found = os.stat(os.path.join(place, name))
            numbers = found.st_dev, found.st_ino, found.st_size
            files.append((*numbers, found.st_mtime_ns, found.st_ctime_ns))
    return vocabulary(base), tuple(files)


@locked
def _kept(base: Any, place: str, state: Hashable, new: Adapter | None = None) -> Any:
    """The adapter that was read from these files; else a new one, which is kept, if there is any.
    Those of files that have changed since, or are gone, are then dropped."""
    kept = memory(base).setdefault(load_unattached, {})
    if place in kept and kept[place][0] == state:
        kept[place] = kept.pop(place)  # the last in order
        return kept[place][1]
    for name in [name for name, (before, _) in kept.items() if before != _state(base, name)]:
        del kept[name]
    if new is not None:
        kept[place] = state, new
        for name in [*kept][:-NAMED]:
            del kept[name]
    return new


def _read_unattached(base: Any, place: str) -> Adapter:
    _check_there(f"adapter={place!r}", place)
    folder = Path(place)
    attached = {name for layer in layers_of(base) for name in layer.adapters}
    if not folder.exists() and place in attached.union(getattr(base, "peft_config", {})):
        raise ValueError(
            f"adapter={place!r}: this one is attached to the model. Leave adapter out; "
            f"model.set_adapter({place!r}) activates it, unless it is active."
        )
    if (folder / "config.json").is_file() and not (folder / CONFIG).is_file():
        raise ValueError(
            f"cannot read adapter={place!r}: the folder has no {CONFIG}; it is a model's. Give an "
            "adapter's folder."
        )
    origin = _origin(place, {})
    with explained(f"cannot read adapter={place!r}", ValueError, OSError, *UNFIT):
        config = _read_config(origin)
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    remedy = "Attach it with model.load_adapter(...)"
    if not isinstance(config, SpecPeftConfig):
        raise ValueError(f"adapter={place!r} is of type {kind}: it drafts nothing. {remedy}.")
    if config.changes_model:
        raise ValueError(
            f"adapter={place!r} is of type {kind} and changes the model's weights, which no "
            f"call does. {remedy}, and leave adapter out."
        )
    config.inference_mode = True
    config.check_base(base)
    tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
    with same_draws(placement(base).device):  # a call's seed is for its tokens
        adapter: Adapter = tuner.adapter_class.build(config, base).eval()
    stored = read_weights(origin.weights())
    adapter.load_state_dict(adapter.from_file(stored, placement(base).dtype))
    adapter.requires_grad_(False)
    adapter.name, adapter.origin = place, origin
    return adapter


def save_unattached(adapter: Adapter, folder: Path) -> None:
    """Write an adapter that no model has: config, weights, and, unless they are there, the files
    beside them. What was measured of one with other weights there is removed.

    Raises:
        ValueError: the folder holds an adapter of another type, or a model.
    """
    from safetensors.torch import save_file

    config = copy.copy(adapter.config)
    config.inference_mode = True
    with replacing_adapter(folder, config.type_name) as temporary:
        save_file(adapter.for_file(), temporary / WEIGHTS, metadata={"format": "pt"})
        config.save_pretrained(temporary)
    write_companions(folder, type(config))


@contextmanager
def unchanged_on_error(base: Any) -> Iterator[None]:
    """If the block raises, or is interrupted, a base model has the adapters that it had before."""
    before = {layer: ([*layer.adapters], layer.active_adapters) for layer in layers_of(base)}
    configs = dict(getattr(base, "peft_config", {}))
    trainable = [(parameter, parameter.requires_grad) for parameter in base.parameters()]
    try:
        yield
    except BaseException:
        for layer in layers_of(base):
            names, active = before.get(layer, ([], []))
            layer.set_adapter(active)
            for name in set(layer.adapters) - set(names):
                layer.delete_adapter(name)
            if layer not in before:
                layer.remove_from(base)
        if hasattr(base, "peft_config"):  # which a PeftModel around the base shares
            base.peft_config.clear()
            base.peft_config.update(configs)
        if not configs:
            # Transformers' add_adapter sets the second one before it attaches anything.
            base.__dict__.pop("peft_config", None)
            base.__dict__.pop("_hf_peft_config_loaded", None)
        for parameter, required in trainable:
            parameter.requires_grad_(required)
        raise


def _check_there(what: str, place: Any) -> None:
    if is_path(str(place)) and not Path(place).exists():
        raise FileNotFoundError(
            f"{what}: there is no such folder. Give an adapter's folder, or its repository on the "
            "Hub, such as 'owner/name'."
        )


def _origin(place: Any, kwargs: dict[str, Any]) -> Origin:
    """Where an adapter is, from the keyword arguments of a function that loads it."""
    return Origin(str(place), PeftConfig._split_kwargs(dict(kwargs))[0])


def _asked(given: Mapping[str, Any]) -> Origin | None:
    """Where the arguments of `PreTrainedModel.load_adapter` say that an adapter is."""
    load_config = given["load_config"]
    download = {
        **(getattr(load_config, "download_kwargs", None) or {}), **given["kwargs"],
        **(given["adapter_kwargs"] or {}),
    }  # fmt: skip
    if given["local_files_only"]:
        download["local_files_only"] = True
    place = given["peft_model_id"] or getattr(load_config, "pretrained_model_name_or_path", None)
    if place is None:
        return None
    _check_there(f"load_adapter({str(place)!r})", place)
    return _origin(place, download)


def _read_config(origin: Any) -> Any:
    path = origin.file(CONFIG)
    if path is not None:
        read_json(path)  # which names the file if it is broken
    return PeftConfig.from_pretrained(origin.place, **origin.download)


def _ours(origin: Origin | None, config: Any) -> SpecPeftConfig | None:
    """The config of an adapter of hf_spec; None for others, and where the Hub has none: then the
    original says why.

    Raises:
        ValueError: the file is not JSON, or not that of an adapter of its type, if this is ours.
    """
    path = None
    if config is None and origin is not None:
        with suppress(ValueError, OSError):
            path = origin.file(CONFIG)
    if path is None or origin is None:
        return config if isinstance(config, SpecPeftConfig) else None
    kind = str(read_json(path).get("peft_type"))
    if not issubclass(PEFT_TYPE_TO_CONFIG_MAPPING.get(kind, object), SpecPeftConfig):
        return None
    with explained(f"cannot read {str(path)!r}", ValueError, OSError, *UNFIT):
        return _read_config(origin)


def _note(model: Any, name: str, origin: Origin) -> None:
    layer = layer_of(unwrapped(model), model.peft_config[name].type_name)
    layer.adapters[name].origin = origin


# -- Finds the active adapter of a type on a model, for drafters and training ----------------------


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
        remedy = f"activate {name!r}: {_to_activate(model, layer, name)}"
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


def waiting(model: nn.Module) -> dict[str, str]:
    """The adapters of hf_spec that are attached and not active, and what activates each. Names of
    disabled ones are in Transformers' ``active_adapters()`` all the same."""
    found = {}
    for layer in layers_of(unwrapped(model)):
        active = () if layer.disable_adapters else layer.active_adapters
        for name in (name for name in layer.adapters if name not in active):
            found[name] = _to_activate(model, layer, name)
    return found


def _to_activate(model: nn.Module, layer: Any, name: str) -> str:
    """What activates one adapter of a layer."""
    steps = []
    if layer.disable_adapters:
        steps.append("call enable_adapters(), or leave the `disable_adapter` block")
    if name not in layer.active_adapters:
        steps.append(f"call set_adapter({_to_set(model, layer, name)!r})")
    return ", and ".join(steps)


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
