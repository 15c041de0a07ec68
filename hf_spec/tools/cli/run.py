"""``hf-spec run``."""

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

#: What Python starts with, the program or ``-m`` and a module behind it.
START = """\
import os, runpy, sys
import hf_spec
del sys.argv[0]
if sys.argv[0] == "-m":
    del sys.argv[0]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(
    program: Annotated[
        list[str], Argument(metavar="PROGRAM [ARGUMENTS]...", help="What to start.")
    ],
    module: Annotated[bool, Option("-m", help="PROGRAM is a module.")] = False,
) -> None:
    """Start a Python program with hf_spec imported.

    PROGRAM is a script, a console script of this environment, or a module. It runs as Python itself
    would run it. Python processes that it starts do not import hf_spec by themselves; torchrun and
    accelerate can start this command in each of theirs.

    \b
    Examples:
      hf-spec run lm_eval --model hf --model_args pretrained=M --tasks gsm8k \\
          --gen_kwargs assistant_strategy=prompt_lookup
      hf-spec run train.py --epochs 1
      hf-spec run -m package.module
      torchrun --nproc-per-node 2 --no-python hf-spec run train.py
    """
    # Only the program may import what lies in the folder where it is started.
    command = ["-P", "-c", START, *find(program[0], module), *program[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *command])


def find(program: str, module: bool = False) -> list[str]:
    """The program's file, or ``-m`` and the name of a module; a ValueError if there is none."""
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
