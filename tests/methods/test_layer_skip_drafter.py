"""``layer_skip``: draft exit by hand, drafts against a stock cache, layer 0 left out, options."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Tiny, prompt
from naive_cache import pack
from running import drafting, running
from step_by_hand import proposed
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hf_spec
from hf_spec.core.shapes import Row
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.decoding.sequences import Snapshot
from hf_spec.draft.predictor import DecodeState
from hf_spec.methods.layer_skip import LayerSkipOptions, LayerSkipPredictor, ThresholdExit
from hf_spec.modeling_patches.forwards import LayerSkipper
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.target.target import Target
from hf_spec.threads import forget

# -- draft exit, eqs. (2)-(4) --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_adaptation_equals_the_equations(seed: int) -> None:
    rng = random.Random(seed)
    gamma, epsilon, beta1, beta2, alpha = (rng.random() for _ in range(5))
    options = LayerSkipOptions(
        threshold=gamma, threshold_step=epsilon, beta1=beta1, beta2=beta2, target_acceptance=alpha
    )
    one, smoothed = ThresholdExit(options), 0.0
    for stage in range(1, 20):
        rate = rng.choice([0.0, 1.0, alpha, rng.random()])
        b = 0.0 if stage == 1 else beta1
        smoothed = b * smoothed + (1 - b) * rate  # (2)
        tilde = gamma + epsilon if smoothed <= alpha else gamma - epsilon  # (3)
        gamma = beta2 * gamma + (1 - beta2) * tilde  # (4)
        gamma = min(max(gamma, 0.0), 1.0)  # decides alike
        one.update(rate)
        assert one.gamma == pytest.approx(gamma, abs=1e-12)


@pytest.mark.parametrize("mode", ["policy", "adaptive", "threshold", "fixed"])
def test_what_each_mode_does(mode: str) -> None:
    given = {} if mode == "fixed" else {"threshold": 0.5}
    one = ThresholdExit(LayerSkipOptions(draft_exit=mode, **given))
    assert [one.go_on(p) for p in (0.4, 0.5, 0.6)] == [mode == "fixed", True, True]
    before = one.gamma
    one.update(0.0)
    assert (one.gamma == before) == (mode in ("threshold", "fixed"))


# -- drafting ------------------------------------------------------------------------------------

#: name -> what is skipped; layer 0 among it, since a stock cache takes its length from there.
SKIPS: dict[str, dict[str, list[int]]] = {
    "nothing": {"skip_attention": [], "skip_mlp": []},
    "attention 0": {"skip_attention": [0], "skip_mlp": []},
    "layer 0": {"skip_attention": [0], "skip_mlp": [0]},
    "middle": {"skip_attention": [1], "skip_mlp": [2]},
    "first two": {"skip_attention": [0, 1], "skip_mlp": [0, 1]},
}


def rows_of(model: PreTrainedModel, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    vocab = model.config.vocab_size
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


class Setting:
    """A decoding state after a prefill of ``rows``, whose last tokens are the roots."""

    def __init__(self, model: PreTrainedModel, rows: list[list[int]]):
        self.model, self.rows = model, rows
        width = max(map(len, rows)) - 1
        ids = torch.tensor([[0] * (width + 1 - len(row)) + row[:-1] for row in rows])
        mask = torch.tensor([[0] * (width + 1 - len(row)) + [1] * (len(row) - 1) for row in rows])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        prefilled = model(ids, attention_mask=mask, position_ids=positions, use_cache=True)
        cache = pack(prefilled[CACHE], mask, width + 16)
        target = Target(model, cache, torch.full((len(rows),), 1000))
        self.now = Snapshot(rows, [True] * len(rows), [50] * len(rows))
        sequences = SimpleNamespace(rows=range(len(rows)), now=self.now)
        self.state = DecodeState(
            model, None, target, cache, sequences,
            root=torch.tensor([row[-1] for row in rows]), do_sample=False,
            process=lambda logits, suffixes, active, drafting: logits.float(),
        )  # fmt: skip

    def started(self, **options: Any) -> hf_spec.Drafter:
        given = LayerSkipOptions(**options)
        drafter = hf_spec.Drafter(self.model, given, LayerSkipPredictor(self.model, given))
        drafter.start(self.state)
        return drafter


def chains(*counts: int) -> HostResult:
    """The result of a step that accepts so many nodes of each row's chain."""
    return HostResult([[*range(n)] for n in counts], [[7] * n for n in counts], [0] * len(counts))


