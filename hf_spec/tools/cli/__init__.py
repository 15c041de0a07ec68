"""``hf-spec``, the command line. The layers below do the work."""

from importlib.util import find_spec

from hf_spec.core.checks import install_extra

if find_spec("typer") is None:
    raise SystemExit(f"hf-spec: the command line needs typer; {install_extra('cli')}")

from hf_spec.tools.cli.main import main

__all__ = ["main"]
