"""``hf-spec demo``, ``bench`` and ``search``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option, echo

from hf_spec.core.checks import MAX_DRAFT_TOKENS
from hf_spec.tools.cli import common as opt
from hf_spec.tools.cli.common import (
    check_writable,
    explained_interrupt,
    load_library,
    require,
    show_results,
)
from hf_spec.tools.loading import NATIVE, Adapter, load_model, read_adapters

# -- ``hf-spec demo`` ------------------------------------------------------------------------------

#: Lines of a prompt and of its continuation that are shown.
SHOWN_LINES = 8


def demo(
    output: opt.Output = Path("hf-spec-demo"),
    model: Annotated[
        str | None, Option(help="Instead of the small one: a folder, or a repository on the Hub.")
    ] = None,
    limit: Annotated[int, Option(min=1, help="Prompts; there are 8, with --model 24.")] = 2,
    max_new_tokens: opt.NewTokens = 96,
    dtype: opt.Dtype = "float32",
    threads: Annotated[
        int | None,
        Option(min=1, help="CPU threads of torch.  [default: 1; with --model torch's choice]"),
    ] = None,
) -> None:
    """See a small model write the same code, faster.

    The model ships with the package and has read the modeling code of Transformers. It continues
    beginnings of Python classes, plainly and with each strategy; texts and times are compared. It
    takes half a minute. With --model, another model answers prompts of hf-spec bench; in a clone of
    the repository, with the adapters of hub_cards/adapters that fit it. Without --model, nothing is
    downloaded. Exits with an error if an output differs from plain generate's other than at a tie
    of two tokens, which float32 leaves none of in practice.

    \b
    Examples:
      hf-spec demo
      hf-spec demo --limit 8 --max-new-tokens 256
      hf-spec demo --model HuggingFaceTB/SmolLM2-135M-Instruct --dtype bfloat16
    """
    check_writable(output)
    echo("Loading PyTorch and Transformers, which takes a few seconds", err=True)
    load_library()

    from hf_spec.methods.registry import get_method
    from hf_spec.tools.bench.contenders import BASELINE, contenders
    from hf_spec.tools.bench.environment import environment_of
    from hf_spec.tools.bench.runner import run
    from hf_spec.tools.data import ALL
    from hf_spec.tools.demo import FREE_STRATEGY, load

    # A second thread gains little on so small a model, and waits where others work, too.
    opt.use_threads(1 if threads is None and model is None else threads)
    loaded, tokenizer, adapters, prompts = load(model, dtype, limit)
    names = dict.fromkeys([FREE_STRATEGY, *(adapter.strategy for adapter in adapters)])
    lineup = contenders(names, adapters=adapters)
    count = f"{len(prompts)} prompt{'s' * (len(prompts) != 1)}"
    what = model or "a small model that ships with hf_spec"
    echo(
        f"{count}, up to {max_new_tokens} new tokens each, by {what}:\n"
        "with generate() as it is, and with"
    )
    for name in names:
        echo(f"  {name:14} {get_method(name).summary}")
    show = _Shown(tokenizer, prompts, [BASELINE.name, *(one.name for one in lineup)])
    result = run(loaded, tokenizer, prompts, lineup, max_new_tokens=max_new_tokens, seen=show.call)
    echo("")
    environment = environment_of(loaded, model or "demo model", None)
    show_results(result, environment, output, phases=False)
    echo("speedup: of tokens/s beside generate; tau: tokens per forward pass of the model")
    rows = [row for row in result.rows if row["task"] == ALL]
    if any(row["diverged"] for row in rows):
        raise ValueError("an output differs from plain generate's other than at a tie")
    ties = sum(row["diverged_at_tie"] for row in rows)
    but = f", but for {ties} that part where two tokens tie in this dtype" if ties else ""
    echo(f"Every output equals plain generate's{but}.")
    if model is None:
        echo("Your model: hf-spec demo --model MODEL; what suits it: hf-spec doctor --model MODEL")


class _Shown:
    """Prints calls as they end, those of a prompt in one order, the plain one first."""

    def __init__(self, tokenizer: Any, prompts: Any, order: list[str]):
        self.tokenizer, self.prompts, self.order = tokenizer, prompts, order
        self.made: dict[str, Any] = {}  # of the prompt at hand
        self.printed = self.number = 0

    def call(self, made: Any) -> None:
        """Print a measurement, once those before it in the order are printed."""
        if not self.made:
            self.number += 1
            echo(f"\n--- prompt {self.number} of {len(self.prompts)} ---")
            echo("\n".join(self.prompts[made.prompts[0]].text.rstrip().splitlines()[-SHOWN_LINES:]))
        self.made[made.strategy] = made
        while self.printed < len(self.order) and self.order[self.printed] in self.made:
            self._print(self.made[self.order[self.printed]])
            self.printed += 1
        if self.printed == len(self.order):
            self.made, self.printed = {}, 0

    def _print(self, made: Any) -> None:
        plain, speed = self.made[made.baseline], made.new_tokens / made.seconds
        line = f"{made.strategy:14} {made.new_tokens:4} tokens {made.seconds:7.2f} s"
        line += f" {speed:8.1f} tokens/s"
        if made is plain:
            text = self.tokenizer.decode(made.rows[0], skip_special_tokens=True)
            written = text.splitlines()[:-1] or [text]  # the last line may be cut off
            shown = "\n".join(written[:SHOWN_LINES]).rstrip()
            more = "\n..." * (len(written) > SHOWN_LINES)
            echo(f"--- what the model writes ---\n{shown}{more}\n---\n{line}")
            return
        faster = speed * plain.seconds / max(plain.new_tokens, 1)
        same = "the same text" if made.rows == plain.rows else "another text"
        echo(f"{line} {faster:6.2f}x  {same}")


# -- ``hf-spec bench`` -----------------------------------------------------------------------------

DEFAULT_BACKEND = "inductor"

Strategies = Annotated[
    str | None,
    Option(
        "--strategies",
        "--strategy",
        help="Comma-separated: names of 'hf-spec strategies', transformers:prompt_lookup, "
        "transformers:assisted; NAME:LABEL for a strategy with options of its own.  [default: "
        "those of the adapters, draft_model with --assistant, else token_recycling]",
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


SuiteName = Annotated[
    str | None,
    Option(
        help="Measure tau as the field does: spec-bench, speed-bench, mt-bench, humaneval or "
        "gsm8k, all turns, groups of equal weight, --nodes 8,60. Its dataset is read from the "
        "Hub, or --prompts."
    ),
]
Nodes = Annotated[
    str | None,
    Option(
        help="Draft trees of so many tokens in every step, without lookups: 8,60 measures both.  "
        "[default: the policy decides]"
    ),
]
Chains = Annotated[
    str | None, Option(help="Draft so many tokens one after the other, as engines do: 3 or 3,7.")
]


def bench(
    model: opt.Model,
    prompts: opt.Prompts = None,
    strategies: Strategies = None,
    adapter: opt.Adapters = None,
    assistant: Assistants = None,
    strategy_kwargs: opt.KwargsByName = None,
    dtype: opt.Dtype = NATIVE,
    max_new_tokens: Annotated[
        int | None,
        Option(min=1, help="New tokens per prompt.  [default: 128, with --suite 256]"),
    ] = None,
    suite: SuiteName = None,
    nodes: Nodes = None,
    chain: Chains = None,
    batch_size: Annotated[str, Option(help="One size, or several: 1,2,4.")] = "1",
    limit: opt.Limit = None,
    output: opt.Output = Path("hf-spec-bench"),
    do_sample: opt.DoSample = False,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Annotated[
        int,
        Option(
            min=0,
            max=opt.MAX_SEED,
            help="Of the tokens that --do-sample draws, and of --synthetic-acceptance.",
        ),
    ] = 0,
    device: opt.Device = None,
    threads: opt.Threads = None,
    pack_weights: PackWeights = True,
    attn_implementation: Annotated[
        str | None, Option(help="eager, sdpa, tree_attention, ...")
    ] = None,
    compile: Compile = False,
    backend: Backend = None,
    synthetic_acceptance: SyntheticAcceptance = None,
    continuous: Annotated[
        bool,
        Option(
            "--continuous",
            help="Also admit rows as others end, at most --batch-size at once, beside "
            "Transformers' generate_batch; batches mix categories.",
        ),
    ] = False,
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
      hf-spec bench --model M --adapter ./eagle3 --suite mt-bench --chain 3
      hf-spec bench --model M --adapter ./eagle3 --suite spec-bench --prompts question.jsonl \\
          --max-new-tokens 1024 --do-sample --temperature 1
    """
    from hf_spec.tools.bench.contenders import SyntheticRates, add_untrained
    from hf_spec.tools.bench.environment import environment_of
    from hf_spec.tools.bench.prompts import (
        BUNDLED,
        NEW_TOKENS,
        NODES,
        place_of,
        protocol,
        read_prompts,
        suite_prompts,
    )
    from hf_spec.tools.bench.runner import run

    # Everything that can be checked without a model comes first.
    sizes = opt.whole_numbers("--batch-size", batch_size)
    if backend is not None and not compile:
        raise ValueError("--backend needs --compile")
    options = opt.sampling(do_sample, temperature, top_k, top_p, repetition_penalty)
    trained = read_adapters(adapter or ())
    rates = None if synthetic_acceptance is None else SyntheticRates.parse(synthetic_acceptance)
    if suite is not None and nodes is None and chain is None:
        nodes = NODES
    fixed = tuple(opt.whole_numbers(option, text) if text is not None else []
                  for option, text in (("--nodes", nodes), ("--chain", chain)))  # fmt: skip
    lineup, added = _lineup(
        strategies, trained, assistant or [], strategy_kwargs or [], rates, *fixed
    )
    place, recorded = prompts or BUNDLED, None
    if suite is None:
        read = read_prompts(place)
    else:
        place = place_of(suite, prompts)
        read = suite_prompts(suite, place)
        recorded = protocol(suite, place, read) | dict(zip(("nodes", "chain"), fixed))
    check_writable(output)

    loaded, tokenizer = load_model(model, dtype, device, attn_implementation, trained, pack_weights)
    add_untrained(loaded, added)
    lineup = _with_assistants(lineup, loaded, tokenizer)
    result = run(
        loaded, tokenizer, read, lineup, batch_sizes=sizes,
        max_new_tokens=max_new_tokens or (128 if suite is None else NEW_TOKENS),
        limit=limit, generate_kwargs=options, seed=seed, synthetic=rates, protocol=recorded,
        compiled=(backend or DEFAULT_BACKEND) if compile else None, continuous=continuous,
    )  # fmt: skip
    if place == BUNDLED:
        result.notes.append("the prompts are hf_spec's own; measure yours with --prompts FILE")
    if recorded is not None and recorded["missing"]:
        missing = ", ".join(recorded["missing"])
        result.notes.append(f"the file has no prompts of {missing}, which the mean leaves out")
    environment = environment_of(loaded, model, place)
    show_results(result, environment, output, by_task, as_json)


