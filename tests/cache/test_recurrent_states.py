"""Recurrent states of a cache, against those that Transformers computes from the tokens alone."""

import copy
import pickle
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import VOCAB, ragged
from naive_cache import prefilled
from random_trees import path_to
from recurrent_models import shared_recurrent
from torch import Tensor
from transformers import DynamicCache

from hf_spec.cache.recurrent import stock_states
from hf_spec.cache.tree_cache import TreeCache, take_over
from hf_spec.core.shapes import TokenTree
from hf_spec.core.tree import Tree
from hf_spec.modeling_patches.linear_attention import recurrent_rules
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.target.target import Target

#: fp32 with other reduction orders; states are of order 1 to 100.
CLOSE = {"rtol": 2e-4, "atol": 2e-4}
PARENTS = [-1, 0, 0, 1, 2, 3, 3, 5]
KINDS = ("qwen3_5_text", "falcon_h1", "zamba", "lfm3")


class Row:
    """A cache after a prompt of three rows, and the tokens of each row."""

    def __init__(self, kind: str, seed: int = 0):
        self.model = shared_recurrent(kind)
        self.rng = random.Random(seed)
        given = ragged()
        ids, mask = given.values()
        source, rules = prefilled(self.model, **given), recurrent_rules(self.model)
        self.cache = TreeCache(len(source.layers), len(ids), ids.device, rules=rules)
        take_over(self.cache, source, mask.bool())
        self.tokens = [row[real].tolist() for row, real in zip(ids, mask.bool())]

    @torch.no_grad()
    def step(self, counts: Sequence[int], commit: bool = True) -> None:
        """Run a random tree and keep so many tokens of a random path of each row."""
        rows = len(self.tokens)
        target = Target(self.model, self.cache, torch.full((rows,), 10**6))
        ids = torch.tensor(self.rng.choices(range(3, VOCAB), k=rows * len(PARENTS)))
        ids = ids.view(rows, -1)
        target(Tree.of_shapes([TokenTree(tuple(PARENTS))] * rows).with_tokens(ids))
        paths = [path_to(PARENTS, node) for node in range(len(PARENTS))]
        chosen = [
            self.rng.choice([path for path in paths if len(path) >= count])[:count]
            for count in counts
        ]
        padded = [path + [7] * (max(counts) - len(path)) for path in chosen]
        if commit:
            self.cache.commit(counts, torch.tensor(padded) if max(counts) else None)
            for row, path in enumerate(chosen):
                self.tokens[row] += ids[row, path].tolist()

    def truncate(self, lengths: list[int]) -> None:
        self.cache.truncate(lengths)
        self.tokens = [row[:length] for row, length in zip(self.tokens, lengths)]

    def join(self, other: "Row") -> None:
        self.cache.join(other.cache)
        self.tokens += other.tokens

    def select(self, rows: list[int]) -> None:
        self.tokens = [list(self.tokens[row]) for row in rows]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.tokens]

    def check(self, cache: TreeCache | None = None) -> None:
        """The cache holds the states of each row's tokens."""
        cache = cache or self.cache
        assert cache.host_lengths == self.lengths and cache.recurrent is not None
        assert cache.recurrent.snapshot.lengths == self.lengths
        found = dict(cache.recurrent.states())
        for row, tokens in enumerate(self.tokens):
            wanted = self.states(tokens) if tokens else {}
            assert not tokens or wanted.keys() == found.keys()
            for place, state in found.items():
                expected = wanted[place] if tokens else torch.zeros_like(state[row])
                torch.testing.assert_close(state[row], expected, **CLOSE)

    @torch.no_grad()
    def states(self, tokens: list[int]) -> dict[Any, Tensor]:
        alone = DynamicCache(config=self.model.config)
        self.model(torch.tensor([tokens]), **{CACHE: alone})
        return {place: state[0] for place, state in stock_states(alone.layers)}


@pytest.fixture(params=KINDS)
def after(request: pytest.FixtureRequest) -> Row:
    return Row(request.param)


def test_commits(after: Row) -> None:
    """Of different counts in each row, 0 among them; a step that is discarded changes nothing."""
    after.check()
    for counts in ([3, 1, 2], [0, 4, 1], [1, 1, 1], [0, 0, 0], [5, 0, 2]):
        after.step([1, 2, 1], commit=False)
        after.cache.rollback()
        after.step(counts)
        after.check()


