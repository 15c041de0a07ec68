"""``hf-spec run`` and ``serve``."""

import ctypes
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import sysconfig
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Argument, Context, Option, echo

from hf_spec.core.checks import first_line, install_extra, nearest
from hf_spec.threads import locked
from hf_spec.tools.cli import common as opt
from hf_spec.tools.cli.common import INTERRUPTED, NO_STRATEGY, require, single_strategy
from hf_spec.tools.loading import check_model, load_adapters, read_adapters

# -- ``hf-spec run`` -------------------------------------------------------------------------------

#: What Python starts with, the program or ``-m`` and a module behind it.
START = """\
import os, runpy, sys
import hf_spec
del sys.argv[0]
if sys.argv[0] == "-m":
    del sys.argv[0]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(
    program: Annotated[
        list[str], Argument(metavar="PROGRAM [ARGUMENTS]...", help="What to start.")
    ],
    module: Annotated[bool, Option("-m", help="PROGRAM is a module.")] = False,
) -> None:
    """Start a Python program with hf_spec imported.

    PROGRAM is a script, a console script of this environment, or a module. It runs as Python itself
    would run it. Python processes that it starts do not import hf_spec by themselves; torchrun and
    accelerate can start this command in each of theirs.

    \b
    Examples:
      hf-spec run lm_eval --model hf --model_args pretrained=M --tasks gsm8k \\
          --gen_kwargs assistant_strategy=prompt_lookup
      hf-spec run train.py --epochs 1
      hf-spec run -m package.module
      torchrun --nproc-per-node 2 --no-python hf-spec run train.py
    """
    # Only the program may import what lies in the folder where it is started.
    command = ["-P", "-c", START, *find(program[0], module), *program[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *command])


def find(program: str, module: bool = False) -> list[str]:
    """The program's file, or ``-m`` and the name of a module; a ValueError if there is none."""
    if module:
        return ["-m", program]
    if Path(program).is_file():
        return [program]
    # A console script, of this environment first, is a file of Python, too.
    folders = [sysconfig.get_path("scripts")]
    if entry_points(group="console_scripts", name=program):
        folders.append(os.environ.get("PATH", os.defpath))
    script = shutil.which(program, path=os.pathsep.join(folders))
    # If the interpreter's path is long, it is in the second line.
    if script is not None and re.match(rb"#!.*python", Path(script).read_bytes()[:512], re.DOTALL):
        return [script]
    if program.isidentifier() and importlib.util.find_spec(program) is not None:
        return ["-m", program]
    raise ValueError(
        f"PROGRAM {program!r}: there is no such file, no such console script of {sys.prefix}, and "
        "no such module; give one of these, or -m and a module."
    )


# -- ``hf-spec serve`` -----------------------------------------------------------------------------


