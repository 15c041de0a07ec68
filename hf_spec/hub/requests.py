"""Finds out which request each batch row of an engine holds, if the engine does not say.

Rows move, requests end and others take their rows. A request is recognized by its length and last
tokens before the step. Requests with equal tokens may be confused, which does no harm.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hf_spec.hub.lookups import Lookups

#: Calls without a row after which a request is dropped: it has ended, or is waiting.
GONE = 16
#: Number of last tokens by which requests are recognized.
COMPARED = 512


class Request:
    """A known request.

    Attributes:
        tokens: prompt and output so far.
        lookups: its prompt lookup.
        call: number of the last call with a row of it.
        emitted: the tokens of the last step; None if it was in no row before that step.
        num_drafted: number of draft tokens of the last step.
    """

    def __init__(self, tokens: Any, lookups: Lookups):
        self.tokens = array("i", tokens.tolist())
        self.lookups = lookups
        self.call = self.num_drafted = 0
        self.emitted: Sequence[int] | None = None


def key(text: Any) -> tuple[int, bytes]:
    """What a request with these tokens, ``(seq,)`` int, is recognized by."""
    return len(text), text[-COMPARED:].astype(np.int32, copy=False).tobytes()


class Requests:
    """Follows requests from call to call.

    A request whose tokens grew without a call, as near the engine's longest text, counts as new.

    Args:
        new_lookups: makes the prompt lookup of a new request.
    """

    def __init__(self, new_lookups: Callable[[], Lookups]) -> None:
        self._new_lookups = new_lookups
        self._known: dict[tuple[int, bytes], list[Request]] = {}
        self._calls = 0

    def follow(
        self, sampled: Sequence[Sequence[int]], lengths: Any, tokens: Any
    ) -> tuple[dict[int, Request], list[Request]]:
        """The requests of the rows, whose tokens include the sampled ones.

        Args:
            sampled: tokens sampled in the last step, per row; empty if nothing was sampled, as in
                the middle of a prompt: such rows are skipped.
            lengths: ``(rows,)`` int number of tokens in each row.
            tokens: ``(rows, longest)`` int32.

        Returns:
            The request of each row, and requests that have been absent for long.
        """
        self._calls += 1
        followed: dict[int, Request] = {}
        present: dict[tuple[int, bytes], list[Request]] = {}
        for row, length in enumerate(lengths[: len(sampled)].tolist()):
            emitted, text = sampled[row], tokens[row, :length]
            if not emitted:
                continue
            same = self._known.get(key(text[: length - len(emitted)]))
            if same:
                request = same.pop()
                request.tokens.extend(emitted)
                request.emitted = emitted if request.call == self._calls - 1 else None
            else:
                request = Request(text, self._new_lookups())
            request.call = self._calls
            followed[row] = request
            present.setdefault(key(text), []).append(request)
        absent = []
        for place, requests in self._known.items():
            for request in requests:
                if self._calls - request.call < GONE:
                    present.setdefault(place, []).append(request)
                else:
                    absent.append(request)
        self._known = present
        return followed, absent
