"""Chooses a drafter's trees for this device, with the size n of the largest tau(n) / L(n).

PPD, section 5.6.3; L is the step time. The result is an entry of ``tree.json``. This module knows
models, drafters and prompts, but not the command line or adapter folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_spec.bench.contenders import Contender, ours
from hf_spec.bench.prompts import Prompt, context_limit, encode_prompts
from hf_spec.bench.session import Session
from hf_spec.core.checks import check_count
from hf_spec.core.tree_states import TreeStates
from hf_spec.drafting.options import TreeOptions
from hf_spec.drafting.tree_drafter import TreeDrafter
from hf_spec.drafting.wrapped_drafter import WrappedDrafter
from hf_spec.methods.registry import Method
from hf_spec.policy.tuned_trees import VERSION, Device
from hf_spec.tuning.trees.bare_trees import BareTrees, counted_paths
from hf_spec.tuning.trees.future_ranks import FutureRanks, Ranks, Replay, measure
from hf_spec.tuning.trees.sparse_tree import Array
from hf_spec.tuning.trees.step_times import StepTimer, StepTimes

#: Sizes whose steps are timed; those between are interpolated.
TIMED = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
#: Step tokens of the trees that determine the positions at which accuracies are measured.
REFERENCE = 32
#: The smallest size whose speedup is this close to the best is taken: the difference is timing
#: noise, and step tokens take memory.
TOLERANCE = 0.01


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        max_new_tokens: limit for each answer.
        max_size: most step tokens: nodes and probes.
        batch_sizes, contexts: step times are measured for each pair. A context is a length in
            tokens, or None for that of the prompts with half their answers.

    Raises:
        ValueError: a field is invalid; the message names it.
    """

    max_new_tokens: int = 128
    max_size: int = 64
    batch_sizes: tuple[int, ...] = (1,)
    contexts: tuple[int | None, ...] = (None,)

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens, low=4)
        check_count("max_size", self.max_size, low=2, high=512)
        for size in self.batch_sizes:
            check_count("batch_size", size)
        for context in self.contexts:
            if context is not None:
                check_count("context", context)


def tunable(method: Method) -> bool:
    """Whether a method's trees of ranked predictions have a shape that can be chosen."""
    return issubclass(method.options, TreeOptions)


