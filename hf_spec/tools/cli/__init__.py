"""``hf-spec``, the command line. The layers below do the work."""

from hf_spec.tools.cli.main import main

__all__ = ["main"]
