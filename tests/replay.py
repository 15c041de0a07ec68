"""A CUDA graph without a GPU: a function is recorded once, and only the record runs again.

The record is the list of operations that have run, so whatever Python code computes is a constant
in it, as in a graph, and every tensor that is no result of an operation is an address: what is
there by now is read, in the layout of that time; memory that was freed, or has moved, is an error.
Results are in fixed memory, and all others' are gone when the record runs, as in a pool.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig

#: Keywords of ``generate`` for recorded steps.
RECORDED = {"compile_config": CompileConfig(backend="cudagraphs")}


@dataclass(frozen=True)
class Place:
    """Of a tensor among the inputs of a record and the results of its operations."""

    number: int


class Address:
    """Where a tensor is, which it does not keep alive."""

    def __init__(self, tensor: Tensor):
        storage = tensor.untyped_storage()
        self._memory, self._place = StorageWeakRef(storage), (storage.data_ptr(), storage.nbytes())
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype

    def tensor(self) -> Tensor:
        """What is there now."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        what = f"of {tuple(self._layout[1])}, {self._dtype}"
        assert storage is not None, f"a record reads memory {what} that was freed"
        place = storage.data_ptr(), storage.nbytes()
        assert place == self._place, f"a record reads memory {what} that has moved"
        with torch.inference_mode(False):
            return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


def addressed(value: Any) -> Any:
    """A tensor's address; numbers, which a graph has by value, and all else as they are."""
    plain = isinstance(value, Tensor) and type(value.data) is Tensor
    return Address(value) if plain and value.ndim and value.numel() else value


def found(value: Any) -> Any:
    """What is at an address."""
    return value.tensor() if isinstance(value, Address) else value


def mapped(change: Callable[[Any], Any], values: Any) -> Any:
    """Values with each of those in lists and dicts changed."""
    if isinstance(values, (tuple, list)):
        return [mapped(change, value) for value in values]
    if isinstance(values, dict):
        return {name: mapped(change, value) for name, value in values.items()}
    return change(values)


class Tape(TorchDispatchMode):
    """Notes the operations of a block, which run."""

    def __init__(self, inputs: Sequence[Tensor]):
        super().__init__()
        self._seen = [*inputs]  # held: an id is of one tensor while that exists
        self._places = {id(one): Place(number) for number, one in enumerate(inputs)}
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(f"{func}: the host reads what a graph computes")
        given = mapped(self._noted, [args, kwargs or {}])
        results = func(*args, **(kwargs or {}))
        for one in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(one, Tensor) and id(one) not in self._places:
                self._places[id(one)] = Place(len(self._seen))
                self._seen.append(one)
        self.steps.append((func, *given, mapped(self._noted, results)))
        return results

    def _noted(self, value: Any) -> Any:
        """A tensor's place; the address of one that has none."""
        return self._places.get(id(value)) or addressed(value)

    def program(self, results: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        """What runs the operations on other inputs, and gives these results of them."""
        steps, wanted, size = self.steps, mapped(self._noted, results), len(self._seen)

        @torch.no_grad()
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            tensors: list[Any] = [*inputs, *[None] * (size - len(inputs))]

            def given(value: Any) -> Any:
                return tensors[value.number] if isinstance(value, Place) else found(value)

            for func, args, kwargs, places in steps:
                made = func(*mapped(given, args), **mapped(given, kwargs))
                pairs = zip(places, made) if isinstance(places, list) else [(places, made)]
                for place, one in pairs:
                    if isinstance(place, Place):
                        tensors[place.number] = one
            return tuple(mapped(given, wanted))

        return run


class Replay:
    """See :class:`hf_spec.target.captures.Recorder`."""

    def __init__(self, device: torch.device):
        self._results: list[Tensor] = []

    def record(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> tuple[Callable[[], Any], tuple[Tensor, ...]]:
        program = self._program(function, inputs)
        with torch.inference_mode(False):  # a graph writes without asking
            results = tuple(one.clone() for one in program(*inputs))
        self._results += results
        places = [*map(addressed, inputs)]
        del inputs

        def replay() -> None:
            for one in self._results:
                one.fill_(torch.nan if one.is_floating_point() else 99)
            for one, made in zip(results, program(*map(found, places)), strict=True):
                one.copy_(made)
            time.sleep(1e-3)  # lets other threads run

        return replay, results

    def _program(self, function: Any, inputs: Sequence[Tensor]) -> Any:
        tape = Tape(inputs)
        with tape:
            results = function(*inputs)
        return tape.program(results)


class Rerun(Replay):
    """The same for code whose kernels are no operations of PyTorch: it runs again, itself."""

    def _program(self, function: Any, inputs: Sequence[Tensor]) -> Any:
        return function
