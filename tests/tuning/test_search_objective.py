"""What a choice of sublayers is worth: costs, counts, and the two objectives."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from planted import COSTS, LAYERS, PLANTED, PROMPTS, SETTINGS, planted_model
from transformers import PreTrainedModel

import hf_spec
from hf_spec.bench.contenders import PLAIN, Contender
from hf_spec.core.stats import SpecStats
from hf_spec.tuning.layers.costs import ForwardTimer, Skip, StepCosts, Sublayers, _prices
from hf_spec.tuning.layers.objective import (
    Counts,
    Evaluator,
    Exit,
    modelled_seconds,
    modelled_value,
    plain_seconds,
)


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    made = SETTINGS.evaluator(*planted_model(), PROMPTS)
    made.costs = COSTS
    return made


def last(evaluator: Evaluator, skip: Skip, stop: Exit = SETTINGS.stop, kind: str = "modelled"):
    return list(evaluator.evaluate(kind, skip, stop))[-1]


def test_modelled_seconds_by_hand() -> None:
    counts = Counts(
        prompts=2, tokens=12, steps=7, drafted=10, accepted=5, draft_forwards=10,
        draft_lengths={0: 1, 2: 3, 4: 1},
    )  # fmt: skip
    # Two prefills; ten drafted tokens at 0.1 + 0.1 * (8 - 3 kept); nodes 1, 3, 3, 3, 5 verified.
    skip = Skip((0, 1), (2,))
    verifying = 1.0 + 3 * 1.02 + 1.04
    assert modelled_seconds(COSTS, counts, skip) == pytest.approx(2 + 10 * 0.6 + verifying)
    assert plain_seconds(COSTS, counts) == pytest.approx(2 + 10)
    assert modelled_value(COSTS, counts, skip) == pytest.approx((8 + verifying) / 12)
    more = dataclasses.replace(COSTS, draft_overhead=0.5, step_overhead=0.25)
    assert modelled_seconds(more, counts, skip) == pytest.approx(8 + verifying + 5 + 1.25)


def test_a_layer_that_computes_nothing_costs_nothing() -> None:
    costs = dataclasses.replace(COSTS, layer=0.05)
    assert costs.draft_seconds(Skip()) == pytest.approx(0.1 + 0.8 + 4 * 0.05)
    assert costs.draft_seconds(Skip((1,), (2,))) == pytest.approx(0.1 + 0.6 + 4 * 0.05)
    assert costs.draft_seconds(Skip((1,), (1,))) == pytest.approx(0.1 + 0.6 + 3 * 0.05)


def test_counts_of_a_run() -> None:
    stats = SpecStats(num_draft_forwards=7)
    stats.record(1, 0, 0)  # the prefill
    stats.record(3, 4, 4)
    stats.record(1, 3, 3)
    stats.record(1, 0, 0)
    counts = Counts.of(stats)
    assert counts == Counts(1, 6, 4, 7, 2, 7, {0: 1, 3: 1, 4: 1})
    assert counts.tau == 1.5 and counts.acceptance == pytest.approx(2 / 7)
    other = SpecStats(num_draft_forwards=4)
    other.record(1, 0, 0)  # the prefill
    other.record(1, 4, 4)
    stats.merge(other)
    both = Counts.of(stats, prompts=2)
    assert both == Counts(2, 8, 6, 11, 2, 11, {0: 1, 3: 1, 4: 2})
    assert Counts.from_dict(json.loads(json.dumps(dataclasses.asdict(both)))) == both


def test_costs_survive_json() -> None:
    assert StepCosts.from_dict(json.loads(json.dumps(dataclasses.asdict(COSTS)))) == COSTS


def test_modelled_value_is_the_same_every_time(evaluator: Evaluator) -> None:
    skip = Skip((1,), (2,))
    first = list(evaluator.evaluate("modelled", skip, SETTINGS.stop))
    assert len(first) == len(PROMPTS)
    assert list(evaluator.evaluate("modelled", skip, SETTINGS.stop)) == first
    # Also by a fresh model in a fresh evaluator.
    again = SETTINGS.evaluator(*planted_model(), PROMPTS)
    again.costs = COSTS
    assert list(again.evaluate("modelled", skip, SETTINGS.stop)) == first
    assert sum(first[-1].counts.draft_lengths.values()) == (
        first[-1].counts.steps - first[-1].counts.prompts
    )


def test_modelled_value_is_reproducible_when_sampling() -> None:
    settings = dataclasses.replace(SETTINGS, do_sample=True, temperature=0.8)
    made = settings.evaluator(*planted_model(), PROMPTS[:1])
    made.costs = COSTS
    skip = Skip((0,), ())
    found, gammas = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(last(made, skip, settings.stop))
        gammas.append(hf_spec.last_stats(made.model).details["threshold"])
    assert found[0] == found[1]
    assert gammas[0] == gammas[1] != settings.stop.threshold  # it begins anew with each choice


def test_skipping_what_computes_nothing_costs_no_acceptance(evaluator: Evaluator) -> None:
    nothing, planted = last(evaluator, Skip()), last(evaluator, PLANTED)
    assert planted.counts == nothing.counts and planted.counts.acceptance == 1.0
    assert planted.value < nothing.value
    broken = last(evaluator, Skip((0,), (1,)))
    assert broken.counts.tau < planted.counts.tau


def test_measured_value_is_wall_clock_time(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that a strategy's call moves by 3 and a plain call by 2 seconds."""
    order: list[str] = []
    original = Evaluator.decode

    def timed(self: Evaluator, prompt: int, contender: Contender = PLAIN, **_: Any) -> Any:
        ours = contender is not PLAIN
        order.append(f"{'ours' if ours else 'plain'}{prompt}")
        return 3.0 if ours else 2.0, *original(self, prompt, contender)[1:]

    monkeypatch.setattr(Evaluator, "decode", timed)
    values = list(evaluator.evaluate("measured", PLANTED, SETTINGS.stop))
    assert [value.value for value in values] == pytest.approx([1.5] * 3)
    assert order == ["plain0", "ours0", "ours1", "plain1", "plain2", "ours2"]


