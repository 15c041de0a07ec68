"""Finds out which request each batch row of an engine holds, if the engine does not say.

Rows move, requests end and others take their rows. A request is recognised by its tokens: a row's
tokens begin with all tokens that the request had before. Requests with equal tokens may be
confused, which does no harm. This module knows tokens, but no engines or drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")
#: Calls without a row after which a request is dropped: it has ended, or is waiting.
GONE = 16
#: Number of last known tokens by which requests are recognised.
COMPARED = 512


class Request(Generic[T]):
    """A known request.

    Attributes:
        tokens: prompt and output so far.
        held: state that is kept for it.
        absent: calls since it was in a row.
    """

    def __init__(self, tokens: Any, held: T):
        self.tokens = array("i", tokens.tolist())
        self.held = held
        self.absent = 0

    def begins(self, text: Any) -> bool:
        """Whether a row's tokens continue this request's, judged by its last tokens."""
        known = len(self.tokens)
        if known > len(text):
            return False
        first = max(known - COMPARED, 0)
        mine: bytes = self.tokens[first:].tobytes()
        return mine == text[first:known].astype(np.int32, copy=False).tobytes()


class Followed(NamedTuple):
    """The request of a row.

    Attributes:
        request: the request.
        new: its new tokens since the last call; None if it was in no row then, or has more new
            tokens than one step samples.
    """

    request: Request[Any]
    new: Sequence[int] | None


class Requests(Generic[T]):
    """Follows requests from call to call."""

    def __init__(self) -> None:
        self._rows: dict[int, Request[T]] = {}
        self._absent: list[Request[T]] = []

    def follow(
        self, sampled: Sequence[Sequence[int]], lengths: Any, tokens: Any, make: Any
    ) -> tuple[dict[int, Followed], list[Request[T]]]:
        """The requests of the rows, whose tokens include the sampled ones.

        Args:
            sampled: tokens sampled in the last step, per row; empty if nothing was sampled, as in
                the middle of a prompt: such rows are skipped.
            lengths: ``(rows,)`` int number of tokens in each row.
            tokens: ``(rows, longest)`` int32.
            make: creates the state of a new request.

        Returns:
            The request of each row, and requests that have been absent for long.
        """
        counts = lengths[: len(sampled)].tolist()
        texts = {row: tokens[row, : counts[row]] for row, new in enumerate(sampled) if new}
        found: dict[int, Request[T]] = {}
        for row, text in texts.items():
            last = self._rows.get(row)
            if last is not None and last.begins(text):
                found[row] = last
        held = set(map(id, found.values()))
        left = [one for one in self._rows.values() if id(one) not in held]
        ends: dict[tuple[int, int], list[Request[T]]] = {}
        for one in [*self._absent, *left] if len(found) < len(texts) else ():
            ends.setdefault((len(one.tokens), one.tokens[-1]), []).append(one)
        followed: dict[int, Followed] = {}
        for row, text in texts.items():
            before = len(text) - len(sampled[row])
            request = found.get(row)
            if request is None and before:
                same = ends.get((before, int(text[before - 1])), [])
                request = next((one for one in same if one.begins(text)), None)
                if request is not None:
                    same.remove(request)
                    found[row] = request
            if request is None:
                found[row] = request = Request(text, make())
                followed[row] = Followed(request, None)
                continue
            steady = len(request.tokens) == before and not request.absent
            known = len(request.tokens)
            request.tokens.extend(sampled[row] if steady else text[known:].tolist())
            request.absent = 0
            followed[row] = Followed(request, sampled[row] if steady else None)
        self._rows = found
        held = set(map(id, found.values()))
        absent = [one for one in [*self._absent, *left] if id(one) not in held]
        for one in absent:
            one.absent += 1
        self._absent = [one for one in absent if one.absent < GONE]
        return followed, [one for one in absent if one.absent >= GONE]
