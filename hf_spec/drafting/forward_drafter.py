"""Base class of drafters that run a forward of their own for each level of a tree."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_spec.core.checks import count, setting
from hf_spec.core.host_tree import HostTree
from hf_spec.core.limits import MAX_DRAFT_TOKENS
from hf_spec.core.memory import recall
from hf_spec.core.transfer import waits
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.drafting.calibration import DraftExit
from hf_spec.drafting.drafter import FORWARDS, Drafter
from hf_spec.drafting.grow import Children, Frontier, grow
from hf_spec.drafting.noise import as_sampled
from hf_spec.drafting.options import ADAPTIVE, AUTO, CHAIN, DraftOptions, fixed_size
from hf_spec.drafting.state import DecodeState, Grown

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


class ForwardDrafter(Drafter):
    """Grows a tree level by level; each level is one forward on the likeliest nodes of the one
    before (EAGLE-2, section 4.1).

    Args:
        key: the drafter, its adapter and options: what is learned of its drafts is kept by it.
        owner: the model that this is kept for; None for ``model``.

    Attributes:
        depth: depth of the deepest draft token.
        width: nodes of a level that are continued.
        forward_per_level: whether each level takes a forward of its own, and not only the first.
        token_ids: ``(tokens,)`` int64 ids that it predicts, ascending; None for all.
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
        if options.tree not in (ADAPTIVE, CHAIN):
            raise ValueError(
                f"tree={options.tree!r}: this strategy grows each tree from the draft tokens' own "
                f"probabilities. Use tree={ADAPTIVE!r} or {CHAIN!r}."
            )
        self.depth = options.max_depth or DEPTH
        self.width = 1 if options.tree == CHAIN else options.width
        self._key, self._owner = key, model if owner is None else owner
        self.policy_chooses = options.num_draft_tokens == AUTO
        self.distances = self.depth
        self._growth: Growth | None = None  # of this step, if it drafts
        self._ahead: Growth | None = None  # of trees that a program grows

    def start(self, state: DecodeState) -> None:
        self.exit = DraftExit(self.depth)
        if state.timed:  # else drafts must not depend on earlier calls
            key = *self._key, state.do_sample  # sampled text is harder to predict
            self.exit = recall(self._owner, (DraftExit, *key), lambda: DraftExit(self.depth))

    def catch_up(self, state: DecodeState) -> None:
        """Called before a tree grows."""

    @abstractmethod
    def level(self, frontier: Frontier) -> Tensor:
        """``(batch, nodes, tokens)`` logits of what follows each node of a frontier."""

    @abstractmethod
    def finish(self) -> None:
        """Discard what :meth:`level` has cached."""

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

    def propose(self, state: DecodeState) -> Tree:
        grown, self._growth = state.grown, self._ahead
        if grown is None:
            depth, self._growth = min(self.depth, state.max_depth), None
            if depth < 1:
                return Tree.roots(state.root)
            self.catch_up(state)
            growth = self._growth = Growth(self.exit, state)
            levels = _Levels(self, growth, state)
            count, depth = self._count(state), levels.most(depth)
            packed = grow(levels, state.root, count, depth, growth.trust, expanded=self.width)
            grown = Grown(packed)
            self.finish()
        assert self._growth is not None
        tree, self._growth.trees = state.received(grown)
        return tree if self._exactly(state) is None else tree.changed(whole=True)

    def _exactly(self, state: DecodeState) -> int | None:
        return fixed_size(self.options.num_draft_tokens, state.timed)

    def _count(self, state: DecodeState) -> int:
        """Number of draft tokens that are grown."""
        return self.depth if self.width == 1 else self._exactly(state) or GROWN

    def num_children(self, state: DecodeState) -> int:
        """Number of draft tokens under each node, at most."""
        return 1 if self.width == 1 else self._count(state)

    def children(self, frontier: Frontier, most: int, noise: Tensor | None) -> Children:
        """The ``most`` likeliest tokens after each node of a frontier; ``noise``: what they will be
        sampled with, see :func:`as_sampled`."""
        logits = self.level(frontier).float()
        if noise is not None:
            logits = as_sampled(logits, noise.to(logits))
        best = logits.topk(min(most, logits.shape[-1]))
        log_probs = best.values - logits.logsumexp(-1, keepdim=True)
        ids = self.token_ids
        tokens = best.indices if ids is None else ids[best.indices]
        # Nothing is drafted from logits that have overflowed.
        return Children(tokens, log_probs.masked_fill(log_probs.isnan(), -torch.inf))

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        growth, self._growth = self._growth, None
        if growth is not None:
            growth.learn(result.tokens)


class Growth:
    """What is learned from one tree per row that has grown. The drafter keeps it until the step is
    over, so it holds neither the drafter nor the state, also if the step fails.

    Attributes:
        trust: terms added to log-probabilities, per distance.
        trees: the drafted trees; lookups may be merged into the forwarded ones.
        cost: see :attr:`DecodeState.draft_cost`.
    """

    def __init__(self, exit: DraftExit, state: DecodeState):
        self.exit = exit
        self.trust = exit.calibration.log_factors
        self.trees: HostTree | None = None
        self.cost = state.draft_cost()

    def levels(self, drafter: ForwardDrafter, most: int, state: DecodeState) -> int:
        """How many levels pay, of at most so many, by how often each was right."""
        if self.cost is None:
            return most
        found = self.exit.levels(most, sum(state.active), self.cost)
        if not drafter.forward_per_level:
            found = most if found else 0
        return found or int(self.exit.due())

    def learn(self, emitted: Sequence[Sequence[int]]) -> None:
        """Learn from the tokens that each sequence emitted."""
        if self.trees is not None:
            self.exit.calibration.learn(self.trees, self.trust, emitted)


class _Levels:
    """Each level takes a forward; see :class:`hf_spec.drafting.grow.Expands`."""

    def __init__(self, drafter: ForwardDrafter, growth: Growth, state: DecodeState):
        self.growth, self.drafter, self.state = growth, drafter, state
        self._children = drafter.num_children(state)
        self._asks = growth.cost is not None and not waits(state.root.device)

    def most(self, levels: int) -> int:
        """How many levels to grow, at most: as far as can be told without a transfer for each."""
        return levels if self._asks else self.growth.levels(self.drafter, levels, self.state)

    def expand(self, frontier: Frontier) -> Children | None:
        drafter, state, depth = self.drafter, self.state, frontier.depth
        exit, cost = self.growth.exit, self.growth.cost
        runs = drafter.forward_per_level or not depth
        if self._asks and runs:
            assert cost is not None
            paths = frontier.log_probs.exp().sum(-1).tolist()
            paths = [path * on for path, on in zip(paths, state.active)]
            worth = exit.is_worth(depth + 1, paths, cost)
            if not worth and (depth or not exit.due()):
                return None
        state.stats.num_draft_forwards += runs
        noise = None
        if state.noise is not None:
            noise = state.noise.ahead(1, drafter.token_ids, first=depth)
        return drafter.children(frontier, self._children, noise)
