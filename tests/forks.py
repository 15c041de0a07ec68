"""Programs in processes of their own that need not import torch and Transformers again.

They are forked from a process that has imported these, not hf_spec, and has done nothing else. What
is about Python's start needs a new interpreter: ``subprocess``.
"""

import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_METHOD = "forkserver"
_CONTEXT = multiprocessing.get_context(_METHOD)
_CONTEXT.set_forkserver_preload([
    "accelerate", "datasets", "peft", "pytest", "transformers.models.llama.modeling_llama",
    "transformers.trainer",
])  # fmt: skip


class Program:
    """``python -c code arguments``, started.

    Args:
        code: may be indented.
        arguments: ``sys.argv[1:]``.
        cwd: its working directory.
        environment: changes of the environment, for what is not read during an import.
    """

    def __init__(
        self, code: str, *arguments: str, cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ):  # fmt: skip
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name) / name for name in ("out", "err")]
        self.process = _CONTEXT.Process(
            target=_run,
            args=(textwrap.dedent(code), ["-c", *arguments], cwd, environment, self._streams),
        )
        self.process.start()

    def finish(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Wait for it; it is killed after ``timeout`` seconds."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        out, err = (path.read_text() for path in self._streams)
        self._folder.cleanup()
        return subprocess.CompletedProcess([], self.process.exitcode, out, err)


def run(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; see :class:`Program`."""
    return Program(code, *arguments, **options).finish()


def ranks(function: Callable[..., None], *arguments: Any, size: int = 2) -> None:
    """Call ``function(rank, *arguments)`` in this many processes at once."""
    import torch.multiprocessing as mp

    mp.start_processes(_rank, (function, *arguments), nprocs=size, start_method=_METHOD)


def _rank(rank: int, function: Callable[..., None], *arguments: Any) -> None:
    gc.freeze()
    function(rank, *arguments)


def _run(
    code: str, argv: list[str], cwd: Path | None, environment: Mapping[str, str] | None,
    streams: list[Path],
) -> None:  # fmt: skip
    import torch

    gc.freeze()  # else each collection, of which a training calls some, looks through all imports
    for number, path in enumerate(streams, 1):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, number)
        os.close(handle)
    if cwd is not None:
        os.chdir(cwd)
    os.environ.update(environment or {})
    torch.set_num_threads(1)
    sys.argv = argv
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
