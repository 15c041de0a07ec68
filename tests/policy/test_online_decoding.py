"""``tree="online"`` in decoding: outputs, what is noted of predictions, memory, warm start."""

from __future__ import annotations

import gc
import itertools
import json
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
from hf_spec.drafting.predictions import Predictions
from hf_spec.drafting.transition import Transition
from hf_spec.methods.registry import methods
from hf_spec.policy import memory, online_policy, tuned_trees
from hf_spec.policy.online_policy import Predicted, ranks_of
from hf_spec.policy.online_trees import RANKS, UNKNOWN, HitRates, Shape
from hf_spec.policy.step_cost import StepCost
from hf_spec.policy.tuned_trees import VERSION, Device

NAMES = ("bita", "medusa", "ppd", "space")
NEW = 40

every_name = pytest.mark.parametrize("name", NAMES)


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


# -- outputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama_tied", "gemma3", "gpt2"])
@every_name
def test_greedy_output_does_not_change(
    fresh: Callable[..., PreTrainedModel], architecture: str, name: str
) -> None:
    """Call after call, whichever trees are chosen meanwhile."""
    model = adapted(fresh(architecture), name)
    for inputs in ({"input_ids": prompt()}, ragged((12, 3, 9, 7))):
        expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False).tolist()
        sizes = set()
        for options in ({}, {"fallback": True}, {"retrieval": True}, {"max_rows": 20}):
            out = generate(model, name, inputs, **options)
            assert out.sequences.tolist() == expected
            sizes |= {one["rows"] for one in out.spec_stats.details["online"]["history"]}
        assert out.spec_stats.details["online"]["rows"] <= 20
        assert out.spec_stats.num_drafted_tokens > 0 and sizes


@every_name
def test_sampling_at_batch_size_1_equals_plain(
    fresh: Callable[..., PreTrainedModel], name: str
) -> None:
    """Under the match rule, which takes as many random numbers whatever the trees are."""
    model = adapted(fresh("llama_tied"), name)
    settings = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.7, "top_k": 3}
    for seed in range(3):
        torch.manual_seed(seed)
        ours = model.generate(prompt(), **settings, **drafting(name, tree="online"))
        torch.manual_seed(seed)
        assert ours.tolist() == model.generate(prompt(), **settings).tolist()


@every_name
def test_rows_that_end_early(fresh: Callable[..., PreTrainedModel], name: str) -> None:
    model = adapted(fresh("llama_tied"), name)
    plain = model.generate(**ragged(), max_new_tokens=NEW, do_sample=False)
    model.generation_config.eos_token_id = int(plain[1, 12 + 8])
    expected = model.generate(**ragged(), max_new_tokens=NEW, do_sample=False)
    for _ in range(2):
        out = generate(model, name, ragged())
        assert out.sequences.tolist() == expected.tolist()


