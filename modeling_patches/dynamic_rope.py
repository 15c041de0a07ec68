"""Rotary frequencies that follow the length of the longest sequence: dynamic NTK, LongRoPE.

Transformers (``dynamic_rope_update``) chooses the frequencies of a forward by its largest position.
Plain generation has one new token per sequence in it; here the caller says how long the longest
sequence is in the plain step that a forward stands for.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_spec.modeling_patches.per_call import Changes, plain

#: More than any length.
_FAR = 2**60
#: Models whose plain generation computes its cache anew when frequencies change.
_RECOMPUTE = frozenset({"phi3", "phimoe", "phi4_multimodal"})


class DynamicRope:
    """Rotates the tokens of a model's forwards as plain generation does at :attr:`length`.

    Args:
        changes: those that the forwards run with.

    Attributes:
        end: the largest length with the original frequencies.
        varies: whether they change with each length beyond (dynamic NTK), or once (LongRoPE).
        length: of the longest sequence, with the first token of each in the next forward.
        limit: the largest length with the frequencies of ``length``.
        last: the largest length of the call.
        recomputes: whether the cache must be computed anew at the first token beyond ``end``.
    """

    def __init__(self, model: Any, changes: Changes):
        ends = rope_ends(model)
        self.end = min(end for end, _ in ends)
        self.varies = len(ends) > 1 or any(varies for _, varies in ends)
        self.length, self.limit, self.last, self.recomputes = 1, self.end, _FAR, False
        for module in model.modules():
            if hasattr(module, "rope_type"):
                changes.instead(module, "forward", partial(self._rotate, module))

    def move(self, length: int) -> None:
        """Set the length of the next forward."""
        self.length = length
        beyond = length if self.varies else _FAR
        self.limit = self.end if length <= self.end else beyond

    def room(self, rows: int) -> int:
        """How much deeper than the next token draft tokens may be, with so many unfinished rows.

        Plain generation changes the frequencies of all rows in one step. So rows that will pass
        ``end`` take plain steps, in which they stay together, unless there is one only.
        """
        if self.length <= self.end < self.last and rows > 1:
            return 0
        return self.limit - self.length if self.last > self.end else _FAR

    def _rotate(
        self, module: nn.Module, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        longest = torch.full_like(position_ids[..., :1], self.length - 1)
        ids = torch.cat([position_ids.clamp(max=self.limit - 1), longest], dim=-1)
        made = plain(module, "forward")(x, ids, *args, **kwargs)
        if isinstance(made, Tensor):  # complex (batch, n, features); others: cosines and sines
            return made[..., :-1, :]
        return tuple(part[..., :-1, :] for part in made)


def rope_ends(model: Any) -> set[tuple[int, bool]]:
    """Lengths up to which rotary frequencies are the original ones, and whether they change with
    each length beyond: of each kind of layer whose frequencies follow the length."""
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    found = set()
    for one in (rope, *rope.values()):
        kind = one.get("rope_type") if isinstance(one, dict) else None
        if kind == "longrope":
            found.add((one["original_max_position_embeddings"], False))
        elif kind is not None and "dynamic" in kind:
            found.add((text.max_position_embeddings, True))
    return found


def recompute_end(model: Any) -> int | None:
    """The length past which plain generation computes the whole cache anew, if it does: the Phi
    models do, when their frequencies change."""
    text = model.config.get_text_config(decoder=True)
    if text.model_type not in _RECOMPUTE or not rope_ends(model):
        return None
    return text.original_max_position_embeddings
