"""An assistant that attends to the model's keys and values, such as those published for Gemma 4.

A row of it is a token and the model's final state of the token before; where the model has not
been, the assistant's own output takes the place of this state. All rows of a step stand at the
position of its root and see the committed tokens before it, not each other. So a level of a tree is
as many rows of their own, and the assistant has no cache: nothing is written, run again or undone.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_spec.cache.buffers import aligned
from hf_spec.cache.convert import take_over
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.transfer import to_device
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult
from hf_spec.drafting.forward_drafter import GrowOptions
from hf_spec.drafting.grow import Frontier
from hf_spec.drafting.state import DecodeState
from hf_spec.methods.draft_model.assistant import AssistantDrafter
from hf_spec.model.block import Slots
from hf_spec.model.hidden_states import Reads, captured, gather_hidden, supported_kwargs
from hf_spec.model.programs import DraftProgram
from hf_spec.modeling_patches.attention_masks import TreeAttention
from hf_spec.modeling_patches.cache_name import CACHE
from hf_spec.modeling_patches.modules import only_logits
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.modeling_patches.shared_kv import shared_kv_sources, with_given_masks
from hf_spec.modeling_patches.weights import placement


class Seen(NamedTuple):
    """What all rows of a step see, on the assistant's device.

    Attributes:
        states: by layer type, keys and values ``(batch, kv_heads, slots, head_dim)``: views of the
            model's cache, unless that is on another device or in another dtype.
        masks: by layer type, ``(batch, 1, 1, slots)`` bool, True for what is seen; or packed.
        positions: ``(batch, 1)`` of the roots.
    """

    states: dict[str, tuple[Tensor, ...]]
    masks: dict[str, Tensor]
    positions: Tensor


class SharedKVDrafter(AssistantDrafter):
    """An assistant drafts from the model's keys, values and final states.

    Raises:
        ValueError: see :class:`AssistantDrafter`; or the assistant is not one for this model.
    """

    reads = Reads("last")

    def __init__(self, model: Any, options: GrowOptions, assistant: Any):
        super().__init__(model, options, assistant)
        self._sources = shared_kv_sources(model, assistant)
        self._attention = TreeAttention(assistant, beside=model)
        with_given_masks(assistant, self._attention.changes)
        self._hidden: Tensor | None = None  # (batch, hidden) the model's, before each root
        #: In a program: the model's cache, lengths before the step, and shift of positions.
        self._given: tuple[TreeCache, Tensor, Tensor] | None = None
        self._seen: Seen | None = None  # while a tree grows

    def start(self, state: DecodeState) -> None:
        super().start(state)
        self._target: Any = state.target
        graphs = state.target.graphs
        #: What programs that contain the assistant depend on; None if there are none.
        self._kind = None if graphs is None else graphs.admit(self.assistant)
        if self._kind is None:
            self.outside = "the assistant is on another device, or cannot be recorded"

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        self._hidden = hidden
        if self._given is not None:
            cache, lengths, shift = self._given
            self._seen = self._see(cache, lengths + result.counts, cache.capacity, shift)

    def program(self, state: DecodeState, tree: Tree, grows: bool) -> DraftProgram | None:
        if not grows:
            return None
        levels = self.num_levels(state)
        self._target.reserve(tree)
        program = self.grows(state, tree, self.num_grown, levels, self.width)
        return program._replace(reads_cache=True)

    def carried(self, tree: Tree) -> tuple[list[Tensor], list[Tensor], Hashable]:
        target = self._target
        changing = [target.cache.lengths, target.position_shift]
        return target.cache.tensors(), changing, (self._kind, target.cache.layout)

    def traced(self, tensors: Sequence[Tensor], in_place: bool) -> Self:
        *held, lengths, shift = tensors
        own, root = copy.copy(self), Tree.roots(lengths)
        cache = self._target.cache.traced_with(held, lengths, lengths[:, None], root, in_place)
        own._given = cache, lengths, shift
        return own

    def select(self, rows: Sequence[int]) -> None:
        if self._hidden is not None:
            self._hidden = self._hidden[to_device(rows, self._hidden.device)]

    def catch_up(self, state: DecodeState) -> None:
        cache = state.cache
        keys = aligned(cache.max_length)
        self._seen = self._see(cache, cache.lengths, keys, state.target.position_shift)

    def _see(self, cache: TreeCache, lengths: Tensor, keys: int, shift: Tensor) -> Seen:
        """The tokens before the roots, ``lengths`` (batch,) of a cache, in so many slots of layers
        without a window; ``shift``: (batch, 1) of their positions."""
        device, dtype = placement(self.assistant)
        lengths, seen = lengths.to(device), {}
        states, none = {}, torch.zeros(len(lengths), 1, 0, dtype=torch.bool, device=device)
        for kind, source in self._sources.items():
            layer = cache.layers[source.layer]
            slots = Slots.of(cache.states, lengths, 0, keys, layer.window)
            both = layer.views["keys"], layer.views["values"]
            parts = (part[:, :, : slots.held.shape[1]] for part in both)
            states[kind] = tuple(part.to(device, dtype) for part in parts)
            # The window of the model's own layer. Transformers' reaches two tokens further back, of
            # which the cache of a longer prompt has nothing.
            at = lengths[:, None]
            begin = None if source.window is None else at - source.window + 1
            seen[kind] = slots.mask(none, lengths, self._attention.packs, begin, at)
        return Seen(states, seen, lengths[:, None] + shift.to(device))

    def level(self, frontier: Frontier) -> Tensor:
        assert self._seen is not None and self._hidden is not None
        states, visible, positions = self._seen
        before = self._hidden[:, None]
        if frontier.depth:
            assert self._after is not None
            before = gather_hidden(self._after, frontier.parents)
        ids, count = frontier.tokens.to(placement(self.model).device), frontier.tokens.shape[1]
        embeddings = self.model.get_input_embeddings()(ids)
        attention, dtype = self._attention, placement(self.assistant).dtype
        found = attention.changes.run(
            self.assistant,
            inputs_embeds=torch.cat([embeddings, before.to(embeddings)], dim=-1).to(dtype),
            attention_mask=attention.convert(
                {kind: mask.expand(-1, -1, count, -1) for kind, mask in visible.items()}, dtype
            ),
            position_ids=positions.expand(-1, count),
            shared_kv_states=states, use_cache=False, return_dict=True,
            # Of rows given by number none are cut off, which fails without per-layer embeddings.
            logits_to_keep=torch.arange(count, device=positions.device),
            **only_logits(self.assistant),
        )  # fmt: skip
        self._after = found.last_hidden_state
        logits: Tensor = found.logits[..., : self.shared]
        return logits

    def finish(self) -> None:
        super().finish()
        self._seen = None

    # -- stock assisted decoding -------------------------------------------------------------

    def chain(self, input_ids: Tensor) -> list[int]:
        model, known = self.model, input_ids[:, :-1].to(placement(self.model).device)
        if not known.shape[1]:  # nothing to attend to
            return []
        source = DynamicCache(config=model.config.get_text_config(decoder=True))
        changes = Changes()
        states = captured(model, changes)
        inputs = {"input_ids": known, "use_cache": True, "logits_to_keep": 1, CACHE: source}
        changes.run(model, **supported_kwargs(model, **inputs))
        cache = TreeCache(len(source.layers), 1, known.device)
        take_over(cache, source, more=0)
        own = copy.copy(self)
        own._hidden, none = states[0][:, -1], torch.zeros_like(known[:, :1])
        own._seen = own._see(cache, cache.lengths, aligned(cache.max_length), none)
        return own.chain_after(input_ids[:, -1:])
