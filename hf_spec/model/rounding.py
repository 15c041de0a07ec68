"""How far two computations of the same numbers may be apart."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

#: Largest relative error of logits and states that rounding explains, by the least precise dtype
#: that is computed with: more than what was met (0.010 in float16 and 0.052 in bfloat16, of Gemma 3
#: 270M; 0.068 of the scores of a tree). A mask that hides or shows a neighbor mostly gives 0.1 to
#: 0.6.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """The tolerance of what is computed with these dtypes, see :data:`TOLERANCE`."""
    return max((TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE), default=1e-1)


def difference(most: float, expected: Sequence[Tensor], found: Sequence[Tensor]) -> str | None:
    """How two results differ by more than this relative error; None if they do not. Integers,
    which are choices, must be equal."""
    for one, other in zip(expected, found, strict=True):
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return "compiled code gives something else (other choices)"
            continue
        if not one.numel():
            continue
        scale = one.masked_fill(~one.isfinite(), 0).abs().max().clamp(min=1e-6)
        same = (one == other) | (one.isnan() & other.isnan())
        apart = torch.where(same, 0, one - other)
        error = float((apart.abs().max() / scale).nan_to_num(torch.inf))
        if not error <= most:
            return f"compiled code gives something else (relative error {error:.2g})"
    return None
