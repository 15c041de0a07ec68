"""Caches that are handed on from call to call: by the caller, or because a prompt begins alike."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from hf_spec.cache.tree_cache import TreeCache, unpack_into
from hf_spec.decoding.sequences import Sequences
from hf_spec.draft.predictor import DecodeState
from hf_spec.modeling_patches.attention_masks import sees_beyond_windows, window_sizes
from hf_spec.modeling_patches.fingerprint import ALIKE
from hf_spec.modeling_patches.forwards import DynamicRope, recompute_end
from hf_spec.modeling_patches.linear_attention import recurrent_rules
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.modeling_patches.weights import is_plain, made_anew
from hf_spec.target.target import Target, append
from hf_spec.threads import locked

# -- Returns a call's key-value cache to the caller, however the call ends -------------------------
#
# This module knows who owns the cache and which tokens it holds, but not how steps fill it.


class CacheOwner:
    """Holds a call's cache, and returns it, or the caller's own one.

    The returned cache holds the start of each row's conversation: the cached part of the prompt and
    of the emitted tokens. If a call fails, unfinished rows are cut to the same number of emitted
    tokens, so that rows of equal length stay equally long. While the prompt runs, a
    ``DynamicCache`` is as Transformers' own forwards leave it.

    Args:
        given: the call's KV cache, from the caller or created by ``generate``; or None.
        sequences: the call's sequences.
        returned: whether the call's output contains the cache.

    Attributes:
        cache: the call's cache; None until it begins to hold the prompt or, if it is the caller's,
            until it is known to hold the start of each row's conversation.
        history: tokens of each row that the cache holds before those of ``sequences``; None if they
            are unknown.
        start: lengths of the rows after the prompt; None while it runs.
        filled: the caller's own ``DynamicCache`` of a single row, if there is one, to which states
            are returned.
        callers: whether it is the caller's own.
        prefixes: states that the prompt may begin with, where those of the call are kept, too, if
            the prompt allows it; None if there are none.
        reused: tokens of the prompt whose states were among these.
    """

    def __init__(self, given: Any, sequences: Sequences, returned: bool):
        self.given = given
        self.sequences = sequences
        self.cache: TreeCache | None = None
        self.history: list[list[int]] | None = None
        self.start: list[int] | None = None
        # generate() creates a cache if the caller passed none; only the caller's is filled again.
        fills = isinstance(given, DynamicCache) and getattr(given, "_is_user_defined", False)
        self.filled: DynamicCache | None = given if fills else None
        self.callers = fills or isinstance(given, TreeCache)
        self._returned = returned or self.callers
        self.prefixes: Prefixes | None = None
        self.reused = 0
        self._done = self._keeps = False

    @property
    def wanted(self) -> bool:
        """Whether the cache is returned or kept, so that finished rows must stay in it."""
        return self._returned or self._keeps

    def begin_with_kept(self) -> bool:
        """Begin with kept states, if a prompt of one sequence begins with their tokens, and have
        those of the call kept; returns whether there were any."""
        assert self.prefixes is not None
        self._keeps = True
        kept = self.prefixes.longest(self.sequences.now.tokens[0])
        if kept is not None:
            self.given = kept
        return kept is not None

    def begin(self) -> None:
        """Note that the call's cache holds the prompt, to which it may be cut later."""
        assert self.cache is not None
        if self.cache.recurrent is not None and self.wanted:
            self.cache.recurrent.remember()
        self.start = self.cache.host_lengths

    def give_back(self) -> TreeCache | DynamicCache | None:
        """Return the cache for the caller; the caller's ``DynamicCache`` is filled in place.

        May be called again, also after an interrupt.
        """
        if self.cache is not None and self.wanted and not self._done:
            self._give_back(self.cache)
            self._done = True
            if self._keeps and (kept := self._copied(self.cache, [0])) is not None:
                assert self.prefixes is not None
                self.prefixes.keep(kept)
        return self.cache if self.filled is None else self.filled

    def take_from(self, cache: TreeCache, rows: Sequence[int]) -> None:
        """Hold a copy of the call's rows of a cache that others use, too."""
        self.cache = cache.copied(rows) if self._returned else self._copied(cache, rows)

    def _copied(self, cache: TreeCache, rows: Sequence[int]) -> TreeCache | None:
        """A copy for later prompts; None where memory does not suffice."""
        try:
            return cache.copied(rows)
        except torch.OutOfMemoryError as error:
            self.after_shortage(type(error))
            return None

    def after_shortage(self, kind: type[BaseException] | None, *_: Any) -> None:
        """At the end of a call: where memory did not suffice, keep nothing for later prompts."""
        if kind is not None and issubclass(kind, torch.OutOfMemoryError) and self.prefixes:
            self.prefixes.clear()
            self._keeps = False

    def release(self) -> list[Tensor]:
        """The buffers of the call's cache, once the call is over, for later calls: graphs are for
        places in memory. A cache that is returned goes on in others."""
        if self.cache is None:
            return []
        returned = self._returned and self.filled is None
        states = self.cache.states
        return states.rehouse(None) if returned else states.release()

    def _give_back(self, cache: TreeCache) -> None:
        cache.repair()
        start = self.start or cache.host_lengths
        emitted, active = self.sequences.emitted, self.sequences.now.active
        most = [max(count - 1, 0) for count in emitted]  # the last token is not cached
        cached = [
            min(have - begin, end) for have, begin, end in zip(cache.host_lengths, start, most)
        ]
        separately = [begin + have for begin, have in zip(start, cached)]
        unfinished = [have for have, end, on in zip(cached, most, active) if on or have < end]
        least = min(unfinished, default=max(cached))
        together = [begin + min(have, least) for begin, have in zip(start, cached)]
        # A recurrent state in the middle of the tokens is not known: give back the prompt. Nor is
        # what a window dropped: give back what each row has of its own, if anything.
        options = together, start, separately
        lengths = next(
            (lengths for lengths in options if cache.reachable(lengths) == lengths), separately
        )
        cache.truncate(lengths)
        if cache.recurrent is not None:
            cache.recurrent.settle()
        if self.history is not None:
            rows = zip(self.history, self.sequences.now.tokens, cache.host_lengths)
            cache.tokens = [(old + new)[:length] for old, new, length in rows]
        cache.states.limit = None
        if self.filled is None:
            cache.states.allocate_by(None)
        else:
            unpack_into(cache, self.filled)


