"""A step of the decoding loop: draft, forward, verify, commit. All strategies share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_spec.core.stats import Stopwatch
from hf_spec.core.transfer import to_device
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.decoding.acceptance import Acceptance
from hf_spec.decoding.cache_owner import CacheOwner
from hf_spec.decoding.cache_reuse import advance_rope
from hf_spec.decoding.device_step import DeviceStep
from hf_spec.decoding.strategy import Strategy
from hf_spec.drafting.lookup import History, merged
from hf_spec.drafting.rollouts import Earlier
from hf_spec.drafting.state import DecodeState, Grown
from hf_spec.model.appending import Prefilled
from hf_spec.policy.step_policy import StepPolicy


@dataclass
class Steps:
    """Takes a call's steps, one after the other, each of which changes the state."""

    state: DecodeState
    strategy: Strategy
    acceptance: Acceptance
    policy: StepPolicy
    watch: Stopwatch
    owner: CacheOwner
    history: History | None
    earlier: Earlier | None

    def __post_init__(self) -> None:
        self.device = DeviceStep(self.state, self.strategy, self.acceptance, self.watch)

    def first(self, prompt: Prefilled) -> None:
        """Take the first token after each prompt: a step whose tree is just the root."""
        state, drafter, tree = self.state, self.strategy.drafter, Tree.roots(self.state.root)
        drafter.start(state)
        with self.watch.phase("verify"):
            result = self.acceptance(tree, prompt.logits[:, None], state.active)
            state.root = result.bonus.to(state.root.device)
            host, _ = result.to_host()
        self._emit(tree, host, tree)
        with self.watch.phase("draft"):
            self.strategy.run(drafter.advance, prompt.committed(result), prompt.hidden)

    def take(self) -> None:
        """One step of all rows: draft, forward, verify, commit, learn."""
        state, drafter, watch = self.state, self.strategy.drafter, self.watch
        prepared, grows = state.target.prepared, not self.policy.paused
        self.strategy.run(advance_rope, state)
        tree, repeats = self._draft()
        output, moved, draft = self.device.run(tree, grows)
        result, slots = output.result, output.tree.slots
        assert result is not None
        with watch.phase("verify"):  # the step's one transfer, but for drafts that grow later
            host, numbers = result.to_host(*output.drafted[:1])
        host = self._emit(tree, host, output.tree)
        state.cache.commit(host.counts, result.path, slots, moved or _in_place(slots, host))
        with watch.phase("draft"):
            result, found = result._replace(host=host), output.drafted or draft()
            if found:
                drafter.received(found, result)
            else:
                self.strategy.run(drafter.advance, result, output.read(drafter.reads, result))
            state.grown = Grown(found[0], numbers, found[1:]) if found and grows else None
        seconds = watch.step()
        streamer = self.owner.sequences.streamer
        if hasattr(streamer, "see_step"):  # hf-spec demo shows the steps' trees
            streamer.see_step(output.tree, host)
        if not repeats:
            # Steps that compile are not typical.
            self._learn(tree, host, seconds if state.target.prepared == prepared else None)

    def _draft(self) -> tuple[Tree, bool]:
        """The step's trees, and whether they repeat earlier answers, which says nothing of the
        strategy."""
        state, policy, limits = self.state, self.policy, _depth_limits(self.state)
        if self.strategy.alone:
            return Tree.roots(state.root), False
        known = None if self.earlier is None else self.earlier.rows(state)
        if known is not None:
            return Tree.of_rows(known, state.root.device).within(limits), True
        if not (policy.drafts(state.lookups is not None) and any(limits)):
            return Tree.roots(state.root), False
        with self.watch.phase("draft"):
            tree = self.strategy.run(self._proposed)
            chosen = policy.choose(tree, self.strategy.drafter, state.active, limits)
            return chosen.within(limits), False

    def _proposed(self) -> Tree:
        """The draft trees, before the policy chooses among their nodes."""
        state, lookups = self.state, self.state.lookup()
        if self.policy.paused:
            return Tree.of_rows(lookups, state.root.device)
        tree = self.strategy.drafter.propose(state)
        return merged(tree, lookups) if lookups else tree

    def _learn(self, tree: Tree, host: HostResult, seconds: float | None) -> None:
        """Learn from what a step accepted, and how long it took, if that is known."""
        self.strategy.drafter.observe(self.state, tree, host)
        if self.state.lookups is not None:
            self.state.lookups.observe(host)
        if seconds is not None:
            self.policy.observe(tree, host.counts, seconds)

    def join(self) -> None:
        """Once all rows are finished: run a forward for other ranks."""
        state, tree = self.state, Tree.roots(self.state.root)
        state.target(tree, verify=self.acceptance.program(tree))
        state.cache.rollback()

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order."""
        self.state.select(rows)
        self.policy.move(len(rows))

    def finish(self) -> None:
        """Once the call is over: leave to later calls what they can use, and report."""
        state, drafter, noise = self.state, self.strategy.drafter, self.acceptance.noise
        sequences, graphs = self.owner.sequences, self.strategy.graphs
        if self.history is not None:
            self.history.add(sequences.answers)
        if self.earlier is not None:
            self.earlier.history.add(self.earlier, sequences.answers)
        if noise is not None:
            noise.give_back(sequences.emitted[0])
        parts = drafter, self.policy, state.target
        state.stats.details = {
            name: value for part in parts for name, value in part.details().items()
        }
        if graphs is not None:
            graphs.spare([*self.owner.release(), *drafter.release()])
            state.stats.details["compiled"]["outside"] = drafter.outside

    def _emit(self, tree: Tree, host: HostResult, kept: Tree) -> HostResult:
        """Append and stream what was accepted of a tree, of which pruning left ``kept``, and
        advance the state; returns the result without what a stop cut off."""
        state, noise, stats = self.state, self.state.noise, self.state.stats
        stats.num_steps += 1
        active, remaining = state.active, state.remaining
        if noise is not None:
            noise.advance([len(path) if on else 0 for path, on in zip(host.path, active)])
        counts = self.owner.sequences.append(host, self.acceptance.recorded)
        for row, count in enumerate(counts):
            if active[row]:
                depth = min(tree.row_depths[row], remaining[row] - 1)
                stats.record(count, depth, tree.row_sizes[row], len(host.tokens[row]) - 1)
                stats.num_pruned_tokens += tree.row_sizes[row] - kept.row_sizes[row]
        if not all(state.active):  # some rows may have stopped before their last accepted token
            state.root = to_device([row[-1] for row in state.tokens], state.root.device)
        return HostResult(
            [path[:count] for path, count in zip(host.path, counts)],
            [tokens[:count] for tokens, count in zip(host.tokens, counts)],
            [probes if count else 0 for probes, count in zip(host.num_probes, counts)],
        )


def _depth_limits(state: DecodeState) -> list[int]:
    """Depth of the deepest draft token that each row can still use."""
    limits = [left - 1 if on else 0 for left, on in zip(state.remaining, state.active)]
    if state.target.rope is not None:
        room = state.target.rope.room(sum(state.active))
        limits = [min(limit, room) for limit in limits]
    return limits


def _in_place(slots: Tensor | None, host: HostResult) -> bool:
    """Whether the accepted nodes are the first ones; ``slots``: see :class:`Tree`."""
    return slots is None and all(path == list(range(len(path))) for path in host.path)
