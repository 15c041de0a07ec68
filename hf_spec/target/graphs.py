"""Recorded and compiled steps of a model."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import CompileConfig

from hf_spec.cache.attention import zeros
from hf_spec.core.checks import check_choice, first_line
from hf_spec.core.device import bucket
from hf_spec.core.verify import StepResult
from hf_spec.modeling_patches.fingerprint import fingerprint
from hf_spec.modeling_patches.weights import placement
from hf_spec.target.captures import (
    CUDA_GRAPHS,
    RECORDERS,
    Captured,
    Places,
    Recorder,
    Watch,
    capturing,
    check_recording,
    free_memory,
    joined,
    memory_of,
    memory_size,
    places,
    plain_tensors,
    shape_of,
    shortages,
    take_turns,
)
from hf_spec.target.graph_parts import AnySize, Code, compile_in_parts
from hf_spec.target.hidden_states import Read
from hf_spec.target.recording import Recording, obstacle
from hf_spec.threads import RUNNING, memory, new_lock

# -- How far two computations of the same numbers may be apart -------------------------------------

#: Largest relative error of logits and states that rounding explains, by the least precise dtype
#: that is computed with: more than what was met (0.010 in float16 and 0.052 in bfloat16, of Gemma 3
#: 270M; 0.068 of the scores of a tree). A mask that hides or shows a neighbor mostly gives 0.1 to
#: 0.6.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """The tolerance of what is computed with these dtypes, see :data:`TOLERANCE`."""
    return max((TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE), default=1e-1)


def difference(most: float, expected: Sequence[Tensor], found: Sequence[Tensor]) -> str | None:
    """How two results differ by more than this relative error; None if they do not. Integers,
    which are choices, must be equal."""
    for one, other in zip(expected, found, strict=True):
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return "compiled code gives something else (other choices)"
            continue
        if not one.numel():
            continue
        scale = one.masked_fill(~one.isfinite(), 0).abs().max().clamp(min=1e-6)
        same = (one == other) | (one.isnan() & other.isnan())
        apart = torch.where(same, 0, one - other)
        error = float((apart.abs().max() / scale).nan_to_num(torch.inf))
        if not error <= most:
            return f"compiled code gives something else (relative error {error:.2g})"
    return None


# -- Code for captured graphs, by the backends of ``torch.compile`` --------------------------------


def options_of(config: CompileConfig) -> dict[str, Any]:
    """The options of ``torch.compile``, its mode among them.

    Raises:
        ValueError: if there is no such backend, or if Inductor's ``freezing`` is on.
    """
    options = dict(config.options or {})
    if isinstance(config.backend, str) and config.backend != CUDA_GRAPHS:
        known = torch.compiler.list_backends(exclude_tags=())
        check_choice("backend of the CompileConfig", config.backend, known)
    if config.backend == "inductor":
        mode = torch._inductor.list_mode_options(config.mode) if config.mode is not None else {}
        options = {**mode, **options, "triton.cudagraphs": False}  # recorded by Graphs, as one
        if options.get("freezing") or torch._inductor.config.freezing:
            raise ValueError(
                "Inductor's freezing is on (options of the CompileConfig, or "
                "TORCHINDUCTOR_FREEZING=1): kept code would hold the values of weights, and of the "
                "first call's cache. Turn it off, or give disable_compile=True."
            )
    return options


def code_for(
    captured: fx.GraphModule, backend: str, options: dict[str, Any], parts: AnySize
) -> Code:  # fmt: skip
    """Code for a graph of tensors, by ``parts``, the :func:`compiled_parts` of earlier ones, where
    a backend allows it; it must not hold the model, as it is kept."""
    if backend in ("eager", "inductor"):
        code = compile_in_parts(captured, parts)
        if code is not None:
            return code
    if backend == "eager":  # runs the captured graph as it is
        return captured
    options = {**options, "guard_filter_fn": lambda guards: [False] * len(guards)}
    return torch.compile(captured, fullgraph=True, dynamic=False, backend=backend, options=options)


def compiled_parts(backend: str, options: dict[str, Any]) -> AnySize:
    """What compiles parts of graphs, or runs them as they are with the backend ``eager``."""
    if backend == "eager":
        return AnySize(lambda part, _: part)
    return AnySize(partial(torch._inductor.compile, options=options))


# -- Compiled and recorded functions of a model, kept between calls --------------------------------
#
# A function is compiled for its inputs' shapes, unless the backend is ``cudagraphs``; parts of
# graphs that differ in one size share code (:mod:`.graph_parts`). It is captured by running it on
# tensors without data (`torch.fx`): all Python code, hooks and context variables included, runs
# then, and only tensor operations remain. A compiler gets these without guards: what guards would
# check is part of the key under which the code is kept (:meth:`Graphs.get`), and the model's
# tensors are checked once per call.
#
# On CUDA the kernels that the function launches, or its compiled code, are recorded
# (:mod:`.captures`), for these places in memory. Before anything is used, its results, and what it
# writes, are compared with the function's, on several inputs (:data:`CHECKS`). Rounding can make
# another choice, such as of one of two experts that are equally likely: code that differs is
# checked once more, and refused if it goes on (:attr:`.recording.RecordLimits.tries`).

logger = logging.getLogger(__name__)

#: Bytes of cache buffers that are kept for a model, where graphs are for places in memory.
SPARE = 2**30
#: How much more often than not code must agree with the function, on other inputs each time, to be
#: used: what is a constant in it by mistake may have the value of the step in which it was made.
CHECKS = 2
#: Largest number of elements of a constant in compiled code, such as slopes and scales.
SMALL = 256

T = TypeVar("T")

#: From tensors to tensors; anything else it reads must be determined by its key.
Function = Callable[..., tuple[Tensor, ...]]
#: Selects or changes a function's results.
Part = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(eq=False)
class Graph:
    """Compiled code, or a record, for one key."""

    code: Function
    baked: Places  # the memory of the model's tensors that it contains, and which these are
    tolerance: float  # largest relative error that rounding explains
    holds: object = None  # what must exist while it does
    used: float = 0.0  # when it ran last
    checks: int = CHECKS  # by which it must still agree with the function
    seen: set[Hashable] = field(default_factory=set)  # inputs for which it has, see _Job.changing

    def is_right_for(self, job: _Job) -> bool:
        """Whether it has been checked enough, or for these inputs."""
        return not self.checks or bool(self.seen) and job.changing() in self.seen


class _Job(NamedTuple):
    """The arguments of :meth:`Graphs.run`."""

    name: Hashable
    function: Function
    inputs: Sequence[Tensor]
    plain: Callable[[], Sequence[Tensor]] | None
    cut: Part
    static: int
    left: Part
    compared: Part

    def as_it_is(self) -> Sequence[Tensor]:
        """The results without compiled code."""
        return self.cut(self.function(*self.inputs)) if self.plain is None else self.plain()

    def changing(self) -> Hashable:
        """The sums of inputs that are not static, which tell one step from another; the host waits
        for them."""
        sums = [one.sum(dtype=torch.float64) for one in self.inputs[self.static :]]
        return tuple(torch.stack(sums).tolist()) if sums else ()


class _Kept:
    """What is kept for a model: code by key, and what cannot be compiled."""

    def __init__(self) -> None:
        self.graphs: dict[tuple[Hashable, ...], Graph] = {}
        #: Checked or not; of which records are made.
        self.compiled: dict[tuple[Hashable, ...], Graph] = {}
        self.parts: dict[Hashable, AnySize] = {}  # what they consist of, by backend and options
        self.refused: set[Hashable] = set()
        self.warned: set[str] = set()
        self.spare: list[Tensor] = []
        self.ages: dict[int, int] = {}  # of buffers, in the order in which they were made, by place
        self.had = 0  # bytes of such buffers that the last call had, or calls that shared steps
        self.recorder: Recorder | None = None
        #: Inputs and large results of records, which run one at a time, by shape.
        self.shared: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()
        self.layouts: dict[Hashable, int] = {}  # of static inputs, numbered
        self.numbers = count()
        self.shortages = 0  # how often memory has not sufficed beside records
        self.elsewhere: int | None = None  # how often on the device, whatever for

    def refuse(self, name: tuple[Hashable, ...]) -> None:
        """Forget all code for a function, and make no more; ``name``: how its keys begin."""
        self.refused.add(name)
        for kept in (self.graphs, self.compiled):
            for key in [key for key in kept if key[:2] == name]:
                del kept[key]

    def drop_records(self) -> None:
        """Free the memory of what was recorded, and of buffers for it."""
        self.graphs = {
            key: graph for key, graph in self.graphs.items() if not isinstance(graph.code, Captured)
        }
        self.spare.clear()

    def records(self) -> dict[tuple[Hashable, ...], Graph]:
        """What is recorded."""
        every = [*self.graphs.items()]  # at once: other threads make some
        return {key: graph for key, graph in every if isinstance(graph.code, Captured)}

    def last_used(self) -> list[float]:
        """When each record ran last."""
        return [graph.used for graph in self.records().values()]

    def trim(self, most: int) -> None:
        """Drop what was recorded for memory that has been freed, and all but what ran last."""
        latest = sorted(self.records().items(), key=lambda item: -item[1].used)
        for place, (key, graph) in enumerate(latest):
            if place >= most or not graph.code.is_valid:  # type: ignore[attr-defined]
                del self.graphs[key]


_COMPILING = new_lock()


class Graphs:
    """The compiled functions of a model, for one call.

    Args:
        model: must not change while the call runs.
        config: how to compile. ``fullgraph`` and ``dynamic`` have no effect: graphs are always
            whole and have static shapes; nor has Inductor's use of CUDA graphs.
        kind: what functions depend on besides the model and their own keys.
        recording: when they are recorded; None for when they first occur.

    Attributes:
        compiles: whether functions are compiled.
        records: whether functions, or their compiled code, are recorded. Inputs and results are
            then in memory that every run of any record overwrites.

    Raises:
        ValueError: if there is no such backend; if it is ``cudagraphs`` and the device has none, or
            options are given; if Inductor's ``freezing`` is on.
    """

    def __init__(
        self, model: nn.Module, config: CompileConfig, kind: Hashable,
        recording: Recording | None = None,
    ):  # fmt: skip
        self.model, self._device = model, placement(model).device
        self.config, self._options, self._backend = config, options_of(config), config.backend
        self.compiles = config.backend != CUDA_GRAPHS
        # A record is for one device.
        split = len({parameter.device for parameter in model.parameters()}) > 1
        self.records = not self.compiles or (self._device.type in RECORDERS and not split)
        if not self.compiles:
            check_recording(self._device, self._options)
        self.recording = recording or Recording(self.records)
        self._limits = self.recording.limits
        with _COMPILING:
            self._kept: _Kept = memory(model).setdefault("graphs", _Kept())
            self._kept.trim(self._limits.most)
        #: What code may contain: memory, and what is there, as weights may change places.
        self._places = self._places_of(model, "")
        #: The last static inputs, and the number of their layouts, by how many there are.
        self._static: dict[int, tuple[list[ref[Tensor]], int]] = {}
        self._valid: WeakSet[Graph] = WeakSet()  # code that contains nothing else
        options = repr(sorted(self._options.items(), key=repr))
        running = fingerprint(model)
        self._kind = kind, running.state, config.backend, options
        #: Of this call: ``made``, code that it has compiled, or tried to, and ``runs`` of what was
        #: there.
        self.counts: Counter[str] = Counter()
        self.tell: Callable[[int], Any] | None = None  # called with this number when it has grown
        self.obstacle = obstacle(model, running.hooks, self.records)
        most = self._limits.tries
        if self._kept.shortages >= most and self.obstacle is None:
            self.obstacle = f"memory did not suffice beside records in {most} calls"
        if self.recording.by_default:
            before, self._kept.elsewhere = self._kept.elsewhere, shortages(self._device)
            if before is not None and self._kept.elsewhere > before:
                self._give_up("memory did not suffice elsewhere in the process")
        if self.obstacle is not None:
            self._warn(self.obstacle)

    def run(
        self, name: Hashable, function: Function, inputs: Sequence[Tensor],
        plain: Callable[[], Sequence[Tensor]] | None = None, cut: Part = tuple, static: int = 0,
        left: Part | None = None, compared: Part = tuple,
    ) -> Sequence[Tensor]:  # fmt: skip
        """``cut(function(*inputs))`` by compiled code, or ``plain()`` if there is none.

        Args:
            name: what the function depends on besides its inputs' shapes and this object's
                arguments.
            function: may write into its inputs if doing so twice does no harm.
            inputs: tensors of recurring shapes.
            plain: computes the same results, or the first of them, in another way; by default the
                function as it is.
            cut: selects the wanted part of the function's results.
            static: number of leading inputs whose memory is the same in most calls; what is
                recorded is recorded for it.
            left: selects what is wanted once the code has been checked; None for ``cut``.
            compared: makes of wanted results what code is checked by: integers are to be equal,
                other numbers up to rounding.
        """
        job = _Job(name, function, inputs, plain, cut, static, left or cut, compared)
        return self.spared(partial(self._run, job))

    def spared(self, function: Callable[[], T]) -> T:
        """Call it; once more if memory does not suffice, without all that is recorded, and with
        steps of this call as they are."""
        try:
            return function()
        except torch.OutOfMemoryError as error:
            if not self.records or self.counts["shortages"]:
                raise
            short = first_line(error)
        # What has run is gone with the error.
        self.drop_all()
        self._give_up(f"memory does not suffice beside records ({short})")
        return function()

    def drop_all(self) -> None:
        """Free the memory of what was recorded for the model, and of buffers kept for it."""
        with _COMPILING:
            self._kept.drop_records()
            self._kept.shortages += not self.counts["shortages"]
        self.counts["shortages"] += 1
        free_memory(self._device)

    def _give_up(self, why: str) -> None:
        """Run the call's steps as they are from now on; those of all calls, and without what was
        recorded, where nobody has asked for it."""
        self.obstacle = why
        self._warn(why)
        if self.recording.by_default:
            self.recording.end(why)
            self._kept.drop_records()

    def _run(self, job: _Job) -> Sequence[Tensor]:
        key = self._key(job)
        known = self._found(key)
        if known is not None and known.is_right_for(job):
            self.counts["runs"] += 1
            self.recording.ran(key, self.records)
            return self._call(known, job.inputs, job.left)
        never = self.obstacle is not None or (self._kind, job.name) in self._kept.refused
        if never or (known is None and not self._is_due(key)):
            self.recording.ran(key, False)
            return job.as_it_is()
        with _COMPILING:
            graph = self._found(key)
            if graph is not None and graph.is_right_for(job):  # another thread was faster
                return job.as_it_is()
            with self.recording.making():
                return self._checked(job, graph)

    def _is_due(self, key: Hashable) -> bool:
        """Whether code is made now for a key that has none."""
        return not self.records or self.recording.is_due(key, self._kept.last_used)

    def _checked(self, job: _Job, graph: Graph | None) -> Sequence[Tensor]:
        """A job's results without code, which is made, or checked once more."""
        kept, written = self._kept, job.inputs[: job.static]
        own: Sequence[Tensor] = ()
        before: list[Tensor] = []
        self.counts["checked"] += 1
        try:
            own = job.function(*job.inputs)  # also makes what is made once
            graph = graph or self._made(job)
            before = [one.clone() for one in written]
            results = self._call(graph, job.inputs, tuple)
            # After it has agreed once, only what is left is compared.
            part = job.left if graph.seen else job.cut
            problem = difference(
                graph.tolerance, [*job.compared(part(own)), *before],
                [*job.compared(part(results)), *written],
            )  # fmt: skip
            del results
        except torch.OutOfMemoryError as error:
            if not self.records:
                raise
            problem, graph = f"it does not fit into memory ({first_line(error)})", None
        except Exception as error:  # a model, tracer or compiler may raise anything
            logger.debug("compiling %s", job.name, exc_info=True)
            problem, graph = f"{type(error).__name__}: {first_line(error)}", None
        if problem is not None:  # code may have written to any place
            for one, value in zip(written, before):
                one.copy_(value)
        del before
        # At last: it overwrites what the check has written, and may raise the same error.
        found = job.as_it_is()
        if graph is not None:
            wanted = job.cut(own)[: len(found)]
            problem = problem or difference(graph.tolerance, found, wanted)
            if problem is None:
                if not graph.seen and isinstance(graph.code, Captured):
                    graph.code.drop_all_but(job.left)
                graph.seen.add(job.changing())
                graph.checks -= 1
            else:
                graph.checks += 1
            kept.graphs[self._key(job)] = graph
            kept.trim(self._limits.most)
        if problem is not None and (graph is None or self._is_wrong(graph)):
            kept.refuse((self._kind, job.name))
            if self.recording.by_default:  # what has gone wrong once is not tried with others
                self._give_up(problem)
            else:
                self._warn(problem)
        return found

    def _is_wrong(self, graph: Graph) -> bool:
        """Whether code that has just differed has done so too often."""
        return self._limits.tries == 1 or graph.checks == CHECKS + self._limits.tries

    @property
    def kind(self) -> Hashable:
        """Steps whose code is of one kind may be those of one batch."""
        return self._kind, self._limits

    @property
    def made(self) -> int:
        """Number of functions that this call has compiled or recorded."""
        return self.counts["made"]

    @property
    def prepared(self) -> int:
        """Number of times that this call has made or checked one."""
        return self.counts["checked"]

    def beside(self, model: nn.Module, kind: Hashable) -> Graphs | None:
        """Those of another model that drafts in the same call; None if it is on another device."""
        if placement(model).device != self._device:
            return None
        own = Graphs(model, self.config, kind, self.recording)
        own.counts, own.tell = self.counts, self.tell
        if own.obstacle is None:
            own.obstacle = self.recording.of_another(model, fingerprint(model))
        return own

    def admit(self, model: nn.Module) -> Hashable:
        """Allow code to contain another model; returns what such code depends on, None if it cannot
        contain this one."""
        other = self.beside(model, "")
        if other is None or other.obstacle is not None:
            return None
        self._places = joined(self._places, self._places_of(model, "admitted"))
        return other._kind

    def get(self, name: Hashable, inputs: Sequence[Tensor], static: int = 0) -> Graph | None:
        """The code for this key that has been checked; None if there is none, or if it is for other
        weights."""
        job = _Job(name, tuple, inputs, None, tuple, static, tuple, tuple)
        graph = self._found(self._key(job))
        return None if graph is None or graph.checks else graph

    def _found(self, key: tuple[Hashable, ...]) -> Graph | None:
        """The same, checked or not."""
        if self.recording.is_slow(key):
            self._kept.graphs.pop(key, None)
        graph = self._kept.graphs.get(key)
        if graph is None or graph in self._valid:
            return graph
        if not self._holds(graph):
            return None
        self._valid.add(graph)
        return graph

    def _holds(self, graph: Graph) -> bool:
        """Whether what code contains is where it was."""
        none: frozenset[Hashable] = frozenset()
        return all(held <= self._places.get(at, none) for at, held in graph.baked.items())

    @staticmethod
    def _places_of(model: nn.Module, whose: str) -> Places:
        return places(chain(model.parameters(), model.buffers()), whose)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Allow code to contain these tensors, like the model's. Different values must be in
        different tensors."""
        self._places = joined(self._places, places(tensors, "held"))

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of finite values: an earlier call's if possible, as CUDA graphs depend on memory
        addresses."""
        nbytes = math.prod(shape) * dtype.itemsize
        why = self._limits.why_not(shape, nbytes, memory_size(device))
        if why is not None:  # so is a buffer that the cache grows into
            self.obstacle = why
            self._warn(why)
        with _COMPILING:
            spare = self._kept.spare
            alike = [
                index for index, one in enumerate(spare)
                if (tuple(one.shape), one.dtype, one.device) == (shape, dtype, device)
            ]  # fmt: skip
            if alike:
                # The fewer are used, and in the same order, the fewer records are made.
                ages = self._kept.ages
                index = min(alike, key=lambda index: ages.get(spare[index].data_ptr(), 0))
                take_turns(device, spare[index])
                return spare.pop(index)
            made = self.spared(partial(zeros, shape, dtype, device))
            self._kept.ages[made.data_ptr()] = next(self._kept.numbers)
            return made

    def sized(self, slots: int) -> int:
        """See :class:`hf_spec.cache.attention.Allocator`."""
        return bucket(slots, self._limits.parts)

    def spare(self, buffers: Sequence[Tensor], beside: int | None = None) -> None:
        """Keep these buffers for later use, and those of before as long as all take no more than
        twice as much as a call has had at once, or :data:`SPARE`: calls of other lengths, and
        batches of other sizes, use others. ``beside``: see
        :class:`hf_spec.cache.attention.Allocator`."""
        if not buffers or (self.obstacle is not None and self.recording.by_default):
            return
        with _COMPILING:
            for device in {buffer.device for buffer in buffers}:
                take_turns(device)
            kept, own = self._kept, sum(buffer.nbytes for buffer in buffers)
            kept.spare[:0] = buffers
            kept.had = own if beside is None else max(kept.had, own + beside)
            room = 2 * kept.had
            room = max(room, SPARE) if self.records else room
            room = room if self._limits.cache is None else self._limits.cache
            while sum(buffer.nbytes for buffer in kept.spare) > room:
                del kept.spare[-1]

    def details(self) -> dict[str, Any]:
        """Entries for ``SpecStats.details``: what the steps' code is, code that this call has made
        and that is kept for the model, how often it ran, and why some steps ran without."""
        kept = self._kept
        how = " and ".join(["compiled"] * self.compiles + ["recorded"] * self.records)
        return {
            "how": how, "made": self.made, "kept": len(kept.graphs), "runs": self.counts["runs"],
            "refused": sorted(kept.warned), **self.recording.told(),
        }  # fmt: skip

    def _key(self, job: _Job) -> tuple[Hashable, ...]:
        if not self.records:
            return self._shapes(job)
        static, changing = job.inputs[: job.static], job.inputs[job.static :]
        places = tuple(map(Tensor.data_ptr, static))
        return self._kind, job.name, self._layouts(static), places, *map(shape_of, changing)

    def _layouts(self, static: Sequence[Tensor]) -> int:
        """A number for the layouts of these. To look at all takes as long as many a kernel, and
        they are mostly those of the step before."""
        before, number = self._static.get(len(static), ([], 0))
        if before and all(one() is other for one, other in zip(before, static)):
            return number
        layouts = tuple(map(shape_of, static))
        number = self._kept.layouts.setdefault(layouts, next(self._kept.numbers))
        self._static[len(static)] = [ref(one) for one in static], number
        return number

    def _shapes(self, job: _Job) -> tuple[Hashable, ...]:
        """What compiled code is kept by."""
        return self._kind, job.name, *map(shape_of, job.inputs)

    def _call(
        self, graph: Graph, inputs: Sequence[Tensor],
        cut: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    ) -> Sequence[Tensor]:  # fmt: skip
        graph.used = time.monotonic()
        if not self.records:
            return cut(graph.code(*inputs))
        with RUNNING:
            take_turns(self._device)
            return [result.clone() for result in cut(graph.code(*inputs))]

    def _made(self, job: _Job) -> Graph:
        """Compiled code, a record, or a record of compiled code."""
        began = time.monotonic()
        try:
            return self._make(job)
        finally:
            self.counts["made"] += 1
            logger.info("compiled code no. %d, %.0f s", self.made, time.monotonic() - began)
            if self.tell is not None:
                self.tell(self.made)

    def _make(self, job: _Job) -> Graph:
        kept, key = self._kept, self._shapes(job)
        made = kept.compiled.get(key)
        if made is None or not self._holds(made):
            how = self._compile if self.compiles else self._watched
            made = how(job.function, job.inputs)
        if self.compiles:
            kept.compiled[key] = made
        if not self.records:
            return replace(made, seen=set())
        if kept.recorder is None:
            kept.recorder = RECORDERS[self._device.type](self._device)
        self.recording.begins(self.model)
        given = job.inputs, job.static, kept.shared, job.left
        code = Captured(kept.recorder, made.code, *given)
        return replace(made, code=code, seen=set())

    def _watched(self, function: Function, inputs: Sequence[Tensor]) -> Graph:
        """A function as it is, if it can be recorded."""
        with capturing(), Watch(inputs) as watch:
            function(*inputs)
        baked, others = self._sorted(plain_tensors(watch.read.values()))
        return Graph(function, baked, tolerance(watch.dtypes), others)

    def _compile(self, function: Function, inputs: Sequence[Tensor]) -> Graph:
        with capturing():
            tracer = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)
            captured: Any = tracer(*inputs)
        names = dict.fromkeys(node.target for node in captured.graph.find_nodes(op="get_attr"))
        constants = [getattr(captured, name) for name in names]
        baked, _ = self._sorted(x for x in constants if isinstance(x, Tensor))
        values = [node.meta.get("val") for node in captured.graph.nodes]
        dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
        if self.records:
            with Watch(inputs):
                captured(*inputs)
        how = self._backend, self._options
        parts = self._kept.parts.setdefault(self._kind[2:], compiled_parts(*how))
        code = code_for(captured, *how, parts)
        return Graph(code, baked, tolerance(dtypes), code)

    def _sorted(self, constants: Iterable[Tensor]) -> tuple[Places, list[Tensor]]:
        """Of what a function reads besides its inputs: the model's tensors, and the others."""
        tensors = [(memory_of(one), one) for one in constants]
        others = [one for at, one in tensors if at not in self._places]
        for one in others:
            if one.is_floating_point() and one.numel() > SMALL:
                raise ValueError(
                    f"it reads numbers {tuple(one.shape)} that are neither its inputs nor the "
                    "model's, and may change"
                )
        known = {at: self._places[at] for at, _ in tensors if at in self._places}
        return known, others

    def _warn(self, why: str) -> None:
        if why not in self._kept.warned:
            self._kept.warned.add(why)
            logger.log(
                logging.INFO if self.recording.by_default else logging.WARNING,
                "%s: steps that should be %s run as they are: %s", type(self.model).__name__,
                "compiled" if self.compiles else "recorded", why,
            )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# What a step does besides the model's forward, as functions of tensors: recorded steps are one
