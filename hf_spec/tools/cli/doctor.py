"""``hf-spec doctor``, ``strategies`` and ``check``."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from typer import Argument, Exit, Option, echo

from hf_spec.tools.cli import common as opt
from hf_spec.tools.cli.common import load_library
from hf_spec.tools.loading import NATIVE, check_adapter, chosen_device, load_model, read_adapters

# -- ``hf-spec strategies`` ------------------------------------------------------------------------

#: What ``auto`` takes, in its order.
AUTO_TAKES = "assistant_model, the active adapter, the checkpoint's MTP layers, token_recycling"
#: The package of the methods, and the group of entry points by which others name theirs.
METHODS = "hf_spec.methods"
#: The name and the summary of a method, where its module defines it.
METHOD = re.compile(r'^METHOD = Method\(\s*name="(.+)",\s*summary="(.+)",$', re.MULTILINE)


def strategies(as_json: opt.AsJson = False) -> None:
    """List the strategies.

    Names for generate(assistant_strategy=...), with one line about each.

    \b
    Examples:
      hf-spec strategies
      hf-spec strategies --json
    """
    known = _summaries()
    if as_json:
        echo(json.dumps(known, indent=1))
        return
    _show({**known, "auto": f"the first that there is: {AUTO_TAKES}"})


def _show(entries: Mapping[str, Any], indent: str = "") -> None:
    width = max(map(len, entries), default=0)
    for name, value in entries.items():
        echo(f"{indent}{name:{width}}  {value}".rstrip())


def _summaries() -> dict[str, str]:
    """What ``hf_spec.strategies()`` returns, read from the sources of the methods' modules:
    importing them takes seconds. Those of other packages have to be imported."""
    if entry_points(group=METHODS):
        load_library()
        import hf_spec

        return hf_spec.strategies()
    folder = Path(str(files(METHODS)))
    paths = [*folder.glob("*.py"), *folder.glob("*/__init__.py")]
    return dict(sorted(pair for path in paths for pair in METHOD.findall(path.read_text("utf-8"))))


# -- ``hf-spec doctor`` ----------------------------------------------------------------------------


def doctor(
    model: Annotated[
        str | None, Option(help="Model to try: a folder, or a repository on the Hub.")
    ] = None,
    adapter: opt.Adapters = None,
    prompts: opt.Prompts = None,
    limit: opt.Limit = 6,
    max_new_tokens: opt.NewTokens = 48,
    measure: Annotated[
        bool, Option("--measure/--no-measure", help="Whether to decode prompts.")
    ] = True,
    dtype: opt.Dtype = NATIVE,
    device: opt.Device = None,
    threads: opt.Threads = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show versions and device, what works, and what to try.

    With a model, each strategy generates a few tokens, with random weights if it needs an adapter
    and none is given. The command then says what assistant_strategy="auto" takes, and why; how
    often its drafts are accepted on some prompts, by position and by task; and what to try.

    \b
    Examples:
      hf-spec doctor
      hf-spec doctor --model Qwen/Qwen3-0.6B
      hf-spec doctor --model M --adapter ./medusa --prompts P.jsonl
      hf-spec doctor --model M --adapter ./medusa --no-measure --json
    """
    for place in adapter or ():
        check_adapter(place)  # before PyTorch is loaded

    import torch

    import hf_spec
    from hf_spec.tools.bench.environment import machine

    for option, given in (("--adapter", adapter), ("--prompts", prompts)):
        if given and model is None:
            raise ValueError(f"{option} needs --model: name the model that it is for")
    if prompts and not measure:
        raise ValueError("--prompts with --no-measure: nothing is decoded; leave out one of them")
    here = {"imported from": str(Path(hf_spec.__file__).parent)}
    found: dict[str, Any] = {"environment": machine(torch.device(chosen_device(None))) | here}
    if model is not None:
        load_library()
        from hf_spec.tools.bench.prompts import BUNDLED, read_prompts, spread

        adapters = read_adapters(adapter or ())
        chosen = spread(read_prompts(prompts or BUNDLED), limit)
        loaded, tokenizer = load_model(model, dtype, device, adapters=adapters)
        measured = chosen if measure else []
        found |= _examined(loaded, tokenizer, adapters, measured, max_new_tokens)
        found["next"] = _next(model, found["auto"]["takes"].partition(":")[0], adapter or ())
    if as_json:
        echo(json.dumps(found, indent=1))
        return
    for title, entries in found.items():
        echo(f"{title}:")
        _show(entries if isinstance(entries, dict) else dict.fromkeys(entries, ""), "  ")