def test_the_last_step_can_be_shortened(after: Row) -> None:
    after.step([2, 1, 2])
    start = after.lengths
    after.step([4, 0, 3])
    for cut in ([3, 0, 3], [1, 0, 2]):  # from 4, 0, 3 tokens to these
        other = copy.deepcopy(after)
        other.truncate([length + count for length, count in zip(start, cut)])
        other.check()
        other.step([1, 2, 2])  # a step from there
        other.check()
    after.cache.crop(0)
    after.check()
    with pytest.raises(ValueError, match=r"crop\(-1\): rows of .* a recurrent state holds all"):
        after.cache.crop(-1)  # the second row has none of the last step


def test_back_to_the_end_of_the_prompt(after: Row) -> None:
    assert after.cache.recurrent is not None
    prompts = after.lengths
    after.cache.recurrent.remember()
    for _ in range(2):
        after.step([2, 3, 1])
    lengths = after.lengths
    assert after.cache.reachable([lengths[0], prompts[1] + 1, prompts[2] - 1]) == [
        lengths[0], prompts[1], 0,
    ]  # fmt: skip
    after.cache.truncate([lengths[0], prompts[1] + 1, prompts[2] - 1])
    after.tokens = [after.tokens[0], after.tokens[1][: prompts[1]], []]
    after.check()
    after.step([1, 2, 4])
    after.step([0, 0, 5])
    after.check()
    after.step([1, 0, 3])
    after.step([1, 0, 0])
    # The third row's tokens are not those of the prompt any more.
    assert after.cache.reachable([0, prompts[1], prompts[2]])[2] == 0
    after.cache.reset()
    after.tokens = [[], [], []]
    after.check()


def test_rows(after: Row) -> None:
    assert after.cache.recurrent is not None
    after.cache.recurrent.remember()
    prompts = after.lengths
    after.step([2, 3, 1])
    after.cache.select([2, 1])
    after.select([2, 1])
    after.check()
    after.cache.batch_select_indices(torch.tensor([1, 0, 1]))
    after.select([1, 0, 1])
    after.check()
    after.step([1, 2, 3])
    after.check()
    after.truncate([prompts[1], prompts[2], prompts[1]])
    after.check()


def test_rows_come_and_go(after: Row) -> None:
    kind = after.model.config.model_type
    for seed, kept in enumerate(([0, 4, 2], [5, 1], [3, 0, 1, 2]), 1):
        after.step([2] * len(after.tokens))
        new = Row(kind, seed)
        new.step([3, 0, 1])
        after.join(new)
        after.check()
        after.cache.select(kept)
        after.select(kept)
        after.step([1, 3, 2, 1][: len(kept)])
        after.check()
    new = Row(kind)
    prompts = after.lengths + new.lengths
    for one in (after, new):
        assert one.cache.recurrent is not None
        one.cache.recurrent.remember()
        one.step([2] * len(one.tokens))
    after.join(new)
    after.step([1] * len(after.tokens))
    after.truncate(prompts)
    after.check()


def test_copies(after: Row) -> None:
    after.step([2, 0, 1])
    for again in (copy.deepcopy(after.cache), pickle.loads(pickle.dumps(after.cache))):
        after.check(again)
        one = copy.copy(after)
        one.cache, one.tokens = again, [list(row) for row in after.tokens]
        one.truncate([one.lengths[0] - 1, *one.lengths[1:]])
        one.check()
        one.step([2, 2, 0])
        one.check()
    after.check()


def test_an_interrupted_commit_is_repaired(after: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states were advanced, and the lengths were not."""

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    tokens = [list(row) for row in after.tokens]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TreeCache, "set_lengths", interrupted)
        after.step([2, 1, 3])
    after.cache.repair()
    assert after.tokens == tokens
    after.check()
    after.step([1, 0, 2])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TreeCache, "set_lengths", interrupted)
        after.cache.truncate([after.lengths[0], after.lengths[1], after.lengths[2] - 1])
    after.cache.repair()
    after.tokens[2].pop()
    after.check()


def test_states_that_a_step_did_not_advance(after: Row) -> None:
    assert after.cache.recurrent is not None
    after.cache.begin(Tree.roots(torch.tensor([3, 4, 5])))
    with pytest.raises(RuntimeError, match="has a state that this step did not advance"):
        after.cache.commit([1, 1, 1])


def test_elsewhere_states_are_refused(after: Row) -> None:
    after.cache.select([0])
    with pytest.raises(ValueError, match="only in another such call. Elsewhere start without"):
        after.model(torch.tensor([[3]]), **{CACHE: after.cache})
