"""What a training tells people: a bar, a line per evaluation, what came out."""

import time
from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback

from hf_spec.core.checks import duration

#: Positions whose acceptance is shown.
SHOWN = 4


class Report(TrainerCallback):
    """A progress bar, and a line per evaluation of a training, whose ``done`` is from 0 to 1.

    Attributes:
        steps: taken so far, without those before the training was resumed.
    """

    def __init__(self, trainer: Any):
        self.trainer: Any = trainer
        self._bar: tqdm | None = None
        self.steps, self._speaks = 0, False
        self._began = self._before = self._best = 0.0

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
        self._say(f"step {state.global_step:,}{of}: {'; '.join(parts)}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar, if there is one; also where a training ends with an error."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _say(self, text: str) -> None:
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text)


def outcome(record: Mapping[str, Any]) -> list[str]:
    """What came out of a training, in words, by its record."""
    amount, settings, best = record["data"], record["settings"], record["best"]
    last = f", the last {record['timed_steps']:,}" * (record["timed_steps"] < settings["steps"])
    lines = [
        f"trained on {amount['rows']:,} answers, {settings['steps']:,} steps{last} in "
        f"{duration(record['seconds'])}; {amount['held_out']:,} answers held out"
    ]
    if best is not None:
        lines.append(
            f"best checkpoint: step {best['step']:,}, tau {best['eval_tau']:.2f} on held-out "
            "prompts (tokens per forward pass of the model if every step drafts)"
        )
    return lines
