"""Calls of several threads that share their steps: the switch, its limits, and errors."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from weakref import ref

import multimodal
import pytest
import torch
from conftest import CLOSE, Tiny, prompt, ragged, shared
from peft import LoraConfig, get_peft_model
from processors import Criterion, Fails, Failure, Matcher, Processor
from recurrent_models import shared_recurrent
from running import drafting
from test_method_contract import FIRST, adapted, strategy
from test_shared import GREEDY, LOOKUP, SKIPPING, of_all, requests
from transformers import LogitsProcessor

import hf_spec
from hf_spec import RolloutHistory, StepSharing, last_stats, share_steps, threads
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.decoding.loop import on_end
from hf_spec.decoding.prefill import Prompt
from hf_spec.decoding.shared import SharedSteps
from hf_spec.decoding.sharing import Turns
from hf_spec.draft.drafter import Drafter
from hf_spec.methods.prompt_lookup import PromptLookupDrafter
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.threads import memory

#: Seconds after which a test fails that should not wait.
PATIENCE = 60.0


@pytest.fixture
def model() -> Any:
    return shared("llama_tied")


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def at_rest(sharing: StepSharing) -> None:
    """Wait until the steps of earlier calls have ended."""
    wait_until(lambda: not (sharing._batches or sharing.turns._waiting))


@contextmanager
def at_once(
    sharing: StepSharing, model: Any, requests: Sequence[dict[str, Any]]
) -> Iterator[list[Future[Any]]]:
    """Calls of a thread each, none of which takes a step before the prompts of all have run."""
    at_rest(sharing)
    with ThreadPoolExecutor(len(requests)) as pool:
        with sharing.turns.taken():
            calls = []
            for number, request in enumerate(requests, 1):  # in this order
                calls.append(pool.submit(lambda own=request: model.generate(**own)))
                wait_until(lambda number=number: len(sharing.turns._waiting) > number)
        yield calls


def outcomes(calls: Sequence[Future[Any]]) -> list[Any]:
    """Their tokens; or the classes of their errors."""
    return [
        type(call.exception()) if call.exception(PATIENCE) else call.result().tolist()
        for call in calls
    ]


def plain(model: Any, requests: Sequence[dict[str, Any]]) -> list[Any]:
    return [model.generate(**one).tolist() for one in requests]


# -- sharing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [LOOKUP, SKIPPING], ids=["prompt_lookup", "layer_skip"])
def test_calls_share_their_steps(
    sharing: StepSharing, sizes: list[int], model: Any, spec: dict[str, Any]
) -> None:
    made = requests(**GREEDY)
    wanted = plain(model, made)
    with at_once(sharing, model, of_all(made, **spec)) as calls:
        assert outcomes(calls) == wanted
    assert max(sizes) == len(made) + 1  # one of them has two rows
    stats = last_stats(model)
    assert stats.details["shared"]["rows"] > 1 and stats.num_row_steps
    assert stats.total_seconds > stats.forward_seconds > 0


class Computes(LogitsProcessor):
    """Takes a product that is divided among cores."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        torch.ones(512, 512) @ torch.ones(512, 512)
        return scores


@pytest.mark.skipif(not threads._pauses(), reason="PyTorch does not use GNU's OpenMP")
def test_threads_of_calls_keep_no_cores(sharing: StepSharing, model: Any) -> None:
    """Not beyond their prompts: of those that wait for other threads' steps, or for new calls."""
    made = [
        {**one, "logits_processor": [Computes()]} for one in of_all(requests(**GREEDY), **LOOKUP)
    ]
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads.end_team()
        before = len(os.listdir("/proc/self/task"))
        with ThreadPoolExecutor(len(made)) as pool:
            list(pool.map(lambda own: model.generate(**own), made))
            at_rest(sharing)
            # Without, each of them has a team. One of the six was seen to have one all the same.
            wait_until(lambda: len(os.listdir("/proc/self/task")) <= before + len(made) + 1)
    finally:
        torch.set_num_threads(count)


