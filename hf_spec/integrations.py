"""For trainers of other libraries, which are not imported here."""

from __future__ import annotations

import logging
import sqlite3
import time
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import CompileConfig, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_spec.core.checks import AUTO, first_line
from hf_spec.core.stats import SpecStats
from hf_spec.decoding.loop import on_end
from hf_spec.decoding.sequences import Sequences
from hf_spec.draft.rollouts import RolloutHistory
from hf_spec.target.captures import CUDA_GRAPHS

logger = logging.getLogger(__name__)


#: A call of ``generate``: its statistics and its sequences.
Ended = tuple[SpecStats, Sequence[Sequences]]


class TRLCallback(TrainerCallback):
    """Sets what a strategy needs in a trainer of TRL, and logs what its rollouts gain.

    ``trainer.add_callback(TRLCallback(trainer))``. Rollouts that name no strategy then have
    ``auto``: that of the active adapter, or ``token_recycling`` without one. The trainer's own
    entries of the log have ``rollouts/tau``, ``rollouts/speed`` (over plain steps, where some were
    timed) and ``rollouts/time`` (share of the time since the last entry).

    Args:
        trainer: its rollouts call ``generate``: GRPO, RLOO, online DPO.
        record: whether steps are recorded as CUDA graphs, see docs/guides/compiled.md.
        history: answers of earlier epochs that draft, see docs/guides/rollouts.md; saved and loaded
            with the trainer's checkpoints.
    """

    def __init__(self, trainer: Any, record: bool = False, history: RolloutHistory | None = None):
        self._history = history
        self._total, self._new, self._since = SpecStats(), SpecStats(), time.perf_counter()
        #: Calls that have ended since the last part of a step.
        self._ended: list[Ended] = []
        on_end(trainer.model, partial(_add, weakref.ref(self)))
        config: Any = getattr(trainer, "generation_config", None)
        if getattr(trainer.args, "use_vllm", False):
            logger.warning("use_vllm=True: rollouts don't call generate(), so no strategy is used.")
        elif config is None:
            logger.warning(
                "%s has no generation_config, so no strategy is used in its rollouts. GRPO, RLOO "
                "and online DPO of TRL have one.", type(trainer).__name__,
            )  # fmt: skip
        else:
            if config.assistant_strategy is None:
                config.assistant_strategy = AUTO
            config.use_cache = True  # online DPO's is that of training
            if record:
                config.compile_config = CompileConfig(backend=CUDA_GRAPHS)
            if history is not None:
                config.assistant_kwargs = {**(config.assistant_kwargs or {}), "history": history}
        trainer.log = partial(self._log, trainer.log)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since, place = time.perf_counter(), _place(args, state)
        if self._history is not None and place.is_file():  # the training is resumed
            self._history.load(place)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._history is None:
            return
        place = _place(args, state)
        try:
            self._history.save(place)
        except (OSError, sqlite3.Error) as error:  # for which no training should end
            logger.warning(
                "%s was not written (%s): a training that is resumed there begins without earlier "
                "answers.", place, first_line(error),
            )  # fmt: skip

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        ended, self._ended = self._ended, []
        for stats, _ in ended:
            self._new.merge(stats)

    on_step_end = on_substep_end

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._ended = []  # of evaluation

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        speed = self._total.speed_beside_plain
        if speed is not None and speed < 1:
            logger.warning(
                f"Rollouts ran at {speed:.2f} of the speed of plain steps: leave the strategy out, "
                "or see when one pays (docs/guides/rollouts.md)."
            )

    def _log(self, log: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        stats, now = self._new, time.perf_counter()
        if stats.num_steps:
            speed, spent = stats.speed_beside_plain, stats.total_seconds / (now - self._since)
            logs |= {"rollouts/tau": stats.tau, "rollouts/time": spent}
            logs |= {} if speed is None else {"rollouts/speed": speed}
            self._total.merge(stats)
            self._new, self._since = SpecStats(), now
        log(logs, *args, **kwargs)


def _add(to: weakref.ref[TRLCallback], *ended: Any) -> None:
    """Note a call; the model does not keep the callback, which keeps the trainer."""
    callback = to()
    if callback is not None:
        callback._ended.append(ended)


def _place(args: Any, state: Any) -> Path:
    """The file of a process beside the other states of a checkpoint."""
    folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
    return folder / f"rollout_history_{args.process_index}.sqlite"
