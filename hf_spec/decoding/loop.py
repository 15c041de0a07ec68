"""The decoding loop: prefill, propose, forward, verify, commit. One loop serves every strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from hf_spec.adapters.active import ActiveAdapter, find_active
from hf_spec.core.pruning import Survivors
from hf_spec.core.stats import SpecStats, Stopwatch
from hf_spec.core.transfer import sent
from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.decoding.batch import Shrinking
from hf_spec.decoding.choose import Choice, Chooser, Decision
from hf_spec.decoding.compiling import graphs_for, warm
from hf_spec.decoding.emission import Emission
from hf_spec.decoding.handover import Handover
from hf_spec.decoding.outputs import SpecGenerateOutput, remember_stats
from hf_spec.decoding.prefill import catch_up, prefill, real_tokens
from hf_spec.decoding.scoring import Scorer
from hf_spec.decoding.selfcheck import check_tree_forward
from hf_spec.drafting.drafter import DecodingState, Draft
from hf_spec.drafting.ngram import with_retrieval
from hf_spec.methods.registry import Method, get_method
from hf_spec.model.tree_forward import Ending
from hf_spec.policy.learned import Learned
from hf_spec.policy.memory import recall
from hf_spec.policy.step_policy import StepPolicy, switched_on
from hf_spec.policy.tuned_trees import Device, measurements
from modeling_patches.ranks import Ranks
from modeling_patches.support import check_length


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
    **model_kwargs: Any,
) -> Tensor | SpecGenerateOutput:
    """Decode with ``generation_config.assistant_strategy``; ``generate()`` calls this.

    The arguments are those of ``GenerationMixin._sample``, the model being the first.
    """
    config = generation_config
    method = get_method(config.assistant_strategy)
    options = method.parse_options(config.assistant_kwargs)
    record = bool(config.return_dict_in_generate)
    record_scores, record_logits = record and config.output_scores, record and config.output_logits
    ranks = Ranks(model)
    if config.do_sample:
        ranks.share_random_state()
    pad = config._pad_token_tensor
    real = real_tokens(input_ids, model_kwargs.get("attention_mask"))
    emission = Emission(
        input_ids, real, stopping_criteria, None if pad is None else int(pad), streamer,
        bool(record_scores), bool(record_logits), ranks.same,
    )  # fmt: skip
    check_length(model, emission.max_length)
    scorer = Scorer(logits_processor, emission)
    chooser = Chooser(options, scorer, bool(config.do_sample), bool(record_scores or record_logits))
    drafter = method.drafter(model, options)
    check_tree_forward(model, method.name, drafter, synced_gpus or real is not None)
    timed = switched_on(options, bool(config.do_sample))
    if options.looks_up(timed):
        drafter = with_retrieval(drafter)
    adapter = _adapter(method, model)
    strategy = method.name, repr(options), adapter and adapter.name
    graphs = graphs_for(model, config, drafter, strategy)
    stats = SpecStats()
    watch = Stopwatch(stats, model.device, ranks.same)

    handover = Handover(
        model_kwargs.get("past_key_values"), emission, record, graphs.allocate if graphs else None
    )
    with ExitStack() as stack:
        stack.callback(handover.give_back)  # also after an error, an interrupt for one
        with watch.phase("forward"):
            prefilled = prefill(
                model, input_ids, config, model_kwargs, handover,
                drafter, drafter.wants_hidden, graphs,
            )  # fmt: skip
        forward, cache = prefilled.forward, prefilled.forward.cache
        prompt = cache.host_lengths
        state = DecodingState(
            model, forward, cache, emission.tokens, root=cache.lengths,
            active=emission.active, remaining=emission.remaining,
            do_sample=bool(config.do_sample), process=scorer, stats=stats,
            probe_hidden=prefilled.probe_hidden, hidden=prefilled.hidden, timed=timed,
        )  # fmt: skip

        # The prompt's last logits are a step whose tree is the root alone.
        draft = Draft(_root_only(state), cache.lengths[:, None])
        with watch.phase("verify"):
            decision = chooser.accept(draft, prefilled.logits[:, None], state.active)
            state.root = decision.accepted.bonus.to(state.root.device)
            choice, _ = decision.on_host()
        _emit(choice, draft, emission, state)
        state.probe_counts = [prefilled.num_probes if on else 0 for on in state.active]
        if any(state.active):
            drafter.start(state)
        context, device = max(prompt).bit_length(), str(model.device)
        known = recall(model, (Learned, strategy, graphs is not None), Learned)
        policy = StepPolicy(
            stats, known, (len(prompt), context, device), state.timed,
            _measured(model, adapter, len(prompt), context), forward.width,
        )  # fmt: skip
        state.draft_price = policy.draft_price
        if getattr(config, "_warms_up", False):
            shapes = policy.shapes(drafter.num_probes, drafter.looks_up)
            warm(state, drafter, shapes, chooser.matches(draft))
        shrinking = Shrinking(state, drafter, scorer, handover, graphs is not None)
        watch.step()

        while model._has_unfinished_sequences(
            not any(state.active) and not any(handover.ends(state.rows)), synced_gpus, model.device
        ):
            if not any(state.active):
                # For last tokens; or with synced_gpus other ranks still need this one's shards.
                alone, match = _root_only(state), chooser.matches(draft)
                forward(state.root[:, None], alone, match=match)
                cache.commit(handover.ends(state.rows))
                continue
            if shrinking.step():
                policy.move((state.batch_size, context, device))
            made = graphs and graphs.made
            ends = handover.ends(state.rows)
            catch_up(state)
            drafts = policy.drafts(drafter.looks_up)
            with watch.phase("draft"):
                draft = Draft(_root_only(state), state.root[:, None])
                if drafts:
                    limits = _limits(state)
                    propose = drafter.look_up if policy.looks_up_only else drafter.propose
                    draft = policy.choose(propose(state), drafter, state.active, limits)
                    draft = _within(draft, limits)
            with watch.phase("forward"):
                pruning = drafter.pruning if draft.pruned else None
                output = forward(
                    draft.tokens, draft.tree, probes=draft.probes, pruning=pruning,
                    match=chooser.matches(draft),
                )  # fmt: skip
            left = output.survivors
            verified = draft if left is None else draft.left_with(left)
            with watch.phase("verify"):
                ending = output.ending
                if ending is None:
                    decision = chooser.accept(verified, output.logits, state.active)
                    _move_on(Ending.of(decision.accepted, output, verified.probes), state)
                else:
                    decision = Decision(ending.accepted, state.active)
                    _move_on(ending, state)
            with watch.phase("draft"):
                # Near the end trees are grown when it is known how much of them can be used.
                room = state.max_depth - draft.tree.max_depth - 1
                foresees = policy.foresees and room >= drafter.distances
                ahead = drafter.foresee(state) if foresees else None
            with watch.phase("verify"):
                choice, state.foreseen = decision.on_host(ahead)
            counts = _emit(choice, draft, emission, state)
            _note_probes(choice, counts, verified, state)
            if left is not None:
                choice = _unpruned(choice, left, draft, counts, state)
            kept = [max(count, end) for count, end in zip(counts, ends)]
            cache.commit(kept, None if output.ending is not None else _moved(choice, kept))
            seconds = watch.step()
            drafter.observe(state, draft, [n[:count] for n, count in zip(choice.nodes, counts)])
            if graphs is None or graphs.made == made:  # compiling takes many steps' time
                policy.observe(draft, counts, seconds)

        sequences = emission.finish()
        past = handover.give_back()
    stats.details = {**drafter.details(), **policy.details()}
    if graphs is not None:
        stats.details["compiled"] = graphs.details()
        graphs.spare(handover.release())
    watch.step(last=True)
    remember_stats(model, stats)
    if not config.return_dict_in_generate:
        return sequences
    return SpecGenerateOutput(
        sequences=sequences, scores=emission.columns(emission.scores),
        logits=emission.columns(emission.logits), past_key_values=past, spec_stats=stats,
    )  # fmt: skip


def _root_only(state: DecodingState) -> TreeBatch:
    """The tree of a plain step."""
    return TokenTree.chain(0).batch(state.batch_size, state.cache.lengths.device)


def _adapter(method: Method, model: Any) -> ActiveAdapter | None:
    """The method's active adapter: how drafts fare depends on it."""
    if method.adapter_config is None:
        return None
    found = None
    with suppress(ValueError):  # several; the drafter said so if that leaves it without one
        found = find_active(model, method.adapter_config.type_name)
    return found


