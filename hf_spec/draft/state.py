"""The state of a call's decoding, as the loop and its drafter see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.device import FollowsRows, to_device
from hf_spec.core.shapes import HostTree, Row
from hf_spec.core.stats import SpecStats
from hf_spec.core.tree import Tree
from hf_spec.draft.forced import BatchForced
from hf_spec.draft.lookup import BatchLookup
from hf_spec.target.noise import SamplingNoise
from hf_spec.target.target import Target


class Grown(NamedTuple):
    """Trees that a drafter has grown, for the step that follows.

    Attributes:
        packed: see :meth:`Tree.packed`.
        numbers: the same on the host; None if they are still to be transferred.
        trust: terms that were added to their log-probabilities, per distance.
        depth: to which static trees were cut; None for whole ones.
    """

    packed: Tensor
    numbers: Any = None
    trust: Sequence[float] = ()
    depth: int | None = None

    def of_rows(self, rows: Sequence[int]) -> Grown:
        """Those of some of the batch's rows."""
        numbers = None if self.numbers is None else self.numbers[list(rows)]
        packed = self.packed[to_device(rows, self.packed.device)]
        return self._replace(packed=packed, numbers=numbers)

    def with_rows(self, other: Grown) -> Grown:
        """These, and behind them those of other rows."""
        nodes = max(one.packed.shape[1] // 4 for one in (self, other))
        packed = [Tree.repacked(one.packed, nodes) for one in (self, other)]
        return self._replace(packed=torch.cat(packed), numbers=None)


class Process(Protocol):
    """The call's logits processors."""

    @property
    def trivial(self) -> bool:
        """Whether they keep the likeliest token the likeliest."""

    def __call__(
        self, logits: Tensor, suffix: Tensor, active: Sequence[bool], drafting: bool = False
    ) -> Tensor:
        """Logits ``(batch, vocab)`` -> float32 scores after all processors, for active rows. The
        prefix of each is its tokens so far, then its ``suffix (batch, n)``. While drafting, only
        processors run that keep no state."""


@dataclass
class DecodeState(FollowsRows):
    """The sequences of a call that are still decoded, and the parts that follow them.

    It is what the loop shows a drafter, which must not change it. The batch shrinks as sequences
    finish (:meth:`select`), and those of other calls may join it.

    Attributes:
        model: the model.
        drafter: the call's drafter.
        target: runs the model on the nodes of a tree after the cached tokens.
        cache: the KV cache; it holds all tokens of a sequence except the last, the root.
        sequences: the call's sequences; :attr:`tokens`, :attr:`active` and so on are theirs.
        root: ``(batch,)`` the last token of each sequence.
        do_sample: whether tokens are sampled.
        process: applies the call's logits processors.
        stats: the statistics of the call so far.
        timed: whether the amount of drafting may depend on step times.
        grown: what has grown for this step; a tree if the drafter has made it in its own way.
        draft_cost: tokens that one more drafting forward of this step must bring to pay for its
            time; None while unknown.
        lookups: looks up what is merged into each step's draft; None if nothing is.
        forced: drafts what the call's processors leave; None if that is not asked for.
        looked_up: what this step has looked up for each sequence, and what is forced.
        noise: what the next tokens will be sampled with; None if the output would depend on it.
        prompt_part: most tokens of each prompt that a drafter should run at once.
        between_parts: to be called between two such parts: other calls may take steps.
    """

    model: Any
    drafter: Any
    target: Target
    cache: TreeCache
    sequences: Any
    root: Tensor
    do_sample: bool
    process: Process
    stats: SpecStats = field(default_factory=SpecStats)
    timed: bool = False
    grown: Grown | Tree | None = None
    draft_cost: float | None = None
    lookups: BatchLookup | None = None
    forced: BatchForced | None = None
    looked_up: Sequence[Row] = ()
    noise: SamplingNoise | None = None
    prompt_part: int = 4096
    between_parts: Callable[[], None] = lambda: None

    of_rows = ("sequences", "cache", "target", "drafter", "lookups", "forced", "noise", "root")

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each row so far, with the prompt, without padding."""
        found: list[list[int]] = self.sequences.now.tokens
        return found

    @property
    def active(self) -> list[bool]:
        """Whether each row is unfinished."""
        found: list[bool] = self.sequences.now.active
        return found

    @property
    def remaining(self) -> list[int]:
        """How many tokens each row may still emit."""
        found: list[int] = self.sequences.now.remaining
        return found

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows in this order, and have all parts follow; see :class:`FollowsRows`."""
        super().select(rows)
        if isinstance(self.grown, Grown):  # by a program; else trees are made for the rows left
            self.grown = self.grown.of_rows(rows)

    def join(self, other: DecodeState) -> None:
        """Take the sequences of another call, whose prompt has just run, behind these, and have all
        parts follow."""
        for state in (self, other):
            state.drafter.complete(state)
        if isinstance(self.grown, Grown):  # by a program, which leaves nothing to grow more from
            self.grown = self.grown.with_rows(other.drafter.grown(other))
        super().join(other)

    @property
    def looks_up(self) -> bool:
        """Whether the host may know what continues a sequence."""
        return self.lookups is not None or bool(self.forced)

    def lookup(self) -> Sequence[Row]:
        """Look up what continues each sequence, for this step."""
        rows: tuple[Sequence[Row], ...] = ()
        for source in (self.forced, self.lookups):
            if source:
                rows = (source.lookup(self.tokens, self.active, self.max_depth, *rows),)
        self.looked_up = rows[0] if rows else ()
        return self.looked_up

    def received(self, grown: Grown) -> tuple[Tree, HostTree]:
        """Trees that a drafter has grown."""
        tree = Tree.unpacked(grown.packed, grown.numbers)
        host = tree.host
        assert host is not None
        if not all(self.active):  # grown before it was known that rows stop short of their bonus
            host.tokens[:, 0] = [row[-1] for row in self.tokens]
        return tree, host

    @property
    def batch_size(self) -> int:
        """Batch rows that are still carried."""
        return len(self.sequences.rows)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest draft token that any sequence can use; one token is the bonus."""
        left = [n for n, active in zip(self.remaining, self.active) if active]
        return max(left, default=1) - 1
