"""Options of several programs, and commands of hf-spec whose results are kept: what is there is not
made again."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hf_spec.files import read_json, write_json

#: What was measured, beside ``results.json``: the arguments of ``hf-spec bench``.
ARGUMENTS = "arguments.json"


#: Options of several programs.
OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"help": "folder, or repository on the Hub"},
    "answers": {"type": Path, "help": "what hf-spec distill wrote, for training"},
    "prompts": {"type": Path, "help": "file of prompts, as for hf-spec bench; not trained on"},
    "adapter": {"action": "append", "help": "of a strategy; may be given several times"},
    "output": {"type": Path, "help": "what is written"},
    "limit": {"type": int, "help": "number of prompts, spread over tasks"},
    "max_new_tokens": {"type": int, "help": "new tokens of each"},
    "dtype": {"help": "as of hf-spec bench"},
    "device": {"help": "as of hf-spec bench"},
    "threads": {"type": int, "help": "of PyTorch"},
}


def parser(text: str | None, needed: Iterable[str], **defaults: Any) -> argparse.ArgumentParser:
    """A parser of :data:`OPTIONS`: those that are needed, and others by their defaults."""
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in needed:
        made.add_argument(f"--{name}", **OPTIONS[name], required=True)
    for name, default in defaults.items():
        option = {**OPTIONS[name], "default": default}
        if default not in (None, []):
            option["help"] += f" (default: {default})"
        made.add_argument(f"--{name.replace('_', '-')}", **option)
    return made


def words_of(
    args: argparse.Namespace, strategies: Iterable[str], adapters: Iterable[Any], *more: str,
    prompts: Path | None = None, limit: int | None = None,
) -> list[str]:  # fmt: skip
    """Arguments of ``hf-spec bench`` by the options of a program, or with other prompts."""
    return [
        "--model", str(args.model), "--prompts", str(prompts or args.prompts),
        "--limit", str(limit or args.limit), "--strategies", ",".join(strategies),
        *(f"--adapter={one}" for one in adapters), "--max-new-tokens", str(args.max_new_tokens),
        "--dtype", args.dtype, "--threads", str(args.threads), *more,
    ]  # fmt: skip


def run(name: str, start: Sequence[str], words: Sequence[str]) -> None:
    """Run a program that Python starts with some words before its own.

    Raises:
        SystemExit: it failed.
    """
    print(name, shlex.join(words), flush=True)
    done = subprocess.run([sys.executable, *start, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")


def command(*words: str) -> None:
    """Run a command of hf-spec."""
    run("hf-spec", ["-m", "hf_spec.tools.cli"], words)


def train(folder: Path, args: argparse.Namespace, method: str, *more: str) -> Path:
    """The folder of an adapter, trained unless it is there."""
    if not (folder / "training.json").is_file():
        if args.answers is None:
            raise SystemExit(f"--answers is needed: {folder} has to be trained")
        command(
            "train", method, *more, "--model", args.model, "--data", str(args.answers),
            "--threads", str(args.threads), "--output", str(folder), "--resume",
        )  # fmt: skip
    return folder


def is_measured(folder: Path, words: list[str]) -> bool:
    """Whether a folder has whole results of these arguments."""
    results, known = folder / "results.json", folder / ARGUMENTS
    if not (results.is_file() and known.is_file()):
        return False
    interrupted = read_json(results)["environment"].get("interrupted")
    return read_json(known)["bench"] == words and not interrupted


def kept(folder: Path, words: list[str], make: Callable[[], None]) -> dict[str, Any]:
    """The results of these arguments in a folder, made unless they are there."""
    if not is_measured(folder, words):
        (folder / ARGUMENTS).unlink(missing_ok=True)
        make()
        write_json(folder / ARGUMENTS, {"bench": words})
    return read_json(folder / "results.json")


def bench(folder: Path, words: list[str]) -> dict[str, Any]:
    """What ``hf-spec bench`` with these arguments writes into a folder, unless it is there."""
    return kept(folder, words, lambda: command("bench", *words, "--output", str(folder)))
