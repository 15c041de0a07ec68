"""Base class of drafters that run a forward of their own for each level of a tree."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_spec.core.buckets import bucket
from hf_spec.core.checks import count, setting
from hf_spec.core.limits import MAX_DRAFT_TOKENS
from hf_spec.core.memory import recall
from hf_spec.core.transfer import is_async
from hf_spec.core.tree import Tree
from hf_spec.drafting.calibration import DraftExit
from hf_spec.drafting.drafter import FORWARDS
from hf_spec.drafting.grow import Children, Frontier, grow
from hf_spec.drafting.growth import GrowingDrafter
from hf_spec.drafting.noise import as_sampled
from hf_spec.drafting.options import ADAPTIVE, AUTO, CHAIN, DraftOptions, fixed_size
from hf_spec.drafting.state import DecodeState

#: Depth of the deepest draft token by default.
DEPTH = 8
#: Draft tokens that are grown for the policy to choose from.
GROWN = 32


@dataclass(frozen=True)
class GrowOptions(DraftOptions):
    """Options of strategies that grow a tree level by level.

    Attributes:
        tree: ``adaptive``: the likeliest paths. ``chain``: the likeliest tokens only.
        max_depth: depth of the deepest draft token; None for 8. Each level is one forward.
        width: draft tokens of a level that are continued, the likeliest ones.
    """

    max_depth: int | None = setting(None, rule=count(1, MAX_DRAFT_TOKENS))
    width: int = setting(4, rule=count(1, MAX_DRAFT_TOKENS), only={"tree": (ADAPTIVE,)})


class ForwardDrafter(GrowingDrafter):
    """Grows a tree level by level; each level is one forward on the likeliest nodes of the one
    before (EAGLE-2, section 4.1).

    Args:
        key: the drafter, its adapter and options: what is learned of its drafts is kept by it.
        owner: the model that this is kept for; None for ``model``.

    Attributes:
        depth: depth of the deepest draft token.
        width: nodes of a level that are continued.
        forward_per_level: whether each level takes a forward of its own, and not only the first.
    """

    token_ids: Tensor | None = None
    forward_per_level: bool = True
    trees = {CHAIN: None}
    unused: ClassVar[Sequence[str]] = ()
    runs = FORWARDS

    exit: DraftExit  # decides when to stop, where the policy chooses

    def __init__(
        self, model: Any, options: GrowOptions, key: tuple[Hashable, ...], owner: Any = None
    ):
        super().__init__(model, options)
        self.depth = options.max_depth or DEPTH
        self.width = 1 if options.tree == CHAIN else options.width
        self._key, self._owner = key, model if owner is None else owner
        self.policy_chooses = options.num_draft_tokens == AUTO
        self.distances = self.depth
        self._block: Tree | None = None  # the drafted nodes
        self._after: Tensor | None = None  # (batch, n, hidden) what rows after the last level take

    def start(self, state: DecodeState) -> None:
        self.exit = DraftExit(self.depth)
        if state.timed:  # else drafts must not depend on earlier calls
            key = *self._key, state.do_sample  # sampled text is harder to predict
            self.exit = recall(self._owner, (DraftExit, *key), lambda: DraftExit(self.depth))
        self.calibration = self.exit.calibration
        self.exactly = fixed_size(self.options.num_draft_tokens, state.timed)

    def catch_up(self, state: DecodeState) -> None:
        """Called before a tree grows."""

    @abstractmethod
    def level(self, frontier: Frontier) -> Tensor:
        """``(batch, nodes, tokens)`` logits of what follows each node of a frontier."""

    def finish(self) -> None:
        """Discard what :meth:`level` has cached."""
        if self.cache is not None:
            self.cache.rollback()
        self._block = self._after = None

    def chain_after(self, root: Tensor) -> list[int]:
        """The likeliest token of each level, after the root of a sequence, ``(1, 1)``."""
        found, zeros = root, torch.zeros_like(root)
        tokens: list[int] = []
        for depth in range(self.depth):
            frontier = Frontier(depth, found, zeros.float(), zeros, zeros)
            found = self.level(frontier)[:, -1].argmax(-1, keepdim=True)
            if self.token_ids is not None:
                found = self.token_ids[found]
            tokens.append(int(found))
        return tokens

    @property
    def num_grown(self) -> int:
        """Number of draft tokens that are grown."""
        return self.depth if self.width == 1 else self.exactly or GROWN

    def propose(self, state: DecodeState) -> Tree:
        depth = min(self.depth, state.max_depth)
        if state.grown is None and depth < 1:
            return Tree.roots(state.root)
        return self.grown(state, partial(self._grow, state, depth))

    def _grow(self, state: DecodeState, depth: int, trust: Sequence[float]) -> Tensor:
        """Trees of at most this depth, packed."""
        self.catch_up(state)
        noise, cost, goes_on = state.noise, state.draft_cost(), None
        if cost is not None and is_async(state.root.device):
            depth = self.paying(state, depth, cost)
        elif cost is not None:
            goes_on = partial(self._goes_on, state, cost)
        ahead = None if noise is None else partial(noise.ahead, 1, self.token_ids)
        levels = Levels(self, self.num_grown, ahead, goes_on)
        packed = grow(levels, state.root, self.num_grown, depth, trust, self.width)
        state.stats.num_draft_forwards += levels.forwards
        self.finish()
        return packed

    def levels(self, root: Tensor, depth: int, width: int, noise: Tensor | None) -> Levels:
        return Levels(self, width, None if noise is None else lambda place: noise[:, place, None])

    def num_levels(self, state: DecodeState, grows: bool = True) -> int:
        """How many levels a program's trees have; none if they do not grow."""
        levels = self.paying(state, self.depth, state.draft_cost()) if grows else 0
        levels = min(bucket(levels), self.depth)  # few numbers, as code is made for each
        state.stats.num_draft_forwards += levels if self.forward_per_level else min(levels, 1)
        return levels

    def paying(self, state: DecodeState, most: int, cost: float | None) -> int:
        """How many levels pay, of at most so many, by how often each was right; all if the cost of
        one in tokens is unknown."""
        if cost is None:
            return most
        found = self.exit.levels(most, sum(state.active), cost)
        if not self.forward_per_level:
            found = most if found else 0
        return found or int(self.exit.due())

    def _goes_on(self, state: DecodeState, cost: float, frontier: Frontier) -> bool:
        """Whether the level after a frontier pays, by its probabilities."""
        paths = [
            path * on for path, on in zip(frontier.log_probs.exp().sum(-1).tolist(), state.active)
        ]
        worth = self.exit.is_worth(frontier.depth + 1, paths, cost)
        return worth or not frontier.depth and self.exit.due()


