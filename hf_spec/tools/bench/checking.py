"""Whether an adapter's drafts are accepted as often as they should be, and what looks wrong if not.

A flag that a checkpoint says wrongly, or layers that are numbered from elsewhere, load without an
error and draft badly. So other values of such fields (``SpecPeftConfig.alternatives``) are tried on
the same prompts.
"""

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import stdev
from typing import Any, NamedTuple

import torch
from huggingface_hub import ModelCard

from hf_spec.adapters.config import CARD, MEASURED, VOCABULARY, PredictingConfig
from hf_spec.adapters.layer import Adapter as ActiveAdapter
from hf_spec.adapters.loading import active_names
from hf_spec.core.checks import explained, first_line
from hf_spec.core.stats import bar
from hf_spec.decoding.call import Choice
from hf_spec.draft.options import CHAIN
from hf_spec.files import read_json
from hf_spec.methods.registry import Method, get_method, methods
from hf_spec.tools.bench.contenders import Contender, contender_of, contenders, sized
from hf_spec.tools.bench.prompts import encode_prompts
from hf_spec.tools.bench.results import BenchResult
from hf_spec.tools.bench.runner import Session, run
from hf_spec.tools.data import ALL, Prompt
from hf_spec.tools.loading import Adapter

_, TRAINING, RESULTS = MEASURED
#: Draft tokens of a step where nothing says with how many the adapter was measured.
NODES = 8
#: Shares below which something looks wrong: of the model's own tokens in a draft vocabulary, and of
#: accepted first draft tokens.
COVERED, FIRST = 0.8, 0.1
#: Standard errors within which a mean over prompts is taken to lie.
ERRORS = 2.0
#: Draft tokens of a step in metadata of cards (``said_of`` in ``hf_spec/tools/hub.py``).
SIZE = re.compile(r"(trees|chains) of (\d+)")


class Expected(NamedTuple):
    """Tau that an adapter should have.

    Attributes:
        low, high: its range.
        source: who says so.
        trees, chains: draft tokens of a step that it is of; 0 for the other one.
        prefill: whether the prefill counts as a step.
    """

    low: float
    high: float
    source: str
    trees: int = NODES
    chains: int = 0
    prefill: bool = False

    def __str__(self) -> str:
        size = f"chains of {self.chains}" if self.chains else f"trees of {self.trees}"
        return f"tau {self.low:.2f} to {self.high:.2f} with {size}, by {self.source}"


#: What others have published, by strategy: without the prefill, of models from 7B parameters on.
PUBLISHED = {
    "medusa": Expected(2.31, 3.26, "Medusa and Hydra for Vicuna-7B on Spec-Bench", trees=60),
    "eagle3": Expected(2.8, 3.9, "the drafters of SpecBundle", trees=0, chains=7),
}


def expected_of(place: str, strategy: str) -> Expected | None:
    """What tau an adapter should have, by its own measurement, its card or its training, with 15%
    for other prompts; else by :data:`PUBLISHED`. None if nothing is known."""
    folder = Path(place)
    for tau, words, source in _suite_figures(folder, strategy):
        if found := SIZE.search(words):
            kind, number = found.groups()
            sizes = {"trees": 0, "chains": 0} | {kind: int(number)}
            return Expected(
                tau / BETTER, tau * BETTER, source, trees=sizes["trees"], chains=sizes["chains"]
            )
    best = read_json(folder / TRAINING, optional=True).get("best") or {}
    if trained := best.get("eval_tau"):
        source = f"the held-out prompts of its training ({TRAINING})"
        return Expected(trained / BETTER, trained * BETTER, source, prefill=True)
    return PUBLISHED.get(strategy)


