"""``hf-spec serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_spec.cli.common import require


def serve(
    context: typer.Context,
    grace: Annotated[
        int, typer.Option(min=0, help="Seconds that requests have to finish after SIGTERM.")
    ] = 30,
) -> None:
    """Run 'transformers serve' with strategies.

    This is Transformers' own server; all other arguments are passed on. A request chooses a
    strategy in its generation_config; one that cannot be fulfilled is answered with 400 and the
    reason. Prometheus finds metrics at /metrics.

    \b
    Examples:
      hf-spec serve Qwen/Qwen3-0.6B --port 8000
      curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
        "model": "Qwen/Qwen3-0.6B", "messages": [{"role": "user", "content": "Hello"}],
        "generation_config": "{\\"assistant_strategy\\": \\"prompt_lookup\\"}"}'
    """
    wants_help = bool({"-h", "--help"} & set(context.args))
    if wants_help:
        typer.echo(context.get_help() + "\n\nOptions of 'transformers serve':\n")
    else:
        require("serve", "fastapi", "openai", "prometheus_client", "pydantic", "uvicorn")
    try:
        import click
        from transformers.cli.transformers import app as transformers_app
    except ImportError as error:
        raise ImportError(
            f"'transformers serve' needs packages that are not installed ({error}); "
            "run: pip install 'hf_spec[serve]'"
        ) from error
    if not wants_help:
        from hf_spec.decoding.validate import check_request
        from hf_spec.serving.metrics import Metrics
        from modeling_patches.serving import patch

        metrics = Metrics()
        patch(check_request, metrics.moved, metrics.text, grace)
    try:
        transformers_app(["serve", *context.args], prog_name="hf-spec", standalone_mode=False)
    except click.Abort:  # typer's own is another
        raise KeyboardInterrupt from None
