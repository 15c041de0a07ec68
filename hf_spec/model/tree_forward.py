"""One forward pass over nodes of a tree, behind what the cache holds.

Builds positions and mask, opens the cache's block and calls the model. Knows models and caches;
knows nothing of drafting, acceptance or generation options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_spec.core import mask as masks
from hf_spec.core.cache import TreeCache, bounded
from hf_spec.core.probes import ProbeRows
from hf_spec.core.pruning import Survivors, survive
from hf_spec.core.tree import TreeBatch
from hf_spec.model.hidden_states import embedded, final_hidden, taken
from modeling_patches.attention_masks import TreeAttention
from modeling_patches.dynamic_rope import Reach
from modeling_patches.early_pruning import Choose, early_pruning
from modeling_patches.exits import averaged_exits
from modeling_patches.low_rank import LowRank
from modeling_patches.per_call import Changes, eager
from modeling_patches.ranks import Ranks


@dataclass(frozen=True)
class ProbeInputs:
    """What a method has learned for its probes.

    Attributes:
        embeddings: ``(kinds, hidden)`` input embedding of each probe of a group.
        front: per layer, keys and values ``(kv_heads, slots, head_dim)`` that only probes see.
        front_seen: ``(kinds, slots)`` bool, which of these slots each kind sees; None: all.
        exits: last layers whose hidden states are averaged in the probes' rows.
        update: of the model's modules, in the probes' rows only; those of tokens stay as they are.
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
        """What probes of these kinds see in front: ``(*kinds.shape, slots)`` bool."""
        if self.front_seen is None:
            return torch.ones((*kinds.shape, self.num_front), dtype=torch.bool, device=kinds.device)
        return self.front_seen.to(kinds.device)[kinds]


class Pruning(Protocol):
    """Chooses the nodes that deeper layers don't see (ProPD, section 4.1)."""

    @property
    def layer(self) -> int:
        """Layers that run on all nodes."""

    def alive(self, hidden: Tensor, tokens: Tensor, tree: TreeBatch) -> Tensor:
        """The nodes that stay, with all their ancestors: ``(batch, nodes)`` bool.

        Args:
            hidden: ``(batch, nodes, hidden)`` behind these layers.
            tokens: ``(batch, nodes)``.
            tree: the tree of each row.
        """


class TreeOutput(NamedTuple):
    """What a forward gives, of the nodes that it forwarded and did not prune.

    Attributes:
        logits: ``(batch, nodes, vocab)`` after each forwarded node, in the model's dtype.
        probe_hidden: ``(batch, probes, hidden)`` final hidden state of each probe; None without
            probes. :func:`output_logits` makes logits of the few that are wanted.
        node_hidden: ``(batch, nodes, hidden)`` that of each forwarded node, what the model's output
            embeddings are applied to; None unless it was asked for.
        survivors: what was left of the tree; None if all of it.
    """

    logits: Tensor
    probe_hidden: Tensor | None = None
    node_hidden: Tensor | None = None
    survivors: Survivors | None = None


@dataclass
class _Pass:
    """What changes of the model ask of the forward that runs.

    Attributes:
        nodes: rows that logits are made of; the first.
        probes: rows behind them.
        choose: which rows stay; None: all.
    """

    nodes: int = 0
    probes: int = 0
    choose: Choose | None = None


