"""Where a training starts: a new adapter, or a trained one that gets a Markov head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftConfig
from safetensors.torch import load_file

from hf_spec.adapters.active import find_active
from hf_spec.adapters.checkpoint import PEFT_PREFIX, WEIGHTS
from hf_spec.adapters.layer import name_on_disk
from hf_spec.adapters.predicting import (
    MARKOV_HEAD,
    TRAINED,
    VOCABULARY,
    PredictingConfig,
    VocabularyConfig,
    vocab_size,
)
from hf_spec.drafting.draft_vocabulary import common_tokens
from hf_spec.methods.registry import Method


def new_config(method: Method, model: Any, fields: dict[str, Any]) -> Any:
    """The config of a new adapter for a base model.

    Args:
        method: the method.
        model: the base model.
        fields: fields that the user sets.
    """
    assert method.adapter_config is not None
    config = method.adapter_config(**{**method.trained, **fields})
    if isinstance(config, VocabularyConfig) and "draft_vocab_size" not in fields:
        config.set_vocabulary(model)
    return config


def with_markov_head(folder: Path, fields: dict[str, Any]) -> Any:
    """The config of a trained adapter that gets a Markov head.

    Args:
        folder: the adapter folder.
        fields: changed fields of its config: ``markov_rank`` (by default as for a new adapter) and
            ``markov_learning_rate``.

    Raises:
        ValueError: the adapter has a Markov head, its method has none, or it was trained together
            with its base model.
    """
    fields = {**TRAINED, **fields}
    config: Any = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, PredictingConfig):
        raise ValueError(f"{str(folder)!r}: adapters of type {config.peft_type} predict nothing")
    if config.markov_rank:
        raise ValueError(f"the adapter {str(folder)!r} has a Markov head already: train it anew")
    if config.trains_base:
        raise ValueError(
            f"training the adapter {str(folder)!r} trains its base model, too, which is to stay as "
            "it is here: train it anew with a Markov head"
        )
    own = {"markov_rank", "markov_learning_rate"}
    if other := sorted(set(fields) - own):
        raise ValueError(f"{other[0]} belongs to what the adapter has learned: leave it out")
    return dataclasses.replace(config, **{**fields, "inference_mode": False})


def load_trained(model: Any, config: Any, folder: Path) -> None:
    """Load a trained adapter's weights into one with a transition, and freeze them."""
    adapter = find_active(model, config.type_name)
    assert adapter is not None
    weights = adapter.weights()
    stored = load_file(folder / WEIGHTS)
    for name in weights:
        is_new = name in MARKOV_HEAD
        weights[name].requires_grad_(is_new)
        if not is_new:
            place = PEFT_PREFIX + name_on_disk(adapter.layer.prefix, name)
            weights[name].data.copy_(stored[place])


def set_vocabulary(model: Any, config: Any, answers: Sequence[Sequence[int]]) -> None:
    """Set the vocabulary of an adapter that has its own to the commonest tokens of the answers."""
    adapter = find_active(model, config.type_name)
    tokens = None if adapter is None else adapter.weights().get(VOCABULARY)
    if tokens is not None:
        assert adapter is not None
        common = common_tokens(answers, len(tokens), vocab_size(model))
        adapter.module.set_vocabulary(common, model)