@dataclass
class Levels:
    """The levels of a tree; see :class:`hf_spec.drafting.grow.Expands`.

    Attributes:
        drafter: runs forwards.
        width: children of a node, at most; one in a chain.
        noise: what the tokens after those of so many levels will be sampled with, ``(batch, 1,
            tokens)``, see :func:`as_sampled`; None if they are not sampled.
        goes_on: whether to expand a frontier that takes a forward; None: always.
        forwards: number of forwards that have run.
    """

    drafter: ForwardDrafter
    width: int
    noise: Callable[[int], Tensor] | None = None
    goes_on: Callable[[Frontier], bool] | None = None
    forwards: int = 0

    def expand(self, frontier: Frontier) -> Children | None:
        drafter, depth = self.drafter, frontier.depth
        if drafter.forward_per_level or not depth:
            if self.goes_on is not None and not self.goes_on(frontier):
                return None
            self.forwards += 1
        logits, ids = drafter.level(frontier).float(), drafter.token_ids
        if self.noise is not None:
            logits = as_sampled(logits, self.noise(depth).to(logits))
        best = logits.topk(min(1 if drafter.width == 1 else self.width, logits.shape[-1]))
        log_probs = best.values - logits.logsumexp(-1, keepdim=True)
        tokens = best.indices if ids is None else ids[best.indices]
        # Nothing is drafted from logits that have overflowed.
        return Children(tokens, log_probs.masked_fill(log_probs.isnan(), -torch.inf))
