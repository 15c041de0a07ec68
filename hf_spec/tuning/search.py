"""Search for the sublayers to skip: a study on disk that can be stopped at any moment.

Draft & Verify, section 3.3: minimise time per token over z in {0, 1}^(2L) by black-box
optimisation. Which trial comes next depends on the finished ones and the seed alone, so that an
interrupted and continued search ends like one that ran through. Knows Optuna; knows nothing of the
command line, of plots or of adapter folders.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_spec.bench.prompts import Prompt
from hf_spec.methods.base import check_count, check_range
from hf_spec.tuning.costs import Skip, StepCosts, Sublayers
from hf_spec.tuning.objective import OBJECTIVES, STRATEGY, Evaluation, Evaluator, Exit

if TYPE_CHECKING:
    import optuna

SAMPLERS = ("tpe", "gp", "random")
STUDY_FILE, STUDY_NAME = "study.db", STRATEGY
#: Seeds whose mean is the baseline "random".
RANDOM_BASELINES = 3
#: Settings of the paper's tables 3 and 4, and target acceptance rates of its table 6.
FIXED_DRAFTS = (1, 2, 4, 6, 8)
THRESHOLDS = (0.2, 0.4, 0.6, 0.8)
TARGETS = (0.7, 0.8, 0.85, 0.9, 0.95)
#: Entries per parameter that go into a model's fingerprint.
FINGERPRINT_ENTRIES = 256


@dataclass(frozen=True)
class Settings:
    """What a search optimises; a study is continued with the same settings only.

    Raises:
        ValueError: naming the field.
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
        for name, choices in (("objective", OBJECTIVES), ("sampler", SAMPLERS)):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}"
                )
        check_count("max_new_tokens", self.max_new_tokens, low=2)
        check_count("max_draft", self.max_draft)
        check_range("target_acceptance", self.target_acceptance, 0.0, 1.0)
        if self.sampling and not self.do_sample:
            raise ValueError(f"{next(iter(self.sampling))} needs do_sample")
        if self.sampler == "gp" and importlib.util.find_spec("scipy") is None:
            raise ValueError("sampler='gp' needs scipy, which is not installed: pip install scipy")

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling options that are set."""
        values = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def stop(self) -> Exit:
        """The draft exit under which layers are searched."""
        return Exit("adaptive", self.max_draft, target_acceptance=self.target_acceptance)

    def evaluator(self, model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> Evaluator:
        """An evaluator of choices under these settings."""
        sampling = {"do_sample": self.do_sample, **self.sampling}
        return Evaluator(
            model, tokenizer, prompts, self.max_new_tokens, sampling, self.seed
        )  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """A finished trial.

    Attributes:
        number: from 0, in order.
        state: ``complete``, or ``pruned`` after some of the prompts.
        origin: ``start`` (a fixed starting point), ``sampler``, or ``neighbour`` (one sublayer
            away from the best, tried after the sampler had repeated itself).
        repeat: the choice had been evaluated before, and its value was taken over.
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
        """JSON types."""
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
        folder: gets ``study.db``.
        identity: what must not change when a study is continued; JSON types.

    Raises:
        ValueError: the folder's study was made with other settings, or cannot be read.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        try:
            import optuna
        except ImportError as error:
            raise ImportError(
                "searching needs Optuna, which is not installed: pip install 'hf_spec[search]'"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna = optuna
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
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"cannot use {STUDY_FILE} in {str(folder)!r}: {reason}; give another folder"
            ) from error
        self._check(folder, json.loads(json.dumps(identity)))
        self._drop_unfinished()

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

    def _drop_unfinished(self) -> None:
        """Trials that were running when a process ended; they are made again."""
        running = self.optuna.trial.TrialState.RUNNING
        for trial in self.study.get_trials(deepcopy=False, states=(running,)):
            self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)

    def close(self) -> None:
        """Let go of the file."""
        self.storage.remove_session()
        self.storage.engine.dispose()

    @property
    def trials(self) -> list[Trial]:
        """The finished trials, in order."""
        states = self.optuna.trial.TrialState
        finished = self.study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))
        return [_trial(number, one) for number, one in enumerate(finished)]

    # -- what is kept beside the trials ------------------------------------------------------

    def costs(self, measure: Callable[[], StepCosts]) -> StepCosts:
        """The study's costs; measured if it has none yet."""
        stored = self.study.user_attrs.get("costs")
        if stored is not None:
            return StepCosts.from_dict(stored)
        costs = measure()
        self.study.set_user_attr("costs", costs.to_dict())
        return costs

    def cached(self, skip: Skip, stop: Exit, make: Callable[[], Evaluation]) -> Evaluation:
        """An evaluation outside the trials, made at most once."""
        text = json.dumps([skip.options(), stop.options()], sort_keys=True)
        key = "evaluation:" + hashlib.sha256(text.encode()).hexdigest()[:24]
        stored = self.study.user_attrs.get(key)
        if stored is None:
            stored = make().to_dict()
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
        waiting = self.optuna.trial.TrialState.WAITING
        if fixed is not None and not self.study.get_trials(deepcopy=False, states=(waiting,)):
            # If one is waiting already, an earlier process ended right here.
            self.study.enqueue_trial(_parameters(sublayers, fixed))

        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # experimental options of samplers
            self.study.sampler = _sampler(self.optuna, settings, number)
            trial = self.study.ask()
            skip = _suggest(trial, sublayers)
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
        trial.set_user_attr("counts", evaluation.counts.to_dict())
        trial.set_user_attr("about", {
            "origin": origin, "repeat": before is not None, "prompts": prompts,
            "seconds": time.perf_counter() - start, **skip.options(),
        })  # fmt: skip
        # From here on the trial counts; a process that ends earlier has done nothing.
        if pruned:
            self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)
        else:
            self.study.tell(trial, evaluation.value)
        return self.trials[-1]


