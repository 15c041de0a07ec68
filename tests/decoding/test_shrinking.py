"""A batch shrinks as its rows finish, and nobody can tell from what comes out."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from conftest import PAD, VOCAB, Tiny, ragged, shared
from covering import covering
from peft import LoraConfig, get_peft_model
from processors import Shown
from running import drafting, family
from scipy import stats
from test_method_contract import CASES, FIRST, adapted, strategy
from transformers import (
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hf_spec
from hf_spec.decoding import loop
from hf_spec.draft.policy import Plan, StepPolicy
from hf_spec.methods.registry import methods
from hf_spec.target.target import Target
from hf_spec.threads import forget

LENGTHS = (12, 5, 9, 11, 3, 7, 12, 8, 4, 10, 6, 12, 5, 9, 11, 2)
NEW = 16
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
LOOKUP = drafting("prompt_lookup")

#: Rows of token_recycling share a table: what is entered last depends on their order.
KEEP_STEPS = [case for case in FIRST if case[0] != "token_recycling"]


@pytest.fixture(autouse=True)
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards have the batch's rows, which are counted."""
    monkeypatch.setattr(Target, "unpads", False)


class StopRowAt(StoppingCriteria):
    """Stops a row at a length that its prompt decides; knows EOS, so that rows are padded."""

    eos_token_id = torch.tensor([-1])

    def __init__(self, width: int, lengths: dict[tuple[int, ...], int]):
        self.width, self.lengths = width, lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ends = [self.lengths[tuple(row[: self.width].tolist())] for row in input_ids]
        return torch.tensor(ends) <= input_ids.shape[1] - self.width


def stops(ids: torch.Tensor, *ends: int) -> StoppingCriteriaList:
    """Ends the rows of a prompt after so many tokens."""
    rows = [tuple(row) for row in ids.tolist()]
    return StoppingCriteriaList([StopRowAt(ids.shape[1], dict(zip(rows, ends)))])


def staggered(rows: int, longest: int = NEW) -> dict[str, Any]:
    """A ragged batch whose row i stops after its own number of tokens, the last one in the middle
    of the batch."""
    given = ragged(LENGTHS[:rows])
    ends = [1 + (7 * row + 1) % (longest - 4) for row in range(rows)]
    ends[rows // 2] = longest
    return {**given, "stopping_criteria": stops(given["input_ids"], *ends)}


@contextmanager
def forwards(model: PreTrainedModel) -> Iterator[list[int]]:
    """Batch size of each of the model's forwards."""
    sizes: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        inputs = kwargs.get("input_ids")
        sizes.append(len(kwargs["inputs_embeds"] if inputs is None else inputs))

    with model.register_forward_pre_hook(note, with_kwargs=True):
        yield sizes


def check_same(
    model: PreTrainedModel, spec: dict[str, Any], plain: Any = None, **kwargs: Any
) -> list[int]:
    """Batch sizes of our forwards, after comparing with plain generation, or with these rows."""
    plain = plain or model.generate(**GREEDY, **kwargs).tolist()
    with forwards(model) as sizes:
        ours = model.generate(**GREEDY, **kwargs, **spec)
    assert ours.tolist() == plain
    return sizes


@cache
def plain_staggered(architecture: str, rows: int) -> list[list[int]]:
    return shared(architecture).generate(**GREEDY, **staggered(rows)).tolist()


def retrieving(name: str, variant: str) -> dict[str, Any]:
    """The strategy with look-ups beside its own drafts, if it takes any."""
    spec = strategy(name, variant)
    if "lookup" in methods()[name].declares.unused:
        return spec
    return {**spec, "assistant_kwargs": {**spec["assistant_kwargs"], "lookup": True}}


# -- outputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "variant", "rows"),
    covering(
        [(*case, rows) for case in CASES for rows in (2, 5, 16)],
        lambda name, variant, rows: [name, variant, rows, (family(name), rows)],
    ),
)
def test_greedy_equals_plain(fresh: Tiny, name: str, variant: str, rows: int) -> None:
    model = fresh("llama_tied")
    plain = plain_staggered("llama_tied", rows)
    with adapted(model, name, variant):
        sizes = check_same(model, strategy(name, variant), plain, **staggered(rows))
    assert sizes[0] == rows and sizes[-1] < rows
    assert sizes == sorted(sizes, reverse=True)
    if rows == 16:
        assert len(set(sizes)) > 4


