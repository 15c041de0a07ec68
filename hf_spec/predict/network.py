"""Predictors that run a forward of their own for each level of a tree, and their KV cache."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from hf_spec.cache.attention import AttentionStates
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.checks import MAX_DRAFT_TOKENS, count, setting
from hf_spec.core.device import bucket, to_device
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.draft.grow import Children, Frontier, extended
from hf_spec.draft.options import ADAPTIVE, CHAIN, DraftOptions
from hf_spec.draft.policy import DEPTH, LevelCost
from hf_spec.draft.predictor import FORWARDS, DecodeState, Predictor
from hf_spec.modeling_patches.attention_masks import runs_kernel
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.target.graphs import Graphs
from hf_spec.target.hidden_states import Reads, captured, gather_hidden
from hf_spec.target.noise import as_sampled
from hf_spec.target.target import Slots


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


class LevelPredictor(Predictor):
    """Predicts level by level; each level is one forward on the likeliest nodes of the one before
    (EAGLE-2, section 4.1).

    It may have a KV ``cache``, which goes back to what is committed when a tree has grown. What
    else :meth:`level` keeps of the nodes of a level, such as their states, the next level finds by
    ``frontier.parents`` and :meth:`finish` discards. ``chain`` may end in :meth:`chain_after`.

    Args:
        options: a :class:`GrowOptions`.
        key: the drafter, its adapter and options: what is learned of its drafts is kept by it.

    Attributes:
        runs: :data:`FORWARDS` if levels are forwards of a model or decoder, :data:`MODULES` if of a
            few modules.
    """

    trees = {CHAIN: None}
    runs = FORWARDS
    level_cost = LevelCost.EACH
    width: int

    def __init__(self, model: Any, options: GrowOptions, key: tuple[Hashable, ...]):
        super().__init__(model, options)
        self.depth, self.key = options.max_depth or DEPTH, key
        self.width = 1 if options.tree == CHAIN else options.width
        self._block: Tree | None = None  # the drafted nodes
        self._after: Tensor | None = None  # (batch, n, hidden) what rows after the last level take

    @abstractmethod
    def level(self, frontier: Frontier) -> Tensor:
        """``(batch, nodes, tokens)`` logits of what follows each node of a frontier: of all tokens,
        or of :attr:`token_ids`. At depth 0 the frontier is the roots, whose states :meth:`advance`
        was given; else ``frontier.parents`` says which node of the frontier before is above each.
        """

    def levels(self, root: Tensor, depth: int, width: int, noise: Tensor | None) -> Levels:
        return Levels(self, width, noise)

    def finish(self) -> None:
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


@dataclass
class Levels:
    """The levels of a tree; see :class:`hf_spec.draft.grow.Expands`.

    Attributes:
        predictor: runs forwards.
        width: children of a node, at most; one in a chain.
        noise: see :meth:`Predictor.levels`.
    """

    predictor: LevelPredictor
    width: int
    noise: Tensor | None

    def expand(self, frontier: Frontier) -> Children:
        predictor, depth = self.predictor, frontier.depth
        predictor.forwards += predictor.level_cost is LevelCost.EACH or not depth
        logits, ids = predictor.level(frontier).float(), predictor.token_ids
        if self.noise is not None:
            logits = as_sampled(logits, self.noise[:, depth, None].to(logits))
        best = logits.topk(min(1 if predictor.width == 1 else self.width, logits.shape[-1]))
        log_probs = best.values - logits.logsumexp(-1, keepdim=True)
        tokens = best.indices if ids is None else ids[best.indices]
        # Nothing is drafted from logits that have overflowed.
        return Children(tokens, log_probs.masked_fill(log_probs.isnan(), -torch.inf))


# --------------------------------------------------------------------------------------------------
# Drafts with a small decoder of its own that reads the target's hidden states: EAGLE-3, MTP.
#
# A row of the decoder is a token and the target's states of the token *before* it; where the target
# has not been, the decoder's own output takes the place of these states. After a step, the cache
# goes back to true rows, and those of the accepted tokens run anew, with true states (Li et al.,
# "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
# 2025, section 3.1).

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


class NetworkPredictor(LevelPredictor):
    """A :class:`LevelPredictor` with a :class:`DraftNetwork`.

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

    def ready(self, tree: Tree, grows: bool) -> bool:
        return self._root is not None

    def reserve(self, tree: Tree, levels: int) -> None:
        self.cache.reserve(bucket(tree.num_tokens) + levels * self.width)

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


# -- The KV cache of a drafter that runs committed tokens itself, and what its rows see there ------

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
