"""What drafters with probes under the nodes of their trees share."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor

from hf_spec.core.probes import ProbeGroup, ProbeRows, hang
from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.core.tree_states import TreeState, TreeStates
from hf_spec.drafting.drafter import DecodingState, Draft
from hf_spec.drafting.tree_drafter import AT_ONCE, StepRows, TreeDrafter, TreeSource
from hf_spec.model.hidden_states import output_logits
from hf_spec.model.sequences import ProbedSequences, probe_sequences
from hf_spec.model.tree_forward import ProbeInputs

#: Combinations of rows' states whose tensors are kept.
KEPT_STEPS = 256


class ProbeDrafter(TreeDrafter):
    """Candidates are what the probes under the last accepted node have predicted.

    Each row forwards the tree of its state, the number of tokens predicted for it.

    Args:
        probe_inputs: what has been learned; one embedding per probe of the group.
        source: gives the tree of each state, with the probes under its nodes.
        group: the probes for all distances, those of distance 1 first, equally many for each;
            None: one for each distance, each seeing those before it.
    """

    probe_inputs: ProbeInputs

    def __init__(
        self,
        model: Any,
        options: Any,
        probe_inputs: ProbeInputs,
        source: TreeSource,
        group: ProbeGroup | None = None,
    ):
        super().__init__(model, options, source)
        self.probe_inputs = probe_inputs
        self.group = group or ProbeGroup.causal(source.max_depth)
        self._per_distance = len(self.group) // max(source.max_depth, 1)
        self._steps: dict[Hashable, StepRows] = {}

    @property
    def distances(self) -> int:
        """Tokens behind the next one that a whole group of probes predicts."""
        return len(self.group) // self._per_distance

    @property
    def per_distance(self) -> int:
        return self._per_distance

    def select(self, state: DecodingState, rows: Sequence[int]) -> None:
        super().select(state, rows)
        self._steps.clear()

    def propose(self, state: DecodingState) -> Draft:
        states = self.source.states(state)
        most = states.max_probes
        known = tuple(min(n // self._per_distance, most) for n in state.probe_counts)
        depth = max(min(max(known), state.max_depth), 0)
        trees, batch, probes = self._step(states, known, depth, str(state.root.device))
        tokens, distributions = state.root[:, None], None
        if batch.num_nodes > 1:
            tokens, distributions = self.candidates(state, trees, batch.max_depth)
        return Draft(batch, tokens, distributions, probes)

    def candidates(
        self, state: DecodingState, trees: list[TokenTree], depth: int
    ) -> tuple[Tensor, Tensor | None]:
        assert state.probe_hidden is not None
        depth = self.source.look(depth)
        logits = self.predictions(state.probe_hidden[:, : depth * self._per_distance])
        known = [n // self._per_distance for n in state.probe_counts]
        return self.source.tokens(trees, state, logits, known), None

    def predictions(self, hidden: Tensor) -> Tensor:
        """Logits, ``(batch, depth, vocab)``, from the probes' final hidden states.

        Args:
            hidden: ``(batch, probes, hidden)`` of whole distances.
        """
        return output_logits(self.model, hidden)

    def _step(
        self, states: TreeStates, known: tuple[int, ...], depth: int, device: str
    ) -> StepRows:
        """Trees of rows with so many known tokens, and the probes under them."""
        key = known, depth, states
        if key not in self._steps:
            if len(self._steps) == KEPT_STEPS:
                self._steps.pop(next(iter(self._steps)))
            chosen = [states.states[k].truncate(depth) for k in known]
            self._steps[key] = self.rows(chosen, device)
        return self._steps[key]

    def rows(self, states: Sequence[TreeState], device: str) -> StepRows:
        trees = [one.tree for one in states]
        sizes = [[n * self._per_distance for n in one.probes] for one in states]
        batch = TreeBatch.stack(trees, device)
        probes: ProbeRows | None = None
        if any(map(any, sizes)):
            probes = hang(self.group, batch, sizes)
        return trees, batch, probes

    def probe(self, input_ids: Tensor, anchors: Tensor) -> ProbedSequences:
        """Hang a whole group of probes under tokens of finished sequences.

        Args:
            input_ids: ``(batch, seq)``, without padding.
            anchors: ``(batch, anchors)`` columns of ``input_ids``.
        """
        return probe_sequences(self.model, input_ids, None, anchors, self.group, self.probe_inputs)

    def future_logits(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        for some in places.split(max(AT_ONCE // len(self.group), 1)):
            yield self.predictions(self.probe(input_ids, some[None]).probe_hidden[0])
