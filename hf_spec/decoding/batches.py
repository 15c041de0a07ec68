"""``generate_batch()`` and ``init_continuous_batching()`` with a strategy."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.generation.streamers import BaseStreamer

from hf_spec.decoding.call import check_strategy
from hf_spec.decoding.sequences import eos_ids, pad_left
from hf_spec.decoding.sharing import StepSharing, ThreadState, share_steps, takes_turns
from hf_spec.draft.options import DraftOptions
from hf_spec.modeling_patches.weights import vocabulary

#: Most sequences at once where nobody says how many.
ROWS = 32
#: The option of continuous batching that says it.
MOST_REQUESTS = "max_requests_per_batch"
#: The option of strategies that says it.
ROWS_OPTION = "max_rows"
#: What else is taken: there is no cache that is made in advance, of whose size this is a limit.
#: TRL always sets it.
IN_ADVANCE = "max_memory_percent"
#: Arguments of ``generate`` that it takes besides its own.
TAKEN = "max_new_tokens", "assistant_strategy", "assistant_kwargs"


def generate_batch(
    model: Any,
    inputs: Sequence[Sequence[int]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **kwargs: Any,
) -> dict[str, Any]:
    """Answer prompts of any lengths: ``model.generate_batch`` with a strategy.

    Args:
        inputs: tokens of each prompt.
        generation_config: names the strategy, unless the model's does, or ``assistant_strategy``.
        continuous_batching_config: ``max_requests_per_batch`` is the strategy's ``max_rows``, 32 by
            default. Other options are the paged cache's.
        warmup: there is nothing to warm up.
        kwargs: ``max_new_tokens``, ``assistant_strategy``, ``assistant_kwargs``.

    Returns:
        Transformers' outputs by its names of requests, in the order of the prompts.

    Raises:
        ValueError: an option does not work with a strategy; and the errors of ``generate``.
    """
    # Loaded by those who call it.
    from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

    given = _config_of(model, generation_config)
    batching = continuous_batching_config or getattr(given, "continuous_batching_config", None)
    wanted = {
        "record_timestamps": record_timestamps, "progress_bar": progress_bar,
        "persistent_manager": persistent_manager, "max_time": given.max_time,
    }  # fmt: skip
    others = {
        **{name: value for name, value in wanted.items() if value},
        **{name: value for name, value in sorted(kwargs.items()) if name not in TAKEN},
    }  # fmt: skip
    _check("generate_batch", TAKEN, others, batching)
    inputs = _prompts(inputs, vocabulary(model))
    if not inputs:
        return {}
    begun = time.perf_counter()
    named = kwargs.pop("assistant_kwargs", None)
    options = dict(_options_of(given) if named is None else named)
    options.setdefault(ROWS_OPTION, getattr(batching, MOST_REQUESTS, None) or ROWS)
    model.eval()  # as Transformers' own does
    out = model.generate(
        **pad_left(inputs, 0, model.device), generation_config=given, assistant_kwargs=options,
        return_dict_in_generate=False, **kwargs,
    )  # fmt: skip
    ended = time.perf_counter()
    answers, count = out[:, max(map(len, inputs)) :].tolist(), len(out) // len(inputs)
    ends, found = eos_ids(given), {}
    for row, answer in enumerate(answers):
        request, child = divmod(row, count)
        # Transformers' order: other answers to a prompt, then the one that has its name.
        name = f"req_{request}" + (f"__child#{child}" if child < count - 1 else "")
        length = next((at + 1 for at, token in enumerate(answer) if token in ends), len(answer))
        found[name] = GenerationOutput(
            name, list(inputs[request]), answer[:length], status=RequestStatus.FINISHED,
            created_time=begun, lifespan=(begun, ended),
        )  # fmt: skip
    return found


def init_continuous_batching(
    model: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> Any:
    """Answer requests as they come: ``model.init_continuous_batching`` with a strategy.

    Args:
        generation_config: names the strategy, unless the model's does.
        continuous_batching_config: as of :func:`generate_batch`.
        workload_hints: there is nothing to be sized by them.

    Returns:
        A :class:`hf_spec.decoding.batches.RequestManager`.

    Raises:
        ValueError: an option does not work with a strategy.
    """

    given = _config_of(model, generation_config)
    batching = continuous_batching_config or getattr(given, "continuous_batching_config", None)
    _check("init_continuous_batching", (), {}, batching)
    options, given.continuous_batching_config = _options_of(given), None
    check_strategy(model, given)
    most = options.get(ROWS_OPTION) or getattr(batching, MOST_REQUESTS, None) or ROWS
    return RequestManager(model, given, most)


def _prompts(inputs: Any, size: int) -> list[list[int]]:
    """Prompts as lists; a ValueError unless they are ids of tokens, of which a model has
    ``size``."""
    rows = [one.tolist() if isinstance(one, torch.Tensor) else one for one in inputs]
    for number, row in enumerate(rows):
        listed = isinstance(row, Sequence) and not isinstance(row, str) and len(row) > 0
        wrong = next((id for id in row if not _is_token(id, size)), None) if listed else row
        if wrong is not None:
            raise ValueError(
                f"inputs[{number}] in generate_batch: {wrong!r} is no token of the model. Give "
                f"lists of token ids, 0 to {size - 1}, such as tokenizer(texts).input_ids."
            )
    return [[*row] for row in rows]


def _is_token(id: Any, size: int) -> bool:
    return isinstance(id, int) and 0 <= id < size


def _check(where: str, taken: Sequence[str], given: dict[str, Any], batching: Any) -> None:
    """Raise a ValueError for options, ``given`` or of continuous batching, that only Transformers'
    paged cache has; ``taken``: those that ``where`` takes."""
    for name, value in {**given, **_changed(batching)}.items():
        if name not in (MOST_REQUESTS, IN_ADVANCE):
            raise ValueError(
                f"{name}={value!r} in {where} with a strategy: it has no paged cache, and "
                f"takes {', '.join((*taken, MOST_REQUESTS))} and a generation_config. Leave it "
                "out, or give assistant_strategy=None."
            )


def _changed(batching: Any) -> dict[str, Any]:
    """The options of continuous batching that are not left at their defaults."""
    if batching is None:
        return {}
    usual = vars(type(batching)())
    return {name: value for name, value in vars(batching).items() if value != usual[name]}


def _config_of(model: Any, config: GenerationConfig | None) -> Any:
    """A copy of a call's config; what it leaves open is as in the model's, as in ``generate``."""
    given: Any = copy.deepcopy(config or model.generation_config)
    given.update(**model.generation_config.to_dict(), defaults_only=True)
    return given


def _options_of(config: Any) -> Any:
    """Options of the strategy that a configuration holds."""
    options = getattr(config, "assistant_kwargs", None) or {}
    if isinstance(options, DraftOptions):
        options = dataclasses.asdict(options)
    return options


# --------------------------------------------------------------------------------------------------
# Requests that come and go, answered with a strategy: Transformers' ``ContinuousBatchingManager``
# for strategies.

logger = logging.getLogger(__name__)

#: Called with what a request has so far.
Handler = Callable[[GenerationOutput], None]


class _Left(Exception):
    """Ends the call of a request that nobody waits for."""


@dataclass(eq=False)
class _Request:
    """A request.

    Attributes:
        config: of its call.
        parent: the request whose prompt it answers once more, or itself.
        left: whether its call is to end early.
        why: the error for whoever waits for it then; None if nobody does.
    """

    name: str
    parent: str
    prompt: list[int]
    config: GenerationConfig
    streaming: bool
    stamped: bool
    created: float = field(default_factory=time.perf_counter)
    began: float = -1
    ended: float = -1
    status: RequestStatus = RequestStatus.PENDING
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str | None = None
    left: bool = False
    why: str | None = None

    def __post_init__(self) -> None:
        self._eos = eos_ids(self.config)

    @property
    def output(self) -> GenerationOutput:
        """What there is so far."""
        return GenerationOutput(
            self.name, self.prompt, self.tokens[:], status=self.status, error=self.error,
            created_time=self.created, lifespan=(self.began, self.ended),
            timestamps=self.times[:] if self.stamped else None,
        )  # fmt: skip

    def is_over(self, token: int) -> bool:
        """Whether this token is its last."""
        return token in self._eos or len(self.tokens) == self.config.max_new_tokens


class _Streamer(BaseStreamer):
    """Gets the tokens of a request."""

    def __init__(self, request: _Request, deliver: Handler):
        self._request, self._deliver, self._begun = request, deliver, False

    def put(self, value: Tensor) -> None:
        request, begun, self._begun = self._request, self._begun, True
        if request.left:
            raise _Left
        if not begun:  # the prompt
            return
        for token in value.flatten().tolist():
            request.status = RequestStatus.DECODING
            request.tokens.append(token)
            request.times.append(time.perf_counter())
            if request.streaming and not request.is_over(token):
                self._deliver(request.output)

    def end(self) -> None: ...


class RequestManager:
    """Answers requests with a strategy as they come: ``model.init_continuous_batching``.

    It has the methods of Transformers' ``ContinuousBatchingManager``. Each request is a call of
    ``generate`` in a thread of its own, and they share their steps
    (:func:`hf_spec.share_steps`). Several answers to a prompt are a call each. Results come in the
    order in which they are ready.

    Args:
        model: the model.
        config: options of all requests, with the strategy.
        max_rows: most requests at once.
    """

    #: There is nothing to warm up.
    warmed_up = True

    def __init__(self, model: Any, config: GenerationConfig, max_rows: int):
        self.model, self.generation_config, self.max_rows = model.eval(), config, max_rows
        self.num_return_sequences = config.num_return_sequences or 1
        compiles = config.cache_implementation is not None or config.compile_config is not None
        self._shares = takes_turns(model) is None and not compiles
        #: Taken itself, as an interrupt within a condition's ``__enter__`` would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: list[_Request] = []  # to be started
        self._open: dict[str, _Request] = {}  # not yet ended
        self._results: deque[GenerationOutput] = deque()
        self._handlers: dict[str, Handler] = {}
        self._pauses: list[int] = []  # threads
        self._numbers, self._at_work = itertools.count(), 0
        self._pool: ThreadPoolExecutor | None = None
        self._sharing: StepSharing | None = None  # if it is this one's to end
        self._state: ThreadState | None = None
        self._stops = False

    # -- begin and end -----------------------------------------------------------------------

    def warmup(self) -> None:
        """Nothing: recorded steps are made by ``hf_spec.warm_up``."""

    def is_running(self) -> bool:
        """Whether it answers requests: it was started, and has not ended since."""
        return self._pool is not None

    def start(self) -> None:
        """Answer the requests that were added, and those to come."""
        with self._lock:
            if self._pool is not None:
                logger.warning("the manager is running already.")
                return
            self._stops, self._state = False, ThreadState.of_this(self.model.device)
            if self._shares and StepSharing.of(self.model) is None:
                self._sharing = share_steps(self.model, self.max_rows)
            self._pool = ThreadPoolExecutor(self.max_rows if self._shares else 1)
            for request in self._waiting:
                self._pool.submit(self._run, request)
            self._waiting.clear()

    def stop(
        self, block: bool = True, timeout: float | None = None, keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:  # fmt: skip
        """Take no more requests, and end with the last one. It may be started again.

        Args:
            block: wait for the end.
            timeout: seconds to wait for it at most; None: as long as it takes.
            keep_for_next_session: there is no cache that could be kept.
            hard_stop: end all requests, which fail.

        Raises:
            RuntimeError: within a pause of this thread, which requests would wait for.
        """
        with self._lock:
            if self._pool is None:
                logger.warning("the manager was not started.")
                return
            if threading.get_ident() in self._pauses:
                raise RuntimeError("stop() within pause(): leave the pause first.")
            self._stops = True
            for request in self._open.values() if hard_stop else ():
                request.left = True
                request.why = "the manager was stopped before this request was answered"
            self._end_if_idle()
            self._changed.notify_all()
            if block and not self._changed.wait_for(lambda: self._pool is None, timeout):
                logger.warning("requests are still answered after %s s.", timeout)

    def join(self, stop_trigger_time: float = 0.0, timeout: float | None = None) -> None:
        """Wait, after ``stop(block=False)``, for the end."""
        with self._lock:
            self._changed.wait_for(lambda: self._pool is None, timeout)

    def destroy(self) -> None:
        """Stop, if it runs."""
        if self.is_running():
            self.stop()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within the block no forward runs, so that the model can be changed: it waits for the
        requests that have begun, and no other one begins.

        Raises:
            RuntimeError: the manager does not run.
        """
        me = threading.get_ident()
        with self._lock:
            if self._pool is None:
                raise RuntimeError("pause() of a manager that does not run: start() it first.")
            self._pauses.append(me)
        try:
            with self._lock:
                self._changed.wait_for(lambda: not self._at_work)
            yield
        finally:
            with self._lock:
                self._pauses.remove(me)
                self._changed.notify_all()

    def _end_if_idle(self) -> None:
        if self._pool is None or not self._stops or self._open:
            return
        self._pool.shutdown(wait=False)
        self._pool = None
        if self._sharing is not None:
            self._sharing.stop()
            self._sharing = None

    # -- requests ----------------------------------------------------------------------------

    def add_request(
        self, input_ids: Sequence[int], request_id: str | None = None,
        max_new_tokens: int | None = None, streaming: bool = False,
        record_timestamps: bool = False, eos_token_id: int | Sequence[int] | None = None,
        **options: Any,
    ) -> str | None:  # fmt: skip
        """Add a request, which waits until the manager is started.

        Args:
            input_ids: its prompt.
            request_id: its name; None for the next of ``req_0``, ``req_1``, ... With several
                answers to each prompt, the others are ``NAME__child#0`` and so on.
            max_new_tokens: None for the configuration's.
            streaming: give a result for each token, and not only for the whole answer.
            record_timestamps: note when each token came.
            eos_token_id: what ends the answer; -1: no token. None for the configuration's.
            options: other generation options for it, such as ``temperature``.

        Returns:
            Its name; None if the manager is being stopped, and takes no more.

        Raises:
            ValueError: there is no such option, or a request of this name is being answered.
        """
        config = copy.deepcopy(self.generation_config)
        for name, value in options.items():
            if not hasattr(config, name):
                raise ValueError(
                    f"{name}={value!r} of a request: it is no generation option. Leave it out."
                )
            setattr(config, name, value)
        if max_new_tokens is not None:
            config.max_new_tokens = max_new_tokens
        if eos_token_id is not None:
            ends = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
            config.eos_token_id = [one for one in ends if one >= 0]
        config.num_return_sequences, config.return_dict_in_generate = 1, False
        with self._lock:
            if self._stops:
                logger.warning("the manager is being stopped, and takes no more requests.")
                return None
            name = f"req_{next(self._numbers)}" if request_id is None else request_id
            others = [f"{name}__child#{number}" for number in range(self.num_return_sequences - 1)]
            for one in (*others, name):
                if one in self._open:
                    raise ValueError(f"request_id={one!r}: it is being answered. Choose another.")
            for one in (*others, name):
                request = _Request(one, name, list(input_ids), config, streaming, record_timestamps)
                self._open[one] = request
                if self._pool is None:
                    self._waiting.append(request)
                else:
                    self._pool.submit(self._run, request)
        return name

    def add_requests(
        self, inputs: Sequence[Sequence[int]], max_new_tokens: int | None = None,
        streaming: bool = False, record_timestamps: bool = False, **options: Any,
    ) -> list[str | None]:  # fmt: skip
        """:meth:`add_request` for each prompt."""
        given = (None, max_new_tokens, streaming, record_timestamps)
        return [self.add_request(one, *given, **options) for one in inputs]

    def cancel_request(self, request_id: str) -> None:
        """End a request, and the others with its prompt: there is no result."""
        with self._lock:
            for request in [*self._open.values()]:
                if request_id in (request.name, request.parent):
                    request.left = True
                    if request in self._waiting:
                        self._waiting.remove(request)
                        del self._open[request.name]
            self._changed.notify_all()

    # -- results -----------------------------------------------------------------------------

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Wait for the next result.

        Args:
            request_id: of this request alone.
            timeout: seconds to wait for it at most; None: as long as it takes.

        Returns:
            A result; None if there is none by then, or there will be none: the manager does not
            run, or the request is over.
        """

        def found() -> GenerationOutput | None:
            matching = (one for one in self._results if request_id in (None, one.request_id))
            return next(matching, None)

        def over() -> bool:
            return self._pool is None or request_id is not None and request_id not in self._open

        with self._lock:
            self._changed.wait_for(lambda: found() is not None or over(), timeout)
            result = found()
            if result is not None:
                self._results.remove(result)
        return result

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come, until the manager has ended."""
        while (result := self.get_result()) is not None:
            yield result

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """The results of a request as they come."""
        while (result := self.get_result(request_id)) is not None:
            yield result

    def register_result_handler(self, request_id: str, callback: Handler) -> None:
        """From now on, ``callback`` is called with the results of a request, in the event loop that
        runs in this thread, and there are none of it elsewhere."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._handlers[request_id] = lambda output: _call(loop, callback, output)

    def _deliver(self, output: GenerationOutput) -> None:
        with self._lock:
            handler = self._handlers.get(output.request_id)
            if handler is None:
                self._results.append(output)
                self._changed.notify_all()
            elif output.is_finished():
                del self._handlers[output.request_id]
        if handler is not None:
            handler(output)

    # -- a thread of the pool ----------------------------------------------------------------

    def _run(self, request: _Request) -> None:
        """Answer a request."""
        with self._lock:
            self._changed.wait_for(lambda: not self._pauses or request.left)
            self._at_work += 1
        try:
            if request.left:
                raise _Left
            request.began, request.status = time.perf_counter(), RequestStatus.PREFILLING
            request.tokens = self._answer(request)
            request.status = RequestStatus.FINISHED
        except _Left:
            request.status, request.error = RequestStatus.FAILED, request.why
        except Exception as error:
            request.status, request.error = RequestStatus.FAILED, str(error)
        request.ended = time.perf_counter()
        if not request.left or request.error is not None:
            self._deliver(request.output)
        with self._lock:
            self._at_work -= 1
            del self._open[request.name]
            self._handlers.pop(request.name, None)
            self._end_if_idle()
            self._changed.notify_all()

    def _answer(self, request: _Request) -> list[int]:
        """The tokens of a request's call."""
        state, device = self._state, self.model.device
        assert state is not None
        ids = torch.tensor([request.prompt], dtype=torch.long, device=device)
        # Left at None in a configuration, they would be the model's.
        more = {"eos_token_id": None} if request.config.eos_token_id in (None, []) else {}
        with state.taken_over():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=request.config,
                streamer=_Streamer(request, self._deliver), **more,
            )  # fmt: skip
        found: list[int] = out[0, ids.shape[1] :].tolist()
        return found


def _call(loop: asyncio.AbstractEventLoop, callback: Handler, output: GenerationOutput) -> None:
    loop.call_soon_threadsafe(callback, output)
