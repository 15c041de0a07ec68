"""A model's weights as the model uses them, whatever PEFT and accelerate have made of them.

PEFT puts modules of its own in the place of embeddings: of a LoRA, of `modules_to_save`, of
`trainable_token_indices`. These pass on some attributes of the module inside, and compute others
anew at each access, such as a copy of the whole weight. So nothing reads attributes of what
`get_input_embeddings` and `get_output_embeddings` return, but asks here.

A weight that accelerate has offloaded has no data outside its module's forward: a hook brings it to
the device that the module computes on, and drops it afterwards. So modules are called as always,
and what needs a weight itself gets it from here.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import (
    AuxiliaryTrainingWrapper,
    ModulesToSaveWrapper,
    TrainableTokensWrapper,
)
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

#: Attributes with the numbers of input and output features: of torch's linear module and most
#: quantized ones, of Transformers' `Conv1D`, and of GPTQ.
_FEATURES = (("in_features", "out_features"), ("nx", "nf"), ("infeatures", "outfeatures"))


def features(module: nn.Module) -> tuple[int, int] | None:
    """Numbers of input and output features of a linear module; None for other modules."""
    for names in _FEATURES:
        inputs, outputs = (getattr(module, name, None) for name in names)
        if isinstance(inputs, int) and isinstance(outputs, int):
            return inputs, outputs
    return None


# -- modules with PEFT's adapters ----------------------------------------------------------------


def _layers(module: Any) -> Iterator[Any]:
    """A module, and what is inside it as long as that is PEFT's wrapper of another one."""
    while module is not None:
        yield module
        if isinstance(module, ModulesToSaveWrapper) and not module.disable_adapters:
            names = [name for name in module.active_adapters if name in module.modules_to_save]
            module = module.modules_to_save[names[0]] if names else module.original_module
        elif isinstance(module, TrainableTokensWrapper):
            module = module.token_adapter
        elif isinstance(module, AuxiliaryTrainingWrapper):
            module = module.original_module
        else:
            module = getattr(module, "base_layer", None)


def in_use(module: Any) -> Any:
    """The module inside PEFT's wrappers that the model uses: of its shape, type and device."""
    for layer in _layers(module):
        module = layer
    return module


def is_updated(module: Any) -> bool:
    """Whether active adapters of PEFT change what :func:`in_use` computes."""
    return any(
        isinstance(layer, BaseTunerLayer)
        and not layer.disable_adapters
        and not layer.merged
        and not layer._get_available_adapters().isdisjoint(layer.active_adapters)
        for layer in _layers(module)
    )


def made_of(module: Any) -> tuple[list[Tensor], Hashable]:
    """What a module's output depends on: its tensors, and which adapters of PEFT are active."""
    if module is None:
        return [], ()
    return [*module.parameters(), *module.buffers()], switches(module.modules())


def switches(modules: Iterable[Any]) -> Hashable:
    """Which adapters of PEFT are active in these modules, and how strong they are."""
    return tuple(
        (
            part.disable_adapters, tuple(part.active_adapters), tuple(part.merged_adapters),
            repr(getattr(part, "scaling", None)),
        )
        for part in modules if isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper))
    )  # fmt: skip


# -- offloaded weights ---------------------------------------------------------------------------


class Placement(NamedTuple):
    """Where a module computes, and in which dtype its weight is."""

    device: torch.device
    dtype: torch.dtype


def placement(model: Any) -> Placement:
    """The device and dtype of a model's input embeddings; the meta device if the model has no
    weights, as opposed to offloaded ones."""
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    weight = getattr(in_use(embeddings), "weight", None)
    if weight is not None:
        return Placement(device_of(embeddings), weight.dtype)
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if weight is not None:
        return Placement(weight.device, weight.dtype)
    return Placement(torch.device("cpu"), torch.get_default_dtype())


