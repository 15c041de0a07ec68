"""The output of a call and its statistics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers.generation import GenerateDecoderOnlyOutput

from hf_spec.core.memory import memory
from hf_spec.core.stats import SpecStats
from hf_spec.modeling_patches.modules import unwrapped


@dataclass
class SpecGenerateOutput(GenerateDecoderOnlyOutput):
    """``GenerateDecoderOnlyOutput`` with statistics.

    ``scores`` and ``logits`` are those of plain generation, and zero past the end of a sequence.
    The KV cache holds all tokens of each sequence except the last.

    Attributes:
        spec_stats: counts and times of this call.
    """

    spec_stats: SpecStats | None = None


def last_stats(model: nn.Module) -> SpecStats | None:
    """Statistics of the last call of ``model.generate`` with a strategy; None if there was none.

    Args:
        model: the model, or a PEFT or ``torch.compile`` wrapper around it.

    Raises:
        ValueError: it is no model.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"last_stats({model!r}): give the model whose generate() was called.")
    stats: SpecStats | None = memory(unwrapped(model)).get(SpecStats)
    return stats
