"""Base class of drafters with probes under the nodes of their trees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_spec.core.probes import ProbeGroup, ProbeRows, hang
from hf_spec.core.tree import TreeBatch
from hf_spec.drafting.drafter import DecodingState
from hf_spec.drafting.tree_drafter import AT_ONCE, TreeDrafter, TreeSource
from hf_spec.model.hidden_states import output_logits
from hf_spec.model.sequences import probe_sequences
from hf_spec.model.tree_forward import ProbeInputs


class ProbeDrafter(TreeDrafter):
    """Candidates are predicted by the probes under the last accepted node.

    Args:
        probe_inputs: the learned inputs; one embedding per probe of the group.
        source: provides the trees, with the probes under their nodes.
        weights: the adapter's parameters.
        group: the probes for all distances, those of distance 1 first, the same number for each;
            None for one probe per distance, each seeing those before it.
    """

    probe_inputs: ProbeInputs
    group: ProbeGroup

    def __init__(
        self,
        model: Any,
        options: Any,
        probe_inputs: ProbeInputs,
        source: TreeSource,
        weights: Mapping[str, Tensor],
        group: ProbeGroup | None = None,
    ):
        super().__init__(model, options, source, weights)
        self.probe_inputs = probe_inputs
        self.group = group or ProbeGroup.causal(source.max_depth)
        self.num_probes = len(self.group)
        self.per_distance = self.num_probes // max(source.max_depth, 1)
        self.distances = self.num_probes // self.per_distance

    def known(self, state: DecodingState) -> tuple[int, ...]:
        return tuple(n // self.per_distance for n in state.probe_counts)

    def foreknown(self, state: DecodingState) -> Tensor | None:
        sizes = state.probe_sizes
        return None if sizes is None else sizes.div(self.per_distance, rounding_mode="floor")

    def seen(self, state: DecodingState) -> Tensor:
        assert state.probe_hidden is not None
        return state.probe_hidden

    def states(self, seen: Tensor, depth: int) -> Tensor:
        return self.distance_states(seen[:, : depth * self.per_distance])

    def distance_states(self, hidden: Tensor) -> Tensor:
        """Combine final hidden states of probes, ``(batch, probes, hidden)``, into one state per
        distance, ``(batch, distances, hidden)``."""
        return hidden

    def logits(self, states: Tensor) -> Tensor:
        return output_logits(self.model, states, self.vocabulary)

    def hang(self, tree: TreeBatch, ahead: Sequence[Sequence[int]]) -> ProbeRows | None:
        if not any(map(any, ahead)):
            return None
        return hang(self.group, tree, [[n * self.per_distance for n in row] for row in ahead])

    def future_states(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        for some in places.split(max(AT_ONCE // len(self.group), 1)):
            probed = probe_sequences(
                self.model, input_ids, None, some[None], self.group, self.probe_inputs
            )
            yield self.distance_states(probed.probe_hidden[0])
