"""What is asked of CUDA while a graph is recorded, by a stand-in that notes it."""

import gc
import inspect
import re
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (its operations)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_spec.target import captures
from hf_spec.target.captures import Captured, CudaGraphs, Unrepeatable, Watch, take_turns


class Stream(SimpleNamespace):
    device_index = 0

    def wait_stream(self, other: Any) -> None:
        pass


class Graph:
    """One that fails as :attr:`Cuda.fails` says, with the allocator of :attr:`Cuda.version`."""

    def __init__(self, cuda: Any):
        self._cuda, self._begun, self._ended = cuda, False, False
        self._pool: str | None = None

    def capture_begin(self, pool: str = "its own", capture_error_mode: str = "") -> None:
        assert capture_error_mode == "thread_local"
        cuda, self._pool = self._cuda, pool
        cuda.log.append(f"{pool} on {cuda.current.name}")
        cuda.uses[pool] += 1
        cuda.served.add(pool)
        self._fail("begins")
        self._begun = True

    def capture_end(self) -> None:
        if not self._begun:
            raise RuntimeError("capture_end() called before capture_begin()")
        if self._cuda.version < (2, 13):
            self._fail("ends")
        self._cuda.served.remove(self._pool)
        self._fail("ends")
        self._ended = True
        self._cuda.log.append("captured")

    def _fail(self, when: str) -> None:
        if self._cuda.fails == when:
            self._cuda.fails = ""
            raise RuntimeError("CUDA error: operation failed due to a previous error")

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        if self._ended or (self._pool is not None and self._cuda.version >= (2, 14)):
            self._cuda.served.discard(self._pool)
            self._cuda.uses[self._pool] -= 1


class Cuda:
    """Stands for ``torch.cuda``.

    Attributes:
        current: the stream that work goes to.
        log: what has been called, in order.
        uses: references to each pool.
        served: pools from which memory is taken.
        fails: whether the next capture fails when it "begins", or, as after an illegal operation,
            when it "ends".
        version: of PyTorch.
    """

    def __init__(self) -> None:
        self.current, self.log, self.fails = Stream(name="main"), list[str](), ""
        self.uses, self.served, self.version = Counter[str](), set[str](), (2, 11)
        self.numbers = count(1)

    def graph_pool_handle(self) -> str:
        return f"pool {next(self.numbers)}"

    def Stream(self, device: Any) -> Stream:
        return Stream(name=f"stream {next(self.numbers)}")

    def current_stream(self, device: Any) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def empty_cache(self) -> None:
        self.log.append("caches emptied")

    def CUDAGraph(self) -> Graph:
        return Graph(self)

    def _cuda_clearCublasWorkspaces(self) -> None:
        self.log.append("workspaces cleared")

    def _cuda_endAllocateToPool(self, device: int, pool: str) -> None:
        if pool not in self.served:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.served.remove(pool)

    def _cuda_releasePool(self, device: int, pool: str) -> None:
        self.uses[pool] -= 1


#: What is not public of a PyTorch for CUDA. One for CPUs has some, as dummies.
PRIVATE = (
    "_cuda_attach_out_of_memory_observer", "_cuda_clearCublasWorkspaces",
    "_cuda_endAllocateToPool", "_cuda_releasePool",
)  # fmt: skip


@pytest.mark.skipif(torch.version.cuda is None, reason="a PyTorch for CPUs: make test-names")
def test_names_that_are_not_public() -> None:
    """They are in a build for CUDA, and take what they are called with here."""
    taken = {"_cuda_endAllocateToPool": 2, "_cuda_releasePool": 2}
    for name in PRIVATE:
        function = getattr(torch._C, name)
        said = re.search(r"\((.*)\) ->", function.__doc__ or "")
        if said and name in taken:
            assert len(said[1].split(", arg")) == taken[name], function.__doc__


