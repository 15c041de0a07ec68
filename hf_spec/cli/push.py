"""``hf-spec push``."""

from typing import Annotated

from typer import Argument, Option, echo

from hf_spec.cli import options as opt


def push(
    folder: opt.AdapterFolder,
    repository: Annotated[str, Argument(help="owner/name on the Hub.")],
    private: Annotated[bool, Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, Option(help="Branch; created if it does not exist.")] = None,
    base_model: Annotated[
        str | None, Option(help="Name of the base model on the Hub, if the adapter names a folder.")
    ] = None,
) -> None:
    """Upload an adapter folder to the Hub.

    The folder must be complete, as 'hf-spec train' or 'hf-spec search' writes it. Its card gets the
    repository's name; one that was edited by hand is uploaded unchanged. The study of a search is
    not uploaded. Log in first with 'hf auth login'.

    \b
    Examples:
      hf-spec push ./skip org/qwen3-0.6b-layer-skip
      hf-spec push ./skip org/name --private --revision v2
    """
    from hf_spec.hub.push import push as upload

    address = upload(folder, repository, private=private, revision=revision, base_model=base_model)
    echo(f"uploaded: {address}")