def _sampler(optuna: Any, settings: Settings, number: int) -> Any:
    """A sampler seeded for this trial, so that it does the same after an interruption."""
    seed = settings.seed * 1_000_003 + number
    if settings.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=10)
    if settings.sampler == "gp":
        certain = settings.objective == "modelled"
        return optuna.samplers.GPSampler(seed=seed, deterministic_objective=certain)
    return optuna.samplers.RandomSampler(seed)


def _parameters(sublayers: Sublayers, skip: Skip) -> dict[str, bool]:
    attention = {f"attention_{i}": i in skip.attention for i in sublayers.attention}
    return attention | {f"mlp_{i}": i in skip.mlp for i in sublayers.mlp}


def _suggest(trial: optuna.Trial, sublayers: Sublayers) -> Skip:
    chosen = {
        name: trial.suggest_categorical(name, [False, True])
        for name in _parameters(sublayers, Skip())
    }
    return Skip(
        tuple(i for i in sublayers.attention if chosen[f"attention_{i}"]),
        tuple(i for i in sublayers.mlp if chosen[f"mlp_{i}"]),
    )


def _neighbour(done: Sequence[Trial], sublayers: Sublayers, seed: int) -> Skip | None:
    """A choice that differs from the best in one sublayer and was not tried; None if all were."""
    best = best_of(done)
    if best is None:
        return None
    tried = {one.skip for one in done}
    options = []
    for kind, layers in (("attention", sublayers.attention), ("mlp", sublayers.mlp)):
        for layer in layers:
            sets = {"attention": set(best.skip.attention), "mlp": set(best.skip.mlp)}
            sets[kind] ^= {layer}
            skip = Skip(tuple(sorted(sets["attention"])), tuple(sorted(sets["mlp"])))
            if skip not in tried:
                options.append(skip)
    return random.Random(seed).choice(options) if options else None


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The complete trial of least value; of equal ones the one that skips most, then the first."""
    complete = [one for one in trials if one.state == "complete"]
    return min(
        complete, key=lambda one: (one.evaluation.value, -len(one.skip), one.number), default=None
    )


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
    from hf_spec.tuning.objective import Counts

    return Evaluation(data["value"], Counts.from_dict(data["counts"]))


# -------------------------------------------------------------------------- choices by position


def starting_points(sublayers: Sublayers) -> list[Skip]:
    """Choices to begin with: evenly spaced, from the middle, and towards the end."""
    attention, mlp = sublayers.attention, sublayers.mlp
    chosen = [
        Skip(attention[1::2], mlp[1::2]),
        Skip(attention[1::2], ()),
        Skip(middle(attention, len(attention) // 2), middle(mlp, len(mlp) // 4)),
        Skip(middle(attention, len(attention) // 2), middle(mlp, len(mlp) // 2)),
        Skip(attention[len(attention) // 2 : -1], mlp[len(mlp) // 2 : -1]),
        Skip(attention[1:-1], ()),
        Skip(attention[2::3], mlp[2::3]),
    ]
    return [skip for skip in dict.fromkeys(chosen) if len(skip)]


def middle(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """``count`` layers from the middle."""
    first = (len(layers) - count) // 2
    return tuple(layers[first : first + count])


def baseline_choices(sublayers: Sublayers, skip: Skip) -> Iterator[tuple[str, int, Skip]]:
    """Name, seed and choice of as many attentions and MLPs by position, as in appendix D."""
    every = (sublayers.attention, sublayers.mlp)
    counts = (len(skip.attention), len(skip.mlp))
    yield "first", 0, Skip(*(tuple(layers[:n]) for layers, n in zip(every, counts)))
    yield "middle", 0, Skip(*(middle(layers, n) for layers, n in zip(every, counts)))
    last = (tuple(layers[len(layers) - n :]) for layers, n in zip(every, counts))
    yield "last", 0, Skip(*last)
    for seed in range(RANDOM_BASELINES):
        drawn = random.Random(seed)
        yield (
            "random",
            seed,
            Skip(*(tuple(sorted(drawn.sample(layers, n))) for layers, n in zip(every, counts))),
        )


def exit_choices(settings: Settings) -> list[Exit]:
    """Draft exits to compare: adaptive as searched first, then tables 3 and 4 of the paper."""
    k = settings.max_draft
    targets = [t for t in TARGETS if t != settings.target_acceptance]
    return [
        settings.stop,
        *(Exit("adaptive", k, target_acceptance=target) for target in targets),
        *(Exit("threshold", k, threshold) for threshold in THRESHOLDS),
        *(Exit("fixed", count) for count in FIXED_DRAFTS if count <= k),
    ]


# ------------------------------------------------------------------------------------ all of it


@dataclass
class SearchResult:
    """What a search found.

    Attributes:
        best: the best complete trial.
        baselines: rows as in ``search.json``, the searched choice first; None if left out.
        exits: a row per draft exit; ``stop`` is the best of them.
    """

    settings: Settings
    identity: dict[str, Any]
    sublayers: Sublayers
    costs: StepCosts | None
    trials: list[Trial]
    best: Trial
    baselines: list[dict[str, Any]] | None
    exits: list[dict[str, Any]]
    stop: Exit

    @property
    def evaluation(self) -> dict[str, Any]:
        """Figures of the best choice under the best exit."""
        return next(row for row in self.exits if row["chosen"])

    def to_dict(self) -> dict[str, Any]:
        """The body of ``search.json``."""
        return {
            "strategy": STRATEGY,
            "settings": asdict(self.settings),
            "identity": self.identity,
            "layers": self.sublayers.count,
            "sublayers": {"attention": self.sublayers.attention, "mlp": self.sublayers.mlp},
            "costs": None if self.costs is None else self.costs.to_dict(),
            "best": self.best.to_dict(),
            "draft_exit": self.exits,
            "baselines": self.baselines,
            "trials": [trial.to_dict() for trial in self.trials],
        }


def search(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    folder: Path,
    settings: Settings,
    *,
    trials: int = 100,
    baselines: bool = True,
    costs: StepCosts | None = None,
    progress: Progress | None = None,
    status: Callable[[str], None] | None = None,
) -> SearchResult:
    """Find the sublayers to skip, or continue to.

    Args:
        model: a causal language model, in evaluation mode, on its device.
        prompts: development prompts.
        folder: exists; holds the study.
        trials: finished trials in all, those of earlier runs included.
        baselines: compare with choices by position.
        costs: use these instead of measuring, if the study has none yet.
        progress: called as ``progress(finished, trials, best)``.
        status: called with what begins.

    Raises:
        ValueError: the folder's study has other settings, or another process runs it.
    """
    check_count("trials", trials)
    evaluator = settings.evaluator(model, tokenizer, prompts)
    identity = study_identity(model, prompts, settings)
    say = status or (lambda text: None)
    with _locked(folder), closing(LayerStudy(folder, identity)) as study:
        if settings.objective == "modelled":
            say("measuring costs")
            evaluator.costs = study.costs(
                lambda: costs or evaluator.measure_costs(settings.max_draft)
            )
        say("searching")
        starts = starting_points(evaluator.sublayers)
        done = study.trials
        while True:
            if progress is not None:
                progress(len(done), trials, best_of(done))
            if len(done) >= trials:
                break
            done.append(study.run_trial(evaluator, settings, starts))
        best = best_of(done)
        if best is None:
            raise ValueError("every trial was pruned: continue with more --trials")

        def judge(skip: Skip, stop: Exit) -> Evaluation:
            def make() -> Evaluation:
                *_, evaluation = evaluator.evaluate(settings.objective, skip, stop)
                return evaluation

            return study.cached(skip, stop, make)

        say("comparing draft exits")
        exits: list[dict[str, Any]] = []
        for stop in exit_choices(settings):
            # Only a deterministic value may be taken over from the trials.
            taken = settings.objective == "modelled" and stop == settings.stop
            evaluation = best.evaluation if taken else judge(best.skip, stop)
            exits.append({**stop.options(), **evaluation.to_dict(), "chosen": False})
        least = min(range(len(exits)), key=lambda index: (exits[index]["value"], index))
        exits[least]["chosen"] = True
        rows = None
        if baselines:
            say("comparing baselines")
            rows = _baselines(evaluator.sublayers, best, settings.stop, judge)
        return SearchResult(
            settings, identity, evaluator.sublayers, evaluator.costs, done, best, rows, exits,
            exit_choices(settings)[least],
        )  # fmt: skip


def _baselines(
    sublayers: Sublayers, best: Trial, stop: Exit, judge: Callable[[Skip, Exit], Evaluation]
) -> list[dict[str, Any]]:
    """Rows for the searched choice and each baseline; "random" is the mean over its seeds."""
    rows = [
        {"name": "searched", **best.skip.options(), **best.evaluation.to_dict()},
    ]
    drawn = []
    for name, seed, skip in baseline_choices(sublayers, best.skip):
        row = {"name": name, **skip.options(), **judge(skip, stop).to_dict()}
        if name == "random":
            drawn.append({**row, "seed": seed})
        else:
            rows.append(row)
    figures = ("value", "tau", "acceptance")
    mean: dict[str, Any] = {name: sum(row[name] for row in drawn) / len(drawn) for name in figures}
    rows.append({"name": "random", **mean, "speedup": 1.0 / mean["value"], "draws": drawn})
    return rows


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second process out; the lock ends with the process, however it ends."""
    from filelock import FileLock, Timeout

    lock = FileLock(str(folder / f"{STUDY_FILE}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"another search is running in {str(folder)!r}: wait for it, or give another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def study_identity(model: Any, prompts: Sequence[Prompt], settings: Settings) -> dict[str, Any]:
    """What a study must be continued with: settings, model, prompts, and where it is timed."""
    texts = json.dumps([prompt.text for prompt in prompts])
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


def fingerprint(model: Any) -> str:
    """A hash of a model's parameters: names, shapes, and evenly spaced entries of each."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        flat = parameter.detach().flatten()
        step = max(1, flat.numel() // FINGERPRINT_ENTRIES)
        digest.update(flat[::step].double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
