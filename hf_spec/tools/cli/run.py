"""``hf-spec run``."""

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def run(
    program: Annotated[
        list[str], Argument(metavar="PROGRAM [ARGUMENTS]...", help="What to start.")
    ],
    module: Annotated[bool, Option("-m", help="PROGRAM is a module.")] = False,
) -> None:
    """Start a Python program with hf_spec imported.

    PROGRAM is a script, a console script of this environment, or a module. It runs as Python itself
    would run it; when it imports transformers, hf_spec is imported, too. That holds for processes
    it starts (multiprocessing, torchrun) as long as they inherit its environment.

    \b
    Examples:
      hf-spec run lm_eval --model hf --model_args pretrained=M --tasks gsm8k \\
          --gen_kwargs assistant_strategy=prompt_lookup
      hf-spec run train.py --epochs 1
      hf-spec run -m package.module
      hf-spec run torchrun --nproc-per-node 2 train.py
    """
    command = find(program[0], module)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *command, *program[1:]], environment())


def find(program: str, module: bool = False) -> Sequence[str]:
    """The arguments of Python's command line that start the program; a ValueError if there is
    none."""
    if module:
        return ["-m", program]
    if Path(program).is_file():
        return [program]
    # A console script, of this environment first, is a file of Python, too.
    folders = [sysconfig.get_path("scripts")]
    if entry_points(group="console_scripts", name=program):
        folders.append(os.environ.get("PATH", os.defpath))
    script = shutil.which(program, path=os.pathsep.join(folders))
    # If the interpreter's path is long, it is in the second line.
    if script is not None and re.match(rb"#!.*python", Path(script).read_bytes()[:512], re.DOTALL):
        return [script]
    if program.isidentifier() and importlib.util.find_spec(program) is not None:
        return ["-m", program]
    raise ValueError(
        f"PROGRAM {program!r}: there is no such file, no such console script of {sys.prefix}, and "
        "no such module; give one of these, or -m and a module."
    )


def environment() -> dict[str, str]:
    """This process's environment, with the folder of our ``sitecustomize`` first on the path."""
    path = [str(Path(__file__).parent / "startup"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
