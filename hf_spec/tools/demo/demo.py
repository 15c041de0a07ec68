"""The demo: the shipped model writes the same code with and without speculation, with numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from hf_spec.adapters.base_model import facts_of
from hf_spec.files import read_json
from hf_spec.tools.bench.contenders import contenders
from hf_spec.tools.bench.environment import environment_of
from hf_spec.tools.bench.prompts import BUNDLED, read_prompts, spread
from hf_spec.tools.bench.results import BenchResult
from hf_spec.tools.bench.runner import run
from hf_spec.tools.hub.folder import CONFIG
from hf_spec.tools.loading import load_adapters, load_model, read_adapters

SHIPPED = Path(str(files("hf_spec.tools.demo")))
#: Adapters of popular models, ready for the Hub.
PUBLISHED = Path(str(files("hub_cards"))) / "adapters"
#: Needs neither training nor an adapter.
FREE_STRATEGY = "prompt_lookup"
#: Beginnings of classes in the style that the demo model has learned, written for this package.
PROMPTS = SHIPPED / "prompts.jsonl"


@dataclass
class DemoResult:
    """What the demo measured, and one prompt with what the model wrote after it."""

    bench: BenchResult
    environment: dict[str, Any]
    sample: tuple[str, str]


def model_folder() -> Path:
    """The model shipped with the package."""
    return SHIPPED / "model"


def adapter_folders(root: Path = SHIPPED / "adapters") -> list[Path]:
    """The adapters for the demo model that are shipped with the package, or those in a folder."""
    return sorted(path.parent for path in root.glob("*/adapter_config.json"))


def fitting(model: Any) -> list[Path]:
    """The :data:`PUBLISHED` adapters that were made for a model of this shape."""
    facts, folders = facts_of(model), adapter_folders(PUBLISHED)
    return [one for one in folders if read_json(one / CONFIG).get("base_facts") == facts]


def run_demo(
    limit: int, max_new_tokens: int, dtype: str, *, name: str | None = None,
    progress: Callable[[int, int], Any] = lambda done, total: None,
    status: Callable[[str], Any] = lambda text: None,
) -> DemoResult:  # fmt: skip
    """Load a model, the shipped one or another with the published adapters that fit it, and measure
    it, plainly and with each strategy. ``status`` gets a line of text when it is loaded."""
    if name is None:
        adapters = read_adapters(map(str, adapter_folders()))
        model, tokenizer = load_model(str(model_folder()), dtype, adapters=adapters)
        chosen = read_prompts(PROMPTS)[:limit]
    else:
        model, tokenizer = load_model(name, dtype)
        adapters = read_adapters(map(str, fitting(model)))
        load_adapters(model, adapters)
        chosen = spread(read_prompts(BUNDLED), limit)
    strategies = dict.fromkeys([FREE_STRATEGY, *(adapter.strategy for adapter in adapters)])
    ways = contenders(strategies, adapters=adapters)
    count = f"{len(chosen)} prompt{'s' * (len(chosen) != 1)}"
    names = ", ".join(one.name for one in ways)
    status(f"{count}, up to {max_new_tokens} new tokens each, plainly and with {names}")
    bench = run(
        model, tokenizer, chosen, ways,
        max_new_tokens=max_new_tokens, progress=progress,
    )  # fmt: skip
    environment = environment_of(model, name or "demo model", None)
    return DemoResult(bench, environment, _sample(bench, tokenizer))


def _sample(bench: BenchResult, tokenizer: Any) -> tuple[str, str]:
    """The first prompt, and its continuation."""
    drafted = (item for item in bench.measurements if item.stats is not None)
    first = next(drafted, None)
    if first is None:
        return "", ""
    text = tokenizer.decode(first.rows[0], skip_special_tokens=True)
    return bench.prompts[first.prompts[0]].text, text
