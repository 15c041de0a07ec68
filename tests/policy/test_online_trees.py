"""``tree="online"``: hits counted as tokens come in, and trees of the likeliest ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_oracle import Embeddings
from conftest import prompt, ragged
from running import drafting
from transformers import PreTrainedModel

import hf_spec
from hf_spec.adapters.active import require_active
from hf_spec.adapters.predicting import AFTER, BEFORE, STATE
from hf_spec.core import memory
from hf_spec.core.tree import Tree
from hf_spec.drafting.predictions import Predictions
from hf_spec.drafting.transition import Transition
from hf_spec.methods.registry import methods
from hf_spec.policy import tuned_trees
from hf_spec.policy.adaptive_trees import grow
from hf_spec.policy.likely_paths import likeliest_paths
from hf_spec.policy.online_trees import (
    GUESSED,
    HIT_ALPHA,
    MEASURED,
    RANKS,
    UNKNOWN,
    HitRates,
    OnlineTrees,
    Ranked,
)
from hf_spec.policy.tuned_trees import VERSION, Device

NAMES = ("bita", "medusa", "ppd", "space")
NEW = 40

every_name = pytest.mark.parametrize("name", NAMES)
every_prediction = pytest.mark.parametrize("with_transition", [False, True])


def example(batch: int, depth: int, vocab: int, with_transition: bool) -> tuple[Predictions, Any]:
    """Predictions, and the roots that they stand behind."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, depth, vocab, generator=generator)
    states = torch.randn(batch, depth, 5, generator=generator)
    weights = {name: torch.randn(4, 5, generator=generator) for name in (BEFORE, STATE)}
    weights[AFTER] = torch.randn(5, 4, generator=generator)
    base = Embeddings(*(torch.randn(vocab, 5, generator=generator) for _ in range(2)))
    transition = Transition(weights, base) if with_transition else None
    roots = torch.randint(vocab, (batch,), generator=generator)
    return Predictions(logits, vocab, [depth] * batch, transition, states), roots


# -- hits: 4.2.2 ----------------------------------------------------------------------


def test_hits_by_hand() -> None:
    rates = HitRates(2, 3)
    table, counts = rates.cumulative.copy(), [GUESSED] * 2
    assert table[:, -1] == pytest.approx([0.55 + 0.15, 0.55 * 0.85 + 0.15])
    ranks = np.array([[0, 2], [3, UNKNOWN], [1, 1], [0, 3]])
    for row in ranks:
        for i, rank in enumerate(row):
            if rank == UNKNOWN:
                continue
            counts[i] += 1
            alpha = max(1 / counts[i], HIT_ALPHA)
            for k in range(3):
                table[i, k] = (1 - alpha) * table[i, k] + alpha * (rank <= k)
    rates.observe(ranks)
    np.testing.assert_allclose(rates.cumulative, table, rtol=1e-12)
    np.testing.assert_allclose(rates.chances.cumsum(1), table, rtol=1e-12)
    assert rates.counts.tolist() == counts


def test_hits_settle_at_the_planted_chances() -> None:
    """Within four standard deviations of an average with alpha; the seed is fixed."""
    rates = HitRates(1, 2)
    ranks = np.random.default_rng(1).choice(3, size=(4000, 1), p=[0.6, 0.3, 0.1])
    rates.observe(ranks)
    deviation = math.sqrt(0.25 * HIT_ALPHA / 2)
    np.testing.assert_allclose(rates.chances[0], [0.6, 0.3], atol=4 * deviation)


def test_measured_accuracies_are_where_it_starts() -> None:
    table = np.array([[0.5, 0.2], [0.4, 0.1]])
    rates = HitRates.measured(table, 3, 4)
    np.testing.assert_allclose(rates.chances[:2, :2], table)
    assert not rates.chances[:2, 2:].any() and rates.chances[2].any()
    np.testing.assert_allclose(HitRates.measured(table, 1, 1).chances, [[0.5]])


