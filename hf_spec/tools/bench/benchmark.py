"""``hf_spec.benchmark``: ``hf-spec bench`` for models that are in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_spec.core.checks import explained
from hf_spec.tools.bench.contenders import Contender, contender_of, needs_assistant, parse_names
from hf_spec.tools.bench.results import BenchResult
from hf_spec.tools.bench.runner import run
from hf_spec.tools.data import Prompt, Row, example

#: A prompt: a text, a chat as a list of messages, or a row of a data set.
GivenPrompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]
#: Arguments of ``generate`` that are not the same in all calls, or change what a call returns.
NOT_OF_ALL = {
    "assistant_kwargs", "assistant_strategy", "attention_mask", "custom_generate",
    "generation_config", "input_ids", "inputs", "num_return_sequences", "prompt_lookup_num_tokens",
    "return_dict_in_generate", "streamer",
}  # fmt: skip


def benchmark(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[GivenPrompt],
    strategies: str | Iterable[str] | Mapping[str, Mapping[str, Any]] = "auto",
    *,
    max_new_tokens: int = 128,
    batch_size: int | Sequence[int] = 1,
    assistant_model: PreTrainedModel | None = None,
    limit: int | None = None,
    seed: int = 0,
    backend: str | None = None,
    **generate_kwargs: Any,
) -> BenchResult:
    """Measure strategies against plain ``generate`` on the same prompts.

    All take turns prompt by prompt in this process, after a short call each that is not measured,
    so that a machine that slows down slows all of them. Decoding is greedy unless
    ``do_sample=True``; then all draw the same random numbers. The model's active adapters stay as
    they are, also for plain ``generate``. ``hf-spec bench`` measures models and adapters by name
    with the same code.

    ```python
    result = hf_spec.benchmark(model, tokenizer, ["What is a llama?"], ["prompt_lookup", "medusa"])
    print(result)  # the table
    result.to_pandas()
    ```

    Args:
        model: a causal language model, with the adapters that draft.
        tokenizer: its tokenizer. Its chat template is applied if it has one.
        prompts: texts; chats, as lists of ``{"role": ..., "content": ...}`` that end with the
            user's; or rows of a data set such as ``{"prompt": ..., "category": ...}``, with the
            fields that ``hf-spec bench --prompts`` reads. Prompts longer than the model's context
            are cut at the beginning.
        strategies: names of strategies, ``transformers:prompt_lookup`` and
            ``transformers:assisted`` included; or their options by name:
            ``{"medusa": {}, "medusa:few": {"num_draft_tokens": 4}}``, where what follows the colon
            is a label.
        max_new_tokens: most new tokens of each prompt.
        batch_size: prompts per call, or several such numbers. Batches do not mix categories.
        assistant_model: drafts for ``draft_model`` and ``transformers:assisted``.
        limit: most prompts that are measured, spread evenly over categories.
        seed: of the sampling.
        backend: measures compiled or recorded steps, too: ``"cudagraphs"`` records them on a GPU,
            others are backends of ``torch.compile``.
        generate_kwargs: further arguments of every ``generate``, such as ``do_sample`` and
            ``temperature``.

    Returns:
        The measurements. On ``KeyboardInterrupt`` these are the ones until then, and
        ``interrupted`` is set.

    Raises:
        ValueError: there are no prompts, or one cannot be read; or a strategy, its options or
            another argument does not work with the model.
    """
    for name in NOT_OF_ALL & generate_kwargs.keys():
        raise ValueError(
            f"{name}={generate_kwargs[name]!r}: benchmark() sets this itself, or measures calls "
            "without it. Leave it out; options of a strategy go into strategies={NAME: {...}}."
        )
    base: Any = model
    if isinstance(model, PeftModel) and not model.active_peft_config.is_prompt_learning:
        base = model.get_base_model()  # whose forwards are counted; the adapters stay active
    return run(
        base, tokenizer, read_prompts(prompts), _lineup(strategies, assistant_model),
        batch_sizes=[batch_size] if isinstance(batch_size, int) else list(batch_size),
        max_new_tokens=max_new_tokens, limit=limit, seed=seed, compiled=backend,
        generate_kwargs=generate_kwargs,
    )  # fmt: skip


def read_prompts(prompts: Iterable[GivenPrompt]) -> list[Prompt]:
    """The prompts that are given; a ValueError says which one cannot be read."""
    if isinstance(prompts, str | Mapping):
        raise ValueError(f"prompts={prompts!r}: give a list of prompts, also if there is only one.")
    found = []
    for number, given in enumerate(prompts):
        if isinstance(given, Mapping):
            fields = dict(given)
        elif isinstance(given, str):
            fields = {"prompt": given}
        else:
            fields = {"messages": list(given) if isinstance(given, Sequence) else given}
        with explained(f"prompts[{number}]", ValueError):
            found.append(example(Row(f"prompts[{number}]", number, fields)))
    return found


def _lineup(
    strategies: str | Iterable[str] | Mapping[str, Mapping[str, Any]], assistant: Any
) -> list[Contender]:
    """The contenders by their names, and options where these are given."""
    options = strategies if isinstance(strategies, Mapping) else {}
    names = parse_names(strategies)
    drafts = [name for name in names if needs_assistant(name)]
    if drafts and assistant is None:
        raise ValueError(
            f"strategy {drafts[0]!r}: give the smaller model that drafts, assistant_model=..."
        )
    if assistant is not None and not drafts:
        raise ValueError(
            f"assistant_model={type(assistant).__name__}: no strategy here drafts with it. Leave "
            "it out, or name 'draft_model'."
        )
    with_it = {"assistant_model": assistant}
    return [
        contender_of(name, dict(options.get(name, {})), with_it if name in drafts else {})
        for name in names
    ]
