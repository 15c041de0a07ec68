"""``token_recycling``: the table against a dictionary, and what calls leave in it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import check_same, prompt, ragged
from running import CAPTURED, default_dtype, drafting

import hf_spec
from hf_spec.core.shapes import Row
from hf_spec.core.tree import Tree
from hf_spec.decoding.strategy import Strategy
from hf_spec.draft.grow import Children, Frontier
from hf_spec.methods.registry import get_method, methods
from hf_spec.predict.recycling import (
    ORDERS,
    SOURCE,
    TRUSTED,
    WEIGHTS,
    WIDTH,
    Joined,
    Successors,
    SuccessorTable,
    contexts_of,
    largest_prime,
)
from hf_spec.target.hidden_states import NUM_READ, Predicted
from hf_spec.threads import forget, memory

VOCAB = 20


def random_tree(seed: int) -> tuple[Tree, torch.Tensor, torch.Tensor]:
    """Trees of two rows, the tokens before them, and logits at their nodes."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for size in (5, 8):
        parents = [-1, *(int(torch.randint(node, (1,), generator=draw)) for node in range(1, size))]
        tokens = torch.randint(VOCAB, (size,), generator=draw).tolist()
        rows.append(Row(parents, tokens, [0.9**node for node in range(size)]))
    tree = Tree.of_rows(rows, "cpu")
    before = torch.randint(VOCAB + 1, (2, ORDERS - 1), generator=draw)
    return tree, before, torch.randn(2, 8, VOCAB, generator=draw)


def text_at(tree: Tree, before: torch.Tensor, row: int, node: int) -> list[int]:
    """The tokens down to a node, with those before the root."""
    path = []
    while node >= 0:
        path.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return [*before[row].tolist(), *reversed(path)]


def test_contexts_are_the_last_tokens_on_the_path_to_each_node() -> None:
    tree, before, logits = random_tree(0)
    contexts = contexts_of(before, Predicted.of(tree, logits))
    for row, size in enumerate((5, 8)):
        for node in range(size):
            expected = text_at(tree, before, row, node)[-ORDERS:]
            assert contexts[row, node].tolist() == expected


@pytest.mark.parametrize("size", [1, 7, 1000])  # entries of longer contexts: one for all, few, many
@pytest.mark.parametrize("seed", range(4))
def test_what_was_predicted_after_contexts_of_all_lengths_is_averaged(seed: int, size: int) -> None:
    table = SuccessorTable(VOCAB, size, torch.device("cpu"))
    places: dict[tuple[int, int], tuple[tuple[int, ...], torch.Tensor]] = {}
    for step in range(6):
        tree, before, logits = random_tree(10 * seed + step)
        rank = torch.randint(-1, 4, tree.tokens.shape).masked_fill(~tree.valid, -1)
        found = Predicted.of(tree, logits)
        again = Predicted.unpacked(found.packed())
        table.learn(before, Predicted(*(one[:, :8] for one in again)), rank)
        nodes = [(int(rank[row, node]), row, node) for row in (0, 1) for node in range(8)]
        for own, row, node in sorted(nodes):
            if own < 0:
                continue
            text = text_at(tree, before, row, node)
            for order in range(1, ORDERS + 1):
                context = tuple(text[-order:])
                key = sum(token * (VOCAB + 1) ** n for n, token in enumerate(reversed(context)))
                place = order, key if order == 1 else key % largest_prime(size)
                places[place] = context, logits[row, node].log_softmax(-1)
    for first in range(VOCAB):
        for second in range(VOCAB):
            text = torch.tensor([[first, second, (first + second) % VOCAB]])
            known = {}
            for order in range(1, ORDERS + 1):
                context = tuple(text[0, -order:].tolist())
                key = sum(token * (VOCAB + 1) ** n for n, token in enumerate(reversed(context)))
                place = order, key if order == 1 else key % largest_prime(size)
                if place in places and places[place][0] == context:
                    known[order] = places[place][1].topk(NUM_READ)
            tokens, log_probs, trusted = table.find(text)
            chances = torch.zeros(VOCAB)
            weight = sum(WEIGHTS[order - 1] for order in known)
            assert trusted.tolist() == [[weight]]
            for order, best in known.items():
                share = WEIGHTS[order - 1] / weight * TRUSTED[order - 1]
                chances[best.indices] += share * best.values.exp()
            expected = chances.topk(WIDTH)
            # Entries are in float16.
            near = {"atol": 2e-3, "rtol": 4e-3}
            torch.testing.assert_close(log_probs[0].exp(), expected.values, **near)
            found, real = chances[tokens[0]], expected.values > 0
            torch.testing.assert_close(found[real], expected.values[real], **near)


