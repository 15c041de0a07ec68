"""Rows of different lengths attend by parts on a CPU."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_spec.modeling_patches import attention_masks
from hf_spec.modeling_patches.attention_masks import ALIGNED, CALL, attend, parts_of


def cost(parts: list[tuple[slice, int]]) -> int:
    return sum((rows.stop - rows.start) * width + CALL for rows, width in parts)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_divided_at_the_least_cost(seed: int) -> None:
    """Beside all ways to divide neighbors."""
    choose = random.Random(seed)
    count, most = choose.randint(1, 7), 64 * ALIGNED
    widths = [choose.choice((1, 40, 300, most)) for _ in range(count)]
    parts = parts_of(widths, most)
    assert [row for rows, _ in parts for row in range(count)[rows]] == list(range(count))
    aligned = [-(-width // ALIGNED) * ALIGNED for width in widths]
    for rows, width in parts:
        assert max(aligned[rows]) <= width <= most
    ways = []
    for cuts in itertools.product((False, True), repeat=count - 1):
        ends = [0, *(at + 1 for at, cut in enumerate(cuts) if cut), count]
        slices = [slice(first, end) for first, end in itertools.pairwise(ends)]
        ways.append(cost([(one, max(aligned[one])) for one in slices]))
    if len(parts) > 1:
        assert cost(parts) == min(ways)
    else:  # the views of all rows end where the cache's do
        assert count * max(aligned) + CALL <= min(ways) + CALL


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("queries", [1, 4])
def test_they_attend_as_they_do_together(
    groups: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short rows read no more keys than theirs."""
    torch.manual_seed(groups + queries)
    lengths, heads, dim, most = [30, 900, 33, 28, 20], 2, 8, 912
    query = torch.randn(len(lengths), heads * groups, queries, dim)
    key, value = (torch.randn(len(lengths), heads, most, dim) for _ in range(2))
    seen = torch.arange(most) < torch.tensor(lengths)[:, None, None, None]
    seen = seen & (torch.rand(len(lengths), 1, queries, most) < 0.9)
    seen[..., 0] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    read, stock = [], torch.nn.functional.scaled_dot_product_attention

    def noted(*args: Tensor, **kwargs: Any) -> Tensor:
        read.append(args[1].shape[0] * args[1].shape[2])
        return stock(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    module: Any = SimpleNamespace(num_key_value_groups=groups)
    output, _ = attend(module, query, key, value, mask, divides=True)
    assert sum(read) < sum(lengths) + 5 * ALIGNED
    keys, values = (one.repeat_interleave(groups, 1) for one in (key, value))
    scores = query @ keys.transpose(2, 3) * dim**-0.5 + mask
    expected = (scores.softmax(-1) @ values).transpose(1, 2)
    assert torch.allclose(output, expected, atol=1e-5)
    read.clear()
    attend(module, query, key, value, mask, divides=True)
    assert sum(read) < sum(lengths) + 5 * ALIGNED and attention_masks._parts(mask) is mask._parts
