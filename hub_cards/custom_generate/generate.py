"""Runs ``generate`` with this repository's adapter, strategy and settings:

    model.generate(**inputs, custom_generate="this/repository", trust_remote_code=True)

The other way, which runs no code of the repository, is its model card's: ``import hf_spec``,
``model.load_adapter`` and ``hf_spec.SpecConfig.from_pretrained``.
"""

import re
from pathlib import Path
from typing import Any

# Filled in when a repository is written: strategy, options and peft_type as in its configs, what to
# install, and by `hf-spec push` the repository where the adapter is found.
SETTINGS: dict[str, Any] = {}


def generate(model: Any, **kwargs: Any) -> Any:
    """``model.generate`` with the repository's strategy, unless the call names one itself.

    Args:
        model: the base model. If it has no adapter of the type, this repository's is loaded, and
            stays.
        **kwargs: everything ``generate`` takes; ``assistant_kwargs`` are added to the
            repository's, and win.

    Raises:
        ImportError: hf_spec is not installed.
    """
    try:
        import hf_spec  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "this repository's custom_generate needs hf_spec, which is not installed: "
            f"{SETTINGS.get('install')}"
        ) from error
    from transformers import GenerationMixin
    from transformers.utils import logging

    config = kwargs.get("generation_config")
    named = kwargs.get("assistant_strategy") or getattr(config, "assistant_strategy", None)
    if not named:
        if not SETTINGS:
            raise ValueError(
                "this copy of custom_generate names no strategy: take it from an adapter "
                "repository, or pass assistant_strategy=..."
            )
        _load_adapter(model)
        options, own = SETTINGS["options"], kwargs.get("assistant_kwargs") or {}
        if options.get("acceptance") == "typical" and "acceptance" not in own:
            logging.get_logger("hf_spec").warning_once(
                f"{SETTINGS['repository'] or Path(__file__).parents[1]} asks for "
                "acceptance='typical', which emits other tokens than the model alone would. Pass "
                "assistant_kwargs={'acceptance': 'match'} for the model's own."
            )
        kwargs["assistant_strategy"] = SETTINGS["strategy"]
        kwargs["assistant_kwargs"] = {**options, **own}
    # Not model.generate, which may be this very function.
    return GenerationMixin.generate(model, **kwargs)


def _load_adapter(model: Any) -> None:
    """Load the adapter that lies beside this file, unless the model has one of its type."""
    adapters, repository = getattr(model, "peft_config", None) or {}, SETTINGS["repository"]
    types = [config.peft_type for config in adapters.values()]
    if repository is None or SETTINGS["peft_type"] in types:
        return
    # Transformers keeps this file in a folder that is named after its commit.
    commit = Path(__file__).parents[1].name
    pinned = {"revision": commit} if re.fullmatch("[0-9a-f]{40}", commit) else {}
    name = "custom_generate" if "default" in adapters else "default"
    model.load_adapter(repository, adapter_name=name, adapter_kwargs=pinned)
