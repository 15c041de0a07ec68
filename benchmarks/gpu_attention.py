"""Attention of one layer, for :mod:`gpu`: the kernel of ``tree_attention`` beside a dense mask.

Microseconds of both and of plain decoding, and the kernel's largest error. On a CPU it runs by
Triton's interpreter (TRITON_INTERPRET=1), where times say nothing.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from gpu_model import Cell, Row
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_spec.core.shapes import TokenTree
from hf_spec.core.tree import Tree, packed_mask
from hf_spec.modeling_patches.attention_masks import unpacked

#: Heads, key-value heads, dimension of a layer: Llama's of 8B parameters; on CPUs a small one.
LAYERS = {"cuda": (32, 8, 128), "cpu": (4, 2, 16)}
#: Calls that are not timed, and timings of which the median counts.
WARM, REPEATS = 4, 20
#: Rows, slots, warps and stages that ``--tune`` tries.
TILINGS = [
    (m, n, warps, stages)
    for m in (16, 32, 64, 128) for n in (32, 64) for warps in (4, 8) for stages in (2, 3, 4)
]  # fmt: skip


def microseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Of a call on the device, whose second-level cache is cold."""
    on_gpu, found = device.type == "cuda", []
    scratch = torch.empty(2**28 if on_gpu else 1, dtype=torch.int8, device=device)
    for _ in range(WARM):
        call()
    for _ in range(REPEATS if on_gpu else 1):
        scratch.zero_()
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            found.append(1e3 * begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            found.append(1e6 * (time.perf_counter() - start))
    return statistics.median(found)


def captured(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The call as a CUDA graph, so that launching does not count."""
    if device.type != "cuda":
        return call
    call()  # compiles what is compiled once
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def layer(cell: Cell, device: torch.device, dtype: torch.dtype, tune: bool) -> Row:
    """One layer's attention of trees of so many nodes after so many tokens, in milliseconds."""
    from hf_spec.modeling_patches import tree_attention as kernel

    context, batch, nodes = cell.context, cell.batch, cell.tokens
    heads, kv_heads, dim = LAYERS[device.type]
    slots, rng = context + nodes, random.Random(0)
    shape = TokenTree((-1, *(rng.randrange(node) for node in range(1, nodes))))
    tree = Tree.of_shapes([shape] * batch, device)
    lengths = torch.full((batch,), context, device=device)
    query = torch.randn(batch, heads, nodes, dim, device=device, dtype=dtype)
    key, value = (
        torch.randn(batch, kv_heads, slots, dim, device=device, dtype=dtype) for _ in "kv"
    )
    mask = packed_mask(tree.ancestors, lengths)
    seen = unpacked(mask, slots).repeat(1, 1, heads // kv_heads, 1)
    added = torch.zeros(seen.shape, device=device, dtype=dtype).masked_fill_(~seen, -torch.inf)
    del seen

    def folded(queries: Tensor, given: Tensor | None) -> Tensor:
        rows = queries.reshape(batch, kv_heads, -1, dim)
        return scaled_dot_product_attention(rows, key, value, attn_mask=given)

    def ours() -> Tensor:
        return kernel.tree_attention(query, key, value, mask, None, dim**-0.5, 0.0, 0)

    expected = folded(query, added).reshape(batch, heads, nodes, dim).transpose(1, 2)
    row = {
        "largest_error": float((ours() - expected).abs().max()),
        "plain_us": microseconds(captured(lambda: folded(query[:, :, :1], None), device), device),
        "dense_us": microseconds(captured(lambda: folded(query, added), device), device),
        "kernel_us": microseconds(captured(ours, device), device),
        "read_bytes": key.nbytes + value.nbytes,
    }  # fmt: skip
    return {**row, "best": _best(kernel, ours, device)} if tune else row


def _best(kernel: Any, ours: Callable[[], Tensor], device: torch.device) -> list[Any]:
    """The three fastest tilings, each with its time."""
    found = []
    cores, _ = kernel._device(device)
    for rows, slots, warps, stages in TILINGS:
        for together in (1, 2):
            cut = kernel.Tiling(rows, slots, warps, stages, cores * together)
            with patch.object(kernel, "tiling", lambda *_, cut=cut: cut):
                try:
                    found.append((microseconds(captured(ours, device), device), cut))
                except Exception:  # more shared memory or registers than there are
                    continue
    return sorted(found)[:3]
