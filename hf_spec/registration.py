"""Registers strategies and adapter types as soon as Transformers is loaded.

``hf-spec --help``, ``--version`` and the help of each command must not wait for PyTorch,
Transformers and PEFT, which take seconds, and Python runs ``hf_spec/__init__.py`` before any module
of the command line. ``import hf_spec`` must also register, with nothing else to call. Both hold
because there is nothing to register with before Transformers is loaded: if it is, registration
takes place at once, otherwise when its import ends.

That import may be part of another one that registration needs: PEFT imports Transformers, and so do
most of our modules. Registration waits for the outermost of them, as it cannot import from a module
that is half executed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Watch(MetaPathFinder):
    """Finds modules as the other finders do, and registers when the outermost import ends."""

    def __init__(self) -> None:
        self._running = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ("transformers", "peft") and not fullname.startswith("hf_spec."):
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: Any) -> None:
        load, running = loader.exec_module, self._running

        def exec_module(module: ModuleType) -> None:
            outermost = not getattr(running, "inside", False)
            running.inside = True
            try:
                load(module)
            finally:
                running.inside = not outermost
            if outermost and "transformers" in sys.modules and self in sys.meta_path:
                sys.meta_path.remove(self)
                _register()

        loader.exec_module = exec_module


def _register() -> None:
    import_module("hf_spec.public")


def register_when_possible() -> None:
    """Register now if Transformers is loaded, else once it is. Idempotent."""
    if "transformers" in sys.modules:
        _register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())
