"""What a training reports: acceptance by decoding, accuracies, a bar and lines for people."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import EvalPrediction, TrainerCallback

import hf_spec
from hf_spec.core.checks import duration
from hf_spec.core.stats import SpecStats
from hf_spec.target.sequences import IGNORED
from hf_spec.threads import forget
from hf_spec.tools.bench.runner import pad_left

#: Positions whose acceptance is shown.
SHOWN = 4
#: Values of k of the top-k accuracies.
RANKS = (1, 5, 10)


class Report(TrainerCallback):
    """A progress bar, and a line per evaluation of a training, whose ``done`` is from 0 to 1. Its
    ``steps`` are those taken so far, without those before the training was resumed."""

    def __init__(self, trainer: Any):
        self.trainer: Any = trainer
        self._bar: tqdm | None = None
        self.steps, self._speaks = 0, False  # an evaluation may come without a training

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._speaks = state.is_world_process_zero
        self._began, self.steps, self._before = time.monotonic(), 0, self.trainer.done
        found = [entry["eval_tau"] for entry in state.log_history if "eval_tau" in entry]
        self._best = max(found, default=0.0)  # of a training that is resumed
        if self._speaks and not args.disable_tqdm:
            total = state.max_steps if args.max_minutes is None else None
            done = state.global_step
            self._bar = tqdm(total=total, initial=done, dynamic_ncols=True, leave=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        if self._bar is not None:
            self._bar.update(1)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        metrics: Mapping[str, Any] = kwargs.get("metrics") or {}
        if not self._speaks or "eval_loss" not in metrics:
            return
        parts = []
        if "eval_tau" in metrics:
            tau = metrics["eval_tau"]
            parts.append(f"tau {tau:.2f}{', the best so far' * (tau > self._best)}")
            self._best = max(tau, self._best)
        names = [f"eval_acceptance_{i}" for i in range(1, SHOWN + 1)]
        if shares := " ".join(f"{metrics[name]:.0%}" for name in names if name in metrics):
            parts.append(f"accepted {shares}")
        gone, done = time.monotonic() - self._began, self.trainer.done
        parts += [f"loss {metrics['eval_loss']:.3g}", duration(gone)]
        if self._before < done < 1:
            parts[-1] += f", {duration(gone * (1 - done) / (done - self._before))} left"
        of = f" of {state.max_steps:,}" if args.max_minutes is None else ""
        tqdm.write(f"step {state.global_step:,}{of}: {'; '.join(parts)}")
        sys.stdout.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar, if there is one; also where a training ends with an error."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def outcome(record: Mapping[str, Any]) -> list[str]:
    """What came out of a training, in words, by its record."""
    amount, settings, best = record["data"], record["settings"], record["best"]
    last = f", the last {record['timed_steps']:,}" * (record["timed_steps"] < settings["steps"])
    lines = [
        f"trained on {amount['rows']:,} answers, {settings['steps']:,} steps{last} in "
        f"{duration(record['seconds'])}; {amount['held_out']:,} answers held out"
    ]
    untrained = [one["eval_tau"] for one in record["history"] if one.get("step") == 0]
    if best is not None:
        before = "".join(f", {tau:.2f} before" for tau in untrained)
        lines.append(
            f"tau {best['eval_tau']:.2f} on held-out prompts, after {best['step']:,} steps"
            f"{before}: tokens per forward pass if every pass drafts"
        )
    return lines


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
