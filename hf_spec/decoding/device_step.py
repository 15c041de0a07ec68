"""The device's part of a step: the model's forward, verification, and the drafter's program.

Where steps are recorded, all of it is one record if the rule of acceptance is a program, too. Else
the host stands between: the drafter's program is then code of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from hf_spec.core import verify
from hf_spec.core.buckets import bucket
from hf_spec.core.stats import Stopwatch
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult
from hf_spec.decoding.acceptance import Acceptance
from hf_spec.decoding.strategy import Strategy
from hf_spec.drafting.state import DecodeState
from hf_spec.model.graphs import Graphs
from hf_spec.model.programs import DraftProgram
from hf_spec.model.target import Output
from hf_spec.policy.plans import step_shapes


class Ran(NamedTuple):
    """What the device has done.

    Attributes:
        output: of the forward.
        result: what was accepted.
        moved: whether accepted nodes are in the first slots of the cache's block.
        drafted: what the drafter's program has found, if it has run.
        draft: runs it, if it depends on what is emitted; else finds nothing.
    """

    output: Output
    result: StepResult
    moved: bool
    drafted: Sequence[Tensor] = ()
    draft: Callable[[], Sequence[Tensor]] = tuple


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
        """One step.

        Args:
            tree: what is forwarded.
            grows: whether the drafter's program, if there is one, makes the next trees.
            accept: chooses what is accepted where no program does; None for the call's rule.
        """
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
            choose = accept or self.acceptance
            result = output.result or choose(output.tree, output.logits, state.active)
            state.root = result.bonus.to(state.root.device)
        ran = Ran(output, result, output.result is not None, output.drafted)
        if program is None or ran.drafted:
            return ran
        if program.reads_cache and not ran.moved:
            state.cache.states.move(state.cache.lengths, result.path)
            ran = ran._replace(moved=True)
        # The code for all has just been made, or the program is code of its own.
        draft = partial(self._draft, program, None if inside else graphs, tree, output, result)
        if state.noise is not None:
            return ran._replace(draft=draft)
        with self.watch.phase("draft"):
            return ran._replace(drafted=draft())

    def _draft(
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
                self.run(tree, grows, verify.greedy).draft()
                state.cache.rollback()
            state.root = root