def _measured(
    model: Any, adapter: ActiveAdapter | None, batch_size: int, context: int
) -> Callable[[], dict[int, float]]:
    """Step times that ``hf-spec tune`` has measured, by rows."""

    def seconds() -> dict[int, float]:
        if adapter is None:
            return {}
        found = measurements(adapter, Device.of(model), batch_size, 2**context - 1)
        return {} if found is None else found.seconds

    return seconds


def _limits(state: DecodingState) -> list[int]:
    """Depth of the deepest candidate that each row can still use."""
    limits = [left - 1 if on else 0 for left, on in zip(state.remaining, state.active)]
    if state.forward.reach is not None:
        limits = list(map(min, limits, state.forward.reach.room(state.cache.host_lengths)))
    return limits


def _within(draft: Draft, limits: Sequence[int]) -> Draft:
    """Mark candidates invalid that lie deeper than their row can use."""
    tree = draft.tree
    if tree.max_depth <= min(limits):
        return draft
    deepest = sent(limits, tree.depths.device)[:, None]
    valid = tree.valid & (tree.depths <= deepest)
    return dataclasses.replace(draft, tree=dataclasses.replace(tree, valid=valid))


def _emit(choice: Choice, draft: Draft, emission: Emission, state: DecodingState) -> list[int]:
    """Take the chosen tokens, stream them, and move the state on: kept nodes per row."""
    stats, tree = state.stats, draft.tree
    stats.num_steps += 1
    counts = []
    for place, tokens in enumerate(choice.tokens):
        if not state.active[place]:
            counts.append(0)
            continue
        depth = min(tree.row_depths[place], state.remaining[place] - 1)
        kept = emission.take(state.rows[place], tokens, choice.scores[place], choice.logits[place])
        stats.record(kept, depth, tree.row_candidates[place], kept=len(tokens) - 1)
        counts.append(kept)
    emission.stream()
    active, remaining = emission.active, emission.remaining
    state.active = [active[row] for row in state.rows]
    state.remaining = [remaining[row] for row in state.rows]
    if not all(state.active):  # some may have stopped before the last token that was accepted
        state.root = sent([row[-1] for row in state.tokens], state.root.device)
    return counts


