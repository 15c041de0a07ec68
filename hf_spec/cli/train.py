"""``hf-spec train``."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_spec.cli import options as opt
from hf_spec.cli.common import INTERRUPTED, check_writable, require
from hf_spec.core.checks import check_range
from hf_spec.model.loading import load_model

#: Value of ``METHOD`` that adds a transition to an existing adapter.
TRANSITION = "transition"


def train(
    context: typer.Context,
    method: Annotated[str, typer.Argument(help="What to train, such as bita.")],
    model: Annotated[
        str | None, typer.Option(help="Base model: a folder, or a repository on the Hub. Needed.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="What 'hf-spec distill' wrote, or a folder or file of your own prompts with "
            "answers, as for 'hf-spec bench --prompts', or of token ids. Needed."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Adapter folder. Needed.")
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(help="Adapter folder that gets a transition ('train transition')."),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Optimiser steps.  [default: --epochs decides]")
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the data.  [default: the method's]")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences per step.  [default: the method's]")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate.  [default: the method's]")
    ] = None,
    num_anchors: Annotated[
        int | None,
        typer.Option(min=1, help="Most trained positions per sequence.  [default: the method's]"),
    ] = None,
    max_length: Annotated[int, typer.Option(min=4, help="Cut longer sequences.")] = 1024,
    held_out: Annotated[
        int, typer.Option(min=1, help="Answers kept for evaluation, at most a quarter of all.")
    ] = 32,
    served_prompts: Annotated[
        int, typer.Option(min=1, help="Held-out prompts decoded at each evaluation.")
    ] = 16,
    served_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each.")] = 64,
    eval_steps: Annotated[
        int, typer.Option(min=1, help="Steps between evaluations and checkpoints.")
    ] = 100,
    strategy_kwargs: opt.StoredKwargs = None,
    training_args: Annotated[
        str | None,
        typer.Option(help="Further fields of transformers.TrainingArguments, a JSON object."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = (
        False
    ),
    seed: Annotated[int, typer.Option(help="Seed of initial values, data order and anchors.")] = 0,
    dtype: opt.Dtype = "bfloat16",
    device: opt.Device = None,
    threads: opt.Threads = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Estimate parameters and memory from the model's config; load and write "
            "nothing. Needs --model only.",
        ),
    ] = False,
    list_fields: Annotated[
        bool, typer.Option("--list-fields", help="List the fields of the method's config.")
    ] = False,
) -> None:
    """Train an adapter on answers that the base model gave.

    Every field of the method's adapter config is an option, too (--num-mask-tokens 4);
    --list-fields shows them. Training uses transformers' Trainer: 'accelerate launch' runs it on
    several devices, --training-args sets everything else (logging, precision). Each
    evaluation decodes held-out prompts; the checkpoint of the largest tau is kept, or that of the
    smallest loss if the method fine-tunes the model. The base model is not changed, unless a field
    of the config says so. 'train transition' adds a transition to a trained adapter: how the token
    before changes its predictions. The rest of the adapter is not trained again.

    \b
    Examples:
      hf-spec train bita --model Qwen/Qwen3-0.6B --data ./answers --output ./bita
      hf-spec train bita --list-fields
      hf-spec train bita --model Qwen/Qwen3-0.6B --dry-run
      hf-spec train transition --adapter ./bita --model M --data D --output ./bita-transition
      hf-spec train bita --model M --data D --output ./bita --num-mask-tokens 4 --max-steps 400
      hf-spec train bita --model M --data D --output ./bita --resume \\
          --training-args '{"report_to": "tensorboard"}'
    """
    from hf_spec.training import start
    from hf_spec.training import train as work

    if (method == TRANSITION) != (adapter is not None):
        raise ValueError(f"--adapter and 'train {TRANSITION}' belong together")
    if adapter is not None:
        if learning_rate is not None:
            raise ValueError("--learning-rate: a transition's is --transition-learning-rate")
        from hf_spec.hub.folder import read_spec_config

        method = read_spec_config(adapter)[0].name
    chosen = work.trainable_method(method)
    fields = work.config_fields(chosen)
    if list_fields:
        width = max(map(len, fields)) + 2
        for name, item in fields.items():
            option = "--" + name.replace("_", "-")
            factory: Any = item.default_factory
            default = factory() if item.default is dataclasses.MISSING else item.default
            default = chosen.trained.get(name, default)
            text = item.metadata.get("help", "")
            told = "" if "Default" in text else f" [default: {default}]"
            typer.echo(f"{option:{width}}  {text}{told}")
        return
    needed = {"--model": model, "--data": dry_run or data, "--output": dry_run or output}
    missing = [option for option, value in needed.items() if not value]
    if missing:
        raise ValueError(f"'hf-spec train {method}' needs {', '.join(missing)}")
    assert model is not None
    for option, number in (("--epochs", epochs), ("--learning-rate", learning_rate)):
        if number is not None:
            check_range(option, number, 0.0, open_low=True)
    config = parse_fields(context.args, fields, method)
    assert chosen.adapter_config is not None
    # Invalid values are refused before anything is loaded.
    if adapter is None:
        adapter_config = chosen.adapter_config(**{**chosen.trained, **config})
    else:
        adapter_config = start.extended(adapter, config)
    options = opt.json_object("--strategy-kwargs", strategy_kwargs)
    chosen.parse_options(options)
    settings = work.TrainSettings(
        max_steps=max_steps, epochs=epochs, batch_size=batch_size, learning_rate=learning_rate,
        num_anchors=num_anchors, max_length=max_length, held_out=held_out,
        served_prompts=served_prompts, served_tokens=served_tokens, eval_steps=eval_steps,
        options=options, seed=seed, arguments=opt.json_object("--training-args", training_args),
    )  # fmt: skip
    arguments = work.training_arguments(chosen, settings, output or Path(), adapter_config)
    if dry_run:
        if adapter is not None:
            raise ValueError("--dry-run estimates a new adapter: leave out --adapter")
        from hf_spec.training.estimate import estimate, meta_model

        base = meta_model(model, dtype)
        for line in estimate(base, start.fresh(chosen, base, config)).lines():
            typer.echo(line)
        rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
        typer.echo(
            f"tokens per step: at most {rows * max_length:,} on each device, {rows} sequences of "
            f"{max_length}; {arguments.world_size} device(s)"
        )
        return
    assert data is not None and output is not None
    require("train", "accelerate", "datasets")
    check_writable(output)

    from hf_spec.training.dataset import read_answers, read_provenance

    base, tokenizer = load_model(model, dtype, device)
    rows = read_answers(data, tokenizer)
    try:
        record = work.train(
            base, rows, method, output, config, settings, resume,
            provenance=read_provenance(data), tokenizer=tokenizer, start=adapter,
        )  # fmt: skip
    except KeyboardInterrupt:
        typer.echo(
            "interrupted; the same command with --resume goes on from the last checkpoint, if one "
            "was written", err=True,
        )  # fmt: skip
        raise typer.Exit(INTERRUPTED) from None
    if not record:  # not the main process
        return

    from hf_spec.hub.card import write_card

    write_card(output)
    best, amount = record["best"], record["data"]
    typer.echo(f"answers: {amount['rows']:,} to train on, {amount['held_out']:,} held out")
    if best is not None:
        typer.echo(f"best tau: {best['eval_tau']:.2f} at step {best['step']}")
    typer.echo(f"adapter: {output}")


def parse_fields(arguments: list[str], fields: dict[str, Any], method: str) -> dict[str, Any]:
    """Config fields from options such as ``--num-mask-tokens 4`` or ``--num-mask-tokens=4``.

    Raises:
        ValueError: an option is not a field, or has no value.
    """
    config: dict[str, Any] = {}
    left = iter(arguments)
    for argument in left:
        option, equals, value = argument.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or name not in fields:
            known = ", ".join("--" + field.replace("_", "-") for field in fields)
            raise ValueError(
                f"'hf-spec train {method}' has no option {option!r}; fields of its config are "
                f"{known}; see 'hf-spec train --help' for the others"
            )
        config[name] = value if equals else next(left, None)
        if config[name] is None:
            raise ValueError(f"{option} needs a value")
        with suppress(json.JSONDecodeError):  # a word is no JSON
            config[name] = json.loads(config[name])
    return config
