"""The drafting model: the model itself with layers left out, and what was learned to make up for
them (Draft & Verify, appendix F)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_spec.adapters.active import ActiveAdapter
from modeling_patches.layer_skip import LayerSkipper
from modeling_patches.per_call import Changes


def drafting_model(
    model: Any,
    skip_attention: Sequence[int],
    skip_mlp: Sequence[int],
    adapter: ActiveAdapter | None = None,
) -> Changes:
    """What turns forwards of `model` into those of the drafting model.

    Args:
        model: the model.
        skip_attention, skip_mlp: layers whose attention / MLP is left out.
        adapter: a LAYER_SKIP adapter, which brings low-rank updates if it has any.
    """
    changes = LayerSkipper(model, skip_attention, skip_mlp).changes
    if adapter is not None:
        layer: Any = adapter.layer
        if adapter.name in layer.updates:
            layer.updates[adapter.name].add_to(changes)
    return changes