class TreeForward:
    """Runs ``model`` on tree nodes; made once per ``generate()`` call.

    Args:
        model: the causal language model.
        cache: where keys and values go.
        last_position: ``(batch,)`` positions are cut off here: nodes further down lie past the
            call's budget and are never accepted, but learned position tables end somewhere.
        position_shift: ``(batch,)`` position of a row's first cached token; None: 0, as it is
            unless the caller gave position ids of his own.
        model_kwargs: further arguments for the model's forward.
        probe_inputs: embeddings and states of the method's probes, if it has any.
        wants_hidden: give the nodes' final hidden states, too.
    """

    def __init__(
        self,
        model: Any,
        cache: TreeCache,
        last_position: Tensor,
        position_shift: Tensor | None = None,
        model_kwargs: dict[str, Any] | None = None,
        probe_inputs: ProbeInputs | None = None,
        wants_hidden: bool = False,
    ):
        self.model = model
        self.cache = cache
        self.attention = TreeAttention(model)
        self.last_position = last_position[:, None]
        if position_shift is None:
            position_shift = torch.zeros_like(last_position)
        self.position_shift = position_shift[:, None]
        self.model_kwargs = model_kwargs or {}
        self.takes_positions = "position_ids" in taken(model, position_ids=True)
        self.dtype = model.get_input_embeddings().weight.dtype
        self.device = model.get_input_embeddings().weight.device
        self.probe_inputs = probe_inputs
        self.num_front = 0
        self.wants_hidden = wants_hidden
        self.reach: Reach | None = None
        self._changes, self._call = self.attention.changes, eager(model)
        #: The same, and what looks into the model and prunes; made when first needed.
        self._watching: tuple[Changes, list[Tensor]] | None = None
        self._pass, self._prunes = _Pass(), False
        if probe_inputs is not None:
            self.probe_embeddings = bounded(probe_inputs.embeddings.to(self.device, self.dtype))
            self.num_front = probe_inputs.num_front
            if self.num_front:
                heads, ranks = cache.layers[0].keys.shape[1], Ranks(model)
                cache.set_front(
                    [
                        (ranks.own_heads(keys, heads), ranks.own_heads(values, heads))
                        for keys, values in probe_inputs.front
                    ]
                )

    def __call__(
        self,
        tokens: Tensor,
        tree: TreeBatch,
        first: int = 0,
        probes: ProbeRows | None = None,
        pruning: Pruning | None = None,
        changes: Changes | None = None,
    ) -> TreeOutput:
        """Run the nodes ``first ..`` of the tree and the probes under them.

        Args:
            tokens: ``(batch, nodes)`` of the whole tree.
            tree: the tree of each row; nodes before ``first`` were forwarded earlier in this step.
            first: first node to forward.
            probes: rows to add behind the nodes; made for this tree.
            pruning: leaves out nodes, and probes under them, on the way; not with ``first``.
            changes: what else the model does otherwise in this forward, such as leaving out layers.
        """
        depths, ancestors = tree.depths, tree.ancestors
        if probes is not None:
            depths, ancestors = probes.depths, probes.ancestors
        rows = depths.shape[1]
        front = self.num_front if probes is not None and probes.num_probes else 0
        keys = self.cache.begin(rows - first, offset=first, front=front > 0)
        lengths = self.cache.lengths
        positions = torch.minimum(
            lengths[:, None] + self.position_shift + depths, self.last_position
        )
        inputs: dict[str, Any] = {
            **self.model_kwargs,
            "attention_mask": self._mask(
                ancestors, first, keys, positions, probes if front else None
            ),
            "past_key_values": self.cache,
            "use_cache": True,
            "return_dict": True,
        }
        if self.takes_positions:
            inputs["position_ids"] = positions[:, first:].to(self.device)
        tokens = tokens[:, first:].to(self.device)
        call = self._reaching(tree, first, probes)
        if probes is None:
            inputs["input_ids"] = tokens
            if changes is not None:
                return TreeOutput(changes.run(self._changes.run, call, **inputs).logits)
            if not self.wants_hidden and pruning is None:
                return TreeOutput(self._changes.run(call, **inputs).logits)
        else:
            embeddings = self.model.get_input_embeddings()(tokens)
            learned = self.probe_embeddings[probes.kinds.to(self.device)]
            inputs |= embedded(self.model, torch.cat([embeddings, learned], dim=1), tokens)
        return self._run(call, inputs, tokens, tree, probes, pruning)

    def _reaching(
        self, tree: TreeBatch, first: int, probes: ProbeRows | None
    ) -> Callable[..., Any]:
        """The model, which is told the reach of tokens where its rotary frequencies follow it."""
        if self.reach is None:
            return self._call
        depths, deepest = tree.depths, tree.max_depth
        if probes is not None:
            depths, deepest = probes.depths, deepest + max(probes.group.offsets, default=0)
        lengths = self.cache.host_lengths
        return partial(self.reach.run, self._call, lengths, depths[:, first:], deepest)

    def select(self, rows: Sequence[int]) -> None:
        """Follow the cache, whose row ``i`` is now the one that was ``rows[i]``.

        As everywhere in Transformers, a tensor among the model's inputs has a row per batch row if
        its first dimension is the batch.
        """
        batch = self.last_position.shape[0]

        def own(value: Any) -> Any:
            if isinstance(value, Tensor) and value.ndim and value.shape[0] == batch:
                return value[torch.tensor(rows, device=value.device)]
            return value

        self.last_position, self.position_shift = own(self.last_position), own(self.position_shift)
        if self.reach is not None:
            self.reach.select(rows)
        self.model_kwargs = {name: own(value) for name, value in self.model_kwargs.items()}

    def _run(
        self, call: Callable[..., Any], inputs: dict[str, Any], tokens: Tensor, tree: TreeBatch,
        probes: ProbeRows | None, pruning: Pruning | None,
    ) -> TreeOutput:  # fmt: skip
        """The forward where more than the logits of all rows is wanted, or less."""
        left: Survivors | None = None
        cache, running = self.cache, self._pass
        running.nodes = tokens.shape[1]
        running.probes = 0 if probes is None else probes.num_probes

        def choose(hidden: Tensor) -> Tensor | None:
            nonlocal left
            assert pruning is not None
            alive = pruning.alive(hidden[:, : tokens.shape[1]], tokens, tree)
            left = survive(tree, alive.to(tree.parents.device), probes)
            if left is None:
                return None
            cache.narrow(left.rows)
            running.nodes = left.nodes.shape[1]
            running.probes = left.rows.shape[1] - running.nodes
            return left.rows

        changes, seen = self._watched(pruning)
        running.choose = choose if pruning is not None and tokens.shape[1] > 1 else None
        logits = changes.run(call, **inputs).logits
        running.choose = None  # nothing may hold what it belongs to until it is collected
        hidden = seen[0]
        rest = probes if left is None else left.probes
        behind = None
        if rest is not None:
            behind = hidden[:, running.nodes : running.nodes + rest.num_probes]
        own = hidden[:, : running.nodes] if self.wants_hidden else None
        return TreeOutput(logits, behind, own, left)

    def _watched(self, pruning: Pruning | None) -> tuple[Changes, list[Tensor]]:
        """What forwards run with that give more than logits, and where final states are found."""
        running = self._pass
        if self._watching is None:
            changes = Changes().update(self._changes)

            def nodes() -> int:
                return running.nodes

            if self.probe_inputs is not None:
                averaged_exits(self.model, changes, self.probe_inputs.exits, nodes)
                if self.probe_inputs.update is not None:
                    self.probe_inputs.update.add_to(
                        changes, lambda: (running.nodes + running.probes, running.probes)
                    )
            self._watching = changes, final_hidden(self.model, changes, nodes)
        if pruning is not None and not self._prunes:
            # Behind averaged exits, which must see the last layer's output first.
            early_pruning(
                self.model, self._watching[0], pruning.layer,
                lambda hidden: None if running.choose is None else running.choose(hidden),
            )  # fmt: skip
            self._prunes = True
        return self._watching

    def _mask(
        self, ancestors: Tensor, first: int, keys: int, node_positions: Tensor,
        probes: ProbeRows | None,
    ) -> Any:  # fmt: skip
        """The forward's attention mask over ``keys`` slots for the rows from ``first`` on.

        Where probes are given, the last rows, they see slots in front of the tokens.
        """
        lengths = self.cache.lengths
        batch, rows = node_positions.shape
        visible = masks.or_(
            masks.prefix(lengths), masks.tree_ancestors(ancestors[:, first:], lengths)
        )
        shape = (batch, rows - first, keys, lengths.device)
        full = masks.build(visible, *shape)
        windows = self.attention.windows
        windowed = {size for size in windows.values() if size is not None and size < keys}
        made: dict[int | None, Tensor] = {None: full}
        if windowed or self.attention.wants_positions:
            key_positions = self._key_positions(keys, node_positions)
            query_positions = node_positions[:, first:]
            for size in windowed:
                near = masks.window(size, query_positions, key_positions)
                made[size] = full & masks.build(near, *shape)
            if self.attention.wants_positions:
                if probes is not None:  # they stand where the sequence begins, as in prefix tuning
                    start = self.position_shift.expand(batch, self.cache.front)
                    key_positions = torch.cat([start, key_positions], dim=1)
                self.attention.set_positions(query_positions, key_positions)
        if probes is not None and self.probe_inputs is not None:
            learned = full.new_zeros((batch, 1, rows - first, self.cache.front))
            seen = self.probe_inputs.sees_front(probes.kinds.to(full.device))
            learned[:, 0, -probes.num_probes :, self.cache.front - self.num_front :] = seen
            made = {size: torch.cat([learned, mask], dim=3) for size, mask in made.items()}
            full = made[None]
        return self.attention.convert(
            {kind: made.get(size, full) for kind, size in windows.items()}, self.dtype
        )

    def _key_positions(self, keys: int, node_positions: Tensor) -> Tensor:
        """Token position of every slot: (batch, keys). Slots behind the tree count on."""
        slots = torch.arange(keys, device=node_positions.device)
        node = slots - self.cache.lengths[:, None]
        in_tree = (node >= 0) & (node < node_positions.shape[1])
        at_node = node_positions.gather(1, node.clamp(0, node_positions.shape[1] - 1))
        return torch.where(in_tree, at_node, slots + self.position_shift)
