"""Imports hf_spec as soon as a program has imported transformers.

``hf-spec run`` puts this folder at the head of PYTHONPATH, so that Python runs this file when it
starts, in the program and in processes that it starts. A process without transformers pays nothing.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


class _AfterTransformers:
    """Finder that has the loader of ``transformers`` import hf_spec when it is done."""

    def find_spec(self, name, path=None, target=None):
        if name != "transformers":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def exec_module(module):
                del loader.exec_module  # back to that of its class
                load(module)
                _import()

            loader.exec_module = exec_module
        return spec


def _import():
    try:
        import hf_spec  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "hf_spec":
            raise
        print(f"hf-spec run: hf_spec is not installed for {sys.executable}", file=sys.stderr)


def _give_way():
    """Leave no trace on the path, and run the environment's own file of this name, if any."""
    here = str(Path(__file__).parent)
    sys.path[:] = [folder for folder in sys.path if folder != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _AfterTransformers())
_give_way()
