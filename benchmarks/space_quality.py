"""Fine-tuned models beside their base: ``python benchmarks/space_quality.py --model M ...``.

SPACE's own comparison (Table 6 of the paper, on a smaller scale): adapters that fine-tune the
model, trained with and without mask tokens (``hf-spec train space --update lora --p-ar 1.0``),
answer prompts that have reference answers. For each model it prints the perplexity of the
references, the share of greedy answers whose last number is the reference's (the usual score of
GSM8K), and the share of answers equal to the base's. For established tasks, run lm-eval:
``hf-spec run lm_eval --model hf --model_args pretrained=M,peft=ADAPTER --tasks gsm8k``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import measured
import torch

from hf_spec.tools.bench.contenders import BASELINE, Contender, contenders
from hf_spec.tools.bench.prompts import Prompt, encode_answer, encode_prompts, read_prompts, spread
from hf_spec.tools.bench.runner import Session
from hf_spec.tools.loading import load_model, read_adapters

#: A number such as 1,234.50, as answers to arithmetic problems end with.
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Score(NamedTuple):
    """The scores of a model.

    Attributes:
        name: ``generate``, or ``generate@ADAPTER``.
        perplexity: exp of the mean negative log-probability per token of the references, with EOS.
        last_number: share of the references with a number whose last one is the answer's; NaN if
            there are none.
        identical: share of the answers that equal the base's.
    """

    name: str
    perplexity: float
    last_number: float
    identical: float


def scores(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], lineup: Sequence[Contender],
    max_new_tokens: int = 128, batch_size: int = 8,
) -> list[Score]:  # fmt: skip
    """Score plain decoding with each contender's adapter; the first one is the base.

    Raises:
        ValueError: a prompt has no reference answer, or does not fit the model's context.
    """
    without = [str(prompt.question_id) for prompt in prompts if prompt.reference is None]
    if without:
        raise ValueError(f"no reference answer in {', '.join(without[:3])}: each prompt needs one")
    references = [prompt.reference or "" for prompt in prompts]
    wanted = [encode_answer(tokenizer, text) for text in references]
    asked, _ = encode_prompts(model, tokenizer, prompts, max(max_new_tokens, *map(len, wanted)))
    found: list[Score] = []
    base: list[str] = []
    options = {"do_sample": False, "max_new_tokens": max_new_tokens}
    with Session.open(model, tokenizer, options, lineup) as session:
        for one in lineup:
            starts = range(0, len(asked), batch_size)
            parts = (session.generate(one, asked[i : i + batch_size])[1] for i in starts)
            rows = [row for part in parts for row in part]
            answers = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
            base = base or answers
            loss = sum(_loss(model, *pair) for pair in zip(asked, wanted))
            perplexity = math.exp(loss / sum(map(len, wanted)))
            same = sum(a == b for a, b in zip(answers, base)) / len(answers)
            found.append(Score(one.name, perplexity, _right(answers, references), same))
    return found


def _right(answers: Sequence[str], references: Sequence[str]) -> float:
    """:attr:`Score.last_number`."""
    pairs = [(_last_number(a), _last_number(b)) for a, b in zip(answers, references)]
    right = [a == b for a, b in pairs if b is not None]
    return sum(right) / len(right) if right else math.nan


@torch.no_grad()
def _loss(model: Any, prompt: list[int], answer: list[int]) -> float:
    """Negative log-probability of the answer given the prompt, in nats."""
    ids = torch.tensor([prompt + answer], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    target = torch.tensor(answer, device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits, target, reduction="sum"))


def _last_number(text: str) -> float | None:
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def main() -> None:
    parser = measured.parser(
        __doc__, ["model", "adapter", "prompts"], limit=None, max_new_tokens=128,
        dtype="bfloat16", device=None,
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=8)
    given = parser.parse_args()
    adapters = read_adapters(given.adapter)
    known = contenders([one.strategy for one in adapters], None, adapters)
    lineup = [BASELINE, *(one for one in known if one.name == one.baseline)]
    model, tokenizer = load_model(given.model, given.dtype, given.device, adapters=adapters)
    prompts = spread(read_prompts(given.prompts), given.limit)
    print("model                perplexity  last number  identical")
    for one in scores(model, tokenizer, prompts, lineup, given.max_new_tokens, given.batch_size):
        print(f"{one.name:20} {one.perplexity:10.3f} {one.last_number:12.1%} {one.identical:10.1%}")


if __name__ == "__main__":
    main()
