"""Lets a program import hf_spec, which registers, where it imports transformers.

``hf-spec run`` puts this folder at the head of PYTHONPATH, so that Python runs this file when it
starts, in the program and in processes that it starts. A process without transformers pays nothing.
"""

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


class _Registers(MetaPathFinder, Loader):
    """Imports hf_spec in place of transformers and PEFT, of which it imports both."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        known = fullname in ("transformers", "peft")
        return importlib.util.spec_from_loader(fullname, self) if known else None

    def create_module(self, spec: Any) -> Any:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        importlib.import_module("hf_spec")
        module = importlib.import_module(spec.name)
        self._own = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = self._own


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
    sys.meta_path.insert(0, _Registers())
elif importlib.util.find_spec("transformers") is not None:
    print(f"hf-spec run: hf_spec is not installed for {sys.executable}", file=sys.stderr)
