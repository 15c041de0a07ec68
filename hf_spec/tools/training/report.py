"""What a training tells people: how long it will take, a line per evaluation, what came out."""

import math
import time
from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback

from hf_spec.core.checks import duration

#: Steps that are timed for the estimate; the one before them is not typical.
TIMED = 3
#: Positions whose acceptance is shown.
SHOWN = 4


class Report(ProgressCallback):
    """A progress bar, the expected duration after the first steps, and a line per evaluation of a
    training, whose ``done`` is from 0 to 1.

    Attributes:
        seconds_per_step: mean of the first steps.
        steps: taken so far, without those before the training was resumed.
    """

    def __init__(self, trainer: Any):
        super().__init__()
        self.trainer = trainer
        self.seconds_per_step, self.steps = 0.0, 0
        self._speaks, self._before = False, 0.0
        self._began = self._timed_from = time.monotonic()
        self._best = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._speaks = state.is_world_process_zero
        self._began, self.steps, self._before = time.monotonic(), 0, self.trainer.done
        found = [entry["eval_tau"] for entry in state.log_history if "eval_tau" in entry]
        self._best = max(found, default=0.0)  # of a training that is resumed
        if self._speaks and not args.disable_tqdm:
            total = state.max_steps if args.max_minutes is None else None
            done = state.global_step
            self.training_bar = tqdm(total=total, initial=done, dynamic_ncols=True, leave=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        now = time.monotonic()
        if self.steps == 1:
            self.seconds_per_step, self._timed_from = now - self._began, now
        elif self.steps <= 1 + TIMED:
            self.seconds_per_step = (now - self._timed_from) / (self.steps - 1)
        if self.steps == 1 + TIMED and self._speaks:
            self._say(expected(self.seconds_per_step, args, state))
        if self.training_bar is not None:
            self.training_bar.update(1)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass  # the line of the evaluation says enough

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass  # losses are kept in the record

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
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _say(self, text: str) -> None:
        if self.training_bar is None:
            print(text, flush=True)
        else:
            self.training_bar.write(text)


def expected(seconds_per_step: float, args: Any, state: Any) -> str:
    """How long a training will take, in words, by the arguments and the state of its Trainer."""
    each = f"{seconds_per_step:.2g} s"
    if args.max_minutes is not None:
        steps = round(60 * args.max_minutes / max(seconds_per_step, 1e-9))
        return (
            f"{args.max_minutes:g} min, as asked for: at most {steps:,} steps of {each}, less what "
            "evaluations take"
        )
    steps = state.max_steps
    # The last step is followed by one, whatever its number.
    count = math.ceil(steps / state.eval_steps) if state.eval_steps else 0
    return (
        f"about {duration(steps * seconds_per_step)}: {steps:,} steps of {each}, beside {count} "
        f"evaluation{'s' * (count != 1)}"
    )


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
            f"tau {best['eval_tau']:.2f} on held-out prompts, at step {best['step']:,}: so many "
            "tokens per step of the model, where every step drafts"
        )
    return lines
