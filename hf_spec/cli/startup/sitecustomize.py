"""Imports hf_spec, which registers as soon as the program imports transformers.

``hf-spec run`` puts this folder at the head of PYTHONPATH, so that Python runs this file when it
starts, in the program and in processes that it starts. A process without transformers pays nothing.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def _give_way() -> None:
    """Leave no trace on the path, and run the environment's own file of this name, if any."""
    here = str(Path(__file__).parent)
    sys.path[:] = [folder for folder in sys.path if folder != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


_give_way()
if importlib.util.find_spec("hf_spec") is not None:
    import hf_spec  # noqa: F401
elif importlib.util.find_spec("transformers") is not None:
    print(f"hf-spec run: hf_spec is not installed for {sys.executable}", file=sys.stderr)