class Fixed:
    """The same children of every node."""

    def __init__(self, children: Children):
        self._children = children

    def expand(self, frontier: Frontier) -> Children:
        return self._children


@pytest.mark.parametrize("alike", [False, True], ids=["per node", "alike"])
def test_children_of_a_drafter_and_of_a_table_are_averaged_where_the_table_knows_any(
    alike: bool,
) -> None:
    table = SuccessorTable(VOCAB, 100, torch.device("cpu"))
    tree, before, logits = random_tree(3)
    found = Predicted.of(tree, logits)
    table.learn(before, found, torch.where(tree.valid, 0, -1))
    tokens = (tree.tokens[:, :3] + torch.tensor([0, 0, 7])) % VOCAB
    zeros = torch.zeros_like(tokens)
    frontier = Frontier(0, tokens, zeros.float(), zeros, zeros)
    draw = torch.Generator().manual_seed(0)
    shape = 2, 1 if alike else 3
    named = torch.rand(*shape, VOCAB, generator=draw).argsort(-1)[..., :6]
    likely = torch.rand(*shape, 6, generator=draw).log_softmax(-1)
    own = Children(named, likely)
    alone = Successors(table, before, None)
    more, weight = alone.weighed(frontier)
    joined = Joined(Fixed(own), Successors(table, before, None)).expand(frontier)
    assert joined is not None and (weight == 0).any() and (weight > 0).any()
    for row in range(2):
        for node in range(3):
            at = row, 0 if alike else node
            share = SOURCE / (SOURCE + float(weight[row, node]))
            expected = torch.zeros(VOCAB).index_add(0, named[at], share * likely[at].exp())
            of_table = (1 - share) * more.log_probs[row, node].exp()
            expected.index_add_(0, more.tokens[row, node], of_table)
            chances = torch.zeros(VOCAB)
            chances.index_add_(0, joined.tokens[row, node], joined.log_probs[row, node].exp())
            torch.testing.assert_close(chances, expected)
            real = joined.tokens[row, node][joined.log_probs[row, node] > -torch.inf]
            assert len(set(real.tolist())) == len(real)


def table_of(model: Any) -> SuccessorTable:
    """What calls have left for a model."""
    (found,) = (one for one in memory(model)["learned"].values() if type(one) is SuccessorTable)
    return found


@pytest.mark.parametrize("how", [{}, CAPTURED], ids=["eager", "recorded"])
def test_each_context_of_an_answer_is_known_to_the_next_call_which_drafts_more(
    fresh: Any, how: dict[str, Any]
) -> None:  # fmt: skip
    model = fresh("llama")
    inputs = ragged()
    spec = drafting("token_recycling", lookup=False)
    first = model.generate(**inputs, max_new_tokens=16, do_sample=False, **spec, **how)
    before = hf_spec.last_stats(model).num_steps
    table = table_of(model)
    for row in first:
        text = row[-16:].tolist()
        for end in range(ORDERS, 8):  # eagerly, nothing is learned from the last step
            keys, places = table.places(torch.tensor(text[end - ORDERS : end]))
            assert table.keys[places].tolist() == keys.tolist()
    check_same(model, spec | how, **inputs, max_new_tokens=16, do_sample=False)
    assert hf_spec.last_stats(model).num_steps < before


def test_rejected_nodes_are_learned_from_too(fresh: Any) -> None:
    model = fresh("llama")
    spec = drafting("token_recycling", lookup=False)
    model.generate(prompt(), max_new_tokens=24, do_sample=False, **spec)
    known = int((table_of(model).keys >= 0).sum()) - 1  # the last entry takes what is left out
    assert known > ORDERS * 24


def test_without_keep_table_each_call_starts_anew(fresh: Any) -> None:
    model = fresh("llama")

    def steps(**options: Any) -> int:
        spec = drafting("token_recycling", lookup=False, **options)
        model.generate(prompt(), max_new_tokens=24, do_sample=False, **spec)
        return int(hf_spec.last_stats(model).num_steps)

    alone = steps(keep_table=False)
    assert steps(keep_table=False) == alone
    assert steps() == alone and steps() < alone
    assert steps(keep_table=False) == alone
    forget(model)
    assert steps() == alone


def test_rows_of_a_batch_teach_each_other(fresh: Any) -> None:
    """One that is ahead in the same text, as siblings of one prompt are in parts of theirs."""
    model = fresh("llama")
    text = model.generate(prompt(12), max_new_tokens=40, do_sample=False)

    def row_steps(*starts: int) -> int:
        ids = torch.zeros(len(starts), max(starts), dtype=torch.long)
        for row, start in enumerate(starts):
            ids[row, -start:] = text[0, :start]
        mask = (torch.arange(max(starts)) >= max(starts) - torch.tensor([starts]).T).long()
        spec = drafting("token_recycling", lookup=False, keep_table=False)
        check_same(model, spec, ids, attention_mask=mask, max_new_tokens=24)
        return int(hf_spec.last_stats(model).num_row_steps)

    assert row_steps(12, 18) < row_steps(12) + row_steps(18) - 2


