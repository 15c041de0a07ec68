"""One decoding step: draft, forward, verify, commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from hf_spec.core import verify
from hf_spec.core.device import bucket, to_device
from hf_spec.core.shapes import TokenTree
from hf_spec.core.stats import Stopwatch
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.decoding.acceptance import Acceptance
from hf_spec.decoding.cache_reuse import CacheOwner, advance_rope
from hf_spec.decoding.strategy import Strategy
from hf_spec.draft.lookup import History, merged
from hf_spec.draft.policy import StepPolicy, step_shapes
from hf_spec.draft.rollouts import Earlier
from hf_spec.draft.state import DecodeState, Grown
from hf_spec.target.graphs import DraftProgram
from hf_spec.target.target import Output, Prefilled

# -- The device's part of a step: the model's forward, verification, and the drafter's program -----
#
# Where steps are recorded, all of it is one record if the rule of acceptance is a program, too.
# Else the host stands between: the drafter's program is then code of its own.

#: Runs a drafter's program, and gives what it finds.
Draft = Callable[[], Sequence[Tensor]]


@dataclass
class DeviceStep:
    """Runs the device's part of a call's steps."""

    state: DecodeState
    strategy: Strategy
    acceptance: Acceptance
    watch: Stopwatch

    def run(
        self, tree: Tree, grows: bool,
        accept: Callable[[Tree, Tensor, list[bool]], StepResult] | None = None,
    ) -> tuple[Output, bool, Draft]:  # fmt: skip
        """One step: its output with the result, and with what the drafter's program has found if it
        has run; whether accepted nodes are in the first slots of the cache's block; and what runs
        the program if that depends on what is emitted, else finds nothing.

        Args:
            tree: what is forwarded.
            grows: whether the drafter's program, if there is one, makes the next trees.
            accept: chooses what is accepted where no program does; None for the call's rule.
        """
        state, drafter, graphs = self.state, self.strategy.drafter, self.state.target.graphs
        as_one = graphs is not None and not graphs.compiles  # all of a step is one record
        rule = self.acceptance.program(tree, as_one, drafter.depth)
        alone = graphs is None or drafter.outside is not None
        program = None if alone else drafter.program(state, tree, grows)
        inside = as_one and rule is not None
        with self.watch.phase("forward"):
            output = self.strategy.run(
                state.target, tree, pruning=drafter.pruning, verify=rule,
                after=program if inside else None,
            )  # fmt: skip
        with self.watch.phase("verify"):
            choose, moved = accept or self.acceptance, output.result is not None
            result = output.result or choose(output.tree, output.logits, state.active)
            state.root, output = result.bonus.to(state.root.device), output._replace(result=result)
        if program is None or output.drafted:
            return output, moved, tuple
        if program.reads_cache and not moved:
            state.cache.states.move(state.cache.lengths, result.path)
            moved = True
        # The code for all has just been made, or the program is code of its own.
        draft = partial(self._draft, program, not inside, tree, output, result)
        if state.noise is not None:
            return output, moved, draft
        with self.watch.phase("draft"):
            return output._replace(drafted=draft()), moved, tuple

    def _draft(
        self, program: DraftProgram, by_code: bool, tree: Tree, output: Output,
        result: StepResult,
    ) -> Sequence[Tensor]:  # fmt: skip
        """What a drafter's program finds after a step, by code of its own or as it is."""
        wide, noise = result.padded(bucket(tree.num_tokens)), self.state.noise
        ahead = noise.ahead(program.depth) if noise is not None and program.depth else None
        read = output.read(self.strategy.drafter.reads, wide)
        graphs = self.state.target.graphs
        assert graphs is not None
        run = partial(program.run, graphs if by_code else None, wide, read, ahead)
        found: Sequence[Tensor] = self.strategy.run(graphs.spared, run)
        return found

    def warm(self) -> None:
        """Make the code for all steps that may be chosen, whose results are discarded."""
        state, drafter = self.state, self.strategy.drafter
        sizes = step_shapes(len(drafter.group), self.strategy.lookup)
        for nodes, probed in sizes if drafter.drafts else [(1, 0)]:
            shape = TokenTree((-1, *[0] * (nodes - 1)))
            tree = Tree.of_shapes([shape] * state.batch_size, state.root.device)
            tree = tree.with_tokens(state.root[:, None].expand(-1, nodes))
            if probed:
                tree = drafter.attach_probes(tree, [[drafter.depth] * probed] * state.batch_size)
            root, other = state.root, 1 + (state.root == 1).long()
            # While the drafter pauses, there are plain steps and lookups.
            both = nodes == 1 or self.strategy.lookup
            for grows, token in product((True, False) if both else (True,), (root, other)):
                # Code is used once it has been right for several inputs.
                tokens = torch.cat([token[:, None], tree.tokens[:, 1 : tree.num_tokens]], dim=1)
                own = tree.with_tokens(tokens)
                self.run(own, grows, verify.greedy)[-1]()
                state.cache.rollback()
            state.root = root


# -- A step of the decoding loop: draft, forward, verify, commit. All strategies share it ----------


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
        # The step's one transfer, but for drafts that grow later.
        with watch.phase("verify"), watch.waiting():
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
        made = state.target.prepared != prepared
        recorded = self.strategy.recording.observe(seconds, watch.waited, made)
        streamer = self.owner.sequences.streamer
        if hasattr(streamer, "see_step"):  # hf-spec demo shows the steps' trees
            streamer.see_step(output.tree, host)
        if not repeats:
            # Steps that compile are not typical.
            self._learn(tree, host, None if made else seconds, recorded)

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
            drafter = self.strategy.drafter
            tree, probed = policy.choose(tree, state.active, limits, len(drafter.group))
            if probed is not None:
                tree = drafter.attach_probes(tree, (probed * drafter.depth).tolist())
            return tree.within(limits), False

    def _proposed(self) -> Tree:
        """The draft trees, before the policy chooses among their nodes."""
        state, lookups = self.state, self.state.lookup()
        if self.policy.paused:
            return Tree.of_rows(lookups, state.root.device)
        tree = self.strategy.drafter.propose(state)
        return merged(tree, lookups) if lookups else tree

    def _learn(
        self, tree: Tree, host: HostResult, seconds: float | None, recorded: bool
    ) -> None:  # fmt: skip
        """Learn from what a step accepted, and how long it took, if that is known."""
        self.strategy.drafter.observe(self.state, tree, host)
        if self.state.lookups is not None:
            self.state.lookups.observe(host)
        if seconds is not None:
            self.policy.observe(tree, host.counts, seconds, recorded)

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
        parts = drafter, self.policy, state.target, self.strategy.recording
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
