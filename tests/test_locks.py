"""Processes that fork while other threads generate: children find every lock free."""

import ast
import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import forks
import pytest
from test_layers import our_modules

from hf_spec import threads
from hf_spec.decoding.sharing import Turns
from hf_spec.modeling_patches import low_rank, per_call, served_models
from hf_spec.target import graphs
from hf_spec.threads import cached_property, new_lock

LOCKS = {
    "_LOCK": threads, "RUNNING": threads, "_COMPILING": graphs, "_COPYING": low_rank,
    "_installing": per_call, "_preparing": served_models,
}  # fmt: skip
#: Forks wait until these are free, so that children find whole what they guard.
AWAITED = {"_LOCK", "_installing"}

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks"),
    pytest.mark.filterwarnings("ignore:.*fork.*"),  # Python 3.12: beside threads
]


def in_a_child(function: Callable[[], Any]) -> bool:
    """Whether a forked process calls a function to its end within seconds."""
    process = os.fork()
    if not process:
        try:
            signal.alarm(10)  # ends the process
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(process, 0)[1] == 0


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_that_another_thread_holds(name: str) -> None:
    lock, held, free = getattr(LOCKS[name], name), threading.Event(), threading.Event()
    forked: list[bool] = []

    def hold() -> None:
        with lock:
            held.set()
            free.wait()
            waited.append(not forked)

    waited: list[bool] = []
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    if name in AWAITED:
        threading.Timer(0.2, free.set).start()
    os.register_at_fork(after_in_parent=lambda: forked.append(True))
    try:
        assert in_a_child(lambda: lock.__enter__())
    finally:
        free.set()
        holder.join()
    assert waited == [name in AWAITED]
    with lock:  # nor has the fork left it locked here
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()


@pytest.mark.parametrize("awaited", [False, True])
def test_a_lock_that_the_thread_holds_which_forks(awaited: bool) -> None:
    lock = new_lock(awaited)

    def other() -> None:
        with lock:
            done.append(True)

    def leave() -> None:
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(0.1)
        assert not done, "it is the child's now"
        lock.__exit__()
        thread.join()
        assert done

    done: list[bool] = []
    with lock:
        assert in_a_child(leave)


def test_a_strategy_in_a_child() -> None:
    """While threads hold whatever is held for long."""
    done = forks.run(
        """
        import os, signal, threading
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        import hf_spec
        from hf_spec.threads import RUNNING
        from hf_spec.target.graphs import _COMPILING

        config = AutoConfig.for_model("llama", vocab_size=31, hidden_size=16, intermediate_size=16,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        model = AutoModelForCausalLM.from_config(config).eval()
        ids, history = torch.arange(3, 9)[None], hf_spec.RolloutHistory()
        options = {"drafting": "always", "history": history}
        call = dict(max_new_tokens=8, do_sample=True, pad_token_id=0,
            assistant_strategy="prompt_lookup", assistant_kwargs=options)
        torch.manual_seed(0)
        wanted = model.generate(ids, **call)

        alone = dict(max_new_tokens=8, do_sample=False, pad_token_id=0,
            assistant_strategy="prompt_lookup")
        shared = model.generate(ids, **alone)
        sharing = hf_spec.share_steps(model, max_rows=1)

        def hold():
            with RUNNING, _COMPILING, sharing.admitted(1, 9), sharing.turns.taken():
                with sharing._lock, sharing.turns._lock:
                    held.set()
                    free.wait()

        held, free = threading.Event(), threading.Event()
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        if not (child := os.fork()):
            signal.alarm(30)
            torch.manual_seed(0)
            same = torch.equal(model.generate(ids, **call), wanted)
            os._exit(not (same and torch.equal(model.generate(ids, **alone), shared)))
        print("child", os.waitpid(child, 0)[1])
        free.set()
        """
    )
    assert done.stdout == "child 0\n", done.stderr


def test_a_value_is_computed_while_another_thread_computes_one() -> None:
    """Of another instance; Python 3.11's own ``cached_property`` waits."""

    class Slow:
        def __init__(self, wait: Callable[[], Any]):
            self.wait = wait

        @cached_property
        def value(self) -> object:
            self.wait()
            return object()

    inside, end = threading.Event(), threading.Event()
    slow, fast = Slow(lambda: (inside.set(), end.wait())), Slow(lambda: None)
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    inside.wait()
    other = threading.Thread(target=lambda: fast.value, daemon=True)
    other.start()
    other.join(10)
    assert "value" in vars(fast) and fast.value is fast.value
    end.set()
    thread.join()
    assert slow.value is slow.value and isinstance(Slow.value, cached_property)


def test_there_are_no_other_locks() -> None:
    found = []
    for module, source in our_modules().items():
        for node in ast.walk(ast.parse(source)):
            text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.ImportFrom) else ""
            if re.search(r"threading.*(Lock|Condition|Semaphore)|functools.*cached_prop", text):
                found.append((module, text))
    # What calls share steps by is made anew in children.
    shared = [
        (f"hf_spec.decoding.{name}", f"threading.{kind}")
        for name in ("batches", "sharing", "sharing")
        for kind in ("Condition", "RLock")
    ]
    assert sorted(found) == sorted(shared) + [("hf_spec.threads", "threading.RLock")]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that sends signals")
@pytest.mark.parametrize("kind", ["lock", "turn"])
def test_an_interrupt_leaves_no_lock(kind: str) -> None:
    """Wherever it comes: between taking a lock and the block, too."""
    lock, turns, free = new_lock(), Turns(256), threading.Event()

    def taken() -> Any:
        return lock if kind == "lock" else turns.taken()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def other() -> None:
        with taken():
            free.set()

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + delay * 1e-6)
                for _ in range(100_000):
                    with taken():
                        pass
            except KeyboardInterrupt:
                continue
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    threading.Thread(target=other, daemon=True).start()
    assert free.wait(5)
