"""Trees of ``layer_skip`` under the policy's exit, and that they change no output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from conftest import prompt, ragged
from covering import covering
from layer_skip_state import SKIPS, Setting, chains, draft_by_stock_cache, rows_of
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel

import hf_spec
from hf_spec.core.host_tree import Row
from hf_spec.core.memory import forget
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.drafting.lookup import with_lookup
from hf_spec.methods.layer_skip.drafter import LayerSkipDrafter
from hf_spec.methods.layer_skip.options import AGAIN, DraftExit, LayerSkipOptions
from hf_spec.policy.step_policy import Plan, StepPolicy

Tiny = Callable[..., PreTrainedModel]


@pytest.fixture
def setting(tiny: Tiny):
    with torch.no_grad():
        yield lambda lengths: Setting(
            tiny("llama", dtype=torch.float64), rows_of(tiny("llama"), lengths)
        )


def timed(
    setting: Callable[..., Setting], lengths: list[int], price: float | None = 0.0, **options: Any
) -> tuple[Setting, LayerSkipDrafter]:
    one = setting(lengths)
    forget(one.model)
    one.state.timed, one.state.draft_cost = True, lambda: price
    given = {**SKIPS["layer 0"], "max_draft": 4, **options}
    drafter = LayerSkipDrafter(one.model, LayerSkipOptions(**given))
    drafter.start(one.state)
    return one, drafter


def oracle_tree(one: Setting, row: int, depth: int, trust: Sequence[float]) -> dict[Any, float]:
    """``{tokens down to a node: its chance}``: a chain, and two other tokens beside each."""
    chain, logits = draft_by_stock_cache(one.model, one.rows[row], SKIPS["layer 0"], depth)
    found, path = {}, 1.0
    for k in range(depth):
        said = logits[k].float().softmax(-1)
        for token in said.topk(3).indices.tolist():
            chance = path * min(float(said[token]) * trust[k], 1.0)
            found[(*chain[:k], token)] = chance
        path = found[tuple(chain[: k + 1])]
    return found


def nodes_of(tree: Tree, row: int) -> dict[Any, float]:
    """``{tokens down to a node: its chance}`` of a tree, best first."""
    assert tree.host is not None
    parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.row_sizes[row] + 1):
        paths.append((*paths[parents[node]], tokens[node]))
    assert len(set(paths)) == len(paths)
    return dict(zip(paths[1:], tree.host.probs[row].tolist()[1:]))


def test_steps_in_which_no_draft_pays_look_again_seldom(setting: Callable[..., Setting]) -> None:
    one, drafter = timed(setting, [6], 1.01)
    for _ in range(2 * AGAIN):
        tree = drafter.propose(one.state)
        drafter.observe(one.state, tree, chains(1))
    assert one.state.stats.num_draft_forwards == 2


@pytest.mark.parametrize("factor", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("lengths", [[6], [9, 4, 6]], ids=str)
def test_trees_are_chains_with_the_next_likeliest_tokens(
    setting: Callable[..., Setting], lengths: list[int], factor: float
) -> None:
    one, drafter = timed(setting, lengths)
    drafter.exit.calibration.came[:] = factor * drafter.exit.calibration.promised
    tree = drafter.propose(one.state)
    assert one.state.stats.num_draft_forwards == 4 and tree.q is None
    for row in range(len(lengths)):
        found, wanted = nodes_of(tree, row), oracle_tree(one, row, 4, [factor] * 4)
        assert found == pytest.approx(wanted, rel=1e-4)  # probabilities are float32
        chances = list(found.values())
        assert chances == sorted(chances, reverse=True)
    logits = one.verify(tree)
    for row, tokens in enumerate(one.rows):  # the mask and the positions are those of a tree
        path = next(path for path in nodes_of(tree, row) if len(path) == 3)
        node = list(nodes_of(tree, row)).index(path) + 1
        full = one.model(torch.tensor([[*tokens, *path]])).logits[0, -1]
        torch.testing.assert_close(logits[row, node], full, rtol=0, atol=1e-9)


def test_drafting_ends_where_the_next_forward_is_not_worth_its_price(
    setting: Callable[..., Setting],
) -> None:
    for price in (0.001, 0.01, 0.05, 0.2, 0.6, 1.5):  # less than two rows can bring
        one, drafter = timed(setting, [9, 4], price, max_draft=6)
        drafter.exit.calibration.came *= 0.9
        rate = 0.9
        trees = [oracle_tree(one, row, 6, [0.9] * 6) for row in (0, 1)]
        best = [[max(c for p, c in t.items() if len(p) == k) for k in range(1, 7)] for t in trees]
        worth = [rate * (best[0][k] + best[1][k]) for k in range(5)]
        wanted = 1 + next((k for k in range(5) if not worth[k] > price), 5)
        drafter.propose(one.state)
        assert one.state.stats.num_draft_forwards == wanted


def test_rows_that_are_done_and_budgets_that_end(setting: Callable[..., Setting]) -> None:
    one, drafter = timed(setting, [5, 6])
    one.state.active, one.state.remaining = [False, True], [1, 3]
    tree = drafter.propose(one.state)
    assert tree.row_depths == (0, 2) and tree.row_sizes == (0, 6)
    one.state.remaining = [1, 1]
    tree = drafter.propose(one.state)
    assert tree.num_nodes == 1 and tree.host is not None
    assert tree.host.probs.tolist() == [[1.0], [1.0]]


def test_what_processors_rule_out_is_no_candidate(setting: Callable[..., Setting]) -> None:
    one, drafter = timed(setting, [5])
    allowed = [7, 9]

    def process(logits: Tensor, suffixes: Any, active: Any, drafting: bool) -> Tensor:
        scores = torch.full_like(logits.float(), -torch.inf)
        scores[:, allowed] = logits.float()[:, allowed]
        return scores

    one.state.process = process
    tree = drafter.propose(one.state)
    assert tree.row_sizes == (8,)
    assert {token for path in nodes_of(tree, 0) for token in path} == set(allowed)


def test_calibration_learns_from_chains_and_alternatives(setting: Callable[..., Setting]) -> None:
    one, drafter = timed(setting, [6], max_draft=3)
    tree = drafter.propose(one.state)
    found, calibration = nodes_of(tree, 0), drafter.exit.calibration
    chain = next(path for path in found if len(path) == 3 and path[:2] in found)
    beside = next(path for path in found if len(path) == 2 and path[1] != chain[1])
    came, tries = calibration.came.copy(), calibration.tries.copy()
    promised = calibration.promised.copy()
    path = [0, 1 + list(found).index(beside[:1]), 1 + list(found).index(beside)]
    # The chain's first token, then another one than its second.
    drafter.observe(one.state, tree, HostResult([path], [[*beside, 0]], [0]))
    keep = 1 - 1 / 256
    assert calibration.came == pytest.approx([keep * came[0] + 1, keep * came[1] + 1, came[2]])
    assert calibration.tries == pytest.approx([keep * tries[0] + 1, keep * tries[1] + 1, tries[2]])
    first = sum(chance for path, chance in found.items() if len(path) == 1)
    second = sum(chance for path, chance in found.items() if len(path) == 2) / found[chain[:1]]
    wanted = [keep * promised[0] + first, keep * promised[1] + second, promised[2]]
    assert calibration.promised == pytest.approx(wanted, rel=1e-4)
    gamma = drafter.exit.gamma
    roots = Tree.roots(one.state.root)
    drafter.observe(one.state, roots, chains(1))  # a plain step: nothing was proposed
    assert calibration.tries[0] == keep * tries[0] + 1 and drafter.exit.gamma == gamma


def test_lookups_stand_in_the_same_tree(setting: Callable[..., Setting]) -> None:
    one, inner = timed(setting, [12], -1.0)
    chain = [path for path in nodes_of(inner.propose(one.state), 0) if len(path) == 4]
    row = one.state.tokens[0]
    # What is drafted has followed the root before: one node each, as likely as the surer says.
    one.state.tokens[0] = [*row[:2], row[-1], *chain[0], *row[2:]]
    drafter = with_lookup(inner)
    drafter.start(one.state)
    own, found = nodes_of(inner.propose(one.state), 0), nodes_of(drafter.propose(one.state), 0)
    assert set(own) < set(found)  # look-ups go deeper
    assert chain[0] in found and found[chain[0]] >= own[chain[0]]
    assert inner.policy_chooses


def test_no_forward_is_run_for_what_was_looked_up(setting: Callable[..., Setting]) -> None:
    """It must bring its price beyond the tokens that are candidates already."""
    one, drafter = timed(setting, [6])
    chain = next(path for path in nodes_of(drafter.propose(one.state), 0) if len(path) == 4)
    for sure, wanted in ((0.6, 0), (0.4, 4)):
        one, drafter = timed(setting, [6], 0.5)
        drafter.exit.calibration.promised[:] *= 1e-3  # so that paths are as sure as can be
        one.state.lookups = [Row([-1, 0, 1], [0, *chain[:2]], [1.0, sure, sure])]
        tree = drafter.propose(one.state)
        assert one.state.stats.num_draft_forwards == wanted
        assert tree.max_depth == wanted
    # Where drafts part with what was looked up, that holds nothing.
    one, drafter = timed(setting, [6], 0.5)
    drafter.exit.calibration.promised[:] *= 1e-3
    other = (chain[0] + 1) % 50
    one.state.lookups = [Row([-1, 0, 1], [0, other, chain[1]], [1.0, 0.4, 0.4])]
    drafter.propose(one.state)
    assert one.state.stats.num_draft_forwards == 4


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step drafts as deep as it may, and takes all candidates."""
    monkeypatch.setattr(StepPolicy, "drafts", lambda self, looks_up=False: drafts(self))
    monkeypatch.setattr(StepPolicy, "draft_cost", lambda self: -1.0)
    monkeypatch.setattr(StepPolicy, "_best", lambda self, likely, *_: Plan(likely.shape[1] - 1))

    def drafts(policy: StepPolicy) -> bool:
        policy.lookups_only = False
        return True


