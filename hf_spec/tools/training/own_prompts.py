"""Prompts that a model writes itself, for training data where there are none.

A chat model is given its chat template up to where a user's words begin, and writes them: questions
like those that it was trained on (Xu et al., "Magpie: Alignment Data Synthesis from Scratch by
Prompting Aligned LLMs with Nothing", 2024, section 2.1). A model without a chat template begins
texts.
"""

import json
from pathlib import Path
from typing import Any

import torch

from hf_spec.core.checks import first_line
from hf_spec.files import write_atomically
from hf_spec.tools.progress import progress_bar
from hf_spec.tools.training.distill import seed_batch

#: The prompts, in the output folder.
OWN_PROMPTS = "prompts.jsonl"
#: Most tokens of a question; longer ones, which do not end in time, are left out.
LONGEST = 80
#: How the words are sampled. The model's own settings may be greedy.
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 0}
#: Samples per prompt before it is given up: models may repeat themselves, or not end.
MOST_SAMPLES = 8
#: What stands for a user's words in a template.
_WORDS = "0123456789"


def write_own_prompts(
    model: Any, tokenizer: Any, path: Path, count: int, batch_size: int, seed: int
) -> None:
    """Let a model write prompts, all different, into a file of JSON lines, in one step; a
    ValueError if it does not write so many. ``batch_size`` is that of answers; of prompts, which
    are shorter, four times as many are generated together."""
    texts: dict[str, None] = {}
    before, end = _around_words(tokenizer)
    with progress_bar("writing prompts") as progress:
        for number in range(-(-MOST_SAMPLES * count // (4 * batch_size))):
            progress(min(len(texts), count), count)
            if len(texts) >= count:
                break
            seed_batch(seed, number)
            texts |= dict.fromkeys(_written(model, tokenizer, before, end, 4 * batch_size))
    if len(texts) < count:
        raise ValueError(
            f"this model wrote {len(texts)} different prompts in {MOST_SAMPLES * count} samples; "
            f"{count} were to be. Give some with --prompts, or lower --limit."
        )
    rows = [json.dumps({"prompt": text, "category": "own"}) for text in list(texts)[:count]]
    write_atomically(path, "\n".join(rows))


def _around_words(tokenizer: Any) -> tuple[list[int], str]:
    """Token ids before a user's words, and the text after them, empty without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        starts = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        start = next((one for one in starts if one is not None), None)
        if start is None:
            raise ValueError(
                "the tokenizer has neither a chat template nor a token that begins texts, so the "
                "model cannot write prompts: give some with --prompts."
            )
        return [start], ""
    from jinja2 import TemplateError

    chat = [{"role": "user", "content": _WORDS}]
    try:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        before, after = text.split(_WORDS)
    except (TemplateError, ValueError) as error:
        raise ValueError(
            "the tokenizer's chat template has no place for a user's words alone "
            f"({first_line(error)}): give prompts with --prompts."
        ) from error
    ids = tokenizer(before, add_special_tokens=False)["input_ids"]
    return list(ids), after.strip()


@torch.no_grad()
def _written(model: Any, tokenizer: Any, before: list[int], end: str, batch: int) -> list[str]:
    """What the model writes in a batch, without what does not end."""
    first = tokenizer(end, add_special_tokens=False)["input_ids"][:1]
    token = tokenizer.decode(first)
    single = token in tokenizer.get_added_vocab()  # else a text of several tokens ends the words
    mark = token if single else end
    rows = torch.tensor([before] * batch, device=model.device)
    found = model.generate(
        rows, attention_mask=torch.ones_like(rows), **SAMPLING, num_beams=1,
        max_new_tokens=LONGEST if end else 24, assistant_strategy=None,
        **({"eos_token_id": first, "pad_token_id": first[0]} if single else {}),
    )[:, len(before) :]  # fmt: skip
    texts = []
    for written in tokenizer.batch_decode(found):
        words, ended, _ = written.partition(mark) if end else (written, True, "")
        marked = any(special in words for special in tokenizer.all_special_tokens)
        if ended and words.strip() and not marked:
            texts.append(words.strip())
    return texts
