"""Trees through recurrent layers: rules of linear attention, and those of Mamba."""

import functools
import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from hf_spec.modeling_patches.per_call import Changes, Replaceable
from hf_spec.threads import cached_property

# -- Recurrences over the tokens of a tree: linear attention, state space models, convolutions -----
#
# A recurrent layer computes ``S_t = f(S_p, x_t)`` for every token t after its predecessor p; in a
# tree, p is the parent. One forward computes the outputs of all nodes without making any node's
# state: the chunked form of each rule has a causal triangle, which becomes the tree's ancestor
# matrix. It keeps a few rows per node, from which one product advances the state along the accepted
# path.
#
# A :class:`Rule` is a pair of functions:
#
# * ``run(state, step, earlier, ...)`` returns the outputs of the new tokens and what to keep of all
# tokens of the step, by name; ``earlier`` is what was kept of those before. Its other arguments are
# those of the function in Transformers that applies the rule, those without effect here left out. *
# ``advance(state, kept, path, counts)`` returns the state after the first ``counts[b]`` tokens of
# ``path[b]``.
#
# Notation: i is a new token; j is i or an ancestor of i among the step's tokens; c_i is the sum of
# log decays along i's path, to the base 2, as CPUs compute exp2 faster than exp; D_ij = 2^(c_i -
# c_j) where j is i or above it, else 0; S is the state before the step; e is the accepted end. Sums
# and products are in float32.

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
    goes_on: bool = True  # whether Transformers goes on from its state by several tokens


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


