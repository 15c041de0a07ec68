"""Prompts and their tokens; knows no strategies.

:mod:`hf_spec.tools.data` says what files may hold.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from hf_spec.core.checks import check_choice, explained, first_line
from hf_spec.tools.data import (
    DEFAULT_CATEGORY,
    LeftOut,
    Message,
    Prompt,
    example,
    plain_text,
    read,
    report_left_out,
)

#: Prompts for those who bring none: four of each of six tasks, written for this package.
BUNDLED = Path(__file__).with_name("prompts.jsonl")
#: A tokenizer without a limit of its own has a ``model_max_length`` of 1e30.
NO_LIMIT = 10**9
#: Begins what the assistant says, in chat templates that mark it.
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


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
    tokenizer: Any, text: str | Message, history: Sequence[Message] = (), **template: Any
) -> list[int]:
    """Token ids of what is said after the messages of ``history``, a text by the user; a ValueError
    if the chat template, of which ``template`` are variables, refuses them. Without one, blank
    lines separate messages."""
    last = Message("user", text) if isinstance(text, str) else text
    if getattr(tokenizer, "chat_template", None):
        chat = (*history, last)
        return list(rendered(tokenizer, chat, add_generation_prompt=True, **template)["input_ids"])
    return list(tokenizer(plain_text(last.content, history), verbose=False)["input_ids"])


def rendered(tokenizer: Any, messages: Sequence[Message], **template: Any) -> Any:
    """What the chat template makes of messages, with ``input_ids``; a ValueError if it refuses
    them."""
    chat = [message.for_template for message in messages]
    given = {name: value for name, value in template.items() if value is not None}
    try:
        return tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, **given)
    # A template may also fail: at a content that is null, say, or at a tool that is none.
    except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
        roles = ", ".join(message["role"] for message in chat)
        raise LeftOut(
            f"the tokenizer's chat template refuses messages of the roles {roles}: "
            f"{first_line(error)}"
        ) from error


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt; see :func:`encode`."""
    return encode(tokenizer, prompt.asking or prompt.text, prompt.history, tools=prompt.tools)


def usable(tokenizer: Any, prompts: Sequence[Prompt], room: int | None = None) -> list[Prompt]:
    """The prompts that the tokenizer's chat template takes, and that can be cut to so many tokens;
    the log counts the others. A ValueError if there is none."""
    found, refused = [], []
    for prompt in prompts:
        try:
            encode_within(tokenizer, prompt, room)
            found.append(prompt)
        except LeftOut as error:
            refused.append((prompt.place or f"prompt {prompt.question_id!r}", str(error)))
    report_left_out(refused, bool(found))
    return found


def encode_answer(tokenizer: Any, text: str) -> list[int]:
    """Token ids of an answer, without BOS and with EOS at the end."""
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def encode_turns(tokenizer: Any, turns: Sequence[Prompt]) -> list[dict[str, Any]]:
    """The answers to the turns of a chat as training examples: ``prompt_ids``, ``answer_ids`` and
    ``earlier_answers``, where in the prompt other answers that are learned begin and end.

    A template that marks what the assistant says (``{% generation %}``) gives one example. Of
    others, a turn's prompt mostly begins with the turn before and its answer, and belongs to one
    example with it. Where it does not, as where a template drops earlier thoughts, each is one.
    """
    if marks_answers(tokenizer):
        return _marked(tokenizer, turns)
    examples: list[dict[str, Any]] = []
    for turn in turns:
        assert turn.answered is not None
        prompt_ids = encode_prompt(tokenizer, turn)
        answer_ids = _answer_ids(tokenizer, turn, prompt_ids)
        earlier: list[list[int]] = []
        if examples:
            last = examples[-1]
            start, end = len(last["prompt_ids"]), len(last["prompt_ids"]) + len(last["answer_ids"])
            if prompt_ids[:end] == last["prompt_ids"] + last["answer_ids"]:
                earlier = [*last["earlier_answers"], [start, end]]
                examples.pop()
        ids = {"prompt_ids": prompt_ids, "answer_ids": answer_ids, "earlier_answers": earlier}
        examples.append({"prompt": turn.full_text, "answer": turn.answered.content, **ids})
    return examples


def marks_answers(tokenizer: Any) -> bool:
    """Whether the chat template marks what the assistant says."""
    template = getattr(tokenizer, "chat_template", None)
    return isinstance(template, str) and GENERATION.search(template) is not None


