"""A Transformers ``Trainer`` that also tells how an adapter serves."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

from hf_spec.core.stats import SpecStats
from hf_spec.training.served import Served, TopKCounts, served_metrics


class SpecTrainer(Trainer):
    """Trains a ``PeftModel`` with one of our adapters; evaluation decodes real prompts.

    Everything else is ``Trainer``'s: accelerate, several devices, mixed precision, logging,
    checkpoints and resuming. ``evaluate`` gives ``eval_loss``, ``eval_top5_1`` and the like on
    ``eval_dataset``, and ``eval_tau`` and ``eval_acceptance_1`` ... by decoding ``served``.

    Args:
        served: prompts to decode at each evaluation; None: no decoding.
    """

    def __init__(self, *args: Any, served: Served | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.served = served

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Loss and accuracies on held-out answers, acceptance on held-out prompts."""
        metrics = self._losses(self.get_eval_dataloader(eval_dataset))
        # Sharded parameters cannot be decoded with one process at a time.
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if self.served is not None and not sharded:
            metrics |= served_metrics(self._decode(self.served))
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(named)
        self.control: Any = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, named
        )
        return named

    @torch.no_grad()
    def _losses(self, batches: Any) -> dict[str, float]:
        model = self.accelerator.unwrap_model(self.model)
        training = model.training
        model.eval()
        counts, losses, weights = TopKCounts(), 0.0, 0
        for batch in batches:
            output = model(**self._prepare_inputs(batch))
            size = len(batch["input_ids"])
            losses, weights = losses + float(output["loss"]) * size, weights + size
            if output.get("logits") is not None:
                counts.add(output["logits"], output["labels"])
        model.train(training)
        return {"loss": losses / max(weights, 1), **counts.metrics()}

    def _decode(self, served: Served) -> SpecStats:
        """Every process decodes its share of the prompts."""
        model = self.accelerator.unwrap_model(self.model).get_base_model()
        world, rank = self.args.world_size, self.args.process_index
        stats = served.measure(model, slice(rank, None, world))
        if world > 1:
            from accelerate.utils import gather_object

            gathered, stats = gather_object([stats]), SpecStats()
            for part in gathered:
                stats.merge(part)
        return stats
