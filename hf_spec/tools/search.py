"""Search for the sublayers that ``layer_skip`` leaves out when it drafts.

Draft & Verify (section 3.3) maximizes speed over z in {0, 1}^(2L) by Bayesian optimization with a
Gaussian process; so does Optuna's ``GPSampler``. A trial decodes the development prompts with a
choice of sublayers, and its value is the tokens per second. The best of many trials owes some of
its value to luck and to the prompts that it was chosen on, so the best few are measured on other
prompts, in turns with plain decoding.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna

from hf_spec.adapters.config import weights_digest
from hf_spec.core.checks import check_same_settings, explained
from hf_spec.modeling_patches.forwards import LayerSkipper
from hf_spec.modeling_patches.modules import num_layers
from hf_spec.threads import forget
from hf_spec.tools.bench.contenders import Contender, contender_of
from hf_spec.tools.bench.environment import device_of
from hf_spec.tools.bench.prompts import Prompt, encode_prompts
from hf_spec.tools.bench.results import BenchResult
from hf_spec.tools.bench.runner import Session, run
from hf_spec.tools.data import progress_bar

STRATEGY = "layer_skip"
#: Optuna's storage, an append-only file of JSON lines in the output folder.
STUDY_FILE = "study.jsonl"
COMPLETE = (optuna.trial.TrialState.COMPLETE,)
#: Number of best choices that are measured on held-out prompts.
FINALISTS = 3
#: During trials every step drafts; otherwise bad choices would look like plain decoding.
TRIAL_OPTIONS: dict[str, Any] = {"draft_exit": "adaptive", "drafting": "always"}

#: Layers whose attention and whose MLP are skipped, by the names of the strategy's options.
Choice = dict[str, list[int]]


def skippable(model: Any) -> Choice:
    """The layers whose attention / MLP can be skipped; a ValueError if there are none."""
    sublayers: Choice = {"skip_attention": [], "skip_mlp": []}
    reason = ""
    for index in range(num_layers(model)):
        for kind, layers in sublayers.items():
            try:
                LayerSkipper(model, **{kind: [index]})
            except ValueError as error:
                reason = str(error)
                continue
            layers.append(index)
    if not any(sublayers.values()):
        raise ValueError(f"no sublayer can be skipped: {reason}")
    return sublayers


def starting_points(sublayers: Choice) -> list[Choice]:
    """The first choices to try: evenly spaced layers, middle ones, late ones, all attention."""
    attention, mlp = sublayers["skip_attention"], sublayers["skip_mlp"]

    def middle(layers: list[int], share: int) -> list[int]:
        count = len(layers) // share
        first = (len(layers) - count) // 2
        return layers[first : first + count]

    pairs = [
        (attention[1::2], mlp[1::2]),
        (attention[1::2], []),
        (middle(attention, 2), middle(mlp, 4)),
        (middle(attention, 2), middle(mlp, 2)),
        (attention[len(attention) // 2 : -1], mlp[len(mlp) // 2 : -1]),
        (attention[1:-1], []),
        (attention[2::3], mlp[2::3]),
    ]
    return [{"skip_attention": a, "skip_mlp": m} for a, m in pairs if a or m]


class LayerSearch:
    """A search on a model with development prompts, whose study is in an existing folder: it can be
    interrupted and continued, with the same settings. ``num_draft_tokens`` is K, the most per step.
    """

    def __init__(
        self, model: Any, tokenizer: Any, prompts: Sequence[Prompt], folder: Path, *,
        max_new_tokens: int = 64, num_draft_tokens: int = 12, seed: int = 0,
    ):  # fmt: skip
        if not prompts:
            raise ValueError("nothing to search on: no prompts")
        self.model, self.tokenizer = model, tokenizer
        self.max_new_tokens, self.num_draft_tokens = max_new_tokens, num_draft_tokens
        self.sublayers = skippable(model)
        self.ids, _ = encode_prompts(model, tokenizer, prompts, max_new_tokens)
        self.study = open_study(folder, seed)
        texts = json.dumps([prompt.full_text for prompt in prompts])
        identity = {
            "max_new_tokens": max_new_tokens, "num_draft_tokens": num_draft_tokens, "seed": seed,
            "model_fingerprint": weights_digest(model), "prompts": len(prompts),
            "prompts_sha256": hashlib.sha256(texts.encode()).hexdigest(), **device_of(model),
        }  # fmt: skip
        if "identity" not in self.study.user_attrs:
            self.study.set_user_attr("identity", identity)
        known = self.study.user_attrs["identity"]
        check_same_settings(f"{str(folder)!r} holds a search", known, identity)
        for choice in starting_points(self.sublayers):
            self.study.enqueue_trial(self._parameters(choice), skip_if_exists=True)

    def _parameters(self, choice: Choice) -> dict[str, bool]:
        """Optuna's parameters of a choice."""
        return {
            f"{kind}_{layer}": layer in choice[kind]
            for kind, layers in self.sublayers.items()
            for layer in layers
        }

    def choice(self, parameters: dict[str, bool]) -> Choice:
        """Inverse of :meth:`_parameters`."""
        return {
            kind: [layer for layer in layers if parameters[f"{kind}_{layer}"]]
            for kind, layers in self.sublayers.items()
        }

    def search(self, trials: int) -> None:
        """Run trials until there are ``trials`` finished ones, those of earlier runs included."""
        options = {"do_sample": False, "max_new_tokens": self.max_new_tokens}
        opened = Session.open(self.model, self.tokenizer, options, [])
        with opened as session, progress_bar("search") as progress:

            def report(*_: Any) -> None:
                best = [f"best {trial.value:.1f} tokens/s" for trial in self.ranked(1)]
                progress(self.finished, trials, note="".join(best))

            report()
            self.study.optimize(
                lambda trial: self._trial(session, trial),
                n_trials=max(trials - self.finished, 0), callbacks=[report],
            )  # fmt: skip

    @property
    def finished(self) -> int:
        """Number of finished trials."""
        return len(self.study.get_trials(deepcopy=False, states=COMPLETE))

    def _trial(self, session: Session, trial: Any) -> float:
        """Tokens per second of decoding the prompts with the trial's choice."""
        names = self._parameters(dict.fromkeys(self.sublayers, []))
        skipped = {name: trial.suggest_categorical(name, [False, True]) for name in names}
        choice = self.choice(skipped)
        contender = self.contender(choice, **TRIAL_OPTIONS)
        forget(self.model)  # a choice's value must not depend on earlier trials
        tokens, seconds = 0, 0.0
        for ids in self.ids:
            spent, (answer,), *_ = session.generate(contender, [ids])
            tokens, seconds = tokens + len(answer), seconds + spent
        return tokens / seconds

    def contender(self, choice: Choice, name: str = STRATEGY, **options: Any) -> Contender:
        """A choice as a contender of benchmarks."""
        kwargs = {**choice, "num_draft_tokens": self.num_draft_tokens, **options}
        return contender_of(name, kwargs)

    def ranked(self, count: int) -> list[Any]:
        """The complete trials of the largest values, each choice once."""
        complete = self.study.get_trials(deepcopy=False, states=COMPLETE)
        distinct: dict[str, Any] = {}
        for trial in sorted(complete, key=lambda trial: -trial.value):
            distinct.setdefault(json.dumps(trial.params, sort_keys=True), trial)
        return list(distinct.values())[:count]

    def confirm(
        self, prompts: Sequence[Prompt]
    ) -> tuple[Choice, list[dict[str, Any]], BenchResult]:
        """Measure the best trials in turns with plain decoding, on prompts that they did not see if
        there are any, then the best of them once more.

        Returns:
            The best choice; an entry for each of the best trials; the last measurement, in which
            the choice's speed is not the largest of several.
        """
        best = self.ranked(FINALISTS)
        names = {f"{STRATEGY}:{trial.number}": self.choice(trial.params) for trial in best}
        first = self._measure(prompts, names)
        entries = [
            {
                "trial": trial.number, **choice, "tokens_per_second": trial.value,
                **{key: first.overall(name)[key] for key in ("speedup", "speedup_interval", "tau")},
            }
            for trial, (name, choice) in zip(best, names.items())
        ]  # fmt: skip
        choice = names[max(names, key=lambda name: first.overall(name)["speedup"])]
        return choice, entries, self._measure(prompts, {STRATEGY: choice})

    def _measure(self, prompts: Sequence[Prompt], choices: dict[str, Choice]) -> BenchResult:
        lineup = [self.contender(choice, name) for name, choice in choices.items()]
        result = run(
            self.model, self.tokenizer, prompts, lineup,
            max_new_tokens=self.max_new_tokens, title="measuring the best",
        )  # fmt: skip
        if result.interrupted:
            raise KeyboardInterrupt
        return result


def open_study(folder: Path, seed: int = 0) -> Any:
    """The Optuna study in a folder, created if there is none; a ValueError if it cannot be read."""
    # What ends a trial is raised, and an interrupt is no warning.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    backend = optuna.storages.journal.JournalFileBackend(str(folder / STUDY_FILE))
    what = f"cannot use {STUDY_FILE} in {str(folder)!r}, give another folder"
    with explained(what, OSError, ValueError, KeyError, AssertionError):  # Optuna's, too
        return optuna.create_study(
            storage=optuna.storages.JournalStorage(backend), study_name=STRATEGY,
            direction="maximize", load_if_exists=True,
            sampler=optuna.samplers.GPSampler(seed=seed),
        )  # fmt: skip
