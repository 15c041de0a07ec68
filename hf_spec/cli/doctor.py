"""``hf-spec doctor``: versions and devices; what works on a model, what ``auto`` takes, and why
drafts are accepted as often as they are."""

from __future__ import annotations

import json
from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from typer import Option, echo

from hf_spec.cli import options as opt
from hf_spec.cli.common import progress_bar
from hf_spec.model.loading import NATIVE, chosen_device, load_model

if TYPE_CHECKING:
    from hf_spec.decoding.auto import Choice

#: Name of the adapter that a model gets for a trial.
TRIAL = "hf_spec_doctor"


def doctor(
    model: Annotated[
        str | None, Option(help="Model to try: a folder, or a repository on the Hub.")
    ] = None,
    adapter: opt.Adapters = None,
    prompts: Annotated[
        Path | None, Option(help=f"{opt.PROMPTS}.  [default: hf_spec's own, one of each task]")
    ] = None,
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

    With a model: each strategy generates a few tokens (those with adapters take those given, or an
    untrained one); what assistant_strategy="auto" takes, and why; how often its drafts are accepted
    on some prompts, by position, by task, without the chat template, in each thinking mode and with
    other layer numbers; and what to do about it.

    \b
    Examples:
      hf-spec doctor
      hf-spec doctor --model Qwen/Qwen3-0.6B
      hf-spec doctor --model M --adapter ./medusa --prompts P.jsonl
      hf-spec doctor --model M --adapter ./medusa --no-measure --json
    """
    import torch

    from hf_spec.bench.contenders import read_adapters
    from hf_spec.bench.environment import machine
    from hf_spec.bench.prompts import BUNDLED, read_prompts, spread

    for option, given in (("--adapter", adapter), ("--prompts", prompts)):
        if given and model is None:
            raise ValueError(f"{option} needs --model: name the model that it is for")
    adapters = read_adapters(adapter or ())
    chosen = spread(read_prompts(prompts or BUNDLED), limit)
    environment = machine(torch.device(chosen_device(None)))
    found: dict[str, Any] = {"environment": {**environment, "imported from": imported_from()}}
    if model is not None:
        from hf_spec.decoding.auto import choose

        loaded, tokenizer = load_model(model, dtype, device, adapters=adapters)
        found["sweep"] = swept(loaded)
        found["strategies"] = supported(loaded)
        choice = choose(loaded)
        found["auto"] = {
            "takes": f"{choice.strategy}: {choice.reason}",
            **{f"not {name}": why for name, why in choice.passed.items()},
        }
        if measure and found["strategies"].get(choice.strategy) is None:
            found |= _measured(loaded, tokenizer, chosen, choice, adapter or (), max_new_tokens)
        found["next"] = _next(model, choice, adapter or ())
    if as_json:
        echo(json.dumps(found, indent=1))
        return
    for title, entries in found.items():
        echo(f"{title}:")
        if isinstance(entries, list):
            for line in entries:
                echo(f"  {line}")
            continue
        width = max(map(len, entries), default=0)
        for name, value in entries.items():
            if title == "strategies":
                value = "works" if value is None else f"refused: {value}"
            echo(f"  {name:{width}}  {value}")


def imported_from() -> str:
    """Where hf_spec is imported from, and whether that hides an installed copy."""
    import hf_spec

    here = Path(hf_spec.__file__).resolve().parent
    for installed in distributions(name="hf_spec"):
        there = Path(str(installed.locate_file("hf_spec"))).resolve()
        if not there.is_dir():  # installed as a link to a clone
            url = json.loads(installed.read_text("direct_url.json") or "{}").get("url", "")
            there = Path(url2pathname(urlparse(url).path), "hf_spec").resolve()
        if there.is_dir() and there != here:
            return (
                f"{here}, which hides version {installed.version} installed in {there}, as its "
                "folder stands first on sys.path; run from another folder for that one"
            )
    return str(here)


def swept(model: Any) -> dict[str, str]:
    """What the sweep over tiny models of all types has found for a model's type."""
    known = json.loads((files("hf_spec.cli") / "sweep.json").read_text(encoding="utf-8"))
    kinds = [model.config.model_type, model.config.get_text_config().model_type]
    kind = next((one for one in kinds if one in known["missing"] or one in known["refused"]), None)
    if kind is None:
        return {kinds[0]: f"not among the types of Transformers {known['transformers']} tried"}
    if kind in known["refused"]:
        return {kind: f"works with no strategy: {known['refused'][kind]}"}
    works = [name for name in known["strategies"] if name not in known["missing"][kind]]
    others = ", ".join(known["missing"][kind])
    text = f"the same tokens as plain generate in float32 with {', '.join(works)}"
    return {kind: f"{text}; not with {others}" if others else text}


def _measured(
    model: Any, tokenizer: Any, prompts: Any, choice: Choice, folders: Any, max_new_tokens: int
) -> dict[str, Any]:
    """What was measured, and what it means, by title."""
    from hf_spec.bench.diagnosis import diagnose
    from hf_spec.core.stats import bar
    from hf_spec.files import read_json
    from hf_spec.hub.card import TRAINING
    from hf_spec.hub.folder import read_spec_config
    from hf_spec.methods.registry import get_method

    trained = None
    for folder in map(Path, folders):
        if (folder / TRAINING).is_file() and read_spec_config(folder)[0].name == choice.strategy:
            trained = read_json(folder / TRAINING)
    with progress_bar("decoding") as progress:
        made = diagnose(
            model, tokenizer, prompts, choice, trained=trained, max_new_tokens=max_new_tokens,
            progress=progress,
        )  # fmt: skip
    looks_up = "lookup" in get_method(choice.strategy).drafter.unused  # that is what it does
    measured = {
        "tau": f"{made.tau:.2f} tokens per step where every step drafts"
        + ("" if looks_up else ", without lookups"),
        "speedup": f"{made.speedup:.2f}x plain generate, on defaults",
        "positions": " ".join(
            f"{place}: {bar(share)} {share:.0%}" for place, share in enumerate(made.positions, 1)
        ),
        "tasks": ", ".join(f"{task} {tau:.2f}" for task, tau in made.tasks.items()),
        **{name: f"tau {tau:.2f}" for name, tau in made.conditions.items()},
    }
    return {f"acceptance of {choice.strategy}, {len(prompts)} prompts": measured,
            "findings": made.findings or ["nothing stands out"]}  # fmt: skip


def _next(model: str, choice: Choice, folders: Any) -> list[str]:
    """Commands to try."""
    from hf_spec.methods.registry import get_method

    chosen = get_method(choice.strategy)
    if chosen.adapter_config is not None and folders:
        given = " ".join(f"--adapter {folder}" for folder in folders)
        return [f"hf-spec bench --model {model} {given} --by-task"]
    learns = "medusa" if chosen.training is None else choice.strategy
    return [
        f"hf-spec bench --model {model} --strategies {choice.strategy} --by-task",
        f"hf-spec distill --model {model} --prompts P.jsonl --output ./answers",
        f"hf-spec train {learns} --model {model} --data ./answers --output ./{learns}",
    ]


def supported(model: Any) -> dict[str, str | None]:
    """By strategy, why it does not work on a model; None if it does.

    Each strategy generates a few tokens. One that needs an adapter gets an untrained one, unless an
    adapter of its type is active; one that needs an assistant, the model itself. The model's active
    adapters stay active.
    """
    import warnings

    import torch

    from hf_spec.core.checks import first_line
    from hf_spec.methods.registry import methods

    ids = torch.arange(1, 9, device=model.device)[None] % model.config.get_text_config().vocab_size
    active = [*model.active_adapters()] if getattr(model, "peft_config", None) else []
    obstacles: dict[str, str | None] = {}
    for name, method in methods().items():
        config, on_trial, obstacles[name] = method.adapter_config, False, None
        with warnings.catch_warnings(action="ignore"):  # of adapters side by side
            try:
                if config is not None and method.active_adapter(model) is None:
                    model.add_adapter(config(), TRIAL)
                    on_trial = True
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False,
                    assistant_strategy=name, assistant_kwargs={"drafting": "always"},
                    assistant_model=model if method.needs_assistant else None,
                )  # fmt: skip
            except (ValueError, NotImplementedError) as error:
                obstacles[name] = first_line(error)
            finally:
                if on_trial:
                    model.delete_adapter(TRIAL)
                if active:
                    model.set_adapter(active)
    return obstacles