@every_prediction
def test_a_step_s_hits_one_token_at_a_time(with_transition: bool) -> None:
    """The rank of each token that came, given those before it, as far as the row knows."""
    made, roots = example(3, 4, 20, with_transition)
    made.known = (4, 2, 4)
    seen: list[Any] = []
    hits: Any = HitRates(4)
    hits.observe = seen.append
    source = OnlineTrees(4, False, hits)
    source._predicted = made, roots
    came = [[3, 7, 1], [5, 5, 5, 5, 5, 5], []]
    source.observe(came, 8)
    source.observe(came, 8)  # nothing was predicted since
    (ranks,) = seen
    expected = np.full((3, 4), UNKNOWN)
    for row, tokens in enumerate(came):
        before = [int(roots[row]), *tokens]
        for d in range(min(made.known[row], len(tokens))):
            previous = torch.zeros(3, 4, dtype=torch.long)
            previous[row, d] = before[d]
            best = made.likeliest(previous)[row, d, :RANKS].tolist()
            expected[row, d] = best.index(tokens[d]) if tokens[d] in best else RANKS
    assert ranks.tolist() == expected.tolist()


@every_prediction
def test_paths_count_by_the_chances_of_their_ranks(with_transition: bool) -> None:
    """The order of the tokens is the prediction's, also given the token before."""
    made, roots = example(2, 3, 20, with_transition)
    chances = HitRates(3).chances
    tree = Tree.unpacked(grow(Ranked(made, chances), roots, 8, 3))
    paths, products = likeliest_paths(chances, 8)
    for row in range(2):
        assert tree.host.probs[row, 1:].tolist() == pytest.approx(products.tolist())
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        found = {}
        for node in range(1, 9):
            above = found.get(parents[node], ())
            previous = torch.full((2, 3), tokens[parents[node]])
            best = made.likeliest(previous)[row, len(above)].tolist()
            found[node] = (*above, best.index(tokens[node]))
        assert set(found.values()) == set(paths)


# -- in decoding -------------------------------------------------------------------------------


def adapted(model: Any, name: str, **config: Any) -> Any:
    """The model with an untrained adapter of the strategy's."""
    torch.manual_seed(2)
    model.add_adapter(methods()[name].adapter_config(**config))
    return model


def generate(model: Any, name: str, inputs: dict[str, Any], **options: Any) -> Any:
    return model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True,
        **drafting(name, tree="online", **options),
    )  # fmt: skip


@pytest.mark.parametrize("architecture", ["llama_tied", "gpt2"])
@every_name
def test_greedy_output_does_not_change(
    fresh: Callable[..., PreTrainedModel], architecture: str, name: str
) -> None:
    model = adapted(fresh(architecture), name)
    for inputs in ({"input_ids": prompt()}, ragged((12, 3, 9, 7))):
        expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False).tolist()
        for options in ({}, {"fallback": True}, {"retrieval": True}, {"max_depth": 1}):
            out = generate(model, name, inputs, **options)
            assert out.sequences.tolist() == expected
            # With the guard a call may be plain, by what steps took in the one before.
            assert out.spec_stats.num_drafted_tokens > 0 or "fallback" in options
            json.dumps(out.spec_stats.to_dict())
        assert len(out.spec_stats.details["online"]["hits"]) == 1
        assert max(out.spec_stats.offered) == 1


@every_name
def test_sampling_at_batch_size_1_equals_plain(
    fresh: Callable[..., PreTrainedModel], name: str
) -> None:
    """Under the match rule, which takes as many random numbers whatever the trees are."""
    model = adapted(fresh("llama_tied"), name)
    settings = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.7, "top_k": 3}
    for seed in range(2):
        torch.manual_seed(seed)
        ours = model.generate(prompt(), **settings, **drafting(name, tree="online"))
        torch.manual_seed(seed)
        assert ours.tolist() == model.generate(prompt(), **settings).tolist()


