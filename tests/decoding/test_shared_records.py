"""Calls that share recorded or compiled steps: batches of few sizes, whatever comes and goes.

On the CPU records are emulated, see ``replay.py``.
"""

from collections import Counter
from typing import Any

import pytest
from conftest import Tiny, prompt, ragged
from covering import covering
from recurrent_models import recurrent
from replay import RECORDED
from running import CAPTURED, drafting, family, without_pruning
from test_compiled import adapt, check, check_ways, compiled, strategy
from test_method_contract import FIRST, adapted
from test_method_contract import strategy as variant_of
from test_recurrent import STRATEGIES, with_adapter
from test_shared import (
    GREEDY,
    LOOKUP,
    alone,
    answers,
    fixed_drafts,
    of_all,
    plain,
    requests,
    together,
)
from test_sharing import at_once, outcomes

import hf_spec
from hf_spec import last_stats, share_steps
from hf_spec.threads import memory

pytestmark = pytest.mark.usefixtures("recorded")

#: What runs nothing beside the model's forward, one that does so in the record, and both in one.
FEW = ["plain", "prompt_lookup", "medusa", "token_recycling"]
#: A strategy of each kind of drafter.
SOME = covering(
    FIRST, lambda name, variant: [family(name), name in ("dflash", "layer_skip") and name]
)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_drafts(monkeypatch)


def records(model: Any) -> Counter[tuple[str, int]]:
    """How many there are of the model, by the program and the rows of its batch."""
    return Counter((key[1][0], key[4][0][0]) for key in memory(model)["graphs"].records())


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize(("name", "variant"), SOME, ids=[name for name, _ in SOME])
def test_calls_take_the_steps_that_they_take_alone(fresh: Tiny, name: str, variant: str) -> None:
    """Same tokens as plain, and as many of the drafts are accepted."""

    def counted(stats: hf_spec.SpecStats) -> list[Any]:
        return [stats.num_steps, stats.accepted_histogram]

    model, spec = fresh("llama_tied"), without_pruning(variant_of(name, variant))
    made, wanted = of_all(requests(**GREEDY), **spec, **RECORDED), []
    with adapted(model, name, variant):
        for request in made:
            model.generate(**request)
            wanted.append(counted(last_stats(model)))
        calls = together(model, made)
    assert answers(calls) == plain("llama_tied")
    if name != "token_recycling":  # drafts from what all calls have seen
        assert [counted(call.steps.state.stats) for call in calls] == wanted


# -- few records -------------------------------------------------------------------------------


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize("name", FEW)
def test_a_record_for_each_size_serves_all_batches(fresh: Tiny, name: str) -> None:
    """Sizes are powers of two, whatever arrives and leaves."""
    model, plain_calls = adapt(fresh("llama_tied"), name), requests(14, longest=8, **GREEDY)
    made = of_all(plain_calls, **strategy(name), **RECORDED)
    assert answers(together(model, made, most=7)) == list(alone(model, plain_calls))
    found = records(model)
    assert len({program for program, _ in found}) == 1
    assert len(found) > 2 and {rows for _, rows in found} <= {1, 2, 4, 8}
    # A single row may be where its prompt has run, and is never copied.
    assert all(count <= 1 + (rows == 1) for (_, rows), count in found.items())


@pytest.mark.usefixtures("plans")
def test_what_is_recorded_in_advance_serves_them(fresh: Tiny) -> None:
    model, spec = fresh("llama_tied"), {**drafting("plain"), **RECORDED}
    with share_steps(model):  # which changes nothing
        assert hf_spec.warm_up(model, batch_sizes=(1, 2, 3, 7), **spec)
    before = records(model)
    assert {rows for _, rows in before} == {1, 2, 4, 8}
    assert answers(together(model, of_all(requests(**GREEDY), **spec))) == plain("llama_tied")
    assert records(model) == before


def test_a_lone_call_runs_as_without_the_others(fresh: Tiny) -> None:
    """By the records of a batch of one row, which there are."""
    model, given = fresh("llama_tied"), {"input_ids": prompt(9), "max_new_tokens": 12, **GREEDY}
    given |= {**drafting("plain"), **RECORDED}
    wanted, found = model.generate(**given).tolist(), []
    with share_steps(model):
        for _ in range(2):
            assert model.generate(**given).tolist() == wanted
            found.append(last_stats(model).details)
    for details in found:
        assert details["shared"] == {"rows": 1.0}
        assert details["compiled"]["runs"] and not details["compiled"]["made"]
    assert set(records(model)) == {("forward", 1)}


