"""Calls of ``generate()`` in several threads share their steps: :func:`share_steps`."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import nn
from transformers import GenerationMixin

from hf_spec.core.checks import check_count
from hf_spec.decoding.cache_reuse import Prefixes, prefixes_of
from hf_spec.decoding.prefill import Parts
from hf_spec.decoding.shared import Call, SharedSteps, kind_of
from hf_spec.decoding.step import Steps
from hf_spec.modeling_patches.forwards import rope_ends
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.modeling_patches.weights import placement
from hf_spec.threads import end_team, locked, memory

# -- Turns: prompts and steps run one after the other ----------------------------------------------

#: Seconds after which those who wait look themselves: an interrupt may have come before others were
#: told that a turn has ended.
LOST = 1.0


@dataclass(eq=False)
class Turn:
    """One that a thread waits for, or has.

    Attributes:
        step: whether a step is taken in it, and not a prompt run.
        tokens: of the prompt that run in it, or in the part of it until others have theirs.
        over: whether it has ended.
    """

    step: bool
    tokens: int = 0
    over: bool = False
    thread: int = field(default_factory=threading.get_ident)


class Turns:
    """Lets one thread at a time run, in the order in which they come. A step that waits is next
    once so many tokens of prompts have run since the last one.

    Args:
        most: that number of tokens.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        #: Taken itself, as an interrupt within a condition's ``__enter__`` would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[Turn] = deque()  # with the one that somebody has
        self._last: Turn | None = None  # that somebody has, or had
        self._tokens = 0  # of prompts since the last step

    @contextmanager
    def taken(self, step: bool = False) -> Iterator[Turn]:
        """Wait for a turn, which the block is; ``step``: see :class:`Turn`."""
        turn = Turn(step)
        try:
            with self._lock:
                self._waiting.append(turn)
                self._wait(turn)
            yield turn
        finally:
            turn.over = True  # at once, as another interrupt may follow
            with self._lock:
                self._end(turn)

    def pass_on(self) -> None:
        """In a turn: let those run who wait, then go on."""
        with self._lock:
            turn = self._held
            assert turn is not None
            self._waiting.append(turn)
            self._end(turn)
            self._wait(turn)

    def is_of(self, thread: int) -> bool:
        """Whether it is a thread's turn."""
        held = self._held
        return held is not None and held.thread == thread

    @property
    def _held(self) -> Turn | None:
        last = self._last
        return None if last is None or last.over else last

    def _wait(self, turn: Turn) -> None:
        while self._held is not None or self._next is not turn:
            self._changed.wait(LOST)
        self._last = turn

    @property
    def _next(self) -> Turn:
        waiting = [turn for turn in self._waiting if not turn.over]
        first = waiting[0]
        if self._tokens < self.most:
            return first
        return next((turn for turn in waiting if turn.step), first)

    def _end(self, turn: Turn) -> None:
        """Have others wait no longer for a turn that has ended, or has been passed on."""
        if turn in self._waiting:
            self._waiting.remove(turn)
        if self._last is turn:
            self._last = None
            self._tokens = 0 if turn.step else self._tokens + turn.tokens
        self._changed.notify_all()


# -- What a thread has set, without which its forwards would compute other numbers -----------------


class ThreadState(NamedTuple):
    """Settings of PyTorch that are a thread's own."""

    inference: bool
    autocast: tuple[str, bool, torch.dtype, bool]
    stream: Any  # of CUDA; None elsewhere

    @classmethod
    def of_this(cls, device: torch.device) -> ThreadState:
        """Those of this thread; ``device``: of the model."""
        kind, stream = device.type, None
        if kind == "cuda":
            stream = torch.cuda.current_stream(device)
        return cls(
            torch.is_inference_mode_enabled(),
            (
                kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind),
                torch.is_autocast_cache_enabled(),
            ),
            stream,
        )  # fmt: skip

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """Within the block this thread has them."""
        kind, enabled, dtype, cache = self.autocast
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.no_grad())
            if enabled:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))
            yield


