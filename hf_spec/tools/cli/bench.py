"""``hf-spec bench``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from hf_spec.tools.cli import options as opt
from hf_spec.tools.cli.common import check_writable, show_results
from hf_spec.tools.loading import NATIVE, Adapter, load_model, read_adapters

DEFAULT_BACKEND = "inductor"

Strategies = Annotated[
    str | None,
    Option(
        "--strategies",
        "--strategy",
        help="Comma-separated: names of 'hf-spec strategies', transformers:prompt_lookup, "
        "transformers:assisted; NAME:LABEL for a strategy with options of its own.  [default: "
        "those of the adapters, draft_model with --assistant, else prompt_lookup]",
    ),
]
Assistants = Annotated[list[str] | None, Option(help="Smaller model that drafts; repeatable.")]
RepetitionPenalty = Annotated[
    float | None, Option(help="For greedy decoding and sampling.  [default: the model's]")
]
PackWeights = Annotated[
    bool, Option(help="On a CPU, let strategies compute with packed copies of large weights.")
]
Compile = Annotated[bool, Option("--compile", help="Measure compiled or recorded steps, too.")]
Backend = Annotated[
    str | None,
    Option(
        help="With --compile: cudagraphs records steps on a GPU; others are torch.compile's.  "
        f"[default: {DEFAULT_BACKEND}]"
    ),
]
SyntheticAcceptance = Annotated[
    str | None,
    Option(
        help="Accept drafts at these rates, whatever they are: 0.8,0.6 accepts the first draft "
        "token in 80% of the steps and the first two in 60%. Measures the speed that a tau would "
        "bring, also without a trained adapter; outputs are not the model's."
    ),
]


def bench(
    model: opt.Model,
    prompts: opt.Prompts = None,
    strategies: Strategies = None,
    adapter: opt.Adapters = None,
    assistant: Assistants = None,
    strategy_kwargs: opt.KwargsByName = None,
    dtype: opt.Dtype = NATIVE,
    max_new_tokens: opt.NewTokens = 128,
    batch_size: Annotated[str, Option(help="One size, or several: 1,2,4.")] = "1",
    limit: opt.Limit = None,
    output: opt.Output = Path("hf-spec-bench"),
    do_sample: opt.DoSample = False,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: opt.Seed = 0,
    device: opt.Device = None,
    threads: opt.Threads = None,
    pack_weights: PackWeights = True,
    attn_implementation: Annotated[
        str | None, Option(help="eager, sdpa, tree_attention, ...")
    ] = None,
    compile: Compile = False,
    backend: Backend = None,
    synthetic_acceptance: SyntheticAcceptance = None,
    by_task: Annotated[bool, Option("--by-task", help="Print a row for each task, too.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Measure strategies against plain generate.

    All run in one process and take turns prompt by prompt. Prints a table and writes results.json.
    The chat template is applied if the tokenizer has one. Prompts longer than the model's context
    are cut at the beginning, and counted. Batches never mix categories.

    \b
    Examples:
      hf-spec bench --model Qwen/Qwen3-0.6B
      hf-spec bench --model Qwen/Qwen3-0.6B --prompts spec_bench.jsonl --limit 26 --by-task
      hf-spec bench --model M --strategies prompt_lookup,transformers:prompt_lookup
      hf-spec bench --model M --adapter ./layer-skip --batch-size 1,4 --do-sample --seed 1
      hf-spec bench --model M --prompts P.jsonl --strategies prompt_lookup \\
          --strategy-kwargs 'prompt_lookup={"max_ngram": 4}'
      hf-spec bench --model M --prompts P.jsonl --adapter ./medusa --compile
      hf-spec bench --model M --strategies auto --compile --backend cudagraphs
      hf-spec bench --model LARGE --prompts P.jsonl --assistant SMALL \\
          --strategies draft_model,transformers:assisted
      hf-spec bench --model M --strategies medusa,eagle3 --synthetic-acceptance 0.85,0.7,0.55,0.4
    """
    from hf_spec.tools.bench.contenders import add_untrained
    from hf_spec.tools.bench.environment import environment_of
    from hf_spec.tools.bench.prompts import BUNDLED, read_prompts
    from hf_spec.tools.bench.runner import run
    from hf_spec.tools.bench.synthetic import SyntheticRates

    # Everything that can be checked without a model comes first.
    sizes = opt.whole_numbers("--batch-size", batch_size)
    if backend is not None and not compile:
        raise ValueError("--backend needs --compile")
    options = opt.sampling(do_sample, temperature, top_k, top_p, repetition_penalty)
    trained = read_adapters(adapter or ())
    rates = None if synthetic_acceptance is None else SyntheticRates.parse(synthetic_acceptance)
    lineup, added = _lineup(strategies, trained, assistant or [], strategy_kwargs or [], rates)
    read = read_prompts(prompts or BUNDLED)
    check_writable(output)

    loaded, tokenizer = load_model(model, dtype, device, attn_implementation, trained, pack_weights)
    add_untrained(loaded, added)
    lineup = _with_assistants(lineup, loaded, tokenizer)
    result = run(
        loaded, tokenizer, read, lineup, batch_sizes=sizes, max_new_tokens=max_new_tokens,
        limit=limit, generate_kwargs=options, seed=seed, synthetic=rates,
        compiled=(backend or DEFAULT_BACKEND) if compile else None,
    )  # fmt: skip
    if prompts is None:
        result.notes.append("the prompts are hf_spec's own; measure yours with --prompts FILE")
    environment = environment_of(loaded, model, prompts or BUNDLED)
    show_results(result, environment, output, by_task, as_json)


def _lineup(
    strategies: str | None, trained: list[Adapter], assistants: list[str], kwargs: list[str],
    synthetic: Any,
) -> tuple[list[Any], list[Adapter]]:  # fmt: skip
    """What takes part, and the adapters of random weights that it needs where acceptance is
    synthetic."""
    from hf_spec.tools.bench.contenders import contenders, parse_names, untrained

    default = [one.strategy for one in trained] + ["draft_model"] * bool(assistants)
    names = parse_names((default or ["prompt_lookup"]) if strategies is None else strategies)
    added = untrained(names, trained) if synthetic is not None else []
    options = opt.parse_kwargs(kwargs, names)
    return contenders(names, options, [*trained, *added], assistants), added


def _with_assistants(lineup: list[Any], model: Any, tokenizer: Any) -> list[Any]:
    """The contenders, with their assistants loaded."""
    names = dict.fromkeys(one.assistant for one in lineup if one.assistant is not None)
    loaded: dict[Any, Any] = {name: _assistant(name, model, tokenizer) for name in names}
    return [replace(one, kwargs={**one.kwargs, **loaded.get(one.assistant, {})}) for one in lineup]


def _assistant(path: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Keyword arguments for ``generate`` with an assistant model."""
    dtype, device = str(model.dtype).removeprefix("torch."), str(model.device)
    # If the model is packed, it is where it drafts.
    assistant, assistant_tokenizer = load_model(path, dtype, device, pack=False)
    keywords = {"assistant_model": assistant}
    if assistant_tokenizer.get_vocab() != tokenizer.get_vocab():
        keywords |= {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}
    return keywords
