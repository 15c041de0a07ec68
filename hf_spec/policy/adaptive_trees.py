"""The likeliest tree of a step, grown from the step's own predictions.

Trees by accuracies know which *rank* tends to be right. Here, paths are ordered by the
probabilities of their own tokens (:mod:`hf_spec.drafting.grow`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from hf_spec.core.host_tree import HostTree
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.transfer import sent
from hf_spec.core.tree import Tree
from hf_spec.core.tree_states import TreeState
from hf_spec.core.verify import StepResult
from hf_spec.drafting.calibration import Calibration
from hf_spec.drafting.grow import grow
from hf_spec.drafting.options import AUTO, fixed_size
from hf_spec.drafting.predictions import Predictions
from hf_spec.drafting.state import DecodeState, Grown
from hf_spec.drafting.tree_drafter import TreeDrafter, TreeSource
from hf_spec.model.programs import DraftProgram

#: Number of draft tokens grown for the policy to choose from: mostly, and after a step that has
#: taken so many.
FEWEST, MOST = 15, 63


class AdaptiveTrees(TreeSource):
    """Each step's likeliest tree.

    Args:
        depth: number of predicted distances.
        probes: whether predictions come from probes under the nodes.
        num_draft_tokens: the option of this name.
        calibrations: learned by earlier calls, greedy and sampled ones; None to use predictions
            uncorrected.
    """

    def __init__(
        self, depth: int, probes: bool, num_draft_tokens: int | str = AUTO,
        calibrations: tuple[Calibration, Calibration] | None = None,
    ):  # fmt: skip
        self.depth, self.probes = depth, probes
        self.num_draft_tokens, self.calibrations = num_draft_tokens, calibrations
        self.policy_chooses = num_draft_tokens == AUTO
        self.calibration = None if calibrations is None else calibrations[False]
        self._most = FEWEST
        #: The step's trees, and the terms added to their log-probabilities per distance.
        self._proposed: tuple[HostTree, list[float]] | None = None
        self._ahead: list[float] = []  # the same terms of trees that a program grows

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

    def program(self, drafter: TreeDrafter, state: DecodeState, tree: Tree) -> DraftProgram | None:
        graphs, depth = state.target.graphs, self.depth
        if graphs is None or not self.weighs or not depth:
            return None
        # Those of the step after this one, as :meth:`observe` will say.
        count = self._exactly(state) or (MOST if tree.num_tokens > FEWEST else FEWEST)
        held, (fixed, changing) = drafter.tensors(), drafter.carried(tree)
        buffers, self._ahead = [*fixed, *held], self._trust
        inputs = [*changing, sent(self._ahead, state.root.device)]

        def function(
            tensors: Sequence[Tensor], result: StepResult, hidden: Tensor | None,
            noise: Tensor | None,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            given, (*carried, trust) = tensors[: len(buffers)], tensors[len(buffers) :]
            drafting = drafter.traced(
                given[len(fixed) :], [*given[: len(fixed)], *carried], not graphs.compiles
            )
            drafting.advance(result, hidden)
            known, read = drafting.num_predicted, drafting.hidden_after(result.bonus)
            if noise is not None and drafter.token_ids is not None:
                noise = noise[..., drafting.token_ids]
            predictions = drafting.predictions(read, result.bonus, known, depth, count, noise)
            return (grow(predictions, result.bonus, count, depth, trust),)

        key = "tree", count, depth, len(held), drafter.cache_layout
        return DraftProgram(key, buffers, inputs, function, depth)

    @property
    def _trust(self) -> list[float]:
        return [0.0] * self.depth if self.calibration is None else self.calibration.log_factors

    def _noise(self, drafter: TreeDrafter, state: DecodeState, depth: int) -> Tensor | None:
        noise = state.noise if self.weighs else None
        return None if noise is None else noise.ahead(depth, drafter.token_ids)

    def _exactly(self, state: DecodeState) -> int | None:
        return fixed_size(self.num_draft_tokens, state.timed)

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
        grown, trust = state.grown, self._ahead
        if grown is None:
            count, trust = self._exactly(state) or self._most, self._trust
            noise = self._noise(drafter, state, depth)
            predictions = self.predictions(drafter, state, depth, count, known, noise)
            grown = Grown(grow(predictions, state.root, count, depth, trust))
        tree, host = state.received(grown)
        if self._exactly(state) is None:
            self._proposed = host, trust
            return tree
        tree = tree.changed(whole=True)
        ahead = ((host.probs > 0) * self.depth).tolist()  # padding has no probability
        return drafter.attach_probes(tree, ahead) if self.probes else tree

    def observe(self, emitted: Sequence[Sequence[int]], num_drafted: int) -> None:
        if self._proposed is None:
            return
        self._most = MOST if num_drafted >= FEWEST else FEWEST
        if self.calibration is not None:
            self.calibration.learn(*self._proposed, emitted)
        self._proposed = None
