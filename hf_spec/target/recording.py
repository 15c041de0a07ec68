"""When steps are recorded as CUDA graphs: where they are asked for, or can do no harm; and how much
that may take."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import distributed, nn

from hf_spec.core.checks import check_switch
from hf_spec.modeling_patches.attention_masks import runs_kernel
from hf_spec.modeling_patches.fingerprint import Fingerprint
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.modeling_patches.weights import placement, tensor_parallel_size
from hf_spec.target.captures import RECORDERS
from hf_spec.threads import memory

logger = logging.getLogger(__name__)

#: Whether steps are recorded where nobody has asked for it. Not before ``benchmarks/gpu.py
#: --decide`` says so on a GPU.
RECORD_BY_DEFAULT = False


# -- What it may take -----------------------------------------------------------------------------


class RecordLimits(NamedTuple):
    """What recording may take.

    Attributes:
        wait: the eager occurrence of a step's sizes at which it is recorded.
        share: most seconds of making records, as a share of those of steps; None for any.
        most: records of a model.
        stale: seconds after which a record that has not run makes room for another one.
        tries: how much more often than not a record must be wrong, and how often memory must not
            suffice, for no more to be made.
        cache, card: most bytes of a buffer of the KV cache, and which share of the device's memory
            that may be; None for any.
        slots: most tokens per row of a cache that is read with a dense mask; None for any.
        rows: most rows of a batch; None for any.
        parts: capacities of a cache between a power of two and the next.
        gain: how much faster recorded steps must be.
    """

    wait: int = 1
    share: float | None = None
    most: int = 128
    stale: float = 0.0
    tries: int = 3
    cache: int | None = None
    card: float = 1.0
    slots: int | None = None
    rows: int | None = None
    parts: int = 1
    gain: float = 0.0

    def why_not(self, shape: Sequence[int], nbytes: int, total: int | None) -> str | None:
        """Why code is not recorded for a buffer ``(layers, rows, heads, slots, dim)`` of a cache on
        a device with ``total`` bytes; None if it is."""
        if self.rows is not None and shape[1] > self.rows:  # of calls that share their steps
            return f"a batch of {shape[1]} rows is larger than {self.rows}"
        if self.slots is not None and shape[3] > self.slots:
            return f"a context of {shape[3]} tokens is longer than {self.slots}"
        size = f"a KV cache of {nbytes / 2**30:.1f} GiB"
        if self.cache is not None and nbytes > self.cache:
            return f"{size} is larger than {self.cache / 2**30:.0f} GiB"
        if total is not None and nbytes > self.card * total:
            return f"{size} is more than {self.card:.0%} of the device's memory"
        return None


#: Where someone has asked for records.
ASKED = RecordLimits()
#: Where nobody has.
UNASKED = RecordLimits(
    wait=8, share=0.1, most=32, stale=60.0, tries=1, cache=2**30, card=0.05, slots=8192, rows=16,
    parts=4, gain=1.2,
)  # fmt: skip

#: Eager steps that take as long as to make a record and to check it twice, until that is known.
COST = 8
#: Replays after which recorded steps are compared with eager ones, and times of each that count.
REPLAYS = 16
#: Kinds of steps whose occurrences are counted.
COUNTED = 512


class _Past:
    """What recording has taken and brought on a model, in all calls."""

    def __init__(self) -> None:
        self.steps, self.decoding, self.making = 0, 0.0, 0.0
        self.cost: float | None = None  # seconds of the last record
        self.seen: Counter[Hashable] = Counter()  # eager occurrences
        self.times: dict[Hashable, tuple[deque[float], deque[float]]] = {}  # eager, recorded
        self.slow: set[Hashable] = set()  # what was no faster
        self.ended: str | None = None  # why no more is recorded
        self.told: set[str] = set()


# -- Asked for by `record` ------------------------------------------------------------------------

#: In a model's memory: what `record` was told, and whether it has said that there is no device.
_ASKED, _TOLD = "record", "told of recording"


def record(model: nn.Module, on: bool = True) -> None:
    """Record the steps of a model's calls as CUDA graphs from now on, in every call that can.

    On a GPU an eager step takes as long as the host launches kernels. A recorded step launches them
    all at once. Calls with a strategy record a step when its sizes first occur, a fraction of a
    second each, as with ``compile_config=CompileConfig(backend="cudagraphs")``. Calls that cannot
    be recorded run as without it, and ``print(hf_spec.last_stats(model))`` says why: with
    ``disable_compile=True``, ``prune=True`` or ``synced_gpus``, and see the guide "Recorded and
    compiled steps". Without a CUDA device it does nothing, and says so once. A copied or reloaded
    model is not recorded.

    Args:
        model: a causal language model or a `PeftModel`.
        on: False ends this, and frees what was recorded. Calls with a ``compile_config`` of their
            own are not concerned.

    Raises:
        ValueError: it is no model, or ``on`` is neither True nor False.
    """
    check_switch("on", on)
    if not isinstance(model, nn.Module):
        raise ValueError(f"record() got a {type(model).__name__}: give the model that generates.")
    model = unwrapped(model)
    kept = memory(model)
    kept[_ASKED] = on
    if not on:
        if "graphs" in kept:
            kept["graphs"].drop_records()
        return
    device = placement(model).device
    if device.type not in RECORDERS and not kept.get(_TOLD):
        kept[_TOLD] = True
        logger.warning(
            "hf_spec.record: %s is on %s, and CUDA graphs need a CUDA device: nothing is recorded "
            "until it is on one.", type(model).__name__, device,
        )  # fmt: skip


def is_asked(model: Any) -> bool | None:
    """Whether :func:`record` has turned a model's records on or off; None if it was not called."""
    asked: bool | None = memory(model).get(_ASKED)
    return asked


