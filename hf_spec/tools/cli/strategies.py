"""``hf-spec strategies``."""

import json
import re
from importlib.resources import files
from pathlib import Path

from typer import echo

from hf_spec.tools.cli import options as opt

#: What ``auto`` takes, in its order.
AUTO_TAKES = "assistant_model, the active adapter, the checkpoint's MTP layers, prompt_lookup"
#: The name and the summary of a method, where its module defines it.
METHOD = re.compile(r'^METHOD = Method\(\s*name="(.+)",\s*summary="(.+)",$', re.MULTILINE)


def strategies(as_json: opt.AsJson = False) -> None:
    """List the strategies.

    Names for generate(assistant_strategy=...), with one line about each.

    \b
    Examples:
      hf-spec strategies
      hf-spec strategies --json
    """
    known = _summaries()
    if as_json:
        echo(json.dumps(known, indent=1))
        return
    width = max(map(len, known), default=0)
    for name, line in known.items():
        echo(f"{name:{width}}  {line}")
    echo(f"{'auto':{width}}  the first that there is: {AUTO_TAKES}")


def _summaries() -> dict[str, str]:
    """What ``hf_spec.strategies()`` returns, read from the sources of the methods' modules:
    importing them takes seconds."""
    folder = Path(str(files("hf_spec.methods")))
    paths = [*folder.glob("*.py"), *folder.glob("*/__init__.py")]
    return dict(sorted(pair for path in paths for pair in METHOD.findall(path.read_text("utf-8"))))
