"""Base class of drafters with probes under the nodes of their trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from hf_spec.adapters.module import Adapter
from hf_spec.core.probes import ProbeGroup
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult
from hf_spec.drafting.state import DecodeState
from hf_spec.drafting.tree_drafter import AT_ONCE, TreeDrafter
from hf_spec.model.hidden_states import Reads
from hf_spec.model.probe_inputs import ProbeInputs
from hf_spec.model.programs import DraftProgram
from hf_spec.model.sequences import probe_sequences


class ProbeDrafter(TreeDrafter):
    """Draft tokens are predicted by the probes under the last accepted node.

    A new one sets :attr:`probe_inputs`, with one embedding per probe of the group. Its probes are
    one per distance, each seeing those before it, unless it sets another :attr:`group`, of those
    of distance 1 first, :attr:`per_distance` for each.
    """

    reads = Reads("probes")
    per_distance = 1
    probe_inputs: ProbeInputs

    def __init__(self, model: Any, options: Any, adapter: Adapter, distances: int):
        super().__init__(model, options, adapter, distances)
        self.group = ProbeGroup.causal(self.distances)

    def start(self, state: DecodeState) -> None:
        super().start(state)
        self.num_predicted = [0] * state.batch_size

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        super().advance(result, hidden)
        if result.host is None:
            self.num_predicted = result.num_probes.div(self.per_distance, rounding_mode="floor")
        else:
            self.num_predicted = [n // self.per_distance for n in result.host.num_probes]

    def program(self, state: DecodeState, tree: Tree, grows: bool) -> DraftProgram | None:
        return super().program(state, tree, grows) if tree.num_probes else None

    def received(self, found: Sequence[Tensor], result: StepResult) -> None:
        super().received(found, result)
        assert result.host is not None
        self.num_predicted = [n // self.per_distance for n in result.host.num_probes]

    def states(self, hidden: Tensor, depth: int) -> Tensor:
        return self.distance_states(hidden[:, : depth * self.per_distance])

    def distance_states(self, hidden: Tensor) -> Tensor:
        """Combine final hidden states of probes, ``(batch, probes, hidden)``, into one state per
        distance, ``(batch, distances, hidden)``."""
        return hidden

    def attach_probes(self, tree: Tree, ahead: Sequence[Sequence[int]]) -> Tree:
        if not any(map(any, ahead)):
            return tree
        counts = [[n * self.per_distance for n in row] for row in ahead]
        return tree.attach_probes(self.group, counts)

    def future_states(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        for some in places.split(max(AT_ONCE // len(self.group), 1)):
            probed = probe_sequences(
                self.model, input_ids, None, some[None], self.group, self.probe_inputs
            )
            yield self.distance_states(probed.probe_hidden[0])
