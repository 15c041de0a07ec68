"""Prompt files and their tokens; knows no strategies.

A prompt file has one JSON object per line, with ``turns`` (the first is taken), ``prompt`` or
``question``, and optionally ``category``, ``question_id`` and a reference answer in ``answer``,
``completion`` or ``reference``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Fields that may hold the prompt, in order of preference.
TEXT_FIELDS = ("turns", "prompt", "question")
#: Fields that may hold a reference answer; of a list (Spec-Bench), the first one is taken.
REFERENCE_FIELDS = ("answer", "completion", "reference")
DEFAULT_CATEGORY = "default"
#: A tokenizer without a limit of its own has a ``model_max_length`` of 1e30.
NO_LIMIT = 10**9


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        text: the prompt as text, without a chat template.
        category: its category; results are reported for each.
        question_id: its id; the line number if the file gives none.
        reference: the reference answer; None if there is none.
    """

    text: str
    category: str = DEFAULT_CATEGORY
    question_id: int | str = 0
    reference: str | None = None


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompt file.

    Raises:
        ValueError: the file cannot be read, or a line is invalid; the message names the line.
    """
    try:
        # Not splitlines(), which also splits at characters that JSON texts may hold.
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ValueError(f"cannot read prompt file {str(path)!r}: {reason}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_parse(line, number))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise ValueError(f"prompt file {str(path)!r} holds no prompts")
    return prompts


def _parse(line: str, number: int) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise ValueError("must be a JSON object, one per line")
    name = next((name for name in TEXT_FIELDS if name in row), None)
    if name is None:
        raise ValueError(f"needs one of the fields {', '.join(TEXT_FIELDS)}")
    text: Any = row[name]
    if name == "turns":
        if not isinstance(text, list) or not text:
            raise ValueError("'turns' must be a list with at least one text")
        text = text[0]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{name!r} must hold a text that is not empty")
    category = row.get("category", DEFAULT_CATEGORY)
    if not isinstance(category, str) or not category:
        raise ValueError("'category' must be a text that is not empty")
    if category == "all":
        raise ValueError("'category' must not be 'all', which is the name of the overall row")
    question_id = row.get("question_id", number)
    if not isinstance(question_id, int | str):
        raise ValueError("'question_id' must be a number or a text")
    return Prompt(text, category, question_id, _reference(row))


def _reference(row: dict[str, Any]) -> str | None:
    for name in REFERENCE_FIELDS:
        found = row.get(name)
        if isinstance(found, list) and found:
            found = found[0]
        if isinstance(found, str) and found.strip():
            return found
    return None


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most ``limit`` prompts, divided evenly among the categories.

    The choice is deterministic. Categories take turns until the limit is reached, so small ones may
    be used up while large ones fill the rest. Within a category, the chosen prompts are evenly
    spaced. The order of the file is kept.
    """
    if limit is None or limit >= len(prompts):
        return list(prompts)
    members = _by_category(prompts)
    turns = ((turn, place) for place, own in enumerate(members) for turn in range(len(own)))
    quotas = Counter(place for _, place in sorted(turns)[:limit])
    chosen = [
        own[i * len(own) // quotas[place]]
        for place, own in enumerate(members)
        for i in range(quotas[place])
    ]
    return [prompts[index] for index in sorted(chosen)]


def _by_category(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Indices of the prompts of each category, in order of first appearance."""
    members: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        members.setdefault(prompt.category, []).append(index)
    return list(members.values())


def context_limit(model: Any, tokenizer: Any) -> int | None:
    """The model's context length in tokens; ``None`` if neither model nor tokenizer names one."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    limit = getattr(tokenizer, "model_max_length", None)
    return limit if isinstance(limit, int) and limit < NO_LIMIT else None


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt, as a user's turn if the tokenizer has a chat template."""
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True
        )
    else:
        encoded = tokenizer(text, verbose=False)
    return list(encoded["input_ids"])


def encode_answer(tokenizer: Any, text: str) -> list[int]:
    """Token ids of an answer, without BOS and with EOS at the end."""
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def encode_within(tokenizer: Any, text: str, limit: int | None) -> tuple[list[int], bool]:
    """At most ``limit`` token ids, and whether the text had to be cut.

    The *text* is cut at its beginning, before the chat template is applied. A cut prompt is thus
    still a well-formed chat turn, and it keeps its end, where the question usually is.

    Raises:
        ValueError: the template alone is longer than ``limit``.
    """
    ids, cut = encode(tokenizer, text), False
    while limit is not None and len(ids) > limit:
        if not text:
            raise ValueError(
                f"the chat template alone takes {len(ids)} tokens, but the model's context leaves "
                f"{limit} beside the new tokens; lower --max-new-tokens"
            )
        # Drop the same share of characters as of tokens, at least one.
        text = text[max(1, len(text) * (len(ids) - limit) // len(ids)) :]
        ids, cut = encode(tokenizer, text), True
    return ids, cut


def encode_prompts(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], new_tokens: int
) -> tuple[list[list[int]], int]:
    """Token ids of prompts, short enough to leave room for new tokens in the model's context.

    Args:
        new_tokens: number of new tokens to leave room for.

    Returns:
        The ids of each prompt, and the number of prompts that were cut (:func:`encode_within`).

    Raises:
        ValueError: there is no room for a prompt.
    """
    limit = context_limit(model, tokenizer)
    room = None if limit is None else limit - new_tokens
    if room is not None and room < 1:
        raise ValueError(
            f"max_new_tokens={new_tokens} leaves no room for a prompt in the model's context of "
            f"{limit} tokens; lower it"
        )
    encoded = [encode_within(tokenizer, prompt.text, room) for prompt in prompts]
    return [ids for ids, _ in encoded], sum(cut for _, cut in encoded)


def batches(prompts: Sequence[Prompt], size: int) -> Iterator[list[int]]:
    """Indices of the prompts of each batch, at most ``size`` per batch and from one category.

    The time of a batch thus belongs to one category. A category's last batch may be smaller.
    """
    for indices in _by_category(prompts):
        for start in range(0, len(indices), size):
            yield indices[start : start + size]