# -- A hint where steps are not recorded ----------------------------------------------------------

#: A device is idle in eager steps whose one read waits for less than this share of the step: by
#: then it had done nearly all. The hint comes after so many of them, one after the other.
IDLE_SHARE, IDLE_STEPS = 0.1, 32
_IDLE = (
    "%s: the GPU waits for the host, which launches its kernels one by one: in %d steps the host "
    "spent less than %d %% of the time on waiting for it. hf_spec.record(model) launches those of "
    "a step at once, as CUDA graphs; hf_spec.record(model, False) ends this hint."
)


class Hint:
    """Tells when it is known that a device waits for the host; once in a process.

    Attributes:
        given: whether it has.
    """

    def __init__(self) -> None:
        self.given, self._steps = False, 0

    def due(self, seconds: float, waited: float) -> bool:
        """Count an eager step; return whether this one makes it known."""
        self._steps = self._steps + 1 if waited < IDLE_SHARE * seconds else 0
        due = self._steps >= IDLE_STEPS and not self.given
        self.given |= due
        return due


_HINT = Hint()


# -- Whether and when a call's steps are recorded -------------------------------------------------


class CallFacts(NamedTuple):
    """What recording depends on of a call.

    Attributes:
        running: how its model runs.
        rows: of its batch.
        disabled: whether it has ``disable_compile=True``.
        prunes: whether its strategy prunes.
        synced: whether several ranks run the model together, on batches of their own.
    """

    running: Fingerprint
    rows: int = 1
    disabled: bool = False
    prunes: bool = False
    synced: bool = False


