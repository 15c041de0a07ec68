"""A step of the decoding loop: propose, forward, verify, commit. All strategies share it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from transformers import GenerationConfig

from hf_spec.adapters.active import ActiveAdapter, find_active
from hf_spec.core.pruning import Survivors
from hf_spec.core.stats import SpecStats, Stopwatch
from hf_spec.core.transfer import sent
from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.decoding.choose import Choice, Chooser, Decision
from hf_spec.decoding.compiling import graphs_for
from hf_spec.decoding.prefill import catch_up
from hf_spec.decoding.selfcheck import check_tree_forward
from hf_spec.drafting.drafter import DecodingState, Draft, Drafter
from hf_spec.drafting.options import StrategyOptions
from hf_spec.drafting.retrieval import with_retrieval
from hf_spec.methods.registry import Method, get_method
from hf_spec.model.graphs import Graphs
from hf_spec.model.tree_forward import Ending
from hf_spec.policy.learned import Learned
from hf_spec.policy.memory import recall
from hf_spec.policy.saved import saved_for
from hf_spec.policy.step_policy import StepPolicy, switched_on


class Growing(Protocol):
    """The growing sequences; see :class:`hf_spec.decoding.emission.Emission`."""

    @property
    def active(self) -> list[bool]: ...

    @property
    def remaining(self) -> list[int]: ...

    def take(
        self, row: int, tokens: Sequence[int], scores: Sequence[Tensor], logits: Sequence[Tensor]
    ) -> int: ...

    def end_step(self) -> None: ...

    def show(self, draft: Draft, nodes: Sequence[Sequence[int]]) -> None: ...


@dataclass
class Strategy:
    """The strategy that a generation config names, set up on a model for one call.

    Attributes:
        method, options: named by the config.
        drafter: the call's drafter, look-ups included.
        timed: whether the amount of drafting may depend on step times.
        adapter: the method's adapter, if it is active.
        graphs: compiled code for its steps; None if they are not compiled.
        samples: whether the call samples.
    """

    model: Any
    method: Method
    options: StrategyOptions
    drafter: Drafter
    timed: bool
    adapter: ActiveAdapter | None
    graphs: Graphs | None
    samples: bool

    @classmethod
    def of(cls, model: Any, config: GenerationConfig, unsure: bool = False) -> Strategy:
        """Set up the strategy of a prepared config.

        Args:
            unsure: check tree masks with padding, too: rows are padded, or several ranks run the
                model together.

        Raises:
            ValueError: if the model or another option does not work with the strategy.
        """
        method = get_method(config.assistant_strategy)
        options = method.parse_options(config.assistant_kwargs)
        drafter = method.drafter(model, options)
        check_tree_forward(model, method.name, drafter, unsure)
        samples = bool(config.do_sample)
        timed = switched_on(options, samples)
        if options.looks_up(timed):
            drafter = with_retrieval(drafter)
        adapter = _adapter(method, model)
        found = cls(model, method, options, drafter, timed, adapter, None, samples)
        found.graphs = graphs_for(model, config, drafter, found.kind)
        return found

    @property
    def kind(self) -> tuple[str, str, str | None]:
        """What compiled code and what is learned are kept by."""
        return self.method.name, repr(self.options), self.adapter and self.adapter.name

    def policy(self, stats: SpecStats, setting: tuple[int, int, str], width: Any) -> StepPolicy:
        """The policy that decides how much to draft, with what earlier calls have learned.

        Args:
            setting, width: see :class:`StepPolicy`.
        """
        return StepPolicy(stats, self.learned, setting, self.timed, width)

    @property
    def learned(self) -> Learned:
        """What earlier calls have learned, or at first what ``hf-spec tune`` has saved."""
        # Sampled text is harder to predict, and choosing its tokens takes longer.
        key = Learned, self.kind, self.graphs is not None, self.samples
        return recall(self.model, key, self._saved)

    def _saved(self) -> Learned:
        if self.graphs is not None:  # the steps of hf-spec tune are not compiled
            return Learned()
        saved = saved_for(self.adapter, self.model, self.options)
        return Learned() if saved is None else saved.learned(str(self.model.device))


@dataclass
class Steps:
    """Takes a call's steps, one after the other.

    Attributes:
        state: the state that drafters see; every step changes it.
        strategy: the call's strategy.
        chooser: decides which candidates are accepted.
        policy: decides how much is drafted.
        emission: receives the tokens.
        watch: measures times.
        ends: given rows of the call, 1 for each whose last token must be cached once it finishes.
    """

    state: DecodingState
    strategy: Strategy
    chooser: Chooser
    policy: StepPolicy
    emission: Growing
    watch: Stopwatch
    ends: Callable[[Sequence[int]], list[int]]

    def first(self, logits: Tensor) -> None:
        """Take the first token after each prompt: a step whose tree is just the root.

        Args:
            logits: ``(batch, vocab)`` after the prompts.
        """
        state = self.state
        draft = Draft(root_only(state), state.root[:, None])
        with self.watch.phase("verify"):
            decision = self.chooser.accept(draft, logits[:, None], state.active)
            state.root = decision.accepted.bonus.to(state.root.device)
            choice, _ = decision.on_host()
        self._emit(choice, draft)

    def take(self) -> None:
        """One step of all rows."""
        state, drafter, policy, graphs = (
            self.state, self.strategy.drafter, self.policy, self.strategy.graphs
        )  # fmt: skip
        forward, cache = state.forward, state.cache
        made = graphs and graphs.made
        ends = self.ends(state.rows)
        catch_up(state)
        drafts = policy.drafts(drafter.looks_up)
        with self.watch.phase("draft"):
            draft = Draft(root_only(state), state.root[:, None])
            if drafts:
                limits = _limits(state)
                propose = drafter.look_up if policy.looks_up_only else drafter.propose
                draft = policy.choose(propose(state), drafter, state.active, limits)
                draft = _within(draft, limits)
        match = self.chooser.matches(draft)
        with self.watch.phase("forward"):
            pruning = drafter.pruning if draft.pruned else None
            output = forward(
                draft.tokens, draft.tree, probes=draft.probes, pruning=pruning, match=match
            )
        left = output.survivors
        verified = draft if left is None else draft.left_with(left)
        with self.watch.phase("verify"):
            ending = output.ending
            if ending is None:
                decision = self.chooser.accept(verified, output.logits, state.active)
                _move_on(Ending.of(decision.accepted, output, verified.probes), state)
            else:
                decision = Decision(ending.accepted, state.active)
                _move_on(ending, state)
        with self.watch.phase("draft"):
            # Near the end, trees are grown once it is known how deep they may be.
            room = state.max_depth - draft.tree.max_depth - 1
            foresees = policy.foresees and room >= drafter.distances
            ahead = drafter.foresee(state) if foresees else None
        with self.watch.phase("verify"):
            choice, state.foreseen = decision.on_host(ahead)
        counts = self._emit(choice, draft)
        _note_probes(choice, counts, verified, state)
        if left is not None:
            choice = _unpruned(choice, left, draft, counts, state)
        kept = [max(count, end) for count, end in zip(counts, ends)]
        cache.commit(kept, None if output.ending is not None else _moved(choice, kept))
        seconds = self.watch.step()
        accepted = [nodes[:count] for nodes, count in zip(choice.nodes, counts)]
        drafter.observe(state, draft, accepted)
        self.emission.show(draft, accepted)
        if graphs is None or graphs.made == made:  # steps that compile are not typical
            policy.observe(draft, counts, seconds)

    def cache_ends(self) -> None:
        """Cache the last tokens of finished rows as required, or run a forward for other ranks."""
        state = self.state
        alone = root_only(state)
        match = self.chooser.matches(Draft(alone, state.root[:, None]))
        state.forward(state.root[:, None], alone, match=match)
        state.cache.commit(self.ends(state.rows))

    def details(self) -> dict[str, Any]:
        """Entries for ``SpecStats.details``."""
        found = {**self.strategy.drafter.details(), **self.policy.details()}
        if self.strategy.graphs is not None:
            found["compiled"] = self.strategy.graphs.details()
        return found

    def _emit(self, choice: Choice, draft: Draft) -> list[int]:
        """Append and stream the chosen tokens and advance the state; return kept nodes per row."""
        state, emission, tree = self.state, self.emission, draft.tree
        stats = state.stats
        stats.num_steps += 1
        counts = []
        for place, tokens in enumerate(choice.tokens):
            if not state.active[place]:
                counts.append(0)
                continue
            depth = min(tree.row_depths[place], state.remaining[place] - 1)
            kept = emission.take(
                state.rows[place], tokens, choice.scores[place], choice.logits[place]
            )
            stats.record(kept, depth, tree.row_candidates[place], kept=len(tokens) - 1)
            counts.append(kept)
        emission.end_step()
        active, remaining = emission.active, emission.remaining
        state.active = [active[row] for row in state.rows]
        state.remaining = [remaining[row] for row in state.rows]
        if not all(state.active):  # some rows may have stopped before their last accepted token
            state.root = sent([row[-1] for row in state.tokens], state.root.device)
        return counts


def root_only(state: DecodingState) -> TreeBatch:
    """The tree of a plain step."""
    return TokenTree.chain(0).batch(state.batch_size, state.cache.lengths.device)


def _adapter(method: Method, model: Any) -> ActiveAdapter | None:
    """The method's active adapter, on which acceptance depends."""
    if method.adapter_config is None:
        return None
    found = None
    with suppress(ValueError):  # several are active; the drafter raises if that is a problem
        found = find_active(model, method.adapter_config.type_name)
    return found


