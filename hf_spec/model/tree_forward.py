"""One forward pass over nodes of a tree, after the cached tokens.

Builds positions and mask, opens the cache's block and calls the model. This module knows models and
caches, but not drafting, acceptance or generation options.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_spec.core import mask as masks
from hf_spec.core import verify
from hf_spec.core.buckets import bucket
from hf_spec.core.cache import TreeCache, bounded
from hf_spec.core.probes import ProbeGroup, ProbeRows
from hf_spec.core.pruning import Survivors, survive
from hf_spec.core.tree import TreeBatch
from hf_spec.core.verify import Accepted
from hf_spec.model.graphs import Graphs
from hf_spec.model.hidden_states import embedded, final_hidden, states_at, taken
from hf_spec.model.slot_cache import Layout, SlotCache
from hf_spec.model.step_tokens import MatchInputs, StepTokens, padded
from modeling_patches.attention_masks import TreeAttention
from modeling_patches.cache_name import CACHE
from modeling_patches.dynamic_rope import Reach
from modeling_patches.early_pruning import Choose, early_pruning
from modeling_patches.exits import averaged_exits
from modeling_patches.low_rank import LowRank
from modeling_patches.per_call import Changes
from modeling_patches.ranks import Ranks
from modeling_patches.weights import placement


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


class Pruning(Protocol):
    """Chooses the nodes that deeper layers drop (ProPD, section 4.1)."""

    @property
    def layer(self) -> int:
        """Number of layers that run on all nodes."""

    def likely(self, hidden: Tensor, tokens: Tensor, tree: TreeBatch) -> tuple[Tensor, Tensor]:
        """The nodes worth keeping, with all their ancestors, and how likely nodes are.

        Args:
            hidden: ``(batch, nodes, hidden)`` after these layers.
            tokens: ``(batch, nodes)``.
            tree: the tree of each row.

        Returns:
            ``(batch, nodes)`` bool, and the log-probabilities of the paths to all nodes. For what
            becomes of them see :func:`hf_spec.core.pruning.survive`.
        """


class Ending(NamedTuple):
    """What a step accepted, and the hidden states that each row continues from, on the device.

    Attributes:
        path, counts, tokens: see :class:`Accepted`.
        hidden: ``(batch, hidden)`` final hidden state of the last accepted node; None unless nodes'
            states were requested.
        probe_hidden: ``(batch, group, hidden)`` those of the probes under it; None without probes.
        probe_sizes: ``(batch,)`` how many of them each row has; the others are arbitrary.
    """

    path: Tensor
    counts: Tensor
    tokens: Tensor
    hidden: Tensor | None = None
    probe_hidden: Tensor | None = None
    probe_sizes: Tensor | None = None

    @classmethod
    def of(cls, accepted: Accepted, output: TreeOutput, probes: ProbeRows | None) -> Ending:
        """Select the ending from a forward's output."""
        last = accepted.last
        hidden = probe_hidden = probe_sizes = None
        if output.node_hidden is not None:
            hidden = states_at(output.node_hidden, last[:, None])[:, 0]
        if probes is not None and probes.num_probes and output.probe_hidden is not None:
            probe_hidden = states_at(output.probe_hidden, probes.under(last))
            probe_sizes = probes.counts.gather(1, last[:, None])[:, 0]
        return cls(
            accepted.path, accepted.counts, accepted.tokens, hidden, probe_hidden, probe_sizes
        )

    @property
    def accepted(self) -> Accepted:
        return Accepted(self.path, self.counts, self.tokens)


class TreeOutput(NamedTuple):
    """Outputs of a forward for the nodes that it did not prune.

    Attributes:
        logits: ``(batch, nodes, vocab)`` after each forwarded node, or each requested one, in the
            model's dtype.
        probe_hidden: ``(batch, probes, hidden)`` final hidden state of each probe; None without
            probes. :func:`output_logits` computes logits of the few that are needed.
        node_hidden: ``(batch, nodes, hidden)`` final hidden states of these nodes, the inputs of
            the model's output embeddings; None unless requested.
        survivors: what pruning left of the tree; None if all of it.
        ending: the result of the match rule if it was requested and the forward was compiled; the
            accepted nodes are then in the first slots after each row's tokens.
    """

    logits: Tensor
    probe_hidden: Tensor | None = None
    node_hidden: Tensor | None = None
    survivors: Survivors | None = None
    ending: Ending | None = None


