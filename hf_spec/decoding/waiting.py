"""Sequences of one call that wait until others have ended: the option ``max_rows``."""

from __future__ import annotations

import copy
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as stock
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from hf_spec.core.stats import PHASES, SpecStats
from hf_spec.decoding.acceptance import STATELESS
from hf_spec.decoding.sequences import Sequences
from hf_spec.decoding.shared import Call, SharedSteps
from hf_spec.decoding.step import Steps
from hf_spec.modeling_patches.modules import CACHE

#: Processors that hold the prompts of the whole batch.
OF_THE_BATCH = (
    stock.EncoderNoRepeatNGramLogitsProcessor, stock.EncoderRepetitionPenaltyLogitsProcessor,
)  # fmt: skip
#: Criteria that look at each row alone; the last two only where rows end by themselves.
OF_A_ROW = EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria


def check_rows_apart(
    config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList,
    streamer: Any, refusal: str | None,
) -> None:  # fmt: skip
    """Raise a ValueError unless each sequence of a call can be decoded alone.

    Args:
        refusal: why its steps cannot be shared, if they cannot.
    """
    others = [
        *(one for one in processors if type(one) not in STATELESS or type(one) in OF_THE_BATCH),
        *(one for one in criteria if type(one) not in OF_A_ROW),
    ]
    known_end = any(hasattr(one, "eos_token_id") for one in criteria)
    late = [one for one in criteria if isinstance(one, OF_A_ROW[2:]) and not known_end]
    shown = [name for name in ("output_scores", "output_logits") if getattr(config, name)]
    reasons = [
        refusal,
        None if streamer is None else "a streamer gets a token of each row at a time",
        *(f"{_described(one)} may look at several rows" for one in others),
        *(f"{type(one).__name__} without an EOS token stops all rows at once" for one in late),
        *(f"{name} is of all rows" for name in shown if config.return_dict_in_generate),
    ]
    if why := next((reason for reason in reasons if reason), None):
        raise ValueError(
            f"max_rows: {why}. Call generate() without max_rows (generate_batch() sets it), or "
            "with no more prompts than that."
        )


def _described(one: Any) -> str:
    """A processor or criterion by its name, and whether it is one of Transformers."""
    kind = type(one)
    others = "" if kind.__module__.startswith("transformers.") else ", which is the caller's own,"
    return f"{kind.__name__}{others}"


def inputs_of_row(
    row: int, input_ids: Tensor, model_kwargs: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """A row's prompt without the padding before it, and its inputs of the model's forward.

    Args:
        input_ids: ``(rows, width)``; ``(rows, 0)`` where the prompts are embeddings.

    Raises:
        ValueError: an input is neither of tokens nor a setting, such as an image.
    """
    embedded, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
    shape = (input_ids if embedded is None else embedded).shape[:2]
    only = slice(row, row + 1)
    real = slice(None if mask is None else int(mask[row].bool().int().argmax()), None)
    own = {}
    for name, value in model_kwargs.items():
        if name == CACHE:
            value = copy.deepcopy(value)  # an empty one
        elif isinstance(value, Tensor):
            # Some models have several positions per token: (axes, rows, width).
            axes = value.ndim - 2 if name == "position_ids" else 0
            if value.shape[axes : axes + 2] != shape:
                raise ValueError(
                    f"max_rows with the model input {name!r} of shape {tuple(value.shape)}: only "
                    f"those of tokens, {tuple(shape)}, can be divided. Leave one out."
                )
            value = value[(slice(None),) * axes + (only, real)]
        elif isinstance(value, (list, tuple, dict)) and value:
            made = name == "mm_encoder_outputs"  # by ``generate``
            what = "images or the like" if made else f"the model input {name!r}"
            raise ValueError(f"max_rows with {what}, which may be of rows: leave max_rows out.")
        own[name] = value
    return input_ids[only, real], own


def processors_of_row(row: int, processors: LogitsProcessorList) -> LogitsProcessorList:
    """What a row's logits are processed with. One of Transformers has a number for each row: of the
    columns, such as padding, that it does not look at."""
    found = LogitsProcessorList()
    for one in processors:
        ignored = getattr(one, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):
            one = copy.copy(one)
            one.prompt_ignore_length = ignored[row : row + 1]
        found.append(one)
    return found


def take_in_turns(count: int, most: int, begin: Callable[[int], Steps]) -> SpecStats:
    """Decode so many sequences, each as soon as fewer than ``most`` others are unfinished.

    Args:
        begin: runs the prompt of a sequence.

    Returns:
        The statistics of all of them.
    """
    started, found, of_steps = time.perf_counter(), SpecStats(), SpecStats()
    waiting, steps, code = deque(range(count)), None, Counter[str]()
    while waiting or steps is not None:
        if waiting and (steps is None or steps.num_sequences < most):
            own = begin(waiting.popleft())
            found.merge(own.state.stats)
            if not any(own.owner.sequences.now.active):
                own.finish()  # it has ended with its first token
            elif steps is None:
                steps = SharedSteps(Call(own))
            else:
                steps.admit(Call(own))
            continue
        assert steps is not None
        steps.watch.step()  # prompts are no part of a step
        steps.take()
        for call in steps.calls:
            if call.error is not None:
                raise call.error
        for call in steps.release():
            call.steps.leave()
            of_steps.details = call.steps.state.stats.details
        if not steps.calls:
            of_steps.merge(steps.state.stats)
            code.update(steps.code)
            steps = None
    found.merge(of_steps)
    if "compiled" in found.details:
        found.details["compiled"] |= code
    found.details["shared"] = {"rows": of_steps.num_row_steps / max(of_steps.num_steps, 1)}
    spent = sum(vars(found)[f"{name}_seconds"] for name in PHASES)
    found.other_seconds = time.perf_counter() - started - spent
    return found


def joined_ids(sequences: Sequence[Sequences], pad: int) -> Tensor:
    """``(rows, seq)`` the ids of sequences that have ended, one each, padded to the longest."""
    ids = [one.finish()[0] for one in sequences]
    return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad)
