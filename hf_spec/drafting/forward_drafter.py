"""Base class of drafters that run a forward of their own for each level of a tree."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from hf_spec.core.checks import check_count
from hf_spec.core.host_tree import Row
from hf_spec.core.limits import MAX_DRAFT_TOKENS
from hf_spec.core.transfer import sent, waits
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.drafting.draft_vocabulary import places_of
from hf_spec.drafting.drafter import Drafter
from hf_spec.drafting.grow import Children, Frontier, grow
from hf_spec.drafting.options import (
    ADAPTIVE,
    AUTO,
    CHAIN,
    DEFAULT_DRAFT_TOKENS,
    DraftOptions,
    refuse,
)
from hf_spec.drafting.state import DecodeState

#: Depth of the deepest draft token by default.
DEPTH = 8
#: Draft tokens that are grown for the policy to choose from.
GROWN = 32


class Exit(Protocol):
    """Decides when a tree is deep enough: :class:`hf_spec.policy.draft_exit.DraftExit`."""

    @property
    def trust(self) -> list[float]: ...

    def due(self) -> bool: ...

    def is_worth(self, distance: int, paths: Sequence[float], cost: float) -> bool: ...

    def levels(self, most: int, rows: int, cost: float) -> int: ...

    def learn(
        self, trust: Sequence[float], trees: Sequence[Row], emitted: Sequence[Sequence[int]]
    ) -> None: ...


class Tempers(Protocol):
    """Learned from sampled tokens: :class:`hf_spec.policy.tempering.Tempering`."""

    sharpness: float
    share: float

    def learns(self, step: int) -> bool: ...

    def learn(self, logits: Tensor, noise: Tensor, tokens: Tensor, valid: Tensor) -> None: ...


#: See :class:`ForwardDrafter`.
Learned = Callable[[int, bool, bool], tuple[Exit, Tempers]]


@dataclass(frozen=True)
class GrowOptions(DraftOptions):
    """Options of strategies that grow a tree level by level.

    Attributes:
        tree: ``adaptive``: the likeliest paths. ``chain``: the likeliest tokens only.
        max_depth: depth of the deepest draft token; None for 8. Each level is one forward.
        width: draft tokens of a level that are continued, the likeliest ones.
    """

    width: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("width", self.width, high=MAX_DRAFT_TOKENS)
        if self.max_depth is not None:
            check_count("max_depth", self.max_depth, high=MAX_DRAFT_TOKENS)
        if self.tree == CHAIN:
            refuse(self, ["width"], f"with tree={CHAIN!r}, which has one. Leave one out.")


class ForwardDrafter(Drafter):
    """Grows a tree level by level; each level is one forward on the likeliest nodes of the one
    before (EAGLE-2, section 4.1).

    Args:
        learned: :func:`hf_spec.policy.draft_exit.learned` of this drafter, given the depth of its
            deepest draft token, and whether a call's drafts may depend on time, and are sampled.

    Attributes:
        depth: depth of the deepest draft token.
        width: nodes of a level that are continued.
        exit: decides when to stop, where the policy chooses.
        tempering: for calls that sample.
        forward_per_level: whether each level takes a forward of its own, and not only the first.
    """

    forward_per_level: bool = True
    trees = {CHAIN: None}
    unused: ClassVar[Sequence[str]] = ()
    single_forward: ClassVar[bool] = False

    exit: Exit
    tempering: Tempers

    def __init__(self, model: Any, options: GrowOptions, learned: Learned):
        super().__init__(model, options)
        if options.tree not in (ADAPTIVE, CHAIN):
            raise ValueError(
                f"tree={options.tree!r}: this strategy grows each tree from the draft tokens' own "
                f"probabilities. Use tree={ADAPTIVE!r} or {CHAIN!r}."
            )
        self.depth = options.max_depth or DEPTH
        self.width = 1 if options.tree == CHAIN else options.width
        self._learned = learned
        exactly = options.num_draft_tokens
        self.num_draft_tokens = None if exactly == AUTO else int(exactly)
        self.policy_chooses = self.num_draft_tokens is None
        self.distances = self.depth
        self._growth: _Growth | None = None  # of this step, if it drafts
        self._ahead: tuple[_Growth, Tensor] | None = None  # of the next one, and its packed trees
        self._sampled = 0  # steps that tempering can learn from

    def start(self, state: DecodeState) -> None:
        self.exit, self.tempering = self._learned(self.depth, state.timed, state.do_sample)

    @abstractmethod
    def catch_up(self, state: DecodeState) -> None:
        """Run what was committed since the last time, before a tree grows."""

    @abstractmethod
    def level(self, frontier: Frontier) -> Tensor:
        """``(batch, nodes, tokens)`` logits of what follows each node of a frontier."""

    @abstractmethod
    def finish(self) -> None:
        """Discard what :meth:`level` has cached."""

    @property
    def token_ids(self) -> Tensor | None:
        """``(tokens,)`` int64 ids of the tokens that it knows, ascending; None for all."""
        return None

    def propose(self, state: DecodeState) -> Tree:
        self._growth, ahead, self._ahead = None, self._ahead, None
        if ahead is None or state.prefetched is None:
            depth = min(self.depth, state.max_depth)
            if depth < 1:
                return Tree.roots(state.root)
            self.catch_up(state)
            ahead = self._grow(state, depth)
        self._growth, packed = growth, _ = ahead
        tree, host = state.received(packed)
        growth.rows = host.rows(tree.row_sizes)
        return tree if self._exactly(state) is None else tree.changed(whole=True)

    def grow_ahead(self, state: DecodeState) -> Tensor:
        """Grow the next step's trees before the host knows how this one ended: see
        :meth:`Drafter.prefetch`. All that was committed must have run."""
        self._ahead = self._grow(state, self.depth)
        return self._ahead[1]

    def _exactly(self, state: DecodeState) -> int | None:
        """Number of draft tokens in every step; None if the policy chooses it."""
        # What must not depend on time has one size.
        return self.num_draft_tokens or (None if state.timed else DEFAULT_DRAFT_TOKENS)

    def _grow(self, state: DecodeState, depth: int) -> tuple[_Growth, Tensor]:
        count = depth if self.width == 1 else self._exactly(state) or GROWN
        growth = _Growth(self, state, count)
        depth = growth.levels(depth)
        grown = grow(growth, state.root, count, depth, growth.trust, expanded=self.width)
        self.finish()
        return growth, grown

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        growth, self._growth = self._growth, None
        if growth is not None:
            self._sampled += bool(growth.samples)
            growth.learn(result.tokens, self.tempering.learns(self._sampled))


class _Growth:
    """One tree per row as it grows, and what is learned from it; see
    :class:`hf_spec.drafting.grow.Expands`.

    Attributes:
        trust: terms added to log-probabilities, per distance.
        rows: the drafted trees.
        samples: logits and noise of the first node of each level, where tokens are sampled.
    """

    def __init__(self, drafter: ForwardDrafter, state: DecodeState, count: int):
        self.drafter, self.state = drafter, state
        self._children = 1 if drafter.width == 1 else count  # of a node, at most
        self.trust = drafter.exit.trust
        self.rows: list[Row] = []
        self.samples: list[tuple[Tensor, Tensor]] = []
        self._cost = state.draft_cost() if state.timed else None
        self._asks = self._cost is not None and not waits(state.root.device)
        self._likeliest: list[Tensor] = []

    def levels(self, most: int) -> int:
        """How many levels to grow, at most: as far as can be told without a transfer for each."""
        if self._cost is None or self._asks:
            return most
        learned = self.drafter.exit
        found = learned.levels(most, sum(self.state.active), self._cost)
        if not self.drafter.forward_per_level:
            found = most if found else 0
        return found or int(learned.due())

    def expand(self, frontier: Frontier) -> Children | None:
        drafter, state, depth = self.drafter, self.state, frontier.depth
        if depth:
            self._likeliest.append(frontier.tokens[:, 0])
        runs = drafter.forward_per_level or not depth
        if self._asks and runs:
            assert self._cost is not None
            paths = frontier.log_probs.exp().sum(-1).tolist()
            paths = [path * on for path, on in zip(paths, state.active)]
            worth = drafter.exit.is_worth(depth + 1, paths, self._cost)
            if not worth and (depth or not drafter.exit.due()):
                return None
        state.stats.num_draft_forwards += runs
        logits = self._as_sampled(drafter.level(frontier).float(), depth)
        best = logits.topk(min(self._children, logits.shape[-1]))
        log_probs = best.values - logits.logsumexp(-1, keepdim=True)
        ids = drafter.token_ids
        tokens = best.indices if ids is None else ids[best.indices]
        # Nothing is drafted for finished sequences, nor from logits that have overflowed.
        out = log_probs.isnan() | ~sent(list(state.active), logits.device)[:, None, None]
        return Children(tokens, log_probs.masked_fill(out, -torch.inf))

    def _as_sampled(self, logits: Tensor, depth: int) -> Tensor:
        """Logits given what the tokens will be sampled with, if they are sampled."""
        noise = self.state.noise
        if noise is None:
            return logits
        learned = self.drafter.tempering
        ahead = noise.ahead(1, self.drafter.token_ids, first=depth).to(logits)
        self.samples.append((logits[:, 0], ahead[:, 0]))
        return learned.sharpness * logits + learned.share * ahead

    def learn(self, emitted: Sequence[Sequence[int]], tempering: bool) -> None:
        """Learn from the tokens that each sequence emitted.

        Args:
            tempering: whether to learn from samples, too.
        """
        self.drafter.exit.learn(self.trust, self.rows, emitted)
        if tempering:
            learn_from_samples(
                self.drafter.tempering, self.samples, self._likeliest, emitted,
                self.drafter.token_ids,
            )  # fmt: skip


def learn_from_samples(
    tempering: Tempers, samples: Sequence[tuple[Tensor, Tensor]], likeliest: Sequence[Tensor],
    emitted: Sequence[Sequence[int]], ids: Tensor | None = None,
) -> None:  # fmt: skip
    """Learn from sampled tokens.

    Args:
        tempering: what learns.
        samples: logits and noise of the likeliest node of each level, ``(batch, tokens)`` each.
        likeliest: ``(batch,)`` the token of that node, from the first level below the root.
        emitted: the tokens that each sequence emitted.
        ids: ``(tokens,)`` ids of the logits; None if these are the indices.
    """
    if not samples:
        return
    logits, noise = (torch.stack(parts, 1) for parts in zip(*samples))
    count, device = len(samples), logits.device
    tokens = sent([[*row, *[-1] * count][:count] for row in emitted], device)
    # Samples of a level count where the likeliest tokens above it were right.
    right = torch.ones_like(tokens, dtype=torch.bool)
    for level, above in enumerate(likeliest[: count - 1], 1):
        right[:, level] = right[:, level - 1] & (tokens[:, level - 1] == above.to(device))
    place, known = places_of(tokens, ids)
    tempering.learn(*(part.flatten(0, 1) for part in (logits, noise, place, right & known)))
