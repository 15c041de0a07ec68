"""A call of ``generate()``: the prompt, then step after step. All strategies share it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from hf_spec.core.buckets import bucket
from hf_spec.core.memory import memory
from hf_spec.core.stats import SpecStats, Stopwatch
from hf_spec.decoding.acceptance import Acceptance
from hf_spec.decoding.handover import Handover
from hf_spec.decoding.inputs import prompt_ids
from hf_spec.decoding.outputs import SpecGenerateOutput
from hf_spec.decoding.prefill import prefill, real_tokens
from hf_spec.decoding.scoring import Scorer
from hf_spec.decoding.sequences import Sequences
from hf_spec.decoding.step import Steps
from hf_spec.decoding.strategy import Strategy
from hf_spec.drafting.lookup import BatchLookup, History
from hf_spec.drafting.ngram import Limits
from hf_spec.drafting.state import DecodeState
from hf_spec.policy.step_policy import StepPolicy
from modeling_patches.cache_name import CACHE
from modeling_patches.linear_attention import recurrent_rules
from modeling_patches.ranks import Ranks
from modeling_patches.support import check_length

#: Share of the batch's rows that must have finished before it shrinks, so that forwards do not
#: compute them. At most one row is moved per finished row, at about one row's share of a step
#: (docs/inside/exactness.md), so shrinking pays off within a step or two. The share is not smaller,
#: as step times are learned per batch size.
SHARE = 1 / 8


@torch.no_grad()
def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    tokenizer: Any = None,
    assistant_model: Any = None,
    **model_kwargs: Any,
) -> Tensor | SpecGenerateOutput:
    """Decode with ``generation_config.assistant_strategy``; ``generate()`` calls this.

    The arguments are those of ``GenerationMixin._sample``, starting with the model.
    """
    config, input_ids = generation_config, prompt_ids(input_ids, model_kwargs)
    returns_dict = bool(config.return_dict_in_generate)
    ranks = Ranks(model)
    if config.do_sample:
        ranks.share_random_state()
    pad = config._pad_token_tensor
    real = real_tokens(input_ids, model_kwargs.get("attention_mask"))
    sequences = Sequences(
        input_ids, real, stopping_criteria, None if pad is None else int(pad), streamer,
        returns_dict and bool(config.output_scores), ranks.same,
    )  # fmt: skip
    check_length(model, sequences.max_length)
    scorer = Scorer(logits_processor, sequences)
    padded = real is not None
    strategy = Strategy.of(model, config, len(input_ids), padded, synced_gpus, assistant_model)
    drafter, graphs, run = strategy.drafter, strategy.graphs, strategy.run
    acceptance = Acceptance(config, strategy.options, scorer)
    stats = SpecStats(strategy.method.name)
    watch = Stopwatch(stats, model.device, ranks.same)

    allocate, rules = graphs.allocate if graphs else None, recurrent_rules(model)
    handover = Handover(model_kwargs.get(CACHE), sequences, returns_dict, allocate, rules)
    with ExitStack() as stack:
        stack.callback(handover.give_back)  # also after an error or interrupt
        with watch.phase("forward"):
            prefilled = run(
                prefill, model, input_ids, config, model_kwargs, handover, drafter, drafter.reads,
                graphs,
            )  # fmt: skip
        target, cache = prefilled.target, prefilled.target.cache
        prompt = cache.host_lengths
        history = History.of(model, strategy.options.lookup_history)
        state = DecodeState(
            model, drafter, target, cache, sequences, root=cache.lengths,
            do_sample=strategy.samples, process=scorer, stats=stats, timed=strategy.timed,
            noise=acceptance.noise,
            lookups=BatchLookup(Limits(), len(prompt), history) if strategy.lookup else None,
        )  # fmt: skip

        context, device = max(prompt).bit_length(), str(model.device)
        setting = len(prompt), context, device
        policy = StepPolicy(stats, strategy.learned, setting, strategy.timed)
        state.draft_cost = policy.draft_cost
        steps = Steps(state, strategy, acceptance, policy, watch, handover)
        steps.first(prefilled)
        del prefilled  # hidden states of the whole prompt, perhaps, which the drafter has now
        if getattr(config, "_warms_up", False):
            steps.warm()
        shrinks = (
            not strategy.rows_stay
            and not handover.wanted
            and state.batch_size > 1
            and not any(
                isinstance(one, (list, tuple, dict)) and one for one in target.model_kwargs.values()
            )
        )
        prompt_seconds = watch.step()

        while model._has_unfinished_sequences(
            not any(state.active) and not any(handover.missing()), synced_gpus, model.device
        ):
            if not any(state.active):
                run(steps.complete)
                continue
            rows = _remaining_rows(state.active, graphs is not None) if shrinks else None
            if rows is not None:
                state.select(rows)
                policy.move((state.batch_size, context, device))
            steps.take()

        ids = sequences.finish()
        stats.num_generated_tokens = sum(sequences.emitted)  # stops that were told late are cut
        past = handover.give_back()
    if history is not None:
        history.add(sequences.answers)
    if acceptance.noise is not None:
        acceptance.noise.give_back(sequences.emitted[0])
    stats.details = steps.details()
    if graphs is not None:
        graphs.spare([*handover.release(), *drafter.release()])
    watch.step(last=True)
    plain = policy.setting.times.plain_seconds()
    if plain is not None and stats.num_steps > 1:
        live = (stats.num_row_steps - len(prompt)) / (stats.num_steps - 1)  # rows of a step
        after_first = stats.num_generated_tokens - len(prompt)
        stats.plain_seconds = prompt_seconds + plain * after_first / live
    memory(model)[SpecStats] = stats
    if not returns_dict:
        return ids
    return SpecGenerateOutput(
        sequences=ids, logits=sequences.columns(0) if config.output_logits else None,
        scores=sequences.columns(1) if config.output_scores else None, spec_stats=stats,
        **{CACHE: past},
    )  # fmt: skip


def _remaining_rows(active: Sequence[bool], powers_of_two: bool = False) -> list[int] | None:
    """The rows that a batch keeps, in their new order; None if it does not shrink.

    The last rows take the places of finished ones, so that few rows move. With ``powers_of_two``
    it only shrinks to such sizes, as code is compiled for each size.
    """
    size, left = len(active), sum(active)
    if powers_of_two:
        left = min(bucket(left), size)
    if not 0 < left <= size - max(SHARE * size, 1):
        return None
    rows = list(range(left))
    behind = [row for row in range(left, size) if active[row]]
    for row in range(left):
        if not active[row] and behind:
            rows[row] = behind.pop()
    return rows
