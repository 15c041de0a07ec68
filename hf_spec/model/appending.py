"""Tokens appended to a ``TreeCache`` by chunks; their number may differ between rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_spec.core.probes import ProbeGroup
from hf_spec.core.tree import Tree
from hf_spec.model.target import Target

#: New tokens per forward; bounds the size of the explicit mask.
CHUNK = 256

#: The same with recurrent layers, some of whose rules hold a vector for each pair of tokens.
RECURRENT_CHUNK = 64

#: What a prompt's forward returns: the attributes of :class:`Prefilled` after ``target``.
End = tuple[Tensor, Tensor | None, list[list[int]], int]


def append(
    target: Target, rows: list[list[int]], at_once: int, group: ProbeGroup | None = None
) -> End:
    """Forward and keep new tokens after each row; their number may differ between rows.

    Args:
        at_once: tokens per row in one target.
        group: probes that run under the last token of each row.

    Returns:
        The outputs at the last tokens of the rows that have new tokens.
    """
    cache, device, reads = target.cache, target.cache.lengths.device, target.reads
    logits: dict[int, Tensor] = {}
    hidden: dict[int, Tensor] = {}
    chunks: list[Tensor] = []
    for start in range(0, max(map(len, rows)), at_once):
        parts = [row[start : start + at_once] for row in rows]
        size = max(map(len, parts))  # shorter rows are padded
        tokens = torch.tensor([part + [0] * (size - len(part)) for part in parts], device=device)
        tree = Tree.chain(tokens)
        ended = [
            row for row, part in enumerate(parts) if part and start + len(part) == len(rows[row])
        ]
        last = torch.tensor([max(len(part) - 1, 0) for part in parts], device=device)
        if group is not None and ended:
            counts = [[0] * len(part) for part in parts]
            for row in ended:
                counts[row][-1] = len(group)
            tree = tree.attach_probes(group, counts)
        output = target(tree, logits_at=last[:, None])
        cache.commit([len(part) for part in parts])
        logits |= {row: output.logits[row, 0] for row in ended}
        states = output.hidden
        if states is None:
            continue
        if reads.tokens == "committed":
            chunks.append(states[:, :size])
        elif reads.tokens == "last":
            hidden |= {row: states[row, last[row]] for row in ended}
        elif tree.num_probes:
            hidden |= {row: states[row, size:] for row in ended}
    count = 0 if group is None else len(group)
    stacked = torch.stack([logits[row] for row in sorted(logits)])
    if chunks:
        return stacked, torch.cat(chunks, dim=1), [row[1:] for row in rows], count
    kept = torch.stack([hidden[row] for row in sorted(hidden)]) if hidden else None
    return stacked, kept, [[] for _ in rows], count
