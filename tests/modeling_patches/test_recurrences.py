"""Every rule over the nodes of random trees, against one step after the other in float64."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from random_trees import path_to
from torch import Tensor

from hf_spec.modeling_patches import linear_attention
from hf_spec.modeling_patches import linear_attention as rules
from hf_spec.modeling_patches.linear_attention import Kept, Rule, Step

BATCH, NODES, HEADS = 3, 13, 4
#: Float32 against float64, states of order 1 to 100.
CLOSE = {"rtol": 2e-4, "atol": 2e-4}

Inputs = dict[str, Any]


class Case(NamedTuple):
    """A rule with random inputs, and the rule for one token.

    Attributes:
        rule: the rule.
        inputs: its inputs, in their order.
        axes: the axis of tokens in each of those that have one.
        state: ``(batch, ...)`` before the step.
        one: from a state and the inputs of one token of one row to its output and the state after.
        out: the axis of tokens in the rule's outputs.
    """

    rule: Rule
    inputs: Inputs
    axes: dict[str, int]
    state: Tensor
    one: Callable[[Tensor, Inputs], tuple[Tensor, Tensor]]
    out: int

    def run(
        self, step: Step, first: int = 0, earlier: Kept | None = None, end: int | None = None
    ) -> tuple[Tensor, Kept]:
        given = {
            name: value.narrow(self.axes[name], first, (end or NODES) - first)
            if name in self.axes
            else value
            for name, value in self.inputs.items()
        }
        out, kept = self.rule.run(self.state, step, earlier, **given)
        return out.movedim(self.out, 1), kept

    def stepwise(self, trees: list[list[int]]) -> tuple[Tensor, list[list[Tensor]]]:
        """Outputs ``(batch, nodes, ...)``, and the states after each node of each row."""
        outputs, states = [], []
        for row, parents in enumerate(trees):
            after: list[Tensor] = []
            for node, parent in enumerate(parents):
                given = {
                    name: value[row].select(self.axes[name] - 1, node).double()
                    if name in self.axes
                    else value.double() if isinstance(value, Tensor) else value
                    for name, value in self.inputs.items()
                }  # fmt: skip
                before = self.state[row].double() if parent < 0 else after[parent]
                out, new = self.one(before, given)
                outputs.append(out)
                after.append(new)
            states.append(after)
        return torch.stack(outputs).view(len(trees), -1, *outputs[0].shape), states


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def decays(*shape: int) -> Tensor:
    """Log decays: none, some, and everything, in turns."""
    logs = -torch.rand(shape) * 2
    kind = torch.randint(6, shape)
    return logs.masked_fill(kind == 0, 0.0).masked_fill(kind == 1, -torch.inf)


def times(*shape: int) -> Tensor:
    """Time steps: none, some, and such that nothing before them is left."""
    kind = torch.randint(6, shape)
    return torch.rand(shape).masked_fill(kind == 0, 0.0).masked_fill(kind == 1, 300.0)


def conv(activation: str | None) -> Case:
    def one(state: Tensor, given: Inputs) -> tuple[Tensor, Tensor]:
        state = torch.cat([state[:, 1:], given["x"][:, None]], 1)
        out = (state * given["weight"]).sum(-1) + given["bias"]
        return F.silu(out) if activation else out, state

    inputs = {
        "x": normal(BATCH, 6, NODES), "weight": normal(6, 4), "bias": normal(6),
        "activation": activation,
    }  # fmt: skip
    return Case(rules.CONV, inputs, {"x": 2}, normal(BATCH, 6, 4), one, 2)


def delta(normalize: bool, by_channel: bool = False) -> Case:
    """With twice as many value heads as key heads."""

    def one(state: Tensor, given: Inputs) -> tuple[Tensor, Tensor]:
        q, k = (given[name].repeat_interleave(2, 0) for name in ("query", "key"))
        if normalize:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        decay = given["g"].exp()
        state = state * (decay[:, :, None] if by_channel else decay[:, None, None])
        read = torch.einsum("hk,hkv->hv", k, state)
        new = given["beta"][:, None] * (given["value"] - read)
        state = state + torch.einsum("hk,hv->hkv", k, new)
        return torch.einsum("hk,hkv->hv", q * q.shape[-1] ** -0.5, state), state

    size = 5
    g = (HEADS, size) if by_channel else (HEADS,)
    scale = 1.0 if normalize else 0.3
    inputs = {
        "query": normal(BATCH, NODES, 2, size) * scale,
        "key": normal(BATCH, NODES, 2, size) * scale,
        "value": normal(BATCH, NODES, HEADS, 7), "g": decays(BATCH, NODES, *g),
        "beta": torch.rand(BATCH, NODES, HEADS) * 2, "use_qk_l2norm_in_kernel": normalize,
    }  # fmt: skip
    axes = dict.fromkeys(("query", "key", "value", "g", "beta"), 1)
    return Case(rules.DELTA, inputs, axes, normal(BATCH, HEADS, size, 7), one, 1)


def mamba2() -> Case:
    def one(state: Tensor, given: Inputs) -> tuple[Tensor, Tensor]:
        B, C = (given[name].repeat_interleave(2, 0) for name in ("B", "C"))
        d = F.softplus(given["dt"] + given["dt_bias"])
        state = state * (given["A"] * d).exp()[:, None, None]
        state = state + torch.einsum("h,hp,hs->hps", d, given["x"], B)
        return torch.einsum("hps,hs->hp", state, C) + given["D"][:, None] * given["x"], state

    inputs = {
        "x": normal(BATCH, NODES, HEADS, 6), "dt": times(BATCH, NODES, HEADS) - 2,
        "A": -torch.rand(HEADS) * 2, "B": normal(BATCH, NODES, 2, 5),
        "C": normal(BATCH, NODES, 2, 5), "D": normal(HEADS), "dt_bias": normal(HEADS),
        "dt_softplus": True,
    }  # fmt: skip
    axes = dict.fromkeys(("x", "dt", "B", "C"), 1)
    return Case(linear_attention.MAMBA2, inputs, axes, normal(BATCH, HEADS, 6, 5), one, 1)


def mamba1() -> Case:
    def one(state: Tensor, given: Inputs) -> tuple[Tensor, Tensor]:
        d, x = given["dt"], given["x"]
        state = state * (d[:, None] * given["A"]).exp() + (d * x)[:, None] * given["B"]
        return ((state @ given["C"]) + given["D"] * x) * F.silu(given["z"]), state

    inputs = {
        "x": normal(BATCH, 6, NODES), "dt": times(BATCH, 6, NODES), "A": -torch.rand(6, 5) * 2,
        "B": normal(BATCH, 5, NODES), "C": normal(BATCH, 5, NODES), "D": normal(6),
        "z": normal(BATCH, 6, NODES), "delta_bias": None, "delta_softplus": False,
    }  # fmt: skip
    axes = dict.fromkeys(("x", "dt", "B", "C", "z"), 2)
    return Case(linear_attention.MAMBA1, inputs, axes, normal(BATCH, 6, 5), one, 2)


CASES: dict[str, Callable[[], Case]] = {
    "convolution": lambda: conv(None),
    "convolution, activated": lambda: conv("silu"),
    "gated delta": lambda: delta(False),
    "gated delta, normalized": lambda: delta(True),
    "KDA": lambda: delta(True, by_channel=True),
    "Mamba-2": mamba2,
    "Mamba-1": mamba1,
}


def some_trees(seed: int) -> tuple[list[list[int]], Tensor]:
    """Another tree in each row, with chains of probes: their parents, and what each node sees."""
    rng = random.Random(seed)
    trees = []
    for _ in range(BATCH):
        parents = [-1, *(rng.randrange(node) for node in range(1, NODES - 4))]
        for _ in range(2):  # probes
            parents += [rng.randrange(NODES - 4), len(parents)]
        trees.append(parents)
    visible = torch.zeros(BATCH, NODES, NODES, dtype=torch.bool)
    for row, parents in enumerate(trees):
        for node in range(NODES):
            visible[row, node, path_to(parents, node)] = True
    return trees, visible


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(1)
    return CASES[request.param]()


def accepted(trees: list[list[int]], counts: list[int], seed: int) -> Tensor:
    """``(batch, depth)`` a path of this length in each row, any nodes after it."""
    rng = random.Random(seed)
    rows = []
    for parents, count in zip(trees, counts):
        paths = [path_to(parents, node) for node in range(NODES)]
        path = rng.choice([one for one in paths if len(one) >= count])[:count]
        rows.append(path + [rng.randrange(NODES) for _ in range(max(counts) - count)])
    return torch.tensor(rows)


@pytest.mark.parametrize("sequential", [True, False])
def test_all_nodes_at_once(case: Case, sequential: bool) -> None:
    for seed in range(3):
        trees, visible = some_trees(seed)
        expected, _ = case.stepwise(trees)
        found, _ = case.run(Step(visible, sequential))
        assert found.isfinite().all()
        torch.testing.assert_close(found.double(), expected, **CLOSE)


@pytest.mark.parametrize("sequential", [True, False])
def test_in_parts(case: Case, sequential: bool) -> None:
    """As a draft model runs node after node; then all of it is advanced."""
    trees, visible = some_trees(3)
    expected, states = case.stepwise(trees)
    found, kept = [], None
    for first, end in ((0, 1), (1, 2), (2, 7), (7, NODES)):
        step = Step(visible[:, first:end, :end], sequential)
        out, kept = case.run(step, first, kept, end)
        found.append(out)
    torch.testing.assert_close(torch.cat(found, 1).double(), expected, **CLOSE)
    counts = [2, 3, 1]
    check_advance(case, kept, trees, states, counts)


def check_advance(
    case: Case, kept: Kept | None, trees: list[list[int]], states: list[list[Tensor]],
    counts: list[int],
) -> None:  # fmt: skip
    assert kept is not None and set(kept) == set(case.rule.keeps)
    path = accepted(trees, counts, sum(counts))
    found = case.rule.advance(case.state, kept, path, torch.tensor(counts))
    for row, count in enumerate(counts):
        if not count:
            assert torch.equal(found[row], case.state[row])
        else:
            wanted = states[row][int(path[row, count - 1])]
            torch.testing.assert_close(found[row].double(), wanted, **CLOSE)


@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 1, 2], [0, 4, 1], [2, 0, 0]])
def test_advance(case: Case, counts: list[int]) -> None:
    trees, visible = some_trees(4)
    _, states = case.stepwise(trees)
    _, kept = case.run(Step(visible))
    check_advance(case, kept, trees, states, counts)


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_values_of_a_rejected_node_stay_there(
    case: Case, sequential: bool, value: float
) -> None:
    trees, visible = some_trees(5)
    expected, states = case.stepwise(trees)
    leaf = next(node for node in reversed(range(NODES)) if node not in trees[0])
    for name, axis in case.axes.items():
        case.inputs[name][0].select(axis - 1, leaf).fill_(value)
    found, kept = case.run(Step(visible, sequential))
    others = [node for node in range(NODES) if node != leaf]
    torch.testing.assert_close(found[0, others].double(), expected[0, others], **CLOSE)
    torch.testing.assert_close(found[1:].double(), expected[1:], **CLOSE)
    path = torch.tensor([[0, leaf]] * BATCH)  # which is after the accepted end
    end = case.rule.advance(case.state, kept, path, torch.ones(BATCH, dtype=torch.long))
    torch.testing.assert_close(end.double(), torch.stack([row[0] for row in states]), **CLOSE)
