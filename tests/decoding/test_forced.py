"""Tokens that logits processors force are drafted, and change nothing else."""

from collections.abc import Sequence
from itertools import product, takewhile
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCAB, prompt, ragged
from running import CAPTURED, drafting
from torch import Tensor
from transformers import LogitsProcessor

import hf_spec
from hf_spec.core.shapes import Row
from hf_spec.draft import forced
from hf_spec.draft.forced import DEEPEST, LEAST, LONGEST, MOST_FORCED, completed

#: Tokens of a record after its free one.
FORCED = 3
PLAIN = {"assistant_strategy": "plain"}


class Records(LogitsProcessor):
    """Allows records of ``free`` tokens and some that follow from them, after each other.

    Must be called exactly once for each token, as a grammar's matcher.
    """

    def __init__(self, free: int = 1) -> None:
        self.free = free
        self.calls: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = len(self.calls)
        self.calls.append(input_ids.tolist())
        if place % (self.free + FORCED) >= self.free:
            for row, last in enumerate(input_ids[:, -1].tolist()):
                keep = scores[row, self.after(last)].clone()
                scores[row] = -torch.inf
                scores[row, self.after(last)] = keep
        return scores

    @staticmethod
    def after(token: int) -> int:
        return (5 * token + 3) % VOCAB


class Forces(Records):
    """Says what it forces."""

    def forced(self, row: int, tokens: list[int]) -> list[int]:
        size, found = self.free + FORCED, []
        while (len(self.calls) + len(found)) % size >= self.free:
            found.append(self.after([*tokens, *found][-1]))
        return found


class Lies(Forces):
    """Says something else."""

    def forced(self, row: int, tokens: list[int]) -> list[int]:
        return [token + row for token in super().forced(row, tokens)] + [VOCAB, -1]


class Changes(Forces):
    """Uses up the list that it gets."""

    def forced(self, row: int, tokens: list[int]) -> list[int]:
        found = super().forced(row, tokens)
        tokens.clear()
        return found