def _marked(tokenizer: Any, turns: Sequence[Prompt]) -> list[dict[str, Any]]:
    """The example of a chat, by the marks of its template."""
    first, last = turns[0], turns[-1]
    assert last.answered is not None
    found = rendered(
        tokenizer, (*last.messages, last.answered), tools=last.tools,
        return_assistant_tokens_mask=True,
    )  # fmt: skip
    ids, marks = list(found["input_ids"]), [0, *found["assistant_masks"], 0]
    edges = [place for place in range(len(marks) - 1) if marks[place] != marks[place + 1]]
    # Answers before the first turn are given.
    since = len(encode_prompt(tokenizer, first)) if first.history else 0
    spans = [[start, end] for start, end in zip(edges[::2], edges[1::2]) if end > since]
    if not spans:
        raise LeftOut("the tokenizer's chat template marks none of it as the assistant's")
    *earlier, (start, end) = spans
    return [
        {
            "prompt": last.full_text, "answer": last.answered.content, "prompt_ids": ids[:start],
            "answer_ids": ids[start:end], "earlier_answers": earlier,
        }
    ]  # fmt: skip


def _answer_ids(tokenizer: Any, turn: Prompt, prompt_ids: list[int]) -> list[int]:
    """Token ids of the answer to a turn: of a text with EOS behind it; of calls and thoughts what
    the chat template puts behind the prompt, up to EOS."""
    assert turn.answered is not None
    if turn.answered.is_text:
        return encode_answer(tokenizer, turn.answered.content)
    if not getattr(tokenizer, "chat_template", None):
        raise LeftOut("calls of tools and thoughts need a chat template, which there is not")
    chat = (*turn.messages, turn.answered)
    whole = list(rendered(tokenizer, chat, tools=turn.tools)["input_ids"])
    answer_ids = whole[len(prompt_ids) :]
    if whole[: len(prompt_ids)] != prompt_ids or not answer_ids:
        raise LeftOut(
            "the tokenizer's chat template does not put the answer behind the prompt, so that it "
            "is not known which tokens are the assistant's"
        )
    eos = tokenizer.eos_token_id
    return answer_ids[: answer_ids.index(eos) + 1] if eos in answer_ids else answer_ids