def test_typical_acceptance_does_not_depend_on_earlier_calls(fresh: Any) -> None:
    model = fresh("llama")
    spec = drafting("token_recycling", acceptance="typical", lookup=False)
    outputs = [
        model.generate(prompt(), max_new_tokens=24, do_sample=False, **spec).tolist()
        for _ in range(3)
    ]
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_table_is_used_in_and_outside_of_inference_mode(fresh: Any) -> None:
    model = fresh("llama")
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            check_same(model, drafting("token_recycling"), prompt(), max_new_tokens=12)


def test_the_default_dtype_does_not_matter(fresh: Any) -> None:
    model = fresh("llama")
    for dtype in (torch.float64, torch.bfloat16):
        with default_dtype(dtype):
            check_same(model, drafting("token_recycling"), prompt(), max_new_tokens=12)


def test_ranks_beyond_the_successors_are_refused(fresh: Any) -> None:
    model = fresh("llama")
    check_same(model, drafting("token_recycling", tree=[[WIDTH - 1]]), prompt(), max_new_tokens=8)
    with pytest.raises(ValueError, match=f"rank {WIDTH}: ranks count from 0, and {WIDTH} succ"):
        model.generate(prompt(), **drafting("token_recycling", tree=[[0], [WIDTH]]))


@pytest.mark.parametrize(
    ("strategy", "options", "joins"),
    [
        ("medusa", {}, False),
        ("medusa", {"recycle": True}, True),
        ("medusa", {"drafting": "always", "recycle": True}, True),
        ("medusa", {"tree": "sparse"}, False),
        ("medusa", {"acceptance": "typical", "recycle": True}, True),
        ("eagle3", {"recycle": True}, True),
        ("token_recycling", {}, False),  # it is what it drafts from
        ("prompt_lookup", {}, False),
    ],
)
def test_where_recycled_candidates_join(
    fresh: Any, strategy: str, options: dict[str, Any], joins: bool
) -> None:
    assert (Strategy.of(*set_up(fresh, strategy, options)).drafter.also is not None) == joins


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("medusa", {"tree": "sparse"}),
        ("layer_skip", {"acceptance": "rejection", "skip_attention": [0], "skip_mlp": []}),
    ],
)
def test_trees_that_do_not_grow_refuse_recycled_candidates(
    fresh: Any, strategy: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="^recycle=True: recycled candidates join trees that grow"):
        Strategy.of(*set_up(fresh, strategy, {**options, "recycle": True}))


def set_up(fresh: Any, strategy: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """A model, with an adapter if the strategy needs one, and a config that names the strategy."""
    model, method = fresh("llama"), methods()[strategy]
    if method.needs_adapter:
        kind: Any = method.adapter_config
        model.add_adapter(kind())
    config = hf_spec.SpecConfig(strategy, options, do_sample=options.get("acceptance") is not None)
    return model, config


def test_the_table_continues_what_is_known_to_follow(fresh: Any) -> None:
    """By the last tokens of the likeliest path; other rows are left as they are."""
    model, method = fresh("llama"), get_method("token_recycling")
    predictor = method.make_drafter(model, method.parse_options({})).predictor
    predictor.table = SuccessorTable(61, 1 << 10, torch.device("cpu"))
    entries = [[-1, -1, 7], [-1, 7, 5]], [[5, 1], [6, 2]], [[-0.1, -9.0], [-0.2, -9.0]]
    contexts, successors, chances = (torch.tensor(one) for one in entries)
    predictor.table.enter(contexts.int(), successors.int(), chances)
    known = [Row([-1, 0, 0], [3, 9, 7], [1.0, 0.3, 0.6]), Row.root(7)]
    state: Any = SimpleNamespace(
        tokens=[[1, 3], [2, 7]], max_depth=9, root=torch.tensor([3, 7]), draft_cost=None,
        active=[True, True],
    )  # fmt: skip
    first, second = predictor.continued(state, known)
    paths = [first.path(node) for node in range(1, len(first.tokens))]
    assert {(7,), (9,), (7, 5), (7, 5, 6)} <= {*map(tuple, paths)}
    assert first.probs[first.children[first.children[0, 7], 5]] < 0.6
    assert second == known[1]
    assert predictor.continued(state, known[1:]) == known[1:]