def _unpruned(
    choice: Choice, left: Survivors, draft: Draft, counts: list[int], state: DecodingState
) -> Choice:
    """The choice with nodes numbered as in the whole draft; counts what was pruned."""
    for drafted, kept, count in zip(draft.tree.row_candidates, left.counts, counts):
        if count:
            state.stats.num_pruned_tokens += drafted - kept
    nodes = [[of[node] for node in path] for path, of in zip(choice.nodes, left.host_nodes)]
    path = left.nodes.gather(1, choice.path.to(left.nodes.device))
    return dataclasses.replace(choice, path=path, nodes=nodes)


def _moved(choice: Choice, counts: list[int]) -> Tensor | None:
    """The accepted path, or None where the accepted nodes stand first already."""
    in_place = all(
        nodes[:count] == list(range(count)) for nodes, count in zip(choice.nodes, counts)
    )
    return None if in_place else choice.path


def _move_on(ending: Ending, state: DecodingState) -> None:
    """Keep what each row goes on from; on the device alone."""
    state.root = ending.accepted.bonus.to(state.root.device)
    state.hidden, state.probe_hidden = ending.hidden, ending.probe_hidden
    state.probe_sizes = ending.probe_sizes


def _note_probes(choice: Choice, counts: list[int], draft: Draft, state: DecodingState) -> None:
    """Note how many probes each row has predictions of."""
    state.probe_counts = [0] * len(counts)
    if draft.probes is not None and state.probe_hidden is not None:
        state.probe_counts = [
            sizes[nodes[-1]] if count else 0
            for sizes, nodes, count in zip(draft.probes.sizes, choice.nodes, counts)
        ]
