"""One forward pass over nodes of a tree, behind what the cache holds.

Builds positions and mask, opens the cache's block and calls the model. Knows models and caches;
knows nothing of drafting, acceptance or generation options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from hf_spec.core import mask as masks
from hf_spec.core.cache import TreeCache
from hf_spec.core.probes import ProbeRows
from hf_spec.core.pruning import Survivors, survive
from hf_spec.core.tree import TreeBatch
from modeling_patches.attention_masks import TreeAttention
from modeling_patches.dynamic_rope import Reach
from modeling_patches.early_pruning import early_pruning
from modeling_patches.exits import averaged_exits


@dataclass(frozen=True)
class ProbeInputs:
    """What a method has learned for its probes.

    Attributes:
        embeddings: ``(kinds, hidden)`` input embedding of each probe of a group.
        front: per layer, keys and values ``(kv_heads, slots, head_dim)`` that only probes see.
        front_seen: ``(kinds, slots)`` bool, which of these slots each kind sees; None: all.
        exits: last layers whose hidden states are averaged in the probes' rows.
    """

    embeddings: Tensor
    front: Sequence[tuple[Tensor, Tensor]] = ()
    front_seen: Tensor | None = None
    exits: int = 1

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


def output_logits(model: Any, hidden: Tensor) -> Tensor:
    """The model's output embeddings applied to final hidden states.

    A scaling or soft cap that some models apply afterwards is left out: for draft tokens, whose
    order it does not change.
    """
    # Flat: on CPUs a slice of rows, whose strides are another number of rows', takes a path of the
    # matrix product that is ten times slower.
    flat = model.get_output_embeddings()(hidden.flatten(0, -2))
    return flat.unflatten(0, hidden.shape[:-1])


def states_at(hidden: Tensor, rows: Tensor) -> Tensor:
    """``hidden`` (batch, rows, hidden) at some rows of each batch row, ``rows`` (batch, n)."""
    index = rows.to(hidden.device)[:, :, None].expand(-1, -1, hidden.shape[-1])
    return hidden.gather(1, index)


def decoder_of(model: Any) -> Any:
    """The module whose output the model makes its logits of.

    Some models call their head "decoder" (ModernBERT's), or don't know of one (Mllama's).
    """
    found = model.get_decoder()
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if found is model or not any(module is embeddings for module in found.modules()):
        children = [child for child in model.children() if child is not head]
        inside = [c for c in children if any(module is embeddings for module in c.modules())]
        found = inside[0] if inside else found
    return found


class _DecoderOutput(BaseModelOutput):
    """Final hidden states; whatever else a model looks for (caches, router logits) is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def model_logits(model: Any, hidden: Tensor) -> Tensor:
    """The model's own logits of final hidden states (batch, rows, hidden).

    With all that it does to them, in contrast to :func:`output_logits`: for losses and for
    distributions to sample from. The model runs with its decoder's layers left out.
    """
    decoder = decoder_of(model)
    # Slices take a slow path of the matrix product on CPUs; see output_logits.
    made = _DecoderOutput(last_hidden_state=hidden.contiguous())
    own = vars(decoder).get("forward")  # a patch or a hook of accelerate's
    decoder.forward = lambda *args, **kwargs: made
    try:
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        return model(input_ids=ids, use_cache=False, return_dict=True).logits
    finally:
        del decoder.forward
        if own is not None:
            decoder.forward = own


def taken(model: Any, **inputs: Any) -> dict[str, Any]:
    """Those of ``inputs`` that the model's forward knows: not all take positions, for example."""
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in inputs.items() if name in known}


def embedded(model: Any, embeddings: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """Inputs of a forward over rows of which only the first are tokens.

    Args:
        model: a causal language model.
        embeddings: ``(batch, rows, hidden)`` of all rows.
        tokens: ``(batch, tokens)`` the first rows' ids. Models that look up an input of every layer
            by them (Gemma 3n, Gemma 4) see token 0 in the others.
    """
    inputs = {"inputs_embeds": embeddings}
    decoder = decoder_of(model)
    if getattr(decoder, "hidden_size_per_layer_input", 0):
        missing = embeddings.shape[1] - tokens.shape[1]
        ids = torch.nn.functional.pad(tokens, (0, missing))
        inputs["per_layer_inputs"] = decoder.get_per_layer_inputs(ids)
    return inputs


@contextmanager
def final_hidden(model: Any, rows: Callable[[], int] | None = None) -> Iterator[list[Tensor]]:
    """For the block, a list that each forward of ``model`` fills with its final hidden states.

    ``(batch, rows, hidden)``: what the model's output embeddings are applied to. The list stays
    empty where the model is compiled as a whole and runs no hooks.

    Args:
        model: a causal language model.
        rows: how many rows, from the first, logits are made of; asked behind the decoder. None:
            of all.
    """
    seen: list[Tensor] = []

    def note(module: Any, args: Any, output: Any) -> Any:
        seen[:] = [output[0]]
        if rows is None or rows() == output[0].shape[1]:
            return None
        # Not `contiguous()`, which keeps the stride of a single batch row: see output_logits.
        fewer = output[0][:, : rows()]
        fewer = fewer.flatten(0, 1).unflatten(0, fewer.shape[:2])
        if isinstance(output, tuple):
            return (fewer, *output[1:])
        output.last_hidden_state = fewer
        return output

    handle = decoder_of(model).register_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


class TreeForward:
    """Runs ``model`` on tree nodes; made once per ``generate()`` call.

    Args:
        model: the causal language model.
        cache: where keys and values go.
        attention: converter of masks, from ``tree_attention``.
        last_position: ``(batch,)`` positions are cut off here: nodes further down lie past the
            call's budget and are never accepted, but learned position tables end somewhere.
        position_shift: ``(batch,)`` position of a row's first cached token (0 unless the caller
            gave position ids of his own).
        model_kwargs: further arguments for the model's forward.
        probe_inputs: embeddings and states of the method's probes, if it has any.
        wants_hidden: give the nodes' final hidden states, too.
    """

    def __init__(
        self,
        model: Any,
        cache: TreeCache,
        attention: TreeAttention,
        last_position: Tensor,
        position_shift: Tensor,
        model_kwargs: dict[str, Any] | None = None,
        probe_inputs: ProbeInputs | None = None,
        wants_hidden: bool = False,
    ):
        self.model = model
        self.cache = cache
        self.attention = attention
        self.last_position = last_position[:, None]
        self.position_shift = position_shift[:, None]
        self.model_kwargs = model_kwargs or {}
        self.takes_positions = "position_ids" in taken(model, position_ids=True)
        self.dtype = model.get_input_embeddings().weight.dtype
        self.device = model.get_input_embeddings().weight.device
        self.probe_inputs = probe_inputs
        self.num_front = 0
        self.wants_hidden = wants_hidden
        self.reach: Reach | None = None
        self.runs_hooks = True  # until a compiled model shows that it does not
        if probe_inputs is not None:
            self.probe_embeddings = probe_inputs.embeddings.to(self.device, self.dtype)
            self.num_front = probe_inputs.num_front
            if self.num_front:
                cache.set_front(probe_inputs.front)

    def __call__(
        self,
        tokens: Tensor,
        tree: TreeBatch,
        first: int = 0,
        probes: ProbeRows | None = None,
        pruning: Pruning | None = None,
    ) -> TreeOutput:
        """Run the nodes ``first ..`` of the tree and the probes under them.

        Args:
            tokens: ``(batch, nodes)`` of the whole tree.
            tree: the tree of each row; nodes before ``first`` were forwarded earlier in this step.
            first: first node to forward.
            probes: rows to add behind the nodes; made for this tree.
            pruning: leaves out nodes, and probes under them, on the way; not with ``first``.
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
        if probes is None:
            inputs["input_ids"] = tokens
        else:
            embeddings = self.model.get_input_embeddings()(tokens)
            learned = self.probe_embeddings[probes.kinds.to(self.device)]
            inputs |= embedded(self.model, torch.cat([embeddings, learned], dim=1), tokens)
        with self._reaching(tree, first, probes):
            if probes is None and pruning is None and not self.wants_hidden:
                return TreeOutput(self.model(**inputs).logits)
            return self._run(inputs, tokens, tree, probes, pruning)

    def _reaching(
        self, tree: TreeBatch, first: int, probes: ProbeRows | None
    ) -> AbstractContextManager[None]:
        """For models whose rotary frequencies follow the longest position."""
        if self.reach is None:
            return nullcontext()
        depths, deepest = tree.depths, tree.max_depth
        if probes is not None:
            depths, deepest = probes.depths, deepest + max(probes.group.offsets, default=0)
        return self.reach.of(self.cache.host_lengths, depths[:, first:], deepest)

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
        self, inputs: dict[str, Any], tokens: Tensor, tree: TreeBatch, probes: ProbeRows | None,
        pruning: Pruning | None,
    ) -> TreeOutput:  # fmt: skip
        """The forward where more than the logits of all rows is wanted, or less."""
        left: Survivors | None = None

        def nodes() -> int:
            return tokens.shape[1] if left is None else left.nodes.shape[1]

        def choose(hidden: Tensor) -> Tensor | None:
            nonlocal left
            assert pruning is not None
            alive = pruning.alive(hidden[:, : tokens.shape[1]], tokens, tree)
            left = survive(tree, alive.to(tree.parents.device), probes)
            if left is None:
                return None
            self.cache.narrow(left.rows)
            return left.rows

        with ExitStack() as stack:
            if probes is not None and self.probe_inputs is not None:
                stack.enter_context(averaged_exits(self.model, self.probe_inputs.exits, nodes))
            # Behind averaged_exits, whose hook must see the last layer's output first.
            if pruning is not None and tokens.shape[1] > 1:
                stack.enter_context(early_pruning(self.model, pruning.layer, choose))
            if self.runs_hooks:
                seen = stack.enter_context(final_hidden(self.model, nodes))
                logits = self.model(**inputs).logits
                self.runs_hooks = bool(seen)
            if not self.runs_hooks:
                output = self.model(**inputs, output_hidden_states=True)
                logits, seen = output.logits[:, : nodes()], [output.hidden_states[-1]]
        hidden = seen[0]
        rest = probes if left is None else left.probes
        behind = None
        if rest is not None:
            behind = hidden[:, nodes() : nodes() + rest.num_probes]
        own = hidden[:, : nodes()] if self.wants_hidden else None
        return TreeOutput(logits, behind, own, left)

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
