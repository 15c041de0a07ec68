"""The recurrent states of the running forward, for the changes to the model."""

from __future__ import annotations

from torch import Tensor

from hf_spec.cache.recurrent import RecurrentStates
from modeling_patches.recurrences import Kept, Rule, Step


class Running:
    """The recurrent states of the running forward, for the changes to the model."""

    states: RecurrentStates | None = None

    @property
    def step(self) -> Step:
        assert self.states is not None
        return self.states.step

    @property
    def plain(self) -> bool:
        assert self.states is not None
        return self.states.plain

    def run_next(self, layer: int) -> None:
        assert self.states is not None
        self.states.run_next(layer, 0)

    def read(self, rule: Rule) -> tuple[Tensor, Kept | None]:
        assert self.states is not None
        return self.states.read(rule)

    def keep(self, rule: Rule, kept: Kept) -> None:
        assert self.states is not None
        self.states.keep(rule, kept)
