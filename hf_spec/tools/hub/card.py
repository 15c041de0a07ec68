"""Renders the card of an adapter folder from its configs and results.

The template is ``hub_cards/adapter_card.md``. Each method adds a section, ``Method.card``,
with the variables ``adapter`` (the adapter's config), ``options`` and ``search``
(``search.json``, or None). ``hub_cards/training.md`` adds a section for trained adapters. The card
depends on the folder alone.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_spec.core.checks import INSTALL, explained, names_its_files
from hf_spec.drafting.options import ACCEPTANCE_RULES
from hf_spec.files import read_json, write_atomically
from hf_spec.methods.registry import Method
from hf_spec.tools.hub.folder import CARD, CONFIG, is_repository, read_spec_config, write_shim

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

RESULTS, SEARCH, TRAINING = "results.json", "search.json", "training.json"
#: Ends a card of ours, with a hash of its text: that of an edited card is another.
MARK = "<!-- Written by hf_spec, {}. A card that was edited since is kept. -->"
METADATA = re.compile(r"\A\s*---\n.*?\n---\s*\n", re.DOTALL)
#: What PEFT appends to each card when it saves an adapter.
PEFT_VERSION = re.compile(r"(### Framework versions\s+)?^- PEFT \S+$", re.MULTILINE)


@names_its_files
def render_card(
    folder: Path, repository: str | None = None, base_model: str | None = None, **metadata: Any
) -> str:
    """The text of a card, with the adapter's name on the Hub and that of its base model; by default
    the folder's name, and what ``adapter_config.json`` says. ``metadata`` are fields that nothing
    in the folder says, such as ``license`` and ``language``."""
    method, options = read_spec_config(folder)
    adapter = read_json(folder / CONFIG)
    base_model = base_model or adapter.get("base_model_name_or_path") or "the base model"
    public = is_repository(base_model) and base_model != "the base model"
    search, training = (read_json(folder / one, optional=True) for one in (SEARCH, TRAINING))
    repository = repository or folder.resolve().name
    facts: dict[str, Any] = {"adapter": adapter, "options": options}
    section = trained = ""
    if method.card.is_file():  # the method's own section
        section = _render(method.card, **facts, search=search or None)
    if training:
        best = training.get("best") or {}
        distances = itertools.takewhile(lambda i: f"eval_top1_{i}" in best, itertools.count(1))
        source = files("hf_spec.hub_cards") / "training.md"
        trained = _render(source, training=training, distances=list(distances))
    acceptance, figures = method.parse_options(options).acceptance, _figures(folder, method, search)
    card = _filled(
        _metadata(repository, base_model if public else None, method, figures, training, metadata),
        template_str=(files("hf_spec.hub_cards") / "adapter_card.md").read_text(encoding="utf-8"),
        install=INSTALL, title=repository.rpartition("/")[2], repository=repository,
        base_model=base_model, base_is_repository=public, method=method, **facts,
        lossless=ACCEPTANCE_RULES[acceptance], acceptance=acceptance,
        figures=figures, section=section, training=trained,
    )  # fmt: skip
    return f"{str(card).rstrip()}\n\n{_mark(card.text)}\n"


def _metadata(
    repository: str, base_model: str | None, method: Method, figures: dict[str, Any] | None,
    training: dict[str, Any], metadata: dict[str, Any],
) -> ModelCardData:  # fmt: skip
    """What the Hub shows beside a card, and finds an adapter by. The library is hf_spec, since the
    Hub would show code of PEFT's, which does not know these adapters by itself."""
    from huggingface_hub import ModelCardData

    results = _eval_results(figures) if figures else []
    named: dict[str, Any] = {"model_name": repository.rpartition("/")[2], "eval_results": results}
    related: dict[str, Any] = {} if base_model is None else {"base_model_relation": "adapter"}
    return ModelCardData(
        base_model=base_model, library_name="hf_spec", pipeline_tag="text-generation",
        tags=["hf_spec", "speculative-decoding", method.name],
        datasets=_datasets(training), **(named if results else {}), **related,
        **{name: value for name, value in metadata.items() if value},
    )  # fmt: skip


def _datasets(training: dict[str, Any]) -> list[str] | None:
    """Datasets of the Hub that an adapter was trained on, or whose prompts its base answered."""
    data = training.get("data") or {}
    asked = (data.get("provenance") or {}).get("prompts")
    # Names of files have no slash; of a dataset, split and column follow, as may a configuration.
    names = [data.get("dataset"), *(asked.values() if isinstance(asked, dict) else ())]
    named = [name.partition(":")[0].split("/") for name in names if name and "/" in name]
    found = {"/".join(parts[:2]) for parts in named}
    return sorted(found) or None


