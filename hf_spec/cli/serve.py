"""``hf-spec serve``."""

from __future__ import annotations

import typer

from hf_spec.decoding.validate import check_request
from modeling_patches.serving import answer_refusals


def serve(context: typer.Context) -> None:
    """Run 'transformers serve' with strategies.

    This is Transformers' own server; all arguments are passed on. A request chooses a strategy in
    its generation_config; one that cannot be fulfilled is answered with 400 and the reason.

    \b
    Examples:
      hf-spec serve Qwen/Qwen3-0.6B --port 8000
      curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
        "model": "Qwen/Qwen3-0.6B", "messages": [{"role": "user", "content": "Hello"}],
        "generation_config": "{\\"assistant_strategy\\": \\"prompt_lookup\\"}"}'
    """
    from transformers.utils.import_utils import is_serve_available

    wants_help = bool({"-h", "--help"} & set(context.args))
    if wants_help:
        typer.echo(context.get_help() + "\n\nOptions of 'transformers serve':\n")
    missing = "" if wants_help or is_serve_available() else "the server's"
    try:
        from transformers.cli.transformers import app as transformers_app
    except ImportError as error:
        missing = str(error)
    if missing:
        raise ValueError(
            f"'transformers serve' needs packages that are not installed ({missing}); "
            "run: pip install 'hf_spec[serve]'"
        )
    answer_refusals(check_request)
    transformers_app(["serve", *context.args], prog_name="hf-spec", standalone_mode=False)
