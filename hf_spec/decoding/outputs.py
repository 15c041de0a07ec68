"""The output of a call and its statistics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import GenerationMixin
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
        model: the model, or a module around it: a ``PeftModel``, what ``torch.compile`` or a
            distributed training makes of it, one of your own.

    Raises:
        ValueError: it is no model.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"last_stats({model!r}): give the model whose generate() was called.")
    if (own := memory(unwrapped(model)).get(SpecStats)) is not None:
        return own
    inside = (one for one in model.modules() if isinstance(one, GenerationMixin))
    return next((found for one in inside if (found := memory(one).get(SpecStats))), None)
