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
from hf_spec.model.loading import NATIVE, load_model


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
        typer.Option(
            help="Folder of a trained adapter of the method. It gets a Markov head (how the tokens "
            "before change its predictions), and only that is trained."
        ),
    ] = None,
    strategy_kwargs: opt.StoredKwargs = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = (
        False
    ),
    dtype: opt.Dtype = NATIVE,
    device: opt.Device = None,
    threads: opt.Threads = None,
    list_fields: Annotated[
        bool, typer.Option("--list-fields", help="List the method's own options.")
    ] = False,
) -> None:
    """Train an adapter on answers that the base model gave.

    Every field of the method's adapter config is an option, too (--num-mask-tokens 4), as are
    --held-out, --max-length and others; --list-fields shows them. So is every field of
    transformers.TrainingArguments (--max-steps, --num-train-epochs, --learning-rate,
    --per-device-train-batch-size, --seed, --eval-steps, --report-to tensorboard), which its
    documentation explains. Training uses transformers' Trainer: 'accelerate launch' runs it on
    several devices. Each evaluation decodes held-out prompts; the checkpoint of the largest tau is
    kept, or that of the smallest loss if the method fine-tunes the model. The base model is not
    changed, unless a field of the config says so.

    \b
    Examples:
      hf-spec train bita --model Qwen/Qwen3-0.6B --data ./answers --output ./bita
      hf-spec train bita --list-fields
      hf-spec train bita --model M --data D --output ./bita --num-mask-tokens 4 --max-steps 400
      hf-spec train bita --model M --data D --output ./bita --resume --report-to tensorboard
      hf-spec train bita --adapter ./bita --model M --data D --output ./bita-markov
    """
    from transformers import TrainingArguments

    from hf_spec.hub.folder import read_spec_config
    from hf_spec.training import start
    from hf_spec.training import train as work

    chosen = work.trainable_method(method)
    fields = work.config_fields(chosen)
    if list_fields:
        more = work.added_fields(work.SpecArguments, TrainingArguments)
        _print_fields({**fields, **more}, dict(chosen.trained))
        return
    if not (model and data and output):
        needed = {"--model": model, "--data": data, "--output": output}
        missing = ", ".join(option for option, value in needed.items() if not value)
        raise ValueError(f"'hf-spec train {method}' needs {missing}")
    require("train", "accelerate", "datasets")
    config, arguments = parse_options(context.args, method, fields)
    # Invalid values are refused before anything is loaded.
    if adapter is None:
        assert chosen.adapter_config is not None
        adapter_config = chosen.adapter_config(**{**chosen.trained, **config})
    else:
        its = read_spec_config(adapter)[0].name
        if its != method:
            raise ValueError(
                f"--adapter {str(adapter)!r} is of {its!r}: give 'hf-spec train {its}'"
            )
        adapter_config = start.with_markov_head(adapter, config)
        if "learning_rate" in arguments:
            raise ValueError("--learning-rate: a Markov head's is --markov-learning-rate")
    options = opt.json_object("--strategy-kwargs", strategy_kwargs)
    chosen.parse_options(options)
    work.spec_arguments(chosen, output, adapter_config, **arguments)
    check_writable(output)

    from hf_spec.training.dataset import read_answers, read_provenance

    base, tokenizer = load_model(model, dtype, device)
    rows = read_answers(data, tokenizer)
    try:
        record = work.train(
            base, rows, method, output, config, arguments, options, resume,
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


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _print_fields(fields: dict[str, dataclasses.Field[Any]], defaults: dict[str, Any]) -> None:
    width = max(map(len, fields)) + 4
    for name, field in fields.items():
        factory: Any = field.default_factory
        default = factory() if field.default is dataclasses.MISSING else field.default
        text = field.metadata.get("help", "")
        if "Default" not in text:
            text += f" [default: {defaults.get(name, default)}]"
        typer.echo(f"{_option(name):{width}}  {text}")


def parse_options(
    words: list[str], method: str, fields: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Config fields and fields of `SpecArguments` that options such as ``--max-steps 4`` set.

    Args:
        words: the options; values of config fields are JSON, or words.
        method: the method's name, for errors.
        fields: the fields of its config.

    Raises:
        ValueError: an option is unknown, or its value is missing or invalid.
    """
    import argparse

    from transformers import HfArgumentParser

    from hf_spec.training.train import SpecArguments

    class Parser(HfArgumentParser):
        def error(self, message: str) -> Any:
            raise ValueError(f"'hf-spec train {method}': {message}")

    texts = [(name, str | None, dataclasses.field(default=None)) for name in fields]
    kinds: Any = (dataclasses.make_dataclass("Fields", texts), SpecArguments)
    parser = Parser(kinds, allow_abbrev=False, add_help=False)
    # Only what is given counts: the others have the method's defaults.
    absent = object()
    names = [field.name for kind in kinds for field in dataclasses.fields(kind)]
    namespace = argparse.Namespace(**dict.fromkeys(names, absent))
    found, unknown = parser.parse_known_args(words, namespace)
    if unknown:
        raise ValueError(
            f"'hf-spec train {method}' has no option {unknown[0].partition('=')[0]!r}; fields of "
            f"its config are {', '.join(map(_option, fields))}; see 'hf-spec train --help' for the "
            "others"
        )
    arguments = {name: value for name, value in vars(found).items() if value is not absent}
    config = {name: arguments.pop(name) for name in fields if name in arguments}
    for name, value in config.items():
        with suppress(json.JSONDecodeError):  # a word is no JSON
            config[name] = json.loads(value)
    return config, arguments