# -- Tokens that continue a ``TreeCache``: the new ones of a prompt, and rows computed again -------
#
# They run in chunks through the tree forward; their number may differ between rows.


def new_tokens(
    owner: CacheOwner, attention_mask: Tensor | None, config: GenerationConfig, model: Any
) -> list[list[int]]:
    """Each row's new tokens for a continued TreeCache, which is cut where the prompt differs."""
    cache, sequences = owner.given, owner.sequences
    rows, width = sequences.now.tokens, sequences.prompt_length
    _check_continued(cache, rows, model)
    cache.count_appended()
    seen = (
        getattr(config, "_mask_length", -1) if attention_mask is None else attention_mask.shape[1]
    )
    alone, longest = seen not in (-1, width), max(map(len, rows))
    _check_windows(model, longest + cache.max_length if alone else longest)
    if alone:  # the new tokens
        if 0 in cache.host_lengths:
            raise ValueError(
                f"{CACHE} holds rows of {cache.host_lengths} tokens: where an answer was cut off, "
                "a sliding window had dropped what comes before. Give the whole conversation as "
                "input_ids."
            )
        owner.cache = cache
        if cache.tokens is not None and list(map(len, cache.tokens)) == cache.host_lengths:
            owner.history = cache.tokens
        return [list(row) for row in rows]
    _keep_what_fits(cache, rows, model)
    owner.cache, owner.history = cache, [[] for _ in rows]
    if owner.prefixes is not None:
        owner.reused = cache.max_length
    return [row[length:] for row, length in zip(rows, cache.host_lengths)]


def _check_continued(cache: TreeCache, rows: Sequence[Sequence[int]], model: Any) -> None:
    """Raise a ValueError if prompts cannot continue a cache at all."""
    if cache.made_by not in (None, size_of(model)):
        raise ValueError(
            f"{CACHE} holds the states of {cache.made_by}, and the model is {size_of(model)}: give "
            f"the cache of a call with this model, or leave {CACHE} out."
        )
    if len(rows) != cache.batch_size:
        raise ValueError(
            f"{CACHE} holds {cache.batch_size} rows, the prompt has {len(rows)}: "
            "give as many prompts as the cache has rows, or repeat them by "
            f"{CACHE}.batch_repeat_interleave(number)."
        )
    if "attention_mask" in cache.inputs:
        raise ValueError(
            f"the states in {CACHE} depend on padding between the tokens of their prompt, as "
            f"{type(model).__name__} computes with it. Leave {CACHE} out."
        )