@pytest.fixture
def setting(tiny: Tiny):
    with torch.no_grad():
        yield lambda lengths: Setting(
            tiny("llama", dtype=torch.float64), rows_of(tiny("llama"), lengths)
        )


def logits_behind(
    model: PreTrainedModel, known: Tensor, tokens: Tensor, skips: dict[str, list[int]],
    other: PreTrainedModel | None = None,
) -> Tensor:  # fmt: skip
    """``(new, vocab)`` what the skipping model says of tokens ``(new,)`` behind the full model's
    cache of those before; ``other``: the model with other weights, if it has these then."""
    cache: DynamicCache = model(known[None], use_cache=True)[CACHE]
    before, count, drafts = len(known), len(tokens), other or model
    # A stock cache takes its length from layer 0, which may be skipped.
    hidden = torch.full((count, before + count), -1e300, dtype=torch.float64)
    with running(LayerSkipper(drafts, **skips).changes):
        return drafts(
            tokens[None], **{CACHE: cache}, attention_mask=hidden.triu(before + 1)[None, None],
            position_ids=before + torch.arange(count)[None],
        ).logits[0]  # fmt: skip


def draft_by_stock_cache(
    model: PreTrainedModel, row: list[int], skips: dict[str, list[int]], length: int,
    other: PreTrainedModel | None = None,
) -> tuple[list[int], list[Tensor]]:  # fmt: skip
    """Greedy tokens of the skipping model behind the full model's cache, and their logits."""
    tokens, logits = row[-1:], list[Tensor]()
    for _ in range(length):
        given = torch.tensor(row[:-1]), torch.tensor(tokens)
        logits.append(logits_behind(model, *given, skips, other)[-1])
        tokens.append(int(logits[-1].argmax()))
    return tokens[1:], logits


@pytest.mark.parametrize("skips", SKIPS)
@pytest.mark.parametrize("lengths", [[6], [7, 7], [9, 4, 6]], ids=str)
def test_drafts_are_those_of_the_skipping_model_behind_the_full_models_cache(
    setting: Callable[..., Setting], lengths: list[int], skips: str
) -> None:
    one = setting(lengths)
    drafter = one.started(**SKIPS[skips], draft_exit="fixed", num_draft_tokens=5)
    tree = proposed(drafter, one.state)
    assert tree.is_chain and tree.q is None
    assert tree.row_depths == (5,) * len(lengths)
    assert one.state.stats.num_draft_forwards == 5
    for row, tokens in enumerate(one.rows):
        wanted, _ = draft_by_stock_cache(one.model, tokens, SKIPS[skips], 5)
        assert tree.tokens[row].tolist() == [tokens[-1], *wanted]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_each_row_stops_after_its_first_unsure_token(
    setting: Callable[..., Setting], share: float
) -> None:
    one = setting([9, 4, 6, 12])
    skips = SKIPS["layer 0"]
    stock = [draft_by_stock_cache(one.model, tokens, skips, 6) for tokens in one.rows]
    chances = [[float(step.softmax(-1).max()) for step in logits] for _, logits in stock]
    # Between two of the chances, so that some rows stop early and others do not.
    ordered = [0.0, *sorted(sum(chances, [])), 1.0]
    place = int(share * (len(ordered) - 2))
    threshold = (ordered[place] + ordered[place + 1]) / 2

    drafter = one.started(**skips, threshold=threshold, draft_exit="threshold", num_draft_tokens=6)
    tree = proposed(drafter, one.state)
    for row, (wanted, _) in enumerate(stock):
        sure = [chance >= threshold for chance in chances[row]]
        length = sure.index(False) + 1 if False in sure else 6
        assert tree.row_depths[row] == length
        assert tree.tokens[row, 1 : length + 1].tolist() == wanted[:length]
    assert one.state.stats.num_draft_forwards == max(tree.row_depths)
    if share in (0.2, 0.5):
        assert len(set(tree.row_depths)) > 1


