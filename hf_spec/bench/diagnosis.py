"""Why drafts of a strategy are accepted as often as they are, and what to try; prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.predicting import PredictingConfig
from hf_spec.bench.contenders import Contender, ours
from hf_spec.bench.prompts import Prompt, encode, encode_prompts
from hf_spec.bench.results import ALL
from hf_spec.bench.runner import run
from hf_spec.bench.session import Session
from hf_spec.core.memory import forget
from hf_spec.core.stats import SpecStats
from hf_spec.data import plain_text
from hf_spec.decoding.auto import Choice
from hf_spec.methods.registry import get_method
from modeling_patches.modules import num_layers

#: By how much tau has to be larger under another condition to be worth a line.
BETTER = 1.15


@dataclass
class Diagnosis:
    """What was measured, and what it means.

    Attributes:
        tau: emitted tokens per step and sequence where every step drafts.
        speedup: over plain ``generate``, as the strategy runs by default.
        positions: share of drafts that are accepted at each position, of those that reach it.
        tasks: tau by task.
        conditions: tau under other conditions that the drafts depend on.
        findings: what is in the way, a sentence or two each.
    """

    strategy: str
    tau: float
    speedup: float
    positions: list[float]
    tasks: dict[str, float]
    conditions: dict[str, float] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)


def diagnose(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    choice: Choice,
    *,
    trained: Mapping[str, Any] | None,
    max_new_tokens: int,
    progress: Callable[[int, int], Any],
) -> Diagnosis:
    """Measure a strategy on prompts, with every step drafting, and under other conditions.

    Args:
        choice: its adapter is active.
        trained: content of the adapter's ``training.json``; None if there is none.
        progress: called as ``progress(done, total)`` with numbers of calls.
    """
    method = get_method(choice.strategy)
    options = {**choice.options, "drafting": "always"}
    if "lookup" not in method.drafter.unused:
        options["lookup"] = False
    drafting = Contender("drafting", ours(choice.strategy, options))
    default = Contender("default", ours(choice.strategy, dict(choice.options)))
    found = run(
        model, tokenizer, prompts, [drafting, default],
        max_new_tokens=max_new_tokens, progress=progress,
    )  # fmt: skip
    rows = {(row["strategy"], row["task"]): row for row in found.runs()}
    overall = rows["drafting", ALL]
    result = Diagnosis(
        choice.strategy, overall["tau"], rows["default", ALL]["speedup"],
        overall["stats"]["acceptance_per_position"],
        {task: row["tau"] for (name, task), row in rows.items()
         if name == "drafting" and task != ALL},
    )  # fmt: skip
    adapter = method.active_adapter(model)
    if adapter is not None or method.included is not None:  # lookups learn from nothing else
        result.conditions = _conditions(
            model, tokenizer, prompts, drafting, adapter, max_new_tokens
        )
    result.findings = list(_findings(result, tokenizer, adapter, trained))
    return result


def _conditions(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], contender: Contender,
    adapter: ActiveAdapter | None, max_new_tokens: int,
) -> dict[str, float]:  # fmt: skip
    """tau without the chat template, in each thinking mode, and with other layer numbers."""
    found: dict[str, float] = {}
    options = {"do_sample": False, "max_new_tokens": max_new_tokens}
    with Session.open(model, tokenizer, options, [contender]) as session:

        def tau(ids: Sequence[list[int]]) -> float:
            total = SpecStats()
            for one in ids:
                stats = session.generate(contender, [one])[3]
                assert stats is not None
                total.merge(stats)
            return total.mean_accepted_tokens

        given, _ = encode_prompts(model, tokenizer, prompts, max_new_tokens)
        longest = max(map(len, given)) + 64
        template = getattr(tokenizer, "chat_template", None)
        if template:
            texts = [plain_text(one.text, one.history) for one in prompts]
            plain = [list(tokenizer(text, verbose=False)["input_ids"]) for text in texts]
            found["without the chat template"] = tau([ids[-longest:] for ids in plain])
        if "enable_thinking" in str(template or ""):
            for on in (True, False):
                ids = [encode(tokenizer, one.text, one.history, enable_thinking=on)
                       for one in prompts]  # fmt: skip
                found[f"enable_thinking={on}"] = tau([one[-longest:] for one in ids])
        if adapter is not None:
            for shift in (-1, 1):
                with _shifted(adapter.config, shift, num_layers(model)) as layers:
                    if layers is not None:
                        found[f"layers {layers}"] = tau(given)
    forget(model)  # what was learned under other conditions
    return found


@contextmanager
def _shifted(config: Any, shift: int, most: int) -> Iterator[list[int] | None]:
    """Within the block, the config names other layers of the base model; None if there are none."""
    before = getattr(config, "layers", None) or []
    layers = [one + shift for one in before]
    if not layers or not all(0 <= one <= most for one in layers):
        yield None
        return
    config.layers = layers
    try:
        yield layers
    finally:
        config.layers = before


def _may_get_head(adapter: ActiveAdapter | None) -> bool:
    config = None if adapter is None else adapter.config
    return isinstance(config, PredictingConfig) and not config.markov_rank


def _findings(
    found: Diagnosis, tokenizer: Any, adapter: ActiveAdapter | None,
    trained: Mapping[str, Any] | None,
) -> Iterator[str]:  # fmt: skip
    better = {
        name: tau for name, tau in found.conditions.items()
        if tau > BETTER * found.tau and tau > found.tau + 0.1
    }  # fmt: skip
    for name, tau in better.items():
        if name.startswith("layers"):
            yield (
                f"With {name} instead of its own, tau is {tau:.2f}: the layer numbers in "
                "adapter_config.json are off by one. Correct them, or import the checkpoint again."
            )
        else:
            yield (
                f"Acceptance is higher {name.replace('enable', 'with enable')} (tau {tau:.2f}): "
                "either the model repeats itself there, which is easy to predict, or its drafter "
                "was trained on such text. Train on answers to prompts as you use them."
            )
    best = ((trained or {}).get("best") or {}).get("eval_tau")
    if best is not None and best > BETTER * found.tau:
        yield (
            f"Training ended with tau {best:.2f} on held-out prompts of its own data. These "
            "prompts are of another kind: distill and train on prompts like them."
        )
    if not getattr(tokenizer, "chat_template", None):
        yield (
            "The tokenizer has no chat template, so that prompts are plain text. If this is a chat "
            "model, its template is missing from the folder."
        )
    first = found.positions[0] if found.positions else 0.0
    if adapter is not None and first < 0.5:
        yield (
            f"Only {first:.0%} of first draft tokens are accepted: the drafter is undertrained. "
            "Train on more answers (2,000 or more) rather than for more epochs."
        )
    elif len(found.positions) > 2 and found.positions[2] < first / 2 and _may_get_head(adapter):
        yield (
            "Acceptance falls from position to position, as the drafter does not see its own draft "
            "tokens: hf-spec train --adapter A --markov-rank 128 adds a Markov head, which does."
        )
    if adapter is None and found.tau < 1.3 and get_method(found.strategy).included is None:
        yield (
            "The output rarely repeats its prompt or itself, which lookups need. A trained "
            "drafter does not depend on that."
        )
    low, high = (pick(found.tasks, key=found.tasks.__getitem__) for pick in (min, max))
    if found.tasks[high] > 1.3 * found.tasks[low]:
        yield (
            f"Tasks differ: tau {found.tasks[high]:.2f} on {high}, {found.tasks[low]:.2f} on "
            f"{low}. Text like that of {low} gains least."
        )
    if found.tau > 1.3 and found.speedup < 1.05:
        yield (
            "Drafts are accepted, but steps with drafts take longer than they save here: a small "
            "model, many rows or a busy machine."
        )