def encode_within(tokenizer: Any, prompt: Prompt, limit: int | None) -> tuple[list[int], bool]:
    """At most ``limit`` token ids, and whether the prompt had to be cut.

    The oldest turns are left out first; system messages stay. Then the *text* is cut at its
    beginning, before the chat template is applied. A cut prompt is thus still a well-formed chat,
    and it keeps its end, where the question usually is.
    """
    ids, cut = encode_prompt(tokenizer, prompt), False
    while limit is not None and len(ids) > limit:
        shorter = _without_oldest_turn(prompt.messages)
        if len(shorter) < len(prompt.messages):
            prompt = prompt.of(shorter)
        elif prompt.text:
            # Drop the same share of characters as of tokens, at least one.
            text = prompt.text[max(1, len(prompt.text) * (len(ids) - limit) // len(ids)) :]
            prompt = prompt.of([*prompt.history, prompt.messages[-1].saying(text)])
        else:
            system = " and the system message take" if prompt.history else " alone takes"
            raise LeftOut(
                f"the chat template{system} {len(ids)} tokens, but the model's context leaves "
                f"{limit} beside the new tokens; lower --max-new-tokens"
            )
        ids, cut = encode_prompt(tokenizer, prompt), True
    return ids, cut


def _without_oldest_turn(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages without those from the first that is not the system's to the next question; all
    if there is none."""
    roles = [message.role for message in messages]
    start = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    if "user" not in roles[start + 1 :]:
        return messages
    return [*messages[:start], *messages[roles.index("user", start + 1) :]]


def encode_prompts(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], new_tokens: int
) -> tuple[list[list[int]], int]:
    """Token ids of each prompt, and the number of prompts that were cut (:func:`encode_within`) to
    leave room for new tokens in the model's context; a ValueError if there is none for a prompt."""
    room, encoded = room_for_prompts(model, tokenizer, new_tokens), []
    for prompt in prompts:
        with explained(f"prompt {prompt.question_id!r}", ValueError):
            encoded.append(encode_within(tokenizer, prompt, room))
    return [ids for ids, _ in encoded], sum(cut for _, cut in encoded)


def room_for_prompts(model: Any, tokenizer: Any, new_tokens: int) -> int | None:
    """Tokens of a prompt that leave room for new ones in the model's context; None if that is
    unknown, a ValueError if there is no room."""
    limit = context_limit(model, tokenizer)
    if limit is not None and limit <= new_tokens:
        raise ValueError(
            f"max_new_tokens={new_tokens} leaves no room for a prompt in the model's context of "
            f"{limit} tokens; lower it"
        )
    return None if limit is None else limit - new_tokens


def batches(prompts: Sequence[Prompt], size: int) -> Iterator[list[int]]:
    """Indices of the prompts of each batch, at most ``size`` and of one category, whose last batch
    may be smaller."""
    for indices in _by_category(prompts):
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


# -- Suites of prompts that the field measures acceptance on; knows names and files, no models -----

#: New tokens of an answer, and sizes of trees, unless the command says others.
NEW_TOKENS, NODES = 256, "8,60"
#: The categories of MT-Bench (Zheng et al., 2023), which Spec-Bench takes as one group.
MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
#: Those of Spec-Bench (Xia et al., "Unlocking Efficiency in Large Language Model Inference", 2024)
#: beside it, 80 prompts each.
OTHERS = ("translation", "summarization", "qa", "math_reasoning", "rag")


class Suite(NamedTuple):
    """Prompts in groups of equal weight, whatever number each has.

    Attributes:
        dataset: on the Hub, as ``--prompts`` names it; empty if it is a file elsewhere.
        file: where that is.
        groups: the group of each category, whose other prompts are left out; empty if categories
            are the groups.
    """

    dataset: str = ""
    file: str = ""
    groups: Mapping[str, str] = {}


SUITES = {
    "spec-bench": Suite(
        file="https://github.com/hemingkx/Spec-Bench/blob/main/data/spec_bench/question.jsonl",
        groups=dict.fromkeys(MT_BENCH, "mt_bench") | {name: name for name in OTHERS},
    ),
    "speed-bench": Suite("nvidia/SPEED-Bench/qualitative:test"),
    "mt-bench": Suite("philschmid/mt-bench:train", groups={name: name for name in MT_BENCH}),
    "humaneval": Suite("openai/openai_humaneval:test"),
    "gsm8k": Suite("openai/gsm8k/main:test"),
}


def place_of(name: str, prompts: str | Path | None) -> str | Path:
    """Where the prompts of a suite are read: those that are given, or its dataset. A ValueError if
    there is no such suite, or its file has to be given."""
    check_choice("--suite", name, SUITES)
    suite = SUITES[name]
    if prompts is None and not suite.dataset:
        raise ValueError(
            f"--suite {name} is in no dataset of the Hub: download {suite.file} and give it as "
            "--prompts FILE"
        )
    return prompts or suite.dataset


def suite_prompts(name: str, place: str | Path) -> list[Prompt]:
    """The prompts of a suite with all turns, each with its group as category. A ValueError if they
    cannot be read, or are those of something else."""
    suite = SUITES[name]
    with explained(f"--suite {name}; without a network, give a file as --prompts", ValueError):
        read = read_prompts(place, turns=True)
    own = {} if suite.groups else {DEFAULT_CATEGORY: name}
    groups = [
        suite.groups.get(one.category) if suite.groups else own.get(one.category, one.category)
        for one in read
    ]
    found = [replace(one, category=group) for one, group in zip(read, groups) if group is not None]
    if not found:
        raise ValueError(
            f"{str(place)!r} has none of the categories of --suite {name}: "
            f"{', '.join(suite.groups)}"
        )
    return found


def protocol(name: str, place: str | Path, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What is recorded of a suite beside the settings of calls: JSON types. ``missing``: groups
    that the file has no prompts of."""
    suite, groups = SUITES[name], [*dict.fromkeys(one.category for one in prompts)]
    wanted = dict.fromkeys(suite.groups.values() if suite.groups else groups)
    return {
        "suite": name, "dataset": suite.dataset or suite.file, "groups": groups,
        "missing": [group for group in wanted if group not in groups],
        "weights": dict.fromkeys(groups, 1 / len(groups)),
        "lookup": False, "drafting": "always",
    }  # fmt: skip