def without_shape(method: Method, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a tunable method without those that shape its trees."""
    assert issubclass(method.options, TreeOptions)
    return {name: value for name, value in options.items() if name not in method.options.shape}


class TreeTuner:
    """Measures accuracies and step times of a model's active adapter.

    Args:
        model: a causal language model in evaluation mode, on its device, with the adapter active.
        tokenizer: its tokenizer.
        prompts: prompts held out from training.
        method: the strategy.
        options: its options; those of the tree are ignored.
        settings: what is measured.

    Raises:
        ValueError: the method has no tunable trees, or prompts or contexts do not fit the model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        method: Method,
        options: dict[str, Any],
        settings: Settings,
    ):
        if not tunable(method):
            raise ValueError(f"strategy {method.name!r} has no trees to tune")
        self.model, self.tokenizer, self.method = model, tokenizer, method
        self.settings = settings
        self.options = without_shape(method, options)
        static = method.parse_options(self.options).untimed()
        own = method.parse_options({**self.options, **static})
        drafter = method.drafter(model, own)
        while isinstance(drafter, WrappedDrafter):  # wrappers do not draft
            drafter = drafter.inner
        if not isinstance(drafter, TreeDrafter) or drafter.options is not own:
            raise ValueError(
                f"{method.name} drafts with another strategy here: tune that one's adapter, or "
                "leave the option out"
            )
        self.drafter = drafter
        limit = context_limit(model, tokenizer)
        longest = max((one for one in settings.contexts if one is not None), default=1)
        # The nodes of a deep tree follow the context, and probes follow the deepest of them.
        if limit is not None and longest + 2 * drafter.distances + 1 > limit:
            raise ValueError(
                f"a context of {longest} tokens, with a tree behind it, does not fit the model's "
                f"context of {limit}; lower it"
            )
        if settings.max_size <= drafter.per_distance:
            raise ValueError(
                f"max_size={settings.max_size}: a step that predicts one token has "
                f"{1 + drafter.per_distance} step tokens with this adapter; raise it"
            )
        self.prompts, _ = encode_prompts(model, tokenizer, prompts, settings.max_new_tokens)
        self.answers: list[list[int]] = []

    # -- accuracies --------------------------------------------------------------------------

    def measure(self, done: Callable[[], None] = lambda: None) -> FutureRanks:
        """Answer every prompt greedily, and rank its tokens in the predictions.

        Args:
            done: called after each prompt.

        Raises:
            ValueError: the answers are too short.
        """
        found: list[Ranks] = []
        self.answers = []
        greedy = {"do_sample": False, "max_new_tokens": self.settings.max_new_tokens}
        contender = Contender(self.method.name, ours(self.method.name, self.options))
        with Session.open(self.model, self.tokenizer, greedy, [contender]) as session:
            for prompt in self.prompts:
                _, (answer,), *_ = session.generate(contender, [prompt])
                self.answers.append(answer)
                found.append(measure(self.drafter, prompt, answer))
                done()
        ranks = FutureRanks(tuple(found), self.drafter.per_distance)
        if not len(ranks.places):
            raise ValueError("the model's answers end after a few tokens: give other prompts")
        return ranks

    # -- time --------------------------------------------------------------------------------

    def times(self, built: dict[int, TreeStates], batch_size: int, context: int) -> StepTimes:
        """Step times by size, each measured with the tree of most candidates.

        Args:
            built: trees by size.
            batch_size: batch size.
            context: context length in tokens.
        """
        largest, each = {}, self.drafter.per_distance
        for states in built.values():
            state = max(states.states, key=lambda one: (len(one.tree), one.num_rows(each)))
            if len(state.tree) > 1:
                largest[state.num_rows(each)] = state
        if not largest:
            raise ValueError("none of the adapter's predictions is right: train it first")
        most = max(largest)
        counts = [n for n in largest if n == most or n in TIMED]
        shapes = {n: largest[n] for n in sorted(counts)}
        return StepTimer(self.model, self.drafter, self._text(context), batch_size, shapes).run()

    def context(self, wanted: int | None) -> int:
        """A context length in tokens; for None, the median of a prompt and half its answer."""
        if wanted is not None:
            return wanted
        pairs = zip(self.prompts, self.answers)
        return int(np.median([len(prompt) + len(answer) // 2 for prompt, answer in pairs]))

    def _text(self, length: int) -> list[int]:
        """``length`` tokens of prompts and answers."""
        text = [
            token for pair in zip(self.prompts, self.answers) for part in pair for token in part
        ]
        return (text * (length // len(text) + 1))[:length]


def build(
    ranks: FutureRanks, max_size: int
) -> tuple[list[dict[str, Any]], dict[int, TreeStates], dict[int, Replay], Array]:
    """The best trees of every size from 2 step tokens on, and their tau on the measured answers.

    Without probes, trees of the paths that were right most often are tried, too, and the replay
    decides: the probability of a path is not quite the product of its accuracies, but long paths
    occur at few positions.

    Returns:
        Figures of each size, trees and replays by size, and the accuracies that the trees are built
        from. Of the figures, ``rows`` is the number of step tokens in each state, and ``tau``
        counts the prefills. ``chain_tau`` is R(T) of the chain of states, without prefills (f(T)
        without probes). ``static_tau`` is that of trees with all probes under each node, or without
        probes, of trees that need no measurement; ``random_tau`` is that of random trees.
    """
    reference = min(REFERENCE, max_size)
    accuracies = ranks.landed_accuracies(reference)
    trees = ranks.trees(accuracies, max_size)
    counted = counted_paths(ranks.landed(reference).tolist())
    sizes, built, replays = [], {}, {}
    for size in range(2, max_size + 1):
        states = trees.best(size)
        replay = ranks.replay(states)
        if isinstance(trees, BareTrees):
            other = ranks.replay(trees.of(counted, size))
            if other.tau > replay.tau:
                states, replay = trees.of(counted, size), other
        built[size], replays[size] = states, replay
        sizes.append(
            {
                "size": size,
                "rows": [one.num_rows(ranks.per_distance) for one in states.states],
                "tau": replay.tau,
                "chain_tau": trees.tau(states),
                "static_tau": ranks.replay(trees.static(size)).tau,
                "random_tau": ranks.replay(trees.random(size)).tau,
            }
        )
    return sizes, built, replays, accuracies


def mean_seconds(times: StepTimes, states: TreeStates, replay: Replay, batch_size: int) -> float:
    """Mean seconds of a step over the states of its sequences.

    Each sequence of a batch is in a state of its own, and the largest tree determines the time.
    """
    rows = np.array([one.num_rows(times.per_distance) for one in states.states])
    order = np.argsort(rows, kind="stable")
    below = (replay.visits[order].cumsum() / max(replay.visits.sum(), 1)) ** batch_size
    seconds = [times.seconds(states.states[k]) for k in order]
    return float(np.diff(below, prepend=0.0) @ np.array(seconds))


def choose(speedups: dict[int, float]) -> int:
    """The smallest size whose speedup is within ``TOLERANCE`` of the best."""
    enough = (1 - TOLERANCE) * max(speedups.values())
    return min(size for size, speedup in speedups.items() if speedup >= enough)


def tune(
    tuner: TreeTuner,
    environment: dict[str, Any],
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> dict[str, Any]:
    """Measure, choose trees, and return an entry of ``tree.json``.

    Args:
        tuner: the model and its prompts.
        environment: stored in the entry; see :func:`hf_spec.bench.environment.environment_of`.
        progress: called as ``progress(done, total)``.
    """
    settings = tuner.settings
    pairs = [(size, context) for size in settings.batch_sizes for context in settings.contexts]
    done, total = 0, len(tuner.prompts) + 1 + len(pairs)

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    ranks = tuner.measure(advance)
    sizes, built, replays, accuracies = build(ranks, settings.max_size)
    advance()
    results = []
    for batch_size, wanted in pairs:
        context = tuner.context(wanted)
        times = tuner.times(built, batch_size, context)
        seconds = {n: mean_seconds(times, built[n], replays[n], batch_size) for n in built}
        speedups = {n: replays[n].tau_after_prefill * times.plain / seconds[n] for n in built}
        size = choose(speedups)
        results.append(
            {
                "batch_size": batch_size,
                "context": context,
                "plain_seconds": times.plain,
                "start_seconds": times.start,
                "seconds": {str(rows): spent for rows, spent in sorted(times.by_rows.items())},
                "step_seconds": [seconds[n] for n in built],
                "speedups": [speedups[n] for n in built],
                "size": size,
                "tau": replays[size].tau,
                "speedup": speedups[size],
                "visits": (replays[size].visits / replays[size].visits.sum()).tolist(),
                "states": built[size].to_json(),
            }
        )
        advance()
    device = Device.of(tuner.model)
    entry = {
        "device": device.name, "kind": device.kind, "dtype": device.dtype,
        "threads": device.threads, "strategy": tuner.method.name, "options": tuner.options,
        "environment": environment, "prompts": len(tuner.prompts), "tokens": ranks.tokens,
        "max_new_tokens": settings.max_new_tokens,
        "accuracies": ranks.accuracies().tolist(), "landed_accuracies": accuracies.tolist(),
        "sizes": sizes, "settings": results,
    }  # fmt: skip
    # Five figures are enough.
    rounded: dict[str, Any] = json.loads(
        json.dumps(entry), parse_float=lambda text: float(f"{float(text):.5g}")
    )
    return rounded


def with_entry(data: dict[str, Any] | None, entry: dict[str, Any], weights: str) -> dict[str, Any]:
    """The content of ``tree.json`` with a new entry, which replaces that of the same device.

    Args:
        data: the content of the file; None if there is none.
        entry: from :func:`tune`.
        weights: SHA-256 of the adapter's weights; entries for other weights are dropped.
    """
    kept = []
    if data is not None and (data.get("version"), data.get("weights")) == (VERSION, weights):
        place = [entry[key] for key in ("device", "kind", "dtype", "threads")]
        kept = [
            one for one in data["devices"]
            if [one[key] for key in ("device", "kind", "dtype", "threads")] != place
        ]  # fmt: skip
    return {"version": VERSION, "weights": weights, "devices": [*kept, entry]}
