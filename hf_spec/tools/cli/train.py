"""``hf-spec train``."""

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from typer import Argument, Context, Option, echo

from hf_spec.core.checks import nearest
from hf_spec.tools.cli import options as opt
from hf_spec.tools.cli.common import Command, check_writable, explained_interrupt, require
from hf_spec.tools.cli.recipe import as_defaults, words
from hf_spec.tools.loading import NATIVE, load_model

#: Fewer answers than these are not enough, and what is said then; docs/guides/training.md.
FEW = 500
FEW_ANSWERS = (
    "note: {} answers are few. 'medusa' for a model of 135M parameters reached 2.62 tokens per "
    "pass with 11,744 answers and 1.49 with 600; with 48 it was slower than plain generate. "
    "'hf-spec distill' makes 2,000."
)


def train(
    context: Context,
    method: Annotated[
        str | None, Argument(help="What to train, such as medusa. Needed, here or in a recipe.")
    ] = None,
    recipe: Annotated[
        Path | None,
        Option(
            callback=as_defaults,
            is_eager=True,
            help="YAML file with options, METHOD as method; those given here win.",
        ),
    ] = None,  # fmt: skip
    model: Annotated[
        str | None, Option(help="Base model: a folder, or a repository on the Hub.  [required]")
    ] = None,
    data: Annotated[
        str | None,
        Option(
            help="Folder of 'hf-spec distill', or prompts with answers, or ids: a file, a folder, "
            f"or {opt.BY_NAME}.  [required]"
        ),
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", help="Adapter folder.  [required]")
    ] = None,
    adapter: Annotated[Path | None, Option(help="Adapter to go on from.")] = None,
    strategy_kwargs: opt.StoredKwargs = None,
    resume: Annotated[bool, Option("--resume", help="Go on from the last checkpoint.")] = False,
    dtype: opt.Dtype = NATIVE,
    device: opt.Device = None,
    threads: opt.Threads = None,
) -> None:
    """Train an adapter on answers that the base model gave.

    There are three kinds of further options. 'hf-spec train METHOD --help' lists the fields of the
    method's adapter config (--num-heads 3), and --held-out, --max-length and others. Every
    field of transformers.TrainingArguments is also an option (--max-steps, --num-train-epochs,
    --learning-rate, --per-device-train-batch-size, --seed, --eval-steps, --report-to tensorboard);
    --optim may also be muon. Training uses transformers' Trainer, so 'accelerate launch' runs it on
    several devices. Each evaluation decodes held-out prompts. The checkpoint of the largest tau is
    kept, or that of the smallest loss if the method fine-tunes the model. The base model is not
    changed, unless a field of the config says so.

    \b
    Examples:
      hf-spec train medusa --model Qwen/Qwen3-0.6B --data ./answers --output ./medusa
      hf-spec train medusa --help
      hf-spec train medusa --model M --data D --output ./medusa --num-heads 3 --max-steps 400
      hf-spec train medusa --model M --data D --output ./medusa --resume --report-to tensorboard
      hf-spec train medusa --adapter ./medusa --model M --data D2 --output ./medusa-2
      hf-spec train --recipe docs/recipes/qwen3-0.6b.yaml --data ./answers --output ./medusa
    """
    if method is None:
        raise ValueError("'hf-spec train' needs a METHOD, such as medusa, or --recipe with one")

    from hf_spec.tools.training import arguments as given

    chosen = given.trainable_method(method)
    fields = given.config_fields(chosen)
    of_recipe = words(context, fields, argument_names())
    if not (model and data and output):
        needed = {"--model": model, "--data": data, "--output": output}
        missing = ", ".join(option for option, value in needed.items() if not value)
        raise ValueError(f"'hf-spec train {method}' needs {missing}")
    require("train", "accelerate", "datasets")
    config, arguments = parse_options([*of_recipe, *context.args], method, fields)
    if device is not None and device.partition(":")[2] not in ("", "0"):
        raise ValueError(
            f"--device {device}: a training takes the first GPU that it sees. Leave --device out, "
            f"and set CUDA_VISIBLE_DEVICES={device.partition(':')[2]}."
        )
    if device is not None and device.startswith("cpu"):
        arguments["use_cpu"] = True  # the Trainer takes an accelerator if there is one
    # Invalid values are refused before anything is loaded.
    adapter_config = given.config_of(chosen, config, adapter)
    options = opt.kwargs_of(method, strategy_kwargs)
    chosen.parse_options(options)
    given.spec_arguments(chosen, output, adapter_config, **arguments)
    check_writable(output)

    from hf_spec.tools.data import hub_name
    from hf_spec.tools.training import train as work
    from hf_spec.tools.training.dataset import read_answers, read_provenance

    provenance = read_provenance(data)
    base, tokenizer = load_model(model, dtype, device, pack=False)
    rows = read_answers(data, tokenizer)
    if len(rows) < FEW:
        echo(FEW_ANSWERS.format(len(rows)), err=True)
    onward = "the same command with --resume goes on from the last checkpoint, if one was written"
    with explained_interrupt(onward):
        record = work.train(
            base, rows, method, output, config, arguments, options, resume,
            provenance=provenance, tokenizer=tokenizer, start=adapter,
            dataset=hub_name(data),
        )  # fmt: skip
    if not record:  # not the main process
        return

    from hf_spec.tools.hub.card import write_card
    from hf_spec.tools.training.report import outcome

    write_card(output)
    for line in outcome(record):
        echo(line)
    echo(f"adapter: {output}")
    echo(f"try: hf-spec bench --model {quote(str(model))} --adapter {quote(str(output))} --by-task")


