"""``hf-spec doctor``: versions, devices, and which strategies work on a model."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from hf_spec.cli import options as opt
from hf_spec.model.loading import load_model

#: Name of the adapter that a model gets for a trial.
TRIAL = "hf_spec_doctor"


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
    import torch

    from hf_spec.bench.contenders import read_adapters
    from hf_spec.bench.environment import machine

    if adapter and model is None:
        raise ValueError("--adapter needs --model: name the model that the adapters are for")
    adapters = read_adapters(adapter or ())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found: dict[str, Any] = {"environment": machine(accelerator or torch.device("cpu"))}
    if model is not None:
        loaded, _ = load_model(model, dtype, device, adapters=adapters)
        found["strategies"] = supported(loaded)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for title, entries in found.items():
        typer.echo(f"{title}:")
        width = max(map(len, entries))
        for name, value in entries.items():
            if title == "strategies":
                value = "works" if value is None else f"refused: {value}"
            typer.echo(f"  {name:{width}}  {value}")


def supported(model: Any) -> dict[str, str | None]:
    """By strategy, why it does not work on a model; None if it does.

    Each strategy generates a few tokens. One that needs an adapter gets an untrained one, unless an
    adapter of its type is active; one that needs an assistant, the model itself.

    Args:
        model: a causal language model; its active adapters stay active.
    """
    import warnings

    import torch

    from hf_spec.adapters.active import find_active
    from hf_spec.core.checks import first_line
    from hf_spec.methods.registry import methods

    ids = torch.arange(1, 9, device=model.device)[None] % model.config.get_text_config().vocab_size
    active = [*model.active_adapters()] if getattr(model, "peft_config", None) else []
    obstacles: dict[str, str | None] = {}
    for name, method in methods().items():
        config, on_trial, obstacles[name] = method.adapter_config, False, None
        with warnings.catch_warnings(action="ignore"):  # of adapters side by side
            try:
                if config is not None and find_active(model, config.type_name) is None:
                    model.add_adapter(config(), TRIAL)
                    on_trial = True
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False,
                    assistant_strategy=name, assistant_kwargs={"drafting": "always"},
                    assistant_model=model if method.needs_assistant else None,
                )  # fmt: skip
            except (ValueError, NotImplementedError) as error:
                obstacles[name] = first_line(error)
            finally:
                if on_trial:
                    model.delete_adapter(TRIAL)
                if active:
                    model.set_adapter(active)
    return obstacles