def _delta_grams(
    keys_now: Tensor, q: Tensor, keys: Tensor, own: Tensor, cum: Tensor, step: Step
) -> tuple[Tensor, Tensor]:
    """D_ij-weighted products of the rows ``(batch, heads, n, d_k)`` of new tokens with the keys of
    all: those of ``keys_now`` and those of the queries, ``(batch, heads, n, m + n)`` each."""
    if own.ndim == 3:  # a decay per head
        pairs = step.pairs(own, cum)
        system, attention = (torch.cat([keys_now, q], 2) @ keys.transpose(-1, -2)).chunk(2, 2)
        return system * pairs, attention * pairs
    # D_ij is a vector, and not split into 2^c_i 2^-c_j, two products of matrices: 2^-c_j overflows.
    both = torch.stack([keys_now, q], 3)  # (batch, heads, n, 2, d)
    some = max(1, IN_CACHE // keys.numel()) if step.sequential else step.new
    grams = []
    for start in range(0, step.new, some):
        part = slice(start, start + some)
        hidden = ~step.visible[:, None, part, :, None]
        between = own[:, :, part, None] - cum[:, :, None]  # (batch, heads, part, m + n, d)
        far = between.masked_fill(hidden, -torch.inf).exp2() * keys[:, :, None]
        grams.append(both[:, :, part] @ far.transpose(-1, -2))
    system, attention = torch.cat(grams, 2).unbind(3)
    return system, attention


def delta_run(
    state: Tensor, step: Step, earlier: Kept | None, /, query: Tensor, key: Tensor, value: Tensor,
    g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
) -> tuple[Tensor, Kept]:  # fmt: skip
    """S_t = a_t S_p + b_t k_t (v_t - k_t' a_t S_p)', with a decay a_t per head, or per channel of
    the key (KDA); ``(batch, n, heads, d_v)``.

    u_i = b_i (v_i - 2^c_i k_i' S) - sum over j above i of b_i D_ij (k_i' k_j) u_j: one solve;
    o_i = 2^c_i q_i' S + sum over j of D_ij (q_i' k_j) u_j.

    Args:
        query, key, value: ``(batch, n, heads, d)``
        g: ``(batch, n, heads)`` log decays, or ``(batch, n, heads, d_k)``.
        beta: ``(batch, n, heads)``
        state: ``(batch, heads, d_k, d_v)``
    """
    q, k, v, b = _delta_inputs(query, key, value, beta, use_qk_l2norm_in_kernel)
    logs = joined(earlier, "g", path_logs(g).transpose(1, 2), 2)
    if logs.ndim == 3:
        own = step.sums(logs)
        decay = own.exp2()[..., None]
    else:
        own = step.sums(logs.transpose(2, 3)).transpose(2, 3).contiguous()
        decay = own.exp2()
    keys, cum = joined(earlier, "k", k, 2), joined(earlier, "c", own, 2)
    system, attention = _delta_grams(k * b, q, keys, own, cum, step)
    n, m = step.new, step.old
    reads = torch.cat([k * (b * decay), q * decay], 2) @ state.float()
    u = v * b - reads[:, :, :n]
    if earlier is not None:
        u = u - system[..., :m] @ earlier["u"]
    if n > 1:  # ancestors come first: lower triangular; the diagonal is not read
        u = torch.linalg.solve_triangular(system[..., m:], u, upper=False, unitriangular=True)
    u = joined(earlier, "u", u, 2)
    out = (reads[:, :, n:] + attention @ u).transpose(1, 2)
    return out.to(query.dtype), {"g": logs, "c": cum, "k": keys, "u": u}


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


CONV = Rule(conv_run, conv_advance, 3, ("x",), "conv")
DELTA = Rule(delta_run, delta_advance, 4, ("g", "c", "k", "u"))


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
MAMBA1 = Rule(mamba1_run, mamba1_advance, 3, ("d", "x", "b", "a"), goes_on=False)


# -- Trees of tokens in a model's recurrent layers -------------------------------------------------
#
# Such layers look up module-level functions (``causal_conv1d_fn``, ``torch_chunk_gated_delta_rule``
# and others) at each call, in the module that defines their class. A permanent dispatcher takes the
# place of each, which asks the running call (:mod:`.per_call`) what to run; other calls run what
# was there before, be it code of Transformers, of a package such as ``fla`` or ``mamba_ssm``, or a
# kernel from the Hub. Layers are found by the names that their code uses, so those of unknown
# models are found, too. Those that update a state without these functions are refused by name.

_CONV = "causal_conv1d_fn"
#: Functions that apply a rule to several tokens, by name.
RULES: dict[str, Rule] = {
    _CONV: CONV,
    "torch_chunk_gated_delta_rule": DELTA,
    "chunk_kimi_delta_attention": DELTA,
    "mamba2_chunk_scan": MAMBA2,
    "mamba_selective_scan": MAMBA1,
}
#: Those that return the state after their last token unasked.
RETURNS_STATE = frozenset({"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"})
#: Methods of a cache with which a layer changes its states.
_UPDATES = {"update_conv_state", "update_recurrent_state", "get_linear_cache"}


class States(Protocol):
    """What holds the states of a forward."""

    def run(self, rule: Rule, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The outputs of a rule of the running layer, whose further arguments are given, and the
        layer's state before the step."""


class Running:
    """The states of the running forward, to be set before it."""

    states: States


class RecurrentModule(NamedTuple):
    """A module that keeps states."""

    module: Any
    owner: ModuleType  # in which its class looks up functions of these names
    functions: frozenset[str]

    @property
    def rule(self) -> Rule:
        """What it computes, a convolution aside if there is more."""
        return RULES[next(iter(self.functions - {_CONV}), _CONV)]


def keeps_states(module: nn.Module) -> bool:
    """Whether a module keeps recurrent states in the cache."""
    kind: Any = type(module)
    return bool(_names(kind) & _UPDATES)


def recurrent_modules(model: nn.Module) -> list[RecurrentModule]:
    """The modules of a model that keep states in its cache.

    Raises:
        ValueError: the forward of one of them updates a state by code of its own that is not known.
    """
    found = []
    for module in filter(keeps_states, model.modules()):
        kind: Any = type(module)
        names = _names(kind)
        forward = inspect.unwrap(kind.forward)
        owner = sys.modules[forward.__module__]
        functions = frozenset(names & set(RULES))
        convolves, recurs = _CONV in functions, bool(functions - {_CONV})
        # Every rule follows a convolution, whose update tells which layer runs.
        if not (convolves and recurs == ("update_recurrent_state" in names)):
            raise ValueError(
                f"{type(module).__name__} updates a recurrent state by code of its own, which is "
                "not written for trees"
            )
        found.append(RecurrentModule(module, owner, functions))
    return found


def recurrent_rules(model: nn.Module) -> dict[int, Rule]:
    """The rule of each layer with a state, its convolution aside.

    Raises:
        ValueError: see :func:`recurrent_modules`.
    """
    return {found.module.layer_idx: found.rule for found in recurrent_modules(model)}


@functools.lru_cache(maxsize=1024)  # asked for every module in each call
def _names(kind: type) -> frozenset[str]:
    """The names that the code of a class's methods uses."""
    methods = (inspect.unwrap(one) for one in vars(kind).values() if inspect.isfunction(one))
    codes = (one.__code__ for one in methods if hasattr(one, "__code__"))
    return frozenset(name for code in codes for name in code.co_names)


def tree_recurrences(model: nn.Module, changes: Changes, running: Running) -> None:
    """Have the model's layers apply their rules to the tokens of the running step."""
    for module, owner, functions in recurrent_modules(model):
        own = vars(module).get("forward")
        if getattr(own, "__func__", None) is not None and not hasattr(own, "_hf_hook"):
            # A kernel from the Hub replaces the whole layer: run the class's forward.
            changes.instead(module, "forward", type(module).forward.__get__(module))
        for name in functions:
            function = getattr(owner, name)
            if not isinstance(function, Replaceable):
                setattr(owner, name, Replaceable(owner, name, function))
            changes.instead(owner, name, partial(_function, name, running))


def _function(name: str, running: Running, /, *args: Any, **kwargs: Any) -> Any:
    out, state = running.states.run(RULES[name], *args, **kwargs)
    # Caches ignore the state.
    asked = kwargs.get("return_final_states") or kwargs.get("return_last_state")
    return (out, state) if name in RETURNS_STATE or asked else out
