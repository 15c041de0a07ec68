"""What is asked of CUDA while a graph is recorded, by a stand-in that notes it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_spec.model.captures import Captured, CudaGraphs


class Stream(SimpleNamespace):
    device_index = 0

    def wait_stream(self, other: Any) -> None:
        pass


class Cuda:
    """Stands for ``torch.cuda``.

    Attributes:
        current: the stream that work goes to.
        log: what has been called, in order.
        broken: whether CUDA has ended the capture, as after an illegal operation.
    """

    def __init__(self) -> None:
        self.current, self.log, self.broken, self._made = Stream(name="main"), [], False, 0
        self.default_generators = [
            SimpleNamespace(
                clone_state=lambda: "as before",
                graphsafe_set_state=lambda state: self.log.append(f"numbers {state}"),
            )
        ]

    def _name(self, kind: str) -> str:
        self._made += 1
        return f"{kind} {self._made}"

    def graph_pool_handle(self) -> str:
        return self._name("pool")

    def Stream(self, device: Any) -> Stream:
        return Stream(name=self._name("stream"))

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

    def CUDAGraph(self) -> Any:
        def end() -> None:
            if self.broken:
                raise RuntimeError("CUDA error: operation failed due to a previous error")

        def begin(pool: str, capture_error_mode: str) -> None:
            self.log.append(f"{pool} on {self.current.name}")

        return SimpleNamespace(capture_begin=begin, capture_end=end, replay=lambda: None)

    def _cuda_endAllocateToPool(self, device: int, pool: str) -> None:
        if not self.broken:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.log.append(f"{pool} serves no more")

    def _cuda_releasePool(self, device: int, pool: str) -> None:
        self.log.append(f"{pool} released")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    found = Cuda()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cuda", found)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            patch.setattr(torch._C, name, getattr(found, name), raising=False)
        yield found


def recorder() -> CudaGraphs:
    return CudaGraphs(torch.device("cuda", 0))


def test_nothing_but_captures_runs_on_their_stream(cuda: Cuda) -> None:
    """PyTorch frees the workspace that cuBLAS has for a stream when a graph of this stream goes; it
    is memory of the graphs' pool only if no eager code has asked for it before."""
    ran, graphs = list[str](), recorder()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        ran.append(cuda.current.name)
        return (x + 1,)

    for _ in range(2):
        Captured(graphs, function, [torch.zeros(2)], 0)
    assert ran == ["main", graphs.stream.name] * 2
    assert cuda.log == [f"{graphs.pool} on {graphs.stream.name}"] * 2


def test_another_try_where_caches_fill_the_memory(cuda: Cuda) -> None:
    graphs, left = recorder(), [torch.OutOfMemoryError("none is left")]

    def function(x: Tensor) -> tuple[Tensor, ...]:
        if left:
            raise left.pop()
        return (x + 1,)

    graphs.record(function, [torch.zeros(2)])
    assert cuda.log.count("caches emptied") == 1
    left += [torch.OutOfMemoryError("none is left") for _ in range(2)]
    with pytest.raises(torch.OutOfMemoryError):
        graphs.record(function, [torch.zeros(2)])
    assert not left


def test_what_a_capture_leaves_that_cuda_has_ended(cuda: Cuda) -> None:
    """Nothing: its pool goes with the graphs that it has, and later ones share nothing with it."""
    graphs = recorder()
    pool, stream = graphs.pool, graphs.stream

    def function(x: Tensor) -> tuple[Tensor, ...]:
        cuda.broken = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.record(function, [torch.zeros(2)])
    assert cuda.current.name == "main"
    assert cuda.log[1:] == [f"{pool} serves no more", f"{pool} released", "numbers as before"]
    cuda.broken = False
    graphs.record(lambda x: (x,), [torch.zeros(2)])
    assert graphs.pool != pool and graphs.stream.name != stream.name