def test_calls_of_other_kinds_share_with_their_own(
    sharing: StepSharing, sizes: list[int], model: Any
) -> None:
    """Other strategies and options, autocast and inference mode."""
    made = requests(**GREEDY)[:2]
    kinds = [LOOKUP, SKIPPING, drafting("prompt_lookup", max_matches=2)]
    both = [{**one, **spec} for spec in kinds for one in made]
    with at_once(sharing, model, both) as calls:
        assert outcomes(calls) == plain(model, made) * 3
    assert max(sizes) == 2
    sizes.clear()
    settings = [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad]

    class Within:
        """A model whose calls are within a block, in turns of three."""

        def generate(self, within: Any, **given: Any) -> torch.Tensor:
            with within():
                return model.generate(**given)

    inside = [{**one, **LOOKUP, "within": one_of} for one_of in settings for one in made]
    with at_once(sharing, Within(), inside) as calls:
        found = outcomes(calls)
    assert found == [Within().generate(**one).tolist() for one in inside]
    assert max(sizes) == 2 and found[:2] == found[4:] == plain(model, made)


def test_a_lone_call_draws_what_plain_generation_draws(sharing: StepSharing, model: Any) -> None:
    given = {"input_ids": prompt(9), "max_new_tokens": 12, "do_sample": True, "temperature": 1.5}
    found = []
    for spec in ({}, LOOKUP):
        torch.manual_seed(3)
        found.append((model.generate(**given, **spec).tolist(), torch.rand(1).item()))
    assert found[0] == found[1]
    assert last_stats(model).details["shared"] == {"rows": 1.0}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "typical": (drafting("prompt_lookup", acceptance="typical"), "typical"),
    "history": (drafting("prompt_lookup", history=RolloutHistory()), "history"),
    "rejection": (
        {**drafting("layer_skip", skip_attention=[1], acceptance="rejection"), "do_sample": True},
        "draft tokens are sampled",
    ),
    "grammars": (
        {"input_ids": prompt(5, 2), "logits_processor": [Matcher()]}, "Matcher is of several rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_share_runs_as_before(
    sharing: StepSharing, sizes: list[int], model: Any, case: str
) -> None:
    more, why = REFUSED[case]
    given = {"input_ids": prompt(9), "max_new_tokens": 6, **GREEDY, **LOOKUP, **more}
    model.generate(**given)
    found = last_stats(model).details["shared"]
    assert re.search(why, found["alone"]) and not sizes


def test_a_drafter_of_a_users_own(
    sharing: StepSharing, sizes: list[int], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose sequences leave by its code, and cannot join."""
    given = {"input_ids": prompt(9), "max_new_tokens": 6, **GREEDY, **LOOKUP}
    monkeypatch.setattr(PromptLookupDrafter, "select", Drafter.select, raising=False)
    model.generate(**given)
    why = "PromptLookupDrafter defines select(), not join()"
    assert last_stats(model).details["shared"] == {"alone": why} and not sizes
    monkeypatch.setattr(PromptLookupDrafter, "join", Drafter.join, raising=False)
    model.generate(**given)
    assert last_stats(model).details["shared"] == {"rows": 1.0}


@pytest.mark.parametrize("architecture", ["llama_tied", "gemma3"])
def test_outputs_of_their_own(sizes: list[int], architecture: str) -> None:
    """Scores, logits, statistics, and caches, also of rows that ended before others; a cache of the
    caller's is gone on with alone."""
    model = shared(architecture)
    returned = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    made = of_all(requests(longest=20, **GREEDY), **returned)
    for number in (2, 3):
        made[number] |= {"eos_token_id": 9, "repetition_penalty": 1.5}
    wanted = [model.generate(**one) for one in made]
    with share_steps(model) as sharing:
        with at_once(sharing, model, of_all(made, **LOOKUP)) as calls:
            found = [call.result(PATIENCE) for call in calls]
        assert max(sizes) == len(made) + 1
        for ours, theirs, one in zip(found, wanted, made):
            assert ours.sequences.tolist() == theirs.sequences.tolist()
            assert bool(ours.logits[0].any(-1).all())
            for name in ("logits", "scores"):
                for own, other in zip(ours[name], theirs[name], strict=True):
                    real = torch.isfinite(other) & (own != 0)  # what has ended has none
                    torch.testing.assert_close(own[real], other[real], **CLOSE)
            stats = ours.spec_stats
            assert stats.num_generated_tokens == sum(stats.accepted_histogram.elements())
            assert stats.details["shared"]["rows"] > 1
            ids = torch.cat([ours.sequences, prompt(3, len(ours.sequences))], 1)
            mask = torch.ones_like(ids)
            mask[:, : one["input_ids"].shape[1]] = one.get("attention_mask", torch.tensor(1))
            again = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, **GREEDY}
            later = model.generate(**again, **LOOKUP, **{CACHE: ours[CACHE]})
            assert last_stats(model).details["shared"] == {"alone": "its cache is the caller's"}
            assert later.tolist() == model.generate(**again).tolist()


