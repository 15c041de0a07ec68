"""How well a drafter predicts future tokens, measured on the model's own greedy answers.

The ranks of the right tokens are recorded at every position of an answer. They give the accuracies
that trees are built from, and allow replaying the decoding of these answers with given trees, step
by step, without another forward. This module knows drafters with trees, but not tree search or
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hf_spec.core.tree_states import TreeState, TreeStates
from hf_spec.decoding.prefill import RIDING
from hf_spec.drafting.tree_drafter import TreeDrafter
from hf_spec.tuning.trees.bare_trees import BareTrees
from hf_spec.tuning.trees.sparse_tree import Array, SparseTrees

#: Number of ranks that are distinguished; tokens of larger rank count as not predicted.
RANKS = 48
#: Rank of a token that is not among the likeliest, or that is past the answer's end.
MISS, BEYOND = -1, -2

Ranks = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Replay:
    """The steps of a replayed decoding.

    Attributes:
        tokens: emitted tokens.
        steps: forwards of the model, the prefills included.
        visits: ``(states,)`` steps in each state, without the prefills.
        landed: ``(steps, distances)`` ranks at the start of each step that had predictions and was
            not too close to the answer's end.
    """

    tokens: int
    steps: int
    visits: Array
    landed: Ranks

    @property
    def tau(self) -> float:
        """Emitted tokens per step, as ``SpecStats.mean_accepted_tokens``."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tau_after_prefill(self) -> float:
        """:attr:`tau` without the prefills and the tokens that they emit."""
        prefills = self.steps - int(self.visits.sum())
        return (self.tokens - prefills) / max(self.steps - prefills, 1)


@dataclass(frozen=True)
class FutureRanks:
    """Ranks of the right tokens in the predictions, answer by answer.

    Attributes:
        answers: ``(1 + tokens, distances)`` each; ``[i, d - 1]`` is the rank of the token i + d of
            the answer (counted from 0) in the prediction for distance d at the token before token
            i: the prompt's last token for i = 0. Every step after a prompt has candidates.
        per_distance: probes per distance; 0 if predictions take none, so that every step has all
            of them.
    """

    answers: tuple[Ranks, ...]
    per_distance: int = 1

    @property
    def tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(len(answer) - 1 for answer in self.answers)

    def trees(self, accuracies: Array, max_size: int) -> SparseTrees | BareTrees:
        """Builder of trees for these accuracies, of at most ``max_size`` step tokens."""
        if not self.per_distance:
            return BareTrees(accuracies, max_size)
        return SparseTrees(accuracies, max_size, per_distance=self.per_distance)

    @cached_property
    def places(self) -> Ranks:
        """``(places, distances)`` ranks at the positions whose predicted tokens are all known."""
        everything = np.concatenate(self.answers)
        return everything[(everything != BEYOND).all(1)]

    def accuracies(self) -> Array:
        """``(distances, RANKS)`` share of positions at which the token of that rank is right."""
        rows = [np.bincount(column[column >= 0], minlength=RANKS) for column in self.places.T]
        return np.array(rows) / max(len(self.places), 1)

    def landed(self, size: int) -> Ranks:
        """``(places, distances)`` ranks where steps with about ``size`` step tokens begin.

        The trees are the best ones for the plain accuracies.
        """
        return self.replay(self.trees(self.accuracies(), size).best(size)).landed

    def landed_accuracies(self, size: int) -> Array:
        """Accuracies for trees of about ``size`` step tokens: ``(distances, RANKS)``.

        They differ from :meth:`accuracies` in two ways. A step begins where the previous one ended,
        mostly at a token that was hard to predict, and predictions are worse around such tokens.
        And a node at depth d only counts if the path above it is right, where predictions are
        better. So they are measured at the positions where steps begin, if all nearer tokens were
        among the likeliest.
        """
        landed, rows = self.landed(size), []
        for distance in range(landed.shape[1]):
            column = landed[:, distance]
            shares = np.bincount(column[column >= 0], minlength=RANKS) / max(len(column), 1)
            rows.append(shares)
            landed = landed[column >= 0]
        return np.array(rows)

    def replay(self, states: TreeStates) -> Replay:
        """Replay ``generate`` on the answers with these trees, from the ranks alone."""
        children = [_children(state) for state in states.states]
        visits, steps, landed = np.zeros(len(children)), 0, []
        everything = len(children) - 1  # known behind the prompt, and where there are no probes
        for answer in self.answers:
            steps += 1  # the prefill emits the first token
            root, state = 0, everything if (answer[0] != BEYOND).any() else 0
            while root < len(answer) - 2:
                steps += 1
                visits[state] += 1
                node = depth = 0
                if state:
                    landed.append(answer[root])
                    for rank in landed[-1]:
                        below = children[state].get((node, int(rank)))
                        if below is None:
                            break
                        node, depth = below, depth + 1
                root += depth + 1
                state = states.states[state].probes[node] if self.per_distance else everything
        places = np.array(landed, dtype=np.int64).reshape(-1, self.answers[0].shape[1])
        return Replay(self.tokens, steps, visits, places[(places != BEYOND).all(1)])


def _children(state: TreeState) -> dict[tuple[int, int], int]:
    """``(parent, rank)`` -> node."""
    tree = state.tree
    return {(tree.parents[n], tree.ranks[n]): n for n in range(1, len(tree))}


@torch.no_grad()
def measure(drafter: TreeDrafter, prompt: Sequence[int], answer: Sequence[int]) -> Ranks:
    """Ranks of one answer's tokens, ``(1 + tokens, distances)``; see :class:`FutureRanks`.

    If the prompt is too long to be forwarded with probes, its entries are ``BEYOND``.

    Args:
        drafter: computes the predictions.
        prompt, answer: token ids.
    """
    device, distances = drafter.model.device, drafter.distances
    ids = torch.tensor([[*prompt, *answer]], device=device)
    found = np.full((1 + len(answer), distances), BEYOND, dtype=np.int64)
    rides = not drafter.per_distance or len(prompt) <= RIDING
    first, done = len(prompt) - int(rides), 0
    # The last two tokens have nothing to predict.
    places = torch.arange(first, max(ids.shape[1] - 2, first), device=device)
    for logits in drafter.future_logits(ids, places) if len(places) else ():
        best = logits.topk(min(RANKS, logits.shape[-1]), dim=-1).indices
        some = places[done : done + len(logits), None]
        wanted = some + 2 + torch.arange(distances, device=device)
        inside = wanted < ids.shape[1]
        right = ids[0][wanted.clamp(max=ids.shape[1] - 1)]
        hits = best.to(device) == right[..., None]
        ranks = torch.where(hits.any(-1), hits.int().argmax(-1), MISS)
        ranks = torch.where(inside, ranks, BEYOND)
        at = first + done + 1 - len(prompt)
        found[at : at + len(logits)] = ranks.cpu().numpy()
        done += len(logits)
    return found
