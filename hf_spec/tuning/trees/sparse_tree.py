"""Dynamic sparse trees from accuracies (PPD, section 5.6). Knows only numbers: no model, no clock.

``accuracies[d - 1, r]`` is the probability that the token of rank r in the prediction for distance
d is the right one, given that the path above it is. A node's probability is the product along its
path; f of a tree is their sum, the root's 1 included: tokens that a step emits (Prop. 5.6.1).

A node with n probes leads to state n if it is the last accepted one. The thesis weights a probe by
the probability that its node is accepted (Prop. 5.6.3). The right weight is the probability that
the node is accepted and none of its children is, since probes under inner nodes of the accepted
path are never read. These probabilities sum to 1 over a tree and are the chain's transitions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree_states import TreeState, TreeStates
from hf_spec.policy.likely_paths import Array, RankPath, likeliest_paths

#: Share of steps after which the chain restarts in state 0, as every call does, so that all chains
#: have a unique solution.
RESTART = 1e-7
#: Rounds of improvement; they end when nothing changes, mostly after two or three.
ROUNDS = 30


def checked(accuracies: Any) -> Array:
    """Accuracies ``(distances, ranks)`` as float64.

    Raises:
        ValueError: they are no probabilities, or those of a distance sum to more than 1.
    """
    table = np.asarray(accuracies, dtype=np.float64)
    if table.ndim != 2 or not table.size:
        raise ValueError(f"accuracies of shape {table.shape}: give (distances, ranks).")
    # Sums of shares may exceed 1 by rounding.
    if not np.isfinite(table).all() or table.min() < 0 or table.sum(1).max() > 1 + 1e-6:
        raise ValueError("accuracies must be probabilities that sum to at most 1 at each distance.")
    return table


# ------------------------------------------------------------------------------- candidate trees


@dataclass(frozen=True)
class Candidates:
    """The likeliest paths up to some depth: the first n are the best tree of n candidates.

    Attributes:
        paths: a parent before its children, likelier ones first.
        chances: ``(paths,)`` probability that all of a path is right.
    """

    paths: tuple[RankPath, ...]
    chances: Array

    @classmethod
    def search(cls, accuracies: Any, max_depth: int, count: int) -> Candidates:
        """The ``count`` likeliest paths, or all with nonzero probability if these are fewer. No
        tree of the same size has a larger sum."""
        return cls(*likeliest_paths(checked(accuracies)[:max_depth], count))

    def __len__(self) -> int:
        return len(self.paths)

    def tree(self, count: int) -> TokenTree:
        """The best tree of ``count`` candidates, in this order."""
        return TokenTree.in_order(self.paths[:count])

    @cached_property
    def values(self) -> Array:
        """``(paths + 1,)`` f of the best tree of 0, 1, ... candidates."""
        return np.concatenate([[1.0], 1.0 + np.cumsum(self.chances)])

    @cached_property
    def ends(self) -> Array:
        """``(paths + 1, paths + 1)``: entry [n, i] is the probability that node i of the best tree
        of n candidates is the last accepted one; 0 past the tree."""
        index = {(): 0, **{path: i for i, path in enumerate(self.paths, start=1)}}
        ends = np.zeros((len(self) + 1, len(self) + 1))
        ends[0, 0] = 1.0
        for node, (path, chance) in enumerate(zip(self.paths, self.chances), start=1):
            ends[node] = ends[node - 1]
            ends[node, node] = chance
            ends[node, index[path[:-1]]] -= chance
        return ends.clip(min=0.0)


def chances_of(tree: TokenTree, accuracies: Array) -> tuple[Array, Array]:
    """For each node, the probability that it is accepted, and that it is the last one."""
    reach = np.ones(len(tree))
    for node in range(1, len(tree)):
        depth, rank = tree.depths[node], tree.ranks[node]
        known = rank < accuracies.shape[1] and depth <= len(accuracies)
        chance = accuracies[depth - 1, rank] if known else 0.0
        reach[node] = reach[tree.parents[node]] * chance
    ends = reach.copy()
    for node in range(1, len(tree)):
        ends[tree.parents[node]] -= reach[node]
    return reach, ends.clip(min=0.0)


def grown(count: int, depth: int, draw: random.Random) -> TokenTree:
    """A tree of ``count`` candidates, each under a random node above ``depth``."""
    paths: list[RankPath] = []
    nodes: list[RankPath] = [()]
    children: dict[RankPath, int] = {}
    for _ in range(count):
        parent = draw.choice([path for path in nodes if len(path) < depth])
        rank = children.setdefault(parent, 0)
        children[parent] += 1
        paths.append((*parent, rank))
        nodes.append(paths[-1])
    return TokenTree.in_order(paths)


# ------------------------------------------------------------------------------------- the chain


@dataclass(frozen=True)
class Chain:
    """Transitions between states, and tokens emitted in each (Prop. 5.6.4).

    Attributes:
        moves: ``(states, states)`` probability of the next state.
        values: ``(states,)`` f, tokens that a step emits.
    """

    moves: Array
    values: Array

    @classmethod
    def of(cls, states: TreeStates, accuracies: Any) -> Chain:
        """The chain of these trees under these accuracies."""
        table, count = checked(accuracies), len(states.states)
        moves, values = np.zeros((count, count)), np.zeros(count)
        for k, state in enumerate(states.states):
            reach, ends = chances_of(state.tree, table)
            values[k] = reach.sum()
            np.add.at(moves[k], list(state.probes), ends)
        return cls(moves, values)

    @property
    def _restarting(self) -> Array:
        moves = (1 - RESTART) * self.moves
        moves[:, 0] += 1 - moves.sum(1)
        return moves

    @cached_property
    def steady(self) -> Array:
        """``(states,)`` share of steps in each state in the long run."""
        count = len(self.values)
        system = np.vstack([self._restarting.T - np.eye(count), np.ones(count)])
        target = np.zeros(count + 1)
        target[-1] = 1.0
        solution: Array = np.linalg.lstsq(system, target, rcond=None)[0].clip(min=0.0)
        return solution / solution.sum()

    @property
    def tau(self) -> float:
        """R(T), emitted tokens per step in the long run."""
        return float(self.steady @ self.values)

    @property
    def worth(self) -> Array:
        """``(states,)`` expected number of additional tokens compared with starting in state 0."""
        count = len(self.values)
        # worth = values - tau + moves @ worth, worth[0] = 0; the first column stands for tau.
        system = np.eye(count) - self._restarting
        system[:, 0] = 1.0
        solution = np.linalg.solve(system, self.values)
        solution[0] = 0.0
        return solution


# ------------------------------------------------------------------------------- dynamic trees


class SparseTrees:
    """Builds trees for accuracies.

    Args:
        accuracies: ``(m, ranks)``; m is the number of probes under a node that has all of them.
        max_size: largest number of step tokens: nodes (the root included) and probes.
        per_distance: step tokens per distance: EPTs of a prompt token.
    """

    def __init__(self, accuracies: Any, max_size: int, per_distance: int = 1):
        self.accuracies = checked(accuracies)
        self.most, self.per_distance = len(self.accuracies), per_distance
        #: Possible candidates, by state.
        self.candidates = [
            Candidates.search(self.accuracies, depth, max_size - 1)
            for depth in range(self.most + 1)
        ]

    def best(self, size: int) -> TreeStates:
        """The best dynamic tree of at most ``size`` step tokens, over all splits into candidates
        and probes.

        Each state has its own split. A state's value is computed over the whole chain instead of
        the thesis' two steps (Prop. 5.6.2), which makes this Howard's policy iteration: tau rises
        from round to round until no state has a better split.
        """
        worth = np.array([one.values[:size][-1] for one in self.candidates])
        states: tuple[TreeState, ...] = ()
        for _ in range(ROUNDS):
            before = states
            states = tuple(self._state(k, worth, size) for k in range(self.most + 1))
            if before:
                # Equally good states do not change, or rounds could cycle.
                states = tuple(
                    new if self._value(new, worth) > self._value(old, worth) + 1e-10 else old
                    for old, new in zip(before, states)
                )
            if states == before:
                break
            worth = Chain.of(TreeStates(states), self.accuracies).worth
        return TreeStates(states)

    def static(self, size: int) -> TreeStates:
        """The thesis' full sparse tree of at most ``size`` step tokens: all probes everywhere."""
        nodes = max(size // (self.most * self.per_distance + 1), 1)
        states = [
            TreeState(tree, (self.most,) * len(tree))
            for tree in (one.tree(min(nodes - 1, len(one))) for one in self.candidates)
        ]
        return TreeStates(tuple(states))

    def random(self, size: int, seed: int = 0) -> TreeStates:
        """Trees grown at random, with probes under random nodes, as large as :meth:`best`'s."""
        draw = random.Random(seed)
        states = []
        for depth, state in enumerate(self.best(size).states):
            tree = grown(state.tree.num_candidates, depth, draw)
            places = [node for node in range(len(tree)) for _ in range(self.most)]
            held = draw.sample(places, sum(state.probes))
            states.append(TreeState(tree, tuple(map(held.count, range(len(tree))))))
        return TreeStates(tuple(states))

    def tau(self, states: TreeStates) -> float:
        """R(T) of these trees."""
        return Chain.of(states, self.accuracies).tau

    def _value(self, state: TreeState, worth: Array) -> float:
        """The value of a step with this tree, including later steps."""
        reach, ends = chances_of(state.tree, self.accuracies)
        return float(reach.sum() + ends @ worth[list(state.probes)])

    def _state(self, state: int, worth: Array, size: int) -> TreeState:
        """The best tree for a state among those of every number of candidates, with its probes.

        Starts with all probes under every node of the best candidate trees and keeps the most
        valuable ones (Prop. 5.6.3).
        """
        found, gains = self.candidates[state], _gains(worth)  # (m,)
        values = found.values[:size]  # of trees of 0, 1, ... candidates
        room = (size - 1 - np.arange(len(values))) // self.per_distance
        ends = found.ends[: len(values), : len(values)]  # (trees, nodes)
        each = (ends[:, :, None] * gains).reshape(len(values), -1)  # what each probe is worth
        falling = -np.sort(-each, axis=1)
        summed = np.concatenate([np.zeros((len(values), 1)), falling.cumsum(1)], axis=1)
        values = values + np.take_along_axis(summed, room.clip(max=each.shape[1])[:, None], 1)[:, 0]
        # Of equal ones the smallest, since step tokens cost time.
        chosen = int(np.flatnonzero(values >= values.max() - 1e-12)[0])
        order = np.argsort(-each[chosen], kind="stable")[: room[chosen]]
        order = order[each[chosen][order] > 0]
        held = np.bincount(order // len(gains), minlength=chosen + 1)
        return TreeState(found.tree(chosen), tuple(held.tolist()))


def _gains(worth: Array) -> Array:
    """``(m,)`` what the first, second, ... probe under a node is worth: never more than the one
    before it.

    Where a further probe is worth more than the one before, both count as their mean, so that a
    node's probes are taken in order.
    """
    hull = [0]
    for k in range(1, len(worth)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (worth[b] - worth[a]) * (k - b) > (worth[k] - worth[b]) * (b - a):
                break
            hull.pop()
        hull.append(k)
    return np.maximum(np.diff(np.interp(np.arange(len(worth)), hull, worth[hull])), 0.0)
