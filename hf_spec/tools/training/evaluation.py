"""Evaluates adapters: acceptance by real decoding, and accuracy at every distance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction

import hf_spec
from hf_spec.core.memory import forget
from hf_spec.core.stats import SpecStats
from hf_spec.model.sequences import IGNORED
from hf_spec.tools.bench.session import pad_left

#: Values of k of the top-k accuracies.
RANKS = (1, 5, 10)


@dataclass(frozen=True)
class EvalDecoding:
    """Token ids of prompts to decode in an evaluation, with the adapter's strategy."""

    prompts: Sequence[Sequence[int]]
    strategy: str
    options: dict[str, Any]
    max_new_tokens: int = 64
    batch_size: int = 8

    def measure(
        self, model: Any, share: slice = slice(None), seconds: float | None = None
    ) -> SpecStats:
        """Decode a share of the prompts (that of a process) greedily and add up the statistics;
        answers end when ``seconds`` are over, each batch's at its part of them."""
        total = SpecStats()
        forget(model)  # a checkpoint's figures must not depend on those before
        prompts = sorted(self.prompts[share], key=len)
        training, until = model.training, {}
        if seconds is not None:
            until["max_time"] = seconds / max(-(-len(prompts) // self.batch_size), 1)
        model.eval()
        for start in range(0, len(prompts), self.batch_size):
            rows = prompts[start : start + self.batch_size]
            model.generate(
                **pad_left(rows, 0, model.device), do_sample=False, num_beams=1,
                max_new_tokens=self.max_new_tokens, assistant_strategy=self.strategy,
                # Accepted lengths are measured, not whether drafting pays on this machine.
                assistant_kwargs={**self.options, "drafting": "always"},
                synced_gpus=False,  # sharded models decode the same prompts in all processes
                **until,
            )  # fmt: skip
            stats = hf_spec.last_stats(model)
            assert stats is not None
            total.merge(stats)
        model.train(training)
        return total


def top_k_counts(outputs: tuple[torch.Tensor, ...], _: Any = None) -> Any:
    """Count how often the right token is among the k likeliest, for each k in `RANKS`.

    Args:
        outputs: logits ``(batch, anchors, distances, tokens)`` and the indices of the right ones
            ``(batch, anchors, distances)``, `IGNORED` where there is none, and another number below
            0 for one without a logit; empty for a loss without logits.

    Returns:
        ``(batch, 1 + len(RANKS), distances)``: number of labels, then of hits with each k.
    """
    if not outputs:
        return outputs
    logits, labels = outputs
    best = logits.topk(min(max(RANKS), logits.shape[-1]), dim=-1).indices == labels[..., None]
    real = labels != IGNORED
    hits = [best[..., :k].any(-1) & real for k in RANKS]
    return torch.stack([real, *hits], dim=1).sum(2)


def top_k_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Top-k accuracies by name, from :func:`top_k_counts`: ``top1_2`` is that of k = 1 at distance
    2."""
    counts = prediction.predictions
    if not isinstance(counts, np.ndarray):
        return {}
    number, *hits = counts.sum(0)
    return {
        f"top{k}_{distance}": float(accuracy)
        for k, count in zip(RANKS, hits)
        for distance, accuracy in enumerate(count / number.clip(min=1), start=1)
    }
