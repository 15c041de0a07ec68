"""Forwards of trees that are smaller in some rows, without their padding."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ARCHITECTURES, EAGER_ONLY, Tiny, plainly, ragged
from naive_cache import pack, prefilled
from random_trees import random_row
from torch import Tensor

import hf_spec
from hf_spec.core.device import Ragged
from hf_spec.core.tree import Tree
from hf_spec.draft.policy import shares
from hf_spec.target.hidden_states import Reads
from hf_spec.target.target import UNPADS, Output, Target
from hf_spec.threads import memory

LENGTHS = (12, 9, 6)
#: Models whose attention is their own, or eager.
PADDED = EAGER_ONLY | {"falcon", "stablelm"}


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets forwards keep their padding."""
    return lambda: monkeypatch.setattr(Target, "unpads", False)


def target_of(model: Any, reads: Reads) -> Target:
    """A target behind prompts of different lengths."""
    given = ragged(LENGTHS)
    cache = pack(prefilled(model, **given), given["attention_mask"], 99)
    return Target(model, cache, torch.full((3,), 1000), reads=reads)


def outputs(model: Any, trees: list[Tree], reads: Reads) -> list[Output]:
    target, found = target_of(model, reads), []
    for tree in trees:
        found.append(target(tree))
        target.cache.commit([1, 0, 1])  # the next one is behind other tokens
    return found


def whole(output: Output, part: Tensor) -> Tensor:
    """Logits with padding."""
    return part if output.ragged is None else output.ragged.pad(part)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_what_comes_out_is_what_comes_out_with_padding(
    tiny: Tiny, architecture: str, padded: Any
) -> None:
    """Logits, hidden states, and what the cache holds for later steps."""
    model, rng = tiny(architecture), random.Random(3)
    sizes = [(9, 2, 1), (1, 8, 2), (4, 4, 4), (1, 1, 7)]
    trees = [Tree.of_rows([random_row(rng, n, 60) for n in own], "cpu") for own in sizes]
    reads = Reads("last")
    memory(model).pop((UNPADS, True), None)
    found = outputs(model, trees, reads)
    unpads = architecture not in PADDED
    # The first one tells whether it may be done.
    assert [one.ragged is not None for one in found] == [False, unpads, False, unpads]
    padded()
    for tree, one, other in zip(trees, found, outputs(model, trees, reads)):
        assert other.ragged is None and one.hidden is not None and other.hidden is not None
        # Sums of floats in another order; a wrong mask or position gives errors near 1.
        for own, expected in (
            (whole(one, one.logits), other.logits), (one.hidden, other.hidden),
        ):  # fmt: skip
            torch.testing.assert_close(own[tree.valid], expected[tree.valid], rtol=1e-4, atol=1e-4)


class Mixed(torch.nn.Module):
    """A layer in which the tokens of a row see the mean of all."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, states: Tensor) -> Tensor:
        return self.layer(states) + states.mean(1, keepdim=True)


@torch.no_grad()
def test_a_model_whose_tokens_are_not_alone_keeps_the_padding(fresh: Tiny) -> None:
    model: Any = fresh("llama")
    model.model.layers[0].mlp = Mixed(model.model.layers[0].mlp)
    tree = Tree.of_rows([random_row(random.Random(1), n, 60) for n in (9, 1, 1)], "cpu")
    target = target_of(model, Reads())
    assert target.unpads
    assert target(tree).ragged is None and not target.unpads
    target.cache.rollback()
    assert target(tree).ragged is None


@pytest.mark.parametrize("lengths", [[1, 4, 2], [3, 3, 3], [1, 1, 5]])
def test_padding_is_left_out_and_put_back(lengths: list[int]) -> None:
    most = max(lengths)
    made = Ragged.of(lengths, most, torch.device("cpu"))
    batch = torch.arange(3 * most * 2).view(3, most, 2)
    rows = [row[:n] for row, n in zip(batch, lengths)]
    assert torch.equal(made.unpad(batch), torch.cat(rows)[None])
    again = made.pad(made.unpad(batch))
    for row, own, n in zip(again, rows, lengths):
        assert torch.equal(row[:n], own)
    places = torch.tensor([n - 1 for n in lengths])
    assert torch.equal(made.at(made.unpad(batch), places), torch.stack([one[-1] for one in rows]))
    heads = batch[:, None].expand(-1, 4, -1, -1)
    tokens = made.unpad(heads.transpose(1, 2)).transpose(1, 2)
    assert torch.equal(
        made.pad_heads(tokens), made.pad(made.unpad(batch))[:, None].expand_as(heads)
    )


@pytest.mark.parametrize(
    ("lengths", "most", "differs"),
    [([1, 4, 2], 4, True), ([3], 9, True), ([1], 9, False), ([1, 1, 1], 3, False)],
)
def test_a_forward_tells_where_shapes_differ(lengths: list[int], most: int, differs: bool) -> None:
    """A mask of ``most`` queries fits one query, and as many."""
    made = Ragged.of(lengths, most, torch.device("cpu"))
    masks = torch.zeros(len(lengths), 1, most, 8)
    states = made.unpad(torch.zeros(len(lengths), most, 8))
    if differs:
        with pytest.raises(RuntimeError, match="must match"):
            states[:, None] + masks
    else:
        assert (states[:, None] + masks).shape == masks.shape
    assert made.differs == differs


@pytest.mark.parametrize("seed", range(20))
def test_the_likeliest_tokens_of_all_rows_share_the_places(seed: int) -> None:
    """And none is taken without those before it in its row."""
    rng = np.random.default_rng(seed)
    probs = -np.sort(-rng.random((4, 9)).round(1), axis=1)
    probs[:, 0], probs[rng.integers(4), 1:] = 1, 0
    probs[rng.random(probs.shape) < 0.1 * (seed % 3)] = 0  # some cannot be accepted
    real = np.sort(probs[:, 1:][probs[:, 1:] > 0])[::-1]
    for total in range(20):
        counts = shares(probs, total)
        taken = [probs[row, 1 : 1 + n] for row, n in enumerate(counts)]
        assert sum(map(np.sum, taken)) >= real[:total].sum() - 1e-9
        if seed % 3 == 0:
            assert sum(counts) == min(total, len(real))


def test_rows_with_nothing_to_draft_take_no_places(
    tiny: Tiny, sizes_as_shipped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call in which some rows repeat themselves: the output is that of plain generation."""
    model, seen = tiny("llama"), []
    real = Tree.ragged
    monkeypatch.setattr(Tree, "ragged", lambda tree: seen.append(tree.row_sizes) or real(tree))
    ids = torch.randint(3, 60, (4, 24), generator=torch.Generator().manual_seed(0))
    ids[:2] = ids[:2, :4].repeat(1, 6)
    expected = plainly(model, ids, max_new_tokens=24, do_sample=False)
    found = model.generate(
        ids, max_new_tokens=24, do_sample=False, assistant_strategy="prompt_lookup",
        assistant_kwargs={"drafting": "always"},
    )  # fmt: skip
    assert torch.equal(found, expected)
    assert any(max(sizes) > 4 * (1 + min(sizes)) for sizes in seen)
    assert hf_spec.last_stats(model).num_steps > 1
