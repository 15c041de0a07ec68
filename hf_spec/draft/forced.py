"""Drafts what a call's logits processors leave: tokens that a grammar forces."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, Protocol

import numpy as np
import torch

from hf_spec.core.shapes import Row
from hf_spec.core.tree import Tree
from hf_spec.draft.lookup import Rowwise

logger = logging.getLogger(__name__)

# -- Matchers of xgrammar, llguidance and outlines_core, asked alike -------------------------------
#
# A matcher follows one sequence in a grammar and knows which tokens may come next. Where these are
# few, they are drafted. JSON keys, for example, are fixed as text, but not as tokens: a grammar
# also allows each shorter token that the text begins with. So there is a tree of tokenizations, of
# which the longest tokens are the likeliest.

#: Most tokens that are allowed for all of them to be drafted.
FEW = 8
#: Most draft tokens of a sequence that are forced.
MOST_FORCED = 15
#: Depth of the deepest draft token under a grammar: outlines goes back 32 tokens at most.
DEEPEST = 24
#: Probability of the longest of several allowed tokens; the others share the rest.
LONGEST = 0.7
#: Tokens whose paths are less probable are not drafted.
LEAST = 0.04


class Matcher(Protocol):
    """A library's matcher of one sequence."""

    def accept(self, token: int) -> bool:
        """Go on with a token; False, without a change, if the grammar forbids it."""

    def undo(self, count: int) -> None:
        """Take back the last accepted tokens."""

    def allowed(self) -> Sequence[int]:
        """The tokens that may come next, the longest first; none if there are more than
        :data:`FEW`."""


def _few(mask: np.ndarray[Any, Any]) -> list[int]:
    """The tokens of a mask with a bit for each, 32 in a word; none if they are many."""
    words = np.flatnonzero(mask)
    if len(words) > FEW:
        return []
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(len(words), 32)
    which, places = np.nonzero(bits)
    found: list[int] = (32 * words[which] + places).tolist()
    return found if len(found) <= FEW else []


class XGrammar:
    """``xgrammar.GrammarMatcher``.

    Args:
        vocabulary: number of tokens of its masks.
    """

    def __init__(self, matcher: Any, vocabulary: int):
        words = (vocabulary + 31) // 32
        self._matcher = matcher
        self._mask = torch.zeros(1, words, dtype=torch.int32, device="cpu")

    def accept(self, token: int) -> bool:
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token))

    def undo(self, count: int) -> None:
        self._matcher.rollback(count)

    def allowed(self) -> Sequence[int]:
        if self._matcher.is_terminated():
            return []
        self._matcher.fill_next_token_bitmask(self._mask)
        found = _few(self._mask[0].numpy())
        if len(found) > 1:
            jump = getattr(self._matcher, "find_jump_forward_tokens", None)  # not in older versions
            longest: list[int] = [] if jump is None else jump()[:1]
            found.sort(key=lambda token: token not in longest)
        return found


class LLGuidance:
    """``llguidance.LLMatcher``, which chooses the tokens of forced text itself."""

    def __init__(self, matcher: Any, vocabulary: int):
        self._matcher = matcher

    def accept(self, token: int) -> bool:
        if self._matcher.is_stopped():
            return False
        return bool(self._matcher.try_consume_tokens([token]))

    def undo(self, count: int) -> None:
        self._matcher.rollback(count)

    def allowed(self) -> Sequence[int]:
        if self._matcher.is_stopped():
            return []
        forced: list[int] = self._matcher.compute_ff_tokens()[:1]
        return forced or _few(np.frombuffer(self._matcher.compute_bitmask(), np.uint32))


