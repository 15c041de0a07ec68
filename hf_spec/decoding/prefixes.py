"""States of calls that have ended, for prompts that begin as they do."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from itertools import chain, takewhile
from typing import Any

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.modeling_patches.weights import is_plain, made_anew
from hf_spec.threads import locked

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
