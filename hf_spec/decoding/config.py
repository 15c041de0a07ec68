"""``SpecConfig``: a generation configuration that names a strategy."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from hf_spec.adapters.repo_files import GENERATION
from hf_spec.core.checks import UNFIT, check_names, explained, first_line
from hf_spec.drafting.options import AUTO, DraftOptions
from hf_spec.files import is_path, read_json
from hf_spec.methods.registry import get_method, methods

logger = logging.getLogger(__name__)


class StoredOptions(dict[str, Any]):
    """Options from a repository, and its name; options given by the user replace them."""

    def __init__(self, options: Mapping[str, Any] | None = None, source: str = ""):
        super().__init__(options or {})
        self.source = source


def note_source(config: GenerationConfig, source: str) -> None:
    """Record where the options of a loaded configuration came from."""
    if isinstance(config.assistant_kwargs, dict):
        config.assistant_kwargs = StoredOptions(config.assistant_kwargs, source)


def warn_if_lossy(options: Any, lossless: bool) -> None:
    """Warn, once per repository, if the given options are its own and not lossless."""
    if isinstance(options, StoredOptions) and not lossless:
        _warn_of_lossy(options.source, options["acceptance"])


@functools.cache
def _warn_of_lossy(source: str, acceptance: str) -> None:
    logger.warning(
        "%s asks for acceptance=%r, which emits other tokens than the model alone would. Pass "
        "assistant_kwargs={'acceptance': 'match', ...} for the model's own.", source, acceptance,
    )  # fmt: skip


def _check_options_of_all(kwargs: dict[str, Any]) -> None:
    """Check the options of a call whose strategy is chosen later, as far as all strategies share
    them; that strategy checks its own."""
    common = [item.name for item in dataclasses.fields(DraftOptions)]
    own = {name for one in methods().values() for name in (*one.option_names, *one.former_names)}
    check_names(
        f"assistant_kwargs: strategy {AUTO!r}", (name for name in kwargs if name not in own), common
    )
    DraftOptions(**{name: value for name, value in kwargs.items() if name in common})


class SpecConfig(GenerationConfig):
    """A ``GenerationConfig`` with a strategy and its options, checked when it is built.

    Args:
        assistant_strategy: name of a strategy (``hf_spec.strategies()`` lists them), or ``auto``:
            the call's assistant model drafts, else the adapter that the call names, else the active
            adapter, each with the options stored beside it, else MTP layers of the model's own
            checkpoint, else prompt lookup.
        assistant_kwargs: its options.
        **kwargs: everything a ``GenerationConfig`` takes.

    Raises:
        ValueError: if a strategy, option or value is unknown.
    """

    def __init__(
        self,
        assistant_strategy: str | None = None,
        assistant_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        if assistant_strategy == AUTO:
            _check_options_of_all(assistant_kwargs or {})
        elif assistant_strategy is not None:
            get_method(assistant_strategy).parse_options(assistant_kwargs)
        elif assistant_kwargs:
            raise ValueError(
                f"assistant_kwargs={assistant_kwargs!r} without assistant_strategy: name the "
                "strategy these options belong to."
            )
        # Set first: the parent's default, _from_model_config=True, loses extra fields on reload.
        kwargs["_from_model_config"] = False
        super().__init__(**kwargs)
        self.assistant_strategy = assistant_strategy
        self.assistant_kwargs = assistant_kwargs or {}

    @classmethod
    def from_pretrained(cls, pretrained_model_name: Any, *args: Any, **kwargs: Any) -> Any:
        """Read the configuration of a folder or a repository on the Hub; see ``GenerationConfig``.

        Raises:
            OSError: there is none; the message says whether there is such a folder.
        """
        name = str(pretrained_model_name)
        if not Path(name).exists() and is_path(name):
            raise FileNotFoundError(
                f"cannot read a SpecConfig from {name!r}: there is no such folder"
            )
        plain = not args and not {"config_file_name", "subfolder"} & kwargs.keys()
        if plain and Path(name).is_dir() and not (Path(name) / GENERATION).is_file():
            raise FileNotFoundError(
                f"cannot read a SpecConfig from {name!r}: the folder has no {GENERATION}, so that "
                "it is no adapter's"
            )
        file = Path(name, kwargs.get("config_file_name") or GENERATION)
        if file.is_file():
            read_json(file)  # which says what is wrong with it
        try:
            with explained(f"cannot read a SpecConfig from {name!r}", ValueError, *UNFIT):
                return super().from_pretrained(pretrained_model_name, *args, **kwargs)
        except OSError as error:
            if Path(name).exists():
                raise
            raise OSError(
                f"cannot read a SpecConfig from {name!r}: there is no such folder here, and on the "
                f"Hub: {first_line(error)}"
            ) from error