def _suite_figures(folder: Path, strategy: str) -> Iterator[tuple[float, str, str]]:
    """Taus without the prefill that were measured on a suite, with the size of drafts in words and
    their source."""
    for row in read_json(folder / RESULTS, optional=True).get("runs", ()):
        name, _, label = row["strategy"].partition("@")[0].partition(":")
        if (name, row["task"]) == (strategy, ALL) and row.get("tau_without_prefill"):
            chain = label.startswith(CHAIN)
            words = f"{'chains' if chain else 'trees'} of {label.removeprefix(CHAIN)}"
            yield row["tau_without_prefill"], words, RESULTS
    if (folder / CARD).is_file():
        with explained(f"cannot read the metadata of {str(folder / CARD)!r}", ValueError):
            results = ModelCard.load(folder / CARD).data.eval_results or ()
        for one in results:
            if one.metric_type == "tau_without_prefill":
                yield float(one.metric_value), one.metric_name or "", f"its card ({CARD})"


@dataclass
class Check:
    """What was found.

    Attributes:
        expected: the range and its source, in words.
        measured: what was measured, by title.
        tried: tau of other values of fields, by what they are.
        findings: what looks wrong, a sentence or two each; empty if nothing does.
        notes: what may be known, and is nothing wrong by itself.
    """

    expected: str
    measured: dict[str, str] = field(default_factory=dict)
    tried: dict[str, str] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], adapter: Adapter, max_new_tokens: int
) -> Check:
    """Decode prompts with an adapter, as it is and otherwise.

    Args:
        adapter: is loaded and active.

    Raises:
        ValueError: it does not work with the model.
        KeyboardInterrupt: measuring was interrupted.
    """
    known = expected_of(adapter.path, adapter.strategy)
    trees, chains = (NODES, 0) if known is None else (known.trees, known.chains)
    options = sized([adapter.strategy], {}, [trees] * bool(trees), [chains] * bool(chains))
    contender = contenders([*options], options, [adapter])[-1]
    settings: Any = {"max_new_tokens": max_new_tokens, "title": "decoding"}
    made = run(model, tokenizer, prompts, [contender], **settings)
    if made.interrupted:
        raise KeyboardInterrupt
    row, margin = made.overall(contender.name), _margin(made, contender.name)
    name = "tau_without_prefill" if known is None or not known.prefill else "tau"
    tau, positions = row[name], row["stats"]["acceptance_per_position"]
    layer = get_method(adapter.strategy).active_adapter(model)
    covered = None if layer is None else _coverage(made, layer)
    found = Check("nothing is known of such adapters" if known is None else str(known))
    found.measured["tau"] = f"{tau:.2f}, the prefill {'included' if name == 'tau' else 'left out'}"
    shares = (f"{place}: {share:.0%}" for place, share in enumerate(positions, 1))
    found.measured["accepted at position"] = " ".join(shares)
    if covered is not None:
        found.measured["draft vocabulary"] = f"{covered:.0%} of the model's own tokens"
    if layer is not None:
        # In chains, what is wrong shows most.
        alone = {"tree": CHAIN, "drafting": "always", "lookup": False}
        if CHAIN in get_method(adapter.strategy).declares.trees:
            contender = contenders([adapter.strategy], {adapter.strategy: alone}, [adapter])[-1]
        found.findings += _tried(found.tried, model, tokenizer, prompts, contender, layer, settings)
    looks = {
        f"The draft vocabulary has only {covered or 0:.0%} of the model's own tokens: it was made "
        "for other texts, or its ids are those of another tokenizer.":
        covered is not None and covered < COVERED,
        NO_TEMPLATE: not getattr(tokenizer, "chat_template", None),
        f"Almost no first draft token is accepted ({(*positions, 0.0)[0]:.0%}), as if the adapter "
        "were made for another model, or for features or tokens in another order.":
        (*positions, 0.0)[0] < FIRST,
    }  # fmt: skip
    found.findings += [text for text, stands_out in looks.items() if stands_out]
    if other := _other_base(model, layer):
        found.notes.append(other)
    if known is not None and tau + margin < known.low:
        found.findings.append(
            f"Tau is {tau:.2f}, give or take {margin:.2f}, below the range of {known.low:.2f} to "
            f"{known.high:.2f}"
            + ("." if found.findings else ", and nothing here says why: try prompts like those it "
               "was trained or measured on (--prompts), and its base by that very name.")
        )  # fmt: skip
    return found


