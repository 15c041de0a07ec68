"""The prompt's forward pass, and the way into and out of our cache.

A fresh prompt (or a continued ``DynamicCache``) is prefilled by Transformers itself, exactly as in
plain generation; the result is then packed into a ``TreeCache``. A continued ``TreeCache`` takes
its new tokens in chunks through the tree forward, each row its own number of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from hf_spec.core.cache import TreeCache, check_packable
from hf_spec.core.tree import TokenTree
from hf_spec.methods.base import DecodingState
from hf_spec.methods.forward import ProbeInputs, TreeForward, final_hidden
from modeling_patches.attention_masks import tree_attention
from modeling_patches.dynamic_rope import Reach, followers, forgets_at
from modeling_patches.support import sliding_windows

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
        source: the caller's ``DynamicCache``, to be filled again at the end; else None.
        mask: ``(batch, slots)`` bool, real slots of ``source`` after the prompt; None if all are.
    """

    forward: TreeForward
    logits: Tensor
    hidden: Tensor | None
    source: DynamicCache | None
    mask: Tensor | None

    def hand_back(self, emitted: list[int]) -> Any:
        """The cache to return; a caller's own ``DynamicCache`` is filled in place.

        Args:
            emitted: tokens emitted per row; all but the last are in the cache.
        """
        cache = self.forward.cache
        if self.source is None:
            return cache
        cached = [max(count - 1, 0) for count in emitted]
        mask = None
        if self.mask is not None or min(cached) != max(cached):
            steps = torch.arange(max(cached), device=cache.lengths.device)
            tail = steps < torch.tensor(cached, device=steps.device)[:, None]
            width = cache.max_length - max(cached)
            head = self.mask if self.mask is not None else tail.new_ones((len(cached), width))
            mask = torch.cat([head.to(tail.device), tail], dim=1)
        cache.unpack_into(self.source, mask)
        return self.source


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


@contextmanager
def prefill(
    model: Any,
    input_ids: Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    max_length: int,
    probe_inputs: ProbeInputs | None = None,
    wants_hidden: bool = False,
) -> Iterator[Prefilled]:
    """Run the prompt and yield a tree forward behind it; the model is patched until the exit."""
    given = model_kwargs.get("past_key_values")
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.ndim != 2:
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)}: strategies know one position per "
            "token. Generate without assistant_strategy."
        )
    budget = max_length - input_ids.shape[1]
    extra = {key: value for key, value in model_kwargs.items() if key not in _MADE}
    for key, value in extra.items():
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == input_ids.shape[1]:
            raise ValueError(
                f"model input {key!r} has one value per prompt token: strategies don't know its "
                "values for candidates. Generate without assistant_strategy."
            )
    windows = sliding_windows(model)

    def make_forward(
        cache: TreeCache, last: Tensor | None, inputs: ProbeInputs | None = probe_inputs
    ) -> TreeForward:
        lengths = cache.lengths
        shift = torch.zeros_like(lengths) if last is None else last.to(lengths.device) + 1 - lengths
        # The last emitted token is never forwarded, hence - 2 and not - 1.
        limit = lengths + shift + max(budget - 2, 0)
        return TreeForward(model, cache, attention, limit, shift, extra, inputs, wants_hidden)

    if isinstance(given, TreeCache):
        with tree_attention(model, windows) as attention:
            forward = make_forward(given, None, None)  # the prompt has no probes
            forward.last_position = forward.last_position + 2**30
            logits, hidden = _extend(forward, input_ids, model_kwargs.get("attention_mask"), config)
            last = None if positions is None else positions[:, -1]
            forward = make_forward(given, last)
            forward.reach = _reach(forward, input_ids.shape[1])
            yield Prefilled(forward, logits, hidden, None, None)
        return

    if given is not None:
        check_packable(given)
    with ExitStack() as stack:
        seen = stack.enter_context(final_hidden(model)) if wants_hidden else []
        outputs = model._prefill(input_ids, config, model_kwargs, is_first_iteration=True)
    hidden = seen[0][:, -1].clone() if seen else None  # of the last chunk, if there are several
    source = outputs.past_key_values
    check_packable(source)
    mask = model_kwargs.get("attention_mask")
    mask = None if mask is None else mask.bool()
    logits = outputs.logits[:, -1]
    length = source.get_seq_length()
    front = 0 if probe_inputs is None else probe_inputs.num_front
    cache = TreeCache.pack(source, mask, length + min(budget, RESERVE), logits.device, front)
    with tree_attention(model, windows) as attention:
        forward = make_forward(cache, None if positions is None else positions[:, -1])
        forward.reach = _reach(forward, input_ids.shape[1])
        # generate() makes a cache where the caller gave none; only the caller's is filled again.
        callers = given if getattr(given, "_is_user_defined", False) else None
        yield Prefilled(forward, logits, hidden, callers, mask)


def _extend(
    forward: TreeForward,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    config: GenerationConfig,
) -> tuple[Tensor, Tensor | None]:
    """Append the new tokens to a continued TreeCache.

    Returns:
        ``(batch, vocab)`` logits after the last ones, and their ``(batch, hidden)`` final hidden
        states if ``forward`` gives them.
    """
    cache = forward.cache
    if input_ids.shape[0] != cache.batch_size:
        raise ValueError(
            f"past_key_values holds {cache.batch_size} rows, the prompt has {input_ids.shape[0]}: "
            "give as many prompts as the cache has rows."
        )
    cache.begin(0)
    cache.rollback()
    real = real_tokens(input_ids, attention_mask)
    rows = input_ids.tolist()
    if real is not None:
        rows = [[t for t, keep in zip(row, m) if keep] for row, m in zip(rows, real.tolist())]
    seen = (
        getattr(config, "_mask_length", -1) if attention_mask is None else attention_mask.shape[1]
    )
    if seen in (-1, input_ids.shape[1]):  # the prompt holds the cached tokens, too
        lengths = cache.host_lengths
        if any(len(row) <= length for row, length in zip(rows, lengths)):
            raise ValueError(
                f"the prompt has {[len(row) for row in rows]} tokens per row and past_key_values "
                f"holds {lengths}: give the whole conversation, at least one token more than the "
                "cache."
            )
        for row, (new, known) in enumerate(zip(rows, cache.tokens or [])):
            if new[: len(known)] != known:
                raise ValueError(
                    f"row {row} of the prompt does not start with the tokens in past_key_values. "
                    "Give the whole conversation, with its attention_mask (without one, generate "
                    "takes pad tokens for padding), or leave past_key_values out."
                )
        end = forgets_at(forward.model)
        if end is not None and cache.max_length <= end < max(map(len, rows)):
            cache.truncate([0] * len(rows))  # plain generation computes all of it anew
        rows = [row[length:] for row, length in zip(rows, cache.host_lengths)]
    if followers(forward.model):
        forward.reach = Reach(forward.model, [1] * len(rows))
        forward.reach.least = max(map(sum, zip(map(len, rows), cache.host_lengths)))
    return _append(forward, rows)


def _append(forward: TreeForward, rows: list[list[int]]) -> tuple[Tensor, Tensor | None]:
    """Forward tokens behind each row, its own number of them, and keep them; see `_extend`."""
    cache = forward.cache
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