def test_the_models_own_defaults_come_back(evaluator: Evaluator) -> None:
    config = evaluator.model.generation_config
    steps = evaluator.evaluate("modelled", PLANTED, SETTINGS.stop)
    next(steps)
    steps.close()
    assert evaluator.model.generation_config is config


def test_exit_options_are_those_that_count() -> None:
    assert Exit("fixed", 4).options() == {"draft_exit": "fixed", "max_draft": 4}
    assert Exit("threshold", 4, 0.2).options() == {
        "draft_exit": "threshold", "max_draft": 4, "threshold": 0.2,
    }  # fmt: skip
    assert Exit("adaptive", 4).options()["target_acceptance"] == 0.85


# -- measuring -----------------------------------------------------------------------------------


def test_costs_are_measured(evaluator: Evaluator) -> None:
    costs = evaluator.measure_costs(6)
    assert sorted(costs.verify) == [1, 2, 3, 4, 6, 7]
    values = [costs.verify[n] for n in sorted(costs.verify)]
    assert values == sorted(values) and values[0] > 0
    assert costs.plain > 0 and costs.prefill > 0 and costs.step_overhead > 0
    assert len(costs.attention) == len(costs.mlp) == LAYERS
    # Half a tiny forward is far more than any noise of the median.
    everything = Skip(tuple(range(LAYERS)), tuple(range(LAYERS)))
    assert costs.draft_seconds(everything) < 0.7 * costs.draft_seconds(Skip())
    assert len(costs.measured["draft"]) == 4


def test_prices_are_recovered_from_exact_times(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = planted_model()
    truth = dataclasses.replace(
        COSTS, layer=0.03, attention=(0.2,) * LAYERS, mlp=(0.07,) * LAYERS
    )  # fmt: skip
    timer = ForwardTimer(model, list(range(4, 12)), 5, Sublayers.of(model))
    verified = {1: [0.3, 0.1, 0.2], 2: [0.15], 3: [0.4]}
    for key in timer.spent:
        drafted = isinstance(key, Skip)
        timer.spent[key] = [truth.draft_seconds(key)] if drafted else verified.get(key, [0.5])
    found = timer.result()
    assert found.draft_base == pytest.approx(0.1)
    assert found.layer == pytest.approx(0.03)
    assert found.attention == pytest.approx(truth.attention)
    assert found.mlp == pytest.approx(truth.mlp)
    # Medians, and no number of nodes costs less than a smaller one.
    assert [found.verify[n] for n in sorted(found.verify)][:3] == [0.2, 0.2, 0.4]


def test_prices_are_never_negative() -> None:
    model, _ = planted_model()
    timer = ForwardTimer(model, list(range(4, 12)), 5, Sublayers.of(model))
    # The less is computed, the longer it takes: only the base explains that.
    patterns = [key for key in timer.spent if isinstance(key, Skip)]
    timer.spent = {key: [0.1] for key in timer.spent} | {s: [1.0 + len(s)] for s in patterns}
    found = timer.result()
    assert found.layer == 0.0 and set(found.attention + found.mlp) == {0.0}
    mean = sum(1.0 + len(skip) for skip in patterns) / len(patterns)
    assert found.draft_base == pytest.approx(mean)


def test_kinds_of_sublayers(tiny: Callable[..., PreTrainedModel]) -> None:
    """Sliding and full attention have prices of their own."""
    sublayers = Sublayers.of(tiny("gemma3"))
    assert sublayers.attention == sublayers.mlp == (0, 1, 2)
    assert ("attention", (0, 2)) in sublayers.groups and ("attention", (1,)) in sublayers.groups
    llama = Sublayers.of(tiny("llama"))
    assert llama.groups == (("attention", (0, 1, 2)), ("mlp", (0, 1, 2)))


def test_prompts_must_fit() -> None:
    model, tokenizer = planted_model()
    with pytest.raises(ValueError, match="leaves no room for a prompt"):
        Evaluator(model, tokenizer, PROMPTS, 4096)
    with pytest.raises(ValueError, match="no prompts"):
        Evaluator(model, tokenizer, [], 8)


def test_prices_are_never_below_zero() -> None:
    counts = np.array([[1.0, 0, 0], [1, 1, 0], [1, 0, 1], [1, 1, 1]])
    assert _prices(counts, counts @ [2.0, 3.0, 0.5]) == pytest.approx([2.0, 3.0, 0.5])
    assert _prices(counts, counts @ [2.0, 3.0, -0.5]) == pytest.approx([1.75, 3.0, 0.0])