@pytest.mark.parametrize("way", [RECORDED, CAPTURED], ids=["recorded", "compiled"])
def test_calls_of_several_threads(fresh: Tiny, sizes: list[int], way: Any) -> None:
    model = adapt(fresh("llama_tied"), "medusa")
    made = requests(**GREEDY)
    with share_steps(model) as sharing:
        with at_once(sharing, model, of_all(made, **strategy("medusa"), **way)) as calls:
            assert outcomes(calls) == plain("llama_tied")
        assert max(sizes) == 8  # for 7 rows
        stats = last_stats(model)
    assert stats.details["shared"]["rows"] > 1 and stats.details["compiled"]["runs"]


def test_other_ways_of_running_share_with_their_own(fresh: Tiny, sizes: list[int]) -> None:
    model, made = fresh("llama_tied"), requests(3, **GREEDY)[:2]
    both = [{**one, **LOOKUP, **way} for way in (RECORDED, CAPTURED, {}) for one in made]
    with share_steps(model) as sharing, at_once(sharing, model, both) as calls:
        assert outcomes(calls) == plain("llama_tied")[:2] * 3
    assert max(sizes) == 2


# -- what a batch's rows have of their own -----------------------------------------------------


def test_recurrent_states_and_windows(shallow: Tiny) -> None:
    for model in (recurrent("falcon_h1"), shallow("gemma3", layers=2)):
        model = with_adapter(model, "medusa", STRATEGIES["medusa"][0])
        made = requests(longest=8, **GREEDY)
        spec = drafting("medusa", num_draft_tokens=3)
        wanted = list(alone(model, made))
        assert answers(together(model, of_all(made, **spec, **RECORDED))) == wanted
        assert {rows for _, rows in records(model)} <= {1, 2, 4, 8}


def sampled(count: int = 5, **more: Any) -> list[dict[str, Any]]:
    """Calls of several rows, which have numbers of their own."""
    return [
        {**ragged((5, 9, 3)[: 2 + number % 2], seed=number), "max_new_tokens": 4 + number,
         "do_sample": True, "top_k": 20, **more}
        for number in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "temperatures"), [*((name, [0.8]) for name in FEW), ("medusa", [0.8, 2.0])], ids=str
)
def test_seeded_sampling(fresh: Tiny, name: str, temperatures: list[float]) -> None:
    """In the record where all calls sample alike, else by the host; whatever fills up a batch
    draws nothing."""
    model, made = adapt(fresh("llama_tied"), name), sampled()
    for number, one in enumerate(made):
        one["temperature"] = temperatures[number % len(temperatures)]
    wanted = list(alone(model, of_all(made, **strategy(name))))
    calls = together(model, of_all(made, **strategy(name), **RECORDED), most=3)
    assert answers(calls) == wanted
    rules = {key[1][4] for key in memory(model)["graphs"].records() if key[1][0] == "forward"}
    assert any(rules) and (None in rules) == (len(temperatures) > 1)


def test_processors_of_tokens(fresh: Tiny) -> None:
    """The record is shown each row's tokens, and how many there are."""
    model, made = adapt(fresh("llama_tied"), "medusa"), requests(**GREEDY)
    for number, penalty in enumerate([1.7] * 6 + [1.2]):
        made[number % 6] |= {"repetition_penalty": penalty, "min_new_tokens": 2}
    for some in (made[1:], made):  # all alike; with one that is not
        wanted = list(alone(model, some))
        spec = strategy("medusa")
        assert answers(together(model, of_all(some, **spec, **RECORDED))) == wanted


# -- batches of one call -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"), [*((name, {}) for name in FEW), ("medusa", {"do_sample": True})], ids=str
)
def test_a_batch_runs_by_the_record_of_a_power_of_two(
    fresh: Tiny, name: str, settings: dict[str, Any]
) -> None:
    model, made = adapt(fresh("llama_tied"), name), []
    for lengths in ((9, 4, 6, 12, 3), (5, 9, 3, 7, 4, 8, 6), (9, 4, 6, 12, 3, 5, 5, 8)):
        ways = [RECORDED] * (1 if made else 2)
        output = check_ways(model, ragged(lengths), *ways, **strategy(name), **settings)
        made.append(compiled(output)["made"])
        assert "shared" not in output.spec_stats.details
    assert {rows for _, rows in records(model)} <= {1, 2, 4, 8}
    assert made[1:] == [0, 0]


def test_a_filled_up_batch_returns_its_own_cache(fresh: Tiny) -> None:
    model = fresh("llama_tied")
    output = check(model, LOOKUP, RECORDED, **ragged((9, 4, 6)), max_new_tokens=6)
    assert output.past_key_values.batch_size == 3
