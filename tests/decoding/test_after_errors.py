"""A caller's cache after a call that failed: the start of each row's conversation, and usable."""

import copy
import linecache
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from conftest import CLOSE, PAD, Tiny, check_same, plainly, prompt, ragged
from covering import EVERY_CASE, covering
from naive_cache import row_of
from processors import Criterion, Fails, Failure, Processor
from running import drafting, fingerprint
from test_method_contract import FIRST, adapted, asks_for, strategy
from test_shrinking import stops
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache

import hf_spec
from hf_spec import modeling_patches
from hf_spec.cache.attention import AttentionStates
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.modeling_patches.modules import CACHE

GREEDY = {"max_new_tokens": 14, "do_sample": False}
LOOKUP = drafting("prompt_lookup")
LENGTHS = (12, 5, 9)
#: Tokens that the rows emit.
ENDS = (14, 2, 10)
KINDS = ["dynamic, first", "dynamic", "tree", "tree, new tokens"]


class Turn:
    """A prompt of three rows that end at different times, or of the first one for a
    ``DynamicCache``; and the caller's cache before it, of one of ``KINDS``: no turn before it, or
    the prompt without the tokens in the cache."""

    def __init__(self, model: Any, kind: str, spec: dict[str, Any] = LOOKUP):
        self.model, self.spec = model, spec
        rows = 3 if kind.startswith("tree") else 1
        given = ragged(LENGTHS[:rows])
        ids, mask = given["input_ids"], given["attention_mask"]
        self.before: Any = DynamicCache(config=model.config)
        layers = self.before.layers
        self.windows = [getattr(layer, "sliding_window", None) or 10**9 for layer in layers]
        if min(self.windows) == 10**9:
            self.before = DynamicCache()  # makes its layers as the model runs
        if kind != "dynamic, first":
            own = {} if kind.startswith("tree") else {CACHE: self.before}
            out = model.generate(**given, **GREEDY, **own, **spec, return_dict_in_generate=True)
            self.before = out[CACHE]
            ids = torch.cat([out.sequences, prompt(5, rows, seed=50)], 1)
            mask = torch.cat([mask, torch.ones(rows, ids.shape[1] - mask.shape[1]).long()], 1)
        self.width, self.cached = ids.shape[1], self.before.get_seq_length()
        self.whole = {"input_ids": ids, "attention_mask": mask}
        new = ids[:, self.cached :] if "new" in kind else ids
        self.given = {**self.whole, "input_ids": new, "stopping_criteria": stops(new, *ENDS)}
        tail = torch.arange(14) < torch.tensor(ENDS[:rows])[:, None]
        self.sequences = plainly(model, **self.whole, **GREEDY)
        self.sequences[:, -14:][~tail] = PAD
        #: Real tokens of the conversation; per row these tokens, and their states in each layer.
        self.real = torch.cat([mask.bool(), tail], 1)
        self.rows = [row[real].tolist() for row, real in zip(self.sequences, self.real)]
        self.states = []
        for row in self.rows:
            states = DynamicCache()
            with torch.no_grad():
                model(torch.tensor([row]), **{CACHE: states}, use_cache=True)
            self.states.append([(one.keys[0], one.values[0]) for one in states.layers])
        #: Lengths of caches with which calls were seen to go on.
        self.used: set[int] = set()

    def check(self, cache: Any, in_prompt: bool = False) -> None:
        """The cache holds the start of each row's conversation, at least what it held before.
        While the prompt runs, Transformers' own forward fills a DynamicCache layer by layer."""
        if isinstance(cache, TreeCache):
            assert cache.block is None and cache.lengths.tolist() == cache.host_lengths
            assert all(n >= old for n, old in zip(cache.host_lengths, self.before.host_lengths))
            for row, length in enumerate(cache.host_lengths):
                assert cache.tokens is None or cache.tokens[row] == self.rows[row][:length]
        seq = cache.get_seq_length()
        assert seq >= self.cached
        for index, layer in enumerate(cache.layers):
            if in_prompt and not isinstance(cache, TreeCache):
                assert layer.get_seq_length() in (seq, self.cached)
                seq = layer.get_seq_length()
            assert layer.get_seq_length() == seq
            for row, states in enumerate(self.states):
                if isinstance(cache, TreeCache):
                    start = max(cache.host_lengths[row] - self.windows[index] + 1, 0)
                    held = [part[:, start:] for part in row_of(cache, row, index)]
                elif seq == 0:
                    continue
                else:
                    real = self.real[row, :seq]
                    seen = real[seq - layer.keys.shape[2] :]  # the window of a sliding layer
                    start = int(real.sum() - seen.sum())
                    held = layer.keys[row][:, seen], layer.values[row][:, seen]
                for ours, theirs in zip(held, states[index]):
                    theirs = theirs[:, start : start + ours.shape[1]]
                    torch.testing.assert_close(ours, theirs, **CLOSE)

    def call(self, cache: Cache, **kwargs: Any) -> Any:
        settings = {**self.given, **GREEDY, **self.spec, **kwargs}
        return self.model.generate(**settings, **{CACHE: cache})

    def check_use(self, cache: Any) -> None:
        """Calls go on from it as they do without a cache."""
        if isinstance(cache, TreeCache):
            # The same prompt again, or one that parts with it; the cache is ahead of both.
            for new in (0, 3):
                ids = self.whole["input_ids"].clone()
                ids[:, self.width - new :] += 1
                again = {**self.whole, "input_ids": ids, **GREEDY}
                check_same(self.model, {**self.spec, CACHE: copy.deepcopy(cache)}, **again)
            return
        known = max(cache.get_seq_length(), self.width)
        ids = torch.cat([self.sequences[:, :known], prompt(4, len(self.rows), seed=60)], 1)
        mask = torch.cat([self.real[:, :known], torch.ones(len(ids), 4).bool()], 1).long()
        after = {"input_ids": ids, "attention_mask": mask, **GREEDY}
        wanted = plainly(self.model, **after).tolist()
        if min(self.windows) < ids.shape[1] and bool((mask.diff(dim=1) < 0).any()):
            with pytest.raises(ValueError, match="zeros between the tokens"):
                self.model.generate(**after, **self.spec, **{CACHE: copy.deepcopy(cache)})
            return
        for spec in ({}, self.spec):
            ours = self.model.generate(**after, **spec, **{CACHE: copy.deepcopy(cache)})
            assert ours.tolist() == wanted

    def check_failure(self, at: int | None = None, **kwargs: Any) -> int:
        """What a call that fails leaves in the cache: its length. With ``at`` it is the model's
        forward of this number that does."""
        cache = copy.deepcopy(self.before)
        with pytest.raises(Failure), failing(self.model, at):
            self.call(cache, **kwargs)
        self.check(cache)
        length = int(cache.get_seq_length())
        if length not in self.used:
            self.check_use(cache)
        self.used.add(length)
        return length


