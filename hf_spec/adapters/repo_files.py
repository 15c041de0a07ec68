"""Files beside an adapter's weights that describe how to decode with them.

`generation_config.json` names the strategy and its options, for `SpecConfig.from_pretrained`;
`custom_generate/generate.py` does the same for `generate(custom_generate=...)`.
"""

import json
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from hf_spec.core.checks import INSTALL
from hf_spec.files import read_json, write_atomically

CARD = "README.md"
#: The library in the metadata of a card.
OF_PEFT = re.compile(r"(\A---\n(?:(?!---\n).*\n)*?)library_name: peft\n")
GENERATION, SHIM = "generation_config.json", "custom_generate/generate.py"
#: The line of the shim that is filled in.
EMPTY = "SETTINGS: dict[str, Any] = {}\n"


def shim_text(
    strategy: str, options: dict[str, Any], peft_type: str | None, repository: str | None = None
) -> str:
    """`custom_generate/generate.py` for a strategy with these options, and for the adapter's type
    and repository on the Hub, if there are any.

    They are written into it, since Transformers runs a copy of the file elsewhere.
    """
    settings = {
        "strategy": strategy, "options": options, "peft_type": peft_type, "install": INSTALL,
        "repository": repository,
    }  # fmt: skip
    text = (files("hf_spec.hub_cards") / SHIM).read_text(encoding="utf-8")
    return text.replace(EMPTY, EMPTY.replace("{}", repr(settings)))


def says_the_same(shim: str, strategy: str, options: dict[str, Any], peft_type: str | None) -> bool:
    """Whether a shim's text is that of `shim_text` for some repository."""
    repository = re.search(r"'repository': '([\w./-]+)'}\n", shim)
    expected = shim_text(strategy, options, peft_type, repository[1] if repository else None)
    return shim.rstrip() == expected.rstrip()


def write_companions(folder: str | os.PathLike[str], config_class: Any, shim: bool = True) -> None:
    """Write the companions of an adapter, with its strategy's default options; without
    `custom_generate` unless ``shim``.

    Nothing that names a strategy is replaced: tuned options stay. A `generation_config.json` that
    names none, as Transformers saves a base model's, is completed. Adapters that belong to no
    strategy get no companions. In a card that PEFT has written, the library is hf_spec: the Hub
    would show PEFT's code for it, which does not know these adapters by itself.
    """
    if config_class.strategy is None:
        return
    card = Path(folder) / CARD
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    if OF_PEFT.match(text):
        write_atomically(card, OF_PEFT.sub(r"\1library_name: hf_spec\n", text))
    path = Path(folder) / GENERATION
    data = read_json(path, optional=True) or GenerationConfig().to_diff_dict()
    if not data.get("assistant_strategy"):
        # With _from_model_config=True, loading would drop the strategy.
        data |= {
            "_from_model_config": False, "assistant_strategy": config_class.strategy,
            "assistant_kwargs": {},
        }  # fmt: skip
        write_atomically(path, json.dumps(data, indent=2, sort_keys=True))
    if shim and not (Path(folder) / SHIM).is_file():
        options = data.get("assistant_kwargs") or {}
        text = shim_text(data["assistant_strategy"], options, config_class.type_name)
        write_atomically(Path(folder) / SHIM, text)
