"""Shared by the commands: options, checks, results."""

import errno
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from typer import Exit, Option, echo
from typer.core import TyperCommand

from hf_spec.core.checks import check_choice, check_range, install_extra
from hf_spec.tools.data import parse_json
from hf_spec.tools.loading import NATIVE, Adapter, check_adapter

# -- Options that several commands share, and the parsing of their values --------------------------

DTYPES = (NATIVE, "auto", "bfloat16", "float16", "float32", "float64")


def _known(dtype: str) -> str:
    check_choice("--dtype", dtype, DTYPES)
    return dtype


def use_threads(threads: int | None) -> int | None:
    """Set the number of threads of torch; None leaves it unchanged."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    return threads


Model = Annotated[str, Option(help="Model: a folder, or a repository on the Hub.")]
Dtype = Annotated[
    str,
    Option(
        callback=_known,
        help=f"One of {', '.join(DTYPES)}. auto: the checkpoint's. native: bfloat16, or float32 on "
        "a CPU that has no instructions for it.",
    ),
]
Device = Annotated[
    str | None, Option(help="cpu, cuda, ...  [default: an accelerator if there is one]")
]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of text.")]
Threads = Annotated[int | None, Option(min=1, callback=use_threads, help="CPU threads of torch.")]
#: Help of options that take data.
BY_NAME = "a dataset of the Hub as ORG/NAME[:SPLIT[:COLUMN]]"
PROMPTS = (
    f"JSON lines, a JSON array or parquet, or {BY_NAME}; rows with messages, conversations, turns, "
    "prompt, question or instruction, and optionally category"
)
Prompts = Annotated[
    str | None, Option(help=f"{PROMPTS}.  [default: 24 of our own, four of each of six tasks]")
]
Limit = Annotated[
    int | None, Option(min=1, help="Maximum number of prompts, spread evenly over categories.")
]
NewTokens = Annotated[int, Option(min=1, help="New tokens per prompt.")]
Output = Annotated[Path, Option("--output", "-o", help="Folder to write.")]
Adapters = Annotated[list[str] | None, Option(help="Adapter folder or repository; repeatable.")]
KwargsByName = Annotated[
    list[str] | None,
    Option(help="Options of a strategy, NAME=JSON, or JSON if there is only one; repeatable."),
]
Kwargs = Annotated[str | None, Option(help="Options of the strategy, JSON or NAME=JSON.")]
StoredKwargs = Annotated[
    str | None, Option(help="Options of the strategy, JSON or NAME=JSON; stored with the adapter.")
]
#: The largest seed that all generators take.
MAX_SEED = 2**32 - 1
DoSample = Annotated[bool, Option("--do-sample", help="Sample instead of greedy decoding.")]
OF_SAMPLING = "With --do-sample.  [default: the model's]"
Temperature = Annotated[float | None, Option(help=OF_SAMPLING)]
TopK = Annotated[int | None, Option(min=1, help=OF_SAMPLING)]
TopP = Annotated[float | None, Option(help=OF_SAMPLING)]


def sampling(
    do_sample: bool, temperature: float | None, top_k: int | None, top_p: float | None,
    repetition_penalty: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """``do_sample`` and the options that are set; a ValueError names one that is invalid, or given
    without ``--do-sample``. Greedy decoding may have a repetition penalty, too."""
    values = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    given = {name: value for name, value in values.items() if value is not None}
    if given and not do_sample:
        raise ValueError(f"--{next(iter(given)).replace('_', '-')} needs --do-sample")
    if temperature is not None:
        check_range("--temperature", temperature, 0.0, open_low=True)
    if top_p is not None:
        check_range("--top-p", top_p, 0.0, 1.0, open_low=True)
    if repetition_penalty is not None:
        given["repetition_penalty"] = repetition_penalty
    return {"do_sample": do_sample, **given}


def whole_numbers(option: str, text: str) -> list[int]:
    """The different numbers, from 1, in a value such as ``1,2,4``; a ValueError for others."""
    sizes = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(f"{option} {text!r}: must be numbers from 1, such as 1 or 1,2,4")
    return list(dict.fromkeys(sizes))


def parse_kwargs(texts: Iterable[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Strategy options by name, from texts such as ``prompt_lookup={"max_ngram": 3}``, of which the
    name may be left out where there is only one; a ValueError names one of another form, or of a
    strategy that does not take part."""
    result: dict[str, dict[str, Any]] = {}
    for text in texts:
        option, (name, equals, value) = f"--strategy-kwargs {text!r}", text.partition("=")
        if len(names) == 1 and text.lstrip().startswith("{"):
            option, name, equals, value = "--strategy-kwargs", names[0], "=", text
        if name not in names or not equals:
            raise ValueError(
                f"{option} must be NAME=JSON with a NAME that takes part: "
                f"{', '.join(names) or 'none does'}"
            )
        result.setdefault(name, {}).update(json_object(option, value))
    return result


