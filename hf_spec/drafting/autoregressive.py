"""Drafts with a small decoder of its own that reads the target's hidden states: EAGLE-3, MTP.

A row of the decoder is a token and the target's states of the token *before* it; where the target
has not been, the decoder's own output takes the place of these states. After a step, the cache goes
back to true rows, and those of the accepted tokens run anew, with true states (Li et al., "EAGLE-3:
Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025, section
3.1).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_spec.core import mask as masks
from hf_spec.core.buckets import bucket
from hf_spec.core.transfer import sent, waits
from hf_spec.core.tree import Tree
from hf_spec.drafting.committed import DraftCache, ReadsCommitted, Rows
from hf_spec.drafting.forward_drafter import ForwardDrafter, GrowOptions
from hf_spec.drafting.grow import Frontier, extended
from hf_spec.drafting.state import DecodeState
from hf_spec.model.graphs import Graphs
from hf_spec.model.hidden_states import Reads, captured, states_at
from modeling_patches.per_call import Changes

#: Committed rows that run at once, of each sequence.
AT_ONCE = 512

#: From the batch size and n, rows that draft n further tokens in one forward (P-EAGLE): ``(batch,
#: n)`` tokens, and ``(batch, n, hidden)`` what they take of states.
MaskRows = Callable[[int, int], tuple[Tensor, Tensor]]


class DraftNetwork(ABC):
    """The decoder.

    Attributes:
        num_layers: of its cache.
        token_ids: ``(tokens,)`` ids, ascending, that it predicts; None for all.
        compiles: whether its forward can be compiled: whether it depends on the cache's tensors
            and the arguments alone.
        own: its tensors that are not the model's.
        masks: rows that draft all further tokens in one forward; None: each of these needs a
            forward, with the output of the one before.
    """

    num_layers: int
    token_ids: Tensor | None = None
    compiles: bool = True
    own: Sequence[Tensor] = ()
    masks: MaskRows | None = None

    @abstractmethod
    def features(self, states: Tensor) -> Tensor:
        """``(batch, n, hidden)`` what a row takes of the target's states ``(batch, n, features)``,
        which are those of :attr:`Drafter.reads`."""

    @abstractmethod
    def run(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor, cache: Any
    ) -> tuple[Tensor, Tensor]:
        """Forward of some rows, whose keys and values it writes into the cache.

        Args:
            tokens: ``(batch, n)`` int64
            hidden: ``(batch, n, hidden)`` :meth:`features`, or outputs of the rows before.
            positions: ``(batch, n)`` int64
            mask: ``(batch, 1, n, slots)`` bool, True where a row sees a slot.
            cache: takes ``update(keys, values, layer)``, which returns those of all slots.

        Returns:
            ``(batch, n, hidden)`` states that :meth:`logits` reads, and those that the next row
            takes.
        """

    def run_true(
        self, tokens: Tensor, hidden: Tensor, before: Tensor | None, positions: Tensor,
        mask: Tensor, cache: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """:meth:`run` of rows that follow each other and take the target's states.

        Args:
            hidden: ``(batch, n, hidden)`` :meth:`features`.
            before: ``(batch, 1, ...)`` what the row before the first one has returned for the next;
                None if there is none.
        """
        return self.run(tokens, hidden, positions, mask, cache)

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """``(..., tokens)`` of states ``(..., hidden)``."""


class AutoregressiveDrafter(ReadsCommitted, ForwardDrafter):
    """A :class:`ForwardDrafter` with a :class:`DraftNetwork`.

    Args:
        reads: the target's states that the network reads, of committed tokens.
    """

    def __init__(
        self, model: Any, options: GrowOptions, network: DraftNetwork, reads: Reads,
        key: tuple[Hashable, ...],
    ):  # fmt: skip
        super().__init__(model, options, key)
        self.network, self.reads, self.token_ids = network, reads, network.token_ids
        #: What :meth:`DraftNetwork.run` returned of each sequence's last true row, the root's.
        self._root: tuple[Tensor, Tensor] | None = None
        self._graphs: Graphs | None = None
        self._block: Tree | None = None  # the drafted rows, as nodes
        self._level: Tensor | None = None  # (batch, n, hidden) what rows after the last level take

    def start(self, state: DecodeState) -> None:
        super().start(state)
        graphs = self._graphs = state.target.graphs if self.network.compiles else None
        if graphs is not None:
            graphs.hold(self.network.own)
        self.cache = DraftCache(
            self.network.num_layers, state.batch_size, state.root.device,
            None if graphs is None else graphs.allocate,
        )  # fmt: skip
        # As many slots as the target's, at the same time: code is for sizes.
        self.cache.states.limit = state.cache.states.limit
        self.cache.states.reserve(state.cache.capacity)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        if self._root is not None:
            index = sent(rows, self._root[0].device)
            self._root = self._root[0][index], self._root[1][index]

    def prefetch(self, state: DecodeState) -> Tensor | None:
        # Where reads are free, each level is grown only if it is worth its time.
        if not waits(state.root.device):
            return None
        self.catch_up(state, ahead=True)
        self._ahead = self._grow(state, self.depth)
        return self._ahead[1]

    def catch_up(self, state: DecodeState, ahead: bool = False) -> None:
        rows = self.take_committed(ahead)
        if rows is not None:
            self._run_committed(rows)

    def _run_committed(self, rows: Rows) -> None:
        """Run true rows and keep what the last one of each sequence says."""
        network, cache, width = self.network, self.cache, max(rows.counts)
        for start in range(0, width, AT_ONCE):
            part = slice(start, min(start + AT_ONCE, width))
            tokens = rows.tokens[:, part]
            tree = Tree.chain(tokens)
            mask = masks.tree(tree.ancestors, cache.lengths, cache.begin(tree))
            positions = cache.lengths[:, None] + tree.depths
            before = None if self._root is None else self._root[1]
            hidden = network.features(rows.hidden[:, part])
            found = network.run_true(tokens, hidden, before, positions, mask, cache)
            most = tokens.shape[1]
            known = [min(max(count - start, 0), most) for count in rows.counts]
            if rows.exact is None:
                cache.commit(known)
                counts = sent(known, tokens.device)
            else:
                counts = (rows.exact - start).clamp(0, most)
                cache.commit_ahead(counts, most)
            last = (counts - 1).clamp(min=0)[:, None]
            states, after = (states_at(one, last) for one in found)
            if self._root is not None and (rows.exact is not None or not all(known)):
                new = counts[:, None, None] > 0
                states = torch.where(new, states, self._root[0])
                after = torch.where(new, after, self._root[1])
            self._root = states, after

    def level(self, frontier: Frontier) -> Tensor:
        assert self._root is not None
        if not frontier.depth:
            return self.network.logits(self._root[0])
        before = self._root[1] if self._level is None else self._level
        hidden = states_at(before, frontier.parents)
        self._block, first = extended(self._block, frontier)
        run = self._run_level if self._graphs is None else self._run_compiled
        logits, self._level = run(self._block, first, hidden)
        return logits

    def _run_level(self, block: Tree, first: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and states after the drafted rows from the ``first`` one."""
        cache = self.cache
        mask = masks.tree(block.ancestors[:, first:], cache.lengths, cache.begin(block, first))
        positions = cache.lengths[:, None] + block.depths[:, first:]
        tokens = block.tokens[:, first:]
        states, after = self.network.run(tokens, hidden, positions, mask, cache)
        return self.network.logits(states), after

    def _run_compiled(self, block: Tree, first: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`_run_level` by compiled code, padded with copies of the last row to a size that
        recurs."""
        graphs, network, cache = self._graphs, self.network, self.cache
        assert graphs is not None
        lengths = cache.lengths
        count = block.num_nodes - first
        width = bucket(count)
        cache.states.reserve(cache.max_length + first + width)
        cache.begin(block, first)
        rows = torch.arange(width, device=lengths.device)
        nodes = first + rows.clamp(max=count - 1)
        mask = masks.tree(block.ancestors[:, nodes], lengths, cache.capacity)
        positions = lengths[:, None] + block.depths[:, nodes]
        small = [
            lengths, lengths[:, None] + first + rows, block.tokens[:, nodes],
            hidden[:, nodes.to(hidden.device) - first], positions, mask,
        ]  # fmt: skip
        buffers = cache.tensors()

        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            held, given = tensors[: len(buffers)], tensors[len(buffers) :]
            lengths, slots, tokens, hidden, positions, mask = given
            traced = cache.traced_with(held, lengths, slots, block, graphs.records)
            states, after = network.run(tokens, hidden, positions, mask, traced)
            return network.logits(states), after

        logits, after = graphs.run(
            ("draft", cache.layout), function, buffers + [one.contiguous() for one in small],
            lambda: self._run_level(block, first, hidden),
            lambda found: [one[:, :count] for one in found], static=len(buffers),
        )  # fmt: skip
        return logits, after

    def finish(self) -> None:
        self.cache.rollback()
        self._block = self._level = None

    def release(self) -> list[Tensor]:
        return [] if self._graphs is None else self.cache.states.release()

    # -- stock assisted decoding -------------------------------------------------------------

    def chain(self, input_ids: Tensor) -> list[int]:
        changes = Changes()
        seen = captured(self.model, changes, self.reads.layers)
        logits = changes.run(self.model, input_ids, use_cache=False).logits
        after = torch.cat([input_ids[:, 1:], logits[:, -1:].argmax(-1).to(input_ids.device)], 1)
        own = copy.copy(self)
        own.cache = DraftCache(self.network.num_layers, 1, input_ids.device)
        own._root = own._block = own._level = own._graphs = None
        own._run_committed(Rows(after, seen[0], [after.shape[1]]))
        return [int(after[:, -1]), *own.chain_after(after[:, -1:])]
