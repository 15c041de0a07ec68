"""Drafters of trees that grow by their draft tokens' own probabilities, and what these teach."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Self

from torch import Tensor

from hf_spec.core.host_tree import HostTree
from hf_spec.core.transfer import to_device
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.drafting.calibration import Calibration
from hf_spec.drafting.draft_cache import TracedDraftCache
from hf_spec.drafting.drafter import Drafter
from hf_spec.drafting.grow import Expands, grow
from hf_spec.drafting.held import Holds, replace_in, tensors_in
from hf_spec.drafting.state import DecodeState, Grown
from hf_spec.model.programs import DraftProgram


class GrowingDrafter(Drafter, Holds):
    """A drafter whose trees grow by probabilities; in a program, unless it is :attr:`outside`, as
    the host decides nothing meanwhile.

    Attributes:
        calibration: learned of such trees, and learning; None to take probabilities as they are.
        exactly: number of draft tokens, with which trees are forwarded whole; None if the policy
            chooses among them.
        cache: a KV cache of its own; None if it has none.
        per_row: names of attributes with what :meth:`advance` makes of each sequence from what is
            there: tensors ``(batch, ...)``, tuples of them, or None. They follow the batch, and a
            program takes them and gives them anew.
    """

    calibration: Calibration | None = None
    exactly: int | None = None
    cache: Any = None
    per_row: ClassVar[Sequence[str]] = ()
    _next_trust: Sequence[float] = ()  # :attr:`trust` of trees that a program grows
    #: This step's trees and their :attr:`trust`. Lookups may be merged into what is forwarded.
    _trees: tuple[HostTree, Sequence[float]] | None = None

    @property
    def trust(self) -> Sequence[float]:
        """Terms to add to log-probabilities, per distance."""
        return () if self.calibration is None else self.calibration.log_factors

    def grown(self, state: DecodeState, make: Callable[[Sequence[float]], Tensor]) -> Tree:
        """The step's trees: those that a program has grown, or new ones, which ``make`` packs
        (:func:`grow`), given :attr:`trust`."""
        grown, trust = state.grown, self._next_trust
        if grown is None:
            trust = self.trust
            grown = Grown(make(trust))
        tree, host = state.received(grown)
        self._trees = host, trust
        return tree if self.exactly is None else tree.changed(whole=True)

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        trees, self._trees = self._trees, None
        if trees is not None and self.calibration is not None:
            self.calibration.learn(*trees, result.tokens)

    def select(self, rows: Sequence[int]) -> None:
        if self.cache is not None:
            self.cache.select(rows)
        of_rows = tensors_in(self, self.per_row)
        replace_in(self, self.per_row, (one[to_device(rows, one.device)] for one in of_rows))

    def release(self) -> list[Tensor]:
        return [] if self.cache is None else self.cache.states.release()

    # -- programs ------------------------------------------------------------------------------

    @property
    def token_ids(self) -> Tensor | None:
        """``(tokens,)`` int64 ids that it predicts, ascending; None for all."""
        return None

    def levels(self, root: Tensor, depth: int, width: int, noise: Tensor | None) -> Expands:
        """What a tree grows from; not asked for if drafting is :attr:`outside`.

        Args:
            root: ``(batch,)`` tokens.
            depth: number of levels, from 1.
            width: largest number of children that a node may need.
            noise: ``(batch, depth, tokens)`` what draft tokens, of :attr:`token_ids`, will be
                sampled with, see :func:`as_sampled`; None if they are not sampled.
        """
        raise NotImplementedError

    def carried(self, tree: Tree) -> tuple[Sequence[Tensor], Sequence[Tensor], Hashable]:
        """What a program for a step with this tree works with: tensors in fixed memory, others, and
        a key of all else that matters besides shapes."""
        cache, of_rows = self.cache, tensors_in(self, self.per_row)
        if cache is None:
            return self.tensors(), of_rows, None
        return [*self.tensors(), *cache.tensors()], [cache.lengths, *of_rows], cache.layout

    def traced(self, tensors: Sequence[Tensor], in_place: bool) -> Self:
        """A copy that works with these tensors in place of those of :meth:`carried`; ``in_place``:
        see :meth:`TreeCache.traced_with`."""
        parts = iter(tensors)
        own = self.using(parts)
        if self.cache is not None:
            held = [next(parts) for _ in self.cache.tensors()]
            own.cache = TracedDraftCache(self.cache, held, next(parts), in_place)
        replace_in(own, self.per_row, parts)
        return own

    @property
    def num_kept(self) -> int:
        """Number of tensors that :meth:`kept` gives."""
        return len(self.kept())

    def kept(self) -> Sequence[Tensor]:
        """What :meth:`received` gets besides the trees."""
        return tensors_in(self, self.per_row)

    def received(self, found: Sequence[Tensor], result: StepResult) -> None:
        replace_in(self, self.per_row, found[1:])
        if self.cache is not None:
            assert result.host is not None
            self.cache.commit(result.host.counts)

    def packed_trees(
        self, root: Tensor, noise: Tensor | None, trust: Tensor, count: int, depth: int,
        expanded: int | None,
    ) -> Tensor:  # fmt: skip
        """What a program makes, packed; the arguments as of :meth:`levels` and :func:`grow`."""
        levels = self.levels(root, depth, count, noise)
        return grow(levels, root, count, depth, trust, expanded)

    def grows(
        self, state: DecodeState, tree: Tree, count: int, depth: int, expanded: int | None = None,
        kind: Hashable = None,
    ) -> DraftProgram:  # fmt: skip
        """See :meth:`program`.

        Args:
            count, depth, expanded: see :func:`grow`.
            kind: what :meth:`packed_trees` depends on besides these, and shapes.
        """
        graphs = state.target.graphs
        assert graphs is not None
        in_place = not graphs.compiles
        buffers, changing, key = self.carried(tree)
        self._next_trust = self.trust or [0.0] * max(depth, 1)

        def function(
            tensors: Sequence[Tensor], result: StepResult, hidden: Tensor | None,
            noise: Tensor | None,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            *own, trust = tensors
            drafting, root = self.traced(own, in_place), result.bonus
            drafting.advance(result, hidden)
            if noise is not None and drafting.token_ids is not None:
                noise = noise[..., drafting.token_ids]
            made = drafting.packed_trees(root, noise, trust, count, depth, expanded)
            return made, *drafting.kept()

        inputs = [*changing, to_device(self._next_trust, state.root.device)]
        key = "draft tree", key, count, depth, expanded, kind, len(buffers)
        return DraftProgram(key, buffers, inputs, function, depth, 1 + self.num_kept)
