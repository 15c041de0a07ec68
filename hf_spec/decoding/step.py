"""One decoding step: draft, forward, verify, commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_spec.core import verify
from hf_spec.core.device import bucket, selected, to_device
from hf_spec.core.shapes import TokenTree
from hf_spec.core.stats import Stopwatch
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.decoding.acceptance import Acceptance
from hf_spec.decoding.cache_reuse import CacheOwner, advance_rope
from hf_spec.decoding.strategy import Strategy
from hf_spec.draft.drafter import Outcome
from hf_spec.draft.lookup import History, merged
from hf_spec.draft.policy import StepPolicy, step_shapes
from hf_spec.draft.predictor import DecodeState
from hf_spec.draft.rollouts import Earlier
from hf_spec.target.graphs import DraftProgram, Graphs
from hf_spec.target.hidden_states import Read
from hf_spec.target.target import Output, Prefilled

# -- The device's part of a step: the model's forward, verification, and the drafter's program -----
#
# The drafter's part of a step runs in one of four ways:
#
#   joined     in the record of the whole step, if the rule of acceptance is a program, too
#   apart      by code of its own: the host verifies, or steps are compiled
#   as it is   the program without code, as the record that joins all has just been made
#   called     without a program, when the next step begins (:meth:`Drafter.step`)

#: Runs a drafter's program, and gives what it finds.
Draft = Callable[[], Sequence[Tensor]]


class Ran(NamedTuple):
    """What the device's part of a step has found.

    Attributes:
        output: that of the forward, of the trees that pruning has left.
        result: what is accepted of them.
        in_place: whether accepted nodes are in the first slots of the cache's block.
        program_outputs: what the drafter's program has found; empty if it has not run.
        draft: runs it once the host knows what is emitted; None if it need not run any more.
    """

    output: Output
    result: StepResult
    in_place: bool
    program_outputs: Sequence[Tensor] = ()
    draft: Draft | None = None


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
    ) -> Ran:  # fmt: skip
        """Forward and verify a step's trees, and run the drafter's program, if there is one.

        Args:
            tree: what is forwarded.
            grows: whether that program makes the next trees.
            accept: chooses what is accepted where no program does; None for the call's rule.
        """
        state, drafter, graphs = self.state, self.strategy.drafter, self.state.target.graphs
        records = graphs is not None and not graphs.compiles
        rule = self.acceptance.program(tree, records, drafter.depth)
        called = graphs is None or drafter.outside is not None
        program = None if called else drafter.program(state, tree, grows)
        joined = program if records and rule is not None else None
        with self.watch.phase("forward"):
            output = self.strategy.run(
                state.target, tree, pruning=drafter.pruning, verify=rule, after=joined
            )
        with self.watch.phase("verify"):
            ran = self._verified(output, accept)
        if program is None or ran.program_outputs:
            return ran
        if program.reads_cache and not ran.in_place:
            state.cache.states.move(state.cache.lengths, ran.result.path)
            ran = ran._replace(in_place=True)
        apart = graphs if joined is None else None
        draft = partial(self._drafted, program, apart, output, ran.result, bucket(tree.num_tokens))
        if state.noise is not None:  # that of later tokens is known once the host knows the counts
            return ran._replace(draft=draft)
        with self.watch.phase("draft"):
            return ran._replace(program_outputs=draft())

    def _verified(
        self, output: Output, accept: Callable[[Tree, Tensor, list[bool]], StepResult] | None
    ) -> Ran:
        """A forward's output with its result, which ``accept``, or else the call's rule, makes if
        no program has; its bonus tokens are the new roots."""
        state, in_place = self.state, output.result is not None
        found = output.tree, output.logits, state.active
        if output.result is not None:
            result = output.result
        elif accept is not None:
            result = accept(*found)
        else:
            result = self.acceptance(*found, output.ragged)
        state.root = result.bonus.to(state.root.device)
        return Ran(output, result, in_place, output.program_outputs)

    def _drafted(
        self, program: DraftProgram, apart: Graphs | None, output: Output, result: StepResult,
        width: int,
    ) -> Sequence[Tensor]:  # fmt: skip
        """What a drafter's program finds, by code of its own (``apart``) or as it is; ``width``:
        that of paths, which recurs."""
        wide, noise = result.padded(width), self.state.noise
        ahead = noise.ahead(program.depth) if noise is not None and program.depth else None
        read = output.read(self.strategy.drafter.reads, wide)
        run = partial(program.run, apart, wide, read, ahead)
        graphs = self.state.target.graphs
        assert graphs is not None
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
                ran = self.run(own, grows, verify.greedy)
                if ran.draft is not None:
                    ran.draft()
                state.cache.rollback()
            state.root = root


# -- A step of the decoding loop: draft, forward, verify, commit. All strategies share it ----------
#
# What a step has committed and what comes next belong together: the drafter takes in the one and
# grows the other, in a program at the end of a recorded step, else when the next step begins, which
# then knows whether trees are wanted, and for which rows.


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
    #: Whether other sequences take the places of those that have ended. Rows then compete for draft
    #: tokens; where the slowest row decides how long a call takes, they all have equally many.
    replaces: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.device = DeviceStep(self.state, self.strategy, self.acceptance, self.watch)
        self._probes = len(self.strategy.drafter.group)  # of a node
        #: What the last step has committed; None once the drafter has taken it in.
        self._outcome: Outcome | None = None

    def first(self, prompt: Prefilled) -> None:
        """Take the first token after each prompt: a step whose tree is just the root."""
        state, tree = self.state, Tree.roots(self.state.root)
        self.strategy.drafter.start(state)
        with self.watch.phase("verify"):
            result = self.acceptance(tree, prompt.logits[:, None], state.active)
            state.root = result.bonus.to(state.root.device)
            host, _ = result.to_host()
        self._emit(tree, host, tree)
        self._outcome = prompt.committed(result), Read(prompt.hidden)

    def warm(self) -> None:
        """Make the code for all steps that may be chosen."""
        self._end(False)
        self.device.warm()

    def take(self) -> None:
        """One step of all rows: draft, forward, verify, commit, learn."""
        state, drafter, watch = self.state, self.strategy.drafter, self.watch
        prepared, state.draft_cost = state.target.prepared, self.policy.draft_cost()
        if state.target.rope is not None:
            self.strategy.run(advance_rope, state, state.target.rope)
        with watch.phase("draft"):
            tree, repeats = self._draft()
        grows = not self.policy.paused
        ran = self.device.run(tree, grows)
        kept, drafted = ran.output.tree, ran.program_outputs
        # The step's one transfer, but for drafts that grow later.
        with watch.phase("verify"), watch.waiting():
            host, numbers = ran.result.to_host(*drafted[:1])
        host = self._emit(tree, host, kept)
        in_place = ran.in_place or _in_place(kept.slots, host)
        state.cache.commit(host.counts, ran.result.path, kept.slots, in_place)
        result = ran.result._replace(host=host)
        if ran.draft is not None:
            with watch.phase("draft"):
                drafted = ran.draft()
        if drafted:
            drafter.received(state, drafted, numbers, result, grows)
        else:
            self._outcome = result, ran.output.read(drafter.reads, result)
        seconds = watch.step()
        self.owner.sequences.show(kept, host)
        made = state.target.prepared != prepared
        recorded = self.strategy.recording.observe(seconds, watch.waited, made)
        if not repeats:
            # Steps that compile are not typical.
            self._learn(tree, host, None if made else seconds, recorded)

    def _draft(self) -> tuple[Tree, bool]:
        """The step's trees, and whether they repeat earlier answers, which says nothing of the
        strategy."""
        state, policy, limits = self.state, self.policy, _depth_limits(self.state)
        alone, known = self.strategy.alone, None
        if self.earlier is not None and not alone:
            known = self.earlier.rows(state.sequences.rows, state.tokens, state.active, state.noise)
        if known is not None:
            self._end(False)
            return Tree.of_rows(known, state.root.device).within(limits), True
        if alone or not (policy.wants_draft(state.looks_up) and any(limits)):
            self._end(False)
            return Tree.roots(state.root), False
        lookups, drafter = state.lookup(), self.strategy.drafter
        self._end(not policy.paused)
        if policy.paused:
            tree = Tree.of_rows(lookups, state.root.device)
        else:
            tree = self.strategy.run(drafter.propose, state)
            if lookups and state.forced:
                lookups = self.strategy.run(drafter.continued, state, lookups)
            tree = merged(tree, lookups) if lookups else tree
        if state.forced and (drafter.drafts or state.lookups):  # else these are all
            tree = state.forced.completed(tree, state.max_depth)
        competes = self.replaces and state.target.unpads
        tree, probed = policy.choose(tree, state.active, limits, self._probes, competes)
        if probed is not None:
            tree = drafter.attach_probes(tree, (probed * drafter.depth).tolist())
        return tree.within(limits), False

    def _end(self, grows: bool) -> None:
        """End the step before, unless a program has; ``grows``: whether this one drafts."""
        outcome, self._outcome = self._outcome, None
        if outcome is not None or grows and self.state.grown is None:
            self.strategy.run(self.strategy.drafter.step, self.state, outcome, grows)

    def settle(self) -> None:
        """Between two steps: have the drafter take in what is committed, so that nothing is left to
        do before rows join."""
        self._end(False)

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
        if self._outcome is not None:
            result, read = self._outcome
            self._outcome = result.of_rows(rows), selected(read, rows)

    def leave(self) -> None:
        """Once the call is over: leave to later calls what they can use."""
        sequences, noise = self.owner.sequences, self.acceptance.noise
        if self.history is not None:
            self.history.add(sequences.answers)
        if self.earlier is not None:
            self.earlier.history.add(self.earlier, sequences.answers)
        if noise is not None:
            noise.give_back(sequences.emitted[0])

    def finish(self) -> None:
        """Once the call is over: :meth:`leave`, and report."""
        self.leave()
        self.state.stats.details = details_of(self)
        if (graphs := self.strategy.graphs) is not None:
            graphs.spare([*self.owner.release(), *self.strategy.drafter.release()])

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
                accepted, size = len(host.tokens[row]) - 1, tree.row_sizes[row]
                self._record(row, count, depth, size, accepted, size - kept.row_sizes[row])
        if not all(state.active):  # some rows may have stopped before their last accepted token
            state.root = to_device([row[-1] for row in state.tokens], state.root.device)
        return HostResult(
            [path[:count] for path, count in zip(host.path, counts)],
            [tokens[:count] for tokens, count in zip(host.tokens, counts)],
            [probes if count else 0 for probes, count in zip(host.num_probes, counts)],
        )

    def _record(self, row: int, *counts: int) -> None:
        """Count a step of a row; see :meth:`SpecStats.record`."""
        self.state.stats.record(*counts)


def details_of(steps: Steps) -> dict[str, Any]:
    """Entries for ``SpecStats.details``."""
    drafter, target = steps.state.drafter, steps.state.target
    parts = drafter, steps.policy, target, steps.strategy.recording
    details = {name: value for part in parts for name, value in part.details().items()}
    if target.graphs is not None:
        details["compiled"]["outside"] = drafter.outside
    return details


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