def argument_names() -> list[str]:
    """Names of the options of every training."""
    from hf_spec.tools.training.arguments import SpecArguments

    return [field.name for field in dataclasses.fields(SpecArguments)]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


class TrainCommand(Command):
    """The command, whose help lists the options of the method that is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        ctx.meta["hf_spec.words"] = list(args)  # for the help
        return super().parse_args(ctx, args)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        words = [word for word in ctx.meta.get("hf_spec.words", ()) if not word.startswith("-")]
        if words:
            from hf_spec.methods.registry import methods

            chosen = next((methods()[word] for word in words if word in methods()), None)
            if chosen is not None and chosen.training is not None:
                with formatter.section(f"Options of {chosen.name}"):
                    formatter.write_dl(_described(chosen))
        super().format_help_text(ctx, formatter)


def _described(method: Any) -> list[tuple[str, str]]:
    """The method's own options, and those of all trainings, with their help."""
    from transformers import TrainingArguments

    from hf_spec.tools.training import arguments as given

    fields = given.config_fields(method) | given.added_fields(
        given.SpecArguments, TrainingArguments
    )
    found = []
    for name, field in fields.items():
        factory: Any = field.default_factory
        default = factory() if field.default is dataclasses.MISSING else field.default
        text = field.metadata.get("help", "")
        if "Default" not in text:
            text += f" [default: {default}]"
        found.append((_option(name), text))
    return found


def parse_options(
    words: list[str], method: str, fields: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of a method's config, of which values are JSON or words, and of `SpecArguments` that
    options such as ``--max-steps 4`` set.

    Raises:
        ValueError: an option is unknown, or its value is missing or invalid.
    """
    import argparse

    from transformers import HfArgumentParser

    from hf_spec.tools.training.arguments import SpecArguments

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
        word = unknown[0].partition("=")[0]
        raise ValueError(
            f"'hf-spec train {method}' has no option {word!r}{nearest(word, map(_option, names))}; "
            f"fields of its config are {', '.join(map(_option, fields))}; see 'hf-spec train "
            "--help' for the others"
        )
    arguments = {name: value for name, value in vars(found).items() if value is not absent}
    config = {name: arguments.pop(name) for name in fields if name in arguments}
    for name, value in config.items():
        with suppress(json.JSONDecodeError):  # a word is no JSON
            config[name] = json.loads(value)
    return config, arguments
