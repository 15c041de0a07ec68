"""Tables computed once from a model's and an adapter's weights, and again if these change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_spec.modeling_patches.weights import made_of
from hf_spec.modeling_patches.weights_version import made_anew

Made = TypeVar("Made")


def made_once(owner: Tensor, others: Sequence[Any], make: Callable[[], Made]) -> Made:
    """The result of ``make()`` for these weights; kept as long as the owner exists.

    Whether they have changed is looked up each time, for which the host waits for the device: ask
    once per call of ``generate``.

    Args:
        owner: a tensor of the adapter; there is one such table per owner.
        others: the other inputs: tensors; modules, with PEFT's adapters on them; or None.
    """
    weights, switches = [owner], []
    for other in others:
        tensors, switch = ([other], ()) if isinstance(other, Tensor) else made_of(other)
        weights += tensors
        switches.append(switch)
    plain = [one for one in weights if is_plain(one)]
    special = [one for one in weights if not is_plain(one)]  # held, so that no other gets its id
    key = [*map(id, special)], switches
    with torch.autocast(owner.device.type, enabled=False):  # later calls may run without
        return made_anew(_KNOWN, owner, plain, lambda: (make(), special), key)[0]


def is_plain(weight: Any) -> bool:
    """Whether a weight is a plain tensor: neither quantized nor sharded over devices."""
    return isinstance(weight, Tensor) and type(weight.data) is Tensor and not weight.is_meta


#: Tables by owner.
_KNOWN: Any = WeakTensorKeyDictionary()
