"""The KV cache of decoding with trees, and its conversion from and to caches of Transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any, Self

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache

from hf_spec.cache.attention import Allocator, AttentionLayer, AttentionStates, aligned, signature
from hf_spec.cache.recurrent import OpenBlock, RecurrentStates, StatefulCache
from hf_spec.core.device import Ragged, to_device
from hf_spec.core.tree import Tree, ring_places
from hf_spec.modeling_patches.fingerprint import origin
from hf_spec.modeling_patches.linear_attention import Rule
from hf_spec.modeling_patches.support import LAYERS

# -- The one KV cache: preallocated buffers, per-row lengths, accepted paths kept in place ---------
#
# Row ``r`` holds its ``lengths[r]`` accepted tokens in slots ``0 .. lengths[r] - 1``, without
# padding or holes. A forward writes the nodes of its tree after them; they become part of the row
# only when :meth:`commit` keeps the accepted ones. What layers of one kind hold is in one object
# (:class:`AttentionStates`), which begins, commits and selects for all of them together.
#
# An exception, such as an interrupt, may occur between any two lines. The buffers and the rows'
# lengths change together and stay valid; :meth:`repair` rebuilds the rest. Slots past a row's
# length are never read, so nothing there needs to be undone.
#
# Outside a speculative block this is an ordinary Transformers cache, provided that all rows have
# the same length; gradients flow through what a forward appends, not through what it finds.


class TreeCache(StatefulCache):
    """One preallocated cache for speculative decoding.

    After a prefill, :func:`take_over` fills it. If it stays empty, the first
    block sets the layers' shapes.

    Attributes:
        states: what its attention layers hold.
        lengths: ``(batch,)`` int64 on the main device, accepted tokens per row.
        host_lengths: the same as a list, which needs no device synchronization.
        tokens: the tokens whose states each row holds, from its start as far as the owner recorded
            them; None if it did not. A later call uses them to find how much of its prompt is
            cached.
        shift: ``(axes, batch)`` position of each row's next token minus the row's length, on each
            axis that the model rotates by; None for 0.
        inputs: names of what the states depend on besides tokens, such as an image: rows cannot be
            computed again from their tokens.
        generated: of further inputs with a value per token, that of generated tokens, by name,
            where it is not that of the prompt's last one.
        made_by: class and size of the model whose states it holds; None if nobody has said.
        is_given: whether it is what a graph sees, see :meth:`using`.

    Args:
        allocator: see :meth:`AttentionStates.allocate_by`.
        rules: the rule of each recurrent layer, by its index.
    """

    layers: list[AttentionLayer]
    is_given: bool = False

    def __init__(
        self, num_layers: int, batch_size: int, device: torch.device | str,
        allocator: Allocator | None = None, rules: dict[int, Rule] | None = None,
    ):  # fmt: skip
        super().__init__(layers=[AttentionLayer(self, index) for index in range(num_layers)])
        self.states = AttentionStates(self.layers, batch_size, allocator)
        self.host_lengths = [0] * batch_size
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.tokens: list[list[int]] | None = None
        self.shift: Tensor | None = None
        self.inputs: list[str] = []
        self.generated: dict[str, float] = {}
        self.made_by: str | None = None
        self.block: OpenBlock | None = None
        self.recurrent = RecurrentStates(rules, batch_size) if rules else None
        #: Shortest nonzero length each row can be cut to: a sliding window dropped earlier states,
        #: or they depend on more than tokens.
        self._floor = [0] * batch_size

    # -- lengths -----------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        return len(self.host_lengths)

    @property
    def max_length(self) -> int:
        """Length of the longest row."""
        return max(self.host_lengths)

    @property
    def capacity(self) -> int:
        """Slots per row of layers that keep all tokens, without the front slots."""
        return self.states.capacity

    @property
    def is_uniform(self) -> bool:
        """Whether all rows are known to have the same length."""
        return min(self.host_lengths) == self.max_length

    def uniform_length(self) -> int:
        """The length that all rows share; ValueError if they differ, which ordinary (unmasked) use
        of a cache cannot express. In an open block, whose masks can, that of the longest row."""
        if self.block is None and not self.is_uniform:
            raise ValueError(
                f"TreeCache holds rows of different lengths {self.host_lengths}: outside "
                "speculative decoding a cache has one length. Pass it to "
                "generate(assistant_strategy=...), or process the rows one by one: "
                "batch_select_indices(torch.tensor([row])) of a copy.deepcopy of it."
            )
        return self.max_length

    def set_lengths(self, lengths: list[int], floor: list[int] | None = None) -> None:
        """Set the accepted tokens per row, and the shortest nonzero lengths that rows can be cut
        to; None for those already known."""
        if self.tokens is not None:
            pairs = zip(self.tokens, lengths)
            self.tokens = [row if len(row) <= n else row[:n] for row, n in pairs]
        self.host_lengths = lengths
        self.lengths = to_device(lengths, self.lengths.device)
        self._floor = self._floor if floor is None else floor

    def depend_on(self, inputs: list[str]) -> None:
        """Note that all states so far depend on these inputs, too: none can be cut off alone."""
        if inputs:
            self.inputs = list(dict.fromkeys(self.inputs + inputs))
            self._floor = self.host_lengths

    @property
    def _appended(self) -> int:
        """Tokens appended outside blocks (by plain generation) in all layers."""
        return min((one.appended for one in self.layers if one.is_initialized), default=0)

    def count_appended(self) -> None:
        """Add the appended tokens to the lengths."""
        appended, most = self._appended, max((one.appended for one in self.layers), default=0)
        for layer in self.layers:
            layer.appended = 0
        if most:
            self._write(most)
            self.set_lengths([length + appended for length in self.host_lengths])
        if most > appended:  # a forward failed, and rings may have lost what is needed
            self.truncate(self.host_lengths)

    def _write(self, nodes: int) -> None:
        """Note that so many tokens or nodes may be written after each row's own."""
        if self.states.windows:
            rows = zip(self._floor, self.host_lengths)
            self._floor = [max(floor, self.states.lost(n + nodes)) for floor, n in rows]

    # -- a speculative block -----------------------------------------------------------------

    def reserve(self, nodes: int, first: int = 0) -> None:
        """Make room for a block of so many nodes, of which the first have been written."""
        self.states.reserve(self.max_length + nodes, nodes, lambda: self.lengths + first)
        self._write(nodes)

    def begin(
        self, tree: Tree, first: int = 0, front: bool = False, plain: bool = False,
        ragged: Ragged | None = None,
    ) -> int:  # fmt: skip
        """Open a block: the next forward writes nodes of a tree after each row's tokens.

        Args:
            tree: the tree of each row.
            first: the first of its nodes that the forward writes; an earlier forward of this step
                has written those before.
            front: let attention see the front slots, too.
            plain: let recurrent layers run their own code if the tree is a root.
            ragged: the nodes, if the forward leaves padding out.

        Returns:
            The number of slots that attention sees (the mask's last dimension), without the front
            slots.
        """
        self.count_appended()
        end = self.max_length + tree.num_nodes
        self.reserve(tree.num_nodes, first)
        start, slots = self.max_length + first, None
        if not self.is_uniform:
            steps = torch.arange(first, tree.num_nodes, device=self.lengths.device)
            start, slots = 0, self.lengths[:, None] + steps
        end = min(aligned(end), self.capacity)
        self.block = OpenBlock(start, slots, end, front, tree, first, ragged)
        if self.recurrent is not None:
            alone = tree.num_nodes == 1 and not first
            self.recurrent.begin(partial(_visible, tree, first), first, plain and alone)
        return end

    def appending(self, appended: int, count: int) -> OpenBlock:
        """Where a layer writes ``count`` tokens outside a block, after those already appended."""
        start = self.uniform_length() + appended
        self.states.reserve(start + count)
        return OpenBlock(start, None, start + count)

    def narrow(self, rows: Tensor) -> None:
        """Keep only these query tokens ``(batch, n)`` of the open block for the layers that have
        yet to write. Each keeps its slot, so an accepted token has the same slot in every layer."""
        assert self.block is not None
        slots = self.lengths[:, None] + self.block.first + rows.to(self.lengths.device)
        self.block = self.block._replace(slots=slots)

    def commit(
        self, counts: Sequence[int], path: Tensor | None = None, slots: Tensor | None = None,
        moved: bool = False,
    ) -> None:  # fmt: skip
        """Close the block: keep each row's accepted nodes and discard the others.

        Args:
            counts: accepted nodes per row, the root included; 0 keeps none.
            path: ``(batch, depth)`` node indices of the accepted path, root first; entries past
                ``counts`` may be any node. None if the accepted nodes come first.
            slots: ``(batch, nodes)`` place of each node in the block; None if it is its index.
            moved: whether the accepted nodes are already in the first slots.
        """

        if path is None and self.recurrent is not None:
            steps = torch.arange(max(*counts, 1), device=self.lengths.device)
            moved, path = True, steps.expand(self.batch_size, -1)
        if path is not None:
            places = path if slots is None else slots.gather(1, path.to(slots.device))
            if self.recurrent is not None:
                self.recurrent.commit(self.host_lengths, counts, places)
            if not moved:
                self.states.move(self.lengths, places)
        self.block = None
        self.set_lengths([length + count for length, count in zip(self.host_lengths, counts)])

    def rollback(self) -> None:
        """Close the block and discard its nodes."""
        self.block = None

    def repair(self) -> None:
        """Close the block, and rebuild what an exception may have left half done."""
        self.block = None
        lengths = self.host_lengths
        if self.recurrent is not None:
            lengths = self.recurrent.repair(lengths)
        self.set_lengths(lengths)
        self.states.attach()

    # -- as inputs of a graph ----------------------------------------------------------------

    @property
    def layout(self) -> Hashable:
        """What a graph over :meth:`tensors` depends on besides their places."""
        states = None if self.recurrent is None else self.recurrent.layout
        front = self.block and self.block.front
        rings = self.states.room, tuple(self.states.windows.items())
        size = len(self.layers), self.capacity
        return size, self.states.members, self.states.front, front, states, rings

    def tensors(self) -> list[Tensor]:
        """The buffers of its layers, whose sizes recur and into which graphs write."""
        return self.states.tensors() + (self.recurrent.tensors() if self.recurrent else [])

    def changing(self) -> list[Tensor]:
        """What differs from step to step, see :class:`hf_spec.core.device.Holds`."""
        return [self.lengths.contiguous()]

    def using(self, tensors: Iterator[Tensor], changing: Iterator[Tensor]) -> Self:
        """The cache as a graph sees it, which serves all lengths: with these :meth:`tensors` and
        :attr:`lengths` in place of its own, which the host does not know."""
        own = type(self)(len(self.layers), self.batch_size, self.lengths.device)
        own.states = self.states.using(own.layers, tensors)
        own.lengths, own.is_given = next(changing), True
        if self.recurrent is not None:
            own.recurrent = self.recurrent.using(tensors)
        return own

    def begin_given(self, tree: Tree, nodes: Tensor, front: bool = False) -> int:
        """:meth:`begin` where :attr:`is_given`; the forward writes ``nodes`` ``(n,)`` of the tree.
        Attention sees all slots."""
        # The length with which the block fills the slots. The check of a new graph detects models
        # that compute with it.
        self.host_lengths = [self.capacity - len(nodes)] * self.batch_size
        self.block = OpenBlock(0, self.lengths[:, None] + nodes, self.capacity, front, tree)
        if self.recurrent is not None:
            self.recurrent.begin(lambda: tree.ancestors, 0, self.recurrent.plain)
        return self.capacity

    # -- rows --------------------------------------------------------------------------------

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and drop the others, in place. They may repeat as far as
        there is room."""
        self.count_appended()
        self.states.select(rows, self.max_length)
        self._keep_rows(rows)

    def _keep_rows(self, rows: Sequence[int]) -> None:
        if self.recurrent is not None:
            self.recurrent.select(rows)
        if self.shift is not None:
            self.shift = self.shift[:, to_device(rows, self.shift.device)]
        tokens, floor = self.tokens, [self._floor[row] for row in rows]
        self.set_lengths([self.host_lengths[row] for row in rows], floor)
        self.tokens = None if tokens is None else [tokens[row] for row in rows]

    def join(self, other: TreeCache) -> None:
        """Take the rows of another cache of the same model behind these; it must not be used again.

        Raises:
            ValueError: it is of another model, or has other layers or learned states.
        """
        self.count_appended()
        other.count_appended()
        if self.made_by != other.made_by:
            raise ValueError(
                f"rows of {other.made_by} cannot join those of {self.made_by}: the caches must be "
                "of the same model and strategy."
            )
        longest = max(self.max_length, other.max_length)
        new = other.lengths.to(self.lengths.device)
        self.states.join(other.states, longest, self.lengths, new)
        if self.recurrent is not None:
            assert other.recurrent is not None
            self.recurrent.join(other.recurrent)
        self.shift = _joined(self, other)
        tokens, new_tokens = self.tokens, other.tokens
        self.inputs = list(dict.fromkeys(self.inputs + other.inputs))
        self.generated = {**self.generated, **other.generated}
        self.set_lengths(self.host_lengths + other.host_lengths, self._floor + other._floor)
        if tokens is not None:
            self.tokens = None if new_tokens is None else tokens + new_tokens

    def copied(self, rows: Sequence[int]) -> TreeCache:
        """A cache of its own with these rows; not of a model with recurrent layers."""
        assert self.recurrent is None
        self.count_appended()
        lengths = [self.host_lengths[row] for row in rows]
        own = TreeCache(len(self.layers), len(rows), self.lengths.device)
        own.states.unpack(self.states.packed(max(lengths), rows))
        own.set_lengths(lengths, [self._floor[row] for row in rows])
        if self.shift is not None:
            own.shift = self.shift[:, to_device([*rows], self.shift.device)]
        own.tokens = None if self.tokens is None else [self.tokens[row] for row in rows]
        own.inputs, own.generated = [*self.inputs], {**self.generated}
        own.made_by = self.made_by
        return own

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows in this order; they may repeat."""
        self.count_appended()
        self.states.repeat(indices)
        self._keep_rows(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats)
        self.batch_select_indices(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    # -- the rest of a Transformers cache ----------------------------------------------------

    def __iter__(self) -> Iterator[tuple[Tensor | None, ...]]:
        """The layers' keys, values and windows, as of a ``DynamicCache``, which can be made of
        them.

        Raises:
            ValueError: rows have different lengths.
        """
        for layer in self.layers:
            yield layer.keys, layer.values, layer._sliding_window_tensor

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The length of the longest row, even if the layer was skipped."""
        return self.max_length + self._appended

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row (a number <= 0).

        Raises:
            ValueError: if the number is positive, or a row cannot be cut there.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): give the number of tokens to remove as a negative "
                f"number, such as crop({-tokens_to_remove}), as for a DynamicCache."
            )
        self.count_appended()
        lengths = [length + tokens_to_remove for length in self.host_lengths]
        reached = self.reachable(lengths)
        if reached != lengths:
            inputs = f" ({', '.join(self.inputs)})" if self.inputs else ""
            raise ValueError(
                f"crop({tokens_to_remove}): rows of {self.host_lengths} tokens can be cut to "
                f"{reached}. A sliding window drops tokens, a recurrent state holds all at once, "
                f"and states may depend on more than tokens{inputs}. Remove fewer, or start "
                "without a cache."
            )
        self.truncate(lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep at most ``lengths[row]`` tokens of each row, as far as :meth:`reachable`."""
        self.count_appended()
        kept = self.reachable(lengths)
        if self.recurrent is not None:
            self.recurrent.cut(kept)
        if self.shift is not None and 0 in kept:
            self.shift = self.shift * to_device([n > 0 for n in kept], self.shift.device)
        self.set_lengths(kept, [floor if n else 0 for n, floor in zip(kept, self._floor)])

    def reachable(self, lengths: Sequence[int]) -> list[int]:
        """The lengths that :meth:`truncate` makes of these.

        A row becomes empty where a sliding window would need tokens that it has dropped, or among
        tokens whose states depend on other :attr:`inputs`, and as short as the last of its lengths
        of which a recurrent state is known.
        """
        kept = [min(have, keep) for have, keep in zip(self.host_lengths, lengths)]
        if self.recurrent is not None:
            kept = self.recurrent.reachable(kept)
        return [n if n >= floor else 0 for n, floor in zip(kept, self._floor)]

    def reset(self) -> None:
        """Empty every row; keep the buffers."""
        self.block = None
        if self.recurrent is not None:
            self.recurrent.cut([0] * self.batch_size)
        for layer in self.layers:
            layer.appended = 0
        self.shift, self.inputs = None, []
        self.set_lengths([0] * self.batch_size, [0] * self.batch_size)

    def __getstate__(self) -> dict[str, Any]:
        self.count_appended()
        state = {name: value for name, value in vars(self).items() if name != "layers"}
        state["states"] = self.states.packed(self.capacity if self.block else self.max_length)
        return state | {"num_layers": len(self.layers)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed = state.pop("states")
        self.layers = [AttentionLayer(self, index) for index in range(state.pop("num_layers"))]
        self.__dict__.update(state)
        self.states = AttentionStates(self.layers, len(self.host_lengths))
        self.states.unpack(packed)


def _joined(one: TreeCache, other: TreeCache) -> Tensor | None:
    """:attr:`TreeCache.shift` of the rows of both."""
    known = [cache.shift for cache in (one, other) if cache.shift is not None]
    if not known:
        return None
    shifts = [
        known[0].new_zeros(len(known[0]), cache.batch_size) if cache.shift is None else cache.shift
        for cache in (one, other)
    ]
    return torch.cat(shifts, 1)


# -- Taking over the states of Transformers' caches, and giving them back --------------------------

#: Packages whose methods of caches are Transformers' own.
_STOCK = ("transformers.", "torch.", "abc.", "typing.")


def take_over(
    cache: TreeCache, source: DynamicCache, mask: Tensor | None = None, more: int | None = None,
    front: int = 0, seq: int | None = None,
) -> None:  # fmt: skip
    """Take over the states of a prefill, which is emptied layer by layer: never are both whole.

    Args:
        cache: a new cache.
        source: a cache of full-attention or sliding-window layers.
        mask: ``(batch, seq)`` bool, True for real tokens; None if all are. Padding is dropped,
            wherever it is.
        more: most tokens that may follow in a row; None if that is not known.
        front: front slots to allocate (rounded up); see :meth:`AttentionStates.set_front`.
        seq: tokens in each row, padding included, if no layer of ``source`` has keys.
    """
    held = {
        (index, name): tensor
        for index, layer in enumerate(source.layers)
        for name, tensor in _held(layer).items()
    }
    count = source.get_seq_length() if held or seq is None else seq
    order, lengths = None, [count] * cache.batch_size
    if mask is not None:
        mask = mask.bool()
        lengths = mask.sum(-1).tolist()
        # Real tokens first, in order: slot j of a row gets its j-th real token.
        order = torch.argsort(~mask, dim=-1, stable=True)[:, : max(lengths)]
    windowed = any(tensor.shape[2] < count for tensor in held.values())
    cache.set_lengths(lengths, lengths if windowed else None)
    states, layers = cache.states, source.layers
    if cache.recurrent is not None:  # before layers are emptied: an interrupt leaves all or none
        cache.recurrent.take_over(layers, cache.host_lengths)
    states.windows = _windows(layers)
    states.front, states.limit = aligned(front), None if more is None else cache.max_length + more
    states.reserve(states.ahead(cache.max_length))
    left = Counter(index for index, _ in held)
    kinds = {key: signature(one, states.windows.get(key[0])) for key, one in held.items()}
    held.clear()
    for members in states.allocate(kinds):
        columns = _columns(cache, states.slots(states.windows.get(members[0][0])), order, count)
        for index, name in members:
            layer, source_states = layers[index], _held(layers[index])[name]
            _copy_in(cache.layers[index].views[name], source_states, columns, count)
            cache.layers[index].first = count - source_states.shape[2]
            left[index] -= 1
            if not left[index]:
                for freed in _held(layer):
                    setattr(layer, freed, None)


def _windows(layers: Sequence[Any]) -> dict[int, int]:
    """The windows of layers that slide, by their index; none if they record their past, of which
    their owner may cut off as much as he likes (`activate_past_recording`)."""
    sliding = [(i, layer) for i, layer in enumerate(layers) if getattr(layer, "is_sliding", False)]
    if any(getattr(layer, "record_past", False) for _, layer in sliding):
        return {}
    return {index: layer.sliding_window for index, layer in sliding}


def _columns(cache: TreeCache, slots: int, order: Tensor | None, count: int) -> Tensor | None:
    """``(batch, slots)`` columns of the source, of ``count``, for the slots of a buffer; None if
    they are the same. ``order``: ``(batch, tokens)`` those of real tokens, None if all are."""
    if order is None and slots >= count:
        return None
    columns = ring_places(cache.lengths, slots)[:, : cache.max_length]
    return columns if order is None else order.gather(1, columns.clamp(max=order.shape[1] - 1))


def unpack_into(cache: TreeCache, target: DynamicCache) -> None:
    """Fill a user's ``DynamicCache`` in place, as plain generation would have left it.

    Layers that already hold states are left alone: they were never taken over, or are filled.

    Args:
        cache: holds the states of rows of one length, which it loses layer by layer unless compiled
            code of other calls will use its buffers.
        target: the cache to fill; sliding layers keep only their window, unless they record more.
    """
    seq = cache.uniform_length()
    if cache.recurrent is not None:
        for (kind, place, number), state in cache.recurrent.states():
            stock = target.layers[place]
            if kind == "conv":
                stock.has_previous_state[number] = False
                stock.update_conv_state(state, number)
            else:
                stock.update_recurrent_state(state, number)
    cache.states.leave_to_layers()
    for own, layer in zip(cache.layers, target.layers):
        if not own.is_initialized or not (layer.keys is None or layer.values is None):
            continue
        slides = getattr(layer, "is_sliding", False)
        first = own.first if own.window is None else max(seq - own.window + 1, 0)
        states = {name: own.held(name, first, seq) for name in own.with_front}
        if not layer.is_initialized:
            layer.lazy_initialization(states["keys"], states["values"])
        if (index_keys := states.pop("indexer_keys", None)) is not None:
            layer.lazy_initialization_indexer(index_keys)
            layer.indexer_keys = index_keys[:, 0]
        if slides:
            layer.cumulative_length = seq
        layer.keys, layer.values = states["keys"], states["values"]
        if cache.states.is_empty:
            own.detach()


def check_packable(cache: Cache) -> None:
    """Raise a ValueError, with the cache or layer type, unless :func:`take_over` can take it, and
    it does nothing but keep states: its own methods are called no more."""
    remedy = "Pass a DynamicCache, the TreeCache of an earlier call, or no cache."
    if not isinstance(cache, Cache) or getattr(cache, "offloading", False):
        kind = "an offloaded cache" if isinstance(cache, Cache) else type(cache).__name__
        raise ValueError(f"the given cache is {kind}: it cannot hold a tree. {remedy}")
    kinds: list[Any] = [type(layer) for layer in getattr(cache, "layers", ())]
    kinds += filter(None, [getattr(cache, "layer_class_to_replicate", None)])
    for kind in kinds:
        # Subclasses of the dynamic layer quantize, compress, or are a user's.
        name = kind.__name__
        if name not in LAYERS or kind is not getattr(cache_utils, name, None):
            static = " For compiled steps give cache_implementation='static' instead."
            raise ValueError(
                f"the given cache has a layer of type {name}: rows cannot be rolled back there. "
                f"{remedy}{static if 'Static' in name else ''}"
            )
    recurrent = (one for one in cache.layers if hasattr(one, "conv_states"))
    if any(getattr(one, "record_past", False) for one in recurrent):
        raise ValueError(
            "the given cache has recurrent layers that record their past (activate_past_recording, "
            "which stock assisted decoding calls, too): strategies keep no more than a step's. "
            f"{remedy}"
        )
    leaves_out = "strategies keep states in a cache of their own, which would leave that out."
    if type(cache) not in (Cache, DynamicCache):
        raise ValueError(
            f"the given cache is of type {type(cache).__name__}, which may do more than keep "
            f"states: {leaves_out} {remedy}"
        )
    if replaced := sorted(_replaced(cache, *cache.layers)):
        raise ValueError(
            f"methods of the given cache are not Transformers' own ({', '.join(replaced)}): "
            f"{leaves_out} Generate without assistant_strategy."
        )
    lengths = {
        layer.keys.shape[2] for layer in cache.layers
        if getattr(layer, "keys", None) is not None and not getattr(layer, "is_sliding", False)
    }  # fmt: skip
    if len(lengths) > 1:
        raise ValueError(
            f"layers of the given cache hold {sorted(lengths)} keys: some attend to an image and "
            "not to tokens, and a tree's nodes go to all of them. Generate without "
            "assistant_strategy."
        )


def _replaced(*things: Any) -> set[str]:
    """Methods of caches and layers, or of their classes, that somebody has replaced."""
    kinds = {kind for thing in things for kind in type(thing).__mro__}
    names = {
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType) and not origin(value).startswith(_STOCK)
    }
    return names | {
        f"{type(thing).__name__}.{name}"
        for thing in things
        for name, value in vars(thing).items()
        if callable(value) and callable(getattr(type(thing), name, None))
    }


def _held(layer: Any) -> dict[str, Tensor]:
    """What a Transformers layer of attention holds, ``(batch, heads, kept, dim)`` each."""
    if getattr(layer, "keys", None) is None:
        return {}
    held = {"keys": layer.keys, "values": layer.values}
    if getattr(layer, "indexer_keys", None) is not None:
        held["indexer_keys"] = layer.indexer_keys[:, None]
    return held


def _copy_in(target: Tensor, source: Tensor, columns: Tensor | None, seq: int) -> None:
    """Copy and pack states ``(batch, heads, kept, dim)``, the last ``kept`` of ``seq`` columns;
    ``columns`` ``(batch, slots)``: where each slot's state is, None if columns are slots.

    Slots of what a sliding layer dropped are outside every later query's window.
    """
    first = seq - source.shape[2]
    if columns is not None:
        places = (columns.to(source.device) - first).clamp(0, source.shape[2] - 1)
        source, first = source.take_along_dim(places[:, None, :, None], 2), 0
    target[:, :, first : first + source.shape[2]].copy_(source)


def _visible(tree: Tree, first: int) -> Tensor:
    """What the nodes ``first ..`` of a tree see; a function of its own, as caches are pickled."""
    return tree.ancestors[:, first:]