def test_names_of_a_graph() -> None:
    assert {*re.findall(r"\b_cuda_\w+", inspect.getsource(captures))} == {*PRIVATE}
    given = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    assert {"pool", "capture_error_mode"} <= {*given}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    monkeypatch.setattr(torch, "cuda", found)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool", "_cuda_clearCublasWorkspaces"):
        monkeypatch.setattr(torch._C, name, getattr(found, name), raising=False)
    return found


@pytest.fixture
def graphs(cuda: Cuda) -> CudaGraphs:
    return CudaGraphs(torch.device("cpu"))


def added(x: Tensor) -> tuple[Tensor, ...]:
    return (x + 1,)


def recorded(graphs: CudaGraphs, function: Any = added) -> Any:
    return Captured(graphs, function, [torch.zeros(2)], 0, {})


def test_nothing_but_captures_runs_on_their_stream(cuda: Cuda, graphs: CudaGraphs) -> None:
    """PyTorch frees the workspace that cuBLAS has for a stream when a graph of this stream goes; it
    is memory of the graphs' pool only if the stream has none from before."""
    ran = list[str]()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        ran.append(cuda.current.name)
        # A graph that is collected meanwhile would end the capture.
        assert gc.isenabled() == (cuda.current.name == "main")
        return added(x)

    kept = [recorded(graphs, function) for _ in range(2)]
    assert ran == ["main", graphs.stream.name] * len(kept)
    assert cuda.log[0] == "workspaces cleared"
    assert cuda.log[1:] == [f"{graphs.pool} on {graphs.stream.name}", "captured"] * 2


def test_a_pool_ends_with_its_last_graph(graphs: CudaGraphs) -> None:
    """PyTorch takes no further graph for such a pool."""
    first = recorded(graphs)
    pool, second = graphs.pool, recorded(graphs)
    del first
    third = recorded(graphs)
    assert graphs.pool == pool
    del second, third
    recorded(graphs)
    assert graphs.pool != pool


def test_another_try_where_caches_fill_the_memory(cuda: Cuda, graphs: CudaGraphs) -> None:
    left = list[Exception]()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        if left and cuda.current.name != "main":
            raise left.pop()
        return added(x)

    left += [torch.OutOfMemoryError("none is left")]
    recorded(graphs, function)
    assert cuda.log.count("caches emptied") == 1
    left += [torch.OutOfMemoryError("none is left") for _ in range(2)]
    with pytest.raises(torch.OutOfMemoryError):
        recorded(graphs, function)
    assert not left


@pytest.mark.parametrize("version", [(2, 11), (2, 12), (2, 13), (2, 14)])
@pytest.mark.parametrize("when", ["begins", "an operation", "an error of Python", "ends"])
def test_what_a_failed_capture_leaves(
    cuda: Cuda, graphs: CudaGraphs, monkeypatch: pytest.MonkeyPatch, version: Any, when: str
) -> None:
    """Nothing: its pool serves and keeps no more than before, and a capture that ends as it should
    ends what has begun for random numbers, also of earlier graphs."""
    cuda.version = version
    monkeypatch.setattr(torch, "__version__", ".".join(map(str, (*version, 1))) + "+cu130")
    kept, pool = [recorded(graphs)], graphs.pool

    def function(x: Tensor) -> tuple[Tensor, ...]:
        if cuda.current.name != "main" and when in ("an operation", "an error of Python"):
            cuda.fails = "ends" if when == "an operation" else ""
            raise RuntimeError(when)
        return added(x)

    cuda.fails = when
    with pytest.raises(RuntimeError, match=f"{when}|failed due to a previous error"):
        recorded(graphs, function)
    gc.collect()
    assert cuda.current.name == "main"
    assert cuda.log[-2:] == [f"its own on {graphs.stream.name}", "captured"]
    assert cuda.uses[pool] == len(kept) and not cuda.served
    kept.append(recorded(graphs))
    assert graphs.pool == pool and cuda.uses[pool] == len(kept)


