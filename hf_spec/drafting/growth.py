"""The trees of a call that grow by their draft tokens' own probabilities, and what they teach."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, Self

from torch import Tensor

from hf_spec.core.host_tree import HostTree
from hf_spec.core.transfer import sent
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult
from hf_spec.drafting.calibration import Calibration
from hf_spec.drafting.grow import Expands, grow
from hf_spec.drafting.state import DecodeState, Grown
from hf_spec.model.programs import DraftProgram


class Traceable(Protocol):
    """A drafter whose part of a step can be a program.

    Attributes:
        token_ids: ``(tokens,)`` int64 ids that it predicts, ascending; None for all.
    """

    @property
    def token_ids(self) -> Tensor | None: ...

    def carried(self, tree: Tree) -> tuple[Sequence[Tensor], Sequence[Tensor], Hashable]:
        """What a program for a step with this tree works with: tensors in fixed memory, others, and
        a key of all else that matters besides shapes."""

    def traced(self, tensors: Sequence[Tensor], in_place: bool) -> Self:
        """A copy that works with these tensors in place of those of :meth:`carried`; ``in_place``:
        see :meth:`TreeCache.traced_with`."""

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        """See :meth:`Drafter.advance`."""

    def levels(self, root: Tensor, depth: int, width: int, noise: Tensor | None) -> Expands:
        """What a tree grows from.

        Args:
            root: ``(batch,)`` tokens.
            depth: number of levels, from 1.
            width: largest number of children that a node may need.
            noise: ``(batch, depth, tokens)`` what draft tokens, of :attr:`token_ids`, will be
                sampled with, see :func:`as_sampled`; None if they are not sampled.
        """

    def kept(self) -> Sequence[Tensor]:
        """What :meth:`Drafter.received` gets besides the trees."""


class Growth:
    """Serves one call. It holds neither the drafter nor the state, also if a step fails.

    Args:
        calibration: learned of such trees, and learning; None to take probabilities as they are.
        exactly: number of draft tokens, with which trees are forwarded whole; None if the policy
            chooses among them.
    """

    def __init__(self, calibration: Calibration | None, exactly: int | None):
        self.calibration, self.exactly = calibration, exactly
        self._ahead: Sequence[float] = ()  # :attr:`trust` of trees that a program grows
        #: This step's trees and their :attr:`trust`. Lookups may be merged into what is forwarded.
        self._trees: tuple[HostTree, Sequence[float]] | None = None

    @property
    def trust(self) -> Sequence[float]:
        """Terms to add to log-probabilities, per distance."""
        return () if self.calibration is None else self.calibration.log_factors

    def tree(self, state: DecodeState, make: Callable[[Sequence[float]], Tensor]) -> Tree:
        """The step's trees: those that a program has grown, or new ones, which ``make`` packs
        (:func:`grow`), given :attr:`trust`."""
        grown, trust = state.grown, self._ahead
        if grown is None:
            trust = self.trust
            grown = Grown(make(trust))
        tree, host = state.received(grown)
        self._trees = host, trust
        return tree if self.exactly is None else tree.changed(whole=True)

    def observe(self, emitted: Sequence[Sequence[int]]) -> bool:
        """Learn from the tokens that each sequence emitted after its tree, if it had one; returns
        whether it had."""
        trees, self._trees = self._trees, None
        if trees is not None and self.calibration is not None:
            self.calibration.learn(*trees, emitted)
        return trees is not None

    def program(
        self, drafter: Traceable, state: DecodeState, tree: Tree, count: int, depth: int,
        expanded: int | None = None,
    ) -> DraftProgram | None:  # fmt: skip
        """See :meth:`Drafter.program`; the other arguments as of :func:`grow`."""
        graphs = state.target.graphs
        if graphs is None:
            return None
        in_place = not graphs.compiles
        buffers, changing, key = drafter.carried(tree)
        self._ahead = self.trust or [0.0] * max(depth, 1)

        def function(
            tensors: Sequence[Tensor], result: StepResult, hidden: Tensor | None,
            noise: Tensor | None,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            *own, trust = tensors
            drafting, root = drafter.traced(own, in_place), result.bonus
            drafting.advance(result, hidden)
            if noise is not None and drafting.token_ids is not None:
                noise = noise[..., drafting.token_ids]
            levels = drafting.levels(root, depth, count, noise)
            return grow(levels, root, count, depth, trust, expanded), *drafting.kept()

        inputs = [*changing, sent(self._ahead, state.root.device)]
        num_results = 1 + len(drafter.kept())
        key = "draft tree", key, count, depth, expanded, len(buffers)
        return DraftProgram(key, buffers, inputs, function, depth, num_results)
