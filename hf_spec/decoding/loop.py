"""The decoding loop, its outputs, and `hf_spec.generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, utils
from transformers.generation.streamers import BaseStreamer

from hf_spec.core.device import bucket
from hf_spec.core.stats import SpecStats, Stopwatch
from hf_spec.decoding.acceptance import Acceptance, Scorer
from hf_spec.decoding.cache_reuse import CacheOwner, check_alone
from hf_spec.decoding.call import validate_call
from hf_spec.decoding.prefill import WHOLE, Parts, Prompt, prompt_ids, real_tokens
from hf_spec.decoding.sequences import Sequences
from hf_spec.decoding.shared import places_taken, refusal, take_filled_up
from hf_spec.decoding.sharing import StepSharing
from hf_spec.decoding.step import Steps
from hf_spec.decoding.strategy import Strategy
from hf_spec.decoding.waiting import (
    check_rows_apart,
    inputs_of_row,
    joined_ids,
    processors_of_row,
    take_in_turns,
)
from hf_spec.draft.forced import BatchForced
from hf_spec.draft.lookup import BatchLookup, Limits
from hf_spec.draft.lookup_file import history_of
from hf_spec.draft.options import AUTO
from hf_spec.draft.policy import StepPolicy
from hf_spec.draft.predictor import DecodeState
from hf_spec.draft.translation import Assistant
from hf_spec.modeling_patches.modules import CACHE, only_logits, unwrapped
from hf_spec.modeling_patches.support import check_length
from hf_spec.modeling_patches.weights import Ranks, vocabulary
from hf_spec.target.noise import drawn_seeds
from hf_spec.threads import memory

# -- The output of a call and its statistics -------------------------------------------------------


@dataclass
class SpecGenerateOutput(GenerateDecoderOnlyOutput):
    """``GenerateDecoderOnlyOutput`` with statistics.

    ``scores`` and ``logits`` are those of plain generation, and zero past the end of a sequence.
    The KV cache holds all tokens of each sequence except the last.

    Attributes:
        spec_stats: counts and times of this call.
    """

    spec_stats: SpecStats | None = None


def last_stats(model: nn.Module) -> SpecStats | None:
    """Statistics of the last call of ``model.generate`` with a strategy; None if there was none.

    Args:
        model: the model, or a module around it: a ``PeftModel``, what ``torch.compile`` or a
            distributed training makes of it, one of your own.

    Raises:
        ValueError: it is no model.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"last_stats({model!r}): give the model whose generate() was called.")
    if (own := memory(unwrapped(model)).get(SpecStats)) is not None:
        return own
    inside = (one for one in model.modules() if isinstance(one, GenerationMixin))
    return next((found for one in inside if (found := memory(one).get(SpecStats))), None)


#: Of what is told them, in what is kept for a model.
_TOLD = "told of calls"


#: Gets the statistics of a call, and its sequences.
Told = Callable[[SpecStats, Sequence[Sequences]], None]


def on_end(model: nn.Module, told: Told) -> None:
    """From now on, ``told`` is called after each call of ``model.generate`` with a strategy that
    has ended without an error, in its thread."""
    memory(unwrapped(model))[_TOLD] = told


