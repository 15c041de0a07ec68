"""Products of few tokens: every way gives the same, the fastest is kept, and others are not
concerned."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product as product_of
from typing import Any

import pytest
import torch
from covering import covering
from running import drafting
from torch import Tensor, nn
from torch.nn import functional
from transformers import CompileConfig, DynamicCache
from transformers.pytorch_utils import Conv1D

import hf_spec  # noqa: F401  (registers strategies)
from hf_spec.core.cache import TreeCache
from hf_spec.core.tree import TokenTree
from hf_spec.model.tree_forward import TreeForward
from modeling_patches import narrow_products
from modeling_patches.cache_name import CACHE
from modeling_patches.narrow_products import BLOCK, MARGIN, MOST, product
from modeling_patches.per_call import Changes

WAYS = [narrow_products._stock, narrow_products._transposed, narrow_products._filled]
#: Numbers of tokens around those that matter.
ROWS = [2, 3, BLOCK // 2 + 1, BLOCK - 1, BLOCK, BLOCK + 1, MOST - 1, MOST]


@pytest.fixture(autouse=True)
def races(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """No race has been run, and weights of any size have one."""
    own: dict[Any, Any] = {}
    monkeypatch.setattr(narrow_products, "_RACES", own)
    monkeypatch.setattr(narrow_products, "LEAST", 1)
    return own


@pytest.fixture
def winner(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[int]]:
    """``winner(way)`` decides all races in advance; gives the numbers of tokens that it sees."""

    def decide(way: Any) -> list[int]:
        seen: list[int] = []

        def spy(inputs: Tensor, *others: Any) -> Tensor:
            seen.append(len(inputs))
            return way(inputs, *others)

        class Decided(narrow_products._Race):
            def __init__(self, rows: int) -> None:
                super().__init__(rows)
                self.fastest = spy

        monkeypatch.setattr(narrow_products, "_Race", Decided)
        return seen

    return decide


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[Any, float]], None]:
    """``clock(seconds)`` lets each way take so long."""

    def install(seconds: dict[Any, float]) -> None:
        now = 0.0

        def slow(way: Any) -> Any:
            def run(*args: Any) -> Tensor:
                nonlocal now
                now += seconds[way]
                return way(*args)

            return run

        for way in seconds:
            monkeypatch.setattr(narrow_products, way.__name__, slow(way))
        monkeypatch.setattr(narrow_products, "perf_counter", lambda: now)

    return install


def whole(*shape: int) -> Tensor:
    """Small whole numbers, whose products and sums are exact in float32 in any order."""
    return torch.randint(-8, 9, shape).float()


@torch.no_grad()
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("way", WAYS)
def test_ways_are_equal(way: Any, rows: int) -> None:
    inputs, weight, bias = whole(rows, 24), whole(10, 24), whole(10)
    for given in (None, bias):
        result = way(inputs, weight, given)
        assert torch.equal(result, functional.linear(inputs, weight, given))
        assert result.is_contiguous()
    assert torch.equal(way(inputs, weight.T.contiguous().T, bias), way(inputs, weight, bias))


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_linear_modules(way: Any, winner: Any) -> None:
    seen = winner(way)
    first, last = nn.Linear(12, 20), Conv1D(7, 20)
    for module in (first, last):
        module.weight.copy_(whole(*module.weight.shape))
        module.bias.copy_(whole(*module.bias.shape))
    model, changes = nn.Sequential(first, last), Changes()
    inputs = whole(2, 3, 5, 12)[:, :, 1:3]  # not contiguous
    expected = model(inputs)
    assert not seen
    narrow_products.narrow_products(model, changes)
    assert torch.equal(changes.run(model, inputs), expected)
    assert seen == [12, 12]
    assert torch.equal(model(inputs), expected) and seen == [12, 12]


@torch.no_grad()
@pytest.mark.parametrize(("rows", "best"), [(5, 0), (5, 1), (12, 0), (12, 1), (12, 2)])
def test_fastest_is_kept(rows: int, best: int, clock: Any, races: dict[Any, Any]) -> None:
    clock({way: 1.0 if i == best else 2.0 for i, way in enumerate(WAYS)})
    inputs, weight = whole(rows, 6), whole(4, 6)
    for _ in range(12):
        assert torch.equal(product(inputs, weight), functional.linear(inputs, weight))
    (race,) = races.values()
    seconds = {len(each): each for each in race.seconds.values()}
    assert set(seconds) == {narrow_products.SAMPLES}
    assert list(race.seconds).index(race.fastest) == best


@torch.no_grad()
@pytest.mark.parametrize("margin", [MARGIN - 0.01, MARGIN + 0.01])
@pytest.mark.parametrize(("other", "rows"), [(0, 5), (2, 12)])
def test_near_ties(other: int, rows: int, margin: float, clock: Any, races: dict[Any, Any]) -> None:
    clock({way: 1.0 if i == other else (margin if i == 1 else 9.0) for i, way in enumerate(WAYS)})
    for _ in range(12):
        product(whole(rows, 6), whole(4, 6))
    (race,) = races.values()
    assert list(race.seconds).index(race.fastest) == (1 if margin < MARGIN else other)


@torch.no_grad()
def test_one_race_per_shape(races: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = whole(4, 6)
    product(whole(5, 6), weight)
    product(whole(1, 5, 6), whole(4, 6))
    assert len(races) == 1
    product(whole(6, 6), weight)  # tokens
    product(whole(5, 6), whole(6, 4).T)  # layout
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    product(whole(5, 6), weight)
    assert len(races) == 4


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, MOST + 1, 0])
def test_other_numbers_of_tokens(rows: int, races: dict[Any, Any]) -> None:
    inputs, weight = whole(rows, 6), whole(4, 6)
    assert torch.equal(product(inputs, weight), functional.linear(inputs, weight))
    assert not races


def test_what_is_not_concerned(races: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weight = whole(5, 6), whole(4, 6)
    product(inputs, weight.requires_grad_()).sum().backward()
    assert weight.grad is not None
    weight = weight.detach()
    with torch.no_grad():
        product(inputs.double(), weight.double())
        product(inputs.bfloat16(), weight.bfloat16())
        with pytest.raises(RuntimeError, match="dtype"):
            product(inputs.double(), weight)  # as in the stock product
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "is_initialized", lambda: True)
            product(inputs, weight)
        with monkeypatch.context() as patch:
            patch.setattr(narrow_products, "LEAST", 100)
            product(inputs, weight)
        assert not races
        product(inputs, weight)
        assert len(races) == 1


CALLS = {
    "eager": drafting("prompt_lookup"),
    "compiled": drafting("prompt_lookup")
    | {"cache_implementation": "static", "compile_config": CompileConfig(backend="eager")},
}
SETTINGS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("way", "architecture", "call"), covering(product_of(WAYS, ["llama", "gpt2"], CALLS))
)
def test_generate(way: Any, architecture: str, call: str, shallow: Any, winner: Any) -> None:
    model = shallow(architecture)
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 9, 8, 9, 9, 9, 8]])
    settings = SETTINGS | {"attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **settings)
    seen = winner(way)
    assert model.generate(ids, **settings, **CALLS[call]).tolist() == expected.tolist()
    assert len(set(seen)) > 1
    count = len(seen)
    model.generate(ids, **settings)
    assert len(seen) == count  # plain calls are as they were


def test_captures_run_races_first(fresh: Any, races: dict[Any, Any]) -> None:
    model = fresh("llama", dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    expected = model.generate(ids, **SETTINGS)
    found = model.generate(ids, **SETTINGS, **CALLS["compiled"])
    assert found.tolist() == expected.tolist()
    widest = max(key[2] for key in races)  # padded, so only captures have so many
    assert all(race.fastest is not None for key, race in races.items() if key[2] == widest)


@torch.no_grad()
def test_other_changes_come_first(fresh: Any, winner: Any) -> None:
    model = fresh("llama", dtype=torch.float32)
    past = DynamicCache()
    model(torch.tensor([[5, 6, 7, 8]]), **{CACHE: past}, use_cache=True)
    cache = TreeCache.pack(past, None, 32, "cpu")
    forward = TreeForward(model, cache, torch.tensor([30]))
    module = model.model.layers[1].mlp.down_proj
    changed: list[int] = []
    seen = winner(narrow_products._transposed)

    def other(inputs: Tensor) -> Tensor:
        changed.append(inputs.shape[1])
        return functional.linear(inputs, module.weight)

    changes = Changes()
    changes.instead(module, "forward", other)
    for nodes in (1, 3):
        tokens = torch.arange(5, 5 + nodes)[None]
        forward(tokens, TokenTree.chain(nodes - 1).batch(1, "cpu"), changes=changes)
        cache.rollback()
        assert (set(seen) - {1}) == ({nodes} if nodes > 1 else set())
    assert changed == [1, 3]