# -- prompts in parts ------------------------------------------------------------------------------


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The threads of prompts, once for each part, and None for each step."""
    found: list[Any] = []
    between, take = Prompt._between, SharedSteps.take

    def part(self: Prompt, *given: Any) -> None:
        between(self, *given)
        found.append(threading.get_ident())

    def step(self: SharedSteps) -> None:
        take(self)
        found.append(None)

    monkeypatch.setattr(Prompt, "_between", part)
    monkeypatch.setattr(SharedSteps, "take", step)
    return found


def long_and_short(steps: int = 60, **given: Any) -> list[dict[str, Any]]:
    """A call that takes many steps, and others that come with long prompts."""
    made = [{"input_ids": prompt(5, seed=1), "max_new_tokens": steps}]
    made += [{"input_ids": prompt(length, seed=length), "max_new_tokens": 4} for length in (17, 11)]
    made.append({**ragged((9, 7)), "max_new_tokens": 3})
    return of_all(made, **given)


@pytest.mark.parametrize(
    "kind", ["llama_tied", "gemma3", "gpt2", "qwen3_5_text", "falcon_h1", "jamba", "mamba2"]
)
def test_long_prompts_run_in_parts_between_the_steps_of_others(
    events: list[Any], kind: str
) -> None:
    """Also of models with sliding windows, tables of positions, and recurrent states; where
    Transformers loses these, the whole prompt runs at once."""
    recurrent = kind in ("qwen3_5_text", "falcon_h1", "jamba", "mamba2")
    model = shared_recurrent(kind) if recurrent else shared(kind)
    made = long_and_short(**GREEDY)
    wanted = plain(model, made)
    more = of_all(made, **LOOKUP)
    with share_steps(model, prompt_part=4) as sharing, at_once(sharing, model, more) as calls:
        assert outcomes(calls) == wanted
    parts = Counter(event for event in events if event is not None)
    whole = kind in ("jamba", "mamba2")
    assert sorted(parts.values()) == ([1] * 3 if whole else [3, 5, 5])  # 11 / 4, 17 / 4, 9 / 2
    last = max(place for place, event in enumerate(events) if event is not None)
    for before, after in pairwise(events[events.index(None) : last]):
        assert before is None or after is None  # steps between


@pytest.mark.parametrize(("name", "variant"), FIRST, ids=[name for name, _ in FIRST])
def test_every_strategy_with_prompts_in_parts(
    fresh: Tiny, events: list[Any], name: str, variant: str
) -> None:
    """Some read hidden states of all tokens, or run the prompt themselves."""
    model, made = fresh("llama_tied"), long_and_short(12, **GREEDY)
    wanted = plain(model, made)
    more = of_all(made, **strategy(name, variant))
    with (
        adapted(model, name, variant),
        share_steps(model, prompt_part=4) as sharing,
        at_once(sharing, model, more) as calls,
    ):
        assert outcomes(calls) == wanted
    assert len(events) - events.count(None) > 3 + 3


def test_a_prompt_with_an_image_runs_at_once(events: list[Any]) -> None:
    """Its tokens see each other in both directions."""
    model = multimodal.build("gemma3")
    made = [{**multimodal.prompts("gemma3", [(1, 8)]), "max_new_tokens": 12, **GREEDY}] * 2
    wanted = plain(model, made)
    more = of_all(made, **LOOKUP)
    with share_steps(model, prompt_part=4) as sharing, at_once(sharing, model, more) as calls:
        assert outcomes(calls) == wanted
    assert len(events) - events.count(None) == 1


def test_samples_of_prompts_in_parts(events: list[Any], model: Any) -> None:
    """Of rows whose seeds are drawn as their prompts begin."""
    made = [
        {**ragged((length, 7)), "max_new_tokens": 30 - length, "do_sample": True, **LOOKUP}
        for length in (4, 18, 13)
    ]
    torch.manual_seed(3)
    wanted = plain(model, made)
    torch.manual_seed(3)
    with share_steps(model, prompt_part=4) as sharing, at_once(sharing, model, made) as calls:
        assert outcomes(calls) == wanted
    assert events.count(None) < len(events) - 9


def test_short_prompts_run_one_after_the_other_up_to_the_size_of_a_part() -> None:
    """Then a step that waits; a prompt that passes its turn on goes to the end."""
    turns, order = Turns(5), []

    def run(name: str, tokens: int, parts: int = 1) -> None:
        with turns.taken(step=not tokens) as turn:
            turn.tokens = tokens
            for part in range(parts):
                if part:
                    turns.pass_on()
                order.append(name)

    waiting = [("a", 3, 1), ("b", 3, 2), ("step", 0, 1), ("c", 6, 1), ("step", 0, 1), ("d", 2, 1)]
    with ThreadPoolExecutor(len(waiting)) as pool, turns.taken():
        for number, one in enumerate(waiting, 1):
            pool.submit(run, *one)
            wait_until(lambda number=number: len(turns._waiting) > number)
    assert order == ["a", "b", "step", "c", "step", "d", "b"]


def test_a_prompt_that_is_interrupted_between_parts_leaves(
    events: list[Any], sharing: StepSharing, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing.max_prefix_tokens = 0  # they begin alike
    made = long_and_short(**GREEDY, **LOOKUP)
    wanted = plain(model, made)
    wanted[1] = wanted[3] = Failure
    pass_on, sharing.prompt_part = Turns.pass_on, 4

    def fails(self: Turns) -> None:
        pass_on(self)
        if events.count(threading.get_ident()) == 3:
            raise Failure

    monkeypatch.setattr(Turns, "pass_on", fails)
    with at_once(sharing, model, made) as calls:
        assert outcomes(calls) == wanted


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"max_rows": 2}, {"max_cached_tokens": 40}], ids=str)
def test_calls_wait_for_room_in_the_order_in_which_they_come(
    model: Any, sizes: list[int], limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [
        {"input_ids": prompt(12, seed=seed), "max_new_tokens": 8, **GREEDY, **LOOKUP}
        for seed in range(6)
    ]
    made[3]["max_new_tokens"] = 40  # more than there ever is room for, which runs alone
    began: list[int] = []
    with share_steps(model, **limits) as sharing, ThreadPoolExecutor(len(made)) as pool:
        calls = []

        class Begins(Fails):
            """Notes when the first token of a call comes, and how many rows run then."""

            def put(self, value: Any) -> None:
                if self.calls == 1:
                    began.append(self.number)
                    assert sharing.rows <= 2
                self.calls += 1

            def end(self) -> None: ...

        with sharing.turns.taken():
            for number, one in enumerate(made):
                streamer = Begins(None)
                streamer.number = number
                before = len(sharing.turns._waiting) + len(sharing._waiting)
                calls.append(pool.submit(lambda own=one, to=streamer: model.generate(
                    **own, streamer=to
                )))  # fmt: skip
                wait_until(
                    lambda: len(sharing.turns._waiting) + len(sharing._waiting) > before  # noqa: B023
                )
            assert sharing.rows == 2
        found = outcomes(calls)
    assert found == plain(model, [{**one, "assistant_strategy": None} for one in made])
    assert max(sizes) == 2 and began == list(range(6))


# -- errors ----------------------------------------------------------------------------------------


def failing(kind: str) -> dict[str, Any]:
    if kind == "streamer":
        return {"streamer": Fails(4)}
    if kind == "criterion":
        return {"stopping_criteria": [Criterion(3)]}
    return {"logits_processor": [Processor(3)]}


@pytest.mark.parametrize("kind", ["streamer", "criterion", "processor"])
def test_an_error_is_of_its_call_alone(
    sharing: StepSharing, sizes: list[int], model: Any, kind: str
) -> None:
    made = of_all(requests(longest=16, **GREEDY), max_new_tokens=12)
    wanted = plain(model, made)
    for number in (1, 4):
        made[number], wanted[number] = {**made[number], **failing(kind)}, Failure
    with at_once(sharing, model, of_all(made, **LOOKUP)) as calls:
        assert outcomes(calls) == wanted
    assert max(sizes) == len(made) + 1


def test_a_streamer_that_calls_the_model(model: Any) -> None:
    """While its call has a turn, and all the room there is."""
    given = {"input_ids": prompt(9), "max_new_tokens": 6, **GREEDY}
    found: list[Any] = []

    class Calls(Fails):
        def put(self, value: Any) -> None:
            found.append(model.generate(**given, **LOOKUP).tolist())

        def end(self) -> None:
            self.put(None)

    with share_steps(model, max_rows=1), ThreadPoolExecutor(1) as pool:
        call = pool.submit(lambda: model.generate(**given, **LOOKUP, streamer=Calls(None)))
        wanted = call.result(PATIENCE).tolist()
    assert len(found) == 8 and all(one == wanted for one in found)


def test_an_interrupted_call_leaves(sharing: StepSharing, model: Any, interrupts: None) -> None:
    """Of the main thread, which a user interrupts while another one's call goes on."""

    class Interrupts(Fails):
        def put(self, value: Any) -> None:
            self.calls += 1
            if self.calls == 4:
                signal.raise_signal(signal.SIGINT)

        def end(self) -> None: ...

    given = {"input_ids": prompt(9), "max_new_tokens": 40, **GREEDY}
    wanted = model.generate(**given).tolist()
    at_rest(sharing)
    with ThreadPoolExecutor(1) as pool:
        with sharing.turns.taken():
            other = pool.submit(lambda: model.generate(**given, **LOOKUP, streamer=Interrupts(0)))
            wait_until(lambda: len(sharing.turns._waiting) == 2)
        with pytest.raises(KeyboardInterrupt):
            while not other.done():  # it may come between two calls
                model.generate(**{**given, "max_new_tokens": 100}, **LOOKUP)
            other.result()
        assert other.result(PATIENCE).tolist() == wanted
    assert model.generate(**given, **LOOKUP).tolist() == wanted


