"""Option ``lookup_history``: lookups in the answers of earlier calls."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from adapter_oracle import lent
from conftest import check_same, prompt, ragged
from running import drafting

import hf_spec
from hf_spec.draft.lookup import BatchLookup, History, Limits, SequenceLookup
from hf_spec.draft.options import DraftOptions
from hf_spec.methods.registry import methods
from hf_spec.modeling_patches.weights import vocabulary

LONG = {"max_new_tokens": 40, "do_sample": False}


def found(history: History, tokens: list[int], **limits: int) -> list[list[int]]:
    """What follows each match, up to the end of its answer."""
    return [
        list(match.source[match.end : match.source.index(-1, match.end)])
        for match in history.matches(tokens, Limits(**limits))
        if match.source is not None
    ]


def test_the_longest_and_latest_come_first() -> None:
    history = History(100)
    history.add([[1, 2, 3, 4], [9, 3, 5], [2, 3, 6]])
    assert found(history, [7, 2, 3]) == [[6], [4], [5]]
    assert found(history, [7, 2, 3], max_matches=1) == [[6]]
    assert found(history, [7, 2, 3], min_ngram=2) == [[6], [4]]
    assert found(history, [7, 2, 3], max_ngram=1) == [[6], [5], [4]]
    assert found(history, [2, 3, 6]) == [[]] and found(history, [8]) == []


def test_a_draft_ends_with_the_answer_that_it_continues() -> None:
    history = History(100)
    history.add([[1, 2, 3], [4, 5]])
    lookup = SequenceLookup(Limits(), others=[history])
    assert lookup.lookup([8, 1], 9).tokens == [1, 2, 3]
    assert lookup.lookup([8, 3], 9).tokens == [3]


@pytest.mark.parametrize("unknown", [9, 10**6, -100])
def test_a_draft_ends_before_a_token_that_the_model_does_not_have(unknown: int) -> None:
    """Of an answer of another vocabulary, another row, or a prompt's image."""
    history, ids = History(100), [1, 2, unknown, 3]
    history.add([ids])
    lookup = SequenceLookup(Limits(), others=[history], vocabulary=9)
    assert lookup.lookup([8, 1], 9).tokens == [1, 2]
    assert lookup.lookup([8, 1, 2], 9).tokens == [2]
    batch = BatchLookup(Limits(), [[5], [5]], vocabulary=9)
    assert [row.tokens for row in batch.lookup([[5, *ids], [5, 1]], [True] * 2, 9)] == [
        [3], [1, 2]
    ]  # fmt: skip
    own = [*ids, 1]
    assert BatchLookup(Limits(), [own], vocabulary=9).lookup([own], [True], 9)[0].tokens == [1, 2]
    many = BatchLookup(Limits(), [own]).lookup([own], [True], 9)[0].tokens
    assert many == [1, 2] if unknown < 0 else unknown in many


@pytest.mark.parametrize("name", ["prompt_lookup", "layer_skip"])
def test_answers_of_a_larger_vocabulary(name: str, fresh: Any) -> None:
    """As before ``resize_token_embeddings``."""
    model, options = fresh("llama"), {"lookup_history": 2000}
    if name == "layer_skip":
        options |= {"lookup": True, "skip_attention": [0], "skip_mlp": [], "max_draft": 3}
    for token in range(3, 9):
        check_same(model, drafting(name, **options), torch.tensor([[5, 6, 7, token]]), **LONG)
    model.resize_token_embeddings(20, mean_resizing=False)
    for token in range(3, 19):
        check_same(model, drafting(name, **options), torch.tensor([[token, 4, 5]]), **LONG)


def test_tokens_that_a_model_has(fresh: Any) -> None:
    """Embeddings and logits may be of different numbers of tokens."""
    model = fresh("llama")
    assert vocabulary(model) == 61
    model.lm_head = torch.nn.Linear(model.lm_head.in_features, 57)
    assert vocabulary(model) == 57
    model.resize_token_embeddings(40)
    assert vocabulary(model) == 40


def test_the_sequence_itself_comes_before_answers() -> None:
    history = History(100)
    history.add([[5, 7]])
    row = SequenceLookup(Limits(max_depth=1), others=[history]).lookup([5, 6, 5], 9)
    assert row.tokens == [5, 6, 7] and row.probs[1] > row.probs[2]
    history.add([[6, 5, 8]])  # a longer match
    row = SequenceLookup(Limits(max_depth=1), others=[history]).lookup([5, 6, 9, 6, 5], 9)
    assert row.tokens[1] == 8


def test_the_oldest_answers_are_dropped() -> None:
    history, rng = History(50), random.Random(0)
    for number in range(40):
        history.add([[100 + number, *(rng.randrange(90) for _ in range(9))]])
        known, index = history._parts
        assert min(11 * (number + 1), 50) <= len(known) <= 100
        assert found(history, [100 + number])[0] == known[-10:-1]
    assert found(history, [100]) == []


def test_an_interrupt_leaves_no_half_of_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose places would lead nowhere, or in a circle."""
    history = History(100)
    history.add([[1, 2, 3]])

    class Interrupting(dict[Any, int]):
        def __setitem__(self, *_: Any) -> None:
            raise KeyboardInterrupt

    _, index = history._parts
    monkeypatch.setitem(index._last, 3, Interrupting(index._last[3]))
    with pytest.raises(KeyboardInterrupt):
        history.add([[1, 2, 3, 4]])
    history.add([[1, 2, 5]])
    assert found(history, [1, 2]) == [[5]]


@pytest.mark.parametrize("name", ["prompt_lookup", "layer_skip", "medusa"])
def test_a_repeated_answer_takes_fewer_steps(name: str, fresh: Any) -> None:
    """And the output stays that of plain generation."""
    method, model = methods()[name], fresh("llama")
    options: dict[str, Any] = {"lookup_history": 1000}
    if name != "prompt_lookup":
        options |= {"lookup": True}
    if name == "layer_skip":
        options |= {"skip_attention": [0], "skip_mlp": [], "num_draft_tokens": 3}
    steps = []
    with lent(model, method.adapter_config(), random=False) if name == "medusa" else nullcontext():
        for _ in range(2):
            check_same(model, drafting(name, **options), **ragged(), **LONG)
            steps.append(hf_spec.last_stats(model).num_steps)
    assert steps[1] < 0.7 * steps[0]


def test_calls_without_the_option_neither_add_nor_search(fresh: Any) -> None:
    model, ids = fresh("llama"), prompt()
    steps = []
    for size in (0, 0, 500, 0, 500):
        model.generate(ids, **LONG, **drafting("prompt_lookup", lookup_history=size))
        steps.append(hf_spec.last_stats(model).num_steps)
    assert len(set(steps[:4])) == 1 and steps[4] < steps[0]


def test_threads_search_while_others_add() -> None:
    history, wrong = History(200), []

    def search() -> None:
        for _ in range(300):
            wrong.extend(one for one in found(history, [1]) if one not in ([2, 3], [4, 5, 6]))

    def add() -> None:
        for _ in range(300):
            history.add([[1, 2, 3], [1, 4, 5, 6]])

    with ThreadPoolExecutor(4) as pool:
        for work in [pool.submit(work) for work in (search, add, search, add)]:
            work.result()
    assert not wrong and found(history, [1])[0] == [4, 5, 6]


def test_bad_values() -> None:
    with pytest.raises(ValueError, match=f"lookup_history={2**40}"):
        DraftOptions(lookup_history=2**40)
    with pytest.raises(ValueError, match="lookup_history=10 with lookup=False"):
        DraftOptions(lookup_history=10, lookup=False)