def serve(
    context: Context,
    adapter: opt.Adapters = None,
    strategy: Annotated[
        str | None,
        Option(
            "--strategy",
            "--strategies",
            help="Strategy for requests that name none; auto picks one, none is plain generate.  "
            "[default: the adapter's, else auto; with several adapters none]",
        ),
    ] = None,
    strategy_kwargs: Annotated[
        str | None,
        Option(
            help="Options of the strategy, JSON or NAME=JSON.  [default: those stored with the "
            "adapter]"
        ),
    ] = None,
    do_sample: Annotated[
        bool | None,
        Option(
            "--do-sample/--greedy",
            help="Sampling or not, where the temperature is not 0.  [default: the model's]",
        ),
    ] = None,
    share_steps: Annotated[
        bool, Option(help="Requests of several clients share their steps, or run one at a time.")
    ] = True,
    max_rows: Annotated[
        int | None, Option(min=1, help="Most requests that share steps at once.  [default: 32]")
    ] = None,
    max_cached_tokens: Annotated[
        int | None,
        Option(
            min=1, help="Most tokens that there is room for in their caches.  [default: no limit]"
        ),
    ] = None,
    prompt_part: Annotated[
        int | None,
        Option(min=1, help="Most tokens of prompts that run between two steps.  [default: 256]"),
    ] = None,
    max_prefix_tokens: Annotated[
        int | None,
        Option(
            min=0,
            help="Most tokens of ended requests whose keys and values are kept for prompts that "
            "begin with them; 0 for none.  [default: 8192]",
        ),
    ] = None,
) -> None:
    """Run 'transformers serve' with adapters and a strategy.

    This is Transformers' own server; all other arguments are passed on, and 'transformers serve
    --help' lists them. With adapters, MODEL is their base. GET /metrics answers with counts; the
    usage of an answer has its accepted tokens and tau.

    \b
    Examples:
      hf-spec serve Qwen/Qwen3-0.6B --strategy prompt_lookup --port 8000
      hf-spec serve Qwen/Qwen3-0.6B --adapter ./bita --do-sample
      curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
        "model": "Qwen/Qwen3-0.6B", "messages": [{"role": "user", "content": "Hello"}]}'

    What a request may say, and what Transformers' server makes of it:

    \b
      honored    model, messages or prompt, stream, stop, max_tokens, top_p, tools (as far as the
                 chat template takes them), seed (if no other request runs), temperature (0 is
                 greedy; others where the server samples, see --do-sample), generation_config (an
                 object, or JSON; replaces the server's defaults: assistant_strategy, do_sample,
                 top_k, ...)
      refused    with status 400: strategies and options that cannot be, prompts that are too long,
                 files of lookups, adapters that the server was not given, several answers to a
                 prompt (num_return_sequences)
      bounded    max_tokens, by what the context leaves
      ignored    n, logprobs, response_format, tool_choice, presence_penalty, user
    """
    require("serve", "fastapi", "openai", "pydantic", "uvicorn")
    try:
        import click
        from transformers.cli.transformers import app as transformers_app
    except ImportError as error:
        raise ImportError(
            f"'transformers serve' needs packages that are not installed ({error}); "
            f"{install_extra('serve')}"
        ) from error
    _check_passed_on(context, transformers_app)
    if sys.platform == "linux":
        limit_arenas()
    limits = {
        "max_rows": max_rows, "max_cached_tokens": max_cached_tokens, "prompt_part": prompt_part,
        "max_prefix_tokens": max_prefix_tokens,
    }  # fmt: skip
    continuous = "--continuous-batching" in context.args
    _prepare_models(
        adapter or (), strategy, do_sample, continuous, share_steps, limits, strategy_kwargs
    )
    try:
        code = transformers_app(
            ["serve", *context.args], prog_name="hf-spec", standalone_mode=False
        )
    except (KeyboardInterrupt, click.Abort):  # typer's own is another
        code = INTERRUPTED
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that comes now would end it otherwise
        echo("hf-spec: interrupted", err=True)
        sys.stdout.flush()
        # Answers may still be generated: Python's end would take torch's threads down with a crash.
        os._exit(INTERRUPTED)


#: glibc's option of how many arenas threads share, and how many of them there are at most.
M_ARENA_MAX, ARENAS = -8, 2


def limit_arenas() -> None:
    """Let threads share a few of glibc's arenas, unless the environment says how many: each request
    has a thread, and freed memory stays in the arena that it came from."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(M_ARENA_MAX, ARENAS)


def _check_passed_on(context: Context, program: Any) -> None:
    """Raise a ValueError for an option that is none of Transformers' but much like one of ours, and
    for a model's folder that is not there, if it comes first."""
    own = [name for one in context.command.params for name in (*one.opts, *one.secondary_opts)]
    for name in (word.partition("=")[0] for word in context.args if word.startswith("--")):
        near = nearest(name, own)
        if near and name not in _options_of(program, "serve"):
            raise ValueError(f"No such option: {name}{near}")
    first = next(iter(context.args), "-")
    if not first.startswith("-") and not first.endswith(".gguf"):
        check_model(first)


def _options_of(program: Any, command: str) -> set[str]:
    """Options of a command, of a group of commands or a typer app."""
    from typer.main import get_command

    found: Any = program if hasattr(program, "commands") else get_command(program)
    params = found.commands[command].params
    return {name for one in params for name in (*one.opts, *one.secondary_opts)}