# -- A batch of calls, whose steps a thread of its own takes ---------------------------------------


class _Running:
    """A call that shares its steps, and what its thread waits for."""

    def __init__(self, steps: Steps):
        self.call, self.ended = Call(steps), threading.Event()

    def wait(self) -> None:
        """See :meth:`StepSharing.joined`."""
        self.ended.wait()
        raised, self.call.error = self.call.error, None
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # whose traceback holds this frame


class _Batch:
    """Calls of one kind.

    Attributes:
        arrived: those that are to join.
        running: those that are to be told when they have ended, by their calls.
    """

    def __init__(self, state: ThreadState):
        self.state = state
        self.arrived: list[_Running] = []
        self.running: dict[Call, _Running] = {}
        self._steps: SharedSteps | None = None

    def step(self, arrived: list[_Running]) -> None:
        """Have calls join, and take a step."""
        for one in arrived:
            if self._steps is None:
                self._steps = SharedSteps(one.call)
            else:
                self._steps.admit(one.call)
        steps = self._steps
        assert steps is not None
        self._release(steps)  # calls that were interrupted
        if steps.calls:
            steps.watch.step()  # waiting is no part of a step
            steps.take()
            self._release(steps)
        if not steps.calls:
            self._steps = None

    def _release(self, steps: SharedSteps) -> None:
        for call in steps.release():
            self.running.pop(call).ended.set()

    def fail(self, error: BaseException) -> None:
        """End all calls."""
        for one in (*self.running.values(), *self.arrived):
            one.call.error = one.call.error or error
            one.ended.set()


class _Room(NamedTuple):
    """What a call takes: its thread, sequences and most tokens of each."""

    thread: int
    rows: int
    length: int


#: Threads that take steps, and whether the program ends.
_THREADS: WeakSet[threading.Thread] = WeakSet()
_ENDS = threading.Event()


@atexit.register
def _end_threads() -> None:
    """PyTorch aborts the process if a thread is within its code as the interpreter ends."""
    _ENDS.set()
    for thread in list(_THREADS):
        thread.join()


#: Of a model's :class:`StepSharing`, in what is kept for the model.
_KEY = "sharing"


