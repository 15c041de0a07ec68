"""``hf-spec strategies``."""

import ast
import json
from importlib.resources import files
from pathlib import Path

from typer import echo

from hf_spec.tools.cli import options as opt


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
    echo(f"{'auto':{width}}  what fits the model: mtp, its active adapter, or prompt_lookup")


def _summaries() -> dict[str, str]:
    """What ``hf_spec.strategies()`` returns, read from the sources of the methods' modules:
    importing them takes seconds."""
    folder, found = Path(str(files("hf_spec.methods"))), {}
    for path in [*folder.glob("*.py"), *folder.glob("*/__init__.py")]:
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            match statement:
                case ast.Assign(targets=[ast.Name("METHOD")], value=ast.Call(keywords=words)):
                    given = {word.arg: word.value for word in words}
                    name, summary = (ast.literal_eval(given[key]) for key in ("name", "summary"))
                    found[name] = summary
    return dict(sorted(found.items()))
