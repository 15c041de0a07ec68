"""Attention at long contexts on a GPU: ``python benchmarks/attention.py``.

Of one layer, attention with a dense mask beside the kernel of ``tree_attention``: microseconds of
both and of plain decoding, the kernel's largest error, and what reading keys and values takes at
``--bandwidth``; with ``--tune``, the kernel's best tiling. Whole steps: ``contexts.py``.

Past ``--deadline`` seconds it leaves out the rest. On a CPU it runs, too, by Triton's interpreter
(TRITON_INTERPRET=1), where times say nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from cuda import WARM, Row
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_spec.core import mask as masks
from hf_spec.core.checks import first_line
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree import Tree
from hf_spec.files import write_atomically
from hf_spec.tools.cli.options import whole_numbers
from modeling_patches.attention_masks import unpacked

#: Heads, key-value heads, dimension of a layer: Llama's of 8B parameters; on CPUs a small one.
LAYERS = {"cuda": (32, 8, 128), "cpu": (4, 2, 16)}
#: Timings of one layer, of which the median counts.
REPEATS = 20
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


def layer(args: argparse.Namespace, context: int, batch: int, nodes: int) -> Row:
    """One layer's attention of trees after so many tokens."""
    from modeling_patches import tree_attention as kernel

    device, dtype = args.device, args.dtype
    heads, kv_heads, dim = LAYERS[device.type]
    slots, rng = context + nodes, random.Random(0)
    shape = TokenTree((-1, *(rng.randrange(node) for node in range(1, nodes))))
    tree = Tree.of_shapes([shape] * batch, device)
    lengths = torch.full((batch,), context, device=device)
    query = torch.randn(batch, heads, nodes, dim, device=device, dtype=dtype)
    key, value = (
        torch.randn(batch, kv_heads, slots, dim, device=device, dtype=dtype) for _ in "kv"
    )
    mask = masks.packed(tree.ancestors, lengths)
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
        "context": context, "batch": batch, "nodes": nodes,
        "error": float((ours() - expected).abs().max()),
        "plain_us": microseconds(captured(lambda: folded(query[:, :, :1], None), device), device),
        "dense_us": microseconds(captured(lambda: folded(query, added), device), device),
        "kernel_us": microseconds(captured(ours, device), device),
        "read_us": (key.nbytes + value.nbytes) / args.bandwidth / 1e3,
    }  # fmt: skip
    return {**row, "best": _best(kernel, ours, device)} if args.tune else row


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


def parse(argv: list[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    for name, default, what in (
        ("--contexts", "1024,8192,32768,131072" if cuda else "200", "tokens in the cache"),
        ("--batch-sizes", "1,8" if cuda else "1", "rows of one layer"),
        ("--nodes", "16,64" if cuda else "16", "of one layer's trees"),
    ):
        add(name, default=default, help=f"{what} (default: {default})")
    add("--bandwidth", type=float, default=4300.0, help="GB/s (default: %(default)s, an H200's)")
    add("--tune", action="store_true", help="the fastest tilings of the kernel; takes minutes")
    add("--deadline", type=float, default=220.0, help="seconds (default: %(default)s)")
    add("--output", type=Path, default=Path("attention.json"), help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        for name in ("contexts", "batch_sizes", "nodes"):
            setattr(args, name, whole_numbers(f"--{name.replace('_', '-')}", getattr(args, name)))
    except ValueError as error:
        parser.error(first_line(error))
    args.device = torch.device("cuda" if cuda else "cpu")
    args.dtype = torch.bfloat16 if cuda else torch.float32
    args.ends = time.monotonic() + args.deadline
    return args


def measured(args: argparse.Namespace) -> Iterator[Row]:
    for context, batch, nodes in itertools.product(args.contexts, args.batch_sizes, args.nodes):
        if batch * context <= 2**18 and time.monotonic() < args.ends:
            yield layer(args, context, batch, nodes)


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    args, rows = parse(argv), list[Row]()
    for row in measured(args):
        rows.append(row)
        shown = {key: round(x, 5) if isinstance(x, float) else x for key, x in row.items()}
        print(*(f"{key} {value}" for key, value in shown.items()), sep=", ", flush=True)
        write_atomically(args.output, json.dumps(rows, indent=1))
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
