"""Docstrings as the site's API page reads them: a griffe extension, which mkdocs.yml names.

The package's docstrings refer to names by Sphinx' roles (``:meth:`merge```) and describe attributes
that belong together in one entry (``first, second: text``). Neither Markdown nor Google's style
knows these.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

#: A role with its target; ``~a.b`` shows ``b`` alone.
ROLE = re.compile(r":[a-z:]+:`(?:~(?:\w+\.)*)?([^`]+)`")
#: An entry of a section that describes several names, and the lines that go on with it.
SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.+(?:\n\1 +\S.*)*)$", re.MULTILINE)


class PlainDocstrings(griffe.Extension):
    """Makes every docstring plain as it is loaded."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = plain(obj.docstring.value)


def plain(text: str) -> str:
    """The docstring without roles, with an entry for each name.

    ``first, second: text`` becomes ``first: text`` and ``second: see `first`.``.
    """
    text = ROLE.sub(r"`\1`", text)
    return SEVERAL.sub(_entries, text)


def _entries(found: re.Match[str]) -> str:
    indent, names, description = found.groups()
    first, *others = names.split(", ")
    lines = [f"{indent}{first}: {description}"]
    return "\n".join([*lines, *(f"{indent}{name}: see `{first}`." for name in others)])
