"""What the demo runs: models, the adapters that fit them, prompts."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from hf_spec.adapters.config import facts_of
from hf_spec.files import read_json
from hf_spec.tools.bench.prompts import BUNDLED, read_prompts, spread
from hf_spec.tools.data import Prompt
from hf_spec.tools.hub.folder import CONFIG
from hf_spec.tools.loading import Adapter, load_adapters, load_model, read_adapters

SHIPPED = Path(str(files("hf_spec.tools.demo")))
#: Adapters of popular models, ready for the Hub; wheels don't have them.
PUBLISHED = Path(str(files("hf_spec.hub_cards"))) / "adapters"
#: Needs neither training nor an adapter.
FREE_STRATEGY = "token_recycling"
#: Beginnings of classes in the style that the demo model has learned, written for this package.
PROMPTS = SHIPPED / "prompts.jsonl"


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


def load(name: str | None, dtype: str, limit: int) -> tuple[Any, Any, list[Adapter], list[Prompt]]:
    """The shipped model, or another one with the published adapters that fit it: model, tokenizer,
    the adapters that it has, and at most ``limit`` prompts."""
    if name is None:
        adapters = read_adapters(map(str, adapter_folders()))
        model, tokenizer = load_model(str(model_folder()), dtype, adapters=adapters)
        return model, tokenizer, adapters, read_prompts(PROMPTS)[:limit]
    model, tokenizer = load_model(name, dtype)
    adapters = read_adapters(map(str, fitting(model)))
    load_adapters(model, adapters)
    return model, tokenizer, adapters, spread(read_prompts(BUNDLED), limit)
