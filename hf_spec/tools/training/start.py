"""Where a training starts: a new adapter, or a trained one."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftConfig

from hf_spec.adapters.checkpoint import WEIGHTS
from hf_spec.adapters.module import Adapter
from hf_spec.adapters.predicting import VOCABULARY, VocabularyConfig, vocab_size
from hf_spec.drafting.draft_vocabulary import common_tokens
from hf_spec.methods.registry import Method

#: Fields of configs that only training reads, beside learning rates.
OF_TRAINING = ("loss", "decay", "ttt_steps")


def config_of(
    method: Method, fields: dict[str, Any], start: Path | None = None, model: Any = None
) -> Any:
    """The config of a new adapter, with fields that the user sets and, for a model, the size of its
    vocabulary; or that of a trained adapter from which training goes on. A ValueError if that
    cannot be trained on, or if fields change others than `OF_TRAINING` and learning rates."""
    assert method.adapter_config is not None
    if start is None:
        new = method.adapter_config(**{**method.trained, **fields})
        sized = isinstance(new, VocabularyConfig) and "draft_vocab_size" not in fields
        if sized and model is not None:
            new.set_vocabulary(model)
        return new
    config: Any = PeftConfig.from_pretrained(str(start))
    if type(config) is not method.adapter_config:
        raise ValueError(
            f"{str(start)!r} is an adapter of type {config.peft_type}: {method.name!r} goes on "
            f"from its own, of type {method.peft_type}"
        )
    if config.trains_base:
        raise ValueError(
            f"training the adapter {str(start)!r} trains its base model, too: train it anew, on "
            "the model in its folder if it is to go on from there"
        )
    if not (start / WEIGHTS).is_file():
        raise ValueError(
            f"{str(start)!r} has no {WEIGHTS}: there is nothing to go on from. Leave out --adapter"
        )
    own = [name for name in fields if not (name in OF_TRAINING or name.endswith("learning_rate"))]
    if own:
        raise ValueError(f"{min(own)} belongs to what the adapter has learned: leave it out")
    return dataclasses.replace(config, **{**fields, "inference_mode": False})


def set_vocabulary(adapter: Adapter, model: Any, answers: Sequence[Sequence[int]]) -> None:
    """Set the vocabulary of an adapter that has its own to the commonest tokens of the answers."""
    tokens = adapter.tensors().get(VOCABULARY)
    if tokens is not None:
        common = common_tokens(answers, len(tokens), vocab_size(model))
        adapter.set_vocabulary(common, model)