@pytest.fixture
def same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many candidates and probes in every step, whatever steps take."""

    def best(self: Any, likely: Any, parents: Any, group: int) -> Plan:
        return Plan(min(8, likely.shape[1] - 1), 4 if group else 0)

    monkeypatch.setattr(StepPolicy, "_best", best)


#: Chance that a right program fails the next test; the seed is fixed.
FALSE_ALARM = 1e-6
#: Rows that are looked at; as many others leave after the first token, or stay.
LOOKED_AT = 600


def test_sampling_keeps_the_distribution(fresh: Tiny) -> None:
    """Chi-square of three sampled tokens, 64 cells: half the batch leaves after the first, or none.

    Each row has random numbers of its own, which must stay its own.
    """
    model, allowed = fresh("llama_tied"), [5, 17, 23, 42]
    looked_at = allowed + allowed[::2] + allowed[::-1]
    leaving = allowed[::-1] + allowed[::2] + allowed
    ids = torch.tensor([leaving, looked_at] * LOOKED_AT)
    settings = {
        "do_sample": True, "temperature": 1.7, "top_k": 0, "max_new_tokens": 3,
        "suppress_tokens": [token for token in range(VOCAB) if token not in allowed],
    }  # fmt: skip
    counts = torch.zeros(2, 64)
    torch.manual_seed(0)
    for leave in (0, 1):
        criteria = stops(torch.tensor([leaving, looked_at]), 1 if leave else 3, 3)
        with forwards(model) as sizes:
            out = model.generate(ids, **settings, **LOOKUP, stopping_criteria=criteria)
        assert (sizes[1] == LOOKED_AT) == bool(leave)
        for row in out[1::2, ids.shape[1] :].tolist():
            first, second, third = map(allowed.index, row)
            counts[leave, 16 * first + 4 * second + third] += 1
    counts = counts[:, counts.sum(0) > 0]
    assert stats.chi2_contingency(counts.numpy()).pvalue > FALSE_ALARM


# -- who counts on the batch's size --------------------------------------------------------------


def test_inputs_of_the_model_follow_their_rows(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor per row, as a model's own inputs may be, and something that is shared."""
    model, seen = fresh("llama_tied"), []

    def take(module: Any, args: Any, kwargs: Any) -> Any:
        tags, flag = kwargs.pop("tags"), kwargs.pop("flag")
        assert flag and len(tags) == len(kwargs["input_ids"])
        seen.append(tags.tolist())
        return args, kwargs

    given = staggered(5)
    plain = model.generate(**given, **GREEDY)
    monkeypatch.setattr(type(model), "_validate_model_kwargs", lambda *_: None)
    model.register_forward_pre_hook(take, with_kwargs=True)
    out = model.generate(**given, **GREEDY, **LOOKUP, tags=torch.arange(5) * 10, flag=True)
    assert out.tolist() == plain.tolist()
    assert seen[0] == [0, 10, 20, 30, 40] and seen[-1] == [20]  # row 2 is the last
    # What is of another kind may know the rows, too.
    with forwards(model) as sizes:
        out = model.generate(
            **given, **GREEDY, **LOOKUP, tags=torch.arange(5) * 10, flag=["a", "b", "c", "d", "e"]
        )
    assert out.tolist() == plain.tolist() and set(sizes) == {5}


def test_adapters_per_row_keep_the_batch_whole(fresh: Tiny) -> None:
    """PEFT's ``adapter_names`` are hooks that know the batch; they would meet another one."""
    base = fresh("llama_tied")
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]), "one")
    model.add_adapter("two", LoraConfig(r=2, target_modules=["q_proj"]))
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    model.eval()
    names = ["one", "two", "__base__", "one", "two"]
    given = staggered(5)
    plain = model.generate(**given, **GREEDY, adapter_names=names)
    with forwards(base) as sizes:
        ours = model.generate(**given, **GREEDY, **LOOKUP, adapter_names=names)
    assert ours.tolist() == plain.tolist()
    assert set(sizes) == {5}
    assert check_same(base, LOOKUP, **given)[-1] == 1  # without them it shrinks


def test_rows_that_run_on_stay(fresh: Tiny) -> None:
    """Without EOS plain generation lets stopped rows run on until the last one stops."""
    given = staggered(5, longest=NEW - 4)
    padded = check_same(fresh("llama_tied"), LOOKUP, **given)
    for criterion in given["stopping_criteria"]:
        criterion.__class__ = type("NoEos", (StoppingCriteria,), {"__call__": StopRowAt.__call__})
    running = check_same(fresh("llama_tied"), LOOKUP, **given)
    assert running.count(5) > padded.count(5)


# -- drafters, statistics, the policy ----------------------------------------------------------


@pytest.mark.usefixtures("same_steps")
@pytest.mark.parametrize(("name", "variant"), KEEP_STEPS, ids=[name for name, _ in KEEP_STEPS])
def test_steps_are_those_of_a_batch_that_stays(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, name: str, variant: str
) -> None:
    """Same drafts, same calls of processors: what is kept per row has followed its row."""
    model, spec, found = fresh("llama_tied"), retrieving(name, variant), []
    for share in (1 / 8, 2.0):
        monkeypatch.setattr(loop, "SHARE", share)
        forget(model)  # how far predictions can be trusted
        shown = Shown()
        with adapted(model, name, variant), forwards(model) as sizes:
            out = model.generate(**staggered(8), **spec, **GREEDY, logits_processor=[shown])
        assert (sizes[-1] == 8) == (share == 2.0)
        counted = hf_spec.last_stats(model).to_dict()
        del counted["details"]["policy"]  # seconds
        counted = {key: value for key, value in counted.items() if not key.endswith("seconds")}
        new = int((out[:, max(LENGTHS) :] != PAD).sum())
        assert counted["num_generated_tokens"] == new
        assert counted["num_row_steps"] < 8 * counted["num_steps"]
        found.append((counted, shown.ids))
    assert found[0] == found[1]
