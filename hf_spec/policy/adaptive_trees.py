"""The likeliest tree of a step, grown from the step's own predictions.

Trees by accuracies know which *rank* tends to be right. Here, paths are ordered by the
probabilities of their own tokens (:mod:`hf_spec.drafting.grow`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_spec.core.host_tree import HostTree
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.transfer import sent
from hf_spec.core.tree import Tree
from hf_spec.core.tree_states import TreeState
from hf_spec.drafting.calibration import Calibration
from hf_spec.drafting.grow import grow
from hf_spec.drafting.options import DEFAULT_DRAFT_TOKENS
from hf_spec.drafting.predictions import Predictions
from hf_spec.drafting.state import DecodeState
from hf_spec.drafting.tree_drafter import TreeDrafter, TreeSource
from hf_spec.model.graphs import Graphs

#: Number of draft tokens grown for the policy to choose from: mostly, and after a step that has
#: taken so many.
FEWEST, MOST = 15, 63


class Proposal(NamedTuple):
    """The packed trees of a step, and the terms added to log-probabilities per distance."""

    trees: Tensor
    trust: list[float]


class AdaptiveTrees(TreeSource):
    """Each step's likeliest tree.

    Args:
        depth: number of predicted distances.
        probes: whether predictions come from probes under the nodes.
        num_draft_tokens: exact number in every step; None for the policy's choice, or
            `DEFAULT_DRAFT_TOKENS` if nothing may depend on time.
        calibrations: learned by earlier calls, greedy and sampled ones; None to use predictions
            uncorrected.
    """

    def __init__(
        self, depth: int, probes: bool, num_draft_tokens: int | None = None,
        calibrations: tuple[Calibration, Calibration] | None = None,
    ):  # fmt: skip
        self.depth, self.probes = depth, probes
        self.num_draft_tokens, self.calibrations = num_draft_tokens, calibrations
        self.policy_chooses = num_draft_tokens is None
        self.calibration = None if calibrations is None else calibrations[False]
        self._most = FEWEST
        self._proposed: tuple[HostTree, list[float]] | None = None
        self._prefetched: Proposal | None = None

    weighs: ClassVar[bool] = True

    @property
    def max_depth(self) -> int:
        return self.depth

    def start(self, state: DecodeState) -> None:
        if self.calibrations is not None:
            self.calibration = self.calibrations[state.do_sample]

    def predictions(
        self, drafter: TreeDrafter, state: DecodeState, depth: int, width: int,
        known: Sequence[int] | Tensor, noise: Tensor | None,
    ) -> Predictions:  # fmt: skip
        """What scores paths."""
        return drafter.predict(state, depth, width, known, noise)

    def prefetch(
        self, drafter: TreeDrafter, state: DecodeState, known: Sequence[int] | Tensor
    ) -> Tensor | None:
        if not self.weighs or not self.depth:
            return None
        self._prefetched = self._grow(drafter, state, known, self.depth)
        return self._prefetched.trees

    def _grow(
        self, drafter: TreeDrafter, state: DecodeState, known: Sequence[int] | Tensor, depth: int
    ) -> Proposal:
        count = self._exactly(state) or self._most
        trust = [0.0] * self.depth if self.calibration is None else self.calibration.log_factors
        graphs = state.target.graphs if self.weighs else None
        depth = depth if graphs is None else self.depth
        noise = self._noise(drafter, state, depth)
        if graphs is None:
            predictions = self.predictions(drafter, state, depth, count, known, noise)
            return Proposal(grow(predictions, state.root, count, depth, trust), trust)
        # Draft tokens that no row can use are removed later.
        return Proposal(_compiled(graphs, drafter, state, known, count, depth, trust, noise), trust)

    def _noise(self, drafter: TreeDrafter, state: DecodeState, depth: int) -> Tensor | None:
        noise = state.noise if self.weighs else None
        return None if noise is None else noise.ahead(depth, drafter.token_ids)

    def _exactly(self, state: DecodeState) -> int | None:
        """Number of draft tokens in every step; None if the policy chooses it."""
        return self.num_draft_tokens or (None if state.timed else DEFAULT_DRAFT_TOKENS)

    def propose(
        self, drafter: TreeDrafter, state: DecodeState, known: Sequence[int], depth: int
    ) -> Tree:
        if depth == 0:
            self._proposed = None
            alone = TreeState(TokenTree.chain(0), (self.depth * self.probes,))
            if self._exactly(state) is None:
                # The device has the roots already.
                zeros, roots = np.zeros((state.batch_size, 1), np.int64), Tree.roots(state.root)
                tokens = np.array([row[-1:] for row in state.tokens])
                return roots.changed(host=HostTree(zeros + 1.0, zeros, zeros, tokens))
            return drafter.build_trees([alone] * state.batch_size, state)
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None or state.prefetched is None:
            prefetched = self._grow(drafter, state, known, depth)
        packed, trust = prefetched
        tree, host = state.received(packed)
        if self._exactly(state) is None:
            self._proposed = host, trust
            return tree
        tree = tree.changed(whole=True)
        ahead = ((host.probs > 0) * self.depth).tolist()  # padding has no probability
        return drafter.attach_probes(tree, ahead) if self.probes else tree

    def warm(self, drafter: TreeDrafter, state: DecodeState) -> None:
        """Compile what steps with predictions run."""
        graphs = state.target.graphs
        if graphs is not None and self.weighs and self.depth:
            exactly, known, trust = self._exactly(state), drafter.num_predicted, [0.0] * self.depth
            noise = self._noise(drafter, state, self.depth)
            for count in (FEWEST, MOST) if exactly is None else (exactly,):
                _compiled(graphs, drafter, state, known, count, self.depth, trust, noise)

    def observe(self, emitted: Sequence[Sequence[int]], num_drafted: int) -> None:
        if self._proposed is None:
            return
        self._most = MOST if num_drafted >= FEWEST else FEWEST
        if self.calibration is not None:
            self.calibration.learn(*self._proposed, emitted)
        self._proposed = None


def _compiled(
    graphs: Graphs, drafter: TreeDrafter, state: DecodeState, known: Sequence[int] | Tensor,
    count: int, depth: int, trust: Sequence[float], noise: Tensor | None,
) -> Tensor:  # fmt: skip
    """:func:`grow` and its predictions, by compiled code."""
    hidden, held = drafter.hidden, drafter.tensors()
    assert hidden is not None
    device = hidden.device
    inputs = [
        *held, state.root.to(device), sent(known, device), sent(trust, device), hidden.contiguous(),
    ]  # fmt: skip
    if noise is not None:
        inputs.append(noise.to(device))

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        own, (root, known, trust, hidden, *rest) = tensors[: len(held)], tensors[len(held) :]
        drafting = drafter.using(own)
        predictions = drafting.predictions(hidden, root, known, depth, count, *rest)
        packed = grow(predictions, root, count, depth, trust)
        # New code is checked by how likely the nodes are: which of several equally likely ones it
        # takes, as there are many in 16 bits, may differ.
        return packed.view(torch.int32), packed.chunk(4, dim=1)[3]

    name = "tree", count, depth, noise is not None, len(held)
    found = graphs.run(name, function, inputs, lambda: function(*inputs), tuple, static=len(held))
    return found[0].view(torch.float32).to(state.root.device)