# -- A call of ``generate()``: the prompt, then step after step. All strategies share it -----------

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
    assistant_tokenizer: Any = None,
    **model_kwargs: Any,
) -> Tensor | SpecGenerateOutput:
    """Decode with ``generation_config.assistant_strategy``; ``generate()`` calls this.

    The arguments are those of ``GenerationMixin._sample``, starting with the model.
    """
    config, input_ids = generation_config, prompt_ids(input_ids, model_kwargs)
    assistant_model = Assistant.of(assistant_model, tokenizer, assistant_tokenizer)
    model_kwargs |= only_logits(model, model_kwargs)
    ranks = Ranks(model)
    if config.do_sample:
        ranks.share_random_state()
    real = real_tokens(input_ids, model_kwargs.get("attention_mask"))
    pad, wants = config._pad_token_tensor, bool(config.return_dict_in_generate)
    sequences = Sequences(
        input_ids, real, stopping_criteria, None if pad is None else int(pad), streamer,
        wants and bool(config.output_scores), ranks.same,
    )  # fmt: skip
    check_length(model, sequences.max_length)
    rows, padded = len(input_ids), real is not None
    strategy = Strategy.of(model, config, rows, padded, synced_gpus, assistant_model)
    stats = SpecStats(strategy.method.name)
    watch = Stopwatch(stats, model.device, ranks.same)
    most = strategy.options.max_rows
    waits = most is not None and rows > most
    owner = CacheOwner(model_kwargs.get(CACHE), sequences, wants and not waits)
    if strategy.alone:
        check_alone(model, owner)
    scorer = Scorer(logits_processor, sequences)
    refused = partial(refusal, strategy, owner, scorer, synced_gpus or ranks.size > 1)
    if most is not None and waits:
        check_rows_apart(config, logits_processor, stopping_criteria, streamer, refused())
        seeds = drawn_seeds(rows, input_ids.device) if strategy.samples else None
        with ExitStack() as stack:
            stack.push(strategy.after_shortage)
            ended, stats = _decode_in_turns(
                model, input_ids, real, logits_processor, stopping_criteria, config,
                assistant_model, model_kwargs, most, seeds,
            )  # fmt: skip
        ids = joined_ids(ended, sequences.pad)
        _keep(model, stats, ended)
        return SpecGenerateOutput(sequences=ids, spec_stats=stats) if wants else ids
    way = _Way.of(model, strategy, rows, getattr(config, "_warms_up", False), refused)
    with ExitStack() as stack:
        stack.callback(owner.give_back)  # also after an error or interrupt
        stack.push(strategy.after_shortage)
        stack.push(owner.after_shortage)
        with way.prompt(stack, sequences) as parts:
            way.begin(owner, strategy)
            steps = _after_prompt(
                strategy, config, input_ids, model_kwargs, scorer, owner, watch, parts=parts
            )
            take = way.steps(stack, steps, synced_gpus)
        prompt_seconds, times = watch.step(), steps.policy.setting.times  # of the whole batch
        take()
        ids = sequences.finish()
        stats.num_generated_tokens = sum(sequences.emitted)  # stops that were told late are cut
        past = owner.give_back()
    way.end(steps)
    watch.step(last=True)
    if way.sharing is not None:
        pass  # there were no plain steps of this call's own
    elif steps.earlier is None:
        _estimate_plain(stats, steps.policy, prompt_seconds, rows)
    elif (plain := times.plain_seconds()) is not None:  # few rows are left where old answers end
        stats.plain_seconds = prompt_seconds + plain * (max(sequences.emitted) - 1)
    _keep(model, stats, [sequences])
    if not wants:
        return ids
    return SpecGenerateOutput(
        sequences=ids, logits=sequences.columns(0) if config.output_logits else None,
        scores=sequences.columns(1) if config.output_scores else None, spec_stats=stats,
        **{CACHE: past},
    )  # fmt: skip