def _prepare_models(
    paths: Any, strategy: str | None, do_sample: bool | None, continuous: bool,
    shares: bool = True, limits: Mapping[str, int | None] | None = None,
    strategy_kwargs: str | None = None,
) -> None:  # fmt: skip
    """Let the server attach the adapters to each model, and generate with the strategy; ``limits``:
    of :func:`share_steps`."""
    from hf_spec.decoding.call import check_strategy
    from hf_spec.decoding.loop import on_end
    from hf_spec.decoding.sharing import share_steps, takes_turns
    from hf_spec.draft.options import AUTO
    from hf_spec.modeling_patches.served_models import on_load, on_metrics, on_request, tell
    from hf_spec.target.packed_weights import pack_where_it_pays

    given = {name: limit for name, limit in (limits or {}).items() if limit is not None}
    if given and not shares:
        name = next(iter(given)).replace("_", "-")
        raise ValueError(
            f"--{name} with --no-share-steps: it limits requests that share steps. Leave one out."
        )
    adapters = read_adapters(paths)
    default = NO_STRATEGY if continuous or adapters else AUTO
    chosen = single_strategy(strategy, adapters, default)
    options = next((one.options for one in adapters if one.strategy == chosen), None)
    if strategy_kwargs is not None:
        if chosen is None:
            raise ValueError("--strategy-kwargs needs the name of a strategy: give --strategy")
        options = {**(options or {}), **opt.kwargs_of(chosen, strategy_kwargs)}
    if continuous and chosen is not None:
        raise ValueError(
            f"--continuous-batching with strategy {chosen!r}: its paged cache cannot hold a tree. "
            "Leave it out, or give --strategy none."
        )

    drafts = ", ".join(f"{one.path} ({one.strategy})" for one in adapters) or "none"
    echo(f"hf-spec: strategy {chosen or NO_STRATEGY}, adapters: {drafts}", err=True)
    metrics = Metrics()

    def prepare(model: Any) -> None:
        load_adapters(model, adapters)
        config = model.generation_config
        if do_sample is not None:
            config.do_sample = do_sample
        if chosen is not None:
            config.assistant_strategy = chosen
            config.assistant_kwargs = options
            try:
                check_strategy(model, config)
            except ValueError as error:
                if strategy is not None or adapters:
                    raise
                config.assistant_strategy = None  # nobody has asked for one
                echo(f"hf-spec: no strategy by default: {first_line(error)}", err=True)
            else:
                pack_where_it_pays(model)
        name = model.name_or_path

        def told(stats: Any, _: Any) -> None:
            metrics.add(name, stats)
            _report(stats)
            tell(**_usage(stats))

        on_end(model, told)
        why = takes_turns(model)
        if shares and why is None:
            metrics.follow(name, share_steps(model, **given))
        elif shares:
            echo(f"hf-spec: requests run one at a time: {why}", err=True)

    on_load(prepare)

    own = options or {}
    places = {
        "lookup_history": [own.get("lookup_history")],
        "adapter": [own.get("adapter"), *(one.path for one in adapters)],
    }

    def check(model: Any, tokenizer: Any, inputs: Any, config: Any) -> None:
        asked = getattr(config, "assistant_kwargs", None)
        if isinstance(asked, Mapping):  # else the request is refused for that
            _check_places(places, asked)
        _check_request(model, tokenizer, inputs, config)

    on_request(check, _at_once)
    on_metrics(metrics.text)


def _at_once(model: Any, config: Any) -> int:
    """How many requests like this one may run at once."""
    from hf_spec.decoding.sharing import StepSharing

    sharing = StepSharing.of(model)
    # What is compiled may be a thread's own; plain requests gain nothing by running beside others.
    compiles = config.cache_implementation is not None or config.compile_config is not None
    if sharing is None or compiles or getattr(config, "assistant_strategy", None) is None:
        return 1
    return sharing.max_rows


#: What a request does instead of naming a place by an option.
INSTEAD = {
    "lookup_history": "Start the server with --strategy-kwargs, or give a number of tokens.",
    "adapter": "Start the server with --adapter, and name its strategy.",
}


def _check_places(own: Mapping[str, Iterable[Any]], asked: Mapping[str, Any]) -> None:
    """Raise a ValueError if an option of a request names another file, folder or repository than
    the server does: it would be written to, or loaded."""
    for name, places in own.items():
        if isinstance(asked.get(name), str) and asked[name] not in places:
            raise ValueError(
                f"{name}={asked[name]!r}: a request names no file, folder or repository. "
                f"{INSTEAD[name]}"
            )


def _check_request(model: Any, tokenizer: Any, inputs: Any, config: Any) -> None:
    """Raise a ValueError for a prompt, strategy or option that cannot be; ask for no more tokens
    than there is room for in the model's context."""
    if (count := config.num_return_sequences or 1) != 1:
        raise ValueError(
            f"num_return_sequences={count!r}: the server gives one answer to a prompt. Leave it "
            "out, and send the request several times."
        )
    from hf_spec.decoding.call import check_strategy
    from hf_spec.tools.bench.prompts import context_limit

    length, limit = inputs["input_ids"].shape[-1], context_limit(model, tokenizer)
    if limit is not None:
        if length >= limit:
            raise ValueError(
                f"the prompt has {length} tokens, and the model's context holds {limit}: shorten it"
            )
        for name, most in (("max_new_tokens", limit - length), ("max_length", limit)):
            if (getattr(config, name) or 0) > most:
                setattr(config, name, most)
    if getattr(config, "assistant_strategy", None) is not None:
        check_strategy(model, config)


