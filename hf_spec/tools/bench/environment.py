"""The environment that a run or a training took place in, for its record."""

import datetime
import importlib.metadata
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

import hf_spec
from hf_spec.tools.data import hub_name, sha256

PACKAGES = ("torch", "transformers", "peft", "hf_spec")


def software() -> dict[str, Any]:
    """Versions of Python, packages and this code, and the date."""
    return {
        **versions(),
        "git_revision": _git_revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, Any]:
    """Versions of Python and packages."""
    return {"python": platform.python_version(), **packages()}


def packages() -> dict[str, str | None]:
    """Versions of packages."""
    return {name: package_version(name) for name in PACKAGES}


def machine(device: torch.device) -> dict[str, Any]:
    """Versions of Python and packages, the device, the CPU and its threads."""
    return {
        **versions(),
        "device": str(device), "device_name": device_name(device),
        "cpu": cpu_name(), "threads": torch.get_num_threads(),
    }  # fmt: skip


@cache
def device_name(device: torch.device) -> str:
    """The hardware's name: ``NVIDIA H200``, or the processor's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


@cache
def cpu_name() -> str:
    """The processor's model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def device_of(model: Any) -> dict[str, Any]:
    """Where a model runs, as far as step times depend on it: hardware, dtype, CPU threads."""
    threads = torch.get_num_threads() if model.device.type == "cpu" else None
    dtype = str(model.dtype).removeprefix("torch.")
    return {"device": device_name(model.device), "dtype": dtype, "threads": threads}


def environment_of(model: Any, model_name: str, prompt_file: str | Path | None) -> dict[str, Any]:
    """The environment of a run: versions, machine, model (by the user's name for it), prompts,
    command line."""
    return {
        **machine(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attn_implementation": getattr(model.config, "_attn_implementation", None),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        **software(),
        "model": model_name,
        "prompts": None if prompt_file is None else str(prompt_file),
        "prompts_sha256": None if prompt_file is None else sha256(prompt_file),
        "dataset": None if prompt_file is None else hub_name(prompt_file),
    }


def package_version(distribution: str) -> str | None:
    """Version of an installed package; ``None`` if it is not installed."""
    if distribution == "torch":
        return str(torch.__version__)  # says what it is built for, which PyPI's metadata do not
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return getattr(hf_spec, "__version__", None) if distribution == "hf_spec" else None


def _git_revision() -> str | None:
    """Commit of the checkout that hf_spec runs from, with ``-dirty`` if it has changes, or None. An
    installed copy may lie inside another repository, such as in a project's virtual environment."""
    root = Path(hf_spec.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    words = ("--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", *words],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