def _examined(
    model: Any, tokenizer: Any, adapters: Sequence[Any], prompts: Sequence[Any], new_tokens: int
) -> dict[str, Any]:
    """What works on a model, what ``auto`` takes, and how that does on prompts, if any."""
    from hf_spec.decoding.call import choose
    from hf_spec.files import read_json
    from hf_spec.methods.registry import get_method
    from hf_spec.tools.bench import checking
    from hf_spec.tools.hub import TRAINING

    obstacles, choice = checking.supported(model), choose(model)
    tried: dict[str, str] = {}
    for name, obstacle in obstacles.items():
        method = get_method(name)
        untrained = method.needs_adapter and method.active_adapter(model) is None
        works = "works, tried with random weights" if untrained else "works"
        tried[name] = works if obstacle is None else f"refused: {obstacle}"
    found: dict[str, Any] = {
        "strategies": tried,
        "auto": {
            "takes": f"{choice.strategy}: {choice.reason}",
            **{f"not {name}": why for name, why in choice.passed.items()},
        },
    }
    if prompts and obstacles.get(choice.strategy) is None:
        records = [Path(one.path, TRAINING) for one in adapters if one.strategy == choice.strategy]
        trained = next((read_json(path, optional=True) for path in records), {})
        measured, findings = checking.diagnose(
            model, tokenizer, prompts, choice, trained, new_tokens
        )
        found[f"acceptance of {choice.strategy}, {len(prompts)} prompts"] = measured
        found["findings"] = findings or ["nothing stands out"]
    return found


def _next(model: str, strategy: str, adapters: Sequence[str]) -> list[str]:
    """Commands to try."""
    from hf_spec.methods.registry import get_method

    method, model = get_method(strategy), quote(model)
    if method.adapter_config is not None and adapters:
        folders = " ".join(f"--adapter {quote(folder)}" for folder in adapters)
        checks = [f"hf-spec check {quote(folder)} --model {model}" for folder in adapters]
        return [*checks, f"hf-spec bench --model {model} {folders} --by-task"]
    learns = "medusa" if method.training is None else method.name
    return [
        f"hf-spec bench --model {model} --strategies {method.name} --by-task",
        f"hf-spec distill --model {model} --prompts P.jsonl --output ./answers",
        f"hf-spec train {learns} --model {model} --data ./answers --output ./{learns}",
    ]


# -- ``hf-spec check`` -----------------------------------------------------------------------------

#: Exit code where something looks wrong.
LOOKS_WRONG = 1


def check(
    adapter: Annotated[str, Argument(help="Adapter folder or repository.")],
    model: opt.Model,
    prompts: opt.Prompts = None,
    limit: opt.Limit = 6,
    max_new_tokens: opt.NewTokens = 64,
    dtype: opt.Dtype = NATIVE,
    device: opt.Device = None,
    threads: opt.Threads = None,
    as_json: opt.AsJson = False,
) -> None:
    """Check that an adapter drafts as well as it should, as after an import.

    Decodes a few prompts, and compares tau with what the adapter's folder says of it (results.json,
    the card's metadata, training.json), or with what is published of its kind. Then tries other
    values of fields that a checkpoint may say wrongly: flags of norms, the mask of blocks, layers
    that are numbered one off. Looks at the draft vocabulary, the chat template and the base's name,
    too. Exits with 1 if something looks wrong.

    \b
    Examples:
      hf-spec check ./eagle3 --model Qwen/Qwen3-8B
      hf-spec check ./drafter --model M --prompts P.jsonl --limit 20 --max-new-tokens 256
    """
    from hf_spec.tools.bench.checking import check as examined
    from hf_spec.tools.bench.prompts import BUNDLED, read_prompts, spread

    (one,) = read_adapters([adapter])
    chosen = spread(read_prompts(prompts or BUNDLED), limit)
    loaded, tokenizer = load_model(model, dtype, device, adapters=[one])
    found = examined(loaded, tokenizer, chosen, one, max_new_tokens)
    if as_json:
        echo(json.dumps(asdict(found), indent=1))
    else:
        echo(f"expected: {found.expected}")
        for title, value in found.measured.items():
            echo(f"{title}: {value}")
        for values, value in found.tried.items():
            echo(f"with {values}: {value}")
        for text in [*(found.findings or ["nothing looks wrong"]), *found.notes]:
            echo(text)
    if found.findings:
        raise Exit(LOOKS_WRONG)
