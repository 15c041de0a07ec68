"""Quality of answers, for adapters that fine-tune the model and for lossy acceptance rules.

An exact strategy has the output of plain decoding, and so the quality of its model. Only contenders
that may differ from the base model are scored; see :func:`measured`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_spec.bench.contenders import PLAIN, Contender
from hf_spec.bench.prompts import Prompt, encode_answer, encode_prompts
from hf_spec.bench.session import Session
from hf_spec.data import ANSWER_FIELDS

#: A number such as 1,234.50, as answers to arithmetic problems end with.
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Quality:
    """The scores of one contender.

    Attributes:
        strategy: its name, as in a benchmark; ``plain@ADAPTER`` is the fine-tuned model.
        prompts: number of prompts.
        perplexity: perplexity of the reference answers given the prompts: exp of the mean negative
            log-probability per token, EOS included.
        chrf: chrF2 of the greedy answers against the references, from 0 to 100 (sacrebleu).
        last_number: among the references that contain a number, the share whose last number is also
            the last one of the answer, from 0 to 1; None if no reference contains a number.
        identical: share of the answers that equal those of the base model, from 0 to 1.
    """

    strategy: str
    prompts: int
    perplexity: float
    chrf: float
    last_number: float | None
    identical: float


def measured(lineup: Sequence[Contender]) -> list[Contender]:
    """The contenders that may differ from the base model, after plain decoding of the base model:
    plain decoding of fine-tuned models, and lossy strategies."""
    return [PLAIN, *(one for one in lineup if one.lossy or one.name == one.baseline)]


def quality(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    lineup: Sequence[Contender],
    max_new_tokens: int = 128,
    batch_size: int = 8,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> list[Quality]:
    """Score contenders on prompts with reference answers.

    Args:
        model: a causal language model in evaluation mode, with the adapters loaded.
        tokenizer: its tokenizer.
        prompts: prompts, each with a reference.
        lineup: the contenders, as :func:`measured` returns them; ``identical`` compares with the
            answers of the first.
        max_new_tokens: limit for each answer.
        batch_size: prompts per call of ``generate``.
        progress: called as ``progress(done, total)`` with numbers of batches.

    Raises:
        ValueError: a prompt has no reference, or does not fit the model's context.
        ImportError: sacrebleu is not installed.
    """
    from sacrebleu.metrics import CHRF

    for prompt in prompts:
        if prompt.reference is None:
            raise ValueError(
                f"prompt {prompt.question_id!r} has no reference answer: quality needs one in each "
                f"row, in {', '.join(ANSWER_FIELDS)} or the assistant's last message"
            )
    references = [prompt.reference or "" for prompt in prompts]
    wanted = [encode_answer(tokenizer, text) for text in references]
    longest = max(max_new_tokens, *map(len, wanted))
    asked, _ = encode_prompts(model, tokenizer, prompts, longest)
    parts = [range(i, min(i + batch_size, len(asked))) for i in range(0, len(asked), batch_size)]
    scores: list[Quality] = []
    texts: dict[str, list[str]] = {}
    options = {"do_sample": False, "max_new_tokens": max_new_tokens}
    with Session.open(model, tokenizer, options, lineup) as session:
        for turn, one in enumerate(lineup):
            losses, answers = 0.0, list[str]()
            for number, part in enumerate(parts):
                progress(turn * len(parts) + number, len(lineup) * len(parts))
                rows = session.generate(one, [asked[i] for i in part])[1]
                answers += [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
                losses += sum(_loss(model, asked[i], wanted[i]) for i in part)
            texts[one.name] = answers
            first = texts[lineup[0].name]
            scores.append(
                Quality(
                    one.name,
                    len(prompts),
                    math.exp(losses / sum(map(len, wanted))),
                    CHRF().corpus_score(answers, [references]).score,
                    _last_numbers(answers, references),
                    sum(a == b for a, b in zip(answers, first)) / len(answers),
                )  # fmt: skip
            )
    return scores


@torch.no_grad()
def _loss(model: Any, prompt: list[int], answer: list[int]) -> float:
    """Negative log-probability of the answer given the prompt, in nats."""
    ids = torch.tensor([prompt + answer], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    target = torch.tensor(answer, device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits, target, reduction="sum"))


def _last_numbers(answers: Sequence[str], references: Sequence[str]) -> float | None:
    pairs = [(_last_number(a), _last_number(b)) for a, b in zip(answers, references)]
    counted = [a == b for a, b in pairs if b is not None]
    return sum(counted) / len(counted) if counted else None


def _last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
