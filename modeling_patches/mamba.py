"""The recurrences of Mamba models over the tokens of a tree; see :mod:`.recurrences`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_spec.modeling_patches.recurrences import (
    DELTA,
    LOG2E,
    Kept,
    Rule,
    Step,
    entries,
    finite,
    joined,
    path_logs,
)

# -- Mamba-2 (Dao and Gu, 2024) --------------------------------------------------------------------


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


# -- Mamba-1 (Gu and Dao, 2023) --------------------------------------------------------------------


def mamba1_run(
    state: Tensor, step: Step, earlier: Kept | None, /, x: Tensor, dt: Tensor, A: Tensor, B: Tensor,
    C: Tensor, D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None,
    delta_softplus: bool = False, **kwargs: Any,
) -> tuple[Tensor, Kept]:  # fmt: skip
    """S_t = exp(d_t A) S_p + d_t x_t B_t', a decay per channel and state.

    It has no product form: all tokens' states are made, but not kept.

    Args:
        x, dt, z: ``(batch, d, n)``
        A: ``(d, states)``
        B, C: ``(batch, states, n)``
        state: ``(batch, d, states)``
    """
    bias = None if delta_bias is None else delta_bias[..., None]
    d = joined(earlier, "d", _time_step(dt, bias, delta_softplus).transpose(1, 2), 1)
    xs = joined(earlier, "x", d[:, step.old :] * x.float().transpose(1, 2), 1)
    b = joined(earlier, "b", B.float().transpose(1, 2), 1)
    kept = {"d": d, "x": xs, "b": b, "a": A.float().expand(len(d), *A.shape)}
    if step.sequential or earlier is not None:
        states = _token_by_token(kept, state.float(), step, earlier)
    else:
        states = _doubled(kept, state.float(), step)
    out = (states @ C.float().transpose(1, 2)[..., None])[..., 0].transpose(1, 2)
    if D is not None:
        out = out + x.float() * D.float()[:, None]
    if z is not None:
        out = out * F.silu(z.float())
    return out.to(x.dtype), kept


def _doubled(kept: Kept, state: Tensor, step: Step) -> Tensor:
    """All tokens' states ``(batch, n, d, states)`` in few large operations: for GPUs and graphs."""
    # Each token holds the affine map from the state after the ancestor that it has reached, and
    # composes it with that ancestor's in each round.
    scale = (kept["d"][..., None] * kept["a"][:, None]).exp()
    shift = kept["x"][..., None] * kept["b"][:, :, None]
    for above in step.jumps:
        has, index = (above >= 0)[..., None, None], above.clamp(min=0)
        upper_scale, upper_shift = entries(scale, index, 1), entries(shift, index, 1)
        shift = torch.where(has, scale * upper_shift + shift, shift)
        scale = torch.where(has, scale * upper_scale, scale)
    return scale * state[:, None] + shift


def _token_by_token(kept: Kept, state: Tensor, step: Step, earlier: Kept | None) -> Tensor:
    """The same, ancestors first, in many small operations: for CPUs, whose caches hold a state."""
    d, x, b = (kept[name][:, step.old :] for name in ("d", "x", "b"))
    rows, old = torch.arange(len(d), device=d.device), step.old
    rates = kept["a"][0] * LOG2E
    newest = step.newest(step.all + 1)
    states = d.new_empty(len(d), step.new + 1, *rates.shape)
    states[:, 0] = state  # above the root
    for i in range(step.new):
        parent = newest[:, i, 1]
        before = states[rows, (parent - old + 1).clamp(min=0)]
        if earlier is not None:
            above = newest[:, i, 1:]
            inside = (above >= 0) & (above < old)
            path = torch.where(inside, above, old).sort(-1).values[:, :old]  # the root first
            there = mamba1_advance(state, earlier, path.clamp(max=old - 1), inside.sum(-1))
            before = torch.where((parent < old)[:, None, None], there, before)
        decay = (d[:, i, :, None] * rates).exp2_()
        states[:, i + 1] = torch.addcmul(x[:, i, :, None] * b[:, i, None], decay, before)
    return states[:, 1:]


def mamba1_advance(state: Tensor, kept: Kept, path: Tensor, counts: Tensor) -> Tensor:
    """S_e = exp(A t_e) S + sum over j of exp(A (t_e - t_j)) d_j x_j B_j', t the sums of d."""
    within = (torch.arange(path.shape[1], device=path.device) < counts[:, None])[..., None]
    d, x, b = (torch.where(within, entries(kept[name], path, 1), 0) for name in ("d", "x", "b"))
    left = d.flip(1).cumsum(1).flip(1)  # time from before each token to the end
    weights = ((left - d)[..., None] * kept["a"][:, None]).exp()
    new = (weights * x[..., None] * b[:, :, None]).sum(1)
    return (state.float() * (left[:, 0, :, None] * kept["a"]).exp() + new).to(state.dtype)


MAMBA2 = DELTA._replace(run=mamba2_run)
MAMBA1 = Rule(mamba1_run, mamba1_advance, 3, ("d", "x", "b", "a"))