def _usage(stats: Any) -> dict[str, dict[str, Any]]:
    """What the usage of an answer says of a request: accepted tokens, and those of the prompt that
    did not run, as OpenAI names them."""
    accepted, shared = sum(stats.accepted.values()), stats.details.get("shared", {})
    return {
        "prompt_tokens_details": {"cached_tokens": shared.get("reused", 0)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": stats.num_drafted_tokens - accepted,
        },
        "speculation": {
            "strategy": stats.strategy, "tau": round(stats.tau, 3),
            "forward_passes": stats.num_row_steps,
        },
    }  # fmt: skip


def _report(stats: Any) -> None:
    """Log the figures of a request."""
    tokens, rows = stats.num_generated_tokens, stats.details.get("shared", {}).get("rows")
    beside = "" if rows is None else f", {rows:.1f} rows"
    echo(
        f"hf-spec: {stats.strategy}: {tokens} tokens, tau {stats.tau:.2f}, "
        f"{tokens / stats.total_seconds:.1f} tokens/s{beside}",
        err=True,
    )


# -- What a server tells about itself --------------------------------------------------------------


#: Seconds that count for the tokens per second.
RECENT = 60.0


class Kind(NamedTuple):
    """Requests that are counted together."""

    model: str
    strategy: str


class Metrics:
    """Counts the requests of a server that name a strategy, once they are answered.

    Args:
        clock: the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._began = clock, clock()
        self._sharing: dict[str, Any] = {}
        self._requests: Counter[Kind] = Counter()
        self._totals: dict[Kind, Any] = {}
        self._recent: deque[tuple[float, Kind, int]] = deque()  # when, and how many tokens

    @locked
    def follow(self, model: str, sharing: Any) -> None:
        """Tell how many rows a model has."""
        self._sharing[model] = sharing

    @locked
    def add(self, model: str, stats: Any) -> None:
        """Count an answered request."""
        kind = Kind(model, stats.strategy)
        self._requests[kind] += 1
        self._totals.setdefault(kind, type(stats)()).merge(stats)
        self._recent.append((self._clock(), kind, stats.num_generated_tokens))
        self._forget()

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] <= self._clock() - RECENT:
            self._recent.popleft()

    @locked
    def text(self) -> str:
        """All of it, in Prometheus' text format."""
        self._forget()
        recent: Counter[Kind] = Counter()
        for _, kind, tokens in self._recent:
            recent[kind] += tokens
        seconds = min(RECENT, max(self._clock() - self._began, 1.0))
        totals, sharing = self._totals.items(), self._sharing.items()
        tables: list[tuple[str, str, str, Iterable[tuple[dict[str, str], float]]]] = [
            ("rows", "gauge", "Sequences that share steps now.",
             (({"model": name}, one.rows) for name, one in sharing)),
            ("cached_tokens", "gauge", "Tokens that there is room for in their caches.",
             (({"model": name}, one.cached_tokens) for name, one in sharing)),
            ("prefix_tokens", "gauge", "Tokens whose states are kept for prompts.",
             (({"model": name}, one.prefix_tokens) for name, one in sharing)),
            ("requests_total", "counter", "Answered requests.",
             ((kind._asdict(), count) for kind, count in self._requests.items())),
            ("request_seconds_total", "counter", "Time that they ran, in seconds.",
             ((kind._asdict(), one.total_seconds) for kind, one in totals)),
            ("tokens_total", "counter", "Generated tokens.",
             ((kind._asdict(), one.num_generated_tokens) for kind, one in totals)),
            ("row_steps_total", "counter", "Forward passes, counted once per sequence.",
             ((kind._asdict(), one.num_row_steps) for kind, one in totals)),
            ("tau", "gauge", "Generated tokens per forward pass and sequence.",
             ((kind._asdict(), one.tau) for kind, one in totals)),
            ("tokens_per_second", "gauge", "Of requests that were answered in the last minute.",
             ((kind._asdict(), recent[kind] / seconds) for kind in self._totals)),
        ]  # fmt: skip
        lines = []
        for name, shape, said, values in tables:
            lines += [f"# HELP hf_spec_{name} {said}", f"# TYPE hf_spec_{name} {shape}"]
            for labels, value in values:
                quoted = (f"{at}={json.dumps(of, ensure_ascii=False)}" for at, of in labels.items())
                lines.append(f"hf_spec_{name}{{{','.join(quoted)}}} {value:.10g}")
        return "\n".join(lines) + "\n"