def test_an_error_of_the_forward_is_of_all_and_the_next_call_works(
    sharing: StepSharing, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = of_all(requests(3, **GREEDY), max_new_tokens=8)
    commit, left = TreeCache.commit, [3]

    def fails(self: Any, *args: Any, **kwargs: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise Failure
        commit(self, *args, **kwargs)

    with monkeypatch.context() as patch, at_once(sharing, model, of_all(made, **LOOKUP)) as calls:
        patch.setattr(TreeCache, "commit", fails)
        assert outcomes(calls) == [Failure] * 3
        assert outcomes([calls[0]]) == [Failure]
    assert plain(model, of_all(made, **LOOKUP)) == plain(model, made)


def test_nothing_is_kept_of_a_call_that_ended(sharing: StepSharing, model: Any) -> None:
    """While another one goes on."""
    seen: list[Any] = []

    class Quiet(Fails):
        def put(self, value: Any) -> None: ...

        def end(self) -> None: ...

    class Looks(Quiet):
        """Notes in a later step whether the streamer of the other call is there."""

        def put(self, value: Any) -> None:
            self.calls += 1
            if self.calls == 9:
                gc.collect()
                seen.append(streamers[0]())

    streamers: list[Any] = []

    class Streaming:
        def generate(self, kind: type[Fails], **given: Any) -> torch.Tensor:
            streamers.append(ref(streamer := kind(None)))
            return model.generate(**given, streamer=streamer)

    made = [
        {"input_ids": prompt(5), "max_new_tokens": 3, "kind": Quiet},
        {"input_ids": prompt(9), "max_new_tokens": 30, "kind": Looks},
    ]
    with at_once(sharing, Streaming(), of_all(made, **GREEDY, **drafting("plain"))) as calls:
        outcomes(calls)
    assert seen == [None]


# -- the switch ------------------------------------------------------------------------------------


def test_a_model_in_a_wrapper(fresh: Tiny) -> None:
    model = get_peft_model(fresh("llama"), LoraConfig(r=2, target_modules=["q_proj"])).eval()
    given = {"input_ids": prompt(9), "max_new_tokens": 6, **GREEDY}
    wanted = model.generate(**given).tolist()
    with share_steps(model):
        assert model.generate(**given, **LOOKUP).tolist() == wanted
        assert last_stats(model).details["shared"] == {"rows": 1.0}
        assert "shared by sequences: 1.0 rows in a step" in str(last_stats(model))
    assert model.generate(**given, **LOOKUP).tolist() == wanted
    assert "shared" not in last_stats(model).details


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"model": torch.nn.Linear(1, 1)}, r"got a Linear: give the model whose generate"),
        ({"max_rows": 0}, "max_rows=0: must be a whole number of at least 1"),
        ({"max_cached_tokens": 1.5}, "max_cached_tokens=1.5: must be"),
        ({"prompt_part": 0}, "prompt_part=0: must be"),
    ],
    ids=["model", "rows", "tokens", "part"],
)
def test_what_is_wrong_is_refused(model: Any, given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        hf_spec.share_steps(**{"model": model, **given})


def test_calls_share_once(sharing: StepSharing, model: Any) -> None:
    with pytest.raises(ValueError, match="already share their steps: stop"):
        share_steps(model)


def test_what_has_ended_ends_no_other(fresh: Tiny) -> None:
    model = fresh()
    with share_steps(model) as first:
        first.stop()
        second = share_steps(model)
    first.stop()
    assert StepSharing.of(model) is second
    second.stop()
    assert StepSharing.of(model) is None


def test_statistics_of_each_call_are_told_in_its_thread(model: Any, sharing: StepSharing) -> None:
    """Of those that have failed, none."""
    told: list[tuple[int, int]] = []
    on_end(model, lambda stats, _: told.append((threading.get_ident(), stats.num_generated_tokens)))
    given = {"input_ids": prompt(9), **GREEDY, **LOOKUP}
    sizes = [3, 5, 8]
    made = [{**given, "max_new_tokens": size} for size in sizes]
    made[1]["streamer"] = Fails(3)
    try:
        with at_once(sharing, model, made) as calls:
            found = outcomes(calls)
        model.generate(**made[0])
    finally:
        memory(model).pop("told of calls")
    assert found[1] is Failure
    assert sorted(told[:2], key=lambda one: one[1]) == [(told[0][0], 3), (told[1][0], 8)]
    threads = [thread for thread, _ in told]
    assert threads[2] == threading.get_ident() and len(set(threads)) == 3


def test_a_forked_process_shares_anew(sharing: StepSharing, model: Any) -> None:
    """Whoever ran in its parent goes on there, and leaves no lock."""
    sharing._process -= 1
    with sharing.turns.taken():
        found = StepSharing.of(model)
        assert found is not sharing and found.max_rows == sharing.max_rows
        given = {"input_ids": prompt(9), "max_new_tokens": 6, **GREEDY, **LOOKUP}
        thread = threading.Thread(target=lambda: model.generate(**given))
        thread.start()
        thread.join(PATIENCE)
    assert not thread.is_alive()


AT_THE_END = """
import torch, hf_spec
from concurrent.futures import ThreadPoolExecutor
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes)).eval()
def call(token):
    spec = {"assistant_strategy": "plain", "max_new_tokens": 20, "do_sample": False}
    return model.generate(torch.tensor([[3, 4, token]]), **spec)
with hf_spec.share_steps(model), ThreadPoolExecutor(3) as pool:
    list(pool.map(call, range(3)))
"""


def test_a_program_ends_right_after_its_calls() -> None:
    """A thread that is in PyTorch's code as the interpreter ends would abort the process."""
    ended = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
