"""Saves and loads the weights of a base model that is trained together with its adapter.

PEFT saves only adapters and assumes that the base model is unchanged.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from hf_spec.adapters.layer import CONTAINER
from hf_spec.tools.hub.folder import staging

#: The trained base model: file in a checkpoint, and folder beside an adapter.
CHECKPOINT, MODEL = "base_model.safetensors", "model"


def base_state(model: Any) -> dict[str, Tensor]:
    """The base model's weights by name, without those of adapters; shared tensors once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not name.startswith(f"{CONTAINER}.") and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def save_checkpoint(model: Any, folder: Path) -> None:
    """Add the base model's weights to a checkpoint of its adapter."""
    from safetensors.torch import save_file

    state = {name: tensor.contiguous() for name, tensor in base_state(model).items()}
    with staging(folder) as temporary:
        save_file(state, temporary / CHECKPOINT)


def load_checkpoint(model: Any, folder: Path) -> None:
    """Load the weights in a checkpoint into the base model; a ValueError if they are another's."""
    from safetensors.torch import load_file

    path = folder / CHECKPOINT
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} holds no {CHECKPOINT}: it is of another training")
    state = load_file(path)
    if state.keys() != base_state(model).keys():
        raise ValueError(f"{str(path)!r} holds the weights of another model")
    model.load_state_dict(state, strict=False)  # tied weights are stored once


def save_model(model: Any, folder: Path, config: Any, tokenizer: Any = None) -> None:
    """Save the trained base, to which adapters are attached, and its tokenizer as a model of its
    own in ``MODEL`` of an adapter folder; the adapter's config gets its name."""
    with staging(folder / MODEL) as temporary:
        model.save_pretrained(temporary, state_dict=base_state(model))
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
    config.base_model_name_or_path = str(folder / MODEL)
