"""Rotary frequencies that follow the length of the longest sequence: LongRoPE.

Transformers (``longrope_frequency_update``) chooses the frequencies of a forward by its largest
position. Plain generation has one new token per sequence in it; here the caller says how long the
longest sequence is in the plain step that a forward stands for.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modeling_patches.per_call import Changes, plain

#: More than any length.
_FAR = 2**60
#: Models whose plain generation computes its cache anew when frequencies change.
_RECOMPUTE = frozenset({"phi3", "phimoe", "phi4_multimodal"})


class DynamicRope:
    """Rotates the tokens of a model's forwards as plain generation does at :attr:`length`.

    Args:
        end: the largest length with the original frequencies.
        changes: those that the forwards run with.

    Attributes:
        length: of the longest sequence, with the first token of each in the next forward.
        last: the largest length of the call.
        recomputes: whether the cache must be computed anew at the first token beyond ``end``.
    """

    def __init__(self, model: Any, end: int, changes: Changes):
        self.end, self.length, self.last, self.recomputes = end, 1, _FAR, False
        for module in model.modules():
            if hasattr(module, "rope_type"):
                changes.instead(module, "forward", partial(self._rotate, module))

    def room(self, rows: int) -> int:
        """How much deeper than the next token draft tokens may be, with so many unfinished rows.

        Plain generation changes the frequencies of all rows in one step. So rows that will pass
        ``end`` take plain steps, in which they stay together, unless there is one only.
        """
        if self.length <= self.end < self.last:
            return 0 if rows > 1 else self.end - self.length
        return _FAR

    def _rotate(
        self, module: nn.Module, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        limit = self.end if self.length <= self.end else _FAR
        longest = torch.full_like(position_ids[..., :1], self.length - 1)
        ids = torch.cat([position_ids.clamp(max=limit - 1), longest], dim=-1)
        made = plain(module, "forward")(x, ids, *args, **kwargs)
        if isinstance(made, Tensor):  # complex (batch, n, features); others: cosines and sines
            return made[..., :-1, :]
        return tuple(part[..., :-1, :] for part in made)


def rope_end(model: Any, kind: str = "longrope") -> int | None:
    """The length up to which rotary frequencies are the original ones, in a model that has other
    ones beyond for the whole sequence, of this kind: ``longrope``, or ``dynamic`` (NTK)."""
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):
        if isinstance(one, dict) and kind in (one.get("rope_type") or ""):
            end: int = text.max_position_embeddings
            return one.get("original_max_position_embeddings", end) if kind == "longrope" else end
    return None


def recompute_end(model: Any) -> int | None:
    """The length past which plain generation computes the whole cache anew, if it does: the Phi
    models do, when their frequencies change."""
    text = model.config.get_text_config(decoder=True)
    return rope_end(model) if text.model_type in _RECOMPUTE else None
