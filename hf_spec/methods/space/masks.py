"""What a SPACE adapter's mask tokens mean to a forward pass."""

from typing import Any

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.model.tree_forward import ProbeInputs


def mask_tokens(adapter: ActiveAdapter) -> ProbeInputs:
    """The k mask tokens, one behind the other, with the updates of the model in their rows if these
    are gated; gradients reach the adapter's parameters."""
    config: Any = adapter.config
    layer: Any = adapter.layer
    update = layer.updates.get(adapter.name) if config.update == "gated" else None
    return ProbeInputs(adapter.weights()["masks"].expand(config.num_mask_tokens, -1), update=update)