@dataclass
class _Way:
    """How a call's steps are taken: with those of other calls, in a batch that is filled up to a
    number of rows that recurs, or as they are.

    Attributes:
        warms_up: whether code for all steps is made first.
        sharing: what the steps of other calls are taken by; None if this call's are not.
        filled_up: whether the batch is filled up.
        alone: why the call's steps are not shared, where those of others are; None else.
    """

    warms_up: bool
    sharing: StepSharing | None = None
    filled_up: bool = False
    alone: str | None = None

    @classmethod
    def of(
        cls, model: Any, strategy: Strategy, rows: int, warms_up: bool,
        refused: Callable[[], str | None],
    ) -> _Way:  # fmt: skip
        """``refused`` says why the batch must not be of more rows than the call's; None if it
        may."""
        sharing, graphs = None if warms_up else StepSharing.of(model), strategy.graphs
        filled_up = graphs is not None and graphs.records and rows != bucket(rows)
        if sharing is None and not filled_up:
            return cls(warms_up)
        if (why := refused()) is not None:
            return cls(warms_up, alone=None if sharing is None else why)
        return cls(warms_up, sharing, filled_up)

    def prompt(self, stack: ExitStack, sequences: Sequences) -> AbstractContextManager[Parts]:
        """A block for the prompt; what ends with the call goes on the stack."""
        if self.sharing is None:
            return nullcontext(WHOLE)
        rows = len(sequences.lengths)
        stack.enter_context(self.sharing.admitted(rows, sequences.max_length))
        return self.sharing.prompt(rows, sequences.prompt_length)

    def begin(self, owner: CacheOwner, strategy: Strategy) -> None:
        """In that block: let the prompt begin with states of calls that have ended."""
        if self.sharing is not None and not owner.callers:
            owner.prefixes = self.sharing.prefixes(strategy.runs)

    def steps(self, stack: ExitStack, steps: Steps, synced: bool) -> Callable[[], None]:
        """What takes the steps after the prompt, whose block this belongs to."""
        nested = _nested(steps)
        if nested and self.sharing is not None:
            self.alone = "what its forwards get may be of rows"
        if nested or not any(steps.state.active):  # or its first token was its last
            self.sharing, self.filled_up = None, False
        if self.sharing is not None:
            return stack.enter_context(self.sharing.joined(steps))
        if self.filled_up:
            return partial(take_filled_up, steps, self.warms_up)
        if self.warms_up:
            steps.warm()
        return partial(_take_all, steps, synced)

    def end(self, steps: Steps) -> None:
        """Once all steps are taken."""
        if self.sharing is not None or self.filled_up:
            steps.leave()
        else:
            steps.finish()
        if self.alone is not None:
            steps.state.stats.details["shared"] = {"alone": self.alone}
        if steps.owner.reused:
            steps.state.stats.details.setdefault("shared", {})["reused"] = steps.owner.reused


def _decode_in_turns(
    model: Any, input_ids: Tensor, real: Tensor | None, processors: LogitsProcessorList,
    criteria: StoppingCriteriaList, config: GenerationConfig, assistant_model: Any,
    model_kwargs: dict[str, Any], most: int, seeds: Sequence[int] | None,
) -> tuple[list[Sequences], SpecStats]:  # fmt: skip
    """Decode each row of a batch like a call of its own, at most ``most`` at once; ``seeds``: of
    each row's samples."""
    begun: list[Sequences] = []

    def begin(row: int) -> Steps:
        only = slice(row, row + 1)
        ids, given = inputs_of_row(row, input_ids, model_kwargs)
        strategy = Strategy.of(model, config, 1, False, False, assistant_model)
        own = Sequences(input_ids[only], None if real is None else real[only], criteria)
        begun.append(own)
        watch = Stopwatch(SpecStats(strategy.method.name), model.device)
        steps = _after_prompt(
            strategy, config, ids, given, Scorer(processors_of_row(row, processors), own),
            CacheOwner(None, own, False), watch, None if seeds is None else seeds[only],
        )  # fmt: skip
        watch.step()
        return steps

    stats = take_in_turns(len(input_ids), most, begin)
    return begun, stats


def _keep(model: Any, stats: SpecStats, ended: Sequence[Sequences]) -> None:
    """Keep the statistics of a call that has ended, and tell of it."""
    known = memory(model)
    known[SpecStats] = stats
    if _TOLD in known:
        known[_TOLD](stats, ended)


