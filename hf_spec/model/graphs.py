"""Compiled and recorded functions of a model, kept between calls.

A function is compiled for its inputs' shapes, unless the backend is ``cudagraphs``; parts of graphs
that differ in one size share code (:mod:`.any_size`). It is captured by running it on tensors
without data (`torch.fx`): all Python code, hooks and context variables included, runs then, and
only tensor operations remain. A compiler gets these without guards: what guards would check is part
of the key under which the code is kept (:meth:`Graphs.get`), and the model's tensors are checked
once per call.

On CUDA the kernels that the function launches, or its compiled code, are recorded
(:mod:`.captures`), for these places in memory. Before anything is used, its results are compared
with the function's. Rounding can make another choice, such as of one of two experts that are
equally likely: code that differs is made again, and refused if it goes on (:data:`TRIES`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import CompileConfig

from hf_spec.cache.attention import zeros
from hf_spec.core.checks import first_line
from hf_spec.core.memory import RUNNING, memory
from hf_spec.model.any_size import AnySize
from hf_spec.model.captures import (
    CUDA_GRAPHS,
    RECORDERS,
    Captured,
    Recorder,
    Watch,
    capturing,
    check_recording,
    memory_of,
    places,
    plain_tensors,
    take_turns,
)
from hf_spec.model.compilers import code_for, compiled_parts, options_of
from hf_spec.model.rounding import difference, tolerance
from hf_spec.modeling_patches.fingerprint import fingerprint
from hf_spec.modeling_patches.weights import placement
from hf_spec.threads import Lock

logger = logging.getLogger(__name__)

#: Number of recorded functions kept per model, whose results and inputs take memory.
MOST = 128
#: Bytes of cache buffers that are kept for a model, where graphs are for places in memory.
SPARE = 2**30
#: How much more often than not code must differ from the function to be refused. Once it has
#: differed, it must agree once more for each time that it has.
TRIES = 3
#: Largest number of elements of a constant in compiled code, such as slopes and scales.
SMALL = 256

#: From tensors to tensors; anything else it reads must be determined by its key.
Function = Callable[..., tuple[Tensor, ...]]


@dataclass(eq=False)
class Graph:
    """Compiled code, or a record, for one key."""

    code: Function
    baked: frozenset[Hashable]  # the model's tensors that it contains, and where in the model
    tolerance: float  # largest relative error that rounding explains
    holds: object = None  # what must exist while it does
    used: float = 0.0  # when it ran last


class _Kept:
    """What is kept for a model: code by key, and what cannot be compiled."""

    def __init__(self) -> None:
        self.graphs: dict[Hashable, Graph] = {}
        self.compiled: dict[Hashable, Graph] = {}  # checked or not; of which records are made
        self.parts: dict[Hashable, AnySize] = {}  # what they consist of, by backend and options
        self.refused: set[Hashable] = set()
        self.doubts: Counter[Hashable] = Counter()  # how much more often than not code has differed
        self.warned: set[str] = set()
        self.spare: list[Tensor] = []
        self.recorder: Recorder | None = None

    def is_right(self, shapes: Hashable, agrees: bool) -> bool:
        """Whether code for these can be used, now that it has been checked once more."""
        doubts = self.doubts[shapes]
        self.doubts[shapes] = max(doubts - 1, 0) if agrees else doubts + 1
        return agrees and not doubts

    def trim(self) -> None:
        """Drop what was recorded for memory that has been freed, and all but what ran last."""
        recorded = [
            (graph.used, key, code.is_valid)
            for key, graph in self.graphs.items()
            if isinstance(code := graph.code, Captured)
        ]
        recorded.sort(key=lambda one: -one[0])
        for place, (_, key, is_valid) in enumerate(recorded):
            if place >= MOST or not is_valid:
                del self.graphs[key]


_COMPILING = Lock()


class Graphs:
    """The compiled functions of a model, for one call.

    Args:
        model: must not change while the call runs.
        config: how to compile. ``fullgraph`` and ``dynamic`` have no effect: graphs are always
            whole and have static shapes; nor has Inductor's use of CUDA graphs.
        kind: what functions depend on besides the model and their own keys.

    Attributes:
        compiles: whether functions are compiled.
        records: whether functions, or their compiled code, are recorded. Inputs and results are
            then in memory that every run of any record overwrites.

    Raises:
        ValueError: if there is no such backend; if it is ``cudagraphs`` and the device has none, or
            options are given; if Inductor's ``freezing`` is on.
    """

    def __init__(self, model: nn.Module, config: CompileConfig, kind: Hashable):
        self.model, self._device = model, placement(model).device
        self.config, self._options, self._backend = config, options_of(config), config.backend
        self.compiles = config.backend != CUDA_GRAPHS
        # A record is for one device.
        split = len({parameter.device for parameter in model.parameters()}) > 1
        self.records = not self.compiles or (self._device.type in RECORDERS and not split)
        if not self.compiles:
            check_recording(self._device, self._options)
        with _COMPILING:
            self._kept: _Kept = memory(model).setdefault("graphs", _Kept())
            self._kept.trim()
        #: What code may contain: memory, and whose it is, as weights may change places.
        self._places = places(chain(model.parameters(), model.buffers()))
        self._valid: WeakSet[Graph] = WeakSet()  # code that contains nothing else
        options = repr(sorted(self._options.items(), key=repr))
        running = fingerprint(model)
        self._kind = kind, running.state, config.backend, options
        #: Of this call: ``made``, code that it has compiled, or tried to, and ``runs`` of what was
        #: there.
        self.counts: Counter[str] = Counter()
        self.tell: Callable[[int], Any] | None = None  # called with this number when it has grown
        self.obstacle = _obstacle(model, running.hooks, self.records)
        if self.obstacle is not None:
            self._warn(self.obstacle)

    def run(
        self, name: Hashable, function: Function, inputs: Sequence[Tensor],
        plain: Callable[[], Sequence[Tensor]], cut: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        static: int = 0, left: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None,
    ) -> Sequence[Tensor]:  # fmt: skip
        """``cut(function(*inputs))`` by compiled code, or ``plain()`` if there is none.

        Args:
            name: what the function depends on besides its inputs' shapes and this object's
                arguments.
            function: may write into its inputs if doing so twice does no harm.
            inputs: tensors of recurring shapes.
            plain: computes the same results, or the first of them, without compiled code; used to
                check new code.
            cut: selects the wanted part of the function's results.
            static: number of leading inputs whose memory is the same in most calls; what is
                recorded is recorded for it.
            left: selects what is wanted once the code has been checked; None for ``cut``.
        """
        known = self.get(name, inputs, static)
        if known is not None:
            self.counts["runs"] += 1
            return self._call(known, inputs, left or cut)
        expected, kept = plain(), self._kept
        if self.obstacle is not None or (self._kind, name) in kept.refused:
            return expected
        with _COMPILING:
            if self.get(name, inputs, static) is not None:  # another thread was faster
                return expected
            began, graph, shapes = time.monotonic(), None, self._shapes(name, inputs)
            try:
                graph = self._make(name, function, inputs, static)
                found = self._call(graph, inputs, cut)[: len(expected)]
                problem = difference(graph.tolerance, expected, found)
            except torch.OutOfMemoryError as error:
                if not self.records:
                    raise
                problem, graph = f"it does not fit into memory ({first_line(error)})", None
            except Exception as error:  # a model, tracer or compiler may raise anything
                logger.debug("compiling %s", name, exc_info=True)
                problem, graph = f"{type(error).__name__}: {first_line(error)}", None
            self.counts["made"] += 1
            logger.info("compiled code no. %d, %.0f s", self.made, time.monotonic() - began)
            if self.tell is not None:
                self.tell(self.made)
            if graph is not None and kept.is_right(shapes, problem is None):
                if left is not None and isinstance(graph.code, Captured):
                    graph.code.drop_all_but(left)
                kept.graphs[self._key(name, inputs, static)] = graph
                kept.trim()
            elif graph is None or kept.doubts[shapes] == TRIES:
                assert problem is not None
                kept.refused.add((self._kind, name))
                kept.compiled.pop(shapes, None)
                self._warn(problem)
        return plain()  # overwrites what the check has written

    @property
    def made(self) -> int:
        """Number of functions that this call has compiled or recorded."""
        return self.counts["made"]

    def beside(self, model: nn.Module, kind: Hashable) -> Graphs | None:
        """Those of another model that drafts in the same call; None if it is on another device."""
        if placement(model).device != self._device:
            return None
        own = Graphs(model, self.config, kind)
        own.counts, own.tell = self.counts, self.tell
        return own

    def admit(self, model: nn.Module) -> Hashable:
        """Allow code to contain another model; returns what such code depends on, None if it cannot
        contain this one."""
        other = self.beside(model, "")
        if other is None or other.obstacle is not None:
            return None
        self._places = {**other._places, **self._places}
        return other._kind

    def get(self, name: Hashable, inputs: Sequence[Tensor], static: int = 0) -> Graph | None:
        """The code for this key; None if there is none, or if it is for other weights."""
        graph = self._kept.graphs.get(self._key(name, inputs, static))
        if graph is None or graph in self._valid:
            return graph
        if not graph.baked <= self._places.items():
            return None
        self._valid.add(graph)
        return graph

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Allow code to contain these tensors, like the model's. Different values must be in
        different tensors."""
        self._places = {**places(tensors), **self._places}

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of finite values: an earlier call's if possible, as CUDA graphs depend on memory
        addresses."""
        with _COMPILING:
            for index, one in enumerate(self._kept.spare):
                if (tuple(one.shape), one.dtype, one.device) == (shape, dtype, device):
                    take_turns(device, one)
                    return self._kept.spare.pop(index)
        return zeros(shape, dtype, device)

    def spare(self, buffers: Sequence[Tensor]) -> None:
        """Keep these buffers for later calls, and those of earlier ones as long as all take no more
        than twice as much as these, or :data:`SPARE`: calls of other lengths use others."""
        if not buffers:
            return
        with _COMPILING:
            for device in {buffer.device for buffer in buffers}:
                take_turns(device)
            # In front, in their order: the next call finds each where this one had it.
            self._kept.spare[:0] = buffers
            room = 2 * sum(buffer.nbytes for buffer in buffers)
            room = max(room, SPARE) if self.records else room
            while sum(buffer.nbytes for buffer in self._kept.spare) > room:
                del self._kept.spare[-1]

    def details(self) -> dict[str, Any]:
        """Entries for ``SpecStats.details``: what the steps' code is, code that this call has made
        and that is kept for the model, how often it ran, and why some steps ran without."""
        kept = self._kept
        how = " and ".join(["compiled"] * self.compiles + ["recorded"] * self.records)
        return {
            "how": how, "made": self.made, "kept": len(kept.graphs), "runs": self.counts["runs"],
            "refused": sorted(kept.warned),
        }  # fmt: skip

    def _key(self, name: Hashable, inputs: Sequence[Tensor], static: int) -> Hashable:
        if not self.records:
            return self._shapes(name, inputs)
        # Those at fixed places are parts of a few buffers, of one shape and batch size.
        places = (tuple(map(Tensor.data_ptr, inputs[:static])), *map(_shape, inputs[:static][:1]))
        return self._kind, name, places, tuple(map(_shape, inputs[static:]))

    def _shapes(self, name: Hashable, inputs: Sequence[Tensor]) -> Hashable:
        """What compiled code is kept by."""
        return self._kind, name, tuple(map(_shape, inputs))

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

    def _make(
        self, name: Hashable, function: Function, inputs: Sequence[Tensor], static: int
    ) -> Graph:
        """Compiled code, a record, or a record of compiled code."""
        kept, key = self._kept, self._shapes(name, inputs)
        made = kept.compiled.get(key)
        if made is None or not made.baked <= self._places.items():
            made = (self._compile if self.compiles else self._watched)(function, inputs)
        if self.compiles:
            kept.compiled[key] = made
        if not self.records:
            return made
        if kept.recorder is None:
            kept.recorder = RECORDERS[self._device.type](self._device)
        with capturing():
            return replace(made, code=Captured(kept.recorder, made.code, inputs, static))

    def _watched(self, function: Function, inputs: Sequence[Tensor]) -> Graph:
        """A function as it is, if it can be recorded."""
        with capturing():
            function(*inputs)  # makes tables that are made once
            with Watch(inputs) as watch:
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

    def _sorted(self, constants: Iterable[Tensor]) -> tuple[frozenset[Hashable], list[Tensor]]:
        """Of what a function reads besides its inputs: the model's tensors, and the others."""
        tensors = [(memory_of(one), one) for one in constants]
        others = [one for at, one in tensors if at not in self._places]
        for one in others:
            if one.is_floating_point() and one.numel() > SMALL:
                raise ValueError(
                    f"it reads numbers {tuple(one.shape)} that are neither its inputs nor the "
                    "model's, and may change"
                )
        known = ((at, self._places[at]) for at, _ in tensors if at in self._places)
        return frozenset(known), others

    def _warn(self, why: str) -> None:
        if why not in self._kept.warned:
            self._kept.warned.add(why)
            logger.warning(
                "%s: steps that should be compiled run as they are: %s", type(self.model).__name__,
                why,
            )  # fmt: skip


def _shape(tensor: Tensor) -> Hashable:
    """The layout that code is compiled for; strides of dimensions of size 1 do not matter."""
    strides = tuple(step for step, size in zip(tensor.stride(), tensor.shape) if size > 1)
    return tensor.shape, strides, tensor.dtype, tensor.device


def _obstacle(model: Any, hooks: Collection[str], records: bool) -> str | None:
    """Why a model with these hooks cannot be compiled, or recorded, at all; None if no reason is
    known."""
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
