"""Finds out which request each batch row of an engine holds, if the engine does not say.

Rows move, requests end and others take their rows. A request is recognized by its length and last
tokens before the step. Requests with equal tokens may be confused, which does no harm. This module
knows tokens, but no engines or drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")
#: Calls without a row after which a request is dropped: it has ended, or is waiting.
GONE = 16
#: Number of last tokens by which requests are recognized.
COMPARED = 512


class Request(Generic[T]):
    """A known request.

    Attributes:
        tokens: prompt and output so far.
        held: state that is kept for it.
        call: number of the last call with a row of it.
    """

    def __init__(self, tokens: Any, held: T):
        self.tokens = array("i", tokens.tolist())
        self.held = held
        self.call = 0


class Followed(NamedTuple):
    """The request of a row.

    Attributes:
        request: the request.
        new: its new tokens since the last call; None if it was in no row then.
    """

    request: Request[Any]
    new: Sequence[int] | None


def key(text: Any) -> tuple[int, bytes]:
    """What a request with these tokens, ``(seq,)`` int, is recognized by."""
    return len(text), text[-COMPARED:].astype(np.int32, copy=False).tobytes()


class Requests(Generic[T]):
    """Follows requests from call to call.

    A request whose tokens grew without a call, as near the engine's longest text, counts as new.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], list[Request[T]]] = {}
        self._calls = 0

    def follow(
        self,
        sampled: Sequence[Sequence[int]],
        lengths: Any,
        tokens: Any,
        make: Callable[[], T],
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
        self._calls += 1
        followed: dict[int, Followed] = {}
        present: dict[tuple[int, bytes], list[Request[T]]] = {}
        for row, length in enumerate(lengths[: len(sampled)].tolist()):
            new, text = sampled[row], tokens[row, :length]
            if not new:
                continue
            same = self._known.get(key(text[: length - len(new)]))
            if same:
                request = same.pop()
                request.tokens.extend(new)
                steady = request.call == self._calls - 1
            else:
                request, steady = Request(text, make()), False
            request.call = self._calls
            followed[row] = Followed(request, new if steady else None)
            present.setdefault(key(text), []).append(request)
        gone = []
        for place, requests in self._known.items():
            for one in requests:
                if self._calls - one.call < GONE:
                    present.setdefault(place, []).append(one)
                else:
                    gone.append(one)
        self._known = present
        return followed, gone
