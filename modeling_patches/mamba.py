"""The recurrence of Mamba-2 models (Dao and Gu, 2024) over the tokens of a tree; see
:mod:`.recurrences`."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from modeling_patches.recurrences import (
    DELTA,
    Kept,
    Step,
    finite,
    joined,
    path_logs,
)


def _time_step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return (F.softplus(dt) if softplus else dt).float()


def mamba2_run(
    state: Tensor, step: Step, earlier: Kept | None, /, x: Tensor, dt: Tensor, A: Tensor, B: Tensor,
    C: Tensor, chunk_size: int | None = None, D: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, **kwargs: Any,
) -> tuple[Tensor, Kept]:  # fmt: skip
    """S_t = exp(A d_t) S_p + d_t x_t B_t', one decay per head; the dual, quadratic form.

    y_i = 2^c_i S C_i + sum over j of D_ij (C_i' B_j) d_j x_j + D x_i, c the sums of A d. Time
    steps are not clamped, as in the stock form for one token.

    Args:
        x: ``(batch, n, heads, p)``
        dt: ``(batch, n, heads)``
        B, C: ``(batch, n, groups, states)``
        state: ``(batch, heads, p, states)``
    """
    d = _time_step(dt, dt_bias, dt_softplus)
    logs = joined(earlier, "g", path_logs(A.float() * d).transpose(1, 2), 2)
    own = step.sums(logs)
    cum = joined(earlier, "c", own, 2)
    values = joined(earlier, "k", finite(x * d[..., None]).transpose(1, 2), 2)
    keys, c = joined(earlier, "u", finite(B).transpose(1, 2), 2), C.float().transpose(1, 2)
    gram, each = c @ keys.transpose(-1, -2), x.shape[2] // B.shape[2]
    if each > 1:  # a group serves several heads
        gram, c = gram.repeat_interleave(each, 1), c.repeat_interleave(each, 1)
    out = (gram * step.pairs(own, cum)) @ values
    out = out + (c * own.exp2()[..., None]) @ state.float().transpose(-1, -2)
    out = out.transpose(1, 2)
    if D is not None:
        out = out + D.float()[..., None] * x.float()
    return out.to(x.dtype).contiguous(), {"g": logs, "c": cum, "k": values, "u": keys}


MAMBA2 = DELTA._replace(run=mamba2_run)