def kwargs_of(name: str, text: str | None) -> dict[str, Any]:
    """Options of the only strategy, from a text that :func:`parse_kwargs` takes."""
    return parse_kwargs([] if text is None else [text], [name]).get(name, {})


def stored_kwargs_of(name: str, text: str | None) -> dict[str, Any]:
    """The same, of options that are stored with an adapter; a ValueError for some that cannot
    be."""
    from hf_spec.decoding.call import check_stored
    from hf_spec.methods.registry import get_method

    options = kwargs_of(name, text)
    get_method(name).parse_options(options)
    check_stored(options, "--strategy-kwargs")
    return options


def json_object(option: str, text: str | None) -> dict[str, Any]:
    """The JSON object in the value of an option; empty if the option is not given. A ValueError
    names the option."""
    value = {} if text is None else parse_json(option, text)
    if not isinstance(value, dict):
        raise ValueError(f"{option}: must be a JSON object, such as {{}}")
    return value


# -- Shared by several commands: exit codes, checks before the work, results -----------------------

#: Value of ``--strategy`` for plain ``generate``.
NO_STRATEGY = "none"
#: Exit codes: invalid input; interrupted (as shells report SIGINT).
BAD_INPUT, INTERRUPTED = 2, 130


class Command(TyperCommand):
    """A command that works with the library; its help does not."""

    def invoke(self, ctx: Any) -> Any:
        for name in ("folder", "adapter"):  # what a JSON file is enough to refuse
            value = ctx.params.get(name)
            for place in value if isinstance(value, list) else [value]:
                if place is not None:
                    check_adapter(str(place), folder=name == "folder")
        load_library()
        return super().invoke(ctx)


def load_library() -> None:
    """Run ``hf_spec/__init__.py``, which takes seconds, if it waits for this."""
    library: Any = sys.modules["hf_spec"]
    if library._waits:
        importlib.reload(library)


def require(extra: str, *packages: str) -> None:
    """Raise an ImportError unless these optional packages are installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"this needs packages that are not installed ({', '.join(missing)}); "
            f"{install_extra(extra)}"
        )


def single_strategy(name: str | None, adapters: Sequence[Adapter], default: str) -> str | None:
    """The strategy of a command that runs only one: ``name``, which may be ``auto``, that of the
    only adapter, or ``default``; None for plain ``generate``."""
    import hf_spec
    from hf_spec.draft.options import AUTO
    from hf_spec.methods.registry import get_method

    name = name or (adapters[0].strategy if len(adapters) == 1 else default)
    if name in (NO_STRATEGY, AUTO):
        return name if name == AUTO else None
    check_choice("strategy", name, [NO_STRATEGY, AUTO, *hf_spec.strategies()])
    if get_method(name).needs_adapter and all(one.strategy != name for one in adapters):
        raise ValueError(f"strategy {name!r} needs a trained adapter: give --adapter")
    return name


def check_writable(folder: Path, kind: str | None = None) -> None:
    """Make the output folder; raise a ValueError if files cannot be written into it, or those of an
    adapter of type ``kind`` would replace others there."""
    if kind is not None:
        from hf_spec.adapters.config import check_replaces

        check_replaces(folder, kind)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"cannot write into the folder --output {str(folder)!r}: {error.strerror}"
        ) from error


def show_results(
    result: Any, environment: dict[str, Any], output: Path, by_task: bool = False,
    as_json: bool = False, phases: bool = True,
) -> None:  # fmt: skip
    """Write and print what was measured, with ``phases`` where the time went; exit if it was
    interrupted. If that came before anything was measured, earlier results stay."""
    from hf_spec.tools.bench import results

    if not result.measurements:
        echo("interrupted before anything was measured; nothing was written", err=True)
        raise Exit(INTERRUPTED)
    target = output / "results.json"
    results.write_results(target, result, environment)
    chart = output / "tau.svg"
    if result.protocol is not None:
        try:
            results.write_chart(chart, result)
        except ImportError:
            chart.unlink(missing_ok=True)  # an earlier one, of other figures
            result.notes.append("no chart, which needs matplotlib: pip install matplotlib")
    if as_json:
        echo(json.dumps(result.rows, indent=1))
    else:
        echo(results.described(result, by_task, phases and result.protocol is None))
        echo(f"results: {target}")
    if result.interrupted:
        raise Exit(INTERRUPTED)


@contextmanager
def explained_interrupt(outcome: str) -> Iterator[None]:
    """If the block is interrupted, say what became of the command's work, and exit."""
    try:
        yield
    except KeyboardInterrupt:
        echo(f"interrupted; {outcome}", err=True)
        raise Exit(INTERRUPTED) from None
