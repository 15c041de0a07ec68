"""A wrapper around a drafter; subclasses override parts of its behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_spec.core.probes import ProbeRows
from hf_spec.core.tree import TreeBatch
from hf_spec.drafting.drafter import DecodingState, Draft, Drafter
from hf_spec.model.tree_forward import Pruning


class WrappedDrafter(Drafter):
    """Delegates everything to another drafter.

    Args:
        inner: the wrapped drafter.
    """

    def __init__(self, inner: Drafter):
        super().__init__(inner.model, inner.options)
        self.inner = inner
        self.probe_inputs = inner.probe_inputs
        self.wants_hidden = inner.wants_hidden
        self.prune_layer, self.drafting = inner.prune_layer, inner.drafting
        self.prunes, self.distances = inner.prunes, inner.distances
        self.num_probes, self.group = inner.num_probes, inner.group
        self.looks_up = inner.looks_up

    @property
    def pruning(self) -> Pruning | None:
        return self.inner.pruning

    def start(self, state: DecodingState) -> None:
        self.inner.start(state)

    def propose(self, state: DecodingState) -> Draft:
        return self.inner.propose(state)

    def foresee(self, state: DecodingState) -> Tensor | None:
        return self.inner.foresee(state)

    def look_up(self, state: DecodingState) -> Draft:
        return self.inner.look_up(state)

    def observe(self, state: DecodingState, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        self.inner.observe(state, draft, nodes)

    def hang(self, tree: TreeBatch, ahead: Sequence[Sequence[int]]) -> ProbeRows | None:
        return self.inner.hang(tree, ahead)

    def select(self, state: DecodingState, rows: Sequence[int]) -> None:
        self.inner.select(state, rows)

    def warm(self, state: DecodingState) -> None:
        self.inner.warm(state)

    def details(self) -> dict[str, Any]:
        return self.inner.details()

    def chain(self, input_ids: Tensor) -> list[int]:
        return self.inner.chain(input_ids)
