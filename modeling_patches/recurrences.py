"""Recurrences over the tokens of a tree: linear attention, state space models, convolutions.

A recurrent layer computes ``S_t = f(S_p, x_t)`` for every token t after its predecessor p; in a
tree, p is the parent. One forward computes the outputs of all nodes without making any node's
state: the chunked form of each rule has a causal triangle, which becomes the tree's ancestor
matrix. It keeps a few rows per node, from which one product advances the state along the accepted
path.

A :class:`Rule` is a pair of functions:

* ``run(state, step, earlier, ...)`` returns the outputs of the new tokens and what to keep of all
  tokens of the step, by name; ``earlier`` is what was kept of those before. Its other arguments are
  those of the function in Transformers that applies the rule, those without effect here left out.
* ``advance(state, kept, path, counts)`` returns the state after the first ``counts[b]`` tokens of
  ``path[b]``.

Notation: i is a new token; j is i or an ancestor of i among the step's tokens; c_i is the sum of
log decays along i's path, to the base 2, as CPUs compute exp2 faster than exp; D_ij = 2^(c_i - c_j)
where j is i or above it, else 0; S is the state before the step; e is the accepted end. Sums and
products are in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from hf_spec.threads import cached_property

#: 2^-160 is 0 in float32. Smaller logs would cost precision of their sums, and -inf gives NaN.
LEAST = -160.0
LOG2E = 1.4426950408889634
#: Elements of the tensor of all pairs of tokens that CPUs' caches hold.
IN_CACHE = 2**18

#: What a step keeps of its tokens, by name.
Kept = dict[str, Tensor]


class Rule(NamedTuple):
    """A recurrence; see the module."""

    run: Callable[..., tuple[Tensor, Kept]]
    advance: Callable[[Tensor, Kept, Tensor, Tensor], Tensor]
    state_ndim: int  # dimensions of its state, the batch included
    keeps: tuple[str, ...]  # names of what it keeps
    kind: str = "rule"  # or "conv": which of a layer's states it advances


class Step:
    """The new tokens of a forward and those above them; made once for all layers.

    Args:
        visible: ``(batch, n, m + n)`` bool, which of the step's tokens are each new token or above
            it. The first ``m`` were forwarded earlier in the step. Ancestors have smaller indices,
            and what an ancestor sees is what its descendants see before it.
        sequential: whether to compute token by token where that is faster: on CPUs, in code that is
            not traced.
    """

    def __init__(self, visible: Tensor, sequential: bool | None = None):
        self.visible = visible
        self.new, self.all = visible.shape[1:]
        self.old = self.all - self.new
        self.sequential = not visible.is_cuda if sequential is None else sequential
        self._taps: dict[tuple[int, int], Tensor] = {}

    def newest(self, width: int) -> Tensor:
        """``(batch, n, width)``: the token, its parent, its grandparent, ...; -1 above the root."""
        order = torch.arange(self.all, device=self.visible.device)
        found = torch.where(self.visible, order, -1).topk(min(width, self.all), dim=-1).values
        return F.pad(found, (0, width - found.shape[-1]), value=-1)

    def taps(self, width: int, past: int) -> Tensor:
        """``(width, batch * n)`` places of the last inputs of each token, oldest first, in
        [``past`` inputs before the step, tokens of the step] of all rows one after the other."""
        key = width, past
        if key not in self._taps:
            newest = self.newest(width)
            count = (newest >= 0).sum(-1, keepdim=True)
            before = past - 1 - (torch.arange(width, device=newest.device) - count)
            places = torch.where(newest >= 0, past + newest, before).flip(-1)
            starts = torch.arange(len(places), device=places.device) * (past + self.all)
            self._taps[key] = (places + starts[:, None, None]).flatten(0, 1).t().contiguous()
        return self._taps[key]

    @cached_property
    def jumps(self) -> list[Tensor]:
        """For path doubling: ``(batch, n)`` the ancestor 1, 2, 4, ... above; -1 above the root.
        Only of a step without earlier tokens."""
        above, found, reach = self.newest(2)[..., 1], list[Tensor](), 1
        while reach < self.all:
            found.append(above)
            above = torch.where(above >= 0, above.gather(1, above.clamp(min=0)), -1)
            reach *= 2
        return found

    def sums(self, logs: Tensor) -> Tensor:
        """Sum of ``(batch, ..., m + n)`` logs along each new token's path: ``(batch, ..., n)``."""
        if self.visible.is_cuda:  # no product of matrices, in which TF32 would round the logs
            return torch.where(self._like(logs), logs[..., None, :], 0).sum(-1)
        seen = self.visible.to(logs.dtype).transpose(1, 2)
        return logs @ seen.view(len(seen), *[1] * (logs.ndim - 3), *seen.shape[1:])

    def pairs(self, own: Tensor, cum: Tensor) -> Tensor:
        """``(batch, ..., n, m + n)`` 2^(own_i - cum_j) where j is i or above it; 0 elsewhere."""
        between = own[..., :, None] - cum[..., None, :]
        return torch.where(self._like(own), between, -torch.inf).exp2()

    def _like(self, logs: Tensor) -> Tensor:
        return self.visible.view(len(self.visible), *[1] * (logs.ndim - 2), self.new, self.all)


