"""What a call makes a drafter with a decoder of its own do, step by step."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.draft.grow import Frontier
from hf_spec.methods.registry import get_method


def started(name: str, model: Any, rows: int = 1, **options: Any) -> Any:
    """The predictor of a strategy after its start, for a batch of rows."""
    method = get_method(name)
    drafter = method.make_drafter(model, method.parse_options(options))
    state: Any = SimpleNamespace(
        batch_size=rows, root=torch.zeros(rows, dtype=torch.long), timed=False, do_sample=False,
        target=SimpleNamespace(graphs=None), cache=TreeCache(1, rows, "cpu"),
    )  # fmt: skip
    drafter.start(state)
    return drafter.predictor


def commit(
    drafter: Any, ids: Tensor, hidden: Tensor, parts: list[tuple[int, int]],
    host: HostResult | None = None,
) -> None:  # fmt: skip
    """A step that commits these ranges of a text, one in each row.

    Args:
        ids, hidden: ``(1, seq)`` tokens and ``(1, seq, hidden)`` the base's states.
        host: what the host makes of it.
    """
    counts = [end - start for start, end in parts]
    tokens = torch.full((len(parts), max(counts)), -1)  # as after verification
    states = torch.full((*tokens.shape, hidden.shape[-1]), torch.nan)
    for row, (start, end) in enumerate(parts):
        tokens[row, : end - start] = ids[0, start + 1 : end + 1]
        states[row, : end - start] = hidden[0, start:end]
    path, zeros = torch.arange(max(counts)).expand(len(parts), -1), torch.zeros(len(parts)).long()
    result = StepResult(path, torch.tensor(counts), tokens, zeros, zeros, zeros, host)
    drafter.advance(result, states)


def proposed(drafter: Any, state: Any) -> Tree:
    """The trees of the step that begins, after one whose tokens the drafter knows already."""
    drafter.step(state, None, grows=True)
    return drafter.propose(state)


def frontier(depth: int, tokens: Tensor, parents: Tensor | None = None) -> Frontier:
    """A level, ``(batch, nodes)``, of a drafter that looks at tokens and parents alone."""
    zeros = torch.zeros_like(tokens)
    return Frontier(depth, tokens, zeros.float(), zeros, zeros if parents is None else parents)


def chain(drafter: Any, rows: int = 1, depth: int = 5) -> tuple[Tensor, Tensor]:
    """Greedy tokens ``(batch, depth)`` and their logits ``(batch, depth, tokens)``."""
    tokens, logits = [torch.zeros(rows, 1, dtype=torch.long)], []
    for level in range(depth):
        logits.append(drafter.level(frontier(level, tokens[-1]))[:, -1])
        best = logits[-1].argmax(-1, keepdim=True)
        tokens.append(best if drafter.token_ids is None else drafter.token_ids[best])
    drafter.finish()
    return torch.cat(tokens[1:], 1), torch.stack(logits, 1)
