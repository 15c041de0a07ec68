"""A model's embeddings as the model uses them, whatever PEFT has wrapped around them.

PEFT puts modules of its own in the place of embeddings: of a LoRA, of `modules_to_save`, of
`trainable_token_indices`. These pass on some attributes of the module inside, and compute others
anew at each access, such as a copy of the whole weight. So nothing reads attributes of what
`get_input_embeddings` and `get_output_embeddings` return, but asks here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import (
    AuxiliaryTrainingWrapper,
    ModulesToSaveWrapper,
    TrainableTokensWrapper,
)
from torch import Tensor, nn

#: Attributes with the numbers of input and output features: of torch's linear module and most
#: quantised ones, of Transformers' `Conv1D`, and of GPTQ.
_FEATURES = (("in_features", "out_features"), ("nx", "nf"), ("infeatures", "outfeatures"))


def features(module: nn.Module) -> tuple[int, int] | None:
    """Numbers of input and output features of a linear module; None for other modules."""
    for names in _FEATURES:
        inputs, outputs = (getattr(module, name, None) for name in names)
        if isinstance(inputs, int) and isinstance(outputs, int):
            return inputs, outputs
    return None


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


def input_weight(model: Any) -> Tensor:
    """The weight ``(vocab, width)`` that input embeddings are looked up in, for its shape, type and
    device; values that adapters change are not in it."""
    weight: Tensor = in_use(model.get_input_embeddings()).weight
    return weight


def input_tokens(model: Any) -> int | None:
    """Number of tokens that have input embeddings; None if the module does not say."""
    count: int | None = getattr(in_use(model.get_input_embeddings()), "num_embeddings", None)
    return count


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


def output_weight(model: Any) -> Tensor | None:
    """The weight ``(vocab, hidden)`` of the output embeddings, maybe quantised; None if they have
    none. Values that adapters change are not in it: see :func:`is_updated`."""
    weight: Tensor | None = getattr(in_use(model.get_output_embeddings()), "weight", None)
    return weight


@torch.no_grad()
def output_bias(model: Any) -> Tensor | None:
    """What the output embeddings add to every row of logits, ``(vocab,)``; None for nothing."""
    module = model.get_output_embeddings()
    inner = in_use(module)
    bias: Tensor | None = getattr(inner, "bias", None)
    if is_updated(module):
        # Some adapters drop a bias, others add one.
        bias = module(inner.weight.new_zeros(1, output_features(model)[0]))[0]
    return bias


def made_of(module: Any) -> tuple[list[Tensor], Hashable]:
    """What a module's output depends on: its tensors, and which adapters of PEFT are active."""
    if module is None:
        return [], ()
    switches = [
        (part.disable_adapters, tuple(part.active_adapters), tuple(part.merged_adapters))
        for part in module.modules()
        if isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper))
    ]
    return [*module.parameters(), *module.buffers()], tuple(switches)
