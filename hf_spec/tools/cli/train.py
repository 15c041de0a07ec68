"""``hf-spec distill``, ``train`` and ``lookups``."""

import dataclasses
import json
import os
import sqlite3
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from typer import Argument, CallbackParam, Context, Option, echo

from hf_spec.core.checks import check_choice, explained, nearest
from hf_spec.files import exclusive
from hf_spec.tools.cli import common as opt
from hf_spec.tools.cli.common import Command, check_writable, explained_interrupt, require
from hf_spec.tools.loading import NATIVE, load_model, native_dtype, read_adapters

# -- Recipes: YAML files with the options of ``hf-spec train`` -------------------------------------

#: Of a command's context: the recipe's file, the options of the command that a recipe can give, and
#: what the recipe says beside these.
RECIPE = "hf_spec.recipe"


def read_recipe(path: Path) -> dict[str, Any]:
    """Options by name, with underscores; a ValueError says what is wrong with the file."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the recipe {str(path)!r}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f", line {mark.line + 1}"
        reason = getattr(error, "problem", None) or "not UTF-8"
        raise ValueError(f"the recipe {str(path)!r}{place}: not YAML ({reason})") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(
            f"the recipe {str(path)!r} must hold options by name, such as 'max_steps: 400'"
        )
    return {name.replace("-", "_"): value for name, value in found.items()}


def as_defaults(context: Context, parameter: CallbackParam, path: Path | None) -> Path | None:
    """Make a recipe's options those of the command, unless the command line gives others; called
    before all other options are looked at."""
    if path is None or context.resilient_parsing:
        return path
    given = read_recipe(path)
    own = {one.name for one in context.command.params} - {"recipe", "help"}
    named = {name: _text(given.pop(name)) for name in own & given.keys()}
    context.default_map = {**(context.default_map or {}), **named}
    context.meta[RECIPE] = path, own, given
    return path


def words(context: Context, fields: Collection[str]) -> list[str]:
    """What a recipe says beside named options, as words of a command line; values of the config's
    ``fields`` are JSON. A ValueError names an option that there is not."""
    from hf_spec.tools.training.arguments import SpecArguments

    found, known = [], {*fields, *(field.name for field in dataclasses.fields(SpecArguments))}
    path, own, others = context.meta.get(RECIPE, ("", {}, {}))
    for name, value in others.items():
        if name not in known:
            raise ValueError(
                f"the recipe {str(path)!r}: there is no option {name!r}"
                f"{nearest(name, sorted(known.union(own)))}"
            )
        if isinstance(value, list) and name not in fields:
            found += [_option(name), *map(str, value)]
        elif value is not None or name in fields:
            found.append(f"{_option(name)}={_text(value, name in fields)}")
    return found


def _text(value: Any, is_json: bool = False) -> Any:
    """A value as the command line has it."""
    if isinstance(value, dict | list) or (is_json and not isinstance(value, str)):
        return json.dumps(value)
    return value


# -- ``hf-spec distill`` ---------------------------------------------------------------------------

#: The strategy whose options are given without its name.
DEFAULT_STRATEGY = "prompt_lookup"
#: Prompts that a model writes.
OWN = 2_000

Prompts = Annotated[
    list[str] | None,
    Option(help=f"{opt.PROMPTS}; repeatable.  [default: the model writes them itself]"),
]
Limit = Annotated[
    int | None,
    Option(
        min=1,
        help=f"Maximum number of prompts, spread evenly over categories; {OWN:,} if the model "
        "writes them.",
    ),
]
Strategy = Annotated[
    str | None,
    Option(
        "--strategy",
        "--strategies",
        help="One of 'hf-spec strategies'; none: plain generate; auto: what fits the model.  "
        "[default: that of the adapter, else auto]",
    ),
]
Adapter = Annotated[str | None, Option(help="The strategy's adapter, folder or repository.")]


def _turns(value: str) -> str:
    check_choice("--turns", value, ("last", "all"))
    return value


Turns = Annotated[
    str,
    Option(
        callback=_turns,
        help="last: the last message of a chat that is not the assistant's is answered. all: each "
        "that the assistant answered there is, in chats that go on with the model's own answers.",
    ),
]
Address = Annotated[
    str | None,
    Option(
        help="OpenAI-compatible address of an engine that serves the model, such as "
        "http://localhost:8000/v1: it answers, --batch-size prompts at a time."
    ),
]


def distill(
    model: opt.Model,
    output: opt.Output,
    prompts: Prompts = None,
    limit: Limit = None,
    max_new_tokens: opt.NewTokens = 128,
    batch_size: Annotated[int, Option(min=1, help="Prompts generated together.")] = 8,
    turns: Turns = "last",
    endpoint: Address = None,
    strategy: Strategy = None,
    strategy_kwargs: opt.Kwargs = None,
    adapter: Adapter = None,
    dtype: opt.Dtype = NATIVE,
    device: opt.Device = None,
    threads: opt.Threads = None,
    seed: Annotated[
        int,
        Option(
            min=0,
            max=opt.MAX_SEED,
            help="Of the tokens that --do-sample draws, and of the prompts that the model writes.",
        ),
    ] = 0,
    do_sample: opt.DoSample = False,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
) -> None:
    """Let a model answer prompts: training data for its adapters.

    Without --prompts the model also writes the prompts: it continues its chat template where the
    words of a user begin. Prompts and answers are written to answers.jsonl, as tokens and text, for
    load_dataset; provenance.json says how they were made. Prompts longer than the model's context
    are cut at the beginning, and counted. Repeat the command to continue an interrupted run.
    'accelerate launch' distributes the work over several processes. With --endpoint an engine such
    as vLLM answers, and only the model's config and tokenizer are loaded here.

    \b
    Examples:
      hf-spec distill --model Qwen/Qwen3-0.6B --output ./answers
      hf-spec distill --model Qwen/Qwen3-0.6B --prompts train.jsonl --output ./answers
      hf-spec distill --model M --prompts a.jsonl --prompts b.jsonl --output ./answers \\
          --limit 4000 --max-new-tokens 256 --batch-size 16
      hf-spec distill --model M --prompts P.jsonl --output ./answers --do-sample --temperature 0.7
      accelerate launch --num_processes 2 -m hf_spec.tools.cli \\
          distill --model M --prompts P.jsonl --output ./answers
      hf-spec distill --model M --prompts P.jsonl --output ./answers \\
          --endpoint http://localhost:8000/v1 --batch-size 256
    """
    from hf_spec.draft.options import AUTO
    from hf_spec.tools.training import distill as work
    from hf_spec.tools.training.endpoint import Endpoint

    # Everything that can be checked without a model comes first.
    sampling = opt.sampling(do_sample, temperature, top_k, top_p)
    if endpoint is not None:
        here = {
            "--strategy": strategy, "--strategy-kwargs": strategy_kwargs, "--adapter": adapter,
            "--dtype": None if dtype == NATIVE else dtype, "--device": device,
            "--threads": threads,
        }  # fmt: skip
        _check_endpoint(endpoint, prompts, [name for name, value in here.items() if value])
    contender, adapters = _contender(strategy, strategy_kwargs, adapter)
    require("train", "accelerate", "datasets")
    if prompts:
        chosen, files = work.read_sources(prompts, limit)
    else:
        chosen, files, limit = [], {}, limit or OWN
    if endpoint is None and dtype == NATIVE:
        dtype = native_dtype(device)
    drafts: dict[str, Any] = {"assistant_strategy": AUTO} if contender is None else contender.kwargs
    settings = {
        "model": model, "prompts": files, "limit": limit, "max_new_tokens": max_new_tokens,
        "batch_size": batch_size, "turns": turns, "strategy": drafts.get("assistant_strategy"),
        "strategy_kwargs": drafts.get("assistant_kwargs", {}), "adapter": adapter,
        "dtype": dtype, "seed": seed, "temperature": None, "top_k": None, "top_p": None, **sampling,
    }  # fmt: skip
    if endpoint is not None:
        # How it computes is the engine's, and how many requests there are at once changes nothing.
        unknown = ("batch_size", "strategy", "strategy_kwargs", "adapter", "dtype")
        settings |= {**dict.fromkeys(unknown), "endpoint": True}
    check_writable(output)
    folder = work.AnswerFolder(output)
    finished, state = folder.check(settings), work.processes(device)
    said = f"finished before, with the same settings: {output}"
    if not finished:

        def engine() -> Any:
            if endpoint is not None:
                return Endpoint(endpoint, model, batch_size)
            return _generating(settings, contender, adapters, state, device, threads)

        made = _answered(settings, folder, chosen, state, engine)
        said = _summary(made, output)
    if state.is_main_process:
        echo(said)
    state.destroy_process_group()


def _check_endpoint(address: str, prompts: list[str] | None, others: list[str]) -> None:
    """Raise a ValueError if ``--endpoint`` is no address, or given with options of a model that is
    loaded here, or in one of several processes."""
    from hf_spec.tools.training.endpoint import base_address

    base_address(address)
    if others:
        raise ValueError(
            f"{', '.join(others)} with --endpoint: the engine at {address} says how its model "
            "computes; leave out one of them"
        )
    if not prompts:
        raise ValueError("--endpoint needs --prompts: only a model loaded here writes its own")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("--endpoint runs in a single process: start it without accelerate launch")


def _answered(
    settings: dict[str, Any], folder: Any, chosen: Any, state: Any, load: Callable[[], Any]
) -> dict[str, Any]:
    """Have the prompts answered by what ``load`` gives, or those that its model writes first if
    none are chosen; returns the provenance."""
    from hf_spec.tools.training import distill as work

    main, output = state.is_main_process, folder.path
    refusal = (
        f"another hf-spec distill is writing to {str(output)!r}: wait for it, or give another "
        "--output"
    )
    with (
        explained_interrupt("the same command continues"),
        exclusive(output / ".lock", refusal) if main else nullcontext(),
    ):
        engine = load()
        if not chosen:
            own = output / work.OWN_PROMPTS
            if main and not folder.begun:
                how = settings["limit"], settings["batch_size"], settings["seed"]
                work.write_own_prompts(engine.model, engine.tokenizer, own, *how)
            state.wait_for_everyone()
            chosen, _ = work.read_sources([own])
        return work.distill(engine, chosen, folder, settings, state.wait_for_everyone)


def _generating(
    settings: dict[str, Any], contender: Any, adapters: Any, state: Any, device: str | None,
    threads: int | None,
) -> Any:  # fmt: skip
    """The model, loaded here."""
    from hf_spec.tools.training import distill as work

    if state.num_processes > 1 and device is None:
        device = str(state.device)
    name = settings["model"]
    if state.is_main_process:
        echo(f"loading {name}", err=True)
    loaded, tokenizer = load_model(name, settings["dtype"], device, adapters=adapters)
    opt.use_threads(threads)  # after accelerate has set a number, too
    return work.Generating(loaded, tokenizer, name, contender, state)


def _summary(made: dict[str, Any], output: Path) -> str:
    """What was made, by its provenance."""
    measured, cut = made["measured"], made["truncated_prompts"]
    shortened = f", {cut:,} of them with a cut prompt" if cut else ""
    by, tau = made["chosen"].get("assistant_strategy", "plain generate"), measured["tau"]
    how = "by the engine" if tau is None else f"of generating with {by}, tau {tau:.2f}"
    return (
        f"examples: {made['rows']:,}{shortened}\n"
        f"tokens: {made['answer_tokens']:,}, {made['mean_answer_tokens']:.1f} per answer\n"
        f"speed: {measured['tokens_per_second']:.1f} tokens/s in {measured['seconds']:.1f} s {how}"
        f"\nanswers: {output}"
    )


def _contender(strategy: str | None, options: str | None, adapter: str | None) -> tuple[Any, Any]:
    """The contender that generates, None for what fits the model, and the adapters to load."""
    from hf_spec.draft.options import AUTO
    from hf_spec.methods.registry import get_method
    from hf_spec.tools.bench import contenders as lineup
    from hf_spec.tools.training import distill as work

    adapters = read_adapters([adapter] if adapter else ())
    if strategy == AUTO and adapters:
        strategy = None  # that of the adapter
    name = opt.single_strategy(strategy, adapters, AUTO if options is None else DEFAULT_STRATEGY)
    if name in (None, AUTO):
        for option, value in (("--strategy-kwargs", options), ("--adapter", adapter)):
            if value is not None:
                raise ValueError(f"{option} needs the name of a strategy: give --strategy")
        return (lineup.BASELINE if name is None else None), []
    asked = get_method(str(name)).today(opt.kwargs_of(str(name), options))
    given = {**work.default_options(name), **asked}
    *tuned, contender = lineup.contenders([name], {name: given}, adapters)
    if tuned or contender.lossy:
        what = f"adapter {adapter!r}" if tuned else "acceptance='typical'"
        raise ValueError(
            f"{what} changes the answers, which are to be the model's own: choose another one"
        )
    return contender, adapters


# -- ``hf-spec train`` -----------------------------------------------------------------------------

#: Fewer answers than these are not enough, and what is said then; docs/guides/training.md.
FEW = 500
FEW_ANSWERS = (
    "note: {} answers are few. 'medusa' for a model of 135M parameters reached 2.62 tokens per "
    "pass with 11,744 answers and 1.49 with 600; with 48 it was slower than plain generate. "
    "Without --prompts, 'hf-spec distill' makes 2,000."
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
    --learning-rate, --per-device-train-batch-size, --seed, --eval-steps, --report-to tensorboard)
    but output_dir, resume_from_checkpoint and those of uploads; --optim may also be muon. Training
    uses transformers' Trainer, so 'accelerate launch' runs it on several devices. Each evaluation
    decodes held-out prompts. The checkpoint of the largest tau is kept, or that of the smallest
    loss if the method fine-tunes the model. The base model is not changed, unless a field of the
    config says so.

    \b
    Examples:
      hf-spec train medusa --model Qwen/Qwen3-0.6B --data ./answers --output ./medusa
      hf-spec train medusa --help
      hf-spec train medusa --model M --data D --output ./medusa --num-heads 3 --max-steps 400
      hf-spec train medusa --model M --data D --output ./medusa --resume --report-to tensorboard
      hf-spec train medusa --adapter ./medusa --model M --data D2 --output ./medusa-2
      hf-spec train token_recycling --model M --data ./answers --output ./table
      hf-spec train --recipe docs/recipes/qwen3-0.6b.yaml --data ./answers --output ./medusa
    """
    if method is None:
        raise ValueError("'hf-spec train' needs a METHOD, such as medusa, or --recipe with one")

    from hf_spec.tools.training import arguments as given

    chosen = given.trainable_method(method)
    fields = given.config_fields(chosen)
    of_recipe = words(context, fields)
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
    options = opt.stored_kwargs_of(method, strategy_kwargs)
    given.spec_arguments(chosen, output, adapter_config, **arguments)
    check_writable(output, chosen.peft_type)

    from hf_spec.tools.data import hub_name
    from hf_spec.tools.training import train as work
    from hf_spec.tools.training.dataset import read_answers, read_provenance

    provenance = read_provenance(data)
    if dtype == NATIVE and adapter_config.trains_base:
        dtype = "float32"  # in 16 bits most steps of training are smaller than a rounding
    base, tokenizer = load_model(model, dtype, device, pack=False)
    rows = read_answers(data, tokenizer)
    if len(rows) < FEW and chosen.fit is None:
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

    from hf_spec.tools.hub import write_card
    from hf_spec.tools.training.trainer import outcome

    write_card(output)
    for line in outcome(record):
        echo(line)
    echo(f"adapter: {output}")
    echo(f"try: hf-spec bench --model {quote(str(model))} --adapter {quote(str(output))} --by-task")


