"""A BITA adapter's parameters as inputs of a forward."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_spec.model.probe_inputs import ProbeInputs
from hf_spec.model.sequences import computed_states


def probe_inputs(model: Any, weights: Mapping[str, Tensor]) -> ProbeInputs:
    """The adapter's parameters as inputs of probes; gradients flow to the parameters."""
    if "prompt_keys" in weights:
        front = list(zip(weights["prompt_keys"].unbind(0), weights["prompt_values"].unbind(0)))
    elif "prompts" in weights:
        # Prompts attend to prompts only, so their states do not depend on what follows.
        front = list(computed_states(model, weights["prompts"]))
    else:
        front = []
    return ProbeInputs(weights["masks"], front)
