"""Between a drafter and the trees that are chosen while decoding (``tree="online"``).

Notes the likeliest tokens of every prediction and compares them with what is emitted, reads the
step times, and asks for the tree of each step. What was learned is remembered for the model's next
call. How trees are chosen stands in :mod:`hf_spec.policy.online_trees`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.core.tree_states import TreeStates
from hf_spec.drafting.drafter import DecodingState
from hf_spec.drafting.predictions import Predictions
from hf_spec.drafting.tree_drafter import TreeSource
from hf_spec.policy.memory import alone, recall
from hf_spec.policy.online_trees import RANKS, UNKNOWN, HitRates, Shape, TreePlan, check_rows
from hf_spec.policy.step_cost import StepCost
from hf_spec.policy.tuned_trees import Device, Measurements, measurements

#: Every so many steps all distances are predicted, those below the tree, too.
LOOK = 8
#: Hits and misses at each distance until then; before, all distances are predicted always.
ENOUGH = 32
#: Predictions that wait on the device for being compared.
PENDING = 64


@dataclass
class Predicted:
    """The likeliest tokens of one step's predictions.

    Attributes:
        predictions: on the device.
        rows: tokens of each row; they grow as it does. None for a finished row.
        starts: length of each row when they were made; the token there is that of distance 1.
        known: distances that each row had predictions for.
    """

    predictions: Predictions
    rows: list[list[int] | None]
    starts: list[int]
    known: list[int]

    def best(self, width: int) -> Tensor:
        """``(batch, distances, width)`` the likeliest ids, given the tokens that came."""
        depth = self.predictions.distances
        before = [
            [*(row or [0] * start)[start - 1 : start - 1 + depth], *[0] * depth][:depth]
            for row, start in zip(self.rows, self.starts)
        ]
        device = self.predictions.tokens.device
        return self.predictions.likeliest(torch.tensor(before, device=device))[..., :width]

    def wanted(self, depth: int) -> list[list[int]]:
        """``(batch, depth)`` the tokens that came; ``UNKNOWN`` where none did."""
        found = []
        for row, start, known in zip(self.rows, self.starts, self.known):
            came = [] if row is None else row[start : start + min(known, depth)]
            found.append(came + [UNKNOWN] * (depth - len(came)))
        return found


def ranks_of(
    predicted: Sequence[Predicted], depth: int, width: int
) -> np.ndarray[Any, np.dtype[Any]]:
    """``(predictions x rows, depth)`` rank of each token that came, in order of time.

    ``width`` for a miss. The device is waited for once, whatever there is to compare.
    """
    wanted = [row for one in predicted for row in one.wanted(depth)]
    best = torch.cat(
        [functional.pad(best, (0, 0, 0, depth - best.shape[1]), value=-2)
         for best in (one.best(width) for one in predicted)]
    )  # fmt: skip
    target = torch.tensor(wanted, device=best.device)
    hits = best == target[..., None]  # (predictions x rows, depth, K)
    ranks = torch.where(hits.any(-1), hits.int().argmax(-1), width)
    found: np.ndarray[Any, np.dtype[Any]]
    found = torch.where(target == UNKNOWN, UNKNOWN, ranks).cpu().numpy()
    return found


@dataclass
class Memory:
    """What one adapter of a model has shown under some options: hits, and a plan for each batch
    size and length."""

    hits: HitRates
    plans: dict[tuple[int, int, str], TreePlan] = field(default_factory=dict)


class OnlineTrees(TreeSource):
    """The trees of one call.

    Args:
        model: what is remembered is forgotten with it.
        adapter: the adapter that drafts; ``tree.json`` beside it tells what to start from.
        depth: distances that it predicts.
        probes: under a node for each distance, if predictions come from probes.
        max_rows: most rows of a step.

    Raises:
        ValueError: ``max_rows`` is too few for a candidate; from the first step, ``tree.json``
            cannot be read.
    """

    def __init__(
        self, model: Any, adapter: ActiveAdapter, depth: int, probes: int, max_rows: int,
    ):  # fmt: skip
        self.model, self.adapter = model, adapter
        self.depth, self.per_distance, self.max_rows = depth, probes, max_rows
        self.ranks = self.width = min(RANKS, model.get_input_embeddings().weight.shape[0])
        check_rows(max_rows, self.per_distance)
        self._memory: Memory | None = None
        self._plan: TreePlan | None = None
        self._pending: list[Predicted] = []
        self._proposals = 0
        self._predicted = self._looked = False
        self._times = 0.0, 0.0
        self._taken: Counter[tuple[int, int, str]] = Counter()

    # -- a step ------------------------------------------------------------------------------

    def start(self, state: DecodingState) -> None:
        """The call's first step is near."""
        self._times = _times(state)

    @property
    def max_depth(self) -> int:
        return self.depth

    def states(self, state: DecodingState) -> TreeStates:
        """The trees of the step that begins now; without probes under any node if none pays."""
        tree, ahead = self._shape(state)
        if not self.per_distance:
            return TreeStates.bare(tree, self.depth)
        return TreeStates.uniform(tree, ahead if len(tree) > 1 else 0)

    @alone
    def _shape(self, state: DecodingState) -> Shape:
        self._plan = plan = self._plan_for(state)
        if plan.is_due or len(self._pending) >= PENDING:
            self._compare(self._pending[: -self.depth])
            self._pending = self._pending[-self.depth :]
        self._proposals += 1
        return plan.next()

    @alone
    def look(self, depth: int) -> int:
        """Distances to predict where the tree is so deep: now and then all, to know them all."""
        assert self._memory is not None
        counts = self._memory.hits.counts
        few = counts.min() < ENOUGH  # drafting is then a little dearer than it will be
        self._looked = not few and self._proposals % LOOK == 0 and depth < self.depth
        return self.depth if few or self._looked else depth

    def noted(self, predictions: Predictions, state: DecodingState) -> None:
        rows = [row if on else None for row, on in zip(state.tokens, state.active)]
        starts = [len(row) for row in state.tokens]
        shown = [min(n, predictions.distances) for n in predictions.known]
        self._pending.append(Predicted(predictions, rows, starts, shown))
        self._predicted = True

    @alone
    def observe(self, state: DecodingState, rows: int, nodes: Sequence[Sequence[int]]) -> None:
        """A step is over, with these accepted nodes; a plain one, too."""
        before, self._times = self._times, _times(state)
        drafting, seconds = (now - then for now, then in zip(self._times, before))
        plan = self._plan or self._plan_for(state)
        counts = [len(path) for path in nodes if path]
        # A step without predictions, or that looked further than usual, says little of drafting.
        usual = self._predicted and not self._looked
        tokens = sum(counts) / max(len(counts), 1)
        plan.observe(rows, seconds, drafting if usual else None, tokens)
        self._plan, self._predicted, self._looked = None, False, False

    @alone
    def details(self) -> dict[str, Any]:
        """Decisions and what they rest on, as ``SpecStats.details["online"]``.

        Of the batch size and length that most of the call's steps had.
        """
        if self._memory is None or not self._taken:
            return {}
        self._compare(self._pending)
        self._pending = []
        [(key, _)] = self._taken.most_common(1)
        batch_size, bucket, _ = key
        plan = self._memory.plans[key]
        return {
            "online": {"batch_size": batch_size, "length": 2**bucket - 1, **plan.details()}
        }  # fmt: skip

    # -- memory ------------------------------------------------------------------------------

    def _compare(self, predicted: list[Predicted]) -> None:
        if predicted:
            assert self._memory is not None
            self._memory.hits.observe(ranks_of(predicted, self.depth, self.ranks))

    def _plan_for(self, state: DecodingState) -> TreePlan:
        """That of the batch size and the length in powers of two."""
        longest = max(map(len, state.tokens))
        key = state.batch_size, longest.bit_length(), str(state.root.device)
        memory = self._memory = self._memory or self._recall(state, longest)
        if key not in memory.plans:
            memory.plans[key] = self._fresh(memory, key, longest)
        self._taken[key] += 1
        return memory.plans[key]

    def _recall(self, state: DecodingState, length: int) -> Memory:
        """What earlier calls of the model have learned, or what was measured for the adapter.

        Options that leave the trees alone count, too: pruned steps, and steps with look-ups, take
        other times.
        """
        key = Memory, state.strategy, self.adapter.name, self.depth, self.per_distance

        def fresh() -> Memory:
            found = self._measured(state.batch_size, length)
            if found is None:
                return Memory(HitRates(self.depth, self.ranks))
            accuracies = np.array(found.accuracies)
            return Memory(HitRates.measured(accuracies, self.depth, self.ranks))

        return recall(self.model, key, fresh)

    def _fresh(self, memory: Memory, key: tuple[int, int, str], length: int) -> TreePlan:
        """A plan for new conditions: from those most like them, or from measured step times."""
        batch_size, bucket, device = key
        near = [one for one in memory.plans if one[2] == device]
        if near:
            best = min(near, key=lambda one: (abs(one[0] - batch_size), abs(one[1] - bucket)))
            return memory.plans[best].like_this(batch_size / best[0])
        found = self._measured(batch_size, length)
        cost = StepCost() if found is None else StepCost.guessed(found.seconds)
        return TreePlan(memory.hits, cost, self.per_distance, self.max_rows)

    def _measured(self, batch_size: int, length: int) -> Measurements | None:
        """What ``hf-spec tune`` has measured; a Hub that cannot be reached is none."""
        with suppress(OSError):
            return measurements(self.adapter, Device.of(self.model), batch_size, length)
        return None


def _times(state: DecodingState) -> tuple[float, float]:
    """Seconds spent in drafting, and in forwards with what follows them."""
    stats = state.stats
    return stats.draft_seconds, stats.forward_seconds + stats.verify_seconds