def _limits(state: DecodingState) -> list[int]:
    """Depth of the deepest candidate that each row can still use."""
    limits = [left - 1 if on else 0 for left, on in zip(state.remaining, state.active)]
    if state.forward.reach is not None:
        limits = list(map(min, limits, state.forward.reach.room(state.cache.host_lengths)))
    return limits


def _within(draft: Draft, limits: Sequence[int]) -> Draft:
    """Mark candidates invalid that are deeper than their row can use."""
    tree = draft.tree
    if tree.max_depth <= min(limits):
        return draft
    deepest = sent(limits, tree.depths.device)[:, None]
    valid = tree.valid & (tree.depths <= deepest)
    return dataclasses.replace(draft, tree=dataclasses.replace(tree, valid=valid))


def _unpruned(
    choice: Choice, left: Survivors, draft: Draft, counts: list[int], state: DecodingState
) -> Choice:
    """Renumber the chosen nodes as in the whole draft, and count the pruned candidates."""
    for drafted, kept, count in zip(draft.tree.row_candidates, left.counts, counts):
        if count:
            state.stats.num_pruned_tokens += drafted - kept
    nodes = [[of[node] for node in path] for path, of in zip(choice.nodes, left.host_nodes)]
    path = left.nodes.gather(1, choice.path.to(left.nodes.device))
    return dataclasses.replace(choice, path=path, nodes=nodes)


def _moved(choice: Choice, counts: list[int]) -> Tensor | None:
    """The accepted path, or None if the accepted nodes already come first."""
    in_place = all(
        nodes[:count] == list(range(count)) for nodes, count in zip(choice.nodes, counts)
    )
    return None if in_place else choice.path


def _move_on(ending: Ending, state: DecodingState) -> None:
    """Set each row's root and hidden states for the next step, on the device only."""
    state.root = ending.accepted.bonus.to(state.root.device)
    state.hidden, state.probe_hidden = ending.hidden, ending.probe_hidden
    state.probe_sizes = ending.probe_sizes


def _note_probes(choice: Choice, counts: list[int], draft: Draft, state: DecodingState) -> None:
    """Record how many valid probes each row has."""
    state.probe_counts = [0] * len(counts)
    if draft.probes is not None and state.probe_hidden is not None:
        state.probe_counts = [
            sizes[nodes[-1]] if count else 0
            for sizes, nodes, count in zip(draft.probes.sizes, choice.nodes, counts)
        ]
