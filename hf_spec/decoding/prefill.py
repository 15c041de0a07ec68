"""The prompt's forward pass.

Transformers itself prefills a new prompt (or a continued ``DynamicCache``), exactly as in plain
generation; the result is packed into a ``TreeCache``. A continued ``TreeCache`` gets its new tokens
in chunks through the tree forward; their number may differ between rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from hf_spec.cache.convert import check_packable, take_over
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.transfer import to_device
from hf_spec.decoding.cache_owner import CacheOwner
from hf_spec.decoding.cache_reuse import (
    begin_rope,
    check_gaps,
    check_positions,
    new_tokens,
    size_of,
)
from hf_spec.decoding.inputs import LaterInputs, PromptInputs
from hf_spec.model.appending import Prefilled, append
from hf_spec.model.compiled import CompiledTarget
from hf_spec.model.graphs import Graphs
from hf_spec.model.hidden_states import Reads, captured, gather_hidden
from hf_spec.model.instructions import warn_if_slow
from hf_spec.model.probe_inputs import ProbeInputs
from hf_spec.model.target import Target
from hf_spec.modeling_patches.cache_name import CACHE
from hf_spec.modeling_patches.linear_attention import recurrent_rules
from hf_spec.modeling_patches.per_call import Changes


def real_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """``(batch, width)`` bool, False for padding; None if there is none.

    Raises:
        ValueError: if a row ends with padding, or is nothing else.
    """
    if attention_mask is None:
        return None
    if not bool((attention_mask[:, -1] != 0).all()):
        rows = (attention_mask[:, -1] == 0).nonzero()[:, 0].tolist()
        raise ValueError(
            f"attention_mask ends with padding in rows {rows}: generation continues each row at "
            "its right end. Pad on the left (tokenizer.padding_side = 'left'), and give each row a "
            "token."
        )
    width = input_ids.shape[1]
    return attention_mask[:, -width:].bool() if width else attention_mask[:, :0].bool()


@dataclass
class Prompt:
    """A call's prompt, and what its forward needs.

    Attributes:
        probe_inputs: of the probes that later forwards run; None if they run none.
        reads: the hidden states that are returned.
        graphs: compiled code for the forwards after the prompt; the prompt itself runs uncompiled.
    """

    model: Any
    input_ids: Tensor
    config: GenerationConfig
    model_kwargs: dict[str, Any]
    owner: CacheOwner
    probe_inputs: ProbeInputs | None
    reads: Reads
    graphs: Graphs | None = None

    def __post_init__(self) -> None:
        sequences, given = self.owner.sequences, (self.model, self.input_ids, self.model_kwargs)
        self.first, self.later = PromptInputs.of(*given), LaterInputs.of(*given)
        self.budget = sequences.max_length - sequences.width
        mask = self.mask = self.model_kwargs.get("attention_mask")
        self.real = None if mask is None else mask.bool()
        columns = self.budget + (sequences.width if mask is None else mask.shape[1])
        self.continues = isinstance(self.owner.given, TreeCache)
        self.gaps = check_gaps(self.model, self.real, self.continues, columns)

    def run(self) -> Prefilled:
        """Run it; returns a tree forward that continues it, and what it leaves to the drafter."""
        prefilled = self.run_as_trees() if self.continues else self.run_by_transformers()
        self.owner.begin()
        begin_rope(prefilled.target, self.owner)
        return prefilled

    def run_as_trees(self) -> Prefilled:
        """Append the new tokens to a continued ``TreeCache``."""
        owner, cache, given = self.owner, self.owner.given, self.model_kwargs
        if given.get("inputs_embeds") is not None:
            raise ValueError(
                f"inputs_embeds with a TreeCache as {CACHE}: it is continued by tokens. Give "
                f"input_ids alone, or leave {CACHE} out."
            )
        rows = new_tokens(owner, self.mask, self.config, self.model)
        new = list(map(len, rows))
        self.first.check_tokens_alone(self.later, new, cache.generated)
        if self.graphs is None:
            cache.states.allocate_by(None)
        else:
            cache.states.rehouse(self.graphs.allocate)
        lengths = [length + count for length, count in zip(cache.host_lengths, new)]
        cache.states.limit = max(lengths) + self.budget
        counts, told = to_device([new, lengths], cache.lengths.device)
        target = self._target(cache, told, self.later)
        ends = told + target.position_shift[:, 0]
        check_positions(given.get("position_ids"), self.mask, counts, ends)
        if target.rope is not None:
            target.rope.move(max(lengths))
        return append(target, rows)

    def run_by_transformers(self) -> Prefilled:
        """Run the prompt as plain generation does, and take over its cache."""
        model, owner, reads = self.model, self.owner, self.reads
        if owner.given is not None:
            check_packable(owner.given)
            if owner.filled is not None:
                _check_alone(self.input_ids, self.real)
        run, chunks = model._prefill, []
        if reads.nodes:  # otherwise the model runs as it is, compiled if it is compiled
            changes = Changes()
            chunks = captured(model, changes, reads.layers, _last, reads.tokens == "last")
            run = partial(changes.run, run)
        outputs = run(self.input_ids, self.config, self.model_kwargs, is_first_iteration=True)
        source = outputs.get(CACHE)
        warn_if_slow(model, source)
        check_packable(source)
        logits = outputs.logits[:, -1]
        hidden, following = _read(reads, chunks, self.input_ids, self.real)
        chunks.clear()
        cache = self._cache(source, logits)
        later = LaterInputs.of(model, self.input_ids, self.model_kwargs, outputs)
        cache.shift = later.shift(cache.lengths)
        cache.depend_on(self.first.once(later) + self.gaps)
        cache.generated = self.first.changed(later)
        return Prefilled(self._target(cache, cache.lengths, later), logits, hidden, following)

    def _cache(self, source: DynamicCache, logits: Tensor) -> TreeCache:
        """The call's cache, from the states that the prompt's forward left; ``logits`` ``(batch,
        vocab)`` are on its main device."""
        owner, width = self.owner, self.owner.sequences.width
        allocate = None if self.graphs is None else self.graphs.allocate
        rules, rows = recurrent_rules(self.model), len(logits)
        # The call's before it takes over anything, as this empties what may be the caller's.
        cache = owner.cache = TreeCache(len(source.layers), rows, logits.device, allocate, rules)
        cache.made_by = size_of(self.model)
        if width:  # otherwise the prompt was given as embeddings
            owner.history = [[] for _ in range(rows)]
        front = 0 if self.probe_inputs is None else self.probe_inputs.num_front
        take_over(cache, source, self.real, self.budget, front, width)
        if owner.filled is None:  # nobody needs what is left, such as recurrent states
            source.layers.clear()
        return cache

    def _target(self, cache: TreeCache, lengths: Tensor, later: LaterInputs) -> Target:
        """A tree forward after prompts of these lengths."""
        shift = cache.shift
        if shift is None:
            shift = cache.shift = lengths.new_zeros(later.axes, len(lengths))
        # The last emitted token is never forwarded, hence - 2 and not - 1.
        limit = lengths + shift[0] + max(self.budget - 2, 0)
        make = Target if self.graphs is None else partial(CompiledTarget, graphs=self.graphs)
        return make(
            self.model, cache, limit, shift, later.others, later.per_token,
            self.probe_inputs, self.reads,
        )  # fmt: skip


def _last(hidden: Tensor) -> Tensor:
    # Transformers cuts it out: PyTorch's product of a part copies the whole weight in 16 bits.
    return hidden[:, -1:]


def _check_alone(input_ids: Tensor, real: Tensor | None) -> None:
    """Refuse to fill a caller's ``DynamicCache`` where rows differ in length: one cache for all has
    the longest row's, and what plain generation runs to fill it up."""
    rows, padded = len(input_ids), real is not None and not bool(real.all())
    if rows > 1 or padded:
        what = f"{rows} rows" if rows > 1 else "padding in attention_mask"
        raise ValueError(
            f"a DynamicCache as {CACHE} with {what}: strategies go on with one of a single row "
            "without padding. Leave it out, and give the TreeCache that a call with "
            f"return_dict_in_generate=True returns as {CACHE} of the next."
        )


def _read(
    reads: Reads, chunks: list[Tensor], input_ids: Tensor, real: Tensor | None
) -> tuple[Tensor | None, list[list[int]]]:
    """``hidden`` and ``following`` of :class:`Prefilled`, of the states ``(batch, columns,
    features)`` that Transformers' forwards of a prompt have left; ``real``: ``(batch, columns)``
    bool, False for padding."""
    none: list[list[int]] = [[] for _ in range(len(input_ids))]
    if not chunks:
        return None, none
    if reads.tokens == "last":
        return chunks[-1][:, -1], none
    if not input_ids.shape[1]:
        return chunks[-1][:, -1:].clone(), none
    hidden = chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1)
    ids = input_ids[:, -hidden.shape[1] :]
    if real is None:
        return hidden, ids[:, 1:].tolist()
    real = real[:, -hidden.shape[1] :]
    order = torch.argsort(~real, dim=-1, stable=True)[:, : int(real.sum(-1).max())]
    rows = [row[keep].tolist()[1:] for row, keep in zip(ids, real)]
    return gather_hidden(hidden, order), rows