# -- an interrupt anywhere -----------------------------------------------------------------------

OURS = tuple(str(Path(package.__path__[0])) for package in (hf_spec, modeling_patches))
#: How many lines are drawn, in each case from the same seed.
DRAWN = 8


def lines(run: Callable[[], Any], stop: int | None = None) -> list[tuple[str, int]]:
    """Our lines that ``run`` passes; before number ``stop`` comes an interrupt.

    A line that repeats itself counts once: since Python 3.12 a comprehension belongs to the frame
    of its function, and what a trace raises in its later turns passes by the function's handlers,
    other than what a signal raises there. The same holds for the way back to a ``with``.
    """
    passed: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        name, before = frame.f_code.co_filename, 0
        if not name.startswith(OURS):
            return None

        def inside(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            line = frame.f_lineno
            if event == "line" and line != before:
                back = line < before
                before = line
                if not (back and linecache.getline(name, line).lstrip().startswith("with ")):
                    passed.append((name, line))
                    if len(passed) - 1 == stop:
                        raise KeyboardInterrupt
            return inside

        return inside

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return passed


def once_each(passed: list[tuple[str, int]]) -> list[int]:
    """A number of each line that was passed: that of its first or of its last turn."""
    last = {line: number for number, line in enumerate(passed)}
    first = {line: number for number, line in reversed(list(enumerate(passed)))}
    return [(first, last)[odd % 2][line] for odd, line in enumerate(sorted(last))]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("prompt_lookup", "dynamic"), ("prompt_lookup", "tree"), ("layer_skip", "tree"),
        ("propd", "tree"), ("bita", "dynamic"),
    ],
)  # fmt: skip
def test_an_interrupt_at_any_line(shallow: Tiny, name: str, kind: str) -> None:
    """At some lines once, whether at their first or last turn; at all of them with
    ``--every-case``. The cache is as after any error, and nothing is left in the model."""
    model, variant = shallow("llama_tied", layers=2), dict(FIRST)[name]
    with adapted(model, name, variant):
        check_interrupts(Turn(model, kind, strategy(name, variant)))


