"""The program ``hf-spec``: says that it is loading, then runs the command line of hf_spec.

It is a module of its own because importing anything of hf_spec imports PyTorch and Transformers
first, which takes seconds.
"""

import os
import sys

LOADING = "hf-spec: loading PyTorch and Transformers, which takes a few seconds"
#: Set while a shell asks for completions, which are shown on the line being typed.
COMPLETING = "_HF_SPEC_COMPLETE"
#: Returns to the start of the line and clears it.
CLEAR = "\r\x1b[K"


def main() -> int:
    """Run ``hf-spec`` with the arguments of the process; returns the exit code.

    On a terminal, the message disappears when loading is done. Elsewhere only the demo shows it, so
    that logs and scripts see what the commands write and nothing else.
    """
    terminal = sys.stderr.isatty()
    if COMPLETING not in os.environ and (terminal or sys.argv[1:2] == ["demo"]):
        print(LOADING, end="" if terminal else "\n", file=sys.stderr, flush=True)
        from hf_spec.cli import main as run

        print(CLEAR if terminal else "", end="", file=sys.stderr, flush=True)
    else:
        from hf_spec.cli import main as run
    return run()