def _lineup(
    strategies: str | None, trained: list[Adapter], assistants: list[str], kwargs: list[str],
    synthetic: Any, nodes: list[int], chains: list[int],
) -> tuple[list[Any], list[Adapter]]:  # fmt: skip
    """What takes part, at these sizes if there are any, and the adapters of random weights that it
    needs where acceptance is synthetic."""
    from hf_spec.tools.bench.contenders import contenders, parse_names, sized, untrained

    default = [one.strategy for one in trained] + ["draft_model"] * bool(assistants)
    names = parse_names((default or ["token_recycling"]) if strategies is None else strategies)
    added = untrained(names, trained) if synthetic is not None else []
    options = opt.parse_kwargs(kwargs, names)
    if nodes or chains:
        options = sized(names, options, nodes, chains)
        names = [*options]
    return contenders(names, options, [*trained, *added], assistants), added


def _with_assistants(lineup: list[Any], model: Any, tokenizer: Any) -> list[Any]:
    """The contenders, with their assistants loaded."""
    dtype, device = str(model.dtype).removeprefix("torch."), str(model.device)
    keywords: dict[str | None, dict[str, Any]] = {None: {}}
    for path in dict.fromkeys(one.assistant for one in lineup if one.assistant is not None):
        # If the model is packed, it is where it drafts.
        assistant, own = load_model(path, dtype, device, pack=False)
        keywords[path] = {"assistant_model": assistant}
        if own.get_vocab() != tokenizer.get_vocab():
            keywords[path] |= {"tokenizer": tokenizer, "assistant_tokenizer": own}
    return [replace(one, kwargs={**one.kwargs, **keywords[one.assistant]}) for one in lineup]


