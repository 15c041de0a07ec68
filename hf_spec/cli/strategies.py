"""``hf-spec strategies``."""

from __future__ import annotations

import typer


def strategies() -> None:
    """List the strategies.

    Names for generate(assistant_strategy=...), with one line about each.

    \b
    Examples:
      hf-spec strategies
    """
    import hf_spec

    known = hf_spec.strategies()
    width = max(map(len, known), default=0)
    for name, line in known.items():
        typer.echo(f"{name:{width}}  {line}")
