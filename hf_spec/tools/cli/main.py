"""``hf-spec``: registers the commands and turns errors into exit codes."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hf_spec.core.checks import first_line, nearest
from hf_spec.tools.cli.bench import bench, demo, search
from hf_spec.tools.cli.common import BAD_INPUT, INTERRUPTED, Command
from hf_spec.tools.cli.doctor import check, doctor, strategies
from hf_spec.tools.cli.hub import card, export, import_, push
from hf_spec.tools.cli.serve import run, serve
from hf_spec.tools.cli.train import TrainCommand, distill, lookups, train

#: Settings of commands that take options which they do not name.
UNKNOWN = {"allow_extra_args": True, "ignore_unknown_options": True}


class Commands(TyperGroup):
    """Says that a command was interrupted, unless the command does."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("hf-spec: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    name="hf-spec",
    cls=Commands,
    rich_markup_mode=None,  # help texts are shown as written, examples on lines of their own
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
SETTINGS: dict[Any, dict[str, Any]] = {
    train: {"cls": TrainCommand, "context_settings": UNKNOWN},  # fields of the method's config
    import_: {"name": "import"},
    demo: {"cls": None},  # says first that it loads the library
    doctor: {"cls": None},  # loads the library for a model only
    strategies: {"cls": None},
    # All arguments after the program's name belong to the program.
    run: {"cls": None, "context_settings": {"allow_interspersed_args": False}},
    serve: {"context_settings": UNKNOWN},  # options of 'transformers serve'
}
for one in (
    demo, bench, distill, train, lookups, search, card, push, import_, export, strategies, doctor,
    check, run, serve,
):  # fmt: skip
    app.command(**{"cls": Command, **SETTINGS.get(one, {})})(one)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-spec {metadata.version('hf_spec')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Speculative decoding for Hugging Face Transformers: the same text, in fewer forward passes.

    \b
    Examples:
      hf-spec demo
      hf-spec strategies
      hf-spec bench --model Qwen/Qwen3-0.6B --prompts prompts.jsonl --strategies prompt_lookup

    HF_SPEC_TRACEBACK=1 shows the whole traceback of an error.
    """


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM, which batch systems send, is an interrupt: what has been done is written."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def main(arguments: list[str] | None = None) -> int:
    """Run a command line, None for that of the process; returns the exit code. Bad input writes one
    line to stderr and returns a nonzero code."""
    try:
        with _interruptible():
            code = app(arguments, prog_name="hf-spec", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        print("hf-spec: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's: wrong usage, or no arguments
            message = error.format_message().strip()
            if others := getattr(error, "possibilities", None):
                name = getattr(error, "option_name", "")
                message = f"No such option: {name}{nearest(name, others)}"
            given = getattr(getattr(error, "ctx", None), "params", {})
            if message.startswith("Got unexpected extra argument") and not given.get("model", 1):
                message += " (did you mean --model?)"
            if message.startswith("Usage:"):
                print(message)
            elif message:
                print(f"hf-spec: {message}", file=sys.stderr)
            return int(getattr(error, "exit_code", BAD_INPUT))
        expected = isinstance(error, ValueError | OSError | ImportError)
        if not expected or os.environ.get("HF_SPEC_TRACEBACK"):
            raise
        print(f"hf-spec: {first_line(error)}", file=sys.stderr)
        return BAD_INPUT
    return code if isinstance(code, int) else 0