# -- ``hf-spec search`` ----------------------------------------------------------------------------

NumDraftTokens = Annotated[
    int,
    Option(
        "--num-draft-tokens", "--max-draft", min=1, max=MAX_DRAFT_TOKENS,
        help="K, most tokens drafted in a step.",
    ),
]  # fmt: skip


def search(
    model: opt.Model,
    prompts: Annotated[str, Option(help=f"Development prompts: {opt.PROMPTS}.")],
    output: opt.Output,
    trials: Annotated[int, Option(min=1, help="Number of trials, earlier runs included.")] = 100,
    limit: opt.Limit = 8,
    held_out: Annotated[
        int | None,
        Option(
            min=0, help="Further prompts, on which the best are measured.  [default: as --limit]"
        ),
    ] = None,
    max_new_tokens: Annotated[int, Option(min=2, help="New tokens per prompt.")] = 64,
    dtype: opt.Dtype = NATIVE,
    num_draft_tokens: NumDraftTokens = 12,
    seed: Annotated[
        int, Option(min=0, max=opt.MAX_SEED, help="Of the choices that are tried.")
    ] = 0,
    device: opt.Device = None,
    threads: opt.Threads = None,
) -> None:
    """Search for the layers that layer_skip leaves out when it drafts.

    Maximizes tokens per second on some of your prompts, and measures the best choices on others, in
    turns with plain decoding. The output is an adapter folder without weights, with settings and
    card. Repeat the command to continue an interrupted search, or with more --trials to extend it.
    The study is Optuna's: its dashboard and its plots read study.jsonl.

    \b
    Examples:
      hf-spec search --model Qwen/Qwen3-0.6B --prompts dev.jsonl --output ./skip
      hf-spec search --model M --prompts dev.jsonl --output ./skip --trials 500 --limit 16
      hf-spec bench --model M --adapter ./skip --prompts test.jsonl
    """
    from hf_spec.tools.bench.prompts import read_prompts

    require("search", "optuna", "scipy")

    from hf_spec.methods.registry import get_method
    from hf_spec.tools.search import STRATEGY, LayerSearch

    chosen, others = _divided(read_prompts(prompts), limit, held_out)
    check_writable(output, get_method(STRATEGY).peft_type)

    from hf_spec.files import writing

    loaded, tokenizer = load_model(model, dtype, device)
    with writing(output), explained_interrupt("the same command continues the search"):
        work = LayerSearch(
            loaded, tokenizer, chosen, output,
            max_new_tokens=max_new_tokens, num_draft_tokens=num_draft_tokens, seed=seed,
        )  # fmt: skip
        work.search(trials)
        choice, finalists, bench = work.confirm(others or chosen)
    row = _write(output, model, prompts, work, choice, finalists, bench, len(others))
    echo(
        f"skips attention {choice['skip_attention']} and MLP {choice['skip_mlp']}: "
        f"{row['speedup']:.2f}x plain decoding, tau {row['tau']:.2f}, "
        f"{row['tokens_per_second']:.1f} tokens/s on {row['prompts']} "
        f"{'held-out' if others else 'development'} prompts"
    )
    if row["speedup"] < 1:
        echo("note: not faster here; small models leave drafting little to save")
    echo(f"adapter: {output}")