@every_name
def test_hits_are_those_of_the_output(
    fresh: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every prediction is compared with the tokens that came behind its root, in a batch, too."""
    model = adapted(fresh("llama_tied"), name)
    came: list[list[list[int]]] = []
    ranks: list[np.ndarray] = []
    note, observe = OnlineTrees.observe, HitRates.observe

    def noted(self: Any, tokens: Any, taken: int) -> None:
        if self._predicted is not None:
            came.append([list(row) for row in tokens])
        note(self, tokens, taken)

    monkeypatch.setattr(OnlineTrees, "observe", noted)
    monkeypatch.setattr(
        HitRates, "observe", lambda self, found: (ranks.append(found), observe(self, found))
    )
    out = generate(model, name, ragged((12, 5)))
    wholes = ["".join(map(chr, row)) for row in out.sequences[:, 12:].tolist()]
    assert len(came) == len(ranks) > 5
    for tokens, found in zip(came, ranks):
        for row, one in zip(tokens, found):
            assert any("".join(map(chr, row)) in whole for whole in wholes)
            assert (one[len(row) :] == UNKNOWN).all() and (one <= RANKS).all()
    assert any((found >= 0).any() for found in ranks)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("medusa", {"tree": "online", "candidates": 4}, "candidates=4 is of tree='adaptive'"),
        ("bita", {"tree": "online", "top_k": 3}, "top_k=3 is of the trees"),
        ("space", {"tree": "round"}, "tree='round': choose one of adaptive, chain, online"),
        ("space", {"tree": "online", "acceptance": "rejection"}, "acceptance='rejection' with"),
    ],
)
def test_wrong_options(name: str, kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_spec.SpecConfig(name, kwargs)


def test_the_next_call_goes_on(fresh: Callable[..., PreTrainedModel]) -> None:
    """From the hits of those before; another adapter has its own."""

    def learned() -> list[HitRates]:
        return [
            one for one in memory.memory(model)["learned"].values() if isinstance(one, HitRates)
        ]

    model, inputs = adapted(fresh(), "medusa"), {"input_ids": prompt()}
    generate(model, "medusa", inputs)
    (first,) = learned()
    counts = first.counts.copy()
    generate(model, "medusa", ragged())
    assert learned() == [first] and first.counts[0] > counts[0]
    model.add_adapter(hf_spec.MedusaConfig(), "other")
    model.set_adapter("other")
    generate(model, "medusa", inputs)
    assert len(learned()) == 2


def test_measurements_of_tune(fresh: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """Accuracies and step times from the adapter's folder are where a call starts."""
    adapted(fresh(), "bita").save_pretrained(tmp_path / "a")
    model = fresh()
    here = Device.of(model)
    model.load_adapter(tmp_path / "a")
    adapter = require_active(model, "BITA", "bita")

    def read(data: Any, batch_size: int = 1) -> Any:
        (tmp_path / "a" / "tree.json").write_text(json.dumps(data))
        return tuned_trees.measurements(adapter, here, batch_size, 10)

    assert tuned_trees.measurements(adapter, here, 1, 10) is None
    states = [{"paths": [], "probes": [1]}, {"paths": [[0]], "probes": [1, 1]}]
    setting = {"batch_size": 1, "context": 10, "states": states, "seconds": {"2": 0.5, "8": 0.8}}
    entry = {"device": here.name, "kind": here.kind, "dtype": here.dtype,
             "threads": here.threads, "settings": [setting]}  # fmt: skip
    data: Any = {"version": VERSION, "devices": [entry]}
    assert read(data) is None  # of a release that did not write what it measured
    entry["accuracies"] = [[0.5, 0.25], [0.25, 0.125]]
    found = read(data)
    assert found.accuracies == ((0.5, 0.25), (0.25, 0.125))
    assert found.seconds == {2: 0.5, 8: 0.8}
    assert read(data, 2).seconds == {}  # of another batch size
    entry["kind"] = "tpu"
    assert read(data).seconds == {} and read(data).accuracies == found.accuracies
    entry["kind"] = here.kind
    read(data)
    expected = model.generate(prompt(), max_new_tokens=NEW, do_sample=False)
    out = generate(model, "bita", {"input_ids": prompt()})
    assert out.sequences.tolist() == expected.tolist()
    (hits,) = [one for one in memory.memory(model)["learned"].values() if isinstance(one, HitRates)]
    assert hits.counts[0] > MEASURED
