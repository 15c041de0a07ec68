"""Measures strategies against plain ``generate``; knows no files, tables or terminals.

All contenders generate each batch of prompts one after the other, in an order that rotates from
batch to batch, so that changes in the machine's speed affect all alike. Comparing outputs is not
timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hf_spec.core.checks import check_count
from hf_spec.model.packed_weights import packed_weights
from hf_spec.tools.bench.agreement import Agreement, classify
from hf_spec.tools.bench.contenders import BASELINE, STOCK, Contender, with_compiled
from hf_spec.tools.bench.prompts import Prompt, batches, encode_prompts, spread
from hf_spec.tools.bench.results import BenchResult, Measurement
from hf_spec.tools.bench.session import Session, Turn, rotated
from hf_spec.tools.bench.synthetic import OPTION, SyntheticRates
from hf_spec.tools.progress import progress_bar


def run(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], contenders: Sequence[Contender], *,
    batch_sizes: Sequence[int] = (1,), max_new_tokens: int = 128, limit: int | None = None,
    generate_kwargs: Mapping[str, Any] | None = None, seed: int = 0, compiled: str | None = None,
    synthetic: SyntheticRates | None = None, title: str = "benchmark",
    seen: Callable[[Measurement], None] | None = None,
) -> BenchResult:  # fmt: skip
    """Generate with plain decoding and every contender, and compare.

    Each contender first makes a short call that is not measured. On ``KeyboardInterrupt``, the
    batches that all contenders have finished are returned, and ``interrupted`` is set.

    Args:
        limit: most prompts that are measured, see :func:`hf_spec.tools.bench.prompts.spread`.
        generate_kwargs: passed to every ``generate``; greedy unless ``do_sample`` is among them.
        seed: seed for the sampling of the first batch, the same for all contenders; the next
            batches count up from it.
        compiled: a backend of ``torch.compile``, with which contenders take part a second time,
            with a static cache and compiled steps; None for none. Calls that compile are repeated
            and counted apart.
        synthetic: rates at which drafts are accepted, whatever they are; None to let the model
            decide. All calls then emit ``max_new_tokens``, and outputs are not compared.
        title: of the progress bar, which counts calls, without those that prepare.
        seen: gets each measurement as it is made, before outputs are compared, instead of the bar.
    """
    _check(prompts, contenders, batch_sizes, max_new_tokens, limit, synthetic)
    contenders = [BASELINE, *contenders]
    options = {"do_sample": False, **(generate_kwargs or {}), "max_new_tokens": max_new_tokens}
    prompts = spread(prompts, limit)
    token_ids, truncated = encode_prompts(model, tokenizer, prompts, max_new_tokens)
    if compiled:
        contenders = with_compiled(contenders, compiled, max(map(len, token_ids)) + max_new_tokens)
    settings = {
        **options, "batch_sizes": list(batch_sizes), "seed": seed,
        "synthetic_acceptance": None if synthetic is None else list(synthetic.rates),
        "packed_bytes": sum(copies.num_bytes for copies in packed_weights(model)),
        "strategies": {item.name: item.settings for item in contenders},
    }  # fmt: skip
    result = BenchResult(list(prompts), contenders, settings, truncated_prompts=truncated)
    if truncated:
        result.notes.append(
            f"{truncated} of {len(prompts)} prompts did not fit the model's context and were cut "
            "at their beginning"
        )
    plan = [turn for size in batch_sizes for turn in _turns(result, size)]
    calls, done = sum(len(turn.contenders) for turn in plan), 0
    rule = nullcontext() if synthetic is None else synthetic.of(model)
    opened = Session.open(model, tokenizer, options, contenders, synthetic is None)
    with opened as session, rule, progress_bar(title, seen is None) as progress:
        try:
            session.warm_up(plan, token_ids)
            progress(0, calls)
            for number, turn in enumerate(plan):
                outcome: dict[str, Measurement] = {}
                for item in rotated(turn.contenders, number):
                    torch.manual_seed(seed + number)
                    made = session.generate(item, [token_ids[index] for index in turn.indices])
                    outcome[item.name] = Measurement(
                        item.name, turn.size, turn.indices, prompts[turn.indices[0]].category,
                        *made, baseline=item.baseline,
                    )  # fmt: skip
                    done += 1
                    progress(done, calls)
                    if seen is not None:
                        seen(outcome[item.name])
                _compare(session, outcome, token_ids, turn, synthetic is not None)
                result.measurements += [outcome[item.name] for item in turn.contenders]
            result.notes += session.notes()
        except KeyboardInterrupt:
            result.interrupted = True
            result.notes.append(f"interrupted after {done} of {calls} calls")
    return result


def _check(
    prompts: Sequence[Prompt], contenders: Sequence[Contender], batch_sizes: Sequence[int],
    max_new_tokens: int, limit: int | None, synthetic: SyntheticRates | None,
) -> None:  # fmt: skip
    """Raise a ValueError if there is nothing to measure, or it cannot be."""
    if not prompts:
        raise ValueError("nothing to measure: no prompts")
    numbers = {"max_new_tokens": max_new_tokens, **({} if limit is None else {"limit": limit})}
    for name, value in numbers.items():
        check_count(name, value)
    for size in batch_sizes or (0,):
        check_count("batch_size", size)
    stock = [item.name for item in contenders if item.name.startswith(STOCK)]
    if synthetic and stock:
        raise ValueError(f"{stock[0]} accepts by itself, not by {OPTION}: leave it out")


def _turns(result: BenchResult, size: int) -> list[Turn]:
    """The batches of a size; the result's notes say what is left out or not full."""
    taking_part = [item for item in result.contenders if size == 1 or not item.single_row]
    for item in result.contenders:
        if item not in taking_part:
            result.notes.append(f"{item.name} left out at batch size {size}: it takes one row")
    parts = list(batches(result.prompts, size))
    if small := sum(len(part) < size for part in parts):
        result.notes.append(
            f"{small} of {len(parts)} batches have fewer than {size} rows: a batch never mixes "
            "categories"
        )
    return [Turn(size, taking_part, part) for part in parts]


def _compare(
    session: Session, outcome: Mapping[str, Measurement], token_ids: Sequence[list[int]],
    turn: Turn, synthetic: bool,
) -> None:  # fmt: skip
    """Set the ``agreement`` of every measurement with its baseline, where outputs can be compared:
    greedy ones, and samples of the same seed, which rounding may make differ; of ``synthetic``
    acceptance those of baselines alone."""
    if synthetic:
        outcome = {name: one for name, one in outcome.items() if name == one.baseline}
    if session.options["do_sample"]:
        for one in outcome.values() if turn.size == 1 else ():
            pairs = zip(one.rows, outcome[one.baseline].rows)
            one.agreement = [Agreement.IDENTICAL if a == b else None for a, b in pairs]
        return
    default = session.model.generation_config.repetition_penalty
    penalty = session.options.get("repetition_penalty", default)
    plains = {item.name: item for item in turn.contenders if item.name == item.baseline}
    for item in sorted(outcome.values(), key=lambda item: item.baseline):
        session.activate(plains[item.baseline])
        plain = outcome[item.baseline]
        item.agreement = [
            classify(session.model, token_ids[index], ours, theirs, penalty)
            for index, ours, theirs in zip(item.prompts, item.rows, plain.rows)
        ]
