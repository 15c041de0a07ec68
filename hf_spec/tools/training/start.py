"""Where a training starts: a new adapter, or a trained one."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftConfig
from safetensors.torch import load_file

from hf_spec.adapters.checkpoint import PEFT_PREFIX, WEIGHTS
from hf_spec.adapters.layer import name_on_disk
from hf_spec.adapters.module import Adapter
from hf_spec.adapters.predicting import (
    MARKOV_HEAD,
    VOCABULARY,
    PredictingConfig,
    VocabularyConfig,
    vocab_size,
)
from hf_spec.drafting.draft_vocabulary import common_tokens
from hf_spec.methods.registry import Method

#: Fields of configs that only training reads, beside learning rates; a head's rank is checked.
OF_TRAINING = ("loss", "decay", "ttt_steps", "markov_rank")


def new_config(method: Method, model: Any, fields: dict[str, Any]) -> Any:
    """The config of a new adapter for a base model, with fields that the user sets."""
    assert method.adapter_config is not None
    config = method.adapter_config(**{**method.trained, **fields})
    if isinstance(config, VocabularyConfig) and "draft_vocab_size" not in fields:
        config.set_vocabulary(model)
    return config


def continued(method: Method, folder: Path, fields: dict[str, Any]) -> tuple[Any, bool]:
    """The config of a training that goes on from a trained adapter, and whether that gets a Markov
    head, which then is all that is trained. A ValueError if the adapter cannot be trained on, or if
    ``fields`` of its config change others than `OF_TRAINING` and learning rates."""
    config: Any = PeftConfig.from_pretrained(str(folder))
    if type(config) is not method.adapter_config:
        raise ValueError(
            f"{str(folder)!r} is an adapter of type {config.peft_type}: {method.name!r} goes on "
            f"from its own, of type {method.peft_type}"
        )
    if config.trains_base:
        raise ValueError(
            f"training the adapter {str(folder)!r} trains its base model, too: train it anew, on "
            "the model in its folder if it is to go on from there"
        )
    if not (folder / WEIGHTS).is_file():
        raise ValueError(
            f"{str(folder)!r} has no {WEIGHTS}: there is nothing to go on from. Leave out --adapter"
        )
    before = getattr(config, "markov_rank", 0)
    rank = fields.get("markov_rank", before)
    if rank != before and not (isinstance(config, PredictingConfig) and before == 0):
        has = f"has a Markov head of rank {before}" if before else "cannot get a Markov head later"
        raise ValueError(
            f"markov_rank={rank}: the adapter {str(folder)!r}, of type {config.peft_type}, {has}. "
            "Leave it out, or train anew"
        )
    own = [name for name in fields if not (name in OF_TRAINING or name.endswith("learning_rate"))]
    if own:
        raise ValueError(f"{min(own)} belongs to what the adapter has learned: leave it out")
    changed = dataclasses.replace(config, **{**fields, "inference_mode": False})
    return changed, rank != before


def load_trained(adapter: Adapter, folder: Path) -> None:
    """Load a trained adapter's weights into one that gets a Markov head, and freeze them."""
    stored = load_file(folder / WEIGHTS)
    for name, weight in adapter.tensors().items():
        weight.requires_grad_(name in MARKOV_HEAD)
        if name not in MARKOV_HEAD:
            weight.data.copy_(stored[PEFT_PREFIX + name_on_disk(adapter.config.type_name, name)])


def set_vocabulary(adapter: Adapter, model: Any, answers: Sequence[Sequence[int]]) -> None:
    """Set the vocabulary of an adapter that has its own to the commonest tokens of the answers."""
    tokens = adapter.tensors().get(VOCABULARY)
    if tokens is not None:
        common = common_tokens(answers, len(tokens), vocab_size(model))
        adapter.set_vocabulary(common, model)
