"""``hf-spec``: wires the commands, which live in the packages whose work they do."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from hf_spec.bench.command import BAD_INPUT, INTERRUPTED, bench
from hf_spec.bench.quality_command import quality
from hf_spec.decoding.validate import check_request
from hf_spec.demo.command import demo
from hf_spec.hub.command import card, push
from hf_spec.hub.transfer_command import export, import_
from hf_spec.training.command import distill
from hf_spec.training.train_command import train
from hf_spec.tuning.command import plot, search
from hf_spec.tuning.tree_command import tune
from modeling_patches.serving import answer_refusals

#: Set to anything to see the whole traceback of an error.
TRACEBACK_VARIABLE = "HF_SPEC_TRACEBACK"

app = typer.Typer(
    name="hf-spec",
    rich_markup_mode=None,  # help texts are shown as written, examples on lines of their own
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command()(demo)
app.command()(bench)
app.command()(quality)
app.command()(distill)
# What it does not know are fields of the method's config.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train)
app.command()(search)
app.command()(tune)
app.add_typer(plot, name="plot")
app.command()(card)
app.command()(push)
app.command(name="import")(import_)
app.command()(export)


def _version(wanted: bool) -> None:
    if wanted:
        from hf_spec.bench.report import package_version

        typer.echo(f"hf-spec {package_version('hf_spec')}")
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


@app.command()
def strategies() -> None:
    """List the strategies.

    These are the names that generate(assistant_strategy=...) knows, with a line on each.

    \b
    Examples:
      hf-spec strategies
    """
    import hf_spec

    known = hf_spec.strategies()
    width = max(map(len, known), default=0)
    for name, line in known.items():
        typer.echo(f"{name:{width}}  {line}")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def serve(context: typer.Context) -> None:
    """Run 'transformers serve' with strategies.

    This is Transformers' own server; all arguments are passed on. A request chooses a strategy in
    its generation_config; one that cannot be fulfilled is answered with 400 and the reason.

    \b
    Examples:
      hf-spec serve Qwen/Qwen3-0.6B --port 8000
      curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
        "model": "Qwen/Qwen3-0.6B", "messages": [{"role": "user", "content": "Hello"}],
        "generation_config": "{\\"assistant_strategy\\": \\"prompt_lookup\\"}"}'
    """
    from transformers.utils.import_utils import is_serve_available

    wants_help = bool({"-h", "--help"} & set(context.args))
    if wants_help:
        typer.echo(context.get_help() + "\n\nOptions of 'transformers serve':\n")
    missing = "" if wants_help or is_serve_available() else "the server's"
    try:
        from transformers.cli.transformers import app as transformers_app
    except ImportError as error:
        missing = str(error)
    if missing:
        raise ValueError(
            f"'transformers serve' needs packages that are not installed ({missing}); "
            "run: pip install 'hf_spec[serve]'"
        )
    answer_refusals(check_request)
    transformers_app(["serve", *context.args], prog_name="hf-spec", standalone_mode=False)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; bad input ends in one line on stderr and an exit code other than zero."""
    try:
        code = app(arguments, prog_name="hf-spec", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        print("hf-spec: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        # typer's own errors: usage, or the help of a command without arguments.
        if hasattr(error, "format_message"):
            return _usage(error)
        expected = isinstance(error, ValueError | OSError | ImportError)
        if not expected or os.environ.get(TRACEBACK_VARIABLE):
            raise
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(f"hf-spec: {line}", file=sys.stderr)
        return BAD_INPUT
    return code if isinstance(code, int) else 0


def _usage(error: Exception) -> int:
    message = getattr(error, "format_message")().strip()  # noqa: B009
    if message.startswith("Usage:"):
        print(message)
    elif message:
        print(f"hf-spec: {message}", file=sys.stderr)
    return int(getattr(error, "exit_code", BAD_INPUT))


if __name__ == "__main__":
    sys.exit(main())
