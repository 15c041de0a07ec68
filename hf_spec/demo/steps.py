"""Which step emitted which tokens, and the text coloured by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

if TYPE_CHECKING:
    from rich.text import Text

#: Backgrounds of neighbouring steps.
STYLES = ("black on cyan", "black on yellow")


class StepStreamer(BaseStreamer):
    """Collects the new tokens of one sequence by the step that emitted them.

    Plain generation emits one token per step. A strategy's first step is that of the prompt.

    Attributes:
        steps: tokens of each step.
    """

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self._put: list[int] = []
        self._prompt, self._told = True, False

    def put(self, value: Tensor) -> None:
        """Tokens of a step; the prompt at first."""
        if self._prompt:
            self._prompt = False
        else:
            self._put += value.flatten().tolist()

    def end_step(self) -> None:
        """What was put since the last step came together."""
        self._told = True
        if self._put:
            self.steps.append(self._put)
            self._put = []

    def end(self) -> None:
        """The sequence is complete."""
        if self._told:
            self.end_step()
        else:
            self.steps = [[token] for token in self._put]


def pieces(tokenizer: Any, steps: Sequence[Sequence[int]]) -> list[str]:
    """What each step adds to the text; special tokens are left out.

    A character whose bytes come in two steps belongs to the second one.
    """
    found: list[str] = []
    tokens: list[int] = []
    shown = ""
    for step in steps:
        tokens += step
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        whole = text if len(found) == len(steps) - 1 else text.rstrip("\ufffd")
        found.append(whole[len(shown) :])
        shown = whole if len(whole) > len(shown) else shown
    return found


def coloured(tokenizer: Any, steps: Sequence[Sequence[int]]) -> Text:
    """The text with the background changing from step to step."""
    from rich.text import Text

    text = Text()
    for number, piece in enumerate(pieces(tokenizer, steps)):
        text.append(piece, STYLES[number % len(STYLES)])
    return text
