"""Recurrent layers of the tree cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from hf_spec.core.device import Ragged, to_device
from hf_spec.core.tree import Tree
from hf_spec.modeling_patches.linear_attention import CONV, Kept, Rule, Step, recurrent_rules
from hf_spec.modeling_patches.support import one_token

# -- What all recurrent layers hold: states, and in a step what their rules keep of its nodes ------
#
# Inside a block of nodes states are constant. A commit computes those at the accepted ends as new
# tensors, all layers of equal shape together. The states before the last step, and what that step
# has kept, stay until the next one begins or the call ends, so that it can be shortened.

#: ``conv`` or ``rule``, the layer, and the number of the state in it.
StateKey = tuple[str, int, int]


class StateSnapshot(NamedTuple):
    """The states that belong to certain lengths of the rows."""

    lengths: list[int]
    tensors: list[Tensor]  # for each group of equal states, (keys, batch, ...)


class LastStep(NamedTuple):
    """The last step."""

    before: StateSnapshot  # the states that it began with
    kept: dict[StateKey, list[Kept]]  # what it kept of its nodes
    path: Tensor  # (batch, depth) accepted nodes


class RecurrentStates:
    """The states of all recurrent layers.

    Args:
        rules: the rule of each layer besides its convolution.
        batch_size: number of rows.
    """

    beside_keys = True  # whether any layer of the model has keys

    def __init__(self, rules: dict[int, Rule], batch_size: int):
        self.rules = rules
        self.groups: list[list[StateKey]] = []
        self.snapshot = StateSnapshot([0] * batch_size, [])
        self.visible: Callable[[], Tensor]  # which nodes each node of the block sees
        #: Whether the running forward is one token per row, for which layers run their own code on
        #: copies of the states.
        self.plain = False
        self._steps: dict[torch.device, Step] = {}
        self._kept: dict[StateKey, list[Kept]] = {}
        self._index: dict[StateKey, tuple[int, int]] = {}
        self._running, self._calls = (0, 0), 0
        self._device = torch.device("cpu")
        self._last: LastStep | None = None
        self._prompt: StateSnapshot | None = None
        self._traced = False

    # -- taking over and giving back -----------------------------------------------------------

    def take_over(self, layers: Sequence[Any], lengths: list[int]) -> None:
        """Take over the states of Transformers' cache layers, which keep none of them."""
        self.beside_keys = any(getattr(layer, "keys", None) is not None for layer in layers)
        by_kind: dict[Hashable, list[tuple[StateKey, Tensor]]] = {}
        for key, state in stock_states(layers):
            kind = self._rule(key), state.shape[1:], state.dtype, state.device
            by_kind.setdefault(kind, []).append((key, state))
        self.groups = [[key for key, _ in members] for members in by_kind.values()]
        self._index = {
            key: (group, index)
            for group, keys in enumerate(self.groups)
            for index, key in enumerate(keys)
        }
        # All states have one layout, as code is compiled for each.
        stacked = [
            torch.stack([state for _, state in members]).contiguous()
            for members in by_kind.values()
        ]
        self.snapshot = StateSnapshot(lengths, stacked)

    def states(self) -> Iterator[tuple[StateKey, Tensor]]:
        """Each state, ``(batch, ...)``."""
        for keys, tensor in zip(self.groups, self.snapshot.tensors):
            yield from zip(keys, tensor)

    # -- a block, as layers see it -------------------------------------------------------------

    def begin(self, visible: Callable[[], Tensor], first: int, plain: bool) -> None:
        """Open a block, ``visible`` as of :class:`Step`, asked for when a layer runs uncompiled;
        ``first`` nodes of it were forwarded earlier in this step."""
        self.visible, self._steps = visible, {}
        self.plain, self._last = plain, None
        if not first:
            self._kept = {}

    @property
    def step(self) -> Step:
        """The open block, on the running layer's device."""
        device = self._device
        if device not in self._steps:
            self._steps[device] = Step(self.visible().to(device), False if self._traced else None)
        return self._steps[device]

    def run_next(self, layer: int, number: int = 0) -> None:
        """The rules that run next are those of this layer and state."""
        self._running, self._calls = (layer, number), 0

    def copy(self, kind: str, layer: int, number: int) -> Tensor | None:
        """A copy of a state for the running layer's own code; None if the layer has no such state,
        or runs by a rule instead."""
        key = kind, layer, number
        if not self.plain or key not in self._index:
            return None
        state = self._state(key).clone()
        self._kept[key] = [{"state": state}]
        return state

    def append(self, layer: int, number: int, inputs: Tensor) -> None:
        """What a plain step adds to the inputs ``(batch, channels, n)`` of a convolution."""
        before = self._state(("conv", layer, number))
        state = torch.cat([before, inputs.to(before.dtype)], -1)[..., -before.shape[-1] :]
        self._kept["conv", layer, number] = [{"state": state}]

    def replace(self, layer: int, number: int, state: Tensor) -> None:
        """What a plain step makes of a recurrent state."""
        self._kept["rule", layer, number] = [{"state": state}]

    def run(self, rule: Rule, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See :class:`hf_spec.modeling_patches.linear_attention.States`."""
        key = (rule.kind, *self._running)
        call = self._calls if rule.kind == "rule" else 0
        state = self._state(key)
        self._device = state.device
        if state.ndim > rule.state_ndim:  # a call per head
            state = state[:, call]
        kept = self._kept.get(key, [])
        earlier = kept[call] if self.step.old and len(kept) > call else None
        out, new = rule.run(state, self.step, earlier, *args, **kwargs)
        self._kept[key] = [*kept[:call], new, *kept[call + 1 :]]
        self._calls += rule.kind == "rule"
        return out, state

    def _rule(self, key: StateKey) -> Rule:
        return CONV if key[0] == "conv" else self.rules[key[1]]

    def _state(self, key: StateKey) -> Tensor:
        if key not in self._index:
            raise RuntimeError(f"no state of layer {key[1]} was taken over from the prompt.")
        group, index = self._index[key]
        return self.snapshot.tensors[group][index]

    # -- after a step --------------------------------------------------------------------------

    def commit(self, before: list[int], counts: Sequence[int], path: Tensor) -> None:
        """Advance the states by ``counts`` nodes of each row's accepted path ``(batch, depth)``,
        where rows had the lengths ``before`` the step."""
        missing = [key for key in self._index if key not in self._kept]
        if missing and any(counts):
            raise RuntimeError(
                f"layer {missing[0][1]} has a state that this step did not advance: it runs code "
                "that is not known."
            )
        start = StateSnapshot(before, self.snapshot.tensors)
        last = LastStep(start, self._kept, path)
        lengths = [length + count for length, count in zip(before, counts)]
        self._last, self.snapshot = last, StateSnapshot(lengths, self._advanced(last, counts))

    def _advanced(self, last: LastStep, counts: Sequence[int]) -> list[Tensor]:
        """The states after so many nodes of each row's path."""
        if not any(counts):
            return last.before.tensors
        advanced = []
        for keys, states in zip(self.groups, last.before.tensors):
            count = to_device(list(counts), states.device)
            path = last.path[:, : max(counts)].to(states.device)
            advanced.append(self._advance(keys, states, last, path, count))
        return advanced

    def _advance(
        self, keys: list[StateKey], states: Tensor, last: LastStep, path: Tensor, count: Tensor
    ) -> Tensor:
        """Advance the states ``(keys, batch, ...)`` of layers that are alike."""
        kept = [last.kept[key] for key in keys]
        if "state" in kept[0][0]:
            ends = torch.stack([calls[0]["state"] for calls in kept]).to(states.dtype)
            return torch.where((count > 0).view(1, -1, *[1] * (states.ndim - 2)), ends, states)
        rule = self._rule(keys[0])
        # Layers become rows of the batch.
        paths, counts = path.repeat(len(kept), 1), count.repeat(len(kept))
        split = states.ndim - 1 > rule.state_ndim  # a call per head
        parts = []
        for call in range(len(kept[0])):
            flat = {
                name: torch.cat([calls[call][name] for calls in kept]) for name in kept[0][call]
            }
            state = (states[:, :, call] if split else states).flatten(0, 1)
            parts.append(rule.advance(state, flat, paths, counts).unflatten(0, states.shape[:2]))
        return torch.stack(parts, 2) if split else parts[0]

    def repair(self, lengths: list[int]) -> list[int]:
        """Make the states those of these lengths after an exception, which may have left the keys'
        lengths behind; return the lengths that both have then."""
        last = self._last
        if not self.groups or self.snapshot.lengths == lengths:
            return lengths
        if last is not None and last.before.lengths == lengths:  # in a commit
            self.snapshot, self._last = last.before, None
        return self.snapshot.lengths

    def settle(self) -> None:
        """Forget the last step, whose nodes' rows take more memory than the states."""
        self._last, self._kept = None, {}

    def remember(self) -> None:
        """Remember these states, so that rows can be cut to their present lengths later."""
        self._prompt = self.snapshot  # whose tensors never change

    def reachable(self, lengths: list[int]) -> list[int]:
        """The greatest lengths up to these that rows can be cut to."""
        if not self.groups:
            return lengths
        last = self.snapshot if self._last is None else self._last.before
        prompt = [0] * len(lengths) if self._prompt is None else self._prompt.lengths
        return [
            min(length, now) if length >= start else end if length >= end else 0
            for length, now, start, end in zip(lengths, self.snapshot.lengths, last.lengths, prompt)
        ]

    def cut(self, lengths: list[int]) -> None:
        """Cut rows to lengths that are reachable."""
        if not self.groups or lengths == self.snapshot.lengths:
            return
        prompt, (known, tensors) = self._prompt, self._shortened(lengths)
        rows = [row for row, (new, now) in enumerate(zip(lengths, known)) if new < now]
        if rows:
            tensors = [tensor.clone() for tensor in tensors]
        for row in rows:
            for index, tensor in enumerate(tensors):
                tensor[:, row] = prompt.tensors[index][:, row] if lengths[row] and prompt else 0
        if prompt is not None:  # what comes after a shorter start is another prompt
            ends = [end if new >= end else 0 for new, end in zip(lengths, prompt.lengths)]
            self._prompt = StateSnapshot(ends, prompt.tensors)
        self.snapshot, self._last = StateSnapshot(list(lengths), tensors), None

    def _shortened(self, lengths: list[int]) -> StateSnapshot:
        """The states in which rows that end within the last step have these lengths."""
        last, now = self._last, self.snapshot
        if last is None:
            return now
        old = last.before.lengths
        shortened = [
            new if new >= start else have for start, new, have in zip(old, lengths, now.lengths)
        ]
        if shortened == now.lengths:
            return now
        counts = [new - start for new, start in zip(shortened, old)]
        return StateSnapshot(shortened, self._advanced(last, counts))

    # -- rows ----------------------------------------------------------------------------------

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows in this order; they may repeat."""
        self.snapshot = _selected(self.snapshot, rows)
        self._prompt = None if self._prompt is None else _selected(self._prompt, rows)
        self.settle()

    def join(self, other: RecurrentStates) -> None:
        """Take the rows of others of the same model behind these."""
        assert self.groups == other.groups
        self.snapshot = _joined(self.snapshot, other.snapshot)
        own, new = self._prompt, other._prompt
        self._prompt = None if own is None or new is None else _joined(own, new)
        self.settle()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_steps": {}}

    # -- as inputs of a graph ------------------------------------------------------------------

    @property
    def layout(self) -> Hashable:
        """What a graph over :meth:`tensors` depends on besides their shapes."""
        return tuple(map(tuple, self.groups)), self.plain

    def tensors(self) -> list[Tensor]:
        return self.snapshot.tensors

    def using(self, tensors: Iterator[Tensor]) -> Self:
        """The same with other :meth:`tensors`, as a graph sees them."""
        own = copy.copy(self)
        own.snapshot = StateSnapshot([], [next(tensors) for _ in self.snapshot.tensors])
        own._traced = True
        return own

    @property
    def num_kept(self) -> int:
        """Number of :meth:`kept_tensors`."""
        return len([*self._names()])

    def kept_tensors(self) -> list[Tensor]:
        """What the step has kept, as results of a graph; empty tensors for skipped layers."""
        kept = self._kept
        return [
            kept[key][call][name] if key in kept else self._state(key).new_empty(0)
            for key, call, name in self._names()
        ]

    def set_kept(self, tensors: Sequence[Tensor]) -> None:
        """Take over :meth:`kept_tensors` of a graph."""
        self._kept = {}
        for (key, call, name), tensor in zip(self._names(), tensors):
            if not tensor.numel():
                continue
            calls = self._kept.setdefault(key, [])
            if len(calls) == call:
                calls.append({})
            calls[call][name] = tensor

    def _names(self) -> Iterator[tuple[StateKey, int, str]]:
        for keys, tensor in zip(self.groups, self.snapshot.tensors):
            for key in keys:
                rule = self._rule(key)
                split = tensor.ndim - 1 > rule.state_ndim and not self.plain
                names = ("state",) if self.plain else rule.keeps
                for call in range(tensor.shape[2] if split else 1):
                    yield from ((key, call, name) for name in names)


def stock_states(layers: Sequence[Any]) -> Iterator[tuple[StateKey, Tensor]]:
    """The states of Transformers' cache layers, ``(batch, ...)`` each."""
    for index, layer in enumerate(layers):
        for kind, name in (("conv", "conv_states"), ("rule", "recurrent_states")):
            for number, state in (getattr(layer, name, None) or {}).items():
                if state is not None:
                    yield (kind, index, number), state


def _selected(snapshot: StateSnapshot, rows: Sequence[int]) -> StateSnapshot:
    tensors = [
        tensor.index_select(1, to_device(rows, tensor.device)) for tensor in snapshot.tensors
    ]
    return StateSnapshot([snapshot.lengths[row] for row in rows], tensors)


def _joined(one: StateSnapshot, other: StateSnapshot) -> StateSnapshot:
    tensors = [torch.cat(pair, 1) for pair in zip(one.tensors, other.tensors)]
    return StateSnapshot(one.lengths + other.lengths, tensors)


# -- What recurrent layers of Transformers' models ask of their cache, also in training ------------


class OpenBlock(NamedTuple):
    """The block of nodes that forwards are about to write."""

    start: int  # slot of its first node, if rows are equally long
    slots: Tensor | None  # (batch, n) slot of each node otherwise
    end: int  # number of slots that attention sees, without the front slots
    front: bool = False  # whether attention sees the front slots, too
    tree: Tree | None = None  # the nodes; None where plain generation appends tokens
    first: int = 0  # nodes of the tree that are written before this block
    ragged: Ragged | None = None  # the nodes, if the forward leaves padding out


class StatefulCache(Cache):
    """A cache that may hold recurrent states."""

    recurrent: RecurrentStates | None = None  # None if no layer has any
    block: OpenBlock | None = None  # None if none is open

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution; None in a block, whose nodes run by other rules."""
        return self._in_block().copy("conv", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._in_block().copy("rule", layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        states = self._in_block()
        states.run_next(layer_idx, state_idx)
        if states.plain:
            states.append(layer_idx, state_idx, conv_states)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        states = self._in_block()
        if states.plain:
            states.replace(layer_idx, state_idx, recurrent_states)
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return self._in_block().plain

    def _in_block(self) -> RecurrentStates:
        if self.recurrent is None or self.block is None:
            raise ValueError(
                "TreeCache: recurrent layers continue what generate(assistant_strategy=...) "
                "returned, and only in another such call. Elsewhere start without a cache."
            )
        return self.recurrent


class SequenceCache(StatefulCache):
    """Keys and values that a forward over whole sequences appends, for training, beside recurrent
    states that are its own: nothing is committed, and gradients flow through what it holds."""

    def __init__(self, states: RecurrentStates):
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.recurrent, self.block = states, OpenBlock(0, None, 0)


def sequence_cache(states: RecurrentStates | None) -> Cache:
    """An empty cache; ``states`` as of :func:`states_before`."""
    return DynamicCache() if states is None else SequenceCache(states)


@torch.no_grad()
def states_before(model: Any, batch_size: int) -> RecurrentStates | None:
    """The recurrent states before the first token of sequences; None if the model has none."""
    rules = recurrent_rules(model)
    if not rules:
        return None
    states = RecurrentStates(rules, 1)
    # The model's own code makes states of its shapes.
    states.take_over(one_token(model).layers, [0])
    for tensor in states.snapshot.tensors:
        tensor.zero_()
    states.select([0] * batch_size)
    return states