def _write(
    output: Path, model: str, prompts: str, work: Any, choice: Any, finalists: Any, bench: Any,
    held_out: int,
) -> dict[str, Any]:  # fmt: skip
    """Write the adapter, the search and what was measured; returns the figures of all prompts."""
    from hf_spec.files import write_json
    from hf_spec.methods.registry import get_method
    from hf_spec.tools.bench.environment import environment_of, package_version
    from hf_spec.tools.bench.results import write_results
    from hf_spec.tools.hub import RESULTS, SEARCH, attached, save_adapter, write_card
    from hf_spec.tools.search import STRATEGY

    environment = environment_of(work.model, model, prompts)
    config_class: Any = get_method(STRATEGY).adapter_config
    with attached(work.model, config_class(**choice)) as peft_model:  # which has no weights
        save_adapter(peft_model, output, STRATEGY, {"num_draft_tokens": work.num_draft_tokens})
    row: dict[str, Any] = bench.overall(STRATEGY)
    data = {
        "environment": {**environment, "optuna": package_version("optuna")},
        "identity": work.study.user_attrs["identity"],
        "trials": work.finished,
        "held_out": held_out,
        "best": {**choice, "speedup": row["speedup"], "tau": row["tau"]},
        "finalists": finalists,
    }
    write_json(output / SEARCH, data)
    # The file of prompts is the same, the prompts are others.
    write_results(output / RESULTS, bench, {**environment, "held_out": bool(held_out)})
    write_card(output)
    return row


def _divided(
    prompts: list[Any], limit: int | None, held_out: int | None
) -> tuple[list[Any], list[Any]]:
    """The prompts of the trials and the held-out ones, both of all categories."""
    from hf_spec.tools.bench.prompts import spread

    chosen = spread(prompts, limit)
    used = set(map(id, chosen))
    rest = [prompt for prompt in prompts if id(prompt) not in used]
    if held_out is not None and held_out > len(rest):
        raise ValueError(
            f"--held-out {held_out}: of {len(prompts)} prompts {len(chosen)} are searched on, "
            f"which leaves {len(rest)}; give more prompts, or a lower --limit"
        )
    return chosen, spread(rest, len(chosen) if held_out is None else held_out)
