"""Tokens appended to a ``TreeCache`` by chunks; their number may differ between rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_spec.core.transfer import to_device
from hf_spec.core.tree import Tree, filled
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.model.target import Target

#: New tokens per forward; bounds the size of the explicit mask.
CHUNK = 256

#: The same with recurrent layers, some of whose rules hold a vector for each pair of tokens.
RECURRENT_CHUNK = 64


@dataclass
class Prefilled:
    """State after the prompt.

    Attributes:
        target: runs trees over ``target.cache``.
        logits: ``(batch, vocab)`` after the last prompt token.
        hidden: what the drafter reads of the prompt, see :meth:`Drafter.advance`; None if nothing.
        following: of each row, the prompt's tokens after the first one whose state is read; none
            where only the last one's is read.
    """

    target: Target
    logits: Tensor
    hidden: Tensor | None
    following: list[list[int]]

    def committed(self, result: StepResult) -> StepResult:
        """The prompt as a result, given that of a step whose tree was the prompt's last token."""
        device, rows = result.tokens.device, [[*row, 0] for row in self.following]
        counts = to_device(list(map(len, rows)), device)
        tokens = to_device(filled(rows), device).scatter(
            1, counts[:, None] - 1, result.bonus[:, None]
        )
        path = torch.arange(tokens.shape[1], device=device).expand(len(rows), -1)
        probes = torch.zeros_like(counts)
        host = HostResult([range(len(row)) for row in rows], self.following, [0] * len(rows))
        return StepResult(path, counts, tokens, probes, counts - 1, result.bonus, host)


def append(target: Target, rows: list[list[int]]) -> Prefilled:
    """Forward and keep new tokens after each row; their number may differ between rows.

    Returns:
        The outputs at the last tokens of the rows that have new tokens.
    """
    cache, device, reads = target.cache, target.cache.lengths.device, target.reads
    at_once = CHUNK if cache.recurrent is None else RECURRENT_CHUNK
    logits: dict[int, Tensor] = {}
    hidden: dict[int, Tensor] = {}
    chunks: list[Tensor] = []
    for start in range(0, max(map(len, rows)), at_once):
        parts = [row[start : start + at_once] for row in rows]
        tokens = to_device(filled(parts), device)
        last = to_device([max(len(part) - 1, 0) for part in parts], device)
        ended = [row for row, new in enumerate(rows) if start < len(new) <= start + at_once]
        output = target(Tree.chain(tokens), logits_at=last[:, None])
        cache.commit([len(part) for part in parts])
        logits |= {row: output.logits[row, 0] for row in ended}
        states = output.hidden
        if states is None:
            continue
        if reads.tokens == "last":
            hidden |= {row: states[row, last[row]] for row in ended}
        elif reads.tokens == "committed":
            chunks.append(states)
    stacked = _in_order(logits)
    if chunks:
        following = [row[1:] for row in rows]
        return Prefilled(target, stacked, torch.cat(chunks, dim=1), following)
    return Prefilled(target, stacked, _in_order(hidden) if hidden else None, [[]] * len(rows))


def _in_order(by_row: dict[int, Tensor]) -> Tensor:
    return torch.stack([by_row[row] for row in sorted(by_row)])
