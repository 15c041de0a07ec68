"""The target model: it runs on the nodes of trees after the cached tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_spec.cache.attention import AttentionStates, bounded
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.checks import first_line
from hf_spec.core.device import FollowsRows, Ragged, is_async, to_device
from hf_spec.core.pruning import Pruning, keep_likely
from hf_spec.core.tree import Tree, filled, packed_mask, ring_places, since, tree_mask
from hf_spec.core.verify import HostResult, StepResult, VerifyProgram
from hf_spec.modeling_patches.attention_masks import Local, TreeAttention
from hf_spec.modeling_patches.forwards import (
    Choose,
    DynamicRope,
    averaged_exits,
    early_pruning,
    learned_embeddings,
    rope_ends,
)
from hf_spec.modeling_patches.linear_attention import Running, tree_recurrences
from hf_spec.modeling_patches.low_rank import LowRank
from hf_spec.modeling_patches.modules import (
    CACHE,
    only_logits,
    takes,
)
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.modeling_patches.weights import Ranks, placement
from hf_spec.target.graphs import TOLERANCE, DraftProgram, Graphs, difference
from hf_spec.target.hidden_states import (
    NO_STATES,
    Predicted,
    Read,
    Reads,
    captured,
    gather_hidden,
)
from hf_spec.threads import memory

# -- The nodes of a tree that one forward runs over, and where slots stand for their mask ----------


class Block(NamedTuple):
    """Some nodes of a tree."""

    tree: Tree
    tokens: Tensor  # (batch, n) token ids, then indices of probes' embeddings
    depths: Tensor  # (batch, n)
    visible: Tensor  # (batch, n, nodes) bool, which of the tree's nodes each of them sees

    @classmethod
    def of(cls, tree: Tree, nodes: slice | Tensor = slice(None)) -> Block:
        """These nodes, or ``(n,)`` indices of nodes, of a tree. Its probes must be among them."""
        return cls(tree, tree.tokens[:, nodes], tree.depths[:, nodes], tree.ancestors[:, nodes])

    @property
    def ids(self) -> Tensor:
        """``(batch, tokens)`` the nodes with token ids."""
        return self.tokens[:, : self.tokens.shape[1] - self.tree.num_probes]

    @property
    def kinds(self) -> Tensor:
        """``(batch, probes)`` the index of each probe's embedding."""
        return self.tokens[:, self.tokens.shape[1] - self.tree.num_probes :]


def slot_positions(lengths: Tensor, at_nodes: Tensor, held: Tensor) -> Tensor:
    """Position of every slot, counted from each row's first token: ``(batch, keys)``.

    Args:
        lengths: ``(batch,)`` tokens before a tree.
        at_nodes: ``(batch, nodes)`` positions of its nodes.
        held: ``(batch or 1, keys)`` the token that each slot holds. Those after the tree continue
            counting.
    """
    node = held - lengths[:, None]
    in_tree = (node >= 0) & (node < at_nodes.shape[1])
    at_node = at_nodes.gather(1, node.clamp(0, at_nodes.shape[1] - 1))
    return torch.where(in_tree, at_node, held)


def first_near(local: Local, queries: Tensor) -> Tensor:
    """The first position that local attention sees from each of these: ``(batch, query)``."""
    if local.chunked:
        return queries // local.size * local.size
    return queries - local.size + 1


