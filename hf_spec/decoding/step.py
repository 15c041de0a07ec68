"""A step of the decoding loop: draft, forward, verify, commit. All strategies share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from hf_spec.core import verify
from hf_spec.core.buckets import bucket
from hf_spec.core.stats import Stopwatch
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.transfer import sent
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.decoding.acceptance import Acceptance
from hf_spec.decoding.continued import advance_rope
from hf_spec.decoding.handover import Handover
from hf_spec.decoding.strategy import Strategy
from hf_spec.drafting.lookup import History, merged
from hf_spec.drafting.rollouts import Earlier
from hf_spec.drafting.state import DecodeState, Grown
from hf_spec.model.appending import Prefilled
from hf_spec.model.graphs import Graphs
from hf_spec.model.programs import DraftProgram
from hf_spec.model.target import Output
from hf_spec.policy.plans import step_shapes
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
    history: History | None
    earlier: Earlier | None

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
        """One step of all rows."""
        state, drafter, policy = self.state, self.strategy.drafter, self.policy
        prepared, run = state.target.prepared, self.strategy.run
        run(advance_rope, state)
        tree, limits = Tree.roots(state.root), _depth_limits(state)
        known = None if self.earlier is None else self.earlier.rows(state)
        if known is not None:
            tree = Tree.of_rows(known, state.root.device).within(limits)
        elif policy.drafts(state.lookups is not None) and any(limits):
            with self.watch.phase("draft"):
                tree = policy.choose(run(self._draft), drafter, state.active, limits).within(limits)
        output, result, after = self._run(tree, self.acceptance, not policy.paused)
        found = output.drafted
        if after is not None and state.noise is None:  # else it needs to know what was emitted
            with self.watch.phase("draft"):
                found, after = after(), None
        with self.watch.phase("verify"):  # the step's one transfer, but for drafts that grow later
            host, numbers = result.to_host(*found[:1])
        host = self._emit(tree, host, output.tree)
        moved = output.result is not None or _in_place(output.tree, host)
        state.cache.commit(host.counts, result.path, output.tree.slots, moved)
        with self.watch.phase("draft"):
            found = found if after is None else after()
            result = result._replace(host=host)
            if found:
                drafter.received(found, result)
            else:
                run(drafter.advance, result, output.read(drafter.reads, result))
            state.grown = Grown(found[0], numbers) if found and not policy.paused else None
        seconds = self.watch.step()
        streamer = self.handover.sequences.streamer
        if hasattr(streamer, "see_step"):  # hf-spec demo shows the steps' trees
            streamer.see_step(output.tree, host)
        if known is not None:
            return  # it says nothing of the strategy
        drafter.observe(state, tree, host)
        if state.lookups is not None:
            state.lookups.observe(host)
        if state.target.prepared == prepared:  # steps that compile are not typical
            policy.observe(tree, host.counts, seconds)

    def _run(
        self, tree: Tree, accept: Callable[[Tree, Tensor, list[bool]], StepResult], grows: bool
    ) -> tuple[Output, StepResult, Callable[[], Sequence[Tensor]] | None]:
        """The forward, its result, and what runs the drafter's program, if steps are recorded or
        compiled and the forward's code does not contain it; ``grows``: whether it makes the next
        trees."""
        state, drafter, graphs = self.state, self.strategy.drafter, self.state.target.graphs
        as_one = graphs is not None and not graphs.compiles  # all of a step is one record
        rule = self.acceptance.program(tree, as_one, drafter.distances)
        program = None if graphs is None else drafter.program(state, tree, grows)
        inside = as_one and rule is not None
        with self.watch.phase("forward"):
            output = self.strategy.run(
                state.target, tree, pruning=drafter.pruning, verify=rule,
                after=program if inside else None,
            )  # fmt: skip
        with self.watch.phase("verify"):
            result = output.result or accept(output.tree, output.logits, state.active)
            state.root = result.bonus.to(state.root.device)
        if program is None or output.drafted:
            return output, result, None
        # The code for all has just been made, or the program is code of its own.
        by = None if inside else graphs
        return output, result, partial(self._drafted, program, by, tree, output, result)

    def _drafted(
        self, program: DraftProgram, graphs: Graphs | None, tree: Tree, output: Output,
        result: StepResult,
    ) -> Sequence[Tensor]:  # fmt: skip
        """What a drafter's program finds after a step."""
        wide, noise = result.padded(bucket(tree.num_tokens)), self.state.noise
        ahead = noise.ahead(program.depth) if noise is not None and program.depth else None
        given = wide, output.read(self.strategy.drafter.reads, wide), ahead
        if graphs is None:
            return self.strategy.run(program.run, *given)
        return self.strategy.run(program.run_by, graphs, *given)

    def warm(self) -> None:
        """Make the code for all steps that may be chosen, whose results are discarded."""
        state, drafter = self.state, self.strategy.drafter
        sizes = step_shapes(len(drafter.group), self.strategy.lookup)
        for nodes, probed in sizes if drafter.drafts else [(1, 0)]:
            shape = TokenTree((-1, *[0] * (nodes - 1)))
            tree = Tree.of_shapes([shape] * state.batch_size, state.root.device)
            tree = tree.with_tokens(state.root[:, None].expand(-1, nodes))
            if probed:
                tree = drafter.attach_probes(
                    tree, [[drafter.distances] * probed] * state.batch_size
                )
            root = state.root
            # While the drafter pauses, there are plain steps and lookups.
            for grows in (True, False) if nodes == 1 or self.strategy.lookup else (True,):
                after = self._run(tree, verify.greedy, grows)[-1]
                if after is not None:
                    after()
                state.cache.rollback()
            state.root = root

    def _draft(self) -> Tree:
        """The draft trees, before the policy chooses among their nodes."""
        state, lookups = self.state, self.state.lookup()
        if self.policy.paused:
            return Tree.of_rows(lookups, state.root.device)
        tree = self.strategy.drafter.propose(state)
        return merged(tree, lookups) if lookups else tree

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
        sequences, graphs = self.handover.sequences, self.strategy.graphs
        if self.history is not None:
            self.history.add(sequences.answers)
        if self.earlier is not None:
            self.earlier.history.add(self.earlier, sequences.answers)
        if noise is not None:
            noise.give_back(sequences.emitted[0])
        if graphs is not None:
            graphs.spare([*self.handover.release(), *drafter.release()])
        parts = drafter, self.policy, state.target
        state.stats.details = {
            name: value for part in parts for name, value in part.details().items()
        }

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


def _depth_limits(state: DecodeState) -> list[int]:
    """Depth of the deepest draft token that each row can still use."""
    limits = [left - 1 if on else 0 for left, on in zip(state.remaining, state.active)]
    if state.target.rope is not None:
        room = state.target.rope.room(sum(state.active))
        limits = [min(limit, room) for limit in limits]
    return limits


def _in_place(tree: Tree, host: HostResult) -> bool:
    """Whether the accepted nodes are the first ones."""
    return tree.slots is None and all(path == list(range(len(path))) for path in host.path)