def _after_prompt(
    strategy: Strategy, config: GenerationConfig, input_ids: Tensor, model_kwargs: dict[str, Any],
    scorer: Scorer, owner: CacheOwner, watch: Stopwatch, seeds: Sequence[int] | None = None,
    parts: Parts = WHOLE,
) -> Steps:  # fmt: skip
    """Run the prompt and take the first token of each row.

    Args:
        seeds: see :class:`Acceptance`.
        parts: how the prompt runs.
    """
    model, drafter = strategy.model, strategy.drafter
    rollouts, earlier, sequences = strategy.options.history, None, owner.sequences
    if rollouts is not None:
        earlier = rollouts.begin(model, sequences.now.tokens, sequences.ids.device)
        seeds = earlier.seeds
    kind = memory(model).get(Acceptance, Acceptance)  # benchmarks may set another one
    acceptance = kind(config, strategy.options, scorer, seeds)
    if parts is not WHOLE:
        parts = parts._replace(between=watch.without(parts.between))
    with watch.phase("forward"):
        prompt = Prompt(
            model, input_ids, config, model_kwargs, owner, drafter.probe_inputs, drafter.reads,
            strategy.graphs, parts,
        )  # fmt: skip
        prefilled = strategy.run(prompt.run)
    cache = prefilled.target.cache
    rows, context = cache.batch_size, max(cache.host_lengths).bit_length()
    history, lookups = history_of(model, strategy.options.lookup_history), None
    if strategy.lookup:
        lookups = BatchLookup(Limits(), sequences.now.tokens, history, vocabulary(model))
    policy = StepPolicy(
        watch.stats, strategy.learned, (rows, context, str(model.device)), strategy.timed,
        strategy.recording.at_once,
    )  # fmt: skip
    state = DecodeState(
        model, drafter, prefilled.target, cache, sequences, root=cache.lengths,
        do_sample=strategy.samples, process=scorer, stats=watch.stats, timed=strategy.timed,
        draft_cost=policy.draft_cost(), noise=acceptance.noise,
        lookups=lookups,
        prompt_part=config.prefill_chunk_size or parts.most or DecodeState.prompt_part,
        between_parts=parts.between,
    )  # fmt: skip
    steps = Steps(state, strategy, acceptance, policy, watch, owner, history, earlier)
    # The prompt's hidden states are the drafter's from here on, who may drop them.
    steps.first(prefilled)
    if strategy.options.forced:  # matchers are made where processors are first called
        state.forced = BatchForced(
            scorer.processors, len(sequences.lengths), vocabulary(model), sequences.eos
        )
    if parts.most is not None and any(state.active):
        steps.settle()  # the drafter's prompt is run in parts, too
        drafter.complete(state)
    return steps


def _take_all(steps: Steps, synced: bool) -> None:
    """Take steps until all rows are finished; ``synced``: until those of all ranks are."""
    state, strategy, owner = steps.state, steps.strategy, steps.owner
    model, powers_of_two = strategy.model, strategy.graphs is not None
    shrinks = not (strategy.rows_stay or owner.wanted or _nested(steps))
    while model._has_unfinished_sequences(not any(state.active), synced, model.device):
        if not any(state.active):
            strategy.run(steps.join)
            continue
        rows = _remaining_rows(state.active, powers_of_two) if shrinks else None
        if rows is not None:
            steps.select(rows)
        steps.take()


def _nested(steps: Steps) -> bool:
    """Whether forwards get something that may be of rows, and is no tensor of them."""
    inputs = steps.state.target.model_kwargs.values()
    return any(isinstance(one, (list, tuple, dict)) and one for one in inputs)


def _estimate_plain(
    stats: SpecStats, policy: StepPolicy, prompt_seconds: float, num_prompts: int
) -> None:
    """Set what the call would have taken by the plain steps that were timed."""
    plain = policy.setting.times.plain_seconds()
    if plain is not None and stats.num_steps > 1:
        live = (stats.num_row_steps - num_prompts) / (stats.num_steps - 1)  # rows of a step
        after_first = stats.num_generated_tokens - num_prompts
        stats.plain_seconds = prompt_seconds + plain * after_first / live