def _margin(made: BenchResult, name: str) -> float:
    """What the mean tau of these prompts may differ from that of others like them."""
    taus = [
        sum(map(len, one.rows)) / one.row_steps for one in made.measurements if one.strategy == name
    ]
    return ERRORS * stdev(taus) / len(taus) ** 0.5 if len(taus) > 1 else math.inf


def _coverage(made: BenchResult, layer: Any) -> float | None:
    """Share of the model's own tokens that an adapter can draft; None without a draft
    vocabulary."""
    tokens = layer.tensors().get(VOCABULARY)
    if tokens is None:
        return None
    known = set(tokens.tolist())
    own = [
        token for one in made.measurements if one.strategy == one.baseline
        for row in one.rows for token in row
    ]  # fmt: skip
    return sum(token in known for token in own) / max(len(own), 1)


def _other_base(model: Any, layer: Any) -> str:
    """That the adapter names another base than the model; empty if it does not, or one of both has
    no name. Folders are compared by the last part of their names."""
    base = "" if layer is None else layer.config.base_model_name_or_path or ""
    here = getattr(model, "name_or_path", "") or ""
    if not (base and here) or Path(base).name.lower() == Path(here).name.lower():
        return ""
    return (
        f"The adapter names {base!r} as its base, and this is {here!r}, of the same shape. If it "
        "is not the same model under another name, or a fine-tuned one, take the former."
    )


def _tried(
    tried: dict[str, str], model: Any, tokenizer: Any, prompts: Sequence[Prompt],
    contender: Contender, layer: Any, settings: Mapping[str, Any],
) -> list[str]:  # fmt: skip
    """What to change about an adapter's config, if another value is much better; notes what was
    tried."""
    others = layer.config.alternatives(model)
    if not others:
        return []
    new_tokens = settings["max_new_tokens"]
    token_ids, _ = encode_prompts(model, tokenizer, prompts, new_tokens)
    options = {"do_sample": False, "max_new_tokens": new_tokens}
    taus: dict[str, float] = {}
    with Session.open(model, tokenizer, options, [contender]) as session:
        for values in ({}, *others):
            words = json.dumps(values) if values else ""
            with _instead(layer.config, values):
                # Under a name of its own it sees nothing that the others have learned.
                taus[words] = _tau(session, replace(contender, name=words), token_ids)
    as_it_is = taus.pop("")
    tried |= {words: f"tau {tau:.2f}" for words, tau in taus.items()}
    words = max(taus, key=taus.__getitem__)
    if taus[words] <= BETTER * as_it_is:
        return []
    return [
        f"Drafts are accepted more often with {words}: tau {taus[words]:.2f} instead of "
        f"{as_it_is:.2f}. The checkpoint does not say so, or says it wrongly: import it again with "
        f"--config '{words}'."
    ]


@contextmanager
def _instead(config: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, fields of a config have these values."""
    before = {name: getattr(config, name) for name in values}
    try:
        for name, value in values.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _tau(session: Session, contender: Contender, token_ids: Sequence[list[int]]) -> float:
    """Tau without the prefill."""
    tokens = steps = 0
    for ids in token_ids:
        _, (row,), forwards, _ = session.generate(contender, [ids])
        tokens, steps = tokens + len(row) - 1, steps + forwards - 1
    return tokens / steps if steps else 0.0


# -- What works on a model, why drafts are accepted as often as they are, and what to try ----------

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
    method: Method, adapter: ActiveAdapter | None, chat: bool, best: float, tau: float,
    speedup: float, positions: Sequence[float],
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
