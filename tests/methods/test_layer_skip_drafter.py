"""``layer_skip``: drafts against a stock cache, layer 0 left out, options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_skip_state import SKIPS, Setting, chains, draft_by_stock_cache, rows_of
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.core.memory import forget
from hf_spec.core.tree import Tree
from hf_spec.methods.layer_skip.drafter import LayerSkipDrafter
from hf_spec.methods.layer_skip.options import LayerSkipOptions

Tiny = Callable[..., PreTrainedModel]


def test_without_layers_to_skip_the_error_says_where_to_get_them(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=r"skip_attention.*load a LAYER_SKIP adapter.*hf-spec se"):
        LayerSkipDrafter(tiny(), LayerSkipOptions())


def test_empty_lists_skip_nothing(tiny: Tiny) -> None:
    model, ids = tiny(), torch.tensor([[5, 6, 7]])
    plain = model(ids).logits
    for options, nothing in (({"skip_attention": []}, True), ({"skip_mlp": [1]}, False)):
        drafting = LayerSkipDrafter(model, LayerSkipOptions(**options)).drafting
        assert torch.equal(drafting.run(model, ids).logits, plain) == nothing


@pytest.fixture
def setting(tiny: Tiny):
    with torch.no_grad():
        yield lambda lengths: Setting(
            tiny("llama", dtype=torch.float64), rows_of(tiny("llama"), lengths)
        )


@pytest.mark.parametrize("skips", SKIPS)
@pytest.mark.parametrize("lengths", [[6], [7, 7], [9, 4, 6]], ids=str)
def test_drafts_are_those_of_the_skipping_model_behind_the_full_models_cache(
    setting: Callable[..., Setting], lengths: list[int], skips: str
) -> None:
    one = setting(lengths)
    options = LayerSkipOptions(**SKIPS[skips], draft_exit="fixed", max_draft=5)
    drafter = LayerSkipDrafter(one.model, options)
    drafter.start(one.state)
    tree = drafter.propose(one.state)
    assert tree.is_chain
    assert tree.row_depths == (5,) * len(lengths)
    assert tree.q is None
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

    options = LayerSkipOptions(**skips, threshold=threshold, draft_exit="threshold", max_draft=6)
    drafter = LayerSkipDrafter(one.model, options)
    drafter.start(one.state)
    tree = drafter.propose(one.state)
    for row, (wanted, _) in enumerate(stock):
        sure = [chance >= threshold for chance in chances[row]]
        length = sure.index(False) + 1 if False in sure else 6
        assert tree.row_depths[row] == length
        assert tree.tokens[row, 1 : length + 1].tolist() == wanted[:length]
    assert one.state.stats.num_draft_forwards == max(tree.row_depths)
    assert tree.tokens.shape == (4, tree.num_nodes)
    if share in (0.2, 0.5):
        assert len(set(tree.row_depths)) > 1


@pytest.mark.parametrize("left", [1, 2, 4])
def test_finished_rows_and_budgets_that_end(setting: Callable[..., Setting], left: int) -> None:
    one = setting([5, 6])
    rows = one.state.sequences
    rows.active, rows.remaining = [False, True], [50, left]
    drafter = LayerSkipDrafter(one.model, LayerSkipOptions(skip_mlp=[1], draft_exit="fixed"))
    drafter.start(one.state)
    assert drafter.propose(one.state).row_depths == (0, left - 1)


def test_sampled_drafts_carry_the_distribution_they_were_drawn_from(
    setting: Callable[..., Setting],
) -> None:
    one = setting([6, 4])
    one.state.do_sample = True
    calls: list[tuple[list[list[int]], Tensor]] = []

    def process(
        logits: Tensor, suffixes: list[list[int]], active: list[bool], drafting: bool
    ) -> Tensor:
        scores = logits.float() / 0.7
        scores[:, : scores.shape[1] // 2] = -torch.inf  # as a warper leaves it
        calls.append(([list(suffix) for suffix in suffixes], scores))
        return scores

    one.state.process = process
    options = LayerSkipOptions(
        **SKIPS["layer 0"], draft_exit="fixed", max_draft=4, acceptance="rejection"
    )
    drafter = LayerSkipDrafter(one.model, options)
    drafter.start(one.state)
    torch.manual_seed(0)
    tree = drafter.propose(one.state)
    assert tree.q is not None
    assert tree.q.shape == (2, 5, one.model.config.vocab_size)
    for node, (suffixes, scores) in enumerate(calls, start=1):
        assert suffixes == tree.tokens[:, 1:node].tolist()  # processors see what was drafted
        assert torch.equal(tree.q[:, node], scores.softmax(-1))
        chosen = tree.q[:, node].gather(1, tree.tokens[:, node : node + 1])
        assert (chosen > 0).all()


@pytest.mark.parametrize(
    ("do_sample", "options", "sampled"),
    [
        (False, {}, False),
        (True, {}, False),
        (True, {"acceptance": "match"}, False),
        (True, {"acceptance": "rejection"}, True),
        (False, {"acceptance": "rejection"}, False),
    ],
)
@pytest.mark.parametrize("timed", [False, True])
def test_when_drafts_are_sampled(
    setting: Callable[..., Setting], do_sample: bool, options: dict[str, Any], sampled: bool,
    timed: bool,
) -> None:  # fmt: skip
    one = setting([4])
    one.state.do_sample, one.state.timed = do_sample, timed
    drafter = LayerSkipDrafter(one.model, LayerSkipOptions(skip_mlp=[1], max_draft=2, **options))
    drafter.start(one.state)
    tree = drafter.propose(one.state)
    assert (tree.q is not None) == sampled
    assert (tree.host is not None) == (timed and not sampled)


def test_a_stage_s_acceptance_is_that_of_all_rows(setting: Callable[..., Setting]) -> None:
    one = setting([4, 5, 6, 7])
    forget(one.model)
    drafter = LayerSkipDrafter(one.model, LayerSkipOptions(skip_mlp=[1], draft_exit="adaptive"))
    drafter._lengths = [4, 4, 4, 0]
    # All accepted, a quarter, a finished row, nothing drafted but something looked up.
    drafter.observe(one.state, Tree.roots(one.state.root), chains(5, 2, 0, 3))
    assert drafter.exit.acceptance == 5 / 8
    assert drafter.details() == {"threshold": 0.601}
    drafter.observe(one.state, Tree.roots(one.state.root), chains(1, 1, 1, 1))  # a plain step
    assert drafter.exit.acceptance == 5 / 8


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
    options = LayerSkipOptions(**skips, draft_exit="threshold", threshold=threshold, max_draft=2)
    drafter = LayerSkipDrafter(one.model, options)
    drafter.start(one.state)
    depths = drafter.propose(one.state).row_depths
    assert depths == tuple(2 if chance >= threshold else 1 for chance in first)