def size_of(model: Any) -> str:
    """A model's class and size, by which its caches are told from other models'."""
    config = model.config.get_text_config(decoder=True)
    layers, width = (getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size"))
    return f"a {type(model).__name__} with {layers} layers of {width} features"


def _keep_what_fits(cache: TreeCache, rows: Sequence[Sequence[int]], model: Any) -> None:
    """Cut the cache to the tokens that whole prompts begin with, and whose states are right."""
    if cache.tokens is not None:
        # Behind them, plain generation may have appended padding to rows that ended before others.
        lengths = cache.host_lengths if len(rows) == 1 else list(map(len, cache.tokens))
        cache.truncate(list(map(_fitting, rows, cache.tokens, lengths)))
        if cache.inputs and 0 in cache.host_lengths:
            raise ValueError(
                f"the prompt departs from what {CACHE} holds within a part that depends on more "
                f"than tokens ({', '.join(cache.inputs)}). Leave {CACHE} out."
            )
    elif any(len(row) <= length for row, length in zip(rows, cache.host_lengths)):
        raise ValueError(
            f"the prompt has {[len(row) for row in rows]} tokens per row and {CACHE} "
            f"holds {cache.host_lengths}: give the whole conversation, at least one token more "
            "than the cache."
        )
    end = recompute_end(model)
    if end is not None and cache.max_length <= end < max(map(len, rows)):
        cache.truncate([0] * len(rows))  # plain generation computes all of it anew


def check_gaps(model: Any, mask: Tensor | None, continued: bool, columns: int) -> list[str]:
    """Names of what the prompt's states depend on besides tokens, if padding stands between them.

    Args:
        mask: ``(batch, width)`` bool, False for padding; None if there is none.
        continued: whether the prompt continues a ``TreeCache``.
        columns: most columns that the call can reach.

    Raises:
        ValueError: plain generation computes with such padding, and forwards of trees leave it out.
    """
    if mask is None or not bool((gaps := mask[:, :-1] & ~mask[:, 1:]).any()):
        return []
    sizes = window_sizes(model)
    recurrent, why = bool(recurrent_rules(model)), None
    if any(size < columns for size in sizes):
        why = f"counts them in its window of {min(sizes)} columns"
    elif continued and recurrent:
        why = "runs them through its recurrent states"
    if why is not None:
        rows = gaps.any(-1).nonzero()[:, 0].tolist()
        raise ValueError(
            f"attention_mask (without one, the padding token in input_ids) has zeros between the "
            f"tokens of rows {rows}: {type(model).__name__} {why}, and strategies leave them out. "
            "Give each row's tokens side by side, with all padding before them."
        )
    return ["attention_mask"] if recurrent else []


def check_positions(given: Tensor | None, mask: Tensor | None, new: Tensor, ends: Tensor) -> None:
    """Raise a ValueError if a prompt's positions are other ones than a continued TreeCache's, which
    count.

    Args:
        given: ``(batch or 1, columns)``; None, or with axes, if the model makes them.
        mask: ``(batch, width)``, 0 for padding; None if there is none.
        new: ``(batch,)`` new tokens of each row.
        ends: ``(batch,)`` the cache's position behind the last of them.
    """
    if given is None or given.ndim != 2:
        return
    columns, given = given.shape[1], given.to(ends.device)
    mask = torch.ones_like(given) if mask is None else mask.to(ends.device)
    real, counted = mask.bool()[:, -columns:], mask.long().cumsum(-1)[:, -columns:] - 1
    behind = real.flip(-1).cumsum(-1).flip(-1)  # with this one
    goes_on = (given == ends[:, None] - behind) | (behind > new[:, None]) | ~real
    # As ``generate`` makes them where there are none: they say nothing.
    if not bool(goes_on.all() | ((given == counted) | ~real).all()):
        raise ValueError(
            f"position_ids with a TreeCache as {CACHE}: its next tokens have the positions before "
            f"{ends.tolist()}, and these are others. Leave them out, or leave {CACHE} out."
        )


def _check_windows(model: Any, width: int) -> None:
    """Raise a ValueError if plain generation computes other states for a prompt of this width, all
    of it at once, than forwards that continue a TreeCache."""
    if sees_beyond_windows(model, width):
        raise ValueError(
            f"a TreeCache as {CACHE} with a conversation of {width} tokens: "
            f"{type(model).__name__} runs a prompt without the windows of its cache, so its states "
            f"depend on where it begins. Leave {CACHE} out."
        )


def check_alone(model: Any, owner: CacheOwner) -> None:
    """Raise a ValueError if a call whose steps must be of one token each runs others after its
    prompt, or cannot run its prompt as plain generation does."""
    why, end = None, recompute_end(model)
    if isinstance(owner.given, TreeCache):
        why = f"a TreeCache as {CACHE} is continued"
    elif end is not None and owner.sequences.max_length > end:
        why = f"the cache is computed anew at position {end}"
    if why is not None:
        raise ValueError(
            f"{why} by forwards of several tokens, and steps of this {type(model).__name__} are of "
            "one token: its hooks or modules may tell the tokens of a forward apart. Set "
            f"{ALIKE} = True on them if they don't; leave {CACHE} out, or generate without "
            "assistant_strategy."
        )


def _fitting(row: Sequence[int], known: Sequence[int], length: int) -> int:
    """How many cached tokens of a row its prompt begins with; its last is needed for its logits.

    Of the cached tokens the first are ``known``. Those that plain generation appended are taken to
    be the prompt's, as it takes them, if the prompt goes on behind them."""
    pairs = enumerate(zip(row[:-1], known))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(row) - 1, len(known)))
    return length if shared == len(known) and length < len(row) else shared