def _tensors_in(output: TreeOutput) -> tuple[Tensor, ...]:
    parts = (output.logits, output.probe_hidden, output.node_hidden)
    return tuple(part for part in parts if part is not None)


def _tensors_of(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


@dataclass
class _Pass:
    """The running forward, as changes to the model see it.

    Attributes:
        nodes: number of nodes, which come first.
        probes: number of probes, which follow.
        probed: whether probes were requested, even if there are none.
        logits_at: ``(batch, n)`` nodes to compute logits for; None for all.
        choose: chooses which step tokens to keep; None to keep all.
    """

    nodes: int = 0
    probes: int = 0
    probed: bool = False
    logits_at: Tensor | None = None
    choose: Choose | None = None

    def wanted(self, hidden: Tensor) -> Tensor:
        """Select the states that logits are computed from."""
        if self.logits_at is None:
            return hidden[:, : self.nodes]
        return states_at(hidden, self.logits_at)


class TreeForward:
    """Runs ``model`` on tree nodes; created once per ``generate()`` call.

    Args:
        model: the causal language model.
        cache: the cache that holds keys and values.
        last_position: ``(batch,)`` larger positions are clamped to this one: deeper nodes exceed
            the call's budget and are never accepted, but learned position tables are finite.
        position_shift: ``(batch,)`` position of a row's first cached token; None for 0, the value
            unless the caller passed position ids.
        model_kwargs: further arguments for the model's forward.
        probe_inputs: embeddings and states of the method's probes, if it has any.
        wants_hidden: also return the nodes' final hidden states.
        graphs: compiled code for its forwards; None to run them uncompiled.
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
        graphs: Graphs | None = None,
    ):
        self.model = model
        self.graphs = graphs
        self.cache = cache
        self.attention = TreeAttention(model)
        self.last_position = last_position[:, None]
        if position_shift is None:
            position_shift = torch.zeros_like(last_position)
        self.position_shift = position_shift[:, None]
        self.model_kwargs = model_kwargs or {}
        self.takes_positions = "position_ids" in taken(model, position_ids=True)
        self.device, self.dtype = placement(model)
        self.probe_inputs = probe_inputs
        self.num_front = 0
        self.wants_hidden = wants_hidden
        self.reach: Reach | None = None
        if graphs is not None:
            cache.use_buckets()
        self._changes = self.attention.changes
        #: The same, with the changes that read hidden states and prune; created on first use.
        self._watching: tuple[Changes, list[Tensor]] | None = None
        self._pass, self._prunes = _Pass(), False
        if probe_inputs is not None:
            self.probe_embeddings = bounded(probe_inputs.embeddings.to(self.device, self.dtype))
            self.num_front = probe_inputs.num_front
            if self.num_front:
                cache.set_front(probe_inputs.front, Ranks(model).own_heads)

    def __call__(
        self,
        tokens: Tensor,
        tree: TreeBatch,
        first: int = 0,
        probes: ProbeRows | None = None,
        pruning: Pruning | None = None,
        changes: Changes | None = None,
        logits_at: Tensor | None = None,
        match: bool = False,
    ) -> TreeOutput:
        """Run the nodes ``first ..`` of the tree and the probes under them.

        Args:
            tokens: ``(batch, nodes)`` tokens of the whole tree.
            tree: the tree of each row; nodes before ``first`` were forwarded earlier in this step.
            first: first node to forward.
            probes: this tree's probes, which follow the nodes.
            pruning: drops nodes and the probes under them midway; not with ``first``.
            changes: other changes to the model in this forward, such as skipped layers.
            logits_at: ``(batch, n)`` forwarded nodes whose logits are needed, for prompts; such a
                forward is not compiled and has none of the three before. None for all nodes.
            match: whether the match rule on unprocessed logits ends the step; compiled code then
                applies it, too. Not with ``first``.
        """
        depths, ancestors = tree.depths, tree.ancestors
        if probes is not None:
            depths, ancestors = probes.depths, probes.ancestors
        step = StepTokens(
            tokens[:, first:], depths[:, first:], ancestors[:, first:], depths,
            None if probes is None else probes.kinds,
        )  # fmt: skip
        front = self.num_front if probes is not None and probes.num_probes else 0
        keys = self.cache.begin(step.total, offset=first, front=front > 0)
        call = self._reaching(tree, first, probes)
        if pruning is not None and tokens.shape[1] > 1:
            return self._pruned(call, step, keys, tree, probes, pruning)
        if self.graphs is not None and self.reach is None and logits_at is None:
            deciding = (tree, probes) if match else None
            return self._compiled(self.graphs, call, step, keys, first, changes, deciding)
        return self._forward(call, step, keys, changes, logits_at)

    def _forward(
        self, call: Callable[..., Any], step: StepTokens, keys: int,
        changes: Changes | None = None, logits_at: Tensor | None = None,
    ) -> TreeOutput:  # fmt: skip
        """The whole forward over an open block, on tensors only, so that it can be traced.

        Args:
            call: runs the model.
            step: the tokens that it runs over.
            keys: number of slots that attention sees, without the front slots.
            changes, logits_at: see :meth:`__call__`.
        """
        inputs = self._inputs(step, keys)
        if changes is not None:
            return TreeOutput(changes.run(self._changes.run, call, **inputs).logits)
        if step.kinds is None and not self.wants_hidden and logits_at is None:
            return TreeOutput(self._changes.run(call, **inputs).logits)
        watching, seen = self._watched(step, logits_at)
        logits = watching.run(call, **inputs).logits
        return self._output(logits, seen[0])

    def width(self, nodes: int, probes: int) -> int:
        """Step tokens per batch row, padding included, of a forward with these nodes and probes."""
        if self.graphs is None:
            return nodes + probes
        return bucket(nodes) + bucket(probes)

    def _compiled(
        self, graphs: Graphs, call: Callable[..., Any], step: StepTokens, keys: int, first: int,
        changes: Changes | None, deciding: tuple[TreeBatch, ProbeRows | None] | None,
    ) -> TreeOutput:  # fmt: skip
        """:meth:`_forward` by compiled code, padded to a recurring shape.

        Args:
            deciding: the trees and their probes, if the code also ends the step.
        """
        nodes, probes = step.ids.shape[1], 0 if step.kinds is None else step.kinds.shape[1]
        whole = padded(step, first)
        self.cache.reserve(self.cache.max_length + first + whole.total)
        layout, extra = Layout.of(self.cache), _tensors_of(self.model_kwargs)
        learned = [] if step.kinds is None else self._learned()
        names = tuple(extra)
        rule = None if deciding is None else MatchInputs.of(*deciding)
        group = ProbeGroup.causal(0)
        if deciding is not None and deciding[1] is not None:
            group = deciding[1].group
        others = tuple((n, repr(x)) for n, x in self.model_kwargs.items() if n not in extra)
        small = [
            self.cache.lengths, self.position_shift, self.last_position, *whole.tensors(),
            *learned, *extra.values(), *([self.cache.lengths + first] if first else []),
            *([] if rule is None else rule.tensors()),
        ]  # fmt: skip
        inputs = [buffer for buffer, _ in self.cache.buffers()]
        inputs += [tensor.contiguous() for tensor in small]

        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = iter(tensors)
            buffers = [next(given) for _ in layout.members]
            lengths, shift, last = (next(given) for _ in range(3))
            rows = StepTokens(*(next(given) for _ in whole.tensors()))
            own = copy.copy(self)
            own._watching, own._prunes, own._pass = None, False, _Pass()
            own.position_shift, own.last_position = shift, last
            if learned:
                own._learn([next(given) for _ in learned])
            own.model_kwargs = {**self.model_kwargs, **{name: next(given) for name in names}}
            start = next(given) if first else lengths
            slots = start[:, None] + torch.arange(rows.total, device=lengths.device)
            own.cache = SlotCache(layout, buffers, lengths, slots)
            output = own._forward(call, rows, self.cache.capacity, changes)
            if rule is None:
                return _tensors_in(output)
            decide = MatchInputs(*(next(given) for _ in rule.tensors()))
            targets = output.logits.argmax(-1)
            accepted = verify.match(decide.tree(rows), rows.ids, targets)
            own.cache.keep(accepted.path)
            ending = Ending.of(accepted, output, decide.probes(rows, group))
            return (*_tensors_in(output), *(part for part in ending if part is not None))

        def cut(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            sizes = [nodes] + [probes] * (step.kinds is not None) + [nodes] * self.wants_hidden
            found = [tensor[:, :size] for tensor, size in zip(tensors, sizes)]
            return [*found, *tensors[len(sizes) :]]

        results = graphs.run(
            ("forward", layout, changes is not None, names, others, bool(first), rule and group),
            function, inputs,
            lambda: _tensors_in(self._forward(call, step, keys, changes)), cut,
            static=len(layout.members),
        )  # fmt: skip
        found = iter(results)
        logits = next(found)
        behind = next(found) if step.kinds is not None and changes is None else None
        own = next(found) if self.wants_hidden and changes is None else None
        return TreeOutput(logits, behind, own, None, self._ending(list(found), own, behind))

    @staticmethod
    def _ending(found: list[Tensor], own: Tensor | None, behind: Tensor | None) -> Ending | None:
        """The ending that compiled code computed, if it did."""
        if not found:
            return None
        path, counts, tokens, *rest = found
        hidden = None if own is None else rest.pop(0)
        if behind is None or not rest:
            return Ending(path, counts, tokens, hidden)
        return Ending(path, counts, tokens, hidden, *rest)

    def _learned(self) -> list[Tensor]:
        """The probes' learned tensors, as inputs of a graph."""
        assert self.probe_inputs is not None
        seen = self.probe_inputs.front_seen
        return [self.probe_embeddings] + ([] if seen is None else [seen])

    def _learn(self, tensors: list[Tensor]) -> None:
        """Use these tensors in place of :meth:`_learned`."""
        assert self.probe_inputs is not None
        self.probe_embeddings, *seen = tensors
        self.probe_inputs = replace(self.probe_inputs, front_seen=seen[0] if seen else None)

    def _inputs(self, step: StepTokens, keys: int) -> dict[str, Any]:
        """Inputs of the model's forward."""
        lengths = self.cache.lengths
        positions = torch.minimum(
            lengths[:, None] + self.position_shift + step.depths, self.last_position
        )
        inputs: dict[str, Any] = {
            **self.model_kwargs,
            "attention_mask": self._mask(step, keys, positions),
            CACHE: self.cache,
            "use_cache": True,
            "return_dict": True,
        }
        if self.takes_positions:
            inputs["position_ids"] = positions.to(self.device)
        ids = step.ids.to(self.device)
        if step.kinds is None:
            return inputs | {"input_ids": ids}
        embeddings = self.model.get_input_embeddings()(ids)
        learned = self.probe_embeddings[step.kinds.to(self.device)]
        return inputs | embedded(self.model, torch.cat([embeddings, learned], dim=1), ids)

    def _output(self, logits: Tensor, hidden: Tensor, survivors: Survivors | None = None) -> Any:
        nodes, probes = self._pass.nodes, self._pass.probes
        behind = hidden[:, nodes : nodes + probes] if self._pass.probed else None
        own = self._pass.wanted(hidden) if self.wants_hidden else None
        return TreeOutput(logits, behind, own, survivors)

    def _reaching(
        self, tree: TreeBatch, first: int, probes: ProbeRows | None
    ) -> Callable[..., Any]:
        """The model's call, with the tokens' reach if its rotary frequencies depend on it."""
        if self.reach is None:
            return self.model
        depths, deepest = tree.depths, tree.max_depth
        if probes is not None:
            depths, deepest = probes.depths, deepest + max(probes.group.offsets, default=0)
        lengths = self.cache.host_lengths
        return partial(self.reach.run, self.model, lengths, depths[:, first:], deepest)

    def select(self, rows: Sequence[int]) -> None:
        """Follow the cache, whose row ``i`` is now the former ``rows[i]``.

        As in Transformers, a tensor among the model's inputs is per batch row if its first
        dimension is the batch size.
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

    def _pruned(
        self, call: Callable[..., Any], step: StepTokens, keys: int, tree: TreeBatch,
        probes: ProbeRows | None, pruning: Pruning,
    ) -> TreeOutput:  # fmt: skip
        """The forward with early pruning."""
        left: Survivors | None = None
        cache, running, ids = self.cache, self._pass, step.ids

        def choose(hidden: Tensor) -> Tensor | None:
            nonlocal left
            left = survive(
                tree, *pruning.likely(hidden[:, : ids.shape[1]], ids.to(self.device), tree), probes
            )
            if left is None:
                return None
            cache.narrow(left.rows)
            running.nodes = left.nodes.shape[1]
            running.probes = left.rows.shape[1] - running.nodes
            return left.rows

        inputs = self._inputs(step, keys)
        changes, seen = self._watched(step)
        if not self._prunes:
            # After averaged exits, which must see the last layer's output first.
            early_pruning(
                self.model, changes, pruning.layer,
                lambda hidden: None if running.choose is None else running.choose(hidden),
            )  # fmt: skip
            self._prunes = True
        running.choose = choose
        logits = changes.run(call, **inputs).logits
        running.choose = None  # break the reference cycle
        return self._output(logits, seen[0], left)

    def _watched(
        self, step: StepTokens, logits_at: Tensor | None = None
    ) -> tuple[Changes, list[Tensor]]:
        """Changes for forwards that return more than logits, and the list of final states."""
        running = self._pass
        running.nodes, running.probed = step.ids.shape[1], step.kinds is not None
        running.probes = 0 if step.kinds is None else step.kinds.shape[1]
        running.logits_at = logits_at
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
            self._watching = changes, final_hidden(self.model, changes, running.wanted)
        return self._watching

    def _mask(self, step: StepTokens, keys: int, positions: Tensor) -> Any:
        """The forward's attention mask over ``keys`` slots; probes see those in front, too."""
        lengths = self.cache.lengths
        batch, count = positions.shape
        shape = (batch, count, keys, lengths.device)
        if step.visible.shape[1:] == (1, 1):  # a plain step: its token stands behind the prefix
            full = (torch.arange(keys, device=lengths.device) <= lengths[:, None])[:, None, None]
        else:
            nodes = masks.tree_ancestors(step.visible, lengths)
            full = masks.build(masks.or_(masks.prefix(lengths), nodes), *shape)
        windows = self.attention.windows
        windowed = {size for size in windows.values() if size is not None and size < keys}
        made: dict[int | None, Tensor] = {None: full}
        front = self.cache.front if self.cache.shows_front else 0
        if windowed or self.attention.wants_positions:
            key_positions = self._key_positions(step, keys)
            for size in windowed:
                near = masks.window(size, positions, key_positions)
                made[size] = full & masks.build(near, *shape)
            if self.attention.wants_positions:
                if front:  # they stand where the sequence begins, as in prefix tuning
                    start = self.position_shift.expand(batch, front)
                    key_positions = torch.cat([start, key_positions], dim=1)
                self.attention.set_positions(positions, key_positions)
        if front and self.probe_inputs is not None and step.kinds is not None:
            learned = full.new_zeros((batch, 1, count, front))
            seen = self.probe_inputs.sees_front(step.kinds.to(full.device))
            learned[:, 0, -step.kinds.shape[1] :, front - self.num_front :] = seen
            made = {size: torch.cat([learned, mask], dim=3) for size, mask in made.items()}
            full = made[None]
        return self.attention.convert(
            {kind: made.get(size, full) for kind, size in windows.items()}, self.dtype
        )

    def _key_positions(self, step: StepTokens, keys: int) -> Tensor:
        """Token position of every slot: (batch, keys). Slots after the tree continue counting."""
        lengths = self.cache.lengths
        at_nodes = lengths[:, None] + self.position_shift + step.slot_depths
        at_nodes = torch.minimum(at_nodes, self.last_position)
        slots = torch.arange(keys, device=lengths.device)
        node = slots - lengths[:, None]
        in_tree = (node >= 0) & (node < at_nodes.shape[1])
        at_node = at_nodes.gather(1, node.clamp(0, at_nodes.shape[1] - 1))
        return torch.where(in_tree, at_node, slots + self.position_shift)
