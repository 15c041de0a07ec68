"""``hf-spec distill``."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from typer import Option, echo

from hf_spec.files import exclusive
from hf_spec.tools.cli import common
from hf_spec.tools.cli import options as opt
from hf_spec.tools.loading import NATIVE, load_model, native_dtype, read_adapters

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


def distill(
    model: opt.Model,
    output: opt.Output,
    prompts: Prompts = None,
    limit: Limit = None,
    max_new_tokens: opt.NewTokens = 128,
    batch_size: Annotated[int, Option(min=1, help="Prompts generated together.")] = 8,
    strategy: Strategy = None,
    strategy_kwargs: opt.Kwargs = None,
    adapter: Adapter = None,
    dtype: opt.Dtype = NATIVE,
    device: opt.Device = None,
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
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
    'accelerate launch' distributes the work over several processes.

    \b
    Examples:
      hf-spec distill --model Qwen/Qwen3-0.6B --output ./answers
      hf-spec distill --model Qwen/Qwen3-0.6B --prompts train.jsonl --output ./answers
      hf-spec distill --model M --prompts a.jsonl --prompts b.jsonl --output ./answers \\
          --limit 4000 --max-new-tokens 256 --batch-size 16
      hf-spec distill --model M --prompts P.jsonl --output ./answers --do-sample --temperature 0.7
      accelerate launch --num_processes 2 -m hf_spec.tools.cli \\
          distill --model M --prompts P.jsonl --output ./answers
    """
    from hf_spec.drafting.options import AUTO
    from hf_spec.tools.training import distill as work

    # Everything that can be checked without a model comes first.
    sampling = opt.sampling(do_sample, temperature, top_k, top_p)
    contender, adapters = _contender(strategy, strategy_kwargs, adapter)
    common.require("train", "accelerate", "datasets")
    if prompts:
        chosen, files = work.read_sources(prompts, limit)
    else:
        chosen, files, limit = [], {}, limit or OWN
    dtype = native_dtype(device) if dtype == NATIVE else dtype
    drafts: dict[str, Any] = {"assistant_strategy": AUTO} if contender is None else contender.kwargs
    settings = {
        "model": model, "prompts": files, "limit": limit, "max_new_tokens": max_new_tokens,
        "batch_size": batch_size, "strategy": drafts.get("assistant_strategy"),
        "strategy_kwargs": drafts.get("assistant_kwargs", {}), "adapter": adapter,
        "dtype": dtype, "seed": seed, "temperature": None, "top_k": None, "top_p": None, **sampling,
    }  # fmt: skip
    common.check_writable(output)
    folder = work.AnswerFolder(output)
    finished, state = folder.check(settings), work.processes(device)
    made = None
    if not finished:
        made = _answered(settings, folder, chosen, contender, adapters, state, device, threads)
    done = f"finished before, with the same settings: {output}"
    if state.is_main_process:
        echo(done if made is None else _summary(made, output))
    state.destroy_process_group()


def _answered(
    settings: dict[str, Any], folder: Any, chosen: Any, contender: Any, adapters: Any, state: Any,
    device: str | None, threads: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Answer the prompts, or those that the model writes first if none are chosen; returns the
    provenance."""
    from hf_spec.tools.training import distill as work
    from hf_spec.tools.training.own_prompts import OWN_PROMPTS, write_own_prompts

    main, output = state.is_main_process, folder.path
    refusal = (
        f"another hf-spec distill is writing to {str(output)!r}: wait for it, or give another "
        "--output"
    )
    with (
        common.explained_interrupt("the same command continues"),
        exclusive(output / ".lock", refusal) if main else nullcontext(),
    ):
        if state.num_processes > 1 and device is None:
            device = str(state.device)
        name, dtype = settings["model"], settings["dtype"]
        if main:
            echo(f"loading {name}", err=True)
        loaded, tokenizer = load_model(name, dtype, device, adapters=adapters)
        opt.use_threads(threads)  # after accelerate has set a number, too
        if not chosen:
            own = output / OWN_PROMPTS
            if main and not folder.begun:
                how = settings["limit"], settings["batch_size"], settings["seed"]
                write_own_prompts(loaded, tokenizer, own, *how)
            state.wait_for_everyone()
            chosen, _ = work.read_sources([own])
        made: dict[str, Any] = work.distill(
            loaded, tokenizer, chosen, folder, settings, contender, state
        )
    return made


def _summary(made: dict[str, Any], output: Path) -> str:
    """What was made, by its provenance."""
    measured, cut = made["measured"], made["truncated_prompts"]
    shortened = f", {cut:,} of them with a cut prompt" if cut else ""
    by = made["chosen"].get("assistant_strategy", "plain generate")
    return (
        f"examples: {made['rows']:,}{shortened}\n"
        f"tokens: {made['answer_tokens']:,}, {made['mean_answer_tokens']:.1f} per answer\n"
        f"speed: {measured['tokens_per_second']:.1f} tokens/s in {measured['seconds']:.1f} s of "
        f"generating with {by}, tau {measured['tau']:.2f}\nanswers: {output}"
    )


def _contender(strategy: str | None, options: str | None, adapter: str | None) -> tuple[Any, Any]:
    """The contender that generates, None for what fits the model, and the adapters to load."""
    from hf_spec.drafting.options import AUTO
    from hf_spec.methods.registry import get_method
    from hf_spec.tools.bench import contenders as lineup
    from hf_spec.tools.training import distill as work

    adapters = read_adapters([adapter] if adapter else ())
    if strategy == AUTO and adapters:
        strategy = None  # that of the adapter
    name = common.single_strategy(strategy, adapters, AUTO if options is None else DEFAULT_STRATEGY)
    if name in (None, AUTO):
        for option, value in (("--strategy-kwargs", options), ("--adapter", adapter)):
            if value is not None:
                raise ValueError(f"{option} needs the name of a strategy: give --strategy")
        return (lineup.BASELINE if name is None else None), []
    own = work.LOOKUP_OPTIONS if name == DEFAULT_STRATEGY else {}
    asked = get_method(str(name)).today(opt.kwargs_of(str(name), options))
    given = {**work.OPTIONS, **own, **asked}
    *tuned, contender = lineup.contenders([name], {name: given}, adapters)
    if tuned or contender.lossy:
        what = f"adapter {adapter!r}" if tuned else "acceptance='typical'"
        raise ValueError(
            f"{what} changes the answers, which are to be the model's own: choose another one"
        )
    return contender, adapters