def begin_rope(target: Target, owner: CacheOwner) -> None:
    """After the prompt, prepare steps of a model whose rotary frequencies follow the longest
    sequence; see :class:`DynamicRope`.

    Raises:
        ValueError: the call's result would not be that of plain generation.
    """
    rope, sequences, name = target.rope, owner.sequences, type(target.model).__name__
    if rope is None:
        return
    longest = int((target.cache.lengths + target.position_shift[:, 0]).max())
    rope.last = longest + sequences.max_length - sequences.prompt_length - 1
    rope.move(longest + 1)
    if recompute_end(target.model) is not None and sequences.prompt_length <= rope.end:
        if bool(target.position_shift.any()):
            raise ValueError(
                f"position_ids that don't count from 0: {name} computes its cache anew at position "
                f"{rope.end}, which strategies cannot follow then. Leave them out."
            )
        # Plain generation uses the width of the ids; if all are padded, frequencies change later.
        rope.recomputes = longest == sequences.prompt_length


def advance_rope(state: DecodeState, rope: DynamicRope) -> None:
    """Before a step, set the length that rotary frequencies follow, and compute the cache anew
    where plain generation does."""
    cache = state.cache
    left = min(n for n, active in zip(state.remaining, state.active) if active)
    rope.move(rope.last + 1 - left)
    if rope.recomputes and rope.length > rope.end:
        rope.recomputes = False
        cache.truncate([0] * cache.batch_size)
        append(state.target, [tokens[:-1] for tokens in state.tokens])


# -- States of calls that have ended, for prompts that begin as they do ----------------------------


#: Least tokens that are taken over, as many as a block of vLLM's prefix caching has: running fewer
#: beside the others of a prompt costs nothing on an accelerator.
LEAST = 16


class Prefixes:
    """Keeps the caches of calls that have ended, each of one sequence, for prompts that begin with
    the same tokens: automatic prefix caching (Zheng et al., "SGLang: Efficient Execution of
    Structured Language Model Programs", 2024, section 3) of whole conversations.

    Args:
        most: tokens that all of them hold. Those that were not used for longest leave.
    """

    def __init__(self, most: int):
        self.most = most
        self._kept: list[TreeCache] = []  # the one that was used last is the last

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return sum(cache.max_length for cache in self._kept)

    @locked
    def clear(self) -> None:
        """Keep nothing of what there is."""
        self._kept = []

    def longest(self, tokens: Sequence[int]) -> TreeCache | None:
        """A cache of its own with the longest beginning of a prompt, and perhaps other tokens
        behind it; None if none is long enough."""
        found = self._used(tokens[:-1])  # the last token of a prompt runs: its logits are needed
        return None if found is None else found.copied([0])

    @locked
    def _used(self, tokens: Sequence[int]) -> TreeCache | None:
        reached = [(_reach(cache, tokens), cache) for cache in self._kept]
        length, best = max(reached, key=lambda pair: pair[0], default=(0, None))
        if best is None or length < LEAST:
            return None
        self._kept.remove(best)
        self._kept.append(best)
        return best

    @locked
    def keep(self, cache: TreeCache) -> None:
        """Keep the cache of a call that has ended, which nobody must change from here on."""
        if cache.tokens is None or cache.inputs or cache.generated:
            return
        (tokens,), length = cache.tokens, cache.max_length
        if not LEAST <= length == len(tokens) <= self.most:
            return
        others = [one for one in self._kept if _reach(one, tokens) < one.max_length]
        self._kept = [*others, cache]
        while self.num_tokens > self.most:
            del self._kept[0]


def _reach(cache: TreeCache, tokens: Sequence[int]) -> int:
    """Number of first tokens that a cache has the states of, and can be cut to."""
    assert cache.tokens is not None
    pairs = zip(cache.tokens[0], tokens)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return cache.reachable([same])[0]


def prefixes_of(store: MutableMapping[Any, Any], model: Any, runs: Hashable, most: int) -> Prefixes:
    """Those in a store that a model's weights have computed, as they are now.

    Args:
        runs: how the model runs, see :class:`Fingerprint`.
        most: see :class:`Prefixes`.
    """
    weights = [one for one in chain(model.parameters(), model.buffers()) if is_plain(one)]
    return made_anew(store, Prefixes, weights, lambda: Prefixes(most), runs)