# program, from the forward to the next step's trees.


class DraftProgram(NamedTuple):
    """Takes what a step has committed and grows the next trees.

    Attributes:
        key: what it depends on besides the shapes of its inputs.
        buffers: tensors in fixed memory, which it may write into if doing so twice does no harm.
        inputs: all others that change from step to step.
        function: given :attr:`buffers` and :attr:`inputs`, the step's result, what the drafter
            reads, and what the next tokens will be sampled with (see
            :class:`hf_spec.core.verify.VerifyProgram`), returns the packed trees
            (:meth:`Tree.packed`), and what the drafter gets besides.
        depth: depth of the trees.
        reads_cache: whether it reads the model's KV cache, where accepted nodes must be in their
            places.
    """

    key: Hashable
    buffers: Sequence[Tensor]
    inputs: Sequence[Tensor]
    function: Callable[[Sequence[Tensor], StepResult, Read, Tensor | None], tuple[Tensor, ...]]
    depth: int
    reads_cache: bool = False

    def run(
        self, graphs: Graphs | None, result: StepResult, read: Read, noise: Tensor | None
    ) -> Sequence[Tensor]:
        """Run it by code of its own, or as it is."""
        own = [*self.buffers, *self.inputs]
        if graphs is None:
            return self.function(own, result, read, noise)
        others = *read, noise

        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = iter(tensors)
            first = [next(given) for _ in own]
            result = StepResult.unpacked(next(given))
            *parts, ahead = (None if one is None else next(given) for one in others)
            return self.function(first, result, Read(*parts), ahead)

        inputs = [*own, result.packed(), *(x.contiguous() for x in others if x is not None)]
        key = "draft", self.key, *(one is None for one in others)
        return graphs.run(
            key, function, inputs, static=len(self.buffers),
            compared=partial(self.compared, graphs=graphs),
        )  # fmt: skip

    @staticmethod
    def compared(found: Sequence[Tensor], graphs: Graphs) -> list[Tensor]:
        """What is checked of the results, of which the first are packed trees: the nodes, and how
        likely they are. Compiled code may take others of equally likely ones, as there are many in
        16 bits."""
        *nodes, likely = found[0].chunk(4, dim=1)
        taken = [] if graphs.compiles else [torch.cat(nodes, dim=1).to(torch.int64)]
        return [*taken, likely, *found[1:]]
