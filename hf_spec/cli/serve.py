"""``hf-spec serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_spec.cli import options as opt
from hf_spec.cli.common import require
from hf_spec.cli.distill import NO_STRATEGY


def serve(
    context: typer.Context,
    adapter: opt.Adapters = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Strategy of requests that name none: one of 'hf-spec strategies', or none for "
            "plain generate.  [default: that of the adapter if there is one, else none]"
        ),
    ] = None,
    grace: Annotated[
        int, typer.Option(min=0, help="Seconds that requests have to finish after SIGTERM.")
    ] = 30,
) -> None:
    """Run 'transformers serve' with strategies.

    This is Transformers' own server; all other arguments are passed on. A request chooses a
    strategy in its generation_config; one that cannot be fulfilled is answered with 400 and the
    reason. With adapters, MODEL is their base. Prometheus finds metrics at /metrics.

    \b
    Examples:
      hf-spec serve Qwen/Qwen3-0.6B --port 8000
      hf-spec serve Qwen/Qwen3-0.6B --adapter ./bita
      hf-spec serve Qwen/Qwen3-0.6B --adapter ./bita --adapter ./medusa --strategy medusa
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
        from hf_spec.bench.contenders import read_adapters
        from hf_spec.serving.metrics import Metrics
        from hf_spec.serving.strategies import Strategies
        from modeling_patches.serving import patch

        adapters = read_adapters(adapter or ())
        if strategy is None and len(adapters) == 1:
            strategy = adapters[0].strategy
        strategies = Strategies(adapters, None if strategy == NO_STRATEGY else strategy)
        metrics = Metrics()
        patch(strategies.prepare, strategies.settle, metrics.moved, metrics.text, grace)
    try:
        transformers_app(["serve", *context.args], prog_name="hf-spec", standalone_mode=False)
    except click.Abort:  # typer's own is another
        raise KeyboardInterrupt from None