class Breaks(Forces):
    """Raises an error when it is asked a second time."""

    asked = 0

    def forced(self, row: int, tokens: list[int]) -> list[int]:
        self.asked += 1
        return super().forced(row, tokens) if self.asked == 1 else [1 // 0]


def generated(model: Any, spec: dict[str, Any], processor: Any, **settings: Any) -> list[Any]:
    torch.manual_seed(0)
    given = {"max_new_tokens": 23, "do_sample": False, **settings}
    return model.generate(**given, **spec, logits_processor=[processor]).tolist()  # type: ignore


@pytest.mark.parametrize("kind", [Forces, Lies, Changes])
@pytest.mark.parametrize("eos", [None, list(range(7, 60, 4))], ids=["no end", "ends"])
@pytest.mark.parametrize("given", [{"input_ids": prompt(15)}, ragged()], ids=["one", "three"])
@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampled"])
def test_the_output_is_that_of_plain_generation(
    tiny: Any, spec: Any, given: Any, eos: Any, samples: bool, kind: type[Records]
) -> None:
    """And the processor sees the same calls."""
    settings = {**given, "eos_token_id": eos, "do_sample": samples}
    plain, ours = Records(), kind()
    # Several rows are sampled with random numbers of their own.
    one_by_one = PLAIN if samples and len(given["input_ids"]) > 1 else {}
    expected = generated(tiny("llama"), one_by_one, plain, **settings)
    assert generated(tiny("llama"), spec, ours, **settings) == expected
    assert ours.calls == plain.calls


def test_a_processor_that_cannot_say_is_not_asked_again(
    tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, ours, settings = tiny("llama"), Breaks(), {"input_ids": prompt(15)}
    expected = generated(model, {}, Records(), **settings)
    assert generated(model, PLAIN, ours, **settings) == expected
    assert ours.asked == 2 and "Mend its forced()" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("given", [{"input_ids": prompt(15)}, ragged()], ids=["one", "three"])
def test_a_step_takes_all_that_is_forced(tiny: Any, given: Any) -> None:
    """Without a strategy's drafts: the first token of each record is the bonus of a step."""
    model, steps = tiny("llama"), {}
    for on in (True, False):
        spec = {**PLAIN, "assistant_kwargs": {"forced": on}}
        generated(model, spec, Forces(), **given, max_new_tokens=24)
        stats = hf_spec.last_stats(model)
        assert stats is not None
        steps[on] = stats.num_steps
    assert steps == {True: 1 + 24 // (1 + FORCED), False: 24}


@pytest.mark.parametrize("name", ["plain", "prompt_lookup"])
def test_compiled_steps(tiny: Any, name: str) -> None:
    """Whose shapes are those of other trees."""
    model, settings = tiny("llama"), {"input_ids": prompt(15)}
    expected = generated(model, {}, Records(), **settings)
    assert generated(model, {**drafting(name), **CAPTURED}, Forces(), **settings) == expected
    stats = hf_spec.last_stats(model)
    assert stats is not None and stats.num_steps < 15 and "compiled" in stats.details


def test_forced_tokens_join_the_drafts_of_a_strategy(tiny: Any) -> None:
    """Fewer steps with both than with either."""
    model, steps = tiny("llama"), []
    settings = {"input_ids": prompt(15), "max_new_tokens": 64}
    lookup = drafting("prompt_lookup")
    none = drafting("prompt_lookup", forced=False)
    for spec in (lookup, none, PLAIN):
        generated(model, spec, Forces(4), **settings)
        stats = hf_spec.last_stats(model)
        assert stats is not None
        steps.append(stats.num_steps)
    assert steps[0] < min(steps[1:])


class Words:
    """A matcher of sequences of words: of tokens that are texts.

    Args:
        few: most tokens that it says are allowed.
    """

    def __init__(self, texts: Sequence[str], vocabulary: Sequence[str], few: int = 8):
        self.texts, self.vocabulary, self.few = texts, vocabulary, few
        self.so_far: list[str] = []

    def goes_on(self, token: int) -> bool:
        begun = "".join(self.so_far) + self.vocabulary[token]
        return any(text.startswith(begun) for text in self.texts)

    def accept(self, token: int) -> bool:
        if not self.goes_on(token):
            return False
        self.so_far.append(self.vocabulary[token])
        return True

    def undo(self, count: int) -> None:
        assert 0 < count <= len(self.so_far)
        del self.so_far[-count:]

    def allowed(self) -> list[int]:
        found = [token for token, _ in enumerate(self.vocabulary) if self.goes_on(token)]
        if len(found) > self.few:
            return []
        return sorted(found, key=lambda token: -len(self.vocabulary[token]))


TOKENS = ["a", "b", "c", "ab", "bc", "abc", "ca", "cab"]


def paths_of(row: Row) -> dict[tuple[int, ...], float]:
    """The probability of each path of draft tokens."""
    found, paths = {}, [()]
    for parent, token, probability in zip(row.parents[1:], row.tokens[1:], row.probs[1:]):
        paths.append((*paths[parent], token))
        found[paths[-1]] = probability
    return found


def drafted(seed: int) -> Row:
    """A random draft tree, likeliest first; of its tokens some follow."""
    random, row = np.random.default_rng(seed), Row.root(TOKENS.index("a"))
    for _ in range(12 * seed):
        parent, token = int(random.integers(len(row.tokens))), int(random.integers(len(TOKENS)))
        if (parent, token) not in row.children:
            row.add(parent, token, row.probs[parent] * float(random.uniform(0.1, 0.9)))
    return row.likeliest_first()


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(
    "texts",
    [["aab"], ["aabcabca"], ["aabca", "acab"], ["aaaaaaa"], ["a"], ["b"], [f"a{x}c" for x in "ab"]],
)
def test_the_likeliest_tokenizations_are_drafted(texts: list[str], depth: int, seed: int) -> None:
    """And of other drafts those that are allowed; against all paths of tokens."""
    given, few = drafted(seed), 2
    matcher = Words(texts, TOKENS, few)
    row = completed(matcher, given, depth)
    assert matcher.so_far == []  # as it was
    if not Words(texts, TOKENS).accept(given.tokens[0]):
        assert row == given
        return
    own, expected = paths_of(given), {(): 1.0}
    for size in range(1, depth + 1):
        for path in product(range(len(TOKENS)), repeat=size):
            walker, before = Words(texts, TOKENS, few), expected.get(path[:-1], 0.0)
            if not before or not all(map(walker.accept, (given.tokens[0], *path[:-1]))):
                continue
            allowed = walker.allowed() if before >= LEAST else []
            chances = [own.get(path, 0.0)]
            if path[-1] in allowed:
                first = path[-1] == allowed[0]
                share = LONGEST if first else (1 - LONGEST) / max(len(allowed) - 1, 1)
                forced = before * (1.0 if len(allowed) == 1 else share)
                chances.append(forced if forced >= LEAST else 0.0)
            if walker.accept(path[-1]) and max(chances):
                expected[path] = max(chances)
    del expected[()]
    found, most = paths_of(row), len(own) + MOST_FORCED
    best = sorted(expected.values(), reverse=True)[:most]
    assert sorted(found.values(), reverse=True) == pytest.approx(best)
    assert found == pytest.approx({path: expected[path] for path in found})
    assert row.probs == sorted(row.probs, reverse=True)
    assert len(row.parents) == len(row.tokens) == len(row.probs)


def test_ends_are_not_drafted() -> None:
    """The tokens after them would be of no use."""
    matcher = Words(["abc"], TOKENS)
    ends = [TOKENS.index("b"), TOKENS.index("bc")]
    assert completed(matcher, Row.root(0), 5, ends) == Row.root(0)
    assert len(completed(matcher, Row.root(0), 5, ends[:1]).tokens) == 2


def test_a_matcher_that_breaks_is_left_as_it_was() -> None:
    """The processor calls it with the tokens that are emitted."""
    matcher = Words(["abcabcabc"], TOKENS)
    allowed, matcher.allowed = matcher.allowed, lambda: [1 // (len(matcher.so_far) < 3), *allowed()]
    with pytest.raises(ZeroDivisionError):
        completed(matcher, Row.root(0), 9)
    assert matcher.so_far == []


def test_matchers_go_back_a_bounded_number_of_tokens() -> None:
    row = Row([*range(-1, 2 * DEEPEST)], [0] * (2 * DEEPEST + 1), [1.0] * (2 * DEEPEST + 1))
    found = completed(Words(["a" * 99], TOKENS), row, 99)
    assert max(found.depths) == DEEPEST


class Separated(LogitsProcessor):
    """Allows two tokens that are always the same, and then two of which it says what they are."""

    stateless = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        kept = torch.full_like(scores, -torch.inf)
        kept[:, self.token(input_ids.shape[1])] = 0.0
        return kept

    @staticmethod
    def token(place: int) -> int:
        return (7, 6, 8 + place % 50, 5)[place % 4]

    def forced(self, row: int, tokens: list[int]) -> list[int]:
        places = range(len(tokens), len(tokens) + 4)
        return [self.token(place) for place in takewhile(lambda place: place % 4 > 1, places)]


@pytest.mark.parametrize("name", ["prompt_lookup", "token_recycling"])
def test_what_follows_forced_tokens_is_looked_up(
    tiny: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they are followed by is seen behind their end alone."""
    spec = drafting(name, **{} if name == "prompt_lookup" else {"lookup": True})
    model, steps = tiny("llama"), []
    settings = {"input_ids": prompt(15), "max_new_tokens": 60}
    for end in (Row.end.fget, lambda row: 0):
        monkeypatch.setattr(Row, "end", property(end))
        generated(model, spec, Separated(), **settings)
        stats = hf_spec.last_stats(model)
        assert stats is not None
        steps.append(stats.num_steps)
    assert steps[0] < steps[1]


@pytest.mark.parametrize("tokens", [[], [0], [31, 32, 95], [7, 8, 64], [*range(forced.FEW)]])
def test_the_tokens_of_a_mask(tokens: list[int]) -> None:
    mask = np.zeros(3, np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    assert forced._few(mask) == tokens
    assert forced._few(np.full_like(mask, 2**32 - 1)) == []
    assert forced._few(np.full(20, 1, np.uint32)) == []


def test_forced_refuses_other_values(tiny: Any) -> None:
    with pytest.raises(ValueError, match="forced='no'.*True, False"):
        generated(tiny("llama"), {**PLAIN, "assistant_kwargs": {"forced": "no"}}, Forces())
