"""For trainers of other libraries, which are not imported here: what follows the model."""

from __future__ import annotations

import copy
import logging
import random
import sqlite3
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import CompileConfig, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_spec.adapters.checkpoint import WEIGHTS, read_weights
from hf_spec.adapters.layer import Adapter
from hf_spec.adapters.loading import save_unattached
from hf_spec.adapters.tuner import Objective, TrainingBatch, random_anchors
from hf_spec.core.checks import AUTO, UNFIT, check_range, explained, first_line
from hf_spec.core.stats import SpecStats
from hf_spec.decoding.call import choose
from hf_spec.decoding.loop import on_end
from hf_spec.decoding.sequences import Sequences
from hf_spec.draft.options import with_place
from hf_spec.draft.rollouts import RolloutHistory
from hf_spec.methods.registry import Method, get_method
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.modeling_patches.weights import placement, same_draws
from hf_spec.target.captures import CUDA_GRAPHS
from hf_spec.target.sequences import IGNORED

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

#: Folder of its adapter in a checkpoint. The Trainer takes adapters right inside for the policy's.
DRAFTER = "hf_spec/drafter"
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


# -- An adapter is trained on what a model generates, while others train the model -----------------


#: Largest norm of gradients, as of the Trainer.
MAX_NORM = 1.0


class Text(NamedTuple):
    """A prompt with the model's answer.

    Attributes:
        tokens: ids of both.
        prompt: number of those of the prompt.
    """

    tokens: Sequence[int]
    prompt: int

    @property
    def teaches(self) -> bool:
        """Whether there is a token to predict, as that after a prompt is certain, and the prompt is
        known, as embeddings in its place are not."""
        return 0 < self.prompt <= len(self.tokens) - 2


class OnlineTraining:
    """Trains an adapter that drafts for a model whose weights may change at any time.

    What is trained is a copy, in float32 where the adapter has 16 bits; after each step the adapter
    takes over its numbers, in its own memory, which recorded steps read. The model only runs: its
    weights, gradients and modes, and the default random generators, stay as they are.

    Args:
        model: the base model.
        find: gives the adapter, which must not be one that changes the model; None if it is gone.
        objective: the loss of its method.
        learning_rate: of AdamW; parts for which the adapter's config has another rate keep its
            ratio to ``usual_rate``.
        num_anchors: most anchors of each text.
        running: the context in which the objective runs, such as autocast.
        averaged: gives the mean of a tensor over all processes.
    """

    def __init__(
        self, model: Any, find: Callable[[], Adapter | None], objective: Objective,
        learning_rate: float, usual_rate: float, num_anchors: int = 64,
        running: Callable[[], AbstractContextManager[Any]] = nullcontext,
        averaged: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ):  # fmt: skip
        self._model, self._find, self._objective = model, find, objective
        self._num_anchors, self._running, self._averaged = num_anchors, running, averaged
        self._generator = torch.Generator("cpu").manual_seed(0)
        self.adapter = _copy_of(self._own, model)
        config, scale = self.adapter.config, learning_rate / usual_rate
        rates, later = config.learning_rates(), config.untrained(1.0)
        groups: dict[float, list[Tensor]] = {}
        for name, parameter in self.adapter.named_parameters():
            own = (rate * scale for part, rate in rates.items() if name.startswith(part))
            parameter.requires_grad_(name not in later)
            groups.setdefault(next(own, learning_rate), []).append(parameter)
        self._optimizer = torch.optim.AdamW(
            [{"params": params, "lr": rate} for rate, params in groups.items()], weight_decay=0.0
        )

    def learn(self, texts: Sequence[Text]) -> float:
        """Take a step on texts, some of which teach something; returns their loss."""
        batch = batch_of(texts, self._num_anchors, self._generator)
        with same_draws(placement(self._model).device), frozen(self._model), torch.enable_grad():
            with self._running():
                loss = self._objective(self._model, self.adapter, batch)["loss"]
            loss.backward()
        trained = []
        for one in self.adapter.parameters():
            if one.grad is not None:
                one.grad = self._averaged(one.grad)
                trained.append(one)
        # Numbers that are not finite, as of a text with extreme states, would spoil all later ones.
        if clip_grad_norm_(trained, MAX_NORM).isfinite():
            self._optimizer.step()
            self.hand_over()
        self._optimizer.zero_grad()  # gradients take no memory of the model's training
        return float(loss.detach())

    def load(self, folder: Path) -> None:
        """Go on with the numbers of an adapter in a folder; a ValueError if it is another one."""
        with explained(f"cannot read {str(folder)!r}", ValueError, OSError, *UNFIT):
            stored = read_weights(folder / WEIGHTS)
            self.adapter.load_state_dict(self.adapter.from_file(stored, torch.float32))
        self.hand_over()

    @property
    def _own(self) -> Adapter:
        """The adapter that drafts, which may be read anew, from a file that has changed."""
        found = self._find()
        if found is None:
            raise ValueError("the adapter that is trained is not active any more: activate it.")
        return found

    @torch.no_grad()
    def hand_over(self) -> None:
        """Give the adapter the numbers of the trained copy."""
        own = dict(self._own.named_parameters())
        for name, parameter in self.adapter.named_parameters():
            own[name].copy_(parameter)


def _copy_of(adapter: Adapter, model: Any) -> Adapter:
    """An adapter of its own with the same numbers, in float32 at least."""
    with same_draws(placement(model).device):
        made = type(adapter).build(copy.copy(adapter.config), model).eval()
    made.load_state_dict(adapter.state_dict())
    for parameter in made.parameters():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    return made


def batch_of(
    texts: Sequence[Text], num_anchors: int, generator: torch.Generator | None = None
) -> TrainingBatch:
    """A batch with random anchors, padded on the right."""
    ids = [torch.tensor(one.tokens, device="cpu") for one in texts]
    labels = [own.clone() for own in ids]
    for own, one in zip(labels, texts):
        own[: one.prompt] = IGNORED
    masks = [torch.ones_like(own) for own in ids]
    padded, wanted, mask = (
        pad_sequence(parts, batch_first=True, padding_value=fill)
        for parts, fill in ((ids, 0), (labels, IGNORED), (masks, 0))
    )
    return TrainingBatch(padded, wanted, random_anchors(wanted, num_anchors, generator), mask)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """In the block no parameter of a model takes gradients."""
    trained = [one for one in model.parameters() if one.requires_grad]
    for one in trained:
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in trained:
            one.requires_grad_(True)
