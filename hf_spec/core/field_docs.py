"""Completes docstrings of dataclasses, so that ``help()`` tells every field of a config or options.

Fields are described where they are defined: in the docstring of a base class, or in the field's own
help text.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Collection

#: An entry of a docstring's section of attributes: names, then text over one or more lines.
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n     +.*)*)", re.MULTILINE)


def complete_docstring(cls: type, unused: Collection[str] = ()) -> None:
    """Add the fields that a dataclass's docstring leaves out, but for those that are of no use in
    it. Doing it again changes nothing."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    known = {name for names, _ in _ENTRY.findall(doc) for name in names.split(", ")}
    inherited: dict[str, str] = {}
    for base in cls.__mro__[1:]:
        for names, text in _ENTRY.findall(inspect.cleandoc(base.__doc__ or "")):
            for name in names.split(", "):
                inherited.setdefault(name, text)
    lines = []
    for field in dataclasses.fields(cls):
        text = field.metadata.get("help") or inherited.get(field.name)
        if text and field.name not in known and field.name not in unused:
            lines.append(f"    {field.name}: {text}")
    if lines:
        head = "Other attributes:" if known else "Attributes:"
        cls.__doc__ = "\n".join([doc, "", head, *lines, ""])
