"""PPD's dynamic sparse tree (``tree="dynamic"``): sections 5.4 and 5.6 of the thesis.

The prompt tokens under the last accepted node predict the next step's draft tokens. Their number is
the sequence's *state*, and each state has its own tree of draft tokens and prompt tokens.
:func:`make_dynamic_tree` makes the trees:

1. :func:`measure_accuracies`: how often the token of each rank is right at each distance;
2. :func:`best_trees`: the best trees of at most n step tokens (Props. 5.6.1 to 5.6.3), and the
   tokens they emit per step in the long run (:func:`chain`, Prop. 5.6.4);
3. :func:`best_size`: the n of the largest throughput on the device (5.6.3), by
   :func:`forward_seconds`.

A node with k prompt tokens leads to state k if it is the last accepted one. The thesis weights a
prompt token by the probability that its node is accepted (Prop. 5.6.3). The right weight is the
probability that the step *ends* there, since prompt tokens under inner nodes of the accepted path
are never read; these probabilities are the chain's transitions.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from itertools import chain as joined
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

from hf_spec.adapters.layer import Adapter
from hf_spec.adapters.loading import require_active
from hf_spec.core.checks import MAX_ROWS, check_count
from hf_spec.core.shapes import TreeState, TreeStates
from hf_spec.core.stats import synchronize
from hf_spec.core.tree import TokenTree
from hf_spec.draft.learned import Array
from hf_spec.draft.options import ADAPTIVE
from hf_spec.methods.registry import get_method
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.predict.table import TablePredictor, check_states

#: Value of the option ``tree``.
DYNAMIC = "dynamic"
#: Number of ranks that are distinguished; tokens of larger rank count as not predicted.
RANKS = 48
#: Share of steps after which the chain restarts in state 0, as every call does, so that the long
#: run is the same from every state.
RESTART = 1e-7
#: Rounds of policy iteration; they end when nothing changes, mostly after two or three.
ROUNDS = 30
#: The smallest tree whose throughput is this close to the best is taken: the rest is timing noise.
TOLERANCE = 0.01
#: Forwards of each size that are timed.
TURNS = 5

RankPath = tuple[int, ...]
#: Token ids of a prompt and of the model's greedy answer.
Text = tuple[Sequence[int], Sequence[int]]


# -- accuracies ----------------------------------------------------------------------------------


@torch.no_grad()
def measure_accuracies(predictor: TablePredictor, texts: Sequence[Text]) -> Array:
    """How often the token of each rank is the right one at each distance: ``(distances, RANKS)``.

    Raises:
        ValueError: the answers are too short.
    """
    distances, count = predictor.depth, 0
    hits = np.zeros((distances, RANKS))
    ids = predictor.token_ids
    ranks = RANKS if ids is None else min(RANKS, len(ids))
    for prompt, answer in texts:
        ids = torch.tensor([[*prompt, *answer]], device=predictor.model.device)
        # All predicted tokens are known at these places.
        first, end = len(prompt) - 1, ids.shape[1] - 1 - distances
        places = torch.arange(first, max(first, end), device=ids.device)
        done = 0
        for logits in predictor.future_logits(ids, places) if len(places) else ():
            best = logits.topk(min(ranks, logits.shape[-1])).indices.to(ids.device)
            at = places[done : done + len(best), None] + 2
            right = ids[0][at + torch.arange(distances, device=ids.device)]
            found = (best == right[..., None]).sum(0)
            hits[:, : found.shape[1]] += found.cpu().numpy()
            done += len(best)
        count += done
    if not count:
        raise ValueError("the model's answers end after a few tokens: give other prompts.")
    return hits / count


# -- draft tokens ----------------------------------------------------------------------------------


def likeliest_paths(accuracies: Array, count: int) -> tuple[list[RankPath], list[float]]:
    """The ``count`` likeliest rank paths, or all of nonzero probability, and their probabilities.

    The first n are the best tree of n draft tokens (Prop. 5.6.1): a path's probability is the
    product of its accuracies and never exceeds its parent's, so the likeliest n form a tree.

    Args:
        accuracies: ``(distances, ranks)``
        count: largest number of paths.
    """
    found: list[tuple[RankPath, float]] = []
    heap: list[tuple[float, RankPath]] = [(-1.0, ())]  # of the root
    while heap and len(found) <= count:
        negative, path = heapq.heappop(heap)
        found.append((path, -negative))
        for rank, chance in enumerate(accuracies[len(path)] if len(path) < len(accuracies) else ()):
            if chance > 0:
                heapq.heappush(heap, (negative * float(chance), (*path, rank)))
    return [path for path, _ in found[1:]], [chance for _, chance in found[1:]]


def reach_and_ends(tree: TokenTree, accuracies: Array) -> tuple[Array, Array]:
    """For each node, the probability that it is accepted, and that it is the last one."""
    reach = np.ones(len(tree))
    for node in range(1, len(tree)):
        chance = accuracies[tree.depths[node] - 1, tree.ranks[node]]
        reach[node] = reach[tree.parents[node]] * chance
    ends = reach.copy()
    np.subtract.at(ends, list(tree.parents[1:]), reach[1:])
    return reach, ends.clip(min=0.0)


# -- the chain of states -------------------------------------------------------------------------


def chain(states: TreeStates, accuracies: Array) -> tuple[Array, Array]:
    """The Markov chain of states that decoding with some trees runs through (Prop. 5.6.4).

    Returns:
        ``(states, states)`` probability of the next state; ``(states,)`` f, tokens that a step
        emits.
    """
    count = len(states.states)
    moves, values = np.zeros((count, count)), np.zeros(count)
    for k, state in enumerate(states.states):
        reach, ends = reach_and_ends(state.tree, accuracies)
        values[k] = reach.sum()
        np.add.at(moves[k], list(state.probes), ends)
    moves *= 1 - RESTART
    moves[:, 0] += 1 - moves.sum(1)
    return moves, values


def long_run(moves: Array, values: Array) -> tuple[float, Array]:
    """The mean of a quantity per step in the long run; and by how much more of it there will be
    from each state on than from state 0, ``(states,)``.

    Args:
        moves: ``(states, states)`` probability of the next state.
        values: ``(states,)`` the quantity; of the tokens that a step emits the mean is R(T).
    """
    # worth = values - mean + moves @ worth, worth[0] = 0; the first column stands for the mean.
    system = np.eye(len(values)) - moves
    system[:, 0] = 1.0
    worth: Array = np.linalg.solve(system, values)
    mean, worth[0] = float(worth[0]), 0.0
    return mean, worth


# -- the best trees ------------------------------------------------------------------------------


def best_trees(accuracies: Array, size: int, num_ept: int = 1) -> TreeStates:
    """The best dynamic tree of at most ``size`` step tokens in every state.

    A state's value is computed over the whole chain instead of the thesis' two steps (Prop. 5.6.2),
    which makes this Howard's policy iteration: tau rises from round to round until no state has a
    better split into draft tokens and prompt tokens.

    Args:
        accuracies: ``(m, ranks)`` for m prompt tokens.
        size: most step tokens: nodes, the root included, and EPTs of prompt tokens.
        num_ept: EPTs per prompt token.
    """
    most = len(accuracies)
    paths = [likeliest_paths(accuracies[:k], size - 1) for k in range(most + 1)]
    worth = np.array([1.0 + sum(chances) for _, chances in paths])

    def value(state: TreeState) -> float:
        reach, ends = reach_and_ends(state.tree, accuracies)
        return float(reach.sum() + ends @ worth[list(state.probes)])

    states = tuple(_best_state(*one, worth, size, num_ept) for one in paths)
    for _ in range(ROUNDS):
        _, worth = long_run(*chain(TreeStates(states), accuracies))
        found = tuple(_best_state(*one, worth, size, num_ept) for one in paths)
        # Equally good trees do not change, or rounds could cycle.
        better = tuple(
            new if value(new) > value(old) + 1e-10 else old for old, new in zip(states, found)
        )
        if better == states:
            break
        states = better
    return TreeStates(states)


def _best_state(
    paths: list[RankPath], chances: list[float], worth: Array, size: int, num_ept: int
) -> TreeState:
    """The best split into draft tokens and the prompt tokens of the largest gains (Prop. 5.6.3)."""
    gains = _gains(worth)
    index = {(): 0, **{path: node for node, path in enumerate(paths, 1)}}
    ends, expected = np.zeros(len(paths) + 1), 1.0
    ends[0] = 1.0
    best, chosen, held = -np.inf, 0, np.zeros(1, dtype=int)
    for count in range(min(size - 1, len(paths)) + 1):
        if count:
            chance = chances[count - 1]
            expected += chance
            ends[count] = chance
            ends[index[paths[count - 1][:-1]]] -= chance
        each = np.outer(ends[: count + 1].clip(min=0.0), gains).ravel()
        order = np.argsort(-each, kind="stable")[: (size - 1 - count) // num_ept]
        order = order[each[order] > 0]
        value = expected + each[order].sum()
        if value > best + 1e-12:  # of equal ones the smallest: step tokens cost time
            best, chosen = value, count
            held = np.bincount(order // len(gains), minlength=count + 1)
    return TreeState(TokenTree.in_order(paths[:chosen]), tuple(held.tolist()))


def _gains(worth: Array) -> Array:
    """``(m,)`` what the first, second, ... prompt token under a node is worth: the slope of the
    concave hull of ``worth``, so that they are taken in order."""
    hull = [0]
    for k in range(1, len(worth)):
        while len(hull) > 1:
            a, b = hull[-2:]
            if (worth[b] - worth[a]) * (k - b) > (worth[k] - worth[b]) * (b - a):
                break
            hull.pop()
        hull.append(k)
    return np.maximum(np.diff(np.interp(np.arange(len(worth)), hull, worth[hull])), 0.0)


# -- the tree of a device ------------------------------------------------------------------------


def best_size(
    accuracies: Array, num_ept: int, seconds: Callable[[int], float], max_size: int
) -> tuple[TreeStates, dict[str, float]]:
    """The dynamic tree of the largest throughput (section 5.6.3), and what is expected of it.

    Args:
        accuracies: ``(m, ranks)`` for m prompt tokens.
        num_ept: EPTs per prompt token.
        seconds: of a step, by its number of step tokens.
        max_size: most step tokens.
    """
    found = {}
    for size in range(1 + num_ept, max(max_size, 1 + num_ept) + 1):
        states = best_trees(accuracies, size, num_ept)
        moves, tokens = chain(states, accuracies)
        each = np.array([seconds(state.num_rows(num_ept)) for state in states.states])
        tau, spent = (long_run(moves, values)[0] for values in (tokens, each))
        found[size] = states, {"size": size, "tau": tau, "speedup": tau * seconds(1) / spent}
    enough = (1 - TOLERANCE) * max(one["speedup"] for _, one in found.values())
    return next(one for one in found.values() if one[1]["speedup"] >= enough)


def forward_seconds(model: Any, tokens: Sequence[int]) -> Callable[[int], float]:
    """Seconds of a forward by its number of tokens, of which these are the most: the fastest of
    `TURNS` forwards, between powers of two on lines."""
    sizes = [*(2**n for n in range((len(tokens) - 1).bit_length())), len(tokens)]
    inputs = [torch.tensor([tokens[:size]], device=model.device) for size in sizes]
    fastest = np.full(len(sizes), np.inf)
    for _ in range(TURNS):
        for place, ids in enumerate(inputs):
            synchronize(ids.device)
            start = time.perf_counter()
            model(input_ids=ids, use_cache=False)
            synchronize(ids.device)
            fastest[place] = min(fastest[place], time.perf_counter() - start)
    fastest = np.maximum.accumulate(fastest)
    return lambda size: float(np.interp(size, sizes, fastest))


@torch.no_grad()
def make_dynamic_tree(
    model: Any, prompts: Sequence[Sequence[int]], max_size: int = 64, max_new_tokens: int = 128
) -> dict[str, float]:
    """Make the dynamic sparse tree of the active PPD adapter, for the device of the model.

    ``tree="dynamic"`` then names it, and saving the adapter saves it, in its config.

    Args:
        prompts: token ids of prompts that training has not seen; the model answers them.
        max_size: most step tokens of the tree: the root, draft tokens and EPTs.
        max_new_tokens: of each answer.

    Returns:
        ``size``, the tree's step tokens; ``tau``, the tokens that a step is expected to emit; and
        ``speedup``, over plain steps, as far as forwards decide it.

    Raises:
        ValueError: the model has no active PPD adapter, or the answers are too short.
    """
    check_count("max_size", max_size, low=2, high=MAX_ROWS)
    check_count("max_new_tokens", max_new_tokens)
    method, model = get_method("ppd"), unwrapped(model)
    predictor: Any = method.make_drafter(model, method.parse_options({})).predictor
    texts: list[Text] = []
    for prompt in prompts:
        ids = torch.tensor([[*prompt]], device=model.device)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
            do_sample=False, assistant_strategy="ppd", assistant_kwargs={"tree": ADAPTIVE},
            return_dict_in_generate=False,
        )  # fmt: skip
        texts.append((ids[0].tolist(), output[0, ids.shape[1] :].tolist()))
    accuracies = measure_accuracies(predictor, texts)
    tokens = list(islice(cycle(joined(*joined(*texts))), max_size))
    states, expected = best_size(
        accuracies, predictor.per_distance, forward_seconds(model, tokens), max_size
    )
    require_active(model, "PPD", "ppd").config.dynamic_tree = [
        {"paths": list(map(list, one.tree.paths)), "probes": list(one.probes)}
        for one in states.states
    ]
    return expected


def states_of(saved: Any) -> TreeStates:
    """A dynamic tree as an adapter's config has it; a ValueError if it is none."""
    try:
        return TreeStates(
            tuple(
                TreeState(TokenTree.in_order(one["paths"]), tuple(one["probes"])) for one in saved
            )
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"dynamic_tree is none ({error}). Leave it out; make_dynamic_tree makes it."
        ) from error


def dynamic_states(model: Any, adapter: Adapter) -> TreeStates:
    """The dynamic tree of a PPD adapter; a ValueError if it has none, or one that does not fit the
    adapter or the model."""
    if (saved := adapter.config.dynamic_tree) is None:
        raise ValueError(
            f"tree={DYNAMIC!r}: the adapter {adapter.name!r} has no dynamic tree. Make it with "
            "hf_spec.methods.ppd.make_dynamic_tree(model, prompts), or name another tree."
        )
    states = states_of(saved)
    check_states(states, "dynamic_tree", model, adapter, adapter.config.num_prompt_tokens)
    return states
