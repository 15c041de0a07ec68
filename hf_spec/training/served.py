"""What an adapter is worth in service: acceptance by real decoding, accuracy at every distance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import hf_spec
from hf_spec.core.stats import SpecStats
from hf_spec.methods.registry import get_method
from hf_spec.model.sequences import IGNORED


@dataclass(frozen=True)
class Served:
    """Prompts to decode for measuring, and how.

    Attributes:
        prompts: token ids of each prompt.
        strategy: the strategy that uses the adapter.
        options: its options.
        max_new_tokens: per prompt.
        batch_size: prompts decoded at once.
    """

    prompts: Sequence[Sequence[int]]
    strategy: str
    options: dict[str, Any]
    max_new_tokens: int = 64
    batch_size: int = 8

    def measure(self, model: Any, share: slice = slice(None)) -> SpecStats:
        """Decode greedily and add up the statistics.

        Args:
            model: the model with the active adapter.
            share: the part of the prompts to decode (of one process among several).
        """
        total = SpecStats()
        # How far drafts reach is measured, not whether they pay here.
        untimed = get_method(self.strategy).parse_options(self.options).untimed()
        prompts = sorted(list(self.prompts)[share], key=len)
        training = model.training
        model.eval()
        for start in range(0, len(prompts), self.batch_size):
            rows = prompts[start : start + self.batch_size]
            width = max(map(len, rows))
            ids = torch.zeros(len(rows), width, dtype=torch.long, device=model.device)
            mask = torch.zeros_like(ids)
            for row, tokens in enumerate(rows):
                ids[row, width - len(tokens) :] = torch.tensor(tokens)
                mask[row, width - len(tokens) :] = 1
            model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, num_beams=1,
                max_new_tokens=self.max_new_tokens, assistant_strategy=self.strategy,
                assistant_kwargs={**self.options, **untimed},
            )  # fmt: skip
            stats = hf_spec.last_stats(model)
            assert stats is not None
            total.merge(stats)
        model.train(training)
        return total


def served_metrics(stats: SpecStats) -> dict[str, float]:
    """``tau`` and ``acceptance_1``, ``acceptance_2``, ...: drafts accepted at each depth."""
    metrics = {"tau": stats.mean_accepted_tokens}
    for depth, share in enumerate(stats.acceptance_per_position, start=1):
        metrics[f"acceptance_{depth}"] = share
    return metrics


class TopKCounts:
    """Counts how often the right token is among the k likeliest, at each distance."""

    RANKS = (1, 5, 10)

    def __init__(self) -> None:
        self.hits: torch.Tensor | None = None
        self.trials: torch.Tensor | None = None

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """``logits`` (batch, anchors, distances, vocab), ``labels`` (batch, anchors, distances)."""
        width = min(max(self.RANKS), logits.shape[-1])
        right = logits.topk(width, dim=-1).indices == labels[..., None]
        real = labels != IGNORED
        hits = torch.stack(
            [(right[..., :k].any(-1) & real).sum((0, 1)) for k in self.RANKS], dim=1
        ).cpu()
        trials = real.sum((0, 1)).cpu()
        self.hits = hits if self.hits is None else self.hits + hits
        self.trials = trials if self.trials is None else self.trials + trials

    def merge(self, other: TopKCounts) -> None:
        """Add the counts of another process."""
        if other.hits is None or other.trials is None:
            return
        self.hits = other.hits if self.hits is None else self.hits + other.hits
        self.trials = other.trials if self.trials is None else self.trials + other.trials

    def metrics(self) -> dict[str, float]:
        """``top1_2``: share of right tokens at distance 2 with k = 1, and so on."""
        if self.hits is None or self.trials is None:
            return {}
        shares = self.hits / self.trials.clamp(min=1)[:, None]
        return {
            f"top{k}_{distance}": float(shares[distance - 1, column])
            for column, k in enumerate(self.RANKS)
            for distance in range(1, len(shares) + 1)
        }