def test_a_stage_s_acceptance_is_that_of_all_rows(setting: Callable[..., Setting]) -> None:
    one = setting([4, 5, 6, 7])
    forget(one.model)
    drafter = one.started(skip_mlp=[1], draft_exit="adaptive")
    drafter.predictor._lengths = [4, 4, 4, 0]
    # All accepted, a quarter, a finished row, nothing drafted but something looked up.
    drafter.observe(one.state, Tree.roots(one.state.root), chains(5, 2, 0, 3))
    assert drafter.predictor.exit.acceptance == 5 / 8
    assert drafter.details() == {"threshold": 0.601}
    drafter.observe(one.state, Tree.roots(one.state.root), chains(1, 1, 1, 1))  # a plain step
    assert drafter.predictor.exit.acceptance == 5 / 8


@pytest.mark.parametrize("temperature", [0.05, 20.0])
def test_exits_look_at_what_the_drafting_model_says_itself(
    setting: Callable[..., Setting], temperature: float
) -> None:
    """Not at the call's distribution, in which a low temperature is sure of everything."""
    one = setting([9, 4, 6, 12])
    skips = SKIPS["layer 0"]
    stock = [draft_by_stock_cache(one.model, tokens, skips, 4)[1] for tokens in one.rows]
    first = [float(logits[0].softmax(-1).max()) for logits in stock]
    threshold = sum(sorted(first)[1:3]) / 2  # two rows are sure of their first tokens
    one.state.process = lambda logits, *_, drafting: logits.float() / temperature
    drafter = one.started(**skips, draft_exit="threshold", threshold=threshold, num_draft_tokens=2)
    depths = proposed(drafter, one.state).row_depths
    assert depths == tuple(2 if chance >= threshold else 1 for chance in first)


# -- the policy's exit: trees --------------------------------------------------------------------


def timed(
    setting: Callable[..., Setting], lengths: list[int], price: float | None = 0.0, **options: Any
) -> tuple[Setting, Any]:
    one = setting(lengths)
    forget(one.model)
    one.state.timed, one.state.draft_cost = True, price
    return one, one.started(**{**SKIPS["layer 0"], "num_draft_tokens": 4, **options})


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


