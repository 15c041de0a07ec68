"""How many kernels a step launches besides the model's: each takes the host's time on a GPU.

Counted are operations that compute something, as a dispatch mode sees them on a CPU; views and
allocations are none. The model's forward does not count, and code that is compiled or recorded
counts as one. The goal is 15 of a recorded step; the limits below are what has been reached.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from conftest import prompt
from covering import covering
from replay import RECORDED
from running import as_if, draft_everything, drafting
from test_compiled import CAPTURED, adapt, generate
from torch.utils._python_dispatch import TorchDispatchMode

from hf_spec.core import tree as trees
from hf_spec.core.tree import Tree
from hf_spec.decoding.step import Steps
from hf_spec.draft.policy import Plan, StepPolicy
from hf_spec.target.graphs import Graphs

NEW = 16
#: Operations that launch nothing.
FREE = (
    "empty", "empty_strided", "empty_like", "new_empty", "_unsafe_view", "lift_fresh",
    "promote_types",
)  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts operations by name, unless it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.paused = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        returned = [one.alias_info for one in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in returned)
        name = func._schema.name.removeprefix("aten::")
        if not self.paused and not view and name not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1


def launches(monkeypatch: pytest.MonkeyPatch, model: Any, **kwargs: Any) -> list[Counter[str]]:
    """What each step of a second call launches."""
    mode, found = Launches(), []
    take, forward, call = Steps.take, type(model).forward, Graphs._call

    def taken(steps: Any) -> None:
        mode.counts = Counter()
        with mode:
            take(steps)
        found.append(mode.counts)

    @wraps(forward)
    def paused(*args: Any, **kwargs: Any) -> Any:
        with mode.pause():
            return forward(*args, **kwargs)

    def as_one(*args: Any) -> Any:
        mode.counts["compiled code"] += not mode.paused
        with mode.pause():
            return call(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Steps, "take", taken)
        patch.setattr(Graphs, "_call", as_one)
        patch.setattr(type(model), "forward", paused)
        for seed in (1, 0):  # much is made and checked in a first call, which later ones find
            found.clear()
            torch.manual_seed(0)
            generate(model, prompt(seed=seed), max_new_tokens=NEW, eos_token_id=None, **kwargs)
    return found


WARPED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 20}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampled": WARPED, "processed": {"repetition_penalty": 1.3},
}  # fmt: skip
#: Most launches of the median step, as it is, compiled and recorded, by strategy and settings.
#: Those of space and eagle3 depend on what the policy chooses by times, and have room for it.
MOST = {
    ("prompt_lookup", "greedy"): (14, 16, 3),
    ("prompt_lookup", "sampled"): (43, 36, 6),
    ("medusa", "greedy"): (104, 22, 5),
    ("medusa", "sampled"): (216, 145, 9),
    ("medusa", "processed"): (135, 79, 10),
    ("space", "greedy"): (156, 50, 7),
    ("eagle3", "greedy"): (426, 236, 5),
    ("medusa sparse", "greedy"): (94, 25, 7),
    ("propd online", "greedy"): (138, 24, 5),
    ("token_recycling", "greedy"): (290, 165, 5),
    ("token_recycling", "sampled"): (400, 165, 8),
}


WAYS: list[dict[str, Any]] = [{}, CAPTURED, RECORDED]
CASES = covering(
    [(*case, way) for case in MOST for way in range(3)],
    lambda name, setting, way: [way, (name, setting, way == 2), name == "medusa" and way],
)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("name", "setting", "way"), CASES)
def test_few_launches(
    shallow: Any, monkeypatch: pytest.MonkeyPatch, name: str, setting: str, way: int
) -> None:
    as_if(True, monkeypatch)  # as on a GPU, where reads are not free
    sized = name == "space"  # whose policy also chooses how many probes there are
    if not sized:
        draft_everything(monkeypatch)  # whatever time it takes here
    options = {"max_depth": 3, **({"num_draft_tokens": 6} if sized else {})}
    strategy, *trees = name.split()
    options |= {"tree": trees[0]} if trees else {}
    model = adapt(shallow(layers=2 if strategy == "propd" else 1), strategy)
    kwargs = {**drafting(strategy, **options), **SETTINGS[setting], **WAYS[way]}
    steps = launches(monkeypatch, model, **kwargs)
    typical = sorted(steps, key=Counter.total)[len(steps) // 2]
    assert len(steps) >= 8 and 0 < typical.total() <= MOST[name, setting][way], typical


def transfers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tree, int]]:
    """The trees of each later step, and how many transfers trees take in it; without the steps that
    make code, for which a forward runs as it is, too."""
    found, sent, drafted = [], [], []
    draft, take = Steps._draft, Steps.take

    def noted(steps: Any) -> Any:
        drafted[:] = draft(steps)
        return drafted

    def taken(steps: Any) -> None:
        before = steps.state.target.prepared
        sent.clear()
        take(steps)
        if steps.state.target.prepared == before:
            found.append((drafted[0], len(sent)))

    for name in ("to_device", "all_to_device"):
        transfer = getattr(trees, name)

        def counted(*args: Any, transfer: Any = transfer) -> Any:
            sent.append(args)
            return transfer(*args)

        monkeypatch.setattr(trees, name, counted)
    monkeypatch.setattr(Steps, "_draft", noted)
    monkeypatch.setattr(Steps, "take", taken)
    return found


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("name", "way"), [("space", 0), ("space", 1), ("space", 2), ("bita", 1)])
def test_a_step_transfers_its_trees_once(
    shallow: Any, monkeypatch: pytest.MonkeyPatch, name: str, way: int
) -> None:
    """Grown trees, with lookups and probes, cut by the policy, of rows that may go less deep."""
    as_if(True, monkeypatch)
    draft_everything(monkeypatch)
    monkeypatch.setattr(StepPolicy, "_best", lambda self, likely, *_: Plan(6, probed=2))
    model, inputs = adapt(shallow(), name), prompt(batch=2)
    kwargs = {**drafting(name, max_depth=3, lookup=True), **WAYS[way]}
    found = transfers(monkeypatch)
    for _ in range(2):
        generate(model, inputs, max_new_tokens=NEW, eos_token_id=None, **kwargs)
    assert any(tree.num_tokens > 1 for tree, _ in found)
    assert any(tree.num_probes > 0 for tree, _ in found)
    for tree, sent in found:
        assert sent == (tree.num_nodes > 1), tree.shape
