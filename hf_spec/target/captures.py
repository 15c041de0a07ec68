"""Functions recorded by a CUDA graph: the kernels that they launch, launched at once.

A graph is a list of kernels and their addresses. What is recorded runs on tensors at the addresses
it was recorded with; Python code does not run again. So a function may read nothing on the host,
and all that changes from run to run must be among its inputs.
"""

import gc
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

import torch
from packaging.version import Version
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from hf_spec.threads import RUNNING

#: The backend, by the name that ``torch.compile`` has for it, that records and compiles nothing.
CUDA_GRAPHS = "cudagraphs"
#: Bytes from which results of records are in memory that all share. Where the host reads logits,
#: each record would keep its own: 262 MB for 16 rows of 64 nodes and 128k tokens in 16 bits.
LARGE = 2**20
#: The stream of each device that has used such memory last.
_STREAMS: dict[torch.device, Any] = {}
#: How often memory has not sufficed, by the device's number.
_SHORTAGES = Counter[int]()
#: Operations that copy between devices; others take numbers of the host by value.
_COPIES = ("aten::_to_copy", "aten::copy_")
#: Operations that make the host wait where an index is a mask.
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")

#: Products of experts: PyTorch's, and a loop over them, which is an operation of Transformers.
_GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")


class Recorder(Protocol):
    """Records functions of one model, one at a time."""

    def __init__(self, device: torch.device): ...

    def record(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> tuple[Callable[[], Any], tuple[Tensor, ...]]:
        """What runs ``function(*inputs)`` again on the same memory, and its results there, which
        any run of what this object has recorded may overwrite."""


class CudaGraphs:
    """Records by CUDA graphs, which share a pool of memory.

    Their results stay in it; all else is free once a graph has run, so no two of them may run at
    the same time, and what a graph has written must be copied before another one runs.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A context of a capture, in which no garbage is collected: a graph that is destroyed
        meanwhile, such as one of a model that is gone, would end the capture."""
        current, collects = torch.cuda.current_stream(self.device), gc.isenabled()
        self.stream.wait_stream(current)
        gc.disable()
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            if collects:
                gc.enable()
            current.wait_stream(self.stream)

    def record(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> tuple[Callable[[], Any], tuple[Tensor, ...]]:
        with suppress(torch.OutOfMemoryError):
            return self._record(function, inputs)
        # Meanwhile PyTorch frees nothing of what it keeps for later.
        torch.cuda.empty_cache()
        return self._record(function, inputs)

    def _record(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> tuple[Callable[[], Any], tuple[Tensor, ...]]:
        if not self._graphs:  # a pool ends with the last of its graphs
            self.pool = torch.cuda.graph_pool_handle()
            # Nothing else runs on it. The workspace that cuBLAS gets for a stream is then memory of
            # the pool: PyTorch drops it when the first of the stream's graphs goes, and memory
            # outside would be freed, to which the others write.
            self.stream = torch.cuda.Stream(self.device)
            # It may be one of a few that PyTorch gives out in turn, and so have a workspace.
            torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        with self._aside():
            runs = ended = False
            try:
                # What the first capture makes for random numbers, later ones write to.
                with torch.inference_mode(False):
                    # Other threads may allocate memory, and wait for their work, meanwhile.
                    graph.capture_begin(self.pool, capture_error_mode="thread_local")
                runs = True
                results = function(*inputs)
                runs = False
                graph.capture_end()
                ended = True
            except BaseException:
                if runs:
                    with suppress(RuntimeError):
                        graph.capture_end()
                        ended = True
                self._recover(ended)
                raise
        self._graphs.add(graph)
        return graph.replay, results

    def _recover(self, ended: bool) -> None:
        """Undo what a capture that has failed leaves behind: unless it has ``ended`` as it should,
        an allocator that still serves it, and a reference to the pool; and random numbers that are
        still drawn for it, for which earlier graphs wait, too."""
        # From 2.14 on, PyTorch does so where the graph is destroyed; 2.13 forgets the reference.
        if not ended and Version(torch.__version__).release < (2, 14):
            for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
                with suppress(RuntimeError):
                    undo(self.stream.device_index, self.pool)
        graph = torch.cuda.CUDAGraph()
        with suppress(RuntimeError), torch.inference_mode(False):
            number = torch.zeros(1, device=self.device)
            graph.capture_begin(capture_error_mode="thread_local")
            number.zero_()
            graph.capture_end()


#: What records on a type of device.
RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaGraphs}


def check_recording(device: torch.device, options: dict[str, Any]) -> None:
    """Raise ValueError if functions cannot be recorded there, or if a compiler has options."""
    if device.type not in RECORDERS:
        raise ValueError(
            f"CompileConfig(backend={CUDA_GRAPHS!r}) for a model on {device}: CUDA graphs need a "
            "CUDA device. Give another backend, such as 'inductor', or no compile_config."
        )
    if options:
        raise ValueError(
            f"CompileConfig(backend={CUDA_GRAPHS!r}, options={options}): this backend compiles "
            "nothing and has no options. Leave them out."
        )


def take_turns(device: torch.device, *taken: Tensor) -> None:
    """Let what this thread's stream runs next wait for the stream that has used shared memory last,
    if that is another one. Nobody else gets the memory of tensors that are ``taken`` over, however
    a call ends, before this stream is done with them, though they may come from another one."""
    if device.type != "cuda":
        return
    stream = torch.cuda.current_stream(device)
    with RUNNING:
        last = _STREAMS.get(device)
        if last is not None and last != stream:
            stream.wait_stream(last)
        _STREAMS[device] = stream
    for one in taken:
        one.record_stream(stream)


def shortages(device: torch.device) -> int:
    """How often memory has not sufficed on a device, whatever for, since this was first asked."""
    if device.type == "cuda":
        _note_shortages()
    return _SHORTAGES[device.index or 0]


@cache
def _note_shortages() -> None:
    """Have PyTorch count them: more must not be done within its allocator."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(lambda device, *_: _SHORTAGES.update([device]))


def free_memory(device: torch.device) -> None:
    """Let PyTorch give back what it keeps for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def memory_size(device: torch.device) -> int | None:
    """Bytes of a device's memory; None where that is the host's."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


class Captured:
    """A recorded function: copies its inputs to where they were when it was recorded, and runs.

    Args:
        function: runs twice; the first time makes what is made once, such as compiled code.
        inputs: the first ``static`` ones are read and written where they are, the others are
            copied.
        shared: where records that do not run at the same time have their copied inputs and
            :data:`LARGE` results, by shape.
        left: selects what is read of the results in the long run.
    """

    def __init__(
        self, recorder: Recorder, function: Callable[..., tuple[Tensor, ...]],
        inputs: Sequence[Tensor], static: int, shared: MutableMapping[Hashable, Tensor],
        left: Callable[[Sequence[Tensor]], Sequence[Tensor]] = tuple,
    ):  # fmt: skip
        with capturing():
            results = function(*inputs)
        pairs = zip(results, left(results), strict=True)
        large = [at for at, (one, part) in enumerate(pairs) if part.numel() and one.nbytes >= LARGE]
        kinds = [torch.empty_like(results[at], device="meta") for at in large]
        devices = [results[at].device for at in large]
        del results, pairs
        with RUNNING:
            for device in {one.device for one in inputs}:
                take_turns(device)
            fixed = _places_for(inputs[static:], shared)
            #: Where large results are.
            self._large = _places_for(kinds, shared, devices)
            for one, value in zip(fixed, inputs[static:]):
                one.copy_(value)

            def placed(*given: Tensor) -> tuple[Tensor, ...]:
                found = [*function(*given)]
                for at, place in zip(large, self._large):
                    found[at] = place.copy_(found[at])
                return tuple(found)

            with capturing():
                self._replay, self._results = recorder.record(placed, [*inputs[:static], *fixed])
        #: The memory of static inputs, which may be freed.
        self._static = [StorageWeakRef(one.untyped_storage()) for one in inputs[:static]]
        #: Copied at once if of one dtype.
        self._fixed: list[tuple[list[int], list[Tensor]]] = []
        for dtype in dict.fromkeys(one.dtype for one in fixed):
            of = [at for at, one in enumerate(fixed) if one.dtype == dtype and one.numel()]
            self._fixed.append(([static + at for at in of], [fixed[at] for at in of]))

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for places, tensors in self._fixed:
            if tensors:
                torch._foreach_copy_(tensors, [inputs[at] for at in places])
        self._replay()
        return self._results

    def drop_all_but(self, left: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
        """Free the memory of results of which this leaves nothing, for what other records do: what
        a run writes there is read by nobody. As large as logits, they would fill a GPU."""
        pairs = zip(left(self._results), self._results, strict=True)
        self._results = tuple(all_of if part.numel() else part.clone() for part, all_of in pairs)

    @property
    def is_valid(self) -> bool:
        """Whether its static inputs exist."""
        return not any(one.expired() for one in self._static)


def _places_for(
    tensors: Sequence[Tensor], shared: MutableMapping[Hashable, Tensor],
    devices: Sequence[torch.device] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Where these are copied to: what other records have for tensors of the same layouts. Places of
    results, whose ``devices`` are given, are none of inputs, from which they are computed."""
    found, used = [], Counter[Hashable]()
    for one, device in zip(tensors, devices or [one.device for one in tensors]):
        kind = shape_of(one), device, devices is not None
        key = kind, used[kind]
        used[kind] += 1
        place = shared.get(key)
        if place is None:
            with torch.inference_mode(False):  # written to in both modes
                place = shared[key] = torch.empty_like(one, device=device)
        found.append(place)
    return found


class Unrepeatable(RuntimeError):
    """A function that would not do the same again."""


class Watch(TorchDispatchMode):
    """Refuses operations that cannot be recorded, and notes what a function reads and computes.

    Attributes:
        read: tensors, by their memory, that are read and are neither inputs nor results of
            operations.
        dtypes: of all results.
    """

    def __init__(self, inputs: Sequence[Tensor]):
        super().__init__()
        self.read: dict[Any, Tensor] = {}
        self.dtypes: set[torch.dtype] = set()
        self._made = set(map(memory_of, inputs))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = _tensors((args, kwargs))
        if (why := _obstacle(func, given)) is not None:
            raise Unrepeatable(f"{why} ({func})")
        for one in given:
            if one.numel() and (memory := memory_of(one)) not in self._made:
                self.read.setdefault(memory, one)
        results = func(*args, **(kwargs or {}))
        made = _tensors(results)
        if (why := _moved(func, given, made)) is not None:
            raise Unrepeatable(f"{why} ({func})")
        self._made.update(memory_of(one) for one in made)
        self.dtypes.update(one.dtype for one in made)
        return results


def memory_of(tensor: Tensor) -> Any:
    """A tensor's memory, which code that contains it refers to; the values may change."""
    try:
        place: Any = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # subclasses that cannot be taken apart
        place = id(tensor)
    return place, tensor.device


#: Tensors by their memory, each with its layout there.
Places = dict[Hashable, frozenset[Hashable]]


def places(tensors: Iterable[Tensor], whose: str = "") -> Places:
    """Which of these are where in memory; a part of a larger tensor may move within it."""
    found = defaultdict(set)
    for number, one in enumerate(plain_tensors(tensors)):
        found[memory_of(one)].add((whose, number, _layout(one)))
    return {memory: frozenset(held) for memory, held in found.items()}


def joined(one: Places, other: Places) -> Places:
    """All that these hold."""
    return {at: one.get(at, frozenset()) | other.get(at, frozenset()) for at in {**one, **other}}


def _layout(tensor: Tensor) -> Hashable:
    """Where in its memory a tensor is."""
    try:
        strides = tensor.stride()
        return tensor.shape, strides, tensor.storage_offset(), tensor.dtype
    except (RuntimeError, NotImplementedError):  # sparse tensors
        return tensor.shape, tensor.dtype


def shape_of(tensor: Tensor) -> Hashable:
    """The layout that code is compiled for; strides of dimensions of size 1 do not matter."""
    strides = tuple(step for step, size in zip(tensor.stride(), tensor.shape) if size > 1)
    return tensor.shape, strides, tensor.dtype, tensor.device


def plain_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """These, and of quantized weights the tensors that they consist of, as capturing sees them."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            parts = (getattr(tensor, name) for name in names)
            # A sharded tensor also has the mesh of its devices.
            yield from plain_tensors(part for part in parts if isinstance(part, Tensor))
        else:
            yield tensor


@contextmanager
def capturing() -> Iterator[None]:
    """A context in which a function runs once to be captured. Silences torch's log of operations
    that cannot be, as the error reports them."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    # Weights that autocast has cast must not get into captured code, nor out of it.
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        log.disabled = disabled
        torch.clear_autocast_cache()


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _obstacle(func: Any, given: Sequence[Tensor]) -> str | None:
    """Why an operation on these tensors cannot be recorded; None if no reason is known."""
    name = func.name().partition(".")[0]
    if torch.Tag.data_dependent_output in func.tags:
        return "the host reads what the device has computed"
    if name in _INDEXED:
        writes = name != "aten::index"
        indices = given[1:-1] if writes else given[1:]
        masks = any(one.dtype in (torch.bool, torch.uint8) for one in indices)
        # To write one number to all that a mask selects is a fill.
        return (
            "a shape depends on data" if masks and not (writes and given[-1].numel() == 1) else None
        )
    if torch.Tag.dynamic_output_shape in func.tags:
        return "a shape depends on data"
    if name in _GROUPED and _reads_sizes(name, given):
        return "the host reads how many tokens each expert has"
    return None


def _reads_sizes(name: str, given: Sequence[Tensor]) -> bool:
    """Whether a grouped product on a GPU reads sizes on the host: kernels that do not are for
    bfloat16 and two generations of GPUs."""
    device = given[0].device
    if device.type != "cuda":
        return False
    known = all(one.dtype == torch.bfloat16 for one in given[:2]) and name == _GROUPED[0]
    return not (known and torch.cuda.get_device_capability(device)[0] in (9, 10))


def _moved(func: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> str | None:
    """How an operation brings numbers from one device to another; None if it does not."""
    name = func.name().partition(".")[0]
    if name in _COPIES and len({one.device for one in (*given, *made)}) > 1:
        return "numbers are copied between devices"
    if name == "aten::lift_fresh" and (made[0].ndim or made[0].device.type != "cpu"):
        return "numbers are copied from the host"
    return None