def lookups(
    model: Annotated[
        str, Option(help="Model whose tokens they are: a folder, or a repository on the Hub.")
    ],
    data: Annotated[
        list[str],
        Option(
            help="Folder of 'hf-spec distill', or prompts with answers, or ids: a file, a folder, "
            f"or {opt.BY_NAME}; repeatable."
        ),
    ],
    output: Annotated[
        Path, Option("--output", "-o", help="File to write, or one of earlier answers to add to.")
    ],
    fixed: Annotated[
        bool,
        Option(
            "--fixed", help="Make the file read-only for calls: they search it and add nothing."
        ),
    ] = False,
) -> None:
    """Write answers into a file that lookups search.

    Strategies with lookups search it with the option lookup_history, and add the answers of their
    calls to it, unless it is --fixed. Only the model's config and tokenizer are loaded.

    \b
    Examples:
      hf-spec lookups --model Qwen/Qwen3-0.6B --data ./answers --output ./answers.sqlite
      hf-spec bench --model Qwen/Qwen3-0.6B --strategies prompt_lookup \\
          --strategy-kwargs '{"lookup_history": "./answers.sqlite"}' --output ./bench
    """
    require("train", "accelerate", "datasets")
    from hf_spec.draft.lookup_file import AnswerFile, tokenizer_facts
    from hf_spec.tools.loading import load_tokenizer
    from hf_spec.tools.training.dataset import answers_of, read_answers

    config, tokenizer = load_tokenizer(model)
    answers = [ids for one in data for ids in answers_of(read_answers(one, tokenizer))]
    output.parent.mkdir(parents=True, exist_ok=True)
    file = AnswerFile(output, tokenizer_facts(config), fixed)
    with explained(f"cannot write {str(output)!r}", sqlite3.Error):
        new = file.num_new(answers)
        file.add(answers)
    repeated = f" of {len(answers):,}, the others are repeated" if new < len(answers) else ""
    echo(f"answers: {new:,} added{repeated}; the file has {file.size:,} tokens\nfile: {output}")


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

    arguments = given.added_fields(given.SpecArguments, TrainingArguments)
    if method.fit is not None:
        arguments = {name: arguments[name] for name in arguments if name in given.OF_ONE_PASS}
    fields = given.config_fields(method) | arguments
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
    options such as ``--max-steps 4`` set; a ValueError names one that is unknown or invalid."""
    import argparse

    from transformers import HfArgumentParser

    from hf_spec.tools.training.arguments import SpecArguments

    texts = [(name, str | None, dataclasses.field(default=None)) for name in fields]
    kinds: Any = (dataclasses.make_dataclass("Fields", texts), SpecArguments)
    parser = HfArgumentParser(kinds, allow_abbrev=False, add_help=False, exit_on_error=False)
    # Only what is given counts: the others have the method's defaults.
    absent = object()
    names = [field.name for kind in kinds for field in dataclasses.fields(kind)]
    namespace = argparse.Namespace(**dict.fromkeys(names, absent))
    with explained(f"'hf-spec train {method}'", argparse.ArgumentError):
        found, unknown = parser.parse_known_args(words, namespace)
    if unknown:
        word = unknown[0].partition("=")[0]
        raise ValueError(
            f"'hf-spec train {method}' has no option {word!r}{nearest(word, map(_option, names))}; "
            f"fields of its config are {', '.join(map(_option, fields))}; see 'hf-spec train "
            f"{method} --help' for the others, beside those of transformers.TrainingArguments"
        )
    arguments = {name: value for name, value in vars(found).items() if value is not absent}
    config = {name: arguments.pop(name) for name in fields if name in arguments}
    for name, value in config.items():
        with suppress(json.JSONDecodeError):  # a word is no JSON
            config[name] = json.loads(value)
    return config, arguments
