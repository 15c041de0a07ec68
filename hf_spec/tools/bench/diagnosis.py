"""What works on a model, why drafts are accepted as often as they are, and what to try."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_spec.adapters.config import PredictingConfig
from hf_spec.adapters.layer import Adapter
from hf_spec.adapters.loading import active_names
from hf_spec.core.checks import first_line
from hf_spec.core.stats import bar
from hf_spec.decoding.call import Choice
from hf_spec.methods.registry import Method, get_method, methods
from hf_spec.tools.bench.contenders import contender_of
from hf_spec.tools.bench.prompts import Prompt
from hf_spec.tools.bench.runner import run
from hf_spec.tools.data import ALL

#: Name of the adapter that a model gets for a trial.
TRIAL = "hf_spec_doctor"
#: By how much a tau has to be larger than another one to be worth a line.
BETTER = 1.15
NO_TEMPLATE = (
    "The tokenizer has no chat template, so that prompts are plain text. If this is a chat model, "
    "its template is missing from the folder."
)


def supported(model: Any) -> dict[str, str | None]:
    """By strategy, why it does not work on a model; None if it does.

    Each strategy generates a few tokens. One that needs an adapter gets an untrained one, unless an
    adapter of its type is active; one that needs an assistant, the model itself. The model's active
    adapters stay active.
    """
    ids = torch.arange(1, 9, device=model.device)[None] % model.config.get_text_config().vocab_size
    active = sorted(active_names(model))
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


def diagnose(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], choice: Choice,
    trained: Mapping[str, Any], max_new_tokens: int,
) -> tuple[dict[str, str], list[str]]:  # fmt: skip
    """What was measured with a strategy on prompts, by title, and what it means, a sentence or two
    each.

    Args:
        choice: its adapter is active.
        trained: content of the adapter's ``training.json``; empty if there is none.

    Raises:
        KeyboardInterrupt: measuring was interrupted.
    """
    method, options = get_method(choice.strategy), {**choice.options, "drafting": "always"}
    looks_up = "lookup" in method.declares.unused  # that is what it does
    default_looks_up = not looks_up and choice.options.get("lookup", True) is not False
    if not looks_up:
        options["lookup"] = False
    drafting = contender_of(f"{choice.strategy}:drafting", options)
    default = contender_of(f"{choice.strategy}:default", dict(choice.options))
    settings: Any = {"max_new_tokens": max_new_tokens, "title": "decoding"}
    made = run(model, tokenizer, prompts, [drafting, default], **settings)
    if made.interrupted:
        raise KeyboardInterrupt
    tasks = {row["task"]: row["tau"] for row in made.rows if row["strategy"] == drafting.name}
    tau, speedup = tasks.pop(ALL), made.overall(default.name)["speedup"]
    positions = made.overall(drafting.name)["stats"]["acceptance_per_position"]
    adapter = method.active_adapter(model)
    measured = {
        "tau": f"{tau:.2f} tokens per step where every step drafts"
        + ("" if looks_up else ", without lookups"),
        "speedup": f"{speedup:.2f}x plain generate, with the default options"
        + (", which also look up n-grams" if default_looks_up else ""),
        "positions": " ".join(f"{i}: {bar(p)} {p:.0%}" for i, p in enumerate(positions, 1)),
        "tasks": ", ".join(f"{task} {one:.2f}" for task, one in tasks.items()),
    }
    chat = bool(getattr(tokenizer, "chat_template", None))
    best = (trained.get("best") or {}).get("eval_tau", 0.0)
    findings = _findings(method, adapter, chat, best, tau, speedup, positions)
    return measured, findings


def _findings(
    method: Method, adapter: Adapter | None, chat: bool, best: float, tau: float, speedup: float,
    positions: Sequence[float],
) -> list[str]:  # fmt: skip
    """What stands out.

    Args:
        chat: whether the tokenizer has a chat template.
        best: tau that the adapter's training ended with; 0 if that is not known.
        positions: share of draft tokens that are accepted, by position.
    """
    at = [*positions, 0.0, 0.0, 0.0]
    config = None if adapter is None else adapter.config
    headless = isinstance(config, PredictingConfig) and not config.markov_rank
    findings = [
        (best > BETTER * tau,
         f"Training ended with tau {best:.2f} on held-out prompts of its own data. These prompts "
         "are of another kind: distill and train on prompts like them."),
        (not chat,
         NO_TEMPLATE),
        (adapter is not None and at[0] < 0.5,
         f"Only {at[0]:.0%} of first draft tokens are accepted: the drafter is undertrained. Train "
         "on more answers (2,000 or more) rather than for more epochs."),
        (headless and at[0] >= 0.5 and len(positions) > 2 and at[2] < at[0] / 2,
         "Acceptance falls from position to position, as the drafter does not see its own draft "
         "tokens: trained with --markov-rank 128 it does."),
        (adapter is None and method.included is None and tau < 1.3,  # nothing is learned
         "The output rarely repeats its prompt or itself, which lookups need. A trained drafter "
         "does not depend on that."),
        (tau > 1.3 and speedup < 1.05,
         "Drafts are accepted, but steps with drafts take longer than they save here: a small "
         "model, many rows, a busy machine, or a GPU that waits for the host, where recorded steps "
         "(docs/guides/compiled.md) help."),
    ]  # fmt: skip
    return [text for stands_out, text in findings if stands_out]
