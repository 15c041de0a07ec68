"""Prompt files and their tokens; knows nothing of strategies.

A prompt file is JSON lines; each line holds ``turns`` (the first is taken), ``prompt`` or
``question``, and optionally ``category``, ``question_id`` and a reference answer: ``answer``,
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
#: Fields that may hold a reference answer; of a list (Spec-Bench) the first counts.
REFERENCE_FIELDS = ("answer", "completion", "reference")
DEFAULT_CATEGORY = "default"
#: A tokenizer without a limit of its own has a ``model_max_length`` of 1e30.
NO_LIMIT = 10**9


@dataclass(frozen=True)
class Prompt:
    """One prompt; ``question_id`` is the line number where the file gives none.

    ``reference`` is the answer that stands beside it, if one does.
    """

    text: str
    category: str = DEFAULT_CATEGORY
    question_id: int | str = 0
    reference: str | None = None


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompt file.

    Raises:
        ValueError: the file cannot be read, or a line breaks the rules; names the line.
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
    """At most ``limit`` prompts, shared out evenly over the categories; the same ones every time.

    Categories take turns until the limit is reached, so that small ones are used up and large ones
    fill the rest; within a category the prompts are evenly spaced. File order is kept.
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
    """Positions that the model has, or ``None`` if neither model nor tokenizer names a limit."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    limit = getattr(tokenizer, "model_max_length", None)
    return limit if isinstance(limit, int) and limit < NO_LIMIT else None


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of one prompt, as a chat turn where the tokenizer has a chat template."""
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True
        )
    else:
        encoded = tokenizer(text, verbose=False)
    return list(encoded["input_ids"])


def encode_answer(tokenizer: Any, text: str) -> list[int]:
    """Token ids of an answer, without BOS and with EOS behind it."""
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def encode_within(tokenizer: Any, text: str, limit: int | None) -> tuple[list[int], bool]:
    """Token ids in at most ``limit`` tokens, and whether the text had to be cut.

    The *text* is cut at its beginning, before the chat template is applied, so that a cut prompt is
    still a well-formed chat turn and keeps its end, where questions tend to stand.

    Raises:
        ValueError: not even the template fits.
    """
    ids, cut = encode(tokenizer, text), False
    while limit is not None and len(ids) > limit:
        if not text:
            raise ValueError(
                f"the chat template alone takes {len(ids)} tokens, but the model's context leaves "
                f"{limit} beside the new tokens; lower --max-new-tokens"
            )
        # Drop the share of characters that the excess has of the tokens, at least one.
        text = text[max(1, len(text) * (len(ids) - limit) // len(ids)) :]
        ids, cut = encode(tokenizer, text), True
    return ids, cut


def encode_prompts(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], new_tokens: int
) -> tuple[list[list[int]], int]:
    """Token ids of prompts that leave room for new tokens in the model's context.

    Returns:
        The ids of each prompt, and how many had to be cut; see :func:`encode_within`.

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
    """Indices of consecutive prompts, ``size`` at a time, never across categories.

    The time of a batch then belongs to one category; a category's last batch may be smaller.
    """
    for indices in _by_category(prompts):
        for start in range(0, len(indices), size):
            yield indices[start : start + size]
