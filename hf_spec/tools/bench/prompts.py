"""Prompts and their tokens; knows no strategies.

:mod:`hf_spec.tools.data` says what files may hold.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from hf_spec.core.checks import explained, first_line
from hf_spec.tools.data import LeftOut, Message, Prompt, example, log_left_out, plain_text, read

#: Prompts for those who bring none: four of each of six tasks, written for this package.
BUNDLED = Path(__file__).with_name("prompts.jsonl")
#: A tokenizer without a limit of its own has a ``model_max_length`` of 1e30.
NO_LIMIT = 10**9


def read_prompts(path: str | Path, turns: bool = False) -> list[Prompt]:
    """Read a file or a dataset of prompts, with or without answers; a ValueError names the place of
    what is wrong. ``turns``: with what the user says after the first answer."""
    prompts = list(read(path, example))
    if not prompts:
        raise ValueError(f"{str(path)!r} holds no prompts")
    return prompts if turns else [replace(one, later=()) for one in prompts]


def next_turn(prompt: Prompt, answer: str) -> Prompt:
    """What the user says after an answer."""
    history = *prompt.history, Message("user", prompt.text), Message("assistant", answer)
    text, *later = prompt.later
    return replace(prompt, text=text, history=history, later=tuple(later), reference=None)


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most ``limit`` prompts, divided evenly among the categories.

    Categories take turns until the limit is reached, so small ones may be used up while large ones
    fill the rest. Within a category, the chosen prompts are evenly spaced, in the file's order.
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


def encode(
    tokenizer: Any, text: str, history: Sequence[Message] = (), **template: Any
) -> list[int]:
    """Token ids of what the user says after the messages of ``history``; a ValueError if the chat
    template, of which ``template`` are variables, refuses them. Without one, blank lines separate
    messages."""
    if getattr(tokenizer, "chat_template", None):
        chat = [message.for_template for message in (*history, Message("user", text))]
        try:
            encoded = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=True, return_dict=True, **template
            )
        except (TemplateError, TypeError) as error:  # of a content that is null, say
            roles = ", ".join(message["role"] for message in chat)
            raise LeftOut(
                f"the tokenizer's chat template refuses messages of the roles {roles}: "
                f"{first_line(error)}"
            ) from error
    else:
        encoded = tokenizer(plain_text(text, history), verbose=False)
    return list(encoded["input_ids"])


def usable(tokenizer: Any, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts that the tokenizer's chat template takes; the log counts the others. A ValueError
    if there is none."""
    found, refused = [], []
    for prompt in prompts:
        try:
            encode(tokenizer, prompt.text, prompt.history)
            found.append(prompt)
        except LeftOut as error:
            refused.append(f"{prompt.source or 'prompt'}, row {prompt.question_id}: {error}")
    if refused and not found:
        raise ValueError(refused[0])
    log_left_out(refused)
    return found


def encode_answer(tokenizer: Any, text: str) -> list[int]:
    """Token ids of an answer, without BOS and with EOS at the end."""
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def encode_within(
    tokenizer: Any, text: str, limit: int | None, history: Sequence[Message] = ()
) -> tuple[list[int], bool]:
    """At most ``limit`` token ids, and whether the prompt had to be cut.

    The oldest turns are left out first; system messages stay. Then the *text* is cut at its
    beginning, before the chat template is applied. A cut prompt is thus still a well-formed chat,
    and it keeps its end, where the question usually is.
    """
    ids, cut = encode(tokenizer, text, history), False
    while limit is not None and len(ids) > limit:
        shorter = _without_oldest_turn(history)
        if len(shorter) < len(history):
            history = shorter
        elif text:
            # Drop the same share of characters as of tokens, at least one.
            text = text[max(1, len(text) * (len(ids) - limit) // len(ids)) :]
        else:
            system = " and the system message take" if history else " alone takes"
            raise ValueError(
                f"the chat template{system} {len(ids)} tokens, but the model's context leaves "
                f"{limit} beside the new tokens; lower --max-new-tokens"
            )
        ids, cut = encode(tokenizer, text, history), True
    return ids, cut


def _without_oldest_turn(history: Sequence[Message]) -> Sequence[Message]:
    """The messages without those from the first that is not the system's to the next question."""
    roles = [message.role for message in history]
    start = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    end = roles.index("user", start + 1) if "user" in roles[start + 1 :] else len(roles)
    return [*history[:start], *history[end:]]


def encode_prompts(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], new_tokens: int
) -> tuple[list[list[int]], int]:
    """Token ids of each prompt, and the number of prompts that were cut (:func:`encode_within`) to
    leave room for new tokens in the model's context; a ValueError if there is none for a prompt."""
    limit = context_limit(model, tokenizer)
    room = None if limit is None else limit - new_tokens
    if room is not None and room < 1:
        raise ValueError(
            f"max_new_tokens={new_tokens} leaves no room for a prompt in the model's context of "
            f"{limit} tokens; lower it"
        )
    encoded = []
    for prompt in prompts:
        with explained(f"prompt {prompt.question_id!r}", ValueError):
            encoded.append(encode_within(tokenizer, prompt.text, room, prompt.history))
    return [ids for ids, _ in encoded], sum(cut for _, cut in encoded)


def batches(prompts: Sequence[Prompt], size: int) -> Iterator[list[int]]:
    """Indices of the prompts of each batch, at most ``size`` and of one category, whose last batch
    may be smaller."""
    for indices in _by_category(prompts):
        for start in range(0, len(indices), size):
            yield indices[start : start + size]
