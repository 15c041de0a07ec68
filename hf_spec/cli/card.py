"""``hf-spec card``."""

from typing import Annotated

from typer import Option, echo

from hf_spec.cli import options as opt


def card(
    folder: opt.AdapterFolder,
    repository: Annotated[
        str | None, Option(help="Name on the Hub.  [default: the folder's name]")
    ] = None,
    base_model: Annotated[
        str | None, Option(help="Name of the base model.  [default: that of the adapter]")
    ] = None,
) -> None:
    """Write the card of an adapter folder.

    Renders README.md from the adapter's configs, search.json, and results.json of 'hf-spec bench',
    and renews custom_generate/generate.py.

    \b
    Examples:
      hf-spec card ./skip
      hf-spec bench --model M --adapter ./skip --prompts P.jsonl --output ./skip
      hf-spec card ./skip --repository org/name
    """
    from hf_spec.hub.card import write_card

    echo(f"card: {write_card(folder, repository, base_model)}")
