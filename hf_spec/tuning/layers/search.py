"""Search for the sublayers to skip, with baselines and the draft-exit ablation.

It minimises time per token over z in {0, 1}^(2L) by black-box optimisation (Draft & Verify, section
3.3). The best of many trials owes some of its value to the prompts that it was chosen on, so the
best few are judged again on others. This module knows no command line, plots or adapter folders.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_spec.bench.prompts import Prompt
from hf_spec.core.checks import check_count
from hf_spec.files import exclusive
from hf_spec.tuning.layers.costs import Skip, StepCosts, Sublayers
from hf_spec.tuning.layers.objective import STRATEGY, Evaluation, Exit
from hf_spec.tuning.layers.study import (
    STUDY_FILE,
    LayerStudy,
    Progress,
    Settings,
    Trial,
    best_of,
    study_identity,
)

#: Number of seeds that the baseline "random" is averaged over.
RANDOM_BASELINES = 3
#: Settings of Draft & Verify's tables 3 and 4, and target acceptance rates of its table 6.
FIXED_DRAFTS = (1, 2, 4, 6, 8)
THRESHOLDS = (0.2, 0.4, 0.6, 0.8)
TARGETS = (0.7, 0.8, 0.85, 0.9, 0.95)
#: Number of best choices that are judged on held-out prompts.
FINALISTS = 5


def starting_points(sublayers: Sublayers) -> list[Skip]:
    """The first choices to try: evenly spaced layers, middle ones, and late ones."""
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
    """The middle ``count`` layers."""
    first = (len(layers) - count) // 2
    return tuple(layers[first : first + count])


def baseline_choices(sublayers: Sublayers, skip: Skip) -> Iterator[tuple[str, int, Skip]]:
    """Baselines that skip as many attentions and MLPs, chosen by position (appendix D).

    Yields:
        Name, seed and choice.
    """

    def chosen(pick: Callable[[Sequence[int], int], Sequence[int]]) -> Skip:
        pairs = ((sublayers.attention, skip.attention), (sublayers.mlp, skip.mlp))
        return Skip(*(tuple(sorted(pick(layers, len(left)))) for layers, left in pairs))

    yield "first", 0, chosen(lambda layers, n: layers[:n])
    yield "middle", 0, chosen(middle)
    yield "last", 0, chosen(lambda layers, n: layers[len(layers) - n :])
    for seed in range(RANDOM_BASELINES):
        yield "random", seed, chosen(random.Random(seed).sample)


def exit_choices(settings: Settings) -> list[Exit]:
    """Draft exits to compare: the adaptive one of the search, then those of tables 3 and 4."""
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
    """The result of a search.

    Attributes:
        settings: what was optimised.
        identity: model, prompts and settings of the study.
        sublayers: the sublayers that can be skipped.
        costs: the measured costs; None for ``objective="measured"``.
        trials: all finished trials.
        best: the complete trial that was chosen: the best one, or of the best few the one that is
            best on the held-out prompts, where the first of ``exits`` has its value.
        finalists: one entry per choice that was judged on held-out prompts, the best trial first.
        baselines: entries of ``search.json``, the searched choice first; None if left out. They
            and the draft exits are judged as ``best`` is.
        exits: one entry per draft exit.
    """

    settings: Settings
    identity: dict[str, Any]
    sublayers: Sublayers
    costs: StepCosts | None
    trials: list[Trial]
    best: Trial
    finalists: list[dict[str, Any]]
    baselines: list[dict[str, Any]] | None
    exits: list[dict[str, Any]]

    def options(self) -> dict[str, Any]:
        """``assistant_kwargs`` besides the layers; the default draft exit is kept."""
        return {"max_draft": self.settings.max_draft}

    def to_dict(self) -> dict[str, Any]:
        """The content of ``search.json``, without the environment."""
        return {
            "strategy": STRATEGY,
            "settings": asdict(self.settings),
            "identity": self.identity,
            "layers": self.sublayers.count,
            "sublayers": {"attention": self.sublayers.attention, "mlp": self.sublayers.mlp},
            "costs": None if self.costs is None else asdict(self.costs),
            "best": self.best.to_dict(),
            "held_out": self.finalists,
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
    held_out: Sequence[Prompt] = (),
    trials: int = 100,
    baselines: bool = True,
    costs: StepCosts | None = None,
    progress: Progress = lambda finished, trials, best: None,
    status: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Search for the sublayers to skip, or continue a search.

    Args:
        model: a causal language model in evaluation mode, on its device.
        tokenizer: its tokenizer.
        prompts: development prompts.
        folder: an existing folder, which holds the study.
        settings: what is optimised.
        held_out: prompts that the trials do not see.
        trials: total number of finished trials, those of earlier runs included.
        baselines: whether to compare with choices by position.
        costs: costs to use instead of measuring, if the study has none yet.
        progress: called as ``progress(finished, trials, best)``.
        status: called with a line of text at the start of each phase.

    Raises:
        ValueError: the folder's study has other settings, or another process uses it.
    """
    check_count("trials", trials)
    evaluator = settings.evaluator(model, tokenizer, prompts)
    judging = settings.evaluator(model, tokenizer, held_out) if held_out else evaluator
    identity = study_identity(model, prompts, settings)
    busy = f"another search is running in {str(folder)!r}: wait for it, or give another folder"
    lock = exclusive(folder / f"{STUDY_FILE}.lock", busy)
    with lock, closing(LayerStudy(folder, identity)) as study:
        if settings.objective == "modelled":
            status("measuring costs")
            evaluator.costs = study.costs(
                lambda: costs or evaluator.measure_costs(settings.max_draft)
            )
        status("searching")
        starts = starting_points(evaluator.sublayers)
        done = study.trials
        while True:
            progress(len(done), trials, next(iter(best_of(done)), None))
            if len(done) >= trials:
                break
            done.append(study.run_trial(evaluator, settings, starts))
        finalists = best_of(done, FINALISTS if held_out else 1)
        if not finalists:
            raise ValueError("every trial was pruned: continue with more --trials")
        judging.costs = evaluator.costs

        def judge(skip: Skip, stop: Exit) -> Evaluation:
            if judging is evaluator and stop == settings.stop and settings.objective == "modelled":
                known = [one.evaluation for one in finalists if one.skip == skip]
                if known:  # deterministic values are reused from the trials
                    return known[0]
            values = judging.evaluate(settings.objective, skip, stop)
            return study.cached(held_out, skip, stop, values)

        status("judging the best")
        values = [judge(one.skip, settings.stop) for one in finalists]
        best, judged = min(zip(finalists, values), key=lambda pair: pair[1].value)
        status("comparing draft exits")
        exits: list[dict[str, Any]] = []
        for stop in exit_choices(settings):
            evaluation = judged if stop == settings.stop else judge(best.skip, stop)
            exits.append({**stop.options(), **evaluation.to_dict(), "best": False})
        least = min(range(len(exits)), key=lambda index: (exits[index]["value"], index))
        exits[least]["best"] = True
        rows = None
        if baselines:
            status("comparing baselines")
            rows = _baselines(evaluator.sublayers, best.skip, settings.stop, judge)
        return SearchResult(
            settings, identity, evaluator.sublayers, evaluator.costs, done, best,
            [
                {"trial": one.number, "prompts": len(held_out), **one.skip.options(),
                 "development": one.evaluation.value, **value.to_dict()}
                for one, value in zip(finalists, values) if held_out
            ],
            rows, exits,
        )  # fmt: skip


def _baselines(
    sublayers: Sublayers, best: Skip, stop: Exit, judge: Callable[[Skip, Exit], Evaluation]
) -> list[dict[str, Any]]:
    """Entries for the searched choice and each baseline; "random" is the mean over its seeds."""
    rows = [{"name": "searched", **best.options(), **judge(best, stop).to_dict()}]
    drawn = []
    for name, seed, skip in baseline_choices(sublayers, best):
        row = {"name": name, **skip.options(), **judge(skip, stop).to_dict()}
        if name == "random":
            drawn.append({**row, "seed": seed})
        else:
            rows.append(row)
    figures = ("value", "tau", "acceptance")
    mean: dict[str, Any] = {name: sum(row[name] for row in drawn) / len(drawn) for name in figures}
    rows.append({"name": "random", **mean, "speedup": 1.0 / mean["value"], "draws": drawn})
    return rows
