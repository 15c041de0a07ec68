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
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_spec.core.buckets import bucket
from hf_spec.core.transfer import to_device
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult
from hf_spec.drafting.draft_cache import DraftCache, Rows, committed, whole
from hf_spec.drafting.forward_drafter import ForwardDrafter, GrowOptions
from hf_spec.drafting.grow import Frontier, extended
from hf_spec.drafting.state import DecodeState
from hf_spec.model.hidden_states import Reads, captured, gather_hidden
from hf_spec.model.programs import DraftProgram
from hf_spec.modeling_patches.per_call import Changes

#: From the batch size and n, rows that draft n further tokens in one forward (P-EAGLE): ``(batch,
#: n)`` tokens, and ``(batch, n, hidden)`` what they take of states.
MaskRows = Callable[[int, int], tuple[Tensor, Tensor]]


class DraftNetwork(ABC):
    """The decoder.

    Attributes:
        model: what it drafts for.
        num_layers: of its cache.
        token_ids: ``(tokens,)`` ids, ascending, that it predicts; None for all.
        compiles: whether its forward can be compiled: whether it depends on the cache's tensors
            and the arguments alone.
        own: its tensors that are not the model's.
        windows: of its layers with a sliding window, see :class:`DraftCache`.
        masks: rows that draft all further tokens in one forward; None: each of these needs a
            forward, with the output of the one before.
    """

    model: Any
    num_layers: int
    token_ids: Tensor | None = None
    compiles: bool = True
    own: Sequence[Tensor] = ()
    windows: Mapping[int, int] = {}
    masks: MaskRows | None = None

    @abstractmethod
    def features(self, states: Tensor) -> Tensor:
        """``(batch, n, hidden)`` what a row takes of the target's states ``(batch, n, features)``,
        which are those of :attr:`Drafter.reads`."""

    @abstractmethod
    def run(self, tokens: Tensor, hidden: Tensor, rows: Rows, cache: Any) -> tuple[Tensor, Tensor]:
        """Forward of some rows, whose keys and values it writes into the cache.

        Args:
            tokens: ``(batch, n)`` int64
            hidden: ``(batch, n, hidden)`` :meth:`features`, or outputs of the rows before.
            rows: where they stand, and what they see.
            cache: takes ``update(keys, values, layer)``, which returns those of all slots.

        Returns:
            ``(batch, n, hidden)`` states that :meth:`logits` reads, and those that the next row
            takes.
        """

    def run_true(
        self, tokens: Tensor, hidden: Tensor, before: Tensor | None, rows: Rows, cache: Any
    ) -> tuple[Tensor, Tensor]:
        """:meth:`run` of rows that follow each other and take the target's states.

        Args:
            hidden: ``(batch, n, hidden)`` :meth:`features`.
            before: ``(batch, 1, ...)`` what the row before the first one has returned for the next;
                None if there is none.
        """
        return self.run(tokens, hidden, rows, cache)

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """``(..., tokens)`` of states ``(..., hidden)``."""


class AutoregressiveDrafter(ForwardDrafter):
    """A :class:`ForwardDrafter` with a :class:`DraftNetwork`.

    Args:
        reads: the target's states that the network reads, of committed tokens.
    """

    per_row = ("_root",)

    def __init__(
        self, model: Any, options: GrowOptions, network: DraftNetwork, reads: Reads,
        key: tuple[Hashable, ...],
    ):  # fmt: skip
        super().__init__(model, options, key)
        self.network, self.reads, self.token_ids = network, reads, network.token_ids
        if not network.compiles:
            self.outside = "the drafter's logits are a forward of the model's"
        #: What :meth:`DraftNetwork.run` returned of each sequence's last true row, the root's.
        self._root: tuple[Tensor, Tensor] | None = None

    def start(self, state: DecodeState) -> None:
        super().start(state)
        graphs = state.target.graphs if self.network.compiles else None
        if graphs is not None:
            graphs.hold(self.network.own)
        self.cache = DraftCache.beside(state, self.network, state.root.device, graphs)

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        """Run true rows and keep what the last one of each sequence says."""
        if hidden is None:
            return
        network, cache = self.network, self.cache
        for tokens, states, counts, known in committed(result, hidden):
            rows = cache.open(Tree.chain(tokens))
            before = None if self._root is None else self._root[1]
            found = network.run_true(tokens, network.features(states), before, rows, cache)
            cache.keep(counts, known)
            if known is not None:
                counts = to_device(known, counts.device)
            last = (counts - 1).clamp(min=0)[:, None]
            states, after = (gather_hidden(one, last) for one in found)
            if self._root is not None and not (known and all(known)):
                new = counts[:, None, None] > 0
                states = torch.where(new, states, self._root[0])
                after = torch.where(new, after, self._root[1])
            self._root = states, after

    def program(self, state: DecodeState, tree: Tree, grows: bool) -> DraftProgram | None:
        if self._root is None:
            return None
        levels = self.num_levels(state, grows)
        self.cache.reserve(bucket(tree.num_tokens) + levels * self.width)
        return self.grows(state, tree, self.num_grown, levels, self.width)

    def level(self, frontier: Frontier) -> Tensor:
        assert self._root is not None
        if not frontier.depth:
            return self.network.logits(self._root[0])
        before = self._root[1] if self._after is None else self._after
        hidden = gather_hidden(before, frontier.parents)
        self._block, first = extended(self._block, frontier)
        cache = self.cache
        rows = cache.open(self._block, first)
        found = self.network.run(self._block.tokens[:, first:], hidden, rows, cache)
        states, self._after = found
        return self.network.logits(states)

    # -- stock assisted decoding -------------------------------------------------------------

    def chain(self, input_ids: Tensor) -> list[int]:
        changes = Changes()
        seen = captured(self.model, changes, self.reads.layers)
        logits = changes.run(self.model, input_ids, use_cache=False).logits
        after = torch.cat([input_ids[:, 1:], logits[:, -1:].argmax(-1).to(input_ids.device)], 1)
        own = copy.copy(self)
        own.cache = DraftCache(self.network.num_layers, 1, input_ids.device)
        own._root = own._block = own._after = None
        own.advance(whole(after), seen[0])
        return [int(after[:, -1]), *own.chain_after(after[:, -1:])]
