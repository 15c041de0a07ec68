"""Runs ``generate`` with this repository's strategy and settings:

    model.load_adapter("this/repository")
    model.generate(**inputs, custom_generate="this/repository", trust_remote_code=True)

The shorter way, which runs no code of the repository, is its model card's: ``import hf_spec`` and
``hf_spec.SpecConfig.from_pretrained("this/repository")``.
"""

from typing import Any

# As in generation_config.json; filled in when a repository is written.
STRATEGY: str | None = "layer_skip"
OPTIONS: dict[str, Any] = {
    "draft_exit": "adaptive",
    "max_draft": 12,
    "target_acceptance": 0.85,
    "threshold": 0.6,
}


def generate(model: Any, **kwargs: Any) -> Any:
    """``model.generate`` with the repository's strategy, unless the call names one itself.

    Args:
        model: the base model, with this repository's adapter loaded if the strategy needs it.
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
            "pip install hf_spec"
        ) from error
    from transformers import GenerationMixin

    config = kwargs.get("generation_config")
    named = kwargs.get("assistant_strategy") or getattr(config, "assistant_strategy", None)
    if not named:
        if STRATEGY is None:
            raise ValueError(
                "this copy of custom_generate names no strategy: take it from an adapter "
                "repository, or pass assistant_strategy=..."
            )
        kwargs["assistant_strategy"] = STRATEGY
        kwargs["assistant_kwargs"] = {**OPTIONS, **(kwargs.get("assistant_kwargs") or {})}
    # Not model.generate, which may be this very function.
    return GenerationMixin.generate(model, **kwargs)