@dataclass
class Recording:
    """Whether and when a call's steps are recorded.

    Attributes:
        on: whether they are.
        limits: what it may take.
        why: why not, if it is asked for or the default; else None.
        hints: the model's name if they could be, and would be faster where the device is idle.
        by_default: whether nobody has asked for it.
    """

    on: bool = False
    limits: RecordLimits = field(default_factory=lambda: ASKED)
    why: str | None = None
    hints: str | None = None
    by_default: bool = False
    _past: _Past = field(default_factory=_Past)
    #: Whether steps of the call were not due.
    _waited: bool = False
    #: What the current step has run: whether by a record.
    _ran: dict[Hashable, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, call: CallFacts) -> Recording:
        """Of a call that has no ``compile_config`` for it."""
        asked, device = is_asked(model), placement(model).device
        never, found = _first(_of_the_call(model, call)), cls()
        by_default = asked is None and RECORD_BY_DEFAULT and device.type in RECORDERS
        if asked or by_default:
            past: _Past = memory(model).setdefault(_Past, _Past())
            why = never or (_first(_unasked(model, call, past)) if by_default else None)
            limits = UNASKED if by_default else ASKED
            if runs_kernel(model):  # which reads no more of a cache than there is
                limits = limits._replace(slots=None)
            found = cls(why is None, limits, why, None, by_default, past)
            if why is not None:
                found.say(model, f"steps are not recorded: {why}")
        useful = asked is None and never is None and not found.on and not _HINT.given
        if useful and device.type == "cuda" and not obstacle(model, call.running.hooks, True):
            found.hints = type(model).__name__
        return found

    @property
    def at_once(self) -> bool:
        """Whether each step is recorded when it first occurs."""
        return self.on and not self.by_default

    def of_another(self, model: Any, running: Fingerprint) -> str | None:
        """Why another model that drafts in the call is not recorded; None if it is."""
        return _first(_of_the_model(model, running)) if self.by_default else None

    # -- before a step's code runs -----------------------------------------------------------

    def is_due(self, key: Hashable, used: Callable[[], Collection[float]]) -> bool:
        """Count an eager occurrence of a kind of steps; return whether it is recorded now.

        Args:
            used: gives when each record of the model ran last.
        """
        limits, past = self.limits, self._past
        if limits.share is None:
            return True
        past.seen[key] += 1
        if len(past.seen) > COUNTED:
            past.seen = Counter(dict(past.seen.most_common(COUNTED // 2)))
        due = past.seen[key] >= limits.wait and key not in past.slow and self._has_room(used())
        self._waited |= not due
        return due

    def _has_room(self, used: Collection[float]) -> bool:
        """Whether one more record may be made, and kept."""
        limits, past = self.limits, self._past
        if len(used) >= limits.most and time.monotonic() - min(used) < limits.stale:
            return False
        cost = past.cost or COST * past.decoding / max(past.steps, 1)
        assert limits.share is not None
        return past.steps > 0 and past.making + cost <= limits.share * past.decoding

    def is_slow(self, key: Hashable) -> bool:
        """Whether records of this kind were no faster."""
        return key in self._past.slow

    def ran(self, key: Hashable, recorded: bool) -> None:
        """Note what a step has run, and whether by a record."""
        self._ran[key] = recorded

    @contextmanager
    def making(self) -> Iterator[None]:
        """A context in which a record is made or checked."""
        began = time.monotonic()
        yield
        spent = time.monotonic() - began
        self._past.making += spent
        self._past.cost = max(spent, self._past.cost or 0.0)

    # -- after it ----------------------------------------------------------------------------

    def observe(self, seconds: float, waited: float, made: bool) -> bool:
        """Learn from a step; return whether all of it was recorded.

        Args:
            seconds: what it took.
            waited: seconds of it in which the host waited for the device.
            made: whether records were made or checked in it.
        """
        if self.hints is not None and _HINT.due(seconds, waited):
            logger.warning(_IDLE, self.hints, IDLE_STEPS, 100 * IDLE_SHARE)
        ran, self._ran = self._ran, {}
        recorded = bool(ran) and all(ran.values())
        if not made and self.by_default:
            self._past.steps += 1
            self._past.decoding += seconds
            if recorded or not any(ran.values()):
                for key in ran:
                    self._compare(key, recorded, seconds)
        return recorded

    def _compare(self, key: Hashable, recorded: bool, seconds: float) -> None:
        """Note what a step took; once enough is known, find whether records of it are slow."""
        times = self._past.times
        if len(times) > COUNTED:
            times.clear()
        eager, replayed = times.setdefault(key, (deque(maxlen=REPLAYS), deque(maxlen=REPLAYS)))
        if recorded and len(replayed) == REPLAYS:
            return
        (replayed if recorded else eager).append(seconds)
        if recorded and len(replayed) == REPLAYS and eager:
            ratio = statistics.median(eager) / statistics.median(replayed)
            if ratio < self.limits.gain:
                self._past.slow.add(key)
                logger.info("a recorded step is %.2f times as fast as an eager one: dropped", ratio)

    def end(self, why: str) -> None:
        """Record no more for the model, in no call: something went wrong."""
        self._past.ended = why

    def say(self, model: Any, what: str) -> None:
        """Say it once of a model, where someone looks for it."""
        if what not in self._past.told:
            self._past.told.add(what)
            logger.info("%s: %s", type(model).__name__, what)

    def begins(self, model: Any) -> None:
        """Say that steps of the model are recorded, if nobody has asked for it."""
        if self.by_default:
            self.say(
                model, "steps are recorded as CUDA graphs. hf_spec.record(model, False) leaves "
                "them as they are, hf_spec.record(model) records all from the first one on"
            )  # fmt: skip

    def told(self) -> dict[str, Any]:
        """What statistics say of it beside what the call's code is."""
        if not self.by_default:
            return {}
        why = (
            f"each has occurred less than {self.limits.wait} times, or making its record would "
            f"take more than {self.limits.share:.0%} of the time so far, or {self.limits.most} "
            "others are in use"
        )
        return {"by_default": True, "waits": why if self._waited else None}

    def details(self) -> dict[str, Any]:
        """Entries for ``SpecStats.details``."""
        return {} if self.why is None else {"not_recorded": self.why}


# -- Where steps are recorded ---------------------------------------------------------------------

#: Why they are not, if it is so: a condition, and what it says.
Reason = tuple[object, str]
#: The first PyTorch whose captures leave random numbers of other threads alone.
OF_A_CAPTURE = (2, 13)


def _first(reasons: Iterator[Reason]) -> str | None:
    return next((why for holds, why in reasons if holds), None)


def _of_the_call(model: Any, call: CallFacts) -> Iterator[Reason]:
    """Why the steps of a call cannot be recorded."""
    device = placement(model).device
    yield device.type not in RECORDERS, f"the model is on {device}, and CUDA graphs need CUDA"
    yield call.disabled, "the call has disable_compile=True"
    yield call.prunes, "with prune=True, what is pruned differs from step to step"
    yield call.synced, "with synced_gpus, ranks with other prompts would wait for one that records"


def _unasked(model: Any, call: CallFacts, past: _Past) -> Iterator[Reason]:
    """Why they are not where nobody has asked for it: what could do harm, and what no test or
    measurement covers."""
    yield past.ended is not None, f"it went wrong: {past.ended}"
    yield from _of_the_model(model, call.running)
    most = UNASKED.rows
    yield most and call.rows > most, f"a batch of {call.rows} rows is larger than {most}"
    yield from _of_the_process(placement(model).device)


def _of_the_model(model: Any, running: Fingerprint) -> Iterator[Reason]:
    """Why a model's are not."""
    why = obstacle(model, running.hooks, True)
    yield why is not None, str(why)
    yield model.training, "the model is in training mode"
    quantized = getattr(model, "hf_quantizer", None) is not None
    yield quantized, "its weights are quantized"
    yield not running.stock, "the model is not as Transformers has made it"


def _of_the_process(device: torch.device) -> Iterator[Reason]:
    """Why a process's are not."""
    ranks = distributed.is_available() and distributed.is_initialized()
    yield ranks and distributed.get_world_size() > 1, "the process is one of several ranks"
    shares = Version(torch.__version__).release < OF_A_CAPTURE and threading.active_count() > 1
    yield shares, f"other threads may draw random numbers, and PyTorch is {torch.__version__}"
    if device.type != "cuda":  # an emulation
        return
    yield torch.version.hip is not None, "ROCm's graphs are not tested"
    backend = torch.cuda.get_allocator_backend()
    yield backend != "native", f"PyTorch's allocator is {backend}"
    yield torch.cuda.is_current_stream_capturing(), "the call is captured itself"


def obstacle(model: Any, hooks: Collection[str], records: bool) -> str | None:
    """Why a model with these hooks cannot be compiled, or recorded, at all; None if no reason is
    known."""
    sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    if sharded or tensor_parallel_size(model) > 1:
        return (
            "its weights are split among processes, all of which would have to make the same code"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        return "some of its weights are offloaded"
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if records and len(devices) > 1:
        return f"its weights are on {' and '.join(devices)}, and a CUDA graph is for one device"
    if hooks:
        return f"its modules have hooks ({', '.join(sorted(hooks))}), which compiled code omits"
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        return "its quantization cannot be compiled"
    return None
