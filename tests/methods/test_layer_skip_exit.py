"""When ``layer_skip`` stops drafting: eqs. (2)-(4), and gamma between calls."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import prompt
from transformers import PreTrainedModel

import hf_spec
from hf_spec.core.memory import forget
from hf_spec.methods.layer_skip.options import DraftExit, LayerSkipOptions

Tiny = Callable[..., PreTrainedModel]


@pytest.mark.parametrize("seed", range(10))
def test_adaptation_equals_the_equations(seed: int) -> None:
    rng = random.Random(seed)
    gamma, epsilon, beta1, beta2, alpha = (rng.random() for _ in range(5))
    options = LayerSkipOptions(
        threshold=gamma, threshold_step=epsilon, beta1=beta1, beta2=beta2, target_acceptance=alpha
    )
    one, smoothed = DraftExit(options), 0.0
    for stage in range(1, 20):
        rate = rng.choice([0.0, 1.0, alpha, rng.random()])
        b = 0.0 if stage == 1 else beta1
        smoothed = b * smoothed + (1 - b) * rate  # (2)
        tilde = gamma + epsilon if smoothed <= alpha else gamma - epsilon  # (3)
        gamma = beta2 * gamma + (1 - beta2) * tilde  # (4)
        gamma = min(max(gamma, 0.0), 1.0)  # decides alike
        one.update(rate)
        assert one.gamma == pytest.approx(gamma, abs=1e-12)


@pytest.mark.parametrize("mode", ["policy", "adaptive", "threshold", "fixed"])
def test_what_each_mode_does(mode: str) -> None:
    given = {} if mode == "fixed" else {"threshold": 0.5}
    one = DraftExit(LayerSkipOptions(draft_exit=mode, **given))
    assert [one.go_on(p) for p in (0.4, 0.5, 0.6)] == [mode == "fixed", True, True]
    before = one.gamma
    one.update(0.0)
    assert (one.gamma == before) == (mode in ("threshold", "fixed"))


@pytest.mark.parametrize(("step", "alpha"), [(0.01, 0.85), (0.1, 0.7)])
def test_gamma_settles_where_the_target_is_the_median_rate(step: float, alpha: float) -> None:
    """Planted: a token of draft probability c is accepted with the chance c.

    Gamma moves as far up as down, so that it stays where rates (AR, smoothed) are below the target
    as often as above it. That takes 1,000 stages and more by the paper's numbers. Rates are skewed,
    so that their mean is below. The standard deviation of the share is about 0.02, since rates of
    neighbouring stages are alike; the seed is fixed.
    """
    rng = random.Random(0)
    one = DraftExit(LayerSkipOptions(threshold_step=step, target_acceptance=alpha))
    below, rates = [], []
    for stage in range(6000):
        drafted = accepted = 0
        right = go_on = True
        while go_on and drafted < 12:
            chance = rng.betavariate(3, 1)
            right = right and rng.random() < chance
            drafted, accepted, go_on = drafted + 1, accepted + right, one.go_on(chance)
        one.update(accepted / drafted)
        assert one.acceptance is not None
        if stage >= 3000:
            below.append(one.acceptance <= alpha)
            rates.append(accepted / drafted)
    assert sum(below) / len(below) == pytest.approx(0.5, abs=0.06)
    assert alpha - 0.13 < sum(rates) / len(rates) < alpha


def test_gamma_decides_while_no_price_is_known() -> None:
    one = DraftExit(LayerSkipOptions(threshold=0.5))
    assert one.pays(2, [0.1, 0.1], [0.2, 0.5], None)  # of the surest row
    assert not one.pays(2, [0.1, 0.1], [0.2, 0.4], None)
    assert not one.pays(2, [0.1, 0.0], [0.2, 0.9], None)  # which is not finished
    assert one.pays(1, [1.0], [], None, [0.9])  # and drafts begin


#: Gamma rises by 0.001 at every stage, whatever is accepted.
RISING = {"skip_mlp": [1], "max_draft": 3, "target_acceptance": 1.0}


def stages_and_gamma(model: Any, **options: Any) -> tuple[int, float]:
    """Drafting stages of a call, and gamma behind it."""
    model.generate(
        prompt(), max_new_tokens=24, do_sample=False, assistant_strategy="layer_skip",
        assistant_kwargs={**RISING, "drafting": "always", **options},
    )  # fmt: skip
    stats = hf_spec.last_stats(model)
    return stats.offered[1], stats.details["threshold"]


def test_a_call_goes_on_where_the_one_before_ended(fresh: Tiny) -> None:
    model = fresh("llama")
    stages, gamma = stages_and_gamma(model)
    assert stages > 5 and gamma == pytest.approx(0.6 + 0.001 * stages)
    assert stages_and_gamma(model) == (stages, pytest.approx(gamma + 0.001 * stages))
    # Others begin anew: another model, other layers, other options.
    assert stages_and_gamma(fresh("llama")) == (stages, gamma)
    for options in ({"skip_mlp": [2]}, {"threshold": 0.7}):
        stages, risen = stages_and_gamma(model, **options)
        assert risen == pytest.approx(options.get("threshold", 0.6) + 0.001 * stages)
    forget(model)
    assert stages_and_gamma(model)[1] == gamma


def test_adapters_have_a_gamma_of_their_own(fresh: Tiny) -> None:
    model, gammas = fresh("llama"), []
    for name in ("one", "other"):
        model.add_adapter(hf_spec.LayerSkipConfig(skip_mlp=[1]), name)
        model.set_adapter(name)
        gammas.append(stages_and_gamma(model, skip_mlp=None)[1])
    assert gammas[0] == gammas[1] > 0.6


def test_no_update_of_another_thread_is_lost() -> None:
    one = DraftExit(LayerSkipOptions(threshold=0.0, threshold_step=0.001, target_acceptance=1.0))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: [one.update(0.5) for _ in range(500)], range(8)))
    finally:
        sys.setswitchinterval(before)
    assert one.gamma == pytest.approx(0.0001 * 4000)
