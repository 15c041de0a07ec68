"""The prompt's forward pass, and the way into and out of our cache.

A fresh prompt (or a continued ``DynamicCache``) is prefilled by Transformers itself, exactly as in
plain generation; the result is then packed into a ``TreeCache``. A continued ``TreeCache`` takes
its new tokens in chunks through the tree forward, each row its own number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_spec.core.cache import TreeCache, check_packable
from hf_spec.core.tree import TokenTree
from hf_spec.decoding.handover import Handover
from hf_spec.drafting.drafter import DecodingState
from hf_spec.model.graphs import Graphs
from hf_spec.model.hidden_states import final_hidden
from hf_spec.model.tree_forward import ProbeInputs, TreeForward
from modeling_patches.dynamic_rope import Reach, followers, forgets_at
from modeling_patches.per_call import Changes

#: New tokens per forward when a TreeCache is continued; bounds the size of the explicit mask.
CHUNK = 256

#: Slots allocated ahead of the prompt at first; more are added by doubling.
RESERVE = 512

#: Inputs of the model's forward that the loop makes itself.
_MADE = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep",
         "inputs_embeds")  # fmt: skip


@dataclass
class Prefilled:
    """State after the prompt.

    Attributes:
        forward: tree forward over ``forward.cache``.
        logits: ``(batch, vocab)`` after the last prompt token.
        hidden: ``(batch, hidden)`` that token's final hidden state; None if it was not asked for,
            or a compiled model does not tell it.
    """

    forward: TreeForward
    logits: Tensor
    hidden: Tensor | None


def real_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """``(batch, width)`` bool, False for padding; None if there is none.

    Raises:
        ValueError: if a row ends with padding.
    """
    if attention_mask is None:
        return None
    if not bool((attention_mask[:, -1] != 0).all()):
        rows = (attention_mask[:, -1] == 0).nonzero()[:, 0].tolist()
        raise ValueError(
            f"attention_mask ends with padding in rows {rows}: generation continues each row at "
            "its right end. Pad on the left (tokenizer.padding_side = 'left')."
        )
    width = input_ids.shape[1]
    return attention_mask[:, -width:].bool() if width else attention_mask[:, :0].bool()


def prefill(
    model: Any,
    input_ids: Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    handover: Handover,
    probe_inputs: ProbeInputs | None = None,
    wants_hidden: bool = False,
    graphs: Graphs | None = None,
) -> Prefilled:
    """Run the prompt; gives a tree forward behind it.

    Args:
        graphs: compiled code for forwards behind the prompt, which itself runs as the model is.
    """
    given, emission = handover.given, handover.emission
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.ndim != 2:
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)}: strategies know one position per "
            "token. Generate without assistant_strategy."
        )
    budget = emission.max_length - emission.width
    extra = {key: value for key, value in model_kwargs.items() if key not in _MADE}
    for key, value in extra.items():
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == input_ids.shape[1]:
            raise ValueError(
                f"model input {key!r} has one value per prompt token: strategies don't know its "
                "values for candidates. Generate without assistant_strategy."
            )

    def make_forward(
        cache: TreeCache,
        last: Tensor | None,
        inputs: ProbeInputs | None = probe_inputs,
        code: Graphs | None = graphs,
    ) -> TreeForward:
        lengths = cache.lengths
        shift = torch.zeros_like(lengths) if last is None else last.to(lengths.device) + 1 - lengths
        # The last emitted token is never forwarded, hence - 2 and not - 1.
        limit = lengths + shift + max(budget - 2, 0)
        return TreeForward(model, cache, limit, shift, extra, inputs, wants_hidden, code)

    mask = model_kwargs.get("attention_mask")
    if isinstance(given, TreeCache):
        cache, rows = given, _new_tokens(handover, mask, config, model)
        logits, hidden = _extend(make_forward(cache, None, None, None), rows)  # without probes
    else:
        if given is not None:
            check_packable(given)
        changes = Changes()
        seen = final_hidden(model, changes) if wants_hidden else []
        outputs = changes.run(
            model._prefill, input_ids, config, model_kwargs, is_first_iteration=True
        )
        # Of the last chunk, if there are several; a model that is compiled as a whole tells
        # nothing.
        hidden = seen[0][:, -1].clone() if seen else None
        source, logits = outputs.past_key_values, outputs.logits[:, -1]
        check_packable(source)
        capacity = source.get_seq_length() + min(budget, RESERVE)
        front = 0 if probe_inputs is None else probe_inputs.num_front
        real = None if mask is None else mask.bool()
        cache = handover.take_over(source, real, capacity, front, logits)
    handover.start = cache.host_lengths
    forward = make_forward(cache, None if positions is None else positions[:, -1])
    forward.reach = _reach(forward, input_ids.shape[1])
    return Prefilled(forward, logits, hidden)


def _new_tokens(
    handover: Handover, attention_mask: Tensor | None, config: GenerationConfig, model: Any
) -> list[list[int]]:
    """Each row's tokens to append to a continued TreeCache, which is cut where its prompt parts."""
    cache, emission = handover.given, handover.emission
    rows, width = emission.tokens, emission.width
    if not width:
        raise ValueError(
            "inputs_embeds with a TreeCache as past_key_values: it is continued by tokens. Give "
            "input_ids, or leave past_key_values out."
        )
    if len(rows) != cache.batch_size:
        raise ValueError(
            f"past_key_values holds {cache.batch_size} rows, the prompt has {len(rows)}: "
            "give as many prompts as the cache has rows."
        )
    cache.count_appended()
    seen = (
        getattr(config, "_mask_length", -1) if attention_mask is None else attention_mask.shape[1]
    )
    if seen not in (-1, width):  # the new tokens alone
        handover.cache, handover.history = cache, cache.tokens
        return [list(row) for row in rows]
    if cache.tokens is not None:  # the last token is needed for its logits
        cache.truncate([_shared(row[:-1], known) for row, known in zip(rows, cache.tokens)])
    elif any(len(row) <= length for row, length in zip(rows, cache.host_lengths)):
        raise ValueError(
            f"the prompt has {[len(row) for row in rows]} tokens per row and past_key_values "
            f"holds {cache.host_lengths}: give the whole conversation, at least one token more "
            "than the cache."
        )
    end = forgets_at(model)
    if end is not None and cache.max_length <= end < max(map(len, rows)):
        cache.truncate([0] * len(rows))  # plain generation computes all of it anew
    handover.cache, handover.history = cache, [[] for _ in rows]
    return [row[length:] for row, length in zip(rows, cache.host_lengths)]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two rows begin with alike."""
    pairs = enumerate(zip(one, other))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _extend(forward: TreeForward, rows: list[list[int]]) -> tuple[Tensor, Tensor | None]:
    """Append each row's new tokens to a continued TreeCache.

    Returns:
        ``(batch, vocab)`` logits after the last ones, and their ``(batch, hidden)`` final hidden
        states if ``forward`` gives them.
    """
    cache = forward.cache
    if followers(forward.model):
        forward.reach = Reach(forward.model, [1] * len(rows))
        forward.reach.least = max(map(sum, zip(map(len, rows), cache.host_lengths)))
    return _append(forward, rows)


def _append(forward: TreeForward, rows: list[list[int]]) -> tuple[Tensor, Tensor | None]:
    """Forward tokens behind each row, its own number of them, and keep them; see `_extend`."""
    cache, limit = forward.cache, forward.last_position
    counts = torch.tensor([len(row) for row in rows], device=cache.lengths.device)
    # Shorter rows are filled up; what fills them must not be looked up behind the last position.
    ends = (cache.lengths + counts - 1).clamp(min=0)
    forward.last_position = ends[:, None] + forward.position_shift
    last: list[tuple[Tensor, Tensor | None] | None] = [None] * len(rows)
    longest = max(len(row) for row in rows)
    for start in range(0, longest, CHUNK):
        parts = [row[start : start + CHUNK] for row in rows]
        size = max(len(part) for part in parts)
        tokens = torch.tensor(
            [part + [0] * (size - len(part)) for part in parts], device=cache.lengths.device
        )
        tree = TokenTree.chain(size - 1).batch(len(rows), cache.lengths.device)
        output = forward(tokens, tree)
        logits, hidden = output.logits, output.node_hidden
        cache.commit([len(part) for part in parts])
        for row, part in enumerate(parts):
            if part and start + len(part) == len(rows[row]):
                end = len(part) - 1
                state = None if hidden is None else hidden[row, end].clone()
                last[row] = logits[row, end].clone(), state
    forward.last_position = limit
    found = [one for one in last if one is not None]
    states = [state for _, state in found if state is not None]
    return torch.stack([one for one, _ in found]), torch.stack(states) if states else None


def _reach(forward: TreeForward, width: int) -> Reach | None:
    """For a model whose rotary frequencies follow the longest position; else None.

    Args:
        forward: behind a prompt.
        width: columns of its ids, padding included.
    """
    if not followers(forward.model):
        return None
    lengths = forward.cache.host_lengths
    longest = int((forward.cache.lengths + forward.position_shift[:, 0]).max())
    end = forgets_at(forward.model)
    if end is not None and width <= end and bool(forward.position_shift.any()):
        raise ValueError(
            f"position_ids that don't count from 0: {type(forward.model).__name__} computes its "
            f"cache anew at position {end}, which strategies cannot follow then. Leave them out."
        )
    # Plain generation looks at the ids; where all rows are padded, frequencies change later.
    near = end if end is not None and longest == width <= end else None
    return Reach(forward.model, [longest - length + 1 for length in lengths], near)


def catch_up(state: DecodingState) -> None:
    """Before a step: compute rows anew that plain generation would compute anew at their length."""
    forward, cache = state.forward, state.cache
    if forward.reach is None:
        return
    due = [room < 0 for room in forward.reach.room(cache.host_lengths)]
    if any(due):
        lengths = cache.host_lengths
        least = max(forward.reach.next(lengths))
        rows = [tokens[:-1] if now else [] for tokens, now in zip(state.tokens, due)]
        cache.truncate([0 if now else length for length, now in zip(lengths, due)])
        forward.reach.least = least
        _append(forward, rows)
        forward.reach.least = 0
        forward.reach.renewed(lengths)
