"""``hf-spec doctor``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from hf_spec.cli import options as opt
from hf_spec.model.loading import load_model


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Model to try: a folder, or a repository on the Hub.")
    ] = None,
    adapter: opt.Adapters = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: opt.Threads = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show versions and device, and what works.

    With a model, each strategy generates a few tokens; strategies with adapters take those given,
    or an untrained one.

    \b
    Examples:
      hf-spec doctor
      hf-spec doctor --model Qwen/Qwen3-0.6B
      hf-spec doctor --model M --adapter ./medusa --json
    """
    from hf_spec.bench import contenders as lineup
    from hf_spec.bench import doctor as work

    if adapter and model is None:
        raise ValueError("--adapter needs --model: name the model that the adapters are for")
    adapters = lineup.read_adapters(adapter or ())
    found: dict[str, Any] = {"surroundings": work.surroundings()}
    if model is not None:
        loaded, _ = load_model(model, dtype, device)
        lineup.load_adapters(loaded, adapters)
        if adapters:
            loaded.set_adapter([one.name for one in adapters])
        found["strategies"] = work.supported(loaded)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for title, entries in found.items():
        typer.echo(f"{title}:")
        width = max(map(len, entries), default=0)
        for name, value in entries.items():
            typer.echo(f"  {name:{width}}  {_text(title, value)}")


def _text(title: str, value: Any) -> str:
    if title == "strategies":
        return "works" if value is None else f"refused: {value}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text('', part)}" for key, part in value.items()) or "nothing"
    if isinstance(value, list):
        return " ".join(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