class Outlines:
    """``outlines_core.Guide``, an automaton over tokens.

    Args:
        vocabulary: number of tokens of its masks.
    """

    def __init__(self, guide: Any, vocabulary: int):
        self._guide = guide
        self._known: dict[int, list[int]] = {}  # what is allowed, by state
        self._mask = np.zeros((vocabulary + 31) // 32, np.uint32)

    def accept(self, token: int) -> bool:
        try:
            self._guide.advance(token, return_tokens=False)
        except ValueError:
            return False
        return True

    def undo(self, count: int) -> None:
        self._guide.rollback_state(count)

    def allowed(self) -> Sequence[int]:
        state = self._guide.get_state()
        if state not in self._known:
            found = self._allowed()
            if len(found) > 1:
                found = self._longest_first(found)
            self._known[state] = found
        return self._known[state]

    def _allowed(self) -> list[int]:
        self._mask.fill(0)
        self._guide.write_mask_into(self._mask.ctypes.data, self._mask.size, self._mask.itemsize)
        return _few(self._mask)

    def _longest_first(self, tokens: list[int]) -> list[int]:
        """Tokens sorted by how many of the others go on to where they lead."""
        ends, after = [], []
        for token in tokens:
            self.accept(token)
            ends.append(self._guide.get_state())
            after.append(self._states())
            self.undo(1)
        reached = {end: sum(end in states for states in after) for end in ends}
        order = sorted(range(len(tokens)), key=lambda place: -reached[ends[place]])
        return [tokens[place] for place in order]

    def _states(self) -> set[int]:
        """The states after the next token, if few are allowed."""
        found = set()
        for token in self._allowed():
            if self.accept(token):
                found.add(self._guide.get_state())
                self.undo(1)
        return found


def _class(library: str, name: str) -> Any:
    """A library's class; nothing if it has not been imported, so that there are no instances."""
    return getattr(sys.modules.get(library), name, ())


#: Classes of matchers, by library, and what asks them.
LIBRARIES: tuple[tuple[str, str, Callable[[Any, int], Matcher]], ...] = (
    ("xgrammar", "GrammarMatcher", XGrammar),
    ("llguidance", "LLMatcher", LLGuidance),
    ("outlines_core", "Guide", Outlines),
)


def matcher_of(processor: Any, number: int, count: int, vocabulary: int) -> Matcher | None:
    """The matcher with which a processor follows a sequence; None if there is none that is known.

    It is found in the processor's attributes, of which one is a list with a matcher of each
    sequence of the call, or the matcher of the only sequence.

    Args:
        number: the sequence's number in the call.
        count: number of sequences of the call.
        vocabulary: number of the model's tokens.
    """
    values = [
        one
        for value in getattr(processor, "__dict__", {}).values()
        for one in (value if isinstance(value, list) else [value])
    ]
    compiled = _class("xgrammar", "CompiledGrammar")
    sizes = [one.tokenizer_info.vocab_size for one in values if isinstance(one, compiled)]
    for library, name, adapt in LIBRARIES:
        found = [one for one in values if isinstance(one, _class(library, name))]
        if len(found) != count:
            continue
        matcher = adapt(found[number], sizes[0] if sizes else vocabulary)
        with suppress(RuntimeError, ValueError):  # its masks have another size
            matcher.allowed()
            return matcher
    return None


# -- Trees of what is left -------------------------------------------------------------------------


def completed(matcher: Matcher, tree: Row, depth: int, ends: Collection[int] = ()) -> Row:
    """A draft tree without what a grammar forbids, and with the likeliest tokens where it leaves
    few. The matcher has not accepted the root yet, and is left as it was.

    Args:
        tree: its probabilities count where they are larger than those of :data:`LONGEST`.
        depth: of the deepest draft token.
        ends: tokens that are not drafted, as nothing follows them.
    """
    found, below = Row.root(tree.tokens[0]), tree.below

    def children(own: int, known: Mapping[int, int], left: int) -> dict[int, float]:
        """What may follow a node, to which the matcher has come, with the paths' probabilities;
        ``known``: those of the tree by their tokens."""
        path = found.probs[own]
        chances = {token: tree.probs[node] for token, node in known.items()}
        allowed = matcher.allowed() if path >= LEAST and left else ()
        if allowed:
            chances = {token: chances[token] for token in chances if token in allowed}
        rest = (1 - LONGEST) / max(len(allowed) - 1, 1)
        for place, token in enumerate(allowed):
            share = 1.0 if len(allowed) == 1 else rest if place else LONGEST
            if path * share >= LEAST:
                chances[token] = max(chances.get(token, 0.0), path * share)
        return chances

    def walk(own: int, node: int | None, left: int) -> None:
        """Add what follows a node, to which the matcher has come; ``node`` is its number in the
        tree, None if it is not there, and there may be so many levels more."""
        known = {} if node is None else {tree.tokens[child]: child for child in below[node]}
        for token, chance in children(own, known, left).items():
            if left and token not in ends and matcher.accept(token):
                found.add(own, token, chance)
                try:
                    walk(len(found.tokens) - 1, known.get(token), left - 1)
                finally:
                    matcher.undo(1)

    if not matcher.accept(tree.tokens[0]):
        return tree
    try:
        walk(0, 0, min(depth, DEEPEST))
    finally:
        matcher.undo(1)
    return found.likeliest_first(len(tree.tokens) + MOST_FORCED)


class SequenceForced:
    """What the processors of a call leave of one of its sequences.

    Args:
        processors: those of the call, which have been called for its first token.
        number: the sequence's number in the call.
        count: number of sequences of the call.
        vocabulary: number of the model's tokens.
        ends: tokens that end a sequence.
    """

    def __init__(
        self, processors: Sequence[Any], number: int, count: int, vocabulary: int,
        ends: Collection[int],
    ):  # fmt: skip
        self._number, self._vocabulary, self._ends = number, vocabulary, ends
        self._told = [one.forced for one in processors if callable(getattr(one, "forced", None))]
        found = [matcher_of(one, number, count, vocabulary) for one in processors]
        self._matcher = next((one for one in found if one is not None), None)

    def __bool__(self) -> bool:
        return bool(self._told) or self._matcher is not None

    def lookup(self, tokens: list[int], depth: int) -> Row:
        """The tree of what is left after ``tokens``."""
        root = Row.root(tokens[-1])
        return self._asked(lambda: self._left(tokens, root, depth), root)

    def completed(self, tree: Row, depth: int) -> Row:
        """A draft tree without what a grammar forbids, and with what it forces."""
        matcher = self._matcher
        if matcher is None:
            return tree
        return self._asked(lambda: completed(matcher, tree, depth, self._ends), tree)

    def _asked(self, ask: Callable[[], Row], otherwise: Row) -> Row:
        """What processors say, who are not asked again after an error."""
        try:
            return ask()
        except Exception:  # the output does not depend on it, and other calls share the step
            logger.warning(
                "what a logits processor forces is not drafted in the rest of this call: asking it "
                "raised an error. Mend its forced(), or give assistant_kwargs={'forced': False}.",
                exc_info=True,
            )
            self._told, self._matcher = [], None
            return otherwise

    def _left(self, tokens: list[int], root: Row, depth: int) -> Row:
        if depth < 1:
            return root
        for forced in self._told:
            # A list of its own, which it may change.
            if chain := self._chain(forced(self._number, [*tokens])[:depth]):
                size = 1 + len(chain)
                return Row([*range(-1, size - 1)], [tokens[-1], *chain], [1.0] * size)
        return self.completed(root, depth)

    def _chain(self, told: Sequence[int]) -> list[int]:
        """Forced tokens up to one that ends the sequence, or that the model does not have."""

        def goes_on(token: int) -> bool:
            return 0 <= token < self._vocabulary and token not in self._ends

        return [int(token) for token in takewhile(goes_on, told[:MOST_FORCED])]


class BatchForced(Rowwise):
    """A :class:`SequenceForced` for each sequence of a batch.

    Args:
        processors: those of the call, which have been called for its first token.
        count: number of sequences of the call.
        vocabulary: number of the model's tokens.
        ends: tokens that end a sequence.
    """

    def __init__(
        self, processors: Sequence[Any], count: int, vocabulary: int, ends: Collection[int] = ()
    ):
        self.rows = [
            SequenceForced(processors, number, count, vocabulary, ends) for number in range(count)
        ]

    def __bool__(self) -> bool:
        return any(self.rows)

    def completed(self, tree: Tree, depth: int) -> Tree:
        """The trees without what grammars forbid, and with what they force, where the host knows
        their tokens."""
        if not tree.is_of_rows:
            return tree
        assert tree.host is not None
        rows = tree.host.rows(tree.row_sizes)
        rows = [one.completed(row, depth) for one, row in zip(self.rows, rows)]
        return Tree.of_rows(rows, tree.device).changed(whole=tree.whole)
