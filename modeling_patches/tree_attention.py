"""Attention of a tree's nodes to a long cache, which is read once: a kernel in Triton.

With a dense mask, fused attention kernels read mask and keys many times over. Here the slots of a
KV head are split over the device (Dao et al., "Flash-Decoding for long-context inference", 2023);
each program reads its part of them for all query heads and nodes together, and a second kernel
merges the parts by their log-sum-exp.

What a node sees comes in a few numbers, a *packed* mask (:func:`.attention_masks.unpacked` says
what they mean): a range of slots, of which most programs need no mask at all, and words of 64
slots with a bit for each. Lengths are read on the device, and shapes alone decide what is launched
and allocated, so one recorded program serves all lengths.
"""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Whether Triton interprets kernels, on a CPU (TRITON_INTERPRET=1).
INTERPRETS = bool(triton.knobs.runtime.interpret)
#: Fewest tiles that a program reads; what its start and end cost, and the merge, in tiles.
LEAST, START, MERGE = 4, 2, 2
#: Bytes of shared memory that are left for what is not keys, values and queries.
SCRATCH = 2**11
#: Scores are in base 2.
LOG2E = math.log2(math.e)


@triton.jit
def _rows(base, start, slots, step, D: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
          MASKED: tl.constexpr):  # fmt: skip
    """Keys or values of N slots: (N, P), with zeros behind their D dimensions."""
    s, d = tl.arange(0, N), tl.arange(0, P)
    at = base + start * step + s[:, None] * step + d[None]
    if MASKED:
        return tl.load(at, mask=(start + s < slots)[:, None] & (d < D)[None], other=0.0)
    elif P == D:
        return tl.load(at)
    else:
        return tl.load(at, mask=(d < D)[None], other=0.0)


