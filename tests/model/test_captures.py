"""What is asked of CUDA while a graph is recorded, by a stand-in that notes it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_spec.model import captures
from hf_spec.model.captures import Captured, CudaGraphs, take_turns


class Stream(SimpleNamespace):
    device_index = 0

    def wait_stream(self, other: Any) -> None:
        pass


class Graph:
    def __init__(self, cuda: Any):
        self._cuda = cuda

    def capture_begin(self, pool: str = "its own", capture_error_mode: str = "") -> None:
        assert capture_error_mode == "thread_local"
        self._cuda.log.append(f"{pool} on {self._cuda.current.name}")

    def capture_end(self) -> None:
        if self._cuda.broken:
            self._cuda.broken = False
            raise RuntimeError("CUDA error: operation failed due to a previous error")
        self._cuda.log.append("captured")

    def replay(self) -> None:
        pass


class Cuda:
    """Stands for ``torch.cuda``.

    Attributes:
        current: the stream that work goes to.
        log: what has been called, in order.
        broken: whether CUDA ends the capture, as after an illegal operation.
    """

    def __init__(self) -> None:
        self.current, self.log, self.broken = Stream(name="main"), list[str](), False
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

    def _cuda_endAllocateToPool(self, device: int, pool: str) -> None:
        if "captured" in self.log[-1:]:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.log.append(f"{pool} serves no more")

    def _cuda_releasePool(self, device: int, pool: str) -> None:
        self.log.append(f"{pool} released")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    monkeypatch.setattr(torch, "cuda", found)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, getattr(found, name), raising=False)
    return found


@pytest.fixture
def graphs(cuda: Cuda) -> CudaGraphs:
    return CudaGraphs(torch.device("cpu"))


def added(x: Tensor) -> tuple[Tensor, ...]:
    return (x + 1,)


def recorded(graphs: CudaGraphs, function: Any = added) -> Any:
    return Captured(graphs, function, [torch.zeros(2)], 0)


def test_nothing_but_captures_runs_on_their_stream(cuda: Cuda, graphs: CudaGraphs) -> None:
    """PyTorch frees the workspace that cuBLAS has for a stream when a graph of this stream goes; it
    is memory of the graphs' pool only if no eager code has asked for it before."""
    ran = list[str]()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        ran.append(cuda.current.name)
        # A graph that is collected meanwhile would end the capture.
        assert gc.isenabled() == (cuda.current.name == "main")
        return added(x)

    kept = [recorded(graphs, function) for _ in range(2)]
    assert ran == ["main", graphs.stream.name] * len(kept)
    assert cuda.log == [f"{graphs.pool} on {graphs.stream.name}", "captured"] * 2


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


def test_what_a_capture_leaves_that_cuda_has_ended(cuda: Cuda, graphs: CudaGraphs) -> None:
    """Nothing: its pool serves and keeps no more than before, and a capture that ends as it should
    ends what has begun for random numbers, also of earlier graphs."""
    kept, pool = recorded(graphs), graphs.pool
    cuda.log.clear()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        if cuda.current.name == "main":
            return added(x)
        cuda.broken = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        recorded(graphs, function)
    assert cuda.current.name == "main"
    assert cuda.log[1:3] == [f"{pool} serves no more", f"{pool} released"]
    assert cuda.log[3:] == [f"its own on {graphs.stream.name}", "captured"]
    recorded(graphs)
    assert graphs.pool == pool and kept is not None


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
