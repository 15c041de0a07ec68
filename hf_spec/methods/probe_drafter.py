"""What drafters with probes under the nodes of their trees share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_spec.core.probes import ProbeGroup, ProbeRows, hang
from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.core.tree_states import TreeStates
from hf_spec.methods.base import DecodingState, Draft, Drafter
from hf_spec.methods.candidates import ranked_tokens
from hf_spec.methods.forward import ProbeInputs, output_logits
from hf_spec.methods.probing import ProbedSequences, probe_sequences
from hf_spec.methods.tuned_trees import Device, TunedTrees

#: Combinations of rows' states whose tensors are kept.
KEPT_STEPS = 256
#: What stands for tuned trees until the call's first step.
ROOT_ONLY = TreeStates.uniform(TokenTree.chain(0), 0)


class ProbeDrafter(Drafter):
    """Candidates are what the probes under the last accepted node have predicted.

    Each row forwards the tree of its state, the number of tokens predicted for it.

    Args:
        probe_inputs: what has been learned; one embedding per probe of the group.
        states: the tree of each state, with the probes under its nodes; or those tuned for several
            devices, of which the call takes the nearest.
        group: the probes for all distances, those of distance 1 first, equally many for each;
            None: one for each distance, each seeing those before it.
    """

    probe_inputs: ProbeInputs

    def __init__(
        self,
        model: Any,
        options: Any,
        probe_inputs: ProbeInputs,
        states: TreeStates | TunedTrees,
        group: ProbeGroup | None = None,
    ):
        super().__init__(model, options)
        self.probe_inputs = probe_inputs
        self.group = group or ProbeGroup.causal(states.max_probes)
        self.tuned = states if isinstance(states, TunedTrees) else None
        self.states = ROOT_ONLY if isinstance(states, TunedTrees) else states
        self._per_distance = len(self.group) // max(states.max_probes, 1)
        self._steps: dict[
            tuple[tuple[int, ...], int], tuple[list[TokenTree], TreeBatch, ProbeRows | None]
        ] = {}

    @property
    def distances(self) -> int:
        """Tokens behind the next one that a whole group of probes predicts."""
        return len(self.group) // self._per_distance

    def start(self, state: DecodingState) -> None:
        if self.tuned is not None:
            context = max(state.cache.host_lengths)
            self.states = self.tuned.select(Device.of(self.model), state.batch_size, context)

    def select(self, state: DecodingState, rows: Sequence[int]) -> None:
        if self.tuned is not None:  # another batch size may have other trees
            self.start(state)
            self._steps.clear()

    def propose(self, state: DecodingState) -> Draft:
        most = self.states.max_probes
        known = tuple(min(n // self._per_distance, most) for n in state.probe_counts)
        depth = max(min(max(known), state.max_depth), 0)
        trees, batch, probes = self._step(known, depth, str(state.root.device))
        tokens, distributions = state.root[:, None], None
        if batch.num_nodes > 1:
            tokens, distributions = self.candidates(state, trees, batch.max_depth)
        return Draft(batch, tokens, distributions, probes)

    def candidates(
        self, state: DecodingState, trees: list[TokenTree], depth: int
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens on all nodes, ``(batch, nodes)``, and what they were sampled from, if they were.

        Args:
            trees: of each row, no deeper than ``depth``, from 1, and the row's predictions.
        """
        assert state.probe_hidden is not None
        hidden = state.probe_hidden[:, : depth * self._per_distance]
        return ranked_tokens(trees, state.root, self.predictions(hidden)), None

    def predictions(self, hidden: Tensor) -> Tensor:
        """Logits, ``(batch, depth, vocab)``, from the probes' final hidden states.

        Args:
            hidden: ``(batch, probes, hidden)`` of whole distances.
        """
        return output_logits(self.model, hidden)

    def _step(
        self, known: tuple[int, ...], depth: int, device: str
    ) -> tuple[list[TokenTree], TreeBatch, ProbeRows | None]:
        """Trees of rows in these states, and the probes under them."""
        if (known, depth) not in self._steps:
            if len(self._steps) == KEPT_STEPS:
                self._steps.pop(next(iter(self._steps)))
            states = [self.states.states[k].truncate(depth) for k in known]
            trees = [one.tree for one in states]
            sizes = [[n * self._per_distance for n in one.probes] for one in states]
            full = all(n == len(self.group) for row in sizes for n in row)
            same = all(tree == trees[0] for tree in trees)
            batch = TreeBatch.stack(trees, device)
            probes = None
            if any(map(any, sizes)):
                probes = hang(self.group, batch, None if full and same else sizes)
            self._steps[known, depth] = trees, batch, probes
        return self._steps[known, depth]

    def probe(self, input_ids: Tensor, anchors: Tensor) -> ProbedSequences:
        """Hang a whole group of probes under tokens of finished sequences.

        Args:
            input_ids: ``(batch, seq)``, without padding.
            anchors: ``(batch, anchors)`` columns of ``input_ids``.
        """
        return probe_sequences(self.model, input_ids, None, anchors, self.group, self.probe_inputs)

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        last = torch.tensor([[input_ids.shape[1] - 1]], device=input_ids.device)
        with torch.no_grad():
            hidden = self.probe(input_ids, last)
            own = output_logits(self.model, hidden.token_hidden[:, -1:])
            logits = torch.cat([own, self.predictions(hidden.probe_hidden[:, 0])], dim=1)
        chain = logits.argmax(-1).to(input_ids.device)
        candidates: Any = torch.cat([input_ids, chain], dim=1)
        return candidates, None
