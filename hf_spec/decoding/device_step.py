"""The device's part of a step: the model's forward, verification, and the drafter's program.

Where steps are recorded, all of it is one record if the rule of acceptance is a program, too. Else
the host stands between: the drafter's program is then code of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
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
from hf_spec.model.programs import DraftProgram
from hf_spec.model.target import Output
from hf_spec.policy.plans import step_shapes

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
        rule = self.acceptance.program(tree, as_one, drafter.distances)
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
                tree = drafter.attach_probes(
                    tree, [[drafter.distances] * probed] * state.batch_size
                )
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
