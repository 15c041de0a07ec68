"""A step of the decoding loop: draft, forward, verify, commit. All strategies share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_spec.core.stats import Stopwatch
from hf_spec.core.transfer import sent
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.decoding.acceptance import Acceptance
from hf_spec.decoding.continued import catch_up
from hf_spec.decoding.handover import Handover
from hf_spec.decoding.strategy import Strategy
from hf_spec.drafting.lookup import merged
from hf_spec.drafting.state import DecodeState
from hf_spec.model.appending import Prefilled, append, chunk_size
from hf_spec.model.hidden_states import Reads, states_at
from hf_spec.model.target import Output
from hf_spec.policy.step_policy import StepPolicy


@dataclass
class Steps:
    """Takes a call's steps, one after the other, each of which changes the state."""

    state: DecodeState
    strategy: Strategy
    acceptance: Acceptance
    policy: StepPolicy
    watch: Stopwatch
    handover: Handover

    def first(self, prompt: Prefilled) -> None:
        """Take the first token after each prompt: a step whose tree is just the root."""
        state, tree = self.state, Tree.roots(self.state.root)
        with self.watch.phase("verify"):
            result = self.acceptance(tree, prompt.logits[:, None], state.active)
            state.root = result.bonus.to(state.root.device)
            host, _ = result.to_host()
        self._emit(tree, host, tree)
        self.strategy.drafter.advance(prompt.committed(result), prompt.hidden)

    def take(self) -> None:
        """One step of all rows."""
        state, drafter, policy = self.state, self.strategy.drafter, self.policy
        prepared, run = state.target.prepared, self.strategy.run
        run(catch_up, state)
        tree = Tree.roots(state.root)
        if policy.drafts(state.lookups is not None):
            with self.watch.phase("draft"):
                limits = _depth_limits(state)
                tree = policy.choose(run(self._draft), drafter, state.active, limits).within(limits)
        with self.watch.phase("forward"):
            match = self.acceptance.matches(tree)
            output = run(state.target, tree, pruning=drafter.pruning, match=match)
        with self.watch.phase("verify"):
            result = output.result or self.acceptance(output.tree, output.logits, state.active)
            state.root = result.bonus.to(state.root.device)
            state.moved = output.result is not None
            drafter.advance(result, _read(drafter.reads, output, result))
        with self.watch.phase("draft"):
            # Near the end, trees are grown once it is known how deep they may be.
            room = state.max_depth - tree.max_depth - 1
            ahead = not policy.paused and room >= drafter.distances
            started = run(drafter.prefetch, state) if ahead else None
        with self.watch.phase("verify"):
            host, state.prefetched = result.to_host(started)  # the step's one transfer
        host = self._emit(tree, host, output.tree)
        moved = state.moved or _in_place(output.tree, host)
        state.cache.commit(list(map(len, host.path)), result.path, output.tree.slots, moved)
        seconds = self.watch.step()
        drafter.observe(state, tree, host)
        if state.lookups is not None:
            state.lookups.observe(host)
        streamer = self.handover.sequences.streamer
        if hasattr(streamer, "see_step"):  # hf-spec demo shows the steps' trees
            streamer.see_step(output.tree, host)
        if state.target.prepared == prepared:  # steps that compile are not typical
            policy.observe(tree, list(map(len, host.path)), seconds)

    def _draft(self) -> Tree:
        """The draft trees, before the policy chooses among their nodes."""
        state, lookups = self.state, self.state.lookup()
        if self.policy.paused:
            return Tree.of_rows(lookups, state.root.device)
        tree = self.strategy.drafter.propose(state)
        return merged(tree, lookups) if lookups else tree

    def complete(self) -> None:
        """Cache more of what finished rows miss, or run a forward for other ranks."""
        state = self.state
        rows = self.handover.missing()
        if any(rows):
            size = chunk_size(state.cache)
            append(state.target, [row[:size] for row in rows])
        else:
            tree = Tree.roots(state.root)
            state.target(tree, match=self.acceptance.matches(tree))
            state.cache.rollback()

    def details(self) -> dict[str, Any]:
        """Entries for ``SpecStats.details``."""
        drafter, target = self.strategy.drafter, self.state.target
        return {**drafter.details(), **self.policy.details(), **target.details()}

    def _emit(self, tree: Tree, host: HostResult, kept: Tree) -> HostResult:
        """Append and stream what was accepted of a tree, of which pruning left ``kept``, and
        advance the state; returns the result without what a stop cut off."""
        state, noise, stats = self.state, self.state.noise, self.state.stats
        stats.num_steps += 1
        active, remaining = state.active, state.remaining
        if noise is not None:
            noise.advance([len(path) if on else 0 for path, on in zip(host.path, active)])
        counts = self.handover.sequences.append(host, self.acceptance.recorded)
        for row, count in enumerate(counts):
            if active[row]:
                depth = min(tree.row_depths[row], remaining[row] - 1)
                stats.record(count, depth, tree.row_sizes[row], len(host.tokens[row]) - 1)
                stats.num_pruned_tokens += tree.row_sizes[row] - kept.row_sizes[row]
        if not all(state.active):  # some rows may have stopped before their last accepted token
            state.root = sent([row[-1] for row in state.tokens], state.root.device)
        return HostResult(
            [path[:count] for path, count in zip(host.path, counts)],
            [tokens[:count] for tokens, count in zip(host.tokens, counts)],
            [probes if count else 0 for probes, count in zip(host.num_probes, counts)],
        )


def _read(reads: Reads, output: Output, result: StepResult) -> Tensor | None:
    """What a drafter reads of a forward."""
    hidden, tree = output.hidden, output.tree
    if hidden is None or reads.tokens is None:
        return None
    if reads.tokens == "last":
        return states_at(hidden, result.last[:, None])[:, 0]
    if reads.tokens == "committed":
        return states_at(hidden, result.path)
    return states_at(hidden, tree.probes_of(result.last)) if tree.num_probes else None


def _depth_limits(state: DecodeState) -> list[int]:
    """Depth of the deepest draft token that each row can still use."""
    limits = [left - 1 if on else 0 for left, on in zip(state.remaining, state.active)]
    if state.target.reach is not None:
        limits = list(map(min, limits, state.target.reach.room(state.cache.host_lengths)))
    return limits


def _in_place(tree: Tree, host: HostResult) -> bool:
    """Whether the accepted nodes are the first ones."""
    return tree.slots is None and all(path == list(range(len(path))) for path in host.path)
