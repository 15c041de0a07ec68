"""Speculative decoding inside ``generate()``, for any causal language model of Transformers.

Importing registers the strategies with ``generate()`` and the adapter types with PEFT, and changes
nothing else: a call that names no strategy runs as if hf_spec were not there. The public names are
those of :mod:`hf_spec.public`; :mod:`hf_spec.registration` says when they are imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_spec.registration import register_when_possible

if TYPE_CHECKING:
    from hf_spec.public import *  # noqa: F403 (all that its __all__ names)

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name == "__all__" or not name.startswith("__"):
        public = import_module("hf_spec.public")
        names = getattr(public, "__all__", ())  # none while it is being imported
        if name == "__all__" or name in names:
            return names if name == "__all__" else getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]


register_when_possible()
