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
from hf_spec.core.tree import Tree
from hf_spec.drafting.calibration import Calibration
from hf_spec.drafting.grow import Expands, grow
from hf_spec.drafting.growth import Growth
from hf_spec.drafting.options import AUTO, fixed_size
from hf_spec.drafting.state import DecodeState
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
        self._most = FEWEST

    weighs: ClassVar[bool] = True

    @property
    def max_depth(self) -> int:
        return self.depth

    def start(self, state: DecodeState) -> None:
        # Where nothing may depend on time, nor may drafts depend on earlier calls.
        known = self.calibrations if state.timed else None
        exactly = fixed_size(self.num_draft_tokens, state.timed)
        self.growth = Growth(known and known[state.do_sample], exactly)

    def predictions(
        self, drafter: TreeDrafter, state: DecodeState, depth: int, width: int
    ) -> Expands:
        """What scores paths."""
        noise = None if state.noise is None else state.noise.ahead(depth, drafter.token_ids)
        return drafter.levels(state.root, depth, width, noise)

    def program(self, drafter: TreeDrafter, state: DecodeState, tree: Tree) -> DraftProgram | None:
        if not self.weighs or not self.depth:
            return None
        # Those of the step after this one, as :meth:`observe` will say.
        count = self.growth.exactly or (MOST if tree.num_tokens > FEWEST else FEWEST)
        return self.growth.program(drafter, state, tree, count, self.depth)

    def propose(self, drafter: TreeDrafter, state: DecodeState, depth: int) -> Tree:
        exactly = self.growth.exactly

        def make(trust: Sequence[float]) -> Tensor:
            count = exactly or self._most
            levels = self.predictions(drafter, state, depth, count)
            return grow(levels, state.root, count, depth, trust)

        if depth:
            tree = self.growth.tree(state, make)
        else:  # the device has the roots already
            zeros = np.zeros((state.batch_size, 1), np.int64)
            tokens = np.array([row[-1:] for row in state.tokens])
            tree = Tree.roots(state.root).changed(host=HostTree(zeros + 1.0, zeros, zeros, tokens))
        if exactly is None:
            return tree
        assert tree.host is not None
        ahead = ((tree.host.probs > 0) * self.depth).tolist()  # padding has no probability
        tree = tree.changed(whole=True)
        return drafter.attach_probes(tree, ahead) if self.probes else tree

    def observe(self, emitted: Sequence[Sequence[int]], num_drafted: int) -> None:
        if self.growth.observe(emitted):
            self._most = MOST if num_drafted >= FEWEST else FEWEST
