"""``hf-spec``, the command line: a file for each command. The work is done in the layers below."""

from hf_spec.cli.main import main

__all__ = ["main"]