def check_interrupts(turn: Turn) -> None:
    turn.call(copy.deepcopy(turn.before))  # what is made once is made
    cache = copy.deepcopy(turn.before)
    passed = lines(lambda: turn.call(cache))
    turn.check(cache)
    before = fingerprint(turn.model)
    numbers = once_each(passed)
    if not os.environ.get(EVERY_CASE):
        numbers = random.Random(0).sample(numbers, DRAWN)
    interrupted = 0
    for number in numbers:
        cache, in_prompt = copy.deepcopy(turn.before), False
        try:
            lines(lambda cache=cache: turn.call(cache), number)
        except KeyboardInterrupt as interrupt:
            interrupted += 1
            frames = traceback.walk_tb(interrupt.__traceback__)
            in_prompt = any(frame.f_code.co_name == "_prefill" for frame, _ in frames)
        try:
            turn.check(cache, in_prompt)
            assert fingerprint(turn.model) == before
        except Exception as error:
            error.add_note(f"after an interrupt at {passed[number]}, number {number}")
            raise
    # Some lines follow what steps take, so that a call may end before the last numbers.
    assert interrupted > len(numbers) // 2


# -- errors, and what comes after them -----------------------------------------------------------


@contextmanager
def failing(model: Any, at: int | None, layer: int = 1) -> Iterator[None]:
    """The model raises after one of its layers, in its forward number ``at``."""
    fails = Fails(at)
    handle = model.get_decoder().layers[layer].register_forward_hook(fails.put)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("architecture", "kind"),
    covering(
        product(["llama_tied", "gemma3"], KINDS),
        lambda architecture, kind: [kind, (architecture, kind.startswith("tree"))],
    ),
)
def test_after_an_error_calls_go_on(tiny: Tiny, architecture: str, kind: str) -> None:
    model = tiny(architecture)
    turn = Turn(model, kind)
    own = turn.given["stopping_criteria"]
    failures: list[dict[str, Any]] = [
        *({"logits_processor": LogitsProcessorList([Processor(at)])} for at in (1, 9)),
        *({"stopping_criteria": StoppingCriteriaList([*own, Criterion(at)])} for at in (1, 4)),
        *({"streamer": Fails(at)} for at in (1, 2, 6, None)),
    ]
    lengths = [turn.check_failure(**kwargs) for kwargs in failures]
    # In the prompt, Transformers' own forward fills a DynamicCache.
    lengths += [turn.check_failure(at) for at in (1, 2, 4)[kind.startswith("dynamic") :]]
    assert len(set(lengths)) > 3 and max(lengths) > turn.width  # work that was done is kept


@pytest.mark.parametrize(
    ("name", "variant", "kind"),
    covering(
        [(*case, kind) for case in FIRST for kind in ("dynamic", "tree")],
        lambda name, variant, kind: [name, (asks_for(name), kind)],
    ),
)
def test_after_an_error_with_every_strategy(tiny: Tiny, name: str, variant: str, kind: str) -> None:
    model = tiny("llama_tied")
    with adapted(model, name, variant):
        turn = Turn(model, kind, strategy(name, variant))
        turn.check_failure(3)
        cache = copy.deepcopy(turn.before)
        assert turn.call(cache).tolist() == turn.sequences.tolist()
        if kind == "tree":
            assert cache.host_lengths == [len(row) - 1 for row in turn.rows]
        else:
            assert cache.get_seq_length() == turn.width + 13
        turn.check(cache)


def test_after_an_error_in_chunks_of_the_prompt(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_spec.target.target.CHUNK", 2)
    for kind in KINDS[2:]:
        turn = Turn(tiny("llama_tied"), kind)
        for at in (1, 3):
            turn.check_failure(at)


def test_after_an_allocation_that_failed(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise torch.OutOfMemoryError("no more")

    for name in ("STEP", "GROWTH", "NODES"):
        monkeypatch.setattr(f"hf_spec.cache.attention.{name}", 1)
    for kind in ("dynamic, first", "dynamic"):
        turn = Turn(tiny("llama_tied"), kind)
        for name in ("_resize", "allocate"):
            cache = copy.deepcopy(turn.before)
            with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                patch.setattr(AttentionStates, name, fails)
                turn.call(cache)
            turn.check(cache)
            turn.check_use(cache)


def test_a_call_that_is_refused_changes_no_cache(tiny: Tiny) -> None:
    model, turn = tiny("llama_tied"), Turn(tiny("llama_tied"), "tree")
    cache = copy.deepcopy(turn.before)
    embeds = model.get_input_embeddings()(turn.whole["input_ids"])
    mask = {"attention_mask": turn.whole["attention_mask"]}
    for given, message in (
        ({"inputs": prompt(40)}, "3 rows, the prompt has 1"),
        ({"inputs_embeds": embeds, **mask}, "inputs_embeds with a TreeCache"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(**given, **GREEDY, **LOOKUP, **{CACHE: cache})
    assert cache.tokens == turn.before.tokens and cache.host_lengths == turn.before.host_lengths
    turn.check_use(cache)
