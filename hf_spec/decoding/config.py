"""``SpecConfig``: a generation configuration that names a strategy."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from hf_spec.methods.registry import get_method


class SpecConfig(GenerationConfig):
    """A ``GenerationConfig`` with a strategy and its options, checked when it is built.

    Args:
        assistant_strategy: name of a strategy (``hf_spec.strategies()`` lists them).
        assistant_kwargs: its options.
        **kwargs: everything a ``GenerationConfig`` takes.

    Raises:
        ValueError: on an unknown strategy, option or value.
    """

    def __init__(
        self,
        assistant_strategy: str | None = None,
        assistant_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        if assistant_strategy is not None:
            get_method(assistant_strategy).parse_options(assistant_kwargs)
        elif assistant_kwargs:
            raise ValueError(
                f"assistant_kwargs={assistant_kwargs!r} without assistant_strategy: name the "
                "strategy these options belong to."
            )
        # Set before the parent's: its _from_model_config=True would lose extra fields on reload.
        kwargs["_from_model_config"] = False
        super().__init__(**kwargs)
        self.assistant_strategy = assistant_strategy
        self.assistant_kwargs = assistant_kwargs or {}