def test_inputs_are_shared(cuda: Cuda, graphs: CudaGraphs) -> None:
    """Records run one after the other: those of one shape copy their inputs to one place, and two
    inputs of a record have two. They go with the last record."""
    shared: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()

    def record(*sizes: int) -> Captured:
        inputs = [torch.zeros(size) for size in sizes]
        return Captured(graphs, lambda *given: given, inputs, 1, shared)

    def places(record: Captured) -> list[int]:
        return [one.data_ptr() for _, tensors in record._fixed for one in tensors]

    records = [record(9, 2, 2, 3), record(9, 2, 3, 2), record(9, 2)]
    first, second, third = map(places, records)
    assert len({*first}) == 3 and {*first} == {*second} and third == first[:1]
    assert len(shared) == 3
    records.clear()
    gc.collect()
    assert not shared


def test_large_results_are_shared(
    cuda: Cuda, graphs: CudaGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host reads them, such as logits. What nobody reads has no place, and no place is
    that of an input."""
    monkeypatch.setattr(captures, "LARGE", 16)
    shared: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()

    def record(number: float, read: int = 3) -> Captured:
        def function(x: Tensor) -> tuple[Tensor, ...]:
            return x + number, 2 * x + number, (x + number)[:2]

        def left(results: Any) -> list[Tensor]:
            return [one if at < read else one[:0] for at, one in enumerate(results)]

        return Captured(graphs, function, [torch.arange(4.0)], 0, shared, left)

    first, second, one = record(1.0), record(2.0), record(3.0, read=1)
    assert second._results[1].tolist() == [2.0, 4.0, 6.0, 8.0]
    places = [[part.data_ptr() for part in each._results] for each in (first, second, one)]
    assert places[0][:2] == places[1][:2] and places[2][0] == places[0][0]
    assert places[0][2] != places[1][2] and places[2][1] != places[0][1]
    fixed = first._fixed[0][1][0].data_ptr()
    assert len({*places[0], fixed}) == 4 and len(shared) == 3


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("capability", "dtype", "read"),
    [
        ((8, 0), torch.bfloat16, True), ((9, 0), torch.bfloat16, False),
        ((10, 3), torch.bfloat16, False), ((12, 0), torch.bfloat16, True),
        ((9, 0), torch.float32, True), ((9, 0), torch.float16, True),
    ],
)  # fmt: skip
def test_products_of_experts_that_read_on_the_host(
    monkeypatch: pytest.MonkeyPatch, capability: Any, dtype: torch.dtype, read: bool
) -> None:
    """Within an operation, where nobody sees it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode(), Watch([]):
        rows = torch.empty(4, 16, dtype=dtype, device="cuda")
        experts = torch.empty(2, 16, 16, dtype=dtype, device="cuda")
        sizes = torch.empty(2, dtype=torch.int32, device="cuda")
        refused = pytest.raises(Unrepeatable, match="how many tokens each expert has")
        with refused if read else nullcontext():
            torch._grouped_mm(rows, experts, offs=sizes)
        with pytest.raises(Unrepeatable, match="how many tokens each expert has"):
            torch.ops.transformers.grouped_mm_fallback(rows, experts, sizes)


def test_streams_that_share_memory(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the one before it, and memory that it has taken over is not freed meanwhile
    for the stream that it comes from."""
    monkeypatch.setattr(captures, "_STREAMS", {})
    done, device = list[tuple[str, str]](), torch.device("cuda", 0)

    class Waiting(Stream):
        def wait_stream(self, other: Any) -> None:
            done.append((self.name, f"waits for {other.name}"))

    buffer: Any = SimpleNamespace(record_stream=lambda stream: done.append((stream.name, "uses")))
    for name in ("one", "one", "two", "one"):
        with cuda.stream(Waiting(name=name)):
            take_turns(device, *[buffer] * (name == "two"))
    assert done == [("two", "waits for one"), ("two", "uses"), ("one", "waits for two")]
