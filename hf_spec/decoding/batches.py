"""``generate_batch()`` and ``init_continuous_batching()`` with a strategy."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from hf_spec.decoding.call import check_strategy
from hf_spec.draft.options import DraftOptions
from hf_spec.modeling_patches.weights import vocabulary

#: Most sequences at once where nobody says how many.
ROWS = 32
#: The option of continuous batching that says it.
MOST = "max_requests_per_batch"
#: The option of strategies that says it.
ROWS_OPTION = "max_rows"
#: What else is taken: there is no cache that is made in advance, of whose size this is a limit.
#: TRL always sets it.
IN_ADVANCE = "max_memory_percent"
#: Arguments of ``generate`` that it takes besides its own.
TAKEN = "max_new_tokens", "assistant_strategy", "assistant_kwargs"


def generate_batch(
    model: Any,
    inputs: Sequence[Sequence[int]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **kwargs: Any,
) -> dict[str, Any]:
    """Answer prompts of any lengths: ``model.generate_batch`` with a strategy.

    Args:
        inputs: tokens of each prompt.
        generation_config: names the strategy, unless the model's does, or ``assistant_strategy``.
        continuous_batching_config: ``max_requests_per_batch`` is the strategy's ``max_rows``, 32 by
            default. Other options are the paged cache's.
        warmup: there is nothing to warm up.
        kwargs: ``max_new_tokens``, ``assistant_strategy``, ``assistant_kwargs``.

    Returns:
        Transformers' outputs by its names of requests, in the order of the prompts.

    Raises:
        ValueError: an option does not work with a strategy; and the errors of ``generate``.
    """
    # Loaded by those who call it.
    from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

    given: Any = generation_config or model.generation_config
    batching = continuous_batching_config or getattr(given, "continuous_batching_config", None)
    wanted = {
        "record_timestamps": record_timestamps, "progress_bar": progress_bar,
        "persistent_manager": persistent_manager, "max_time": given.max_time,
    }  # fmt: skip
    others = {
        **{name: value for name, value in wanted.items() if value},
        **{name: value for name, value in sorted(kwargs.items()) if name not in TAKEN},
    }  # fmt: skip
    _check("generate_batch", TAKEN, others, batching)
    inputs = _prompts(inputs, vocabulary(model))
    if not inputs:
        return {}
    begun = time.perf_counter()
    named = kwargs.pop("assistant_kwargs", None)
    options = dict(_options_of(given) if named is None else named)
    options.setdefault(ROWS_OPTION, getattr(batching, MOST, None) or ROWS)
    lengths = [len(one) for one in inputs]
    ids = torch.zeros(len(inputs), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (one, length) in enumerate(zip(inputs, lengths)):
        ids[row, ids.shape[1] - length :] = torch.tensor(one, dtype=torch.long)
        mask[row, ids.shape[1] - length :] = 1
    model.eval()  # as Transformers' own does
    out = model.generate(
        ids.to(model.device), attention_mask=mask.to(model.device), generation_config=given,
        assistant_kwargs=options, return_dict_in_generate=False, **kwargs,
    )  # fmt: skip
    ended = time.perf_counter()
    answers, count = out[:, ids.shape[1] :].tolist(), len(out) // len(inputs)
    ends = _ends(model, given)
    found = {}
    for row, answer in enumerate(answers):
        request, child = divmod(row, count)
        # Transformers' order: other answers to a prompt, then the one that has its name.
        name = f"req_{request}" + (f"__child#{child}" if child < count - 1 else "")
        length = next((at + 1 for at, token in enumerate(answer) if token in ends), len(answer))
        found[name] = GenerationOutput(
            name, list(inputs[request]), answer[:length], status=RequestStatus.FINISHED,
            created_time=begun, lifespan=(begun, ended),
        )  # fmt: skip
    return found


def init_continuous_batching(
    model: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> Any:
    """Answer requests as they come: ``model.init_continuous_batching`` with a strategy.

    Args:
        generation_config: names the strategy, unless the model's does.
        continuous_batching_config: as of :func:`generate_batch`.
        workload_hints: there is nothing to be sized by them.

    Returns:
        A :class:`hf_spec.decoding.manager.RequestManager`.

    Raises:
        ValueError: an option does not work with a strategy.
    """
    from hf_spec.decoding.manager import RequestManager  # loads Transformers' batching

    given: Any = copy.deepcopy(generation_config or model.generation_config)
    batching = continuous_batching_config or getattr(given, "continuous_batching_config", None)
    _check("init_continuous_batching", (), {}, batching)
    options, given.continuous_batching_config = _options_of(given), None
    given.update(**model.generation_config.to_dict(), defaults_only=True)
    check_strategy(model, given)
    most = options.get(ROWS_OPTION) or getattr(batching, MOST, None) or ROWS
    return RequestManager(model, given, most)


def _prompts(inputs: Any, size: int) -> list[list[int]]:
    """Prompts as lists; a ValueError unless they are ids of tokens, of which a model has
    ``size``."""
    rows = [one.tolist() if isinstance(one, torch.Tensor) else one for one in inputs]
    for number, row in enumerate(rows):
        listed = isinstance(row, Sequence) and not isinstance(row, str) and len(row) > 0
        wrong = next((id for id in row if not _is_token(id, size)), None) if listed else row
        if wrong is not None:
            raise ValueError(
                f"inputs[{number}] in generate_batch: {wrong!r} is no token of the model. Give "
                f"lists of token ids, 0 to {size - 1}, such as tokenizer(texts).input_ids."
            )
    return [[*row] for row in rows]


def _is_token(id: Any, size: int) -> bool:
    return isinstance(id, int) and 0 <= id < size


def _check(where: str, taken: Sequence[str], given: dict[str, Any], batching: Any) -> None:
    """Raise a ValueError for options, ``given`` or of continuous batching, that only Transformers'
    paged cache has; ``taken``: those that ``where`` takes."""
    for name, value in {**given, **_changed(batching)}.items():
        if name not in (MOST, IN_ADVANCE):
            raise ValueError(
                f"{name}={value!r} in {where} with a strategy: it has no paged cache, and "
                f"takes {', '.join((*taken, MOST))} and a generation_config. Leave it out, or give "
                "assistant_strategy=None."
            )


def _changed(batching: Any) -> dict[str, Any]:
    """The options of continuous batching that are not left at their defaults."""
    if batching is None:
        return {}
    usual = vars(type(batching)())
    return {name: value for name, value in vars(batching).items() if value != usual[name]}


def _options_of(config: Any) -> Any:
    """Options of the strategy that a configuration holds."""
    options = getattr(config, "assistant_kwargs", None) or {}
    if isinstance(options, DraftOptions):
        options = dataclasses.asdict(options)
    return options


def _ends(model: Any, config: Any) -> set[int]:
    """Tokens that end an answer."""
    eos = config.eos_token_id
    eos = model.generation_config.eos_token_id if eos is None else eos
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
