"""What a step of a drafter with trees takes on this device, by the rows of its forward.

A step is what decoding does: candidates from hidden states of the step before, one forward over
nodes and probes, the model's tokens at all nodes, the longest match, and one transfer to the host.
Knows drafters and clocks; knows nothing of accuracies or of the choice of trees.
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
from hf_spec.core.tree import TokenTree
from hf_spec.core.tree_states import TreeState
from hf_spec.drafting.drafter import DecodingState, Draft
from hf_spec.drafting.tree_drafter import TreeDrafter
from hf_spec.model.tree_forward import TreeForward

#: Rounds over all sizes: at least, and at most; and seconds after which no further round starts.
FEWEST, MOST, PATIENCE = 5, 40, 20.0
#: Rounds before anything is timed: kernels are chosen, memory is allocated.
WARM = 2
#: What stands for the plain step and for one with probes only among numbers of rows.
PLAIN, START = -1, 0


@dataclass(frozen=True)
class StepTimes:
    """Seconds of steps, medians over rounds.

    Attributes:
        plain: of the root alone, as in plain decoding.
        start: of the root with all its probes: nothing is predicted yet. As ``plain`` without any.
        by_rows: of a step with candidates and so many nodes and probes.
        per_distance: probes for each distance.
    """

    plain: float
    start: float
    by_rows: dict[int, float]
    per_distance: int = 1

    def seconds(self, state: TreeState) -> float:
        """Of a step in this state; between measured numbers of rows by interpolation."""
        if len(state.tree) == 1:
            return self.start if any(state.probes) else self.plain
        counts = sorted(self.by_rows)
        rows = state.num_rows(self.per_distance)
        return float(np.interp(rows, counts, [self.by_rows[n] for n in counts]))


class StepTimer:
    """Times steps behind a context, all sizes in turns, so that drift of the machine hits all.

    Args:
        model: in evaluation mode, on its device.
        drafter: the method's.
        context: token ids to have in the cache of each row.
        batch_size: rows of the batch.
        states: a tree of candidates with its probes for each number of rows to time.
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
        device = model.get_input_embeddings().weight.device
        ids = torch.tensor([list(context)], device=device).expand(batch_size, -1)
        past = model(input_ids=ids, use_cache=True).past_key_values
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
        """Time everything."""
        forward = TreeForward(
            self.model, self.cache, self.last, probe_inputs=self.drafter.probe_inputs,
            wants_hidden=self.drafter.wants_hidden,
        )  # fmt: skip
        # What a step leaves behind for the next: of the root and a whole group of probes.
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
        # More rows never cost less: a dip is noise, and would make larger trees look free.
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
        """That of a step with this tree in every row of the batch."""
        batch, process, distances = len(self.root), Untouched(), self.drafter.distances
        state = DecodingState(
            self.model, forward, self.cache, self.tokens, self.root, [True] * batch,
            [distances + 1] * batch, False, process, probe_hidden=self.probe_hidden,
            probe_counts=[distances * self.drafter.per_distance] * batch, hidden=self.hidden,
        )  # fmt: skip
        return self.drafter.stand([shape] * batch, state)


class Untouched:
    """Logits processors of greedy decoding: none."""

    trivial = True

    def __call__(self, logits: Tensor, suffixes: Any, active: Any) -> Tensor:
        return logits.float()
