"""Step times of a drafter with trees on this device, by number of step tokens.

A timed step does what a decoding step does: candidates from hidden states of the previous step, one
forward over nodes and probes, the model's tokens at all nodes, the longest match, and one transfer
to the host. This module knows drafters and clocks, but not accuracies or the choice of trees.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_spec.core import verify
from hf_spec.core.cache import TreeCache
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree_states import TreeState
from hf_spec.drafting.drafter import DecodingState, Draft
from hf_spec.drafting.tree_drafter import TreeDrafter
from hf_spec.model.tree_forward import TreeForward
from modeling_patches.cache_name import cache_in
from modeling_patches.weights import placement

#: Fewest and most rounds over all sizes, and seconds after which no further round starts.
FEWEST, MOST, PATIENCE = 5, 40, 20.0
#: Untimed rounds at the start, in which kernels are chosen and memory is allocated.
WARM = 2
#: Markers, among numbers of step tokens, of the plain step and of one with only probes.
PLAIN, START = -1, 0


@dataclass(frozen=True)
class StepTimes:
    """Seconds of steps, medians over rounds.

    Attributes:
        plain: steps of just the root, as in plain decoding.
        start: steps of the root with all its probes, before any predictions; without probes, the
            same as ``plain``.
        by_rows: steps with candidates, by number of nodes and probes.
        per_distance: probes per distance.
    """

    plain: float
    start: float
    by_rows: dict[int, float]
    per_distance: int = 1

    def seconds(self, state: TreeState) -> float:
        """Seconds of a step in this state; interpolated between measured sizes."""
        if len(state.tree) == 1:
            return self.start if any(state.probes) else self.plain
        counts = sorted(self.by_rows)
        rows = state.num_rows(self.per_distance)
        return float(np.interp(rows, counts, [self.by_rows[n] for n in counts]))


class StepTimer:
    """Times steps after a context, all sizes in turns, so that drift affects all of them.

    Args:
        model: the model in evaluation mode, on its device.
        drafter: the method's drafter.
        context: token ids to put into the cache of each row.
        batch_size: batch size.
        states: a tree of candidates with its probes for each number of step tokens to time.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Any,
        drafter: TreeDrafter,
        context: Sequence[int],
        batch_size: int,
        states: Mapping[int, TreeState],
    ):
        self.model, self.drafter = model, drafter
        device = placement(model).device
        ids = torch.tensor([list(context)], device=device).expand(batch_size, -1)
        past = cache_in(model(input_ids=ids, use_cache=True))
        most = max(states)
        front = drafter.probe_inputs.num_front if drafter.probe_inputs else 0
        self.cache = TreeCache.pack(past, None, len(context) + most, device, front)
        self.last = torch.full((batch_size,), len(context) + most, device=device)
        self.root = ids[:, -1].contiguous()
        self.tokens = [list(context) for _ in range(batch_size)]
        alone = TokenTree.chain(0)
        probes = drafter.distances * bool(drafter.per_distance)
        self.shapes = {PLAIN: TreeState(alone, (0,)), START: TreeState(alone, (probes,)), **states}
        self.spent: dict[int, list[float]] = {rows: [] for rows in self.shapes}
        self.probe_hidden: Tensor | None = None
        self.hidden: Tensor | None = None

    @torch.no_grad()
    def run(self) -> StepTimes:
        """Time all sizes."""
        forward = TreeForward(
            self.model, self.cache, self.last, probe_inputs=self.drafter.probe_inputs,
            wants_hidden=self.drafter.wants_hidden,
        )  # fmt: skip
        # The inputs of the next step: states of the root and a whole group of probes.
        draft = self._draft(forward, self.shapes[START])
        output = forward(draft.tokens, draft.tree, probes=draft.probes)
        self.cache.rollback()
        self.probe_hidden, nodes = output.probe_hidden, output.node_hidden
        self.hidden = None if nodes is None else nodes[:, 0]
        for _ in range(WARM):
            self._round(forward)
        begin = time.perf_counter()
        for turn in range(MOST):
            if turn >= FEWEST and time.perf_counter() - begin > PATIENCE:
                break
            for rows, seconds in self._round(forward).items():
                self.spent[rows].append(seconds)
        medians = {rows: statistics.median(times) for rows, times in self.spent.items()}
        counts = sorted(medians)  # the plain step stands first: no other undercuts it
        # More step tokens never cost less: a dip is noise, and would make larger trees look free.
        rising = np.maximum.accumulate([medians[n] for n in counts])
        smooth = dict(zip(counts, rising.tolist()))
        start = max(medians.pop(START), smooth[PLAIN])
        by_rows = {n: seconds for n, seconds in smooth.items() if n not in (PLAIN, START)}
        return StepTimes(smooth[PLAIN], start, by_rows, self.drafter.per_distance)

    def _round(self, forward: TreeForward) -> dict[int, float]:
        return {rows: self._step(forward, shape) for rows, shape in self.shapes.items()}

    def _step(self, forward: TreeForward, shape: TreeState) -> float:
        start = time.perf_counter()
        draft = self._draft(forward, shape)
        output = forward(draft.tokens, draft.tree, probes=draft.probes)
        targets = output.logits.argmax(-1).to(draft.tokens.device)
        accepted = verify.match(draft.tree, draft.tokens, targets)
        accepted.path.tolist()  # waits for the device
        spent = time.perf_counter() - start
        self.cache.rollback()
        return spent

    def _draft(self, forward: TreeForward, shape: TreeState) -> Draft:
        """The draft of a step with this tree in every batch row."""
        batch, process, distances = len(self.root), Untouched(), self.drafter.distances
        state = DecodingState(
            self.model, forward, self.cache, self.tokens, self.root, [True] * batch,
            [distances + 1] * batch, False, process, probe_hidden=self.probe_hidden,
            probe_counts=[distances * self.drafter.per_distance] * batch, hidden=self.hidden,
        )  # fmt: skip
        return self.drafter.stand([shape] * batch, state)


class Untouched:
    """Logits processors of greedy decoding: none."""

    trivial, lockstep = True, False
    stateful: tuple[str, ...] = ()
    eos: tuple[int, ...] = ()

    def __call__(
        self, logits: Tensor, suffixes: Any, active: Any, drafting: bool = False
    ) -> Tensor:
        return logits.float()