class Slots(NamedTuple):
    """What attention of some layers sees slots of, while a tree's nodes are behind the tokens.

    Attributes:
        held: ``(batch or 1, slots)`` the token or node in each, see :func:`ring_places`.
        is_ring: whether they are not in this order.
    """

    held: Tensor
    is_ring: bool

    @classmethod
    def of(
        cls, states: AttentionStates, lengths: Tensor, nodes: int, keys: int,
        window: int | None = None,
    ) -> Slots:  # fmt: skip
        """Those of layers with this window.

        Args:
            lengths: ``(batch,)`` tokens before the tree, which has so many nodes.
            keys: slots of layers without a window that attention sees.
        """
        slots = min(keys, states.slots(window))
        if slots < keys:
            return cls(ring_places(lengths + nodes, slots), True)
        return cls(torch.arange(keys, device=lengths.device)[None], False)

    def mask(
        self, visible: Tensor, lengths: Tensor, packed: bool, begin: Tensor | None = None,
        at_nodes: Tensor | None = None, learned: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The mask of nodes: ``(batch, 1, query, slots)`` bool, True = attend; or a packed one.

        Args:
            visible: ``(batch, query, nodes)`` bool, which of the tree's nodes each sees.
            lengths: ``(batch,)`` tokens before the tree, which all see.
            packed: see :func:`packed_mask`.
            begin: ``(batch, query)`` the first position that each sees; None: all.
            at_nodes: ``(batch, nodes)`` positions of all nodes, with ``begin``.
            learned: ``(batch, query, n)`` bool, what each sees of slots in front.
        """
        if packed and not self.is_ring:
            if begin is not None:
                assert at_nodes is not None
                visible = visible & since(begin, at_nodes)[:, 0]
            return packed_mask(visible, lengths, begin, learned)
        if visible.shape[1:] == (1, 1):  # a plain step: its token is behind the prefix
            made = (self.held <= lengths[:, None])[:, None, None]
        else:
            made = tree_mask(visible, lengths, self.held)
        if begin is not None:
            assert at_nodes is not None
            made &= since(begin, slot_positions(lengths, at_nodes, self.held))
        if learned is not None:
            made = torch.cat([learned[:, None], made], dim=3)
        if packed:  # a ring, whose slots are bits
            return packed_mask(visible[:, :, :0], torch.zeros_like(lengths), front=made[:, 0])
        return made


# -- What a method has learned for its probes, as inputs of a forward ------------------------------


@dataclass(frozen=True)
class ProbeInputs:
    """A method's learned inputs for its probes.

    Attributes:
        embeddings: ``(kinds, hidden)`` input embedding of each probe of a group.
        front: per layer, keys and values ``(kv_heads, slots, head_dim)`` that only probes see.
        front_seen: ``(kinds, slots)`` bool, which of these slots each kind sees; None for all.
        exits: number of last layers whose hidden states are averaged for probes.
        update: update of the model's modules that applies only to probes, not to tokens.
    """

    embeddings: Tensor
    front: Sequence[tuple[Tensor, Tensor]] = ()
    front_seen: Tensor | None = None
    exits: int = 1
    update: LowRank | None = None

    @property
    def num_front(self) -> int:
        return self.front[0][0].shape[1] if self.front else 0

    def sees_front(self, kinds: Tensor) -> Tensor:
        """Which front slots probes of these kinds see: ``(*kinds.shape, slots)`` bool."""
        if self.front_seen is None:
            return torch.ones((*kinds.shape, self.num_front), dtype=torch.bool, device=kinds.device)
        return self.front_seen.to(kinds.device)[kinds]


# -- The target model's forward over the nodes of a tree, after the tokens of the KV cache ---------
#
# Builds positions and mask, opens the cache's block and calls the model. This module knows models
# and caches, but not drafting, acceptance or generation options.


class Output(NamedTuple):
    """Outputs of a forward.

    Attributes:
        tree: the forwarded tree without what was pruned.
        logits: ``(batch, tokens, vocab)`` after each node with a token, or each requested one, in
            the model's dtype; ``(1, tokens, vocab)`` where padding is left out.
        hidden: ``(batch, nodes, features)`` hidden states of the forwarded nodes, those of probes
            last; None if none are read.
        result: the step's result if its :class:`VerifyProgram` was compiled, too; the accepted
            nodes are then in the first slots after each row's tokens, and there are no logits.
        program_outputs: what the step's :class:`DraftProgram` has found, if the same code ran it;
            there are then no hidden states either.
        ragged: the nodes, where padding is left out of the logits.
    """

    tree: Tree
    logits: Tensor
    hidden: Tensor | None = None
    result: StepResult | None = None
    program_outputs: Sequence[Tensor] = ()
    ragged: Ragged | None = None

    def read(self, reads: Reads, result: StepResult) -> Read:
        """What a drafter reads of the forward, given its result."""
        predicted = None
        if reads.predicted:
            predicted = Predicted.of(self.tree.without_probes, self.logits, self.ragged).packed()
        return Read(self._states(reads, result), predicted)

    def _states(self, reads: Reads, result: StepResult) -> Tensor | None:
        """See :meth:`Drafter.advance`."""
        hidden, tree = self.hidden, self.tree
        if hidden is None or reads.tokens is None:
            return None
        if reads.tokens == "last":
            return gather_hidden(hidden, result.last[:, None])[:, 0]
        if reads.tokens == "committed":
            return gather_hidden(hidden, result.path)
        return gather_hidden(hidden, tree.probes_of(result.last)) if tree.num_probes else None


@dataclass
class ForwardContext:
    """What changes to the model see of the running forward."""

    tokens: int = 0  # nodes with tokens, which come first
    probes: int = 0  # which follow
    learned: Tensor | None = None  # (batch, probes, hidden) embeddings of these; None without any
    asked: bool = False  # whether the model has asked for these
    logits_at: Tensor | None = None  # (batch, n) nodes to compute logits for; None for all tokens
    choose: Choose | None = None  # chooses which nodes to keep; None to keep all

    def take(self) -> Tensor | None:
        """The embeddings of probes."""
        self.asked = True
        return self.learned

    def wanted(self, hidden: Tensor) -> Tensor:
        """The states that logits are computed from."""
        if self.logits_at is None:
            # PyTorch's product copies the whole weight for each row of a part of a tensor.
            return hidden[:, : self.tokens].contiguous()
        return gather_hidden(hidden, self.logits_at)


#: In the memory of a model: whether forwards without padding give the same.
UNPADS = "unpads"
#: And how the model ran when that was found.
_RAN = "unpads as it ran"
logger = logging.getLogger(__name__)


def runs_as(model: Any, running: Hashable) -> None:
    """Note how a model runs in a call; what an earlier one told of forwards without padding is
    forgotten if it ran otherwise, with other hooks or modules."""
    known = memory(model)
    if known.setdefault(_RAN, running) != running:
        known[_RAN] = running
        for several in (False, True):
            known.pop((UNPADS, several), None)


class Target(FollowsRows):
    """Runs ``model`` on trees; created once per ``generate()`` call.

    Args:
        model: the causal language model.
        cache: the KV cache.
        last_position: ``(batch,)`` larger positions are clamped to this one: deeper nodes exceed
            the call's budget and are never accepted, but learned position tables are finite.
        position_shift: ``(axes, batch)`` position of a new token minus the number of tokens before
            it; None for 0, the value unless the caller passed position ids. One axis, but for a
            model that rotates by several positions per token, which differ after an image; the
            first one counts for windows.
        model_kwargs: further arguments for the model's forward.
        per_token: ``(batch, 1, ...)`` further arguments by name with one value per token.
        probe_inputs: embeddings and states of the method's probes, if it has any.
        reads: the hidden states to return, besides those of probes.
        beside: the model that an assistant drafts for, see :class:`TreeAttention`.
    """

    #: Compiled code for its forwards, if they are compiled.
    graphs: Graphs | None = None
    of_rows = ("last_position", "position_shift", "axes", "per_token", "row_kwargs")

    def __init__(
        self, model: Any, cache: TreeCache, last_position: Tensor,
        position_shift: Tensor | None = None, model_kwargs: dict[str, Any] | None = None,
        per_token: dict[str, Tensor] | None = None, probe_inputs: ProbeInputs | None = None,
        reads: Reads = NO_STATES, beside: Any = None,
    ):  # fmt: skip
        self.model = model
        self.cache = cache
        self.attention = TreeAttention(model, beside=beside)
        self._running = Running()
        if cache.recurrent is not None:
            tree_recurrences(model, self.attention.changes, self._running)
        self.last_position = last_position[:, None]
        none = torch.zeros_like(self.last_position)
        shift = none[None] if position_shift is None else position_shift[:, :, None]
        self.position_shift = shift[0]
        #: ``(batch, axes, 1)`` what each rotary axis adds to the first; None if there is one.
        self.axes = (shift - shift[0]).transpose(0, 1).contiguous() if len(shift) > 1 else None
        given = model_kwargs or {}
        #: As in Transformers, a tensor is per row if its first dimension is the batch size.
        self.row_kwargs: dict[str, Tensor] = {
            name: value
            for name, value in given.items()
            if isinstance(value, Tensor) and value.shape[:1] == last_position.shape
        }
        others = {name: value for name, value in given.items() if name not in self.row_kwargs}
        self.model_kwargs = {**others, **only_logits(model, given)}
        self.per_token = per_token or {}
        self.takes_positions = takes(model, "position_ids")
        self.device, self.dtype = placement(model)
        self.probe_inputs = probe_inputs
        self.num_front = 0
        self.reads = reads
        self._changes = self.attention.changes
        #: For models whose rotary frequencies follow the longest sequence.
        self.rope = DynamicRope(model, self._changes) if rope_ends(model) else None
        #: The same, with the changes that read hidden states and prune; created on first use.
        self._watching: tuple[Changes, list[Tensor]] | None = None
        self._context, self._prunes = ForwardContext(), False
        self.probe_embeddings: Tensor | None = None
        #: ``(kinds, slots)`` bool, which front slots each kind of probe sees.
        self.front_seen: Tensor | None = None
        if probe_inputs is not None:
            self.probe_embeddings = bounded(probe_inputs.embeddings.to(self.device, self.dtype))
            self.num_front = probe_inputs.num_front
            if self.num_front:
                cache.states.set_front(probe_inputs.front, Ranks(model).own_heads)
                kinds = torch.arange(len(probe_inputs.embeddings), device=cache.lengths.device)
                self.front_seen = probe_inputs.sees_front(kinds)

    def __call__(
        self, tree: Tree, first: int = 0, pruning: Pruning | None = None,
        changes: Changes | None = None, logits_at: Tensor | None = None,
        verify: VerifyProgram | None = None, after: DraftProgram | None = None,
    ) -> Output:  # fmt: skip
        """Run the tree's nodes ``first ..``.

        Args:
            tree: the tree of each row; nodes before ``first`` were forwarded earlier in this step.
            first: first node to forward.
            pruning: drops nodes and their probes midway; not with ``first``.
            changes: other changes to the model in this forward, such as skipped layers.
            logits_at: ``(batch, n)`` forwarded nodes whose logits are needed, for prompts; such a
                forward is not compiled and has none of the three before. None for all nodes.
            verify: how the step ends; compiled code then does that, too. Not with ``first``.
            after: what the same code does then if it is recorded.
        """
        front = self.num_front if tree.num_probes else 0
        whole = first == 0 and changes is None and pruning is None and logits_at is None
        ragged = tree.ragged() if whole and self.unpads and tree.is_ragged else None
        if ragged is not None and self._unpads not in memory(self.model):
            if ragged.differs:
                return self._tried(tree, ragged)
            ragged = None  # a model that mixes up the two might run, too
        keys = self.cache.begin(tree, first, front > 0, changes is None, ragged)
        if pruning is not None and tree.num_tokens > 1:
            return self._pruned(tree, keys, pruning)
        if logits_at is None and self.rope is None:
            return self.step(tree, first, keys, changes, verify, after)
        return self.forward(Block.of(tree, slice(first, None)), keys, changes, logits_at)

    def step(
        self, tree: Tree, first: int, keys: int, changes: Changes | None,
        verify: VerifyProgram | None, after: DraftProgram | None,
    ) -> Output:  # fmt: skip
        """:meth:`forward` of a tree's nodes ``first ..``; the arguments as of :meth:`__call__`."""
        return self.forward(Block.of(tree, slice(first, None)), keys, changes)

    def forward(
        self, block: Block, keys: int, changes: Changes | None = None,
        logits_at: Tensor | None = None,
    ) -> Output:  # fmt: skip
        """The whole forward over an open block, on tensors only, so that it can be traced.

        Args:
            keys: number of slots that attention sees, without the front slots.
            changes, logits_at: see :meth:`__call__`.
        """
        tree, inputs, ragged = block.tree, self._inputs(block, keys), self.attention.ragged
        if changes is not None:
            return Output(tree, self._changes.run(changes.run, self.model, **inputs).logits)
        if not self.reads_hidden(tree) and logits_at is None:
            logits = self._changes.run(self.model, **inputs).logits
            return Output(tree, logits, ragged=ragged)
        tokens = inputs["input_ids"].shape[1] - tree.num_probes
        watching, seen = self._watched(tokens, tree.num_probes, logits_at)
        logits = watching.run(self.model, **inputs).logits
        context = self._context
        if context.learned is not None and not context.asked:
            raise ValueError(
                f"{type(self.model).__name__} does not call its input embeddings, where those of "
                "probes would stand: choose a strategy without probes."
            )
        hidden = seen.pop()[:, : context.tokens + context.probes]
        return Output(tree, logits, hidden if ragged is None else ragged.pad(hidden), ragged=ragged)

    @property
    def unpads(self) -> bool:
        """Whether padding of trees that are smaller than others is left out of forwards: the layers
        see the nodes of all rows as one row, but for attention. A first forward tells whether the
        model gives the same then; this is True before.

        Not on a device that the host runs ahead of: there, launching what it takes in each layer
        would cost more than the padding of a few nodes.
        """
        rows = self.row_kwargs or self.per_token or self.cache.recurrent
        able = self.takes_positions and self.attention.takes_ragged and self.graphs is None
        if not able or rows or is_async(self.device):
            return False
        return bool(memory(self.model).get(self._unpads, True))

    @property
    def _unpads(self) -> Hashable:
        """Under what it is known whether the model gives the same; one row does not tell of
        several."""
        return UNPADS, self.cache.batch_size > 1

    def _tried(self, tree: Tree, ragged: Ragged) -> Output:
        """A forward with padding, and whether one without it gives the same."""
        found, why = None, None
        try:
            found = self.forward(Block.of(tree), self.cache.begin(tree, ragged=ragged))
        except Exception as error:  # of any kind: the model's code is not known
            why = first_line(error)
        output = self.forward(Block.of(tree), self.cache.begin(tree))
        if found is not None:
            pairs = [(ragged.unpad(output.logits), found.logits)]
            if output.hidden is not None and found.hidden is not None:
                pairs.append((ragged.unpad(output.hidden), ragged.unpad(found.hidden)))
            why = difference(TOLERANCE[self.dtype], *zip(*pairs))
        memory(self.model)[self._unpads] = why is None
        if why is not None:
            logger.info("%s: trees keep their padding: %s", type(self.model).__name__, why)
        return output

    def reads_hidden(self, tree: Tree) -> bool:
        """Whether hidden states of a tree are returned."""
        return self.reads.nodes or tree.group is not None

    @property
    def prepared(self) -> int:
        """Grows in steps that prepare later ones, and so take longer."""
        return 0

    def details(self) -> dict[str, Any]:
        """Entries for ``SpecStats.details``."""
        return {}

    def _inputs(self, block: Block, keys: int) -> dict[str, Any]:
        lengths, recurrent = self.cache.lengths, self.cache.recurrent
        if recurrent is not None:
            self._running.states = recurrent
        positions = torch.minimum(
            lengths[:, None] + self.position_shift + block.depths, self.last_position
        )
        no_keys = recurrent is not None and self.cache.states.is_empty
        ragged = self.cache.block.ragged if self.cache.block else None
        self.attention.ragged = ragged
        # One row has no others, and recorded code reads nothing.
        several = len(lengths) > 1 and self.graphs is None
        self.attention.divides = several and not is_async(self.device)
        inputs: dict[str, Any] = {
            **self.model_kwargs,
            **self.row_kwargs,
            **{
                name: value.expand(-1, positions.shape[1], *value.shape[2:])
                for name, value in self.per_token.items()
            },
            "attention_mask": None if no_keys else self._mask(block, keys, positions),
            CACHE: self.cache,
            "use_cache": True,
            "return_dict": True,
        }
        if self.takes_positions:
            on_axes = positions if self.axes is None else positions + self.axes.transpose(0, 1)
            if ragged is not None:
                on_axes = on_axes.flatten(-2)[..., None, ragged.real]
            inputs["position_ids"] = on_axes.to(self.device)
        ids, learned = block.ids if ragged is None else ragged.unpad(block.ids), None
        ids = ids.to(self.device)
        if block.tree.num_probes:
            assert self.probe_embeddings is not None
            learned = self.probe_embeddings[block.kinds.to(self.device)]
            ids = pad(ids, (0, block.tree.num_probes))
        self._context.learned, self._context.asked = learned, False
        return inputs | {"input_ids": ids}

    def _mask(self, block: Block, keys: int, positions: Tensor) -> Any:
        """The mask of nodes at these positions ``(batch, n)``, as the model's attention takes it;
        probes see the front slots, too, besides ``keys`` others."""
        attention, cache, lengths = self.attention, self.cache, self.cache.lengths
        # A window as wide as all that is there limits nothing.
        kinds = {
            kind: local if local is not None and local.size < keys else None
            for kind, local in attention.locals.items()
        }
        front = cache.states.front if cache.block and cache.block.front else 0
        learned, visible = None, block.visible
        if front and self.front_seen is not None:
            seen = self.front_seen[block.kinds.to(lengths.device)]
            learned = seen.new_zeros((*positions.shape, front))
            learned[:, -block.tree.num_probes :, front - self.num_front :] = seen
        made: dict[Local | None, Tensor] = {}
        at_queries = at_nodes = positions
        if any(kinds.values()):
            # Counted from each row's first token, whatever positions the caller gave.
            at_queries = positions - self.position_shift
            last = self.last_position - self.position_shift
            at_nodes = torch.minimum(lengths[:, None] + block.tree.depths, last)
        for local in dict.fromkeys(kinds.values()):
            window = None if local is None else local.size
            slots = Slots.of(cache.states, lengths, visible.shape[2], keys, window)
            begin = None if local is None else first_near(local, at_queries)
            made[local] = slots.mask(visible, lengths, attention.packs, begin, at_nodes, learned)
        return attention.convert({kind: made[one] for kind, one in kinds.items()}, self.dtype)

    @property
    def inputs(self) -> Hashable:
        """What its forwards get besides trees: rows of targets where it is equal may be forwarded
        together."""
        others = {
            name: value if isinstance(value, (bool, int, float, str, type(None))) else id(value)
            for name, value in self.model_kwargs.items()
        }
        of_rows = {**self.row_kwargs, **self.per_token}
        shapes = {name: (value.shape[1:], value.dtype) for name, value in of_rows.items()}
        axes = None if self.axes is None else self.axes.shape[1]
        return (*sorted(others.items()), *sorted(shapes.items()), axes)

    def join(self, other: Self) -> None:
        """Take the rows of another target of the model behind these, as their caches have done.

        Raises:
            ValueError: their forwards get other inputs.
        """
        if self.inputs != other.inputs:
            raise ValueError(
                f"rows whose forwards get {other.inputs} cannot join rows whose forwards get "
                f"{self.inputs}."
            )
        super().join(other)

    def _pruned(self, tree: Tree, keys: int, pruning: Pruning) -> Output:
        if self.reads.layers:
            raise ValueError("a drafter that reads the states of layers cannot prune nodes.")
        smaller, context = tree, self._context

        def choose(hidden: Tensor) -> Tensor | None:
            nonlocal smaller
            likely = pruning.likely(hidden[:, : tree.num_tokens], tree.without_probes)
            found = keep_likely(tree, *likely)
            if found is None:
                return None
            smaller, rows = found
            self.cache.narrow(rows)
            context.tokens, context.probes = smaller.num_tokens, smaller.num_probes
            return rows

        inputs = self._inputs(Block.of(tree), keys)
        changes, seen = self._watched(tree.num_tokens, tree.num_probes)
        if not self._prunes:
            # After averaged exits, which must see the last layer's output first.
            early_pruning(
                self.model, changes, pruning.layer,
                lambda hidden: None if context.choose is None else context.choose(hidden),
            )  # fmt: skip
            self._prunes = True
        context.choose = choose
        try:
            logits = changes.run(self.model, **inputs).logits
        finally:
            context.choose = None  # break the reference cycle
        return Output(smaller, logits, seen.pop()[:, : context.tokens + context.probes])

    def _watched(
        self, tokens: int, probes: int, logits_at: Tensor | None = None
    ) -> tuple[Changes, list[Tensor]]:
        """Changes for forwards that return more than logits, and the list of final states."""
        context = self._context
        context.tokens, context.probes, context.logits_at = tokens, probes, logits_at
        if self._watching is None:
            changes, inputs = Changes().update(self._changes), self.probe_inputs
            if inputs is not None:
                learned_embeddings(self.model, changes, context.take)
                averaged_exits(self.model, changes, inputs.exits, lambda: context.tokens)
                if inputs.update is not None:
                    inputs.update.add_to(
                        changes, lambda: (context.tokens + context.probes, context.probes)
                    )
            seen = captured(self.model, changes, self.reads.layers, context.wanted)
            self._watching = changes, seen
        return self._watching


# -- Tokens appended to a ``TreeCache`` by chunks; their number may differ between rows ------------

#: New tokens per forward; bounds the size of the explicit mask.
CHUNK = 256

#: The same with recurrent layers, some of whose rules hold a vector for each pair of tokens.
RECURRENT_CHUNK = 64


@dataclass
class Prefilled:
    """State after the prompt.

    Attributes:
        target: runs trees over ``target.cache``.
        logits: ``(batch, vocab)`` after the last prompt token.
        hidden: what the drafter reads of the prompt, see :meth:`Drafter.advance`; None if nothing.
        following: of each row, the prompt's tokens after the first one whose state is read; none
            where only the last one's is read.
    """

    target: Target
    logits: Tensor
    hidden: Tensor | None
    following: list[list[int]]

    def committed(self, result: StepResult) -> StepResult:
        """The prompt as a result, given that of a step whose tree was the prompt's last token."""
        device, rows = result.tokens.device, [[*row, 0] for row in self.following]
        counts = to_device(list(map(len, rows)), device)
        tokens = to_device(filled(rows), device).scatter(
            1, counts[:, None] - 1, result.bonus[:, None]
        )
        path = torch.arange(tokens.shape[1], device=device).expand(len(rows), -1)
        probes = torch.zeros_like(counts)
        host = HostResult([range(len(row)) for row in rows], self.following, [0] * len(rows))
        return StepResult(path, counts, tokens, probes, counts - 1, result.bonus, host)


def append(
    target: Target, rows: list[list[int]], most: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> Prefilled:  # fmt: skip
    """Forward and keep new tokens after each row; their number may differ between rows.

    Args:
        most: tokens of each row that run at once.
        between: called between two forwards.

    Returns:
        The outputs at the last tokens of the rows that have new tokens.
    """
    cache, device, reads = target.cache, target.cache.lengths.device, target.reads
    at_once = min(CHUNK if cache.recurrent is None else RECURRENT_CHUNK, most or CHUNK)
    logits: dict[int, Tensor] = {}
    hidden: dict[int, Tensor] = {}
    chunks: list[Tensor] = []
    for start in range(0, max(map(len, rows)), at_once):
        if start:
            between()
        parts = [row[start : start + at_once] for row in rows]
        tokens = to_device(filled(parts), device)
        last = to_device([max(len(part) - 1, 0) for part in parts], device)
        ended = [row for row, new in enumerate(rows) if start < len(new) <= start + at_once]
        output = target(Tree.chain(tokens), logits_at=last[:, None])
        cache.commit([len(part) for part in parts])
        logits |= {row: output.logits[row, 0] for row in ended}
        states = output.hidden
        if states is None:
            continue
        if reads.tokens == "last":
            hidden |= {row: states[row, last[row]] for row in ended}
        elif reads.tokens == "committed":
            chunks.append(states)
    stacked = _in_order(logits)
    if chunks:
        following = [row[1:] for row in rows]
        return Prefilled(target, stacked, torch.cat(chunks, dim=1), following)
    return Prefilled(target, stacked, _in_order(hidden) if hidden else None, [[]] * len(rows))


def _in_order(by_row: dict[int, Tensor]) -> Tensor:
    return torch.stack([by_row[row] for row in sorted(by_row)])