@pytest.mark.parametrize("factor", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("lengths", [[6], [9, 4, 6]], ids=str)
def test_trees_are_chains_with_the_next_likeliest_tokens(
    setting: Callable[..., Setting], lengths: list[int], factor: float
) -> None:
    one, drafter = timed(setting, lengths)
    drafter.predictor.exit.calibration.hits[:] = (
        factor * drafter.predictor.exit.calibration.expected
    )
    tree = proposed(drafter, one.state)
    assert one.state.stats.num_draft_forwards == 4 and tree.q is None
    for row in range(len(lengths)):
        found, wanted = nodes_of(tree, row), oracle_tree(one, row, 4, [factor] * 4)
        assert found == pytest.approx(wanted, rel=1e-4)  # probabilities are float32
        chances = list(found.values())
        assert chances == sorted(chances, reverse=True)
    logits = one.state.target(tree).logits
    for row, tokens in enumerate(one.rows):  # the mask and the positions are those of a tree
        path = next(path for path in nodes_of(tree, row) if len(path) == 3)
        node = list(nodes_of(tree, row)).index(path) + 1
        full = one.model(torch.tensor([[*tokens, *path]])).logits[0, -1]
        torch.testing.assert_close(logits[row, node], full, rtol=0, atol=1e-9)


def test_drafting_ends_where_the_next_forward_is_not_worth_its_price(
    setting: Callable[..., Setting],
) -> None:
    rates = [0.9, 0.8, 0.7, 0.9, 0.6, 0.8]
    for price in (0.001, 0.01, 0.035, 0.2, 0.24, 1.5):  # less than two rows can bring
        one, drafter = timed(setting, [9, 4], price, num_draft_tokens=6)
        drafter.predictor.exit.calibration.hits *= rates
        trees = [oracle_tree(one, row, 6, rates) for row in (0, 1)]
        best = [[max(c for p, c in t.items() if len(p) == k) for k in range(1, 7)] for t in trees]
        worth = [rates[k + 1] * (best[0][k] + best[1][k]) for k in range(5)]
        wanted = 1 + next((k for k in range(5) if not worth[k] > price), 5)
        proposed(drafter, one.state)
        assert one.state.stats.num_draft_forwards == wanted


def test_rows_that_are_done_and_budgets_that_end(setting: Callable[..., Setting]) -> None:
    one, drafter = timed(setting, [5, 6], threshold=0.0)
    rows = one.now
    rows.active[:], rows.remaining[:] = [False, True], [1, 3]
    tree = proposed(drafter, one.state)
    assert tree.row_depths == (0, 2) and tree.row_sizes == (0, 6)
    one.state.timed = False
    assert proposed(drafter, one.state).row_depths == (0, 2)  # of chains
    one.state.timed, rows.remaining[:] = True, [1, 1]
    tree = proposed(drafter, one.state)
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
    tree = proposed(drafter, one.state)
    assert tree.row_sizes == (8,)
    assert {token for path in nodes_of(tree, 0) for token in path} == set(allowed)


def test_no_forward_is_run_for_what_was_looked_up(setting: Callable[..., Setting]) -> None:
    """It must bring its price beyond the tokens that are candidates already."""
    one, drafter = timed(setting, [6])
    chain = next(path for path in nodes_of(proposed(drafter, one.state), 0) if len(path) == 4)
    other = (chain[0] + 1) % 50  # where drafts part with what was looked up, that holds nothing
    for first, sure, wanted in ((chain[0], 0.6, 0), (chain[0], 0.4, 4), (other, 0.4, 4)):
        one, drafter = timed(setting, [6], 0.5)
        drafter.predictor.exit.calibration.expected[:] *= (
            1e-3  # so that paths are as sure as can be
        )
        one.state.looked_up = [Row([-1, 0, 1], [0, first, chain[1]], [1.0, sure, sure])]
        tree = proposed(drafter, one.state)
        assert one.state.stats.num_draft_forwards == tree.max_depth == wanted


# -- gamma between calls -------------------------------------------------------------------------

#: Gamma rises by 0.001 at every stage, whatever is accepted.
RISING = {"skip_mlp": [1], "num_draft_tokens": 3, "target_acceptance": 1.0}


def stages_and_gamma(model: Any, **options: Any) -> tuple[int, float]:
    """Drafting stages of a call, and gamma behind it."""
    spec = drafting("layer_skip", **{**RISING, **options})
    model.generate(prompt(), max_new_tokens=24, do_sample=False, **spec)
    stats = hf_spec.last_stats(model)
    return stats.offered[1], stats.details["threshold"]


def test_a_call_goes_on_where_the_one_before_ended(fresh: Tiny) -> None:
    model = fresh("llama")
    stages, gamma = stages_and_gamma(model)
    assert stages > 5 and gamma == pytest.approx(0.6 + 0.001 * stages)
    assert stages_and_gamma(model) == (stages, pytest.approx(gamma + 0.001 * stages))
    # Others begin anew: another model, other layers, other options.
    assert stages_and_gamma(fresh("llama")) == (stages, gamma)
    for options in ({"skip_mlp": [2]}, {"threshold": 0.7}):
        stages, risen = stages_and_gamma(model, **options)
        assert risen == pytest.approx(options.get("threshold", 0.6) + 0.001 * stages)
    forget(model)
    assert stages_and_gamma(model)[1] == gamma
