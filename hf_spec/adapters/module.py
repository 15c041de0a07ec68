"""What one adapter has learned: a module with named parameters, built once from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_spec.adapters.checkpoint import Origin
from hf_spec.modeling_patches.low_rank import LowRank
from hf_spec.modeling_patches.weights import loaded, placement

#: A buffer of adapters that have no tensors. PEFT would write no file of weights for these, and
#: not load them again.
FORMAT = "format"


class Adapter(nn.Module):
    """The parameters of one adapter; each method has a subclass.

    `__init__` makes parameters, buffers and modules, or calls :meth:`hold`. Parameters are trained,
    buffers are not. Floating-point tensors will be cast to the dtype of the base's embeddings, and
    all tensors move to their device. `model` is the base model; it may be read, to start from its
    weights, but not changed. Loading a saved adapter builds it, too, so shapes must follow from
    `config` and `model.config` alone. torch's default device is "cpu" meanwhile, or "meta" if the
    weights are loaded later.

    In files, a tensor is called ``<type>_<name>``, where the name is that in the module.

    Attributes:
        config: its config.
        name: its name on the model.
        origin: where it was loaded from; None for a new one.
        update: its low-rank updates of the base's modules; None if it has none.
    """

    def __init__(self, config: Any, model: Any) -> None:
        super().__init__()
        self.config = config
        self.name = "default"
        self.origin: Origin | None = None
        self.update: LowRank | None = None

    @classmethod
    def build(cls, config: Any, model: Any, on_meta: bool = False) -> Adapter:
        """The adapter as a base model gets it; without memory for its weights if `on_meta`."""
        device, dtype = placement(model)
        with torch.device("meta" if on_meta else "cpu"):
            adapter = cls(config, model)
            if not adapter.state_dict():
                adapter.register_buffer(FORMAT, torch.tensor([config.format_version]))
        # PEFT may have put parameters on the meta device meanwhile, but not buffers.
        on_meta = on_meta or any(parameter.is_meta for parameter in adapter.parameters())
        return adapter.to("meta" if on_meta else device, dtype).train(model.training)

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors by name: parameters, or buffers if they are of integers."""
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                self.register_parameter(name, nn.Parameter(tensor.detach().clone()))
            else:
                self.register_buffer(name, tensor)

    def tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers by name, also where accelerate has offloaded them."""
        found: dict[str, Tensor] = {}
        for path, part in self.named_modules(prefix=""):
            with loaded(part):
                own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
                # DeepSpeed gathers a parameter when it is read as an attribute.
                found |= {f"{path}.{name}".lstrip("."): getattr(part, name) for name, _ in own}
        found.pop(FORMAT, None)
        return found

    def set_vocabulary(self, tokens: Tensor, model: Any) -> None:
        """Set the draft vocabulary of a new adapter that has one: ``(tokens,)`` int64 ids in
        ascending order, as many as its config says."""
        vocabulary: Any = self.draft_vocabulary
        vocabulary.copy_(tokens)

    @property
    def base_update(self) -> LowRank | None:
        """The updates that are part of the base model while the adapter is active."""
        return self.update if self.config.changes_model else None