@triton.jit
def _scores(q, keys, scale, cap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
    if CAPPED:  # cap * tanh(x), where scale makes 2 * x of the scores
        scores = cap - 2.0 * cap / (tl.exp2(scores) + 1.0)
    return scores


@triton.jit
def _added(scores, values, most, total, acc, PRECISION: tl.constexpr):
    """Largest score, sum of weights and weighted values, with those of a tile added."""
    now = tl.maximum(most, tl.max(scores, 1))
    weights, before = tl.exp2(scores - now[:, None]), tl.exp2(most - now)
    acc = acc * before[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return now, total * before + tl.sum(weights, 1), acc


@triton.jit(do_not_specialize=["slots", "nodes", "words", "splits", "mask_batch", "mask_node"])
def _split(
    q, k, v, mask, sinks, parts, out, slots, nodes, words, splits, kv_heads, scale, cap,
    q_batch, q_head, q_node, k_batch, k_head, k_slot, v_batch, v_head, v_slot,
    mask_batch, mask_node,
    GROUPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    MERGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M rows, the query heads of some nodes, over one of the splits of their KV head's slots."""
    split = tl.program_id(1)
    b, h = (tl.program_id(2) // kv_heads).to(tl.int64), (tl.program_id(2) % kv_heads).to(tl.int64)
    row = tl.program_id(0) * M + tl.arange(0, M)
    node, head = row // GROUPS, h * GROUPS + row % GROUPS
    live = node < nodes
    d = tl.arange(0, DP)
    q_at = q + b * q_batch + head[:, None] * q_head + node[:, None] * q_node + d[None]
    qs = tl.load(q_at, mask=live[:, None] & (d < D)[None], other=0.0)
    mask += b * mask_batch
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head

    # The range that some row sees, [low, end), which all see from `all_see` on; this split's part
    # of it, [first, last), in tiles of N slots.
    end = tl.load(mask + 1)
    begin = tl.load(mask + node * mask_node, mask=live, other=0)
    all_see = tl.minimum(tl.max(begin, 0), end)
    low = tl.minimum(tl.min(tl.where(live, begin, end), 0), end)
    size = tl.cdiv(tl.cdiv(end - low, splits), N) * N
    first = tl.minimum(low + split * size, end)
    last = tl.minimum(first + size, end)
    whole, tiles = (last - first) // N, tl.cdiv(last - first, N)
    partly = tl.cdiv(tl.maximum(tl.minimum(all_see, last) - first, 0), N)

    most, total = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, VP], tl.float32)
    for tile in range(partly, whole):
        start = first + tile * N
        keys = _rows(k, start, slots, k_slot, D, DP, N, False)
        scores = _scores(qs, keys, scale, cap, CAPPED, PRECISION)
        values = _rows(v, start, slots, v_slot, V, VP, N, False)
        most, total, acc = _added(scores, values, most, total, acc, PRECISION)

    # Tiles that only some rows see, the rest of the last one, and this split's part of the words.
    masked = partly + tiles - tl.maximum(partly, whole)
    share = tl.cdiv(words * (64 // N), splits)
    rest = tl.minimum(tl.maximum(words * (64 // N) - split * share, 0), share)
    for step in range(masked + rest):
        in_range, part = step < masked, split * share + tl.maximum(step - masked, 0)
        tile, shift = tl.where(step < partly, step, whole), part % (64 // N) * N
        word = tl.where(in_range, 0, part // (64 // N) * 2 + 2)
        start = tl.where(in_range, first + tile * N, tl.load(mask + word) + shift)
        bits = tl.load(mask + node * mask_node + word + 1, mask=live, other=0)
        bits = tl.where(in_range, 0, bits)[:, None] >> (shift + tl.arange(0, N)).to(tl.int64)[None]
        s, stop = start + tl.arange(0, N), tl.where(in_range, last, 0)
        seen = ((s[None] >= begin[:, None]) & (s < stop)[None]) | ((bits & 1) != 0)
        keys = _rows(k, start, slots, k_slot, D, DP, N, True)
        scores = _scores(qs, keys, scale, cap, CAPPED, PRECISION)
        scores = tl.where(seen, scores, -float("inf"))
        values = _rows(v, start, slots, v_slot, V, VP, N, True)
        most, total, acc = _added(scores, values, most, total, acc, PRECISION)

    d = tl.arange(0, VP)
    if MERGED:
        rows = tl.num_programs(2).to(tl.int64) * nodes * GROUPS
        place = (split * rows + tl.program_id(2).to(tl.int64) * nodes * GROUPS) + row
        some = tl.where(total > 0, total, 1.0)  # else no row of this part was seen
        tl.store(parts + place[:, None] * VP + d[None], acc / some[:, None], mask=live[:, None])
        weight = tl.where(total > 0, most + tl.log2(some), -float("inf"))
        tl.store(parts + splits * rows * VP + place, weight, mask=live)
    else:
        if SINKS:
            total += tl.exp2(tl.load(sinks + head).to(tl.float32) * 1.4426950408889634 - most)
        place = (b * nodes + node) * kv_heads * GROUPS + head
        at = out + place[:, None] * V + d[None]
        found = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(at, found, mask=live[:, None] & (d < V)[None])


@triton.jit(do_not_specialize=["nodes", "splits"])
def _merge(
    parts, sinks, out, nodes, splits, kv_heads, GROUPS: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, S: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One row of all splits, weighted by their log-sum-exp."""
    row, b, h = tl.program_id(0), tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    rows = tl.num_programs(1).to(tl.int64) * nodes * GROUPS
    place = tl.program_id(1).to(tl.int64) * nodes * GROUPS + row
    logs, s, d = parts + splits * rows * VP + place, tl.arange(0, S), tl.arange(0, VP)
    known = tl.load(logs + s * rows, mask=s < splits, other=-float("inf"))
    node, head, most = row // GROUPS, h * GROUPS + row % GROUPS, tl.max(known, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        most = tl.maximum(most, sink)
    total, found = tl.sum(tl.exp2(known - most), 0), tl.zeros([VP], tl.float32)
    if SINKS:
        total += tl.exp2(sink - most)
    for start in range(0, splits, 8):
        some = start + tl.arange(0, 8)
        there = some < splits
        weights = tl.exp2(tl.load(logs + some * rows, mask=there, other=-float("inf")) - most)
        at = parts + (place + some[:, None] * rows) * VP + d[None]
        found += tl.sum(tl.load(at, mask=there[:, None], other=0.0) * weights[:, None], 0)
    out += ((b.to(tl.int64) * nodes + node) * kv_heads * GROUPS + head) * V
    tl.store(out + d, (found / total).to(out.dtype.element_ty), mask=d < V)


class Tiling(NamedTuple):
    """How the work is cut.

    Attributes:
        rows: of a program, query heads of some nodes: all of a KV head as long as 128 suffice.
        slots: of a tile.
        resident: programs that the device runs at once.
    """

    rows: int
    slots: int
    warps: int
    stages: int
    resident: int


@functools.cache
def tiling(rows: int, dim: int, value_dim: int, itemsize: int, cores: int, shared: int) -> Tiling:
    """For so many rows of a KV head, padded dimensions of keys and values, bytes of a number,
    multiprocessors, and bytes of shared memory of each."""
    wide, dims = itemsize == 2, dim + value_dim  # products of float32 are unrolled: smaller tiles
    large = (128 if wide else 32) // (1 if dims <= 256 else 2)
    m, n = min(max(16, triton.next_power_of_2(rows)), large), 64 if wide else 32
    queries, shared = m * dim * itemsize, shared - SCRATCH
    while n > 16 and queries + 2 * n * dims * itemsize > shared:
        n //= 2
    stages = min(max((shared - queries) // (n * dims * itemsize), 1), 3)
    warps = 8 if m > 64 or dims > 256 else 4
    together = shared // (queries + stages * n * dims * itemsize)
    return Tiling(m, n, warps, stages, cores * min(max(together, 1), 8 // warps))


@functools.cache
def split_count(programs: int, tiles: int, resident: int) -> int:
    """Into how many parts slots are split, for full waves of programs on the device, given the
    number of programs without splits and of tiles that each of these would read."""

    def cost(splits: int) -> int:  # in tiles that one program after the other reads
        waves = -(-programs * splits // resident)
        return waves * (-(-tiles // splits) + START) + (MERGE if splits > 1 else 0)

    return min(range(1, max(tiles // LEAST, 1) + 1), key=cost)


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory of each."""
    if device.type == "cpu":
        return 2, 2**17
    found = torch.get_device_module(device).get_device_properties(device)
    cores = getattr(found, "multi_processor_count", None) or found.gpu_subslice_count
    names = "shared_memory_per_block_optin", "shared_memory_per_block", "local_mem_size"
    shared = (getattr(found, name, None) for name in names)
    return cores, next(filter(None, shared), 2**16)


@torch.library.custom_op("hf_spec::tree_attention", mutates_args=())
def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None, scale: float,
    cap: float, near: int,
) -> Tensor:  # fmt: skip
    """Attention of nodes to slots of the cache, summed in float32.

    Args:
        query: ``(batch, heads, nodes, dim)``.
        key, value: ``(batch, kv_heads, slots, dim)``, of any two dimensions.
        mask: ``(batch, 1, nodes, n)`` int64, packed.
        sinks: ``(heads,)`` scores whose weights go nowhere; None for none.
        scale: factor of scores.
        cap: c: scores x become c * tanh(x / c); 0 for none.
        near: slots that a node sees at most, in layers of local attention; it says how much work
            there is, not what is seen. 0 for all.

    Returns:
        ``(batch, nodes, heads, dim)`` in the dtype of ``query``.
    """
    batch, heads, nodes, dim = query.shape
    kv_heads, slots, value_dim = key.shape[1], key.shape[2], value.shape[3]
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    groups, padded, value_padded = heads // kv_heads, _padded(dim), _padded(value_dim)
    rows, device = groups * nodes, query.device
    cut = tiling(rows, padded, value_padded, query.element_size(), *_device(device))
    blocks = triton.cdiv(rows, cut.rows)
    tiles = triton.cdiv(min(slots, near + nodes) if near else slots, cut.slots)
    splits = split_count(batch * kv_heads * blocks, tiles, cut.resident)
    out = torch.empty(batch, nodes, heads, value_dim, dtype=query.dtype, device=device)
    parts = out
    if splits > 1:
        size = splits * batch * kv_heads * rows * (value_padded + 1)
        parts = torch.empty(size, dtype=torch.float32, device=device)
    # With a cap, twice its argument of tanh comes in.
    scale, cap = (2 * scale / cap * LOG2E, cap * LOG2E) if cap else (scale * LOG2E, 0.0)
    held = {"GROUPS": groups, "V": value_dim, "VP": value_padded, "SINKS": sinks is not None}
    with _on(device):
        _split[blocks, splits, batch * kv_heads](
            query, key, value, mask, sinks, parts, out, slots, nodes, (mask.shape[3] - 2) // 2,
            splits, kv_heads, scale, cap, *query.stride()[:3], *key.stride()[:3],
            *value.stride()[:3], mask.stride(0), mask.stride(2), D=dim, DP=padded, M=cut.rows,
            N=cut.slots, CAPPED=cap > 0, MERGED=splits > 1,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_warps=cut.warps,
            num_stages=cut.stages, **held,
        )  # fmt: skip
        if splits > 1:
            _merge[rows, batch * kv_heads](
                parts, sinks, out, nodes, splits, kv_heads, S=triton.next_power_of_2(splits), **held
            )
    return out


@tree_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    batch, heads, nodes = query.shape[:3]
    return query.new_empty(batch, nodes, heads, value.shape[3])


def _padded(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _on(device: torch.device) -> Any:
    """A context in which kernels are launched on this device."""
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return nullcontext()
    return torch.get_device_module(device).device(device)
