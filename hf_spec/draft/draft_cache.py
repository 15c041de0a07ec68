"""The KV cache of a drafter that runs committed tokens itself, and what its rows see there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from hf_spec.cache.attention import AttentionStates
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.draft.state import DecodeState
from hf_spec.modeling_patches.attention_masks import runs_kernel
from hf_spec.target.graphs import Graphs
from hf_spec.target.target import Slots

#: Committed rows that run at once, of each sequence.
AT_ONCE = 512


class Rows(Protocol):
    """The rows of a drafter's forward."""

    @property
    def positions(self) -> Tensor:
        """``(batch, n)`` int64"""

    def mask(self, begin: Tensor | None = None, window: int | None = None) -> Tensor:
        """What they see, ``(batch, 1, n, slots)`` bool, True = attend; or a packed mask.

        Args:
            begin: ``(batch, n)`` the first position that each sees; None: all.
            window: of the layer, whose cache is a ring then, see :class:`DraftCache`.
        """


@dataclass
class TreeRows:
    """:class:`Rows` that are the nodes ``first ..`` of a tree behind what a cache holds."""

    states: AttentionStates
    lengths: Tensor
    tree: Tree
    first: int
    keys: int
    packs: bool

    @property
    def positions(self) -> Tensor:
        return self.lengths[:, None] + self.tree.depths[:, self.first :]

    def mask(
        self, begin: Tensor | None = None, window: int | None = None, visible: Tensor | None = None
    ) -> Tensor:
        """See :class:`Rows`; ``visible``: ``(batch, n, nodes)`` bool, what of the tree each row
        sees, if not itself and its ancestors."""
        tree, lengths = self.tree, self.lengths
        slots = Slots.of(self.states, lengths, tree.num_nodes, self.keys, window)
        seen = tree.ancestors[:, self.first :] if visible is None else visible
        at_nodes = None if begin is None else lengths[:, None] + tree.depths
        return slots.mask(seen, lengths, self.packs, begin, at_nodes)


class DraftCache(TreeCache):
    """A :class:`TreeCache` whose owner asks for no more than what recorded code can know. There
    lengths are on the device only, and all slots are seen.

    Attributes:
        packs: whether masks are packed.
    """

    packs: bool = False

    @classmethod
    def beside(
        cls, state: DecodeState, network: Any, device: torch.device, graphs: Graphs | None
    ) -> DraftCache:
        """An empty one with as many slots as the model's cache at the same time: code is for sizes.

        Args:
            network: has a ``model``, ``num_layers`` and ``windows``: by the index of a layer with
                a sliding window, how many tokens a row sees, itself included. Its slots are a ring.
        """
        own = cls(network.num_layers, state.batch_size, device, graphs)
        own.packs, own.states.windows = runs_kernel(network.model), dict(network.windows)
        own.states.limit = state.cache.states.limit
        own.states.reserve(state.cache.capacity)
        return own

    def open(self, tree: Tree, first: int = 0) -> TreeRows:
        """Open a block for the nodes ``first ..`` of a tree, whose states are written next."""
        if self.is_given:
            nodes = torch.arange(first, tree.num_nodes, device=self.lengths.device)
            keys = self.begin_given(tree, nodes)
        else:
            keys = self.begin(tree, first)
        return TreeRows(self.states, self.lengths, tree, first, keys, self.packs)

    def keep(self, counts: Tensor, known: Sequence[int] | None) -> None:
        """Close the block and keep the first ``counts`` (batch,) nodes of each row, which are those
        that are ``known``, if the host knows them."""
        if self.is_given:
            self.lengths = self.lengths + counts.to(self.lengths.device)
        else:
            self.commit(counts.tolist() if known is None else known)

    def using(self, tensors: Iterator[Tensor], changing: Iterator[Tensor]) -> Self:
        own = super().using(tensors, changing)
        own.packs = self.packs
        return own


def whole(tokens: Tensor) -> StepResult:
    """A sequence as a result, given the tokens ``(1, n)`` after each of its own."""
    counts, path = tokens.new_full((1,), tokens.shape[1]), torch.zeros_like(tokens)
    host = HostResult([range(tokens.shape[1])], tokens.tolist(), [0])
    return StepResult(path, counts, tokens, counts * 0, counts - 1, tokens[:, -1], host)


class Committed(NamedTuple):
    """Some committed tokens of each sequence.

    Attributes:
        tokens: ``(batch, n)`` int64 tokens after each of them.
        hidden: ``(batch, n, features)`` their states.
        counts: ``(batch,)`` so many of each row count.
        known: how many do without what a stop has cut off, if the host knows.
    """

    tokens: Tensor
    hidden: Tensor
    counts: Tensor
    known: Sequence[int] | None


def committed(result: StepResult, hidden: Tensor) -> Iterator[Committed]:
    """What a result has committed, in parts that bound the memory of a long prompt; the arguments
    as of :meth:`Drafter.advance`."""
    width, known = min(hidden.shape[1], result.tokens.shape[1]), result.host and result.host.counts
    tokens = result.tokens[:, :width].to(hidden.device).clamp(min=0)
    counts = result.counts.to(hidden.device)
    for start in range(0, width, AT_ONCE):
        some, most = slice(start, start + AT_ONCE), min(width - start, AT_ONCE)
        of_part = counts if most == width else (counts - start).clamp(0, most)
        held = None if known is None else [min(max(n - start, 0), most) for n in known]
        yield Committed(tokens[:, some], hidden[:, some], of_part, held)
