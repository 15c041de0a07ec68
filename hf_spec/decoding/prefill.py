"""The prompt's forward pass.

Transformers itself prefills a new prompt (or a continued ``DynamicCache``), exactly as in plain
generation; the result is packed into a ``TreeCache``. A continued ``TreeCache`` gets its new tokens
in chunks through the tree forward; their number may differ between rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from hf_spec.cache.convert import check_packable
from hf_spec.cache.stateful import with_layers
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.decoding.continued import begin_rope, check_gaps, extend, new_tokens, padding_before
from hf_spec.decoding.handover import Handover
from hf_spec.decoding.inputs import LaterInputs, PromptInputs
from hf_spec.drafting.drafter import Drafter
from hf_spec.model.appending import Prefilled
from hf_spec.model.compiled import CompiledTarget
from hf_spec.model.graphs import Graphs
from hf_spec.model.hidden_states import Reads, captured, states_at
from hf_spec.model.target import Target
from modeling_patches.cache_name import CACHE
from modeling_patches.linear_attention import loses_state
from modeling_patches.per_call import Changes


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


def prefill(
    model: Any,
    input_ids: Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    handover: Handover,
    drafter: Drafter | None,
    reads: Reads,
    graphs: Graphs | None = None,
) -> Prefilled:
    """Run the prompt and return a tree forward that continues it.

    Args:
        drafter: the drafter whose probes later forwards run.
        reads: the hidden states that are returned.
        graphs: compiled code for the forwards after the prompt; the prompt itself runs uncompiled.
    """
    given, sequences = handover.given, handover.sequences
    budget = sequences.max_length - sequences.width
    first = PromptInputs.of(model, input_ids, model_kwargs)
    later = LaterInputs.of(model, input_ids, model_kwargs)

    probe_inputs = None if drafter is None else drafter.probe_inputs

    def make_target(cache: TreeCache, lengths: Tensor, later: LaterInputs) -> Target:
        """A tree forward after prompts of these lengths."""
        shift = cache.shift
        if shift is None:
            shift = cache.shift = lengths.new_zeros(later.axes, len(lengths))
        # The last emitted token is never forwarded, hence - 2 and not - 1.
        limit = lengths + shift[0] + max(budget - 2, 0)
        padding = torch.zeros_like(lengths) if mask is None else mask.shape[1] - lengths
        make = Target if graphs is None else partial(CompiledTarget, graphs=graphs)
        return make(
            model, cache, limit, shift, padding, later.others, later.per_token, probe_inputs,
            reads,
        )  # fmt: skip

    mask = model_kwargs.get("attention_mask")
    real = None if mask is None else mask.bool()
    columns = budget + (sequences.width if mask is None else mask.shape[1])
    gaps = check_gaps(model, real, isinstance(given, TreeCache), columns)
    if isinstance(given, TreeCache):
        cache, rows = given, new_tokens(handover, mask, config, model)
        first.check_tokens_alone(later, [len(row) for row in rows], cache.generated)
        counts = torch.tensor([len(row) for row in rows], device=cache.lengths.device)
        if handover.allocate is None:
            cache.states.allocate_by(None)
        else:
            cache.states.rehouse(handover.allocate)
        cache.states.limit = max(map(sum, zip(cache.host_lengths, map(len, rows)))) + budget
        found = extend(make_target(cache, cache.lengths + counts, later), rows)
    else:
        if given is not None:
            check_packable(given)
            _check_state_stays(model, given, input_ids, config, mask)
        run, chunks = model._prefill, []
        if reads.nodes:  # otherwise the model runs as it is, compiled if it is compiled
            changes = Changes()
            chunks = captured(model, changes, reads.layers, _last, reads.tokens == "last")
            run = partial(changes.run, run)
        outputs = run(input_ids, config, model_kwargs, is_first_iteration=True)
        source = with_layers(outputs.get(CACHE))
        check_packable(source)
        logits = outputs.logits[:, -1]
        hidden, following = _read(reads, chunks, input_ids, real)
        chunks.clear()
        front = 0 if probe_inputs is None else probe_inputs.num_front
        cache = handover.take_over(source, real, budget, front, logits)
        later = LaterInputs.of(model, input_ids, model_kwargs, outputs)
        cache.shift = later.shift(cache.lengths)
        cache.depend_on(first.once(later) + gaps)
        cache.generated = first.changed(later)
        found = Prefilled(make_target(cache, cache.lengths, later), logits, hidden, following)
    handover.begin(cache)
    columns = 0 if mask is None else mask.shape[1]
    cache.padding = padding_before(columns, cache.host_lengths)
    begin_rope(found.target, handover)
    return found


def _last(hidden: Tensor) -> Tensor:
    # Transformers cuts it out: PyTorch's product of a part copies the whole weight in 16 bits.
    return hidden[:, -1:]


def _check_state_stays(
    model: Any, given: DynamicCache, input_ids: Tensor, config: GenerationConfig,
    mask: Tensor | None,
) -> None:  # fmt: skip
    """Refuse prompts in which Transformers loses a recurrent state."""
    if not loses_state(model):
        return
    width = input_ids.shape[1]
    known = (getattr(layer, "has_previous_state", {}).values() for layer in given.layers)
    continued = any(map(any, known))
    whole = mask is None or mask.shape[1] == width
    keyed = any(getattr(layer, "keys", None) is not None for layer in given.layers)
    new = width - given.get_seq_length() if continued and whole and keyed else width
    chunk = config.prefill_chunk_size or max(new, 1)
    # The first forward may be of any size if no state is there before it.
    sizes = [min(chunk, new - start) for start in range(0, new, chunk)][0 if continued else 1 :]
    if any(size > 1 for size in sizes):
        what = f"prefill_chunk_size={chunk}" if chunk < new else f"a DynamicCache as {CACHE}"
        raise ValueError(
            f"{what}: {type(model).__name__} loses its recurrent state where a forward of several "
            "tokens continues it, in plain generation, too. Give the whole prompt at once without "
            "a cache, or with the TreeCache that a call with assistant_strategy returned."
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
    return states_at(hidden, order), rows
