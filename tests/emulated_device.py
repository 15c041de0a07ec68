"""A device that no machine has. Its tensors compute on the CPU and behave as those of a GPU: they
meet no tensors of another device, and what makes the host wait is noted, with its place."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from replay import mapped
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hf_spec
from hf_spec import modeling_patches

#: Of a type that no library knows.
DEVICE = torch.device("ipu", 0)
#: What tensors say in C++, where there must be a backend: composite operations make more of them.
_INSIDE = "meta"
_OURS = [Path(package.__file__ or "").parent for package in (hf_spec, modeling_patches)]
#: Operations with a wait for the device on CUDA that PyTorch has no tag for.
_WAITING = ("multinomial",)
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Remote(Tensor):
    """A tensor of the device; ``local`` has its data."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    local: Tensor

    @staticmethod
    def __new__(cls, local: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, local.shape, strides=local.stride(), storage_offset=local.storage_offset(),
            dtype=local.dtype, device=_INSIDE,
        )  # fmt: skip
        made.local = local
        return made

    def __init__(self, local: Tensor):
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: a tensor of {DEVICE} where the device is not emulated")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_sent(index))

    def __setitem__(self, index: Any, values: Any) -> None:
        super().__setitem__(_sent(index), values)

    def __repr__(self, **_: Any) -> str:
        return f"{DEVICE}: {self.local}"


class EmulatedDevice(TorchDispatchMode):
    """Within it, there is the device.

    Attributes:
        waits: how often the host waited, by place and operation; see :func:`_place`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> Self:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor copies where we see it
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, tensors = dict(kwargs or {}), []
        local = _mapped(lambda x: tensors.append(x) or _local(x), args)
        named = _mapped(lambda x: tensors.append(x) or _local(x), kwargs)
        remote = [x for x in tensors if isinstance(x, Remote)]
        name, to = func._schema.name.removeprefix("aten::"), kwargs.get("device")
        here = to is not None and torch.device(to).type not in (DEVICE.type, _INSIDE)
        if not remote and (to is None or here):
            return func(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            return self._copy(name, here, args, kwargs)
        if remote and any(x.ndim and not isinstance(x, Remote) for x in tensors):
            devices = [(str(x.device), tuple(x.shape)) for x in tensors]
            raise RuntimeError(f"{name}: expected all tensors to be on the same device: {devices}")
        if remote and self._depends_on_data(name, func, args, kwargs):
            self._note(name)
        if to is not None:
            named["device"] = "cpu"
        if name == "histc":  # of floats only, on CPUs
            made = func(args[0].local.double(), *args[1:], **kwargs)
            return Remote(made.to(args[0].dtype))
        known = {id(x.local): x for x in remote}  # where an argument is changed and returned
        made = func(*local, **named)
        return _mapped(lambda x: known[id(x)] if id(x) in known else Remote(x), made)

    def _copy(self, name: str, here: bool, args: Any, kwargs: Any) -> Any:
        target = args[0] if name == "copy_" else None
        source = args[0] if target is None else args[1]
        leaves = here if target is None else not isinstance(target, Remote)
        comes = not isinstance(source, Remote)
        nonblocking = kwargs.get("non_blocking") or (target is not None and args[2:] == (True,))
        if leaves or (comes and not nonblocking):
            self._note("read" if leaves else "copied with a wait")
        if target is not None:
            _local(target).copy_(_local(source))
            return target
        stays = kwargs.get("device") and kwargs.get("dtype") in (None, source.dtype)
        if stays and not comes and not leaves:
            return Remote(source.local)  # it is there
        kwargs["device"] = "cpu"
        made = torch.ops.aten._to_copy.default(_local(source), **kwargs)
        return made if leaves else Remote(made)

    @staticmethod
    def _depends_on_data(name: str, func: Any, args: Any, kwargs: Any) -> bool:
        if name in ("index", "index_put", "index_put_"):
            return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        return name in _WAITING or bool(_TAGS & set(func.tags))

    def _note(self, what: str) -> None:
        self.waits[f"{_place()}: {what}"] += 1


class _Generator(torch.Generator):
    """The device's are the CPU's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu" if torch.device(device) == DEVICE else device)


def _sent(index: Any) -> Any:
    """An index whose lists are tensors of the device."""
    if isinstance(index, tuple):
        return tuple(map(_sent, index))
    return torch.tensor(index, device=DEVICE) if isinstance(index, list) else index


def _local(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, Remote) else tensor


def _mapped(change: Any, values: Any) -> Any:
    """Values with each tensor changed."""
    return mapped(lambda value: change(value) if isinstance(value, Tensor) else value, values)


def _place() -> str:
    """The file and function of ours that the innermost frame belongs to, but for those that pass
    on calls of modules, as they do once a call has installed them."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        path = Path(frame.f_code.co_filename)
        for root in _OURS:
            if path.is_relative_to(root) and path.name != "per_call.py":
                within = root if root.name == "hf_spec" else root.parent
                return f"{path.relative_to(within).with_suffix('')} {frame.f_code.co_name}"
    return "elsewhere"


@contextmanager
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """The device exists within the block."""
    with monkeypatch.context() as patch, EmulatedDevice() as device:
        patch.setattr(torch.accelerator, "synchronize", lambda *_: None)
        patch.setattr(torch, "Generator", _Generator)
        random = SimpleNamespace(
            get_rng_state=lambda _: torch.get_rng_state(),
            set_rng_state=lambda state, _: torch.set_rng_state(state),
        )
        patch.setattr(torch, DEVICE.type, random, raising=False)
        yield device
