"""For trainers of other libraries, which are not imported here."""

from __future__ import annotations

import logging
import random
import sqlite3
import time
import weakref
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_spec.adapters.checkpoint import WEIGHTS
from hf_spec.adapters.loading import save_unattached
from hf_spec.adapters.online import OnlineTraining, Text
from hf_spec.core.checks import AUTO, check_range, first_line
from hf_spec.core.stats import SpecStats
from hf_spec.decoding.call import choose
from hf_spec.decoding.loop import on_end
from hf_spec.decoding.sequences import Sequences
from hf_spec.draft.options import with_place
from hf_spec.draft.rollouts import RolloutHistory
from hf_spec.methods.registry import Method, get_method
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.target.captures import CUDA_GRAPHS

logger = logging.getLogger(__name__)


#: A call of ``generate``: its statistics, and its sequences if a drafter learns from them.
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
        train_drafter: whether the adapter that drafts learns from the rollouts between steps, see
            docs/guides/rollouts.md; saved and loaded with the trainer's checkpoints.
        drafter_share: time for that, as a share of that of the steps.
        drafter_learning_rate: default: that of its method's training.

    Raises:
        ValueError: the drafter cannot be trained, or not with this trainer.
    """

    def __init__(
        self, trainer: Any, record: bool = False, history: RolloutHistory | None = None,
        train_drafter: bool = False, drafter_share: float = 0.05,
        drafter_learning_rate: float | None = None,
    ):  # fmt: skip
        self._history = history
        self._drafter: _Following | None = None
        self._total, self._new, self._since = SpecStats(), SpecStats(), time.perf_counter()
        #: Calls that have ended since the last part of a step.
        self._ended: list[Ended] = []
        self._begun = self._since  # the running step
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
        if train_drafter:
            self._drafter = _following(trainer, config, drafter_share, drafter_learning_rate)
        trainer.log = partial(self._log, trainer.log)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since, place = time.perf_counter(), _place(args, state)
        if self._history is not None and place.is_file():  # the training is resumed
            self._history.load(place)
        if self._drafter is not None:
            self._drafter.resume(_folder(args, state) / DRAFTER)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._drafter is not None and args.should_save:
            self.save_drafter(_folder(args, state) / DRAFTER)
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

    def save_drafter(self, folder: str | Path) -> None:
        """Write the adapter that is trained, as it drafts now.

        Raises:
            ValueError: none is trained, or the folder holds an adapter of another type.
        """
        if self._drafter is None:
            raise ValueError(
                "no drafter is trained: give TRLCallback train_drafter=True, and a strategy whose "
                "adapter can be trained."
            )
        save_unattached(self._drafter.training.adapter, Path(folder))

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begun = time.perf_counter()

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        ended, self._ended = self._ended, []
        for stats, sequences in ended:
            self._new.merge(stats)
            if self._drafter is not None:
                self._drafter.see(sequences)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.on_substep_end()
        if self._drafter is not None:
            self._drafter.after_step(time.perf_counter() - self._begun)

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
            if self._drafter is not None:
                logs |= self._drafter.logged(now - self._since)
            self._new, self._since = SpecStats(), now
        log(logs, *args, **kwargs)


def _add(to: weakref.ref[TRLCallback], stats: SpecStats, ended: Sequence[Sequences]) -> None:
    """Note a call; the model does not keep the callback, which keeps the trainer."""
    callback = to()
    if callback is not None:
        callback._ended.append((stats, [] if callback._drafter is None else ended))


def _folder(args: Any, state: Any) -> Path:
    """That of a checkpoint."""
    return Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def _place(args: Any, state: Any) -> Path:
    """The file of a process beside the other states of a checkpoint."""
    return _folder(args, state) / f"rollout_history_{args.process_index}.sqlite"


# -- A drafter that follows its policy -------------------------------------------------------------

#: Folder of its adapter in a checkpoint.
DRAFTER = "drafter"
#: Tokens of rollouts, with padding, that it learns from at once, but one rollout at least.
AT_ONCE = 2048
#: What some models read besides tokens.
MEDIA = ("image", "video", "audio")


class _Following:
    """Trains the adapter that drafts on the rollouts that were seen last, each as often as the
    others.

    Time is what a step took times the share; what an update takes beyond it is missing after the
    steps that follow. Of several processes each learns from its own rollouts, and all take the same
    steps: those of their mean gradients, as many as their mean time allows.
    """

    def __init__(
        self, training: OnlineTraining, accelerator: Any, share: float, media: Collection[int] = ()
    ):  # fmt: skip
        self.training, self._accelerator, self._share = training, accelerator, share
        self._media = set(media)  # tokens of images and the like, which it is not given
        self._random = random.Random(0)
        self._texts: list[Text] = []
        self._waiting: list[Text] = []
        self._fresh = True
        self._left, self._updates, self._seconds, self._loss = 0.0, 0, 0.0, 0.0

    def see(self, ended: Sequence[Sequences]) -> None:
        """Take rollouts in place of those of earlier steps."""
        if self._fresh:
            self._texts, self._waiting, self._fresh = [], [], False
        found = (Text([*a, *b], len(a)) for one in ended for a, b in zip(one.prompts, one.answers))
        self._texts += [one for one in found if one.teaches and self._media.isdisjoint(one.tokens)]

    def after_step(self, seconds: float) -> None:
        """Learn after a step that took so many seconds."""
        self._fresh = True
        device = self._accelerator.device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # what the step has launched is not ours
        self._left += self._share * seconds
        while self._agreed():
            began = time.perf_counter()
            self._loss += self.training.learn(self._batch())
            spent = time.perf_counter() - began
            self._left -= spent
            self._seconds += spent
            self._updates += 1

    def _agreed(self) -> bool:
        """Whether there is time for an update, and all processes have something to learn from."""
        numbers = torch.tensor([self._left, bool(self._texts)], device=self._accelerator.device)
        left, ready = self._accelerator.reduce(numbers, reduction="mean").tolist()
        return left > 0 and ready == 1

    def _batch(self) -> list[Text]:
        """The next texts, of all before any comes again; similar lengths need little padding."""
        if not self._waiting:
            self._waiting = self._random.sample(self._texts, len(self._texts))
        taken = [self._waiting.pop()]
        longest = len(taken[0].tokens)
        while self._waiting:
            longest = max(longest, len(self._waiting[-1].tokens))
            if longest * (len(taken) + 1) > AT_ONCE:
                break
            taken.append(self._waiting.pop())
        return taken

    def resume(self, folder: Path) -> None:
        """Go on with the adapter in a folder, if there is one."""
        if (folder / WEIGHTS).is_file():
            self.training.load(folder)

    def logged(self, seconds: float) -> dict[str, float]:
        """Entries of the log for the last seconds."""
        found = {"drafter/updates": float(self._updates), "drafter/time": self._seconds / seconds}
        if self._updates:
            found["drafter/loss"] = self._loss / self._updates
        self._updates, self._seconds, self._loss = 0, 0.0, 0.0
        return found


def _following(
    trainer: Any, config: Any, share: float, learning_rate: float | None
) -> _Following | None:
    """What trains the drafter of a trainer's rollouts; None where it follows by itself.

    Raises:
        ValueError: it cannot be trained.
    """
    check_range("drafter_share", share, 0.0, 1.0, open_low=True)
    if learning_rate is not None:
        check_range("drafter_learning_rate", learning_rate, 0.0, 1.0, open_low=True)
    if config is None or getattr(trainer.args, "use_vllm", False):
        raise _refused("this trainer's rollouts use no strategy, as a warning says")
    for sharded in ("fsdp", "deepspeed"):
        if getattr(trainer, f"is_{sharded}_enabled"):
            raise _refused(f"the trainer uses {sharded}, which may shard the weights that it reads")
    model = unwrapped(trainer.model)
    method, place = _method(model, config)
    if method.fit is not None:  # it learns in every step of its rollouts
        return None
    if method.objective is None:
        raise _refused(f"strategy {method.name!r} has nothing that is trained")
    adapter = method.active_adapter(model, place)
    if adapter is None:
        raise _refused(f"strategy {method.name!r} drafts without an adapter here")
    if adapter.config.changes_model or adapter.config.trains_base:
        raise _refused(f"adapters of {method.name!r} like {adapter.name!r} change the policy")
    if not adapter.config.inference_mode:
        raise _refused(
            f"the adapter {adapter.name!r} was loaded with is_trainable=True, so that it is a part "
            "of the policy", "Load it without",
        )  # fmt: skip
    usual = {**(method.training or {}), **adapter.config.training_defaults()}["learning_rate"]
    training = OnlineTraining(
        model, partial(method.active_adapter, model, place), method.objective,
        usual if learning_rate is None else learning_rate, usual, method.num_anchors,
        trainer.accelerator.autocast, partial(trainer.accelerator.reduce, reduction="mean"),
    )  # fmt: skip
    names = (f"{kind}_token_{end}" for kind in MEDIA for end in ("id", "index"))
    media = (getattr(model.config, name, None) for name in names)
    return _Following(
        training, trainer.accelerator, share, [one for one in media if isinstance(one, int)]
    )


def _method(model: Any, config: Any) -> tuple[Method, str | None]:
    """The method of a config's strategy, and the place of the adapter that it names."""
    given = with_place(config.assistant_kwargs or {})
    place, name = given.get("adapter"), config.assistant_strategy
    method = get_method(choose(model, None, place).strategy if name == AUTO else name)
    options: Any = method.parse_options(given)
    if method.wraps is not None:
        other = getattr(options, method.wraps)
        if other != getattr(method.options(), method.wraps):
            raise _refused(f"strategy {method.name!r} with {method.wraps}={other!r} has another's")
    return method, place


def _refused(why: str, remedy: str = "Leave it out") -> ValueError:
    return ValueError(f"train_drafter=True: {why}. {remedy}.")
