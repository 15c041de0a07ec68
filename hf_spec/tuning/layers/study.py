"""The study of a layer search on disk, which can be interrupted at any time and continued.

The next trial depends only on the finished ones and the seed, so an interrupted and continued
search has the same result as an uninterrupted one. This module knows Optuna, but no baselines,
plots or adapter folders.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hf_spec.adapters.base_model import fingerprint
from hf_spec.bench.prompts import Prompt
from hf_spec.core.checks import check_choices, check_count, check_range, first_line
from hf_spec.tuning.layers.costs import Skip, StepCosts, Sublayers
from hf_spec.tuning.layers.objective import (
    OBJECTIVES,
    STRATEGY,
    Counts,
    Evaluation,
    Evaluator,
    Exit,
)

SAMPLERS = ("tpe", "random")
STUDY_FILE, STUDY_NAME = "study.db", STRATEGY


@dataclass(frozen=True)
class Settings:
    """What a search optimises; a study can only be continued with the same settings.

    Attributes:
        objective: ``modelled`` or ``measured``; see :mod:`hf_spec.tuning.layers.objective`.
        sampler: ``tpe`` or ``random``.
        seed: seed of the search and of the sampling.
        max_new_tokens: limit for each prompt.
        max_draft, target_acceptance: see :class:`Exit`.
        do_sample, temperature, top_k, top_p: how tokens are sampled.

    Raises:
        ValueError: a field is invalid; the message names it.
    """

    objective: str = "modelled"
    sampler: str = "tpe"
    seed: int = 0
    max_new_tokens: int = 64
    max_draft: int = 12
    target_acceptance: float = 0.85
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_choices(self, objective=OBJECTIVES, sampler=SAMPLERS)
        check_count("max_new_tokens", self.max_new_tokens, low=2)
        check_count("max_draft", self.max_draft)
        check_range("target_acceptance", self.target_acceptance, 0.0, 1.0)
        if self.sampling and not self.do_sample:
            raise ValueError(f"{next(iter(self.sampling))} needs do_sample")

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling options that are set."""
        values = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def stop(self) -> Exit:
        """The draft exit during the search."""
        return Exit("adaptive", self.max_draft, target_acceptance=self.target_acceptance)

    def evaluator(self, model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> Evaluator:
        """An evaluator with these settings."""
        sampling = {"do_sample": self.do_sample, **self.sampling}
        return Evaluator(model, tokenizer, prompts, self.max_new_tokens, sampling, self.seed)


@dataclass(frozen=True)
class Trial:
    """A finished trial.

    Attributes:
        number: its index, from 0.
        state: ``complete``, or ``pruned`` after some of the prompts.
        skip: the choice.
        evaluation: its value.
        origin: ``start`` (a fixed starting point), ``sampler``, or ``neighbour`` (differs from the
            best in one sublayer; tried when the sampler repeats itself).
        repeat: whether the value was reused, as the choice had been evaluated before.
        prompts: number of prompts decoded.
        seconds: duration of the trial.
    """

    number: int
    state: str
    skip: Skip
    evaluation: Evaluation
    origin: str
    repeat: bool
    prompts: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The trial as JSON types."""
        return {
            "number": self.number, "state": self.state, "origin": self.origin,
            "repeat": self.repeat, "prompts": self.prompts, "seconds": self.seconds,
            "skipped": len(self.skip), **self.skip.options(), **self.evaluation.to_dict(),
        }  # fmt: skip


Progress = Callable[[int, int, Trial | None], None]


# ------------------------------------------------------------------------------------ the study


class LayerStudy:
    """An Optuna study in a folder.

    Args:
        folder: folder of ``study.db``.
        identity: JSON types that must be the same when the study is continued.

    Raises:
        ValueError: the folder's study has another identity, or cannot be read.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        try:
            import optuna
        except ImportError as error:
            raise ImportError(
                "searching needs Optuna, which is not installed: pip install 'hf_spec[search]'"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna, self.states = optuna, optuna.trial.TrialState
        path = (folder / STUDY_FILE).resolve()
        try:
            self.storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
            self.study = optuna.create_study(
                storage=self.storage, study_name=STUDY_NAME, direction="minimize",
                load_if_exists=True, sampler=optuna.samplers.RandomSampler(0),
                pruner=optuna.pruners.MedianPruner(n_startup_trials=5),
            )  # fmt: skip
        except Exception as error:
            if not type(error).__module__.startswith(("sqlalchemy", "optuna")):
                raise
            raise ValueError(
                f"cannot use {STUDY_FILE} in {str(folder)!r}: {first_line(error)}; give another "
                "folder"
            ) from error
        self._check(folder, json.loads(json.dumps(identity)))
        # Trials that were running when a process ended are repeated.
        for trial in self.study.get_trials(deepcopy=False, states=(self.states.RUNNING,)):
            self.study.tell(trial.number, state=self.states.FAIL)

    def _check(self, folder: Path, identity: dict[str, Any]) -> None:
        before = self.study.user_attrs.get("identity")
        if before is None:
            self.study.set_user_attr("identity", identity)
            return
        names = [name for name in {**before, **identity} if before.get(name) != identity.get(name)]
        if names:
            changes = [f"{n} was {before.get(n)!r}, now {identity.get(n)!r}" for n in names]
            raise ValueError(
                f"{str(folder)!r} holds a search with other settings ({'; '.join(changes)}): "
                "repeat its settings to continue it, or give another folder"
            )

    def close(self) -> None:
        """Release the file."""
        self.storage.remove_session()
        self.storage.engine.dispose()

    @property
    def trials(self) -> list[Trial]:
        """The finished trials, in order."""
        ends = (self.states.COMPLETE, self.states.PRUNED)
        finished = self.study.get_trials(deepcopy=False, states=ends)
        return [_trial(number, one) for number, one in enumerate(finished)]

    # -- what is kept beside the trials ------------------------------------------------------

    def costs(self, measure: Callable[[], StepCosts]) -> StepCosts:
        """The study's costs; measured and stored if it has none yet."""
        stored = self.study.user_attrs.get("costs")
        if stored is not None:
            return StepCosts.from_dict(stored)
        costs = measure()
        self.study.set_user_attr("costs", asdict(costs))
        return costs

    def cached(
        self, prompts: Sequence[Prompt], skip: Skip, stop: Exit, values: Iterable[Evaluation]
    ) -> Evaluation:
        """The last of the values of a choice that is no trial; computed once, then stored.

        ``prompts`` are those it is judged on, if not the study's.
        """
        texts = [prompt.full_text for prompt in prompts]
        text = json.dumps([texts, skip.options(), stop.options()], sort_keys=True)
        key = "evaluation:" + hashlib.sha256(text.encode()).hexdigest()[:24]
        stored = self.study.user_attrs.get(key)
        if stored is None:
            *_, evaluation = values
            stored = evaluation.to_dict()
            self.study.set_user_attr(key, stored)
        return _evaluation(stored)

    # -- one trial ---------------------------------------------------------------------------

    def run_trial(self, evaluator: Evaluator, settings: Settings, starts: Sequence[Skip]) -> Trial:
        """Choose sublayers, evaluate them, and store the result."""
        done = self.trials
        repeatable = settings.objective == "modelled"
        known = {one.skip: one for one in reversed(done)}
        sublayers, number = evaluator.sublayers, len(done)
        origin, fixed = "sampler", None
        if number < len(starts):
            origin, fixed = "start", starts[number]
        elif repeatable and done and done[-1].repeat:
            fixed = _neighbour(done, sublayers, settings.seed + number)
            origin = "sampler" if fixed is None else "neighbour"
        waiting = self.study.get_trials(deepcopy=False, states=(self.states.WAITING,))
        if fixed is not None and not waiting:
            # A waiting one is left over from a process that ended right here.
            self.study.enqueue_trial(_parameters(sublayers, fixed))

        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # experimental options of samplers
            self.study.sampler = _sampler(self.optuna, settings, number)
            trial = self.study.ask()
            names = _parameters(sublayers, Skip())
            found = {name: trial.suggest_categorical(name, [False, True]) for name in names}
            skip = _skip(sublayers, found)
        before = known.get(skip) if repeatable else None
        pruned, evaluation, prompts = False, None, 0
        if before is not None:
            evaluation, prompts = before.evaluation, before.prompts
            pruned = before.state == "pruned"
            trial.report(evaluation.value, prompts)
        else:
            with closing(evaluator.evaluate(settings.objective, skip, settings.stop)) as values:  # type: ignore[type-var]
                for prompts, evaluation in enumerate(values, start=1):
                    trial.report(evaluation.value, prompts)
                    if prompts < len(evaluator.ids) and trial.should_prune():
                        pruned = True
                        break
        assert evaluation is not None
        trial.set_user_attr("counts", asdict(evaluation.counts))
        trial.set_user_attr("about", {
            "origin": origin, "repeat": before is not None, "prompts": prompts,
            "seconds": time.perf_counter() - start, **skip.options(),
        })  # fmt: skip
        # From here on the trial counts; if the process ends earlier, it is repeated.
        if pruned:
            self.study.tell(trial, state=self.states.PRUNED)
        else:
            self.study.tell(trial, evaluation.value)
        return self.trials[-1]


def _sampler(optuna: Any, settings: Settings, number: int) -> Any:
    """A sampler seeded for this trial, so that it is the same after an interruption."""
    seed = settings.seed * 1_000_003 + number
    if settings.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=10)
    return optuna.samplers.RandomSampler(seed)


def _parameters(sublayers: Sublayers, skip: Skip) -> dict[str, bool]:
    attention = {f"attention_{i}": i in skip.attention for i in sublayers.attention}
    return attention | {f"mlp_{i}": i in skip.mlp for i in sublayers.mlp}


def _skip(sublayers: Sublayers, chosen: dict[str, bool]) -> Skip:
    """The choice that Optuna's parameters encode."""
    return Skip(
        tuple(i for i in sublayers.attention if chosen[f"attention_{i}"]),
        tuple(i for i in sublayers.mlp if chosen[f"mlp_{i}"]),
    )


def _neighbour(done: Sequence[Trial], sublayers: Sublayers, seed: int) -> Skip | None:
    """An untried choice that differs from the best in one sublayer; None if all were tried."""
    best = best_of(done)
    if not best:
        return None
    tried, chosen = {one.skip for one in done}, _parameters(sublayers, best[0].skip)
    near = [_skip(sublayers, {**chosen, name: not chosen[name]}) for name in chosen]
    options = [skip for skip in near if skip not in tried]
    return random.Random(seed).choice(options) if options else None


def best_of(trials: Sequence[Trial], count: int = 1) -> list[Trial]:
    """The complete trials of the lowest values, each choice once; of equal ones first the one that
    skips most, then the earliest."""
    complete = [one for one in trials if one.state == "complete"]
    ranked = sorted(complete, key=lambda one: (one.evaluation.value, -len(one.skip), one.number))
    found: dict[Skip, Trial] = {}
    for one in ranked:
        found.setdefault(one.skip, one)
    return list(found.values())[:count]


def _trial(number: int, frozen: Any) -> Trial:
    about, value = frozen.user_attrs["about"], frozen.value
    if value is None:
        value = frozen.intermediate_values[max(frozen.intermediate_values)]
    return Trial(
        number, frozen.state.name.lower(),
        Skip(tuple(about["skip_attention"]), tuple(about["skip_mlp"])),
        _evaluation({"value": value, "counts": frozen.user_attrs["counts"]}),
        about["origin"], about["repeat"], about["prompts"], about["seconds"],
    )  # fmt: skip


def _evaluation(data: dict[str, Any]) -> Evaluation:
    return Evaluation(data["value"], Counts.from_dict(data["counts"]))


def study_identity(model: Any, prompts: Sequence[Prompt], settings: Settings) -> dict[str, Any]:
    """The identity of a study: settings, model, prompts, and the machine if times count."""
    texts = json.dumps([prompt.full_text for prompt in prompts])
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        **asdict(settings),
        "model_fingerprint": fingerprint(model),
        "prompts": len(prompts),
        "prompts_sha256": hashlib.sha256(texts.encode()).hexdigest(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": name,
        "threads": torch.get_num_threads(),
        "attn_implementation": getattr(model.config, "_attn_implementation", None),
    }
