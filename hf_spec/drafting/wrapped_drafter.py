"""A wrapper around a drafter; subclasses override parts of its behavior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_spec.core.pruning import Pruning
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.drafting.drafter import Drafter
from hf_spec.drafting.state import DecodeState


class WrappedDrafter(Drafter):
    """Delegates everything to another drafter.

    Args:
        inner: the wrapped drafter.
    """

    def __init__(self, inner: Drafter):
        super().__init__(inner.model, inner.options)
        self.inner = inner
        self.probe_inputs, self.reads = inner.probe_inputs, inner.reads
        self.prune_layer, self.drafting = inner.prune_layer, inner.drafting
        self.prunes, self.distances = inner.prunes, inner.distances
        self.num_probes, self.group = inner.num_probes, inner.group
        self.policy_chooses = inner.policy_chooses

    @property
    def pruning(self) -> Pruning | None:
        return self.inner.pruning

    def start(self, state: DecodeState) -> None:
        self.inner.start(state)

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        self.inner.advance(result, hidden)

    def propose(self, state: DecodeState) -> Tree:
        return self.inner.propose(state)

    def prefetch(self, state: DecodeState) -> Tensor | None:
        return self.inner.prefetch(state)

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        self.inner.observe(state, tree, result)

    def attach_probes(self, tree: Tree, ahead: Sequence[Sequence[int]]) -> Tree:
        return self.inner.attach_probes(tree, ahead)

    def select(self, rows: Sequence[int]) -> None:
        self.inner.select(rows)

    def warm(self, state: DecodeState) -> None:
        self.inner.warm(state)

    def details(self) -> dict[str, Any]:
        return self.inner.details()

    def chain(self, input_ids: Tensor) -> list[int]:
        return self.inner.chain(input_ids)
