"""``hf-spec strategies``."""

import json

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
    import hf_spec
    from hf_spec.drafting.options import AUTO

    known = hf_spec.strategies()
    if as_json:
        echo(json.dumps(known, indent=1))
        return
    width = max(map(len, known), default=0)
    for name, line in known.items():
        echo(f"{name:{width}}  {line}")
    echo(f"{AUTO:{width}}  what fits the model: mtp, its active adapter, or prompt_lookup")
