"""The entry point of ``hf-spec``, whose help does not wait for the library.

Python runs ``hf_spec/__init__.py``, which takes seconds, before any module of the command line.
Here the package is made without, and :class:`hf_spec.tools.cli.common.Command` runs that file.
"""

import sys
from importlib.util import find_spec, module_from_spec


def main(arguments: list[str] | None = None) -> int:
    """Run a command; see :func:`hf_spec.tools.cli.main.main`."""
    spec = find_spec("hf_spec")
    if spec is not None:
        sys.modules.setdefault("hf_spec", module_from_spec(spec))
    from hf_spec.tools.cli import main

    return main(arguments)