def _eval_results(figures: dict[str, Any]) -> list[EvalResult]:
    """Tau and speed over all prompts."""
    from huggingface_hub import EvalResult

    row, where = figures["rows"][-1], figures["environment"]
    name = where.get("dataset") or (where.get("prompts") or "prompts").rpartition("/")[2]
    values = {
        "tau": (row["tau"], "tokens per forward pass"),
        "speedup": (row["speedup"], f"beside plain generate, {where['device_name']}"),
        "tokens_per_second": (
            row["tokens_per_second"],
            f"{where['device_name']}, {where['dtype']}",
        ),
    }
    return [
        EvalResult(
            task_type="text-generation", dataset_type=name, dataset_name=name,
            metric_type=kind, metric_value=round(value, 3), metric_name=f"{kind}, {said}",
        )
        for kind, (value, said) in values.items()
    ]  # fmt: skip


def renewed_card(
    folder: Path, repository: str, base_model: str | None = None, **metadata: Any
) -> str:
    """The text of a folder's card, rendered anew with other names unless a person has written or
    edited it; metadata that hf_spec and PEFT don't set, such as a license, stays."""
    from huggingface_hub import ModelCard, ModelCardData

    text = (folder / CARD).read_text(encoding="utf-8")
    body = PEFT_VERSION.sub("", METADATA.sub("", text))
    of_peft = ModelCard.from_template(ModelCardData()).text
    before, _, last = body.rstrip().rpartition("\n")
    if last != _mark(before) and body.split() != of_peft.split():
        if given := [name for name, value in metadata.items() if value]:
            raise ValueError(
                f"{str(folder / CARD)!r} was edited by hand and is uploaded as it is: write the "
                f"{' and the '.join(given)} into it, or let 'hf-spec card' write it anew"
            )
        return text
    return _completed(render_card(folder, repository, base_model, **metadata), text)


def _completed(card: str, old: str) -> str:
    """A card with the metadata of an old one that it lacks itself, but for what was measured."""
    from huggingface_hub import ModelCard

    new, before = ModelCard(card), ModelCard(old, ignore_metadata_errors=True).data.to_dict()
    for key, value in before.items():
        if key != "model-index" and new.data.get(key) is None:
            new.data[key] = value
    return str(new)


def _mark(text: str) -> str:
    """The last line of a card of ours with this text, whose line breaks and spaces don't count."""
    return MARK.format(hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16])


def write_card(
    folder: Path, repository: str | None = None, base_model: str | None = None, **metadata: Any
) -> Path:
    """Write ``README.md`` (:func:`render_card`), whose path is returned, and
    ``custom_generate/generate.py`` to an adapter folder. Of a card that is there, metadata which
    nothing else says stays."""
    text = render_card(folder, repository, base_model, **metadata)
    if (folder / CARD).is_file():
        text = _completed(text, (folder / CARD).read_text(encoding="utf-8"))
    write_shim(folder)
    write_atomically(folder / CARD, text)
    return folder / CARD


#: What is wrong with records where a template asks for more.
_NOT_THERE = "what was recorded of the adapter does not fit its card"


def _filled(data: Any, **values: Any) -> Any:
    from huggingface_hub import ModelCard
    from jinja2 import TemplateError

    with explained(_NOT_THERE, TemplateError):
        return ModelCard.from_template(data, **values)


def _render(source: Traversable, **values: Any) -> str:
    from jinja2 import Template, TemplateError

    with explained(_NOT_THERE, TemplateError):
        return Template(source.read_text(encoding="utf-8")).render(**values).strip()


def _figures(folder: Path, method: Method, search: dict[str, Any]) -> dict[str, Any] | None:
    """The strategy's figures in the folder's ``results.json``; None if there is no such file."""
    if not (folder / RESULTS).is_file():
        return None
    data = read_json(folder / RESULTS)
    try:
        environment, size = data["environment"], data["runs"][0]["batch_size"]
        runs = [row for row in data["runs"] if row["batch_size"] == size]
        speeds = {(row["strategy"], row["task"]): row["tokens_per_second"] for row in runs}
        strategy = next(name for name, _ in speeds if name.partition("@")[0] == method.name)
        own = [{**row, "plain": speeds[row["baseline"], row["task"]]}
               for row in runs if row["strategy"] == strategy]  # fmt: skip
        by_task = len(own) > 2  # a single task has the same figures as "all"
        asked = environment.get("prompts_sha256")
        searched = bool(search) and search["environment"].get("prompts_sha256") == asked
        return {
            "rows": own if by_task else own[-1:], "by_task": by_task, "batch_size": size,
            "development": searched and not environment.get("held_out"),
            "environment": environment,
        }  # fmt: skip
    except (LookupError, TypeError, StopIteration) as error:
        raise ValueError(
            f"{str(folder / RESULTS)!r} is not what hf-spec bench writes for {method.name!r}: "
            f"{error!r}"
        ) from error