def test_few_new_tokens(fresh: Callable[..., PreTrainedModel]) -> None:
    model = adapted(fresh(), "medusa")
    for count in (1, 2, 3):
        out = model.generate(
            prompt(), max_new_tokens=count, do_sample=False, **drafting("medusa", tree="online"),
            return_dict_in_generate=True,
        )  # fmt: skip
        expected = model.generate(prompt(), max_new_tokens=count, do_sample=False)
        assert out.sequences.tolist() == expected.tolist()
        json.dumps(out.spec_stats.to_dict())


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("medusa", {"max_rows": 8}, "max_rows=8 is of tree='online'"),
        ("medusa", {"tree": "online", "max_rows": 1}, "max_rows=1: .* from 2 to 512"),
        ("bita", {"tree": "online", "top_k": 3}, "top_k=3 is of the trees"),
        ("space", {"tree": "round"}, "tree='round': choose one of adaptive, chain, online"),
        ("space", {"max_rows": 8}, "max_rows=8 is of tree='online'"),
        ("space", {"tree": "online", "acceptance": "rejection"}, "acceptance='rejection' with"),
    ],
)
def test_wrong_options(name: str, kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_spec.SpecConfig(name, kwargs)


def test_too_few_rows_for_the_adapter(fresh: Callable[..., PreTrainedModel]) -> None:
    model = adapted(fresh(), "bita")
    with pytest.raises(ValueError, match="max_rows=3: a step with one candidate has 4 rows"):
        generate(model, "bita", {"input_ids": prompt()}, max_rows=3)


def test_few_rows_leave_out_far_distances(fresh: Callable[..., PreTrainedModel]) -> None:
    """Seven rows are too few for a candidate with three probes under it, but not for fewer."""
    model = adapted(fresh(), "bita")
    out = generate(model, "bita", {"input_ids": prompt()}, max_rows=7)
    assert 0 < max(out.spec_stats.offered) <= 2
    assert torch.equal(out.sequences, model.generate(prompt(), max_new_tokens=NEW, do_sample=False))


@every_name
def test_depth_is_limited(fresh: Callable[..., PreTrainedModel], name: str) -> None:
    model = adapted(fresh(), name)
    out = generate(model, name, {"input_ids": prompt()}, max_depth=1)
    assert max(out.spec_stats.offered, default=0) <= 1
    assert len(out.spec_stats.details["online"]["hits"]) == 1


# -- what is noted -----------------------------------------------------------------------------


@pytest.mark.parametrize("with_transition", [False, True])
def test_ranks_against_one_token_at_a_time(with_transition: bool) -> None:
    """Predictions of fewer distances, finished rows, and rows that know less."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(6, (n,), generator=generator).tolist() for n in (20, 9)]
    predicted, made = [], []
    weights = {name: torch.randn(4, 5, generator=generator) for name in (BEFORE, STATE)}
    weights[AFTER] = torch.randn(5, 4, generator=generator)
    base = Embeddings(*(torch.randn(6, 5, generator=generator) for _ in range(2)))
    transition = Transition(weights, base) if with_transition else None
    for step in range(8):
        count = 3 if step % 2 else 2
        logits = torch.randn(2, count, 6, generator=generator)
        states = torch.randn(2, count, 5, generator=generator)
        rows = [tokens[0], None if step == 5 else tokens[1]]
        starts, known = [step + 1, step + 2], [count, step % 3]
        predictions = Predictions(logits, 4, known, transition, states)
        predicted.append(Predicted(predictions, rows, starts, known))
        made.append((logits, states))
    found = ranks_of(predicted, 3, 4)
    assert found.shape == (16, 3)
    for n, one in enumerate(predicted):
        for row in range(2):
            for i in range(3):
                place, came = one.starts[row] + i, one.rows[row]
                if came is None or i >= one.known[row] or place >= len(came):
                    assert found[2 * n + row, i] == UNKNOWN
                    continue
                logits, states = (part[row, i] for part in made[n])
                if transition is not None:
                    before = torch.tensor(came[place - 1 : place])
                    logits = logits + transition.logits(before, states[None])[0]
                ids = logits.argsort(descending=True)[:4].tolist()
                rank = ids.index(came[place]) if came[place] in ids else 4
                assert found[2 * n + row, i] == rank


@every_name
def test_hits_are_those_of_the_output(
    fresh: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every prediction is compared with the tokens that followed, once, in order."""
    model = adapted(fresh("llama_tied"), name)
    seen: list[Predicted] = []
    ranks: list[np.ndarray] = []
    note, observe = online_policy.Predicted, HitRates.observe

    def noted(*args: Any) -> Predicted:
        seen.append(note(*args))
        return seen[-1]

    def observed(self: HitRates, found: np.ndarray) -> None:
        ranks.append(found)
        observe(self, found)

    ticks = itertools.count()  # all steps take as long, so that trees pay
    monkeypatch.setattr(online_policy, "_times", lambda state: (0.0, float(next(ticks))))
    monkeypatch.setattr(online_policy, "Predicted", noted)
    monkeypatch.setattr(HitRates, "observe", observed)
    out = generate(model, name, ragged((12, 5)))
    found = np.concatenate(ranks)
    assert len(found) == sum(len(one.rows) for one in seen) > 20
    real = [r[m.bool()].tolist() for r, m in zip(*(ragged((12, 5))[k] for k in _INPUTS))]
    wholes = [row + emitted for row, emitted in zip(real, out.sequences[:, 12:].tolist())]
    predictions = [(one, row) for one in seen for row in range(len(one.rows))]
    for (one, row), ranks_found in zip(predictions, found):
        whole = one.rows[row]  # the batch may have shrunk
        assert whole is None or whole in wholes
        for i, rank in enumerate(ranks_found):
            if rank not in (UNKNOWN, RANKS):
                assert one.best(RANKS)[row, i, rank] == whole[one.starts[row] + i]
    assert (found != UNKNOWN).any() and (found == 0).any()


_INPUTS = ("input_ids", "attention_mask")


def test_the_device_is_read_seldom(
    fresh: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(fresh(), "medusa")
    calls: list[int] = []

    def counted(predicted: Any, *sizes: int) -> Any:
        calls.append(len(predicted))
        return ranks_of(predicted, *sizes)

    monkeypatch.setattr(online_policy, "ranks_of", counted)
    out = generate(model, "medusa", {"input_ids": prompt()})
    assert len(calls) <= out.spec_stats.num_steps / 5


# -- memory ------------------------------------------------------------------------------------


def memories(model: PreTrainedModel) -> list[online_policy.Memory]:
    return [one for one in memory._left[model].values() if isinstance(one, online_policy.Memory)]


def test_the_next_call_goes_on(fresh: Callable[..., PreTrainedModel]) -> None:
    model = adapted(fresh(), "medusa")
    inputs = {"input_ids": prompt()}
    for _ in range(3):
        generate(model, "medusa", inputs)
    (learned,) = memories(model)
    counts = learned.hits.counts.copy()
    generate(model, "medusa", inputs)
    assert (learned.hits.counts > counts).all()
    assert {key[:2] for key in learned.plans} == {(1, 4), (1, 5), (1, 6)}  # 12 to 52 tokens
    generate(model, "medusa", ragged())
    assert {1, 3} <= {key[0] for key in learned.plans} <= {1, 2, 3}  # the batch shrinks
    assert len({id(plan.hits) for plan in learned.plans.values()}) == 1
    model.add_adapter(hf_spec.MedusaConfig(), "other")
    model.set_adapter("other")
    generate(model, "medusa", inputs)
    assert len(memories(model)) == 2


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("medusa", {"tree": "online"}, {"tree": "online", "retrieval": True}),
        ("propd", {"tree": "online", "prune": False}, {"tree": "online", "prune": True}),
        ("propd", {"prune": False, "drafter": "bita", "drafter_kwargs": {"tree": "online"}},
         {"prune": True, "drafter": "bita", "drafter_kwargs": {"tree": "online"}}),
    ],
)  # fmt: skip
def test_other_options_have_a_memory_of_their_own(
    fresh: Callable[..., PreTrainedModel], name: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    """Steps that prune, or that have look-ups, take other times and emit other tokens."""
    model = adapted(fresh(), name)
    if "drafter" in one:
        model.add_adapter(hf_spec.BitaConfig(), "drafter")
        model.set_adapter(["drafter", "default"])
    for count, options in enumerate((one, other), start=1):
        for _ in range(2):
            model.generate(
                prompt(), max_new_tokens=NEW, do_sample=False, **drafting(name, **options),
            )  # fmt: skip
            assert len(memories(model)) == count


def test_memory_goes_with_the_model(fresh: Callable[..., PreTrainedModel]) -> None:
    model = adapted(fresh(), "medusa")
    gc.collect()  # other tests' models
    before = len(memory._left)
    generate(model, "medusa", {"input_ids": prompt()})
    assert len(memory._left) == before + 1
    del model
    gc.collect()
    assert len(memory._left) == before


def test_plain_steps_are_observed(
    fresh: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(fresh(), "bita")
    rows: list[int] = []
    observe = StepCost.observe
    monkeypatch.setattr(
        StepCost, "observe", lambda self, n, *rest: (rows.append(n), observe(self, n, *rest))[1]
    )
    out = generate(model, "bita", {"input_ids": prompt()}, fallback=True)
    assert out.spec_stats.num_fallback_steps > 0
    assert rows.count(1) >= out.spec_stats.num_fallback_steps
    assert len(rows) == out.spec_stats.num_steps - 1  # all but the prefill


# -- warm start --------------------------------------------------------------------------------


def tree_file(device: Device, **more: Any) -> dict[str, Any]:
    states = [{"paths": [], "probes": [1]}, {"paths": [[0]], "probes": [1, 1]}]
    setting = {"batch_size": 1, "context": 10, "states": states, **more}
    entry = {"device": device.name, "kind": device.kind, "dtype": device.dtype,
             "threads": device.threads, "settings": [setting]}  # fmt: skip
    return {"version": VERSION, "devices": [entry]}


def test_measurements_of_tune(fresh: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    model = adapted(fresh(), "bita")
    model.save_pretrained(tmp_path / "a")
    here = Device.of(model)
    model = fresh()
    model.load_adapter(tmp_path / "a")
    adapter = require_active(model, "BITA", "bita")

    def read(data: Any, batch_size: int = 1) -> Any:
        (tmp_path / "a" / "tree.json").write_text(json.dumps(data))
        return tuned_trees.measurements(adapter, here, batch_size, 10)

    assert tuned_trees.measurements(adapter, here, 1, 10) is None
    data = tree_file(here, seconds={"2": 0.5, "8": 0.8})
    assert read(data) is None  # of a release that did not write what it measured
    data["devices"][0]["accuracies"] = [[0.5, 0.25], [0.25, 0.125]]
    found = read(data)
    assert found.accuracies == ((0.5, 0.25), (0.25, 0.125))
    assert found.seconds == {2: 0.5, 8: 0.8}
    assert read(data, 2).seconds == {}  # of another batch size
    data["devices"][0]["kind"] = "tpu"
    assert read(data).seconds == {} and read(data).accuracies == found.accuracies

    data["devices"][0]["kind"] = here.kind
    read(data)
    out = generate(model, "bita", {"input_ids": prompt()})
    expected = model.generate(prompt(), max_new_tokens=NEW, do_sample=False)
    assert out.sequences.tolist() == expected.tolist()
    (learned,) = memories(model)
    assert learned.hits.counts[0] > online_policy.HitRates.measured(np.ones((1, 1)), 1).counts[0]


def test_the_first_trees_come_from_measurements(
    fresh: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sizes are tried for the first time where step times are known."""
    model = adapted(fresh(), "medusa")
    table = ((0.9, 0.05), (0.8, 0.1), (0.7, 0.1), (0.6, 0.1))
    found = tuned_trees.Measurements(table, {1: 1.0, 64: 64.0})
    monkeypatch.setattr(online_policy, "measurements", lambda *args: found)
    trees: list[Shape] = []
    plan = online_policy.TreePlan.next

    def noted(self: Any) -> Shape:
        trees.append(plan(self))
        return trees[-1]

    monkeypatch.setattr(online_policy.TreePlan, "next", noted)
    generate(model, "medusa", {"input_ids": prompt()})
    assert trees[0].tree.paths[:3] == ((0,), (0, 0), (0, 0, 0))