class StepSharing:
    """Has calls of ``generate()`` with a model share their steps; see :func:`share_steps`.

    Attributes:
        max_rows: most sequences at once.
        max_cached_tokens: most tokens that there is room for in their caches; None: no limit.
        prompt_part: most tokens of prompts that run between two steps.
        max_prefix_tokens: most tokens whose states are kept for later prompts.
    """

    def __init__(
        self, model: nn.Module, max_rows: int, max_cached_tokens: int | None, prompt_part: int,
        max_prefix_tokens: int,
    ):  # fmt: skip
        self._model = ref(model)  # which keeps this
        self._asked = object()  # that of a forked process is for the same call of share_steps
        self.max_rows, self.max_cached_tokens = max_rows, max_cached_tokens
        self.prompt_part, self.max_prefix_tokens = prompt_part, max_prefix_tokens
        self._by_weights: dict[Any, Any] = {}
        self._prefixes: Prefixes | None = None
        self.turns, self._process = Turns(prompt_part), os.getpid()
        #: Taken itself, as an interrupt within a condition's ``__enter__`` would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[object] = deque()
        self._inside: dict[object, _Room] = {}
        self._prompted: set[int] = set()  # threads of calls whose prompt has run
        self._batches: dict[Hashable, _Batch] = {}

    @classmethod
    @locked
    def of(cls, model: nn.Module) -> StepSharing | None:
        """That of a model; None if its calls do not share their steps, or if one of them, whose
        streamer or the like calls the model, is waited for in this thread."""
        found: StepSharing | None = memory(model).get(_KEY)
        if found is not None and found._process != os.getpid():
            # The calls of the process that this one was forked from go on there.
            limits = found.max_rows, found.max_cached_tokens, found.prompt_part
            asked = found._asked
            found = memory(model)[_KEY] = cls(model, *limits, found.max_prefix_tokens)
            found._asked = asked
        return None if found is not None and found._is_within else found

    @property
    def _is_within(self) -> bool:
        me, inside = threading.get_ident(), [*self._inside.values()]
        return self.turns.is_of(me) or any(room.thread == me for room in inside)

    @property
    def rows(self) -> int:
        """Sequences of the calls that run now."""
        return sum(room.rows for room in self._inside.values())

    @property
    def cached_tokens(self) -> int:
        """Tokens that there is room for in their caches: as many for each sequence as the longest
        may have."""
        return self.rows * max((room.length for room in self._inside.values()), default=0)

    @property
    def prefix_tokens(self) -> int:
        """Tokens of ended calls whose states are kept for prompts that begin with them."""
        return 0 if self._prefixes is None else self._prefixes.num_tokens

    def stop(self) -> None:
        """Calls that begin from now on do not share their steps."""
        model = self._model()
        found = None if model is None else memory(model).get(_KEY)
        if found is not None and found._asked is self._asked:
            memory(model).pop(_KEY)

    def __enter__(self) -> StepSharing:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @contextmanager
    def admitted(self, rows: int, length: int) -> Iterator[None]:
        """Wait until there is room for a call, first come, first served; it has it in the block.

        Args:
            rows: its sequences.
            length: most tokens of each.
        """
        turn, room = object(), _Room(threading.get_ident(), rows, length)

        def fits() -> bool:
            if self._waiting[0] is not turn:
                return False
            longest = max((length, *(one.length for one in self._inside.values())))
            all_rows, most = self.rows + rows, self.max_cached_tokens
            return not self._inside or (
                all_rows <= self.max_rows and (most is None or all_rows * longest <= most)
            )

        try:
            with self._lock:
                self._waiting.append(turn)
                self._changed.wait_for(fits)
                self._waiting.popleft()
                self._inside[turn] = room
                self._changed.notify_all()
            yield
        finally:
            self._inside.pop(turn, None)  # at once, as another interrupt may follow
            with self._lock:
                self._prompted.discard(room.thread)
                if turn in self._waiting:
                    self._waiting.remove(turn)
                self._changed.notify_all()

    @contextmanager
    def prompt(self, rows: int, width: int) -> Iterator[Parts]:
        """Wait until a call's prompt, of ``(rows, width)``, may run; gives how. Where no other call
        takes steps, the whole of it runs at once."""
        with self.turns.taken() as turn:
            parts = Parts()
            if self._prompted:
                parts = Parts(max(self.prompt_part // rows, 1), self.turns.pass_on)
            turn.tokens = rows * min(parts.most or width, width)
            try:
                yield parts
            finally:
                end_team()  # from here on another thread computes
            self._prompted.add(turn.thread)

    def prefixes(self, runs: Hashable) -> Prefixes | None:
        """States that a prompt may begin with, to be asked in its turn; None if none are kept.

        Args:
            runs: how the model runs, see :class:`Fingerprint`.
        """
        model = self._model()
        if model is None or not self.max_prefix_tokens:
            return None
        # What another stream of CUDA computes may not be there yet.
        runs = runs, ThreadState.of_this(placement(model).device).stream
        self._prefixes = prefixes_of(self._by_weights, model, runs, self.max_prefix_tokens)
        return self._prefixes

    @contextmanager
    def joined(self, steps: Steps) -> Iterator[Callable[[], None]]:
        """Have a call's steps taken with those of others. Gives what waits for its end, and raises
        what its streamer, criteria, processors or forwards have raised; if the block ends before,
        as by an interrupt, the call leaves."""
        state = ThreadState.of_this(steps.state.root.device)
        own, key = _Running(steps), (kind_of(steps), state)
        try:
            with self._lock:
                if key not in self._batches:
                    batch = _Batch(state)
                    # It ends with its last call, and with the program.
                    thread = threading.Thread(
                        target=self._take_steps, args=(key, batch), daemon=True
                    )
                    _THREADS.add(thread)
                    thread.start()
                    self._batches[key] = batch
                self._batches[key].arrived.append(own)
            yield own.wait
        finally:
            if not own.ended.is_set():
                own.call.error = InterruptedError("the call has ended")

    def _take_steps(self, key: Hashable, batch: _Batch) -> None:
        """Take the steps of a batch until it is empty."""
        try:
            # It waits for its next turn as it ends one: its steps are not overtaken.
            with batch.state.taken_over(), self.turns.taken(step=True):
                while self._step(key, batch):
                    self.turns.pass_on()
        except BaseException as error:  # of a forward
            with self._lock:
                del self._batches[key]
            batch.fail(error)

    def _step(self, key: Hashable, batch: _Batch) -> bool:
        """Take a step; returns whether there may be another one."""
        with self._lock:
            if not (batch.arrived or batch.running):
                del self._batches[key]
                return False
            arrived, batch.arrived = batch.arrived, []
            batch.running.update((one.call, one) for one in arrived)
        if _ENDS.is_set():
            raise InterruptedError("the program ends")
        batch.step(arrived)
        return True


def takes_turns(model: nn.Module) -> str | None:
    """Why calls of a model must come one after the other; None if they need not."""
    if not isinstance(model, GenerationMixin):
        return "the model has no generate()"
    if rope_ends(model):
        return "its rotary frequencies follow the length of the sequence"
    if any(one.is_meta for one in model.parameters()):
        return "some of its weights are offloaded"
    return None


def share_steps(
    model: nn.Module, max_rows: int = 32, max_cached_tokens: int | None = None,
    prompt_part: int = 256, max_prefix_tokens: int = 8192,
) -> StepSharing:  # fmt: skip
    """From now on, calls of ``model.generate`` with a strategy share their steps, whichever threads
    they are in: a call runs its prompt, then joins those that run, and leaves as it ends.

    Each call gives what it gives alone, and keeps its options, streamer and errors. Calls share
    with those of the same strategy and its options. One that cannot share runs as before;
    ``last_stats(model).details["shared"]`` says why. Streamers, criteria and processors are called
    in another thread, in the context (:mod:`contextvars`) of their call.

    Args:
        model: the model, or a ``PeftModel`` or the like around it.
        max_rows: most sequences at once. Calls wait for room before their prompts run, first come,
            first served; one that alone is larger waits until no other runs.
        max_cached_tokens: the same for the tokens that there is room for in their caches: as many
            for each sequence as the longest prompt with its longest answer has.
        prompt_part: most tokens of prompts that run between two steps: longer prompts run in parts.
            Fewer of them shorten the pauses of other calls' answers, and more of them the time to
            the first token. Where no other call takes steps, a prompt runs as a whole.
        max_prefix_tokens: most tokens of ended calls whose keys and values are kept, on the model's
            device, for prompts that begin with them, as the next turn of a chat does; 0 for none.
            They are as large as those of the cache, and last as long as the weights are the same.

    Returns:
        What ends the sharing: by ``stop()``, or at the end of a ``with`` block.

    Raises:
        ValueError: it is no model that generates, a limit is below 1, or its calls already share
            their steps.
    """
    inner = unwrapped(model)
    if not isinstance(inner, GenerationMixin):
        kind = type(model).__name__
        raise ValueError(f"share_steps() got a {kind}: give the model whose generate() is called.")
    check_count("max_rows", max_rows, 1)
    if max_cached_tokens is not None:
        check_count("max_cached_tokens", max_cached_tokens, 1)
    check_count("prompt_part", prompt_part, 1)
    check_count("max_prefix_tokens", max_prefix_tokens, 0)
    limits = max_rows, max_cached_tokens, prompt_part, max_prefix_tokens
    sharing = StepSharing(inner, *limits)
    if memory(inner).setdefault(_KEY, sharing) is not sharing:
        raise ValueError(
            f"calls of this {type(inner).__name__} already share their steps: stop() what "
            "share_steps() has returned first."
        )
    end_team()  # this thread may have loaded the model, and only wait from here on
    return sharing
