"""Estimates the memory of a training from the base model's config, without loading weights.

Models are built on the meta device, where tensors have shapes but no values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_spec.core.checks import first_line
from hf_spec.hub.folder import attached
from modeling_patches.support import check_model

#: Moments that AdamW stores for each trained parameter.
MOMENTS = 2


@dataclass(frozen=True)
class Estimate:
    """Parameters and bytes of a training with AdamW, on each device; nothing is sharded.

    Activations are not included, as they depend on kernels, checkpointing and the batch.

    Attributes:
        base_parameters: number of parameters of the base model, shared ones once.
        trained_parameters: number of trained parameters.
        base: bytes of the base model's weights.
        adapter: bytes of the adapter's weights.
        gradients: bytes of the gradients.
        optimizer: bytes of AdamW's moments.
    """

    base_parameters: int
    trained_parameters: int
    base: int
    adapter: int
    gradients: int
    optimizer: int

    @property
    def memory(self) -> int:
        """Total number of bytes."""
        return self.base + self.adapter + self.gradients + self.optimizer

    def lines(self) -> list[str]:
        """The estimate as lines of text."""
        parts = {
            "base model": self.base, "adapter": self.adapter, "gradients": self.gradients,
            "optimiser (AdamW)": self.optimizer, "in all": self.memory,
        }  # fmt: skip
        return [
            f"parameters: {self.base_parameters:,} of the base model, {self.trained_parameters:,} "
            "trained",
            "memory on each device, unless it is sharded; activations come on top:",
            *(f"  {name:18} {size / 2**20:10,.1f} MiB" for name, size in parts.items()),
        ]


def meta_model(path: str, dtype: str) -> Any:
    """The model that a config describes, on the meta device.

    Args:
        path: a folder or a repository on the Hub, with a ``config.json``.
        dtype: name of the dtype; ``auto`` for that of the config.

    Raises:
        ValueError: there is no such config, or it is not that of a causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
        chosen = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=chosen).eval()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"cannot read the config of {path!r}: {first_line(error)}") from error


def estimate(model: Any, config: Any) -> Estimate:
    """Estimate the training of an adapter.

    Args:
        model: the base model, on any device; unchanged afterwards.
        config: the adapter's config.

    Raises:
        ValueError: the model is not supported, or the adapter does not fit it.
    """
    check_model(model)
    base = list(model.parameters())
    known = {id(parameter) for parameter in base}
    with torch.device(base[0].device), attached(model, config, in_float32=True) as peft_model:
        own = [one for one in peft_model.parameters() if id(one) not in known]
        trained = [one for one in own if one.requires_grad]
        trained += base if config.trains_base else []
        gradients = sum(one.nbytes for one in trained)
        return Estimate(
            base_parameters=sum(one.numel() for one in base),
            trained_parameters=sum(one.numel() for one in trained),
            base=sum(one.nbytes for one in base),
            adapter=sum(one.nbytes for one in own),
            gradients=gradients,
            optimizer=MOMENTS * gradients,
        )