def _remaining_rows(active: Sequence[bool], powers_of_two: bool = False) -> list[int] | None:
    """The rows that a batch keeps, see :func:`places_taken`; None if it does not shrink. With
    ``powers_of_two`` it only shrinks to such sizes, as code is compiled for each size."""
    size, left = len(active), sum(active)
    if powers_of_two:
        left = min(bucket(left), size)
    if not 0 < left <= size - max(SHARE * size, 1):
        return None
    return places_taken(active, left)


# --------------------------------------------------------------------------------------------------
# ``generate(custom_generate=hf_spec.generate)``: strategies by Transformers' own door for
# decoding methods of others.


def generate(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    assistant_strategy: str | None = None,
    assistant_kwargs: dict[str, Any] | None = None,
    assistant_model: PreTrainedModel | None = None,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    **model_kwargs: Any,
) -> Tensor | SpecGenerateOutput:
    """Decode with a strategy: ``model.generate(**inputs, custom_generate=hf_spec.generate)``.

    ``hf_spec.generate(model, **inputs)`` is the same call.

    All arguments of ``generate`` work, as with ``assistant_strategy`` alone. A decoding method of
    one's own may call it, too: Transformers gives such a method neither ``assistant_model``,
    ``streamer`` nor ``tokenizer``, so that the first two are to be passed on by other ways.

    Args:
        input_ids: ``(batch, seq)``; like the three that follow, as ``generate`` prepares them. If
            one of these three is missing, ``model.generate`` is called, which prepares them.
        assistant_strategy: name of a strategy; None for that of the configuration, else ``auto``.
        assistant_kwargs: its options.
        assistant_model: the model that drafts, for ``draft_model``.
        streamer: gets the prompt, then tokens.
        synced_gpus: whether all ranks run forwards until the last one ends; None: if they share the
            model's weights by FSDP or DeepSpeed's stage 3, as in ``generate``.
        tokenizer, assistant_tokenizer: the model's and the assistant's, if they have not the same.
        model_kwargs: inputs of the model's forward.

    Returns:
        What ``generate`` returns: ``(batch, seq)`` tokens, or an output with ``spec_stats``.

    Raises:
        ValueError: an option does not work with the strategy.
    """
    if logits_processor is None or stopping_criteria is None or generation_config is None:
        named = {
            "input_ids": input_ids, "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria, "generation_config": generation_config,
            "assistant_strategy": assistant_strategy, "assistant_kwargs": assistant_kwargs,
            "assistant_model": assistant_model, "streamer": streamer, "synced_gpus": synced_gpus,
            "tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer,
        }  # fmt: skip
        named = {name: value for name, value in named.items() if value is not None}
        called: Any = model.generate
        return called(**named, **model_kwargs, custom_generate=generate)
    config: Any = generation_config
    cache = model_kwargs.get(CACHE)
    config.assistant_strategy = (
        assistant_strategy or getattr(config, "assistant_strategy", None) or AUTO
    )
    config.assistant_kwargs = assistant_kwargs or getattr(config, "assistant_kwargs", None)
    if synced_gpus is None:
        shared = utils.is_deepspeed_zero3_enabled() or utils.is_fsdp_managed_module(model)
        synced_gpus = shared and dist.is_initialized() and dist.get_world_size() > 1
    drafts = {
        "assistant_model": assistant_model, "tokenizer": tokenizer,
        "assistant_tokenizer": assistant_tokenizer,
    }  # fmt: skip
    validate_call(model, config, {**drafts, "synced_gpus": synced_gpus})
    assert input_ids is not None
    if getattr(config, "_static_steps", False) and not getattr(cache, "_is_user_defined", False):
        model_kwargs.pop(CACHE, None)  # the static cache that ``generate`` has made
    if streamer is not None:
        streamer.put(input_ids.cpu())
    return decode(
        model, input_ids, logits_processor, stopping_criteria, config, streamer=streamer,
        synced_gpus=synced_gpus, **drafts, **model_kwargs,
    )  # fmt: skip