COMPILED = {"cache_implementation": "static", "compile_config": CompileConfig(backend="eager")}


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alone": ({}, {}),
    "batch": (ragged((12, 5, 9, 7)), {}),
    "processors": (ragged(), {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}),
    "sampled": ({}, {"do_sample": True, "temperature": 0.8, "top_k": 12}),
    "compiled": (ragged(), COMPILED),
}


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize(
    ("call", "lookup"),
    covering(
        product(CALLS, (False, True)),
        # Code takes its time.
        lambda call, lookup: [call if call == "compiled" else (call, lookup)],
    ),
)
def test_trees_change_nothing(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, call: str, lookup: bool
) -> None:
    """Tokens are those of plain generation, also where an alternative was the right one."""
    inputs, kwargs = CALLS[call]
    model, inputs = tiny("llama"), inputs or {"input_ids": prompt()}
    common: dict[str, Any] = {
        "max_new_tokens": 24,
        "do_sample": False,
        "eos_token_id": None,
        **kwargs,
    }
    settings = {key: value for key, value in common.items() if key not in COMPILED}
    torch.manual_seed(3)
    plain = model.generate(**inputs, **settings)
    right: list[int] = []
    learn = DraftExit.learn

    def note(self: DraftExit, trust: Any, trees: Any, came: Any) -> None:
        for one, tokens in zip(trees, came):
            below = [n for n, parent in enumerate(one.parents) if parent == 0]
            right.extend(rank for rank, n in enumerate(below) if one.tokens[n] == tokens[:1][0])
        learn(self, trust, trees, came)

    monkeypatch.setattr(DraftExit, "learn", note)
    torch.manual_seed(3)
    ours = model.generate(
        **inputs, **common, assistant_strategy="layer_skip",
        assistant_kwargs={"skip_attention": [1], "skip_mlp": [0, 2], "lookup": lookup},
    )  # fmt: skip
    assert torch.equal(ours, plain)
    assert set(right) > {0}  # alternatives, too
    stats = hf_spec.last_stats(model)
    assert stats.num_generated_tokens > stats.num_row_steps
    assert not stats.details.get("compiled", {}).get("refused")
