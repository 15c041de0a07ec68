"""Returns a call's key-value cache to the caller, however the call ends.

This module knows who owns the cache and which tokens it holds, but not how steps fill it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache

from hf_spec.cache.convert import unpack_into
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.decoding.call_sequences import Sequences


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
        wanted: whether the cache is returned, so that finished rows must stay in it.
    """

    def __init__(self, given: Any, sequences: Sequences, returned: bool):
        self.given = given
        self.sequences = sequences
        self.cache: TreeCache | None = None
        self.history: list[list[int]] | None = None
        self.start: list[int] | None = None
        # generate() creates a cache if the caller passed none; only the caller's is filled again.
        callers = isinstance(given, DynamicCache) and getattr(given, "_is_user_defined", False)
        self.filled: DynamicCache | None = given if callers else None
        self.wanted = returned or callers or isinstance(given, TreeCache)
        self._done = False

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
        return self.cache if self.filled is None else self.filled

    def release(self) -> list[Tensor]:
        """The buffers of the call's cache, once the call is over, for later calls: graphs are for
        places in memory. A cache that is returned goes on in others."""
        if self.cache is None:
            return []
        returned = isinstance(self.given, TreeCache) or (self.wanted and self.filled is None)
        states = self.cache.states
        return states.rehouse(None) if returned else states.release()

    def _give_back(self, cache: TreeCache) -> None:
        cache.repair()
        start = self.start or cache.host_lengths
        emitted, active = self.sequences.emitted, self.sequences.active
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
            rows = zip(self.history, self.sequences.tokens, cache.host_lengths)
            cache.tokens = [(old + new)[:length] for old, new, length in rows]
        cache.states.limit = None
        if self.filled is None:
            cache.states.allocate_by(None)
        else:
            unpack_into(cache, self.filled)
