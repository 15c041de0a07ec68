"""How good are the answers? For adapters that fine-tune the model, and for lossy acceptance.

An exact strategy gives plain decoding's output, so its quality is that of the model it runs. What
is measured here is what may differ from the base model: see :func:`measured`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from hf_spec.bench.contenders import PLAIN, Contender
from hf_spec.bench.prompts import Prompt, encode_answer, encode_prompts
from hf_spec.bench.session import Session, own_generation_config

#: Numbers as answers to sums end with them: 1,234.50.
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Quality:
    """What one contender scores.

    Attributes:
        strategy: as in a benchmark; ``plain@ADAPTER`` is the fine-tuned model.
        perplexity: of the reference answers, given the prompts: exp of the mean negative log
            probability per token, EOS included.
        chrf: chrF2 of the greedy answers against the references, 0 to 100 (sacrebleu).
        last_number: share of the references with a number whose last one is also the answer's
            last; None where no reference has one.
        identical: share of the answers that equal the base model's.
    """

    strategy: str
    prompts: int
    perplexity: float
    chrf: float
    last_number: float | None
    identical: float


def measured(lineup: Sequence[Contender]) -> list[Contender]:
    """Who can differ from the base model: plain decoding of fine-tuned ones, lossy strategies."""
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
    """Score everyone in ``lineup`` on prompts with reference answers.

    Args:
        model: in evaluation mode, on its device, with the adapters loaded.
        prompts: those without a reference are refused.
        lineup: such as :func:`measured` gives; the first is who the others are compared with.

    Raises:
        ValueError: a prompt has no reference, or does not fit the model's context.
        ImportError: sacrebleu is not installed.
    """
    from sacrebleu.metrics import CHRF

    for prompt in prompts:
        if prompt.reference is None:
            raise ValueError(
                f"prompt {prompt.question_id!r} has no reference answer: quality needs a field "
                "answer, completion or reference in each line"
            )
    references = [prompt.reference or "" for prompt in prompts]
    wanted = [encode_answer(tokenizer, text) for text in references]
    longest = max(max_new_tokens, *map(len, wanted))
    asked, _ = encode_prompts(model, tokenizer, prompts, longest)
    parts = [range(i, min(i + batch_size, len(asked))) for i in range(0, len(asked), batch_size)]
    scores: list[Quality] = []
    texts: dict[str, list[str]] = {}
    options = {"do_sample": False, "max_new_tokens": max_new_tokens}
    session = Session(model, options, any(one.adapters for one in lineup))
    with own_generation_config(model, tokenizer, greedy=True), closing(session):
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
    """Sum of the answer's negative log probabilities."""
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
