"""The drafting model: the model itself with layers left out, and what was learned to make up for
them (Draft & Verify, appendix F). Outside its block the model is whole, and nothing was learned."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from hf_spec.methods.active_adapter import ActiveAdapter
from modeling_patches.layer_skip import LayerSkipper


class DraftingModel:
    """Turns `model` into the drafting model for a ``with`` block.

    Args:
        model: the model.
        skip_attention, skip_mlp: layers whose attention / MLP is left out.
        adapter: a LAYER_SKIP adapter, which brings low-rank updates if it has any.
    """

    def __init__(
        self,
        model: Any,
        skip_attention: Sequence[int],
        skip_mlp: Sequence[int],
        adapter: ActiveAdapter | None = None,
    ):
        self.skipper = LayerSkipper(model, skip_attention, skip_mlp)
        self.parts: list[AbstractContextManager[Any]] = [self.skipper]
        if adapter is not None:
            layer: Any = adapter.layer
            if adapter.name in layer.updates:
                self.parts.append(layer.updates[adapter.name])
        self._entered: list[ExitStack] = []

    def __enter__(self) -> DraftingModel:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part)
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._entered.pop().close()

    def __repr__(self) -> str:
        kinds = sorted({type(module).__name__ for module in self.skipper.replaced})
        return f"DraftingModel(without {', '.join(kinds)})"