def device_of(module: Any) -> torch.device:
    """The device that a module with weights computes on."""
    module = in_use(module)
    tensors = chain(module.parameters(), module.buffers(), [torch.empty(0, device="cpu")])
    device = next(tensors).device  # torch's own quantized modules, on CPUs, show no tensor
    for hook in _hooks(module) if device.type == "meta" else ():
        place = getattr(hook, "execution_device", None)
        if place is not None:
            return torch.device(place)
    return device


@contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """Within the block, the module's own weights have data; tensors taken from it keep it."""
    hooks: list[Any] = []
    if any(tensor.is_meta for tensor in chain(module.parameters(False), module.buffers(False))):
        hooks = [hook for hook in _hooks(module) if getattr(hook, "offload", False)]
    for hook in hooks:
        hook.pre_forward(module)
    try:
        yield
    finally:
        for hook in hooks:
            hook.post_forward(module, None)


def _hooks(module: Any) -> tuple[Any, ...]:
    """accelerate's hooks of a module."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


# -- a model's embeddings ------------------------------------------------------------------------


def input_features(model: Any) -> tuple[int, int]:
    """Number of tokens that have input embeddings, and width of these."""
    module = in_use(model.get_input_embeddings())
    if isinstance(module, nn.Embedding):  # whose weight may be packed, or a part of it
        return module.num_embeddings, module.embedding_dim
    tokens, width = module.weight.shape
    return tokens, width


def output_features(model: Any) -> tuple[int, int]:
    """Width of the hidden states that logits are computed from, and the number of logits.

    Raises:
        ValueError: the model has no linear output embeddings.
    """
    module = in_use(model.get_output_embeddings())
    found = None if module is None else features(module)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} has no linear output embeddings, whose input the heads read: "
            "choose another method."
        )
    return found


def vocabulary(model: Any) -> int:
    """Number of tokens that a model both reads and computes logits for: it can be shown these as
    drafts, and no others."""
    embeddings, head = in_use(model.get_input_embeddings()), in_use(model.get_output_embeddings())
    read: int = (
        embeddings.num_embeddings
        if isinstance(embeddings, nn.Embedding)
        else model.config.get_text_config(decoder=True).vocab_size
    )
    found = None if head is None else features(head)
    return read if found is None else min(read, found[1])


def output_dtype(model: Any) -> torch.dtype | None:
    """The dtype of the output embeddings' weight; None if they have none, or a quantized one."""
    weight = getattr(in_use(model.get_output_embeddings()), "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    return weight.dtype


def output_weight(model: Any) -> Tensor | None:
    """The weight ``(vocab, hidden)`` of the output embeddings, maybe quantized; None if they have
    none. Values that adapters change are not in it: see :func:`is_updated`."""
    return _read(in_use(model.get_output_embeddings()), "weight")


@torch.no_grad()
def output_bias(model: Any) -> Tensor | None:
    """What the output embeddings add to every row of logits, ``(vocab,)``; None for nothing."""
    module = model.get_output_embeddings()
    if is_updated(module):
        # Some adapters drop a bias, others add one.
        hidden, _ = output_features(model)
        dtype = output_dtype(model) or placement(model).dtype
        made: Tensor = module(torch.zeros(1, hidden, dtype=dtype, device=device_of(module)))
        return made[0]
    return _read(in_use(module), "bias")


def _read(module: Any, name: str) -> Tensor | None:
    with loaded(module):
        tensor = getattr(module, name, None)
        return tensor if isinstance(tensor, Tensor) else None


# -- names in checkpoints ------------------------------------------------------------------------


def conversions(model: Any) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """How Transformers renames tensors of the model's checkpoints, and makes others of them."""
    known = get_model_conversion_mapping(model)
    return (
        [one for one in known if isinstance(one, WeightRenaming)],
        [one for one in known if isinstance(one, WeightConverter)],
    )


def renamed(model: Any) -> Callable[[str], str]:
    """What a tensor of the model's checkpoint is called in the model, by its name there."""
    rules, own = conversions(model), (model.base_model_prefix, model.state_dict())
    return lambda name: rename_source_key(name, *rules, *own)[0]