def joined(earlier: Kept | None, name: str, new: Tensor, dim: int) -> Tensor:
    return new if earlier is None else torch.cat([earlier[name], new], dim)


def entries(tensor: Tensor, path: Tensor, dim: int) -> Tensor:
    """Entries ``path`` (batch, depth) along a dimension; both batches may also be 1."""
    index = path.view(len(path), *[1] * (dim - 1), -1, *[1] * (tensor.ndim - dim - 1))
    return tensor.take_along_dim(index, dim)


def at_end(cum: Tensor, path: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Decay of the state up to the path's end, and from each of its tokens to there: by ``cum``
    (batch, heads, m + n), 2^c_e (batch, heads) and 2^(c_e - c_j) (batch, heads, depth), 0 after the
    end."""
    within = torch.arange(path.shape[1], device=path.device) < counts[:, None]
    along = entries(cum, path, 2)
    last = (counts - 1).clamp(min=0)
    end = along.gather(2, last[:, None, None].expand(-1, cum.shape[1], 1))
    weights = (end - along).masked_fill(~within[:, None], -torch.inf).exp2()
    return torch.where(counts[:, None] > 0, end[..., 0], 0).exp2(), weights


def path_logs(decay: Tensor) -> Tensor:
    """Log decays to the base 2, of natural ones, in float32; their sums and differences are finite,
    see :data:`LEAST`."""
    return (decay.float() * LOG2E).nan_to_num(0.0, 0.0, LEAST).clamp(min=LEAST)


def finite(tensor: Tensor) -> Tensor:
    """In float32, without the infinities and NaN that a rejected token may have: other tokens give
    it a weight of 0, and 0 times these is NaN."""
    return tensor.float().nan_to_num(0.0, 0.0, 0.0)


# -- short convolutions --------------------------------------------------------------------------


def conv_run(
    state: Tensor, step: Step, earlier: Kept | None, /, x: Tensor, weight: Tensor,
    bias: Tensor | None = None, activation: str | None = None, **kwargs: Any,
) -> tuple[Tensor, Kept]:  # fmt: skip
    """Each token is convolved with its ancestors: ``(batch, channels, n)``.

    Args:
        x: ``(batch, channels, n)``
        weight: ``(channels, width)``
        state: ``(batch, channels, width)`` the last inputs before the step.
    """
    inputs = joined(earlier, "x", x.transpose(1, 2), 1)
    rows = torch.cat([state.transpose(1, 2).to(inputs.dtype), inputs], 1).float()
    taps = step.taps(weight.shape[-1], state.shape[2]).unbind()
    weights, flat = weight.float().t().unbind(), rows.flatten(0, 1)
    out = flat.index_select(0, taps[0]) * weights[0]
    # Tap by tap: a tensor of all windows would be slower. Rounded once, as convolutions are.
    for places, tap in zip(taps[1:], weights[1:]):
        out = torch.addcmul(out, flat.index_select(0, places), tap)
    if bias is not None:
        out = out + bias.float()
    out = out.view(len(x), step.new, -1).to(weight.dtype)
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.transpose(1, 2).to(x.dtype), {"x": inputs}


def conv_advance(state: Tensor, kept: Kept, path: Tensor, counts: Tensor) -> Tensor:
    """The last inputs at the end of the path."""
    size, depth = state.shape[2], path.shape[1]
    back = counts[:, None] - torch.arange(size, 0, -1, device=path.device)  # place in the path
    here = path.gather(1, back.clamp(0, depth - 1)) + size
    places = torch.where(back >= 0, here, size + back)
    rows = torch.cat([state.transpose(1, 2), kept["x"].to(state.dtype)], 1)
    return entries(rows.transpose(1, 2), places, 2)


# -- gated delta rule, one decay per head (Yang et al., 2024) or per channel (KDA) -----------------


def _delta_inputs(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Float32 tensors ``(batch, heads, n, ...)``; the query is scaled."""
    heads = value.shape[2]
    both = finite(torch.stack([query, key])).transpose(2, 3)
    v, b = (finite(part).transpose(1, 2) for part in (value, beta))
    if normalize:
        both = both * torch.rsqrt((both * both).sum(-1, keepdim=True) + 1e-6)
    if both.shape[2] != heads:  # a key head serves several value heads
        both = both.repeat_interleave(heads // both.shape[2], 2)
    q, k = both
    return q * q.shape[-1] ** -0.5, k, v, b[..., None]


def _delta_outputs(
    system: Tensor, attention: Tensor, reads: Tensor, v: Tensor, b: Tensor, step: Step,
    earlier: Kept | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs of the new tokens ``(batch, heads, n, d_v)``, and the updates u of all tokens."""
    n, m = step.new, step.old
    known = v * b - reads[:, :, :n]
    if earlier is not None:
        known = known - system[..., :m] @ earlier["u"]
    u = known
    if n > 1:  # ancestors come first: lower triangular; the diagonal is not read
        u = torch.linalg.solve_triangular(system[..., m:], known, upper=False, unitriangular=True)
    u = joined(earlier, "u", u, 2)
    return reads[:, :, n:] + attention @ u, u


def delta_run(
    state: Tensor, step: Step, earlier: Kept | None, /, query: Tensor, key: Tensor, value: Tensor,
    g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
) -> tuple[Tensor, Kept]:  # fmt: skip
    """Gated delta rule: S_t = a_t S_p + b_t k_t (v_t - k_t' a_t S_p)'; ``(batch, n, heads, d_v)``.

    u_i = b_i (v_i - 2^c_i k_i' S) - sum over j above i of b_i D_ij (k_i' k_j) u_j: one solve;
    o_i = 2^c_i q_i' S + sum over j of D_ij (q_i' k_j) u_j.

    Args:
        query, key, value: ``(batch, n, heads, d)``
        g: ``(batch, n, heads)`` log decays.
        beta: ``(batch, n, heads)``
        state: ``(batch, heads, d_k, d_v)``
    """
    q, k, v, b = _delta_inputs(query, key, value, beta, use_qk_l2norm_in_kernel)
    logs = joined(earlier, "g", path_logs(g).transpose(1, 2), 2)
    own = step.sums(logs)
    keys, cum = joined(earlier, "k", k, 2), joined(earlier, "c", own, 2)
    pairs, decay, n = step.pairs(own, cum), own.exp2()[..., None], step.new
    grams = torch.cat([k * b, q], 2) @ keys.transpose(-1, -2)
    reads = torch.cat([k * (b * decay), q * decay], 2) @ state.float()
    out, u = _delta_outputs(
        grams[:, :, :n] * pairs, grams[:, :, n:] * pairs, reads, v, b, step, earlier
    )
    return out.transpose(1, 2).to(query.dtype), {"g": logs, "c": cum, "k": keys, "u": u}


def delta_advance(state: Tensor, kept: Kept, path: Tensor, counts: Tensor) -> Tensor:
    """S_e = 2^c_e S + sum over j of 2^(c_e - c_j) k_j u_j', with c per head or per channel, and u
    of a head or of a group."""
    logs = kept["c"] if kept["c"].ndim == 4 else kept["c"][..., None]
    batch, heads, _, dim = logs.shape
    decay, weights = at_end(logs.transpose(2, 3).flatten(1, 2), path, counts)
    k, u = entries(kept["k"], path, 2), entries(kept["u"], path, 2)
    if u.shape[1] != heads:
        u = u.repeat_interleave(heads // u.shape[1], 1)
    left = k.transpose(-1, -2) * weights.view(batch, heads, dim, -1)
    new = state.float() * decay.view(batch, heads, dim, 1)
    new.flatten(0, 1).baddbmm_(left.flatten(0, 1), u.flatten(0, 1))
    return new.to(state.dtype)


def kda_run(
    state: Tensor, step: Step, earlier: Kept | None, /, query: Tensor, key: Tensor, value: Tensor,
    g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
) -> tuple[Tensor, Kept]:  # fmt: skip
    """:func:`delta_run` with a decay per channel of the key; g is ``(batch, n, heads, d_k)``."""
    # D_ij is a vector, and not split into 2^c_i 2^-c_j, two products of matrices: 2^-c_j overflows.
    q, k, v, b = _delta_inputs(query, key, value, beta, use_qk_l2norm_in_kernel)
    logs = joined(earlier, "g", path_logs(g).transpose(1, 2), 2)
    own = step.sums(logs.transpose(2, 3)).transpose(2, 3).contiguous()
    keys, cum = joined(earlier, "k", k, 2), joined(earlier, "c", own, 2)
    both = torch.stack([k * b, q], 3)  # (batch, heads, n, 2, d)
    some = max(1, IN_CACHE // keys.numel()) if step.sequential else step.new
    grams = []
    for start in range(0, step.new, some):
        part = slice(start, start + some)
        hidden = ~step.visible[:, None, part, :, None]
        between = own[:, :, part, None] - cum[:, :, None]  # (batch, heads, part, m + n, d)
        far = between.masked_fill(hidden, -torch.inf).exp2() * keys[:, :, None]
        grams.append(both[:, :, part] @ far.transpose(-1, -2))
    system, attention = torch.cat(grams, 2).unbind(3)
    decay = own.exp2()
    reads = torch.cat([k * decay * b, q * decay], 2) @ state.float()
    out, u = _delta_outputs(system, attention, reads, v, b, step, earlier)
    return out.transpose(1, 2).to(query.dtype), {"g": logs, "c": cum, "k": keys, "u": u}


_DECAYED = "g", "c", "k", "u"
CONV = Rule(conv_run, conv_advance, 3, ("x",), "conv")
DELTA = Rule(delta_run, delta_advance, 4, _DECAYED)
KDA = Rule(kda_run, delta_advance, 4, _DECAYED)
