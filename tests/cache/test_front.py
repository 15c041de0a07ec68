"""Learned states in front of a row's tokens in the cache: prefixes of probes."""

from collections.abc import Sequence

import pytest
import torch
from naive_cache import SPECS, Pair, Spec, chain, dynamic, pack, random_states
from torch import Tensor

from hf_spec.cache.tree_cache import TreeCache


def learned_front(specs: Sequence[Spec], slots: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    states = random_states(specs, 1, slots, seed)
    return [(keys[0], values[0]) for keys, values in states]


def check_front(cache: TreeCache, views: Sequence[Tensor], front: Sequence[Tensor]) -> None:
    for view, part in zip(views, front, strict=True):
        shown = view[:, :, cache.states.front - part.shape[1] : cache.states.front]
        assert torch.equal(shown, part.expand(len(view), -1, -1, -1))


@pytest.mark.parametrize("specs", SPECS)
def test_front_is_seen_when_asked_for_and_never_moves(specs: str) -> None:
    """Through commits, moves, growth, another front, and rows that leave and come."""
    pair = Pair(SPECS[specs], [3, 3, 3], 4, seed=3)
    cache = pair.cache
    for seed, count in enumerate((5, 20)):
        front = learned_front(pair.specs, count, seed)
        cache.states.set_front(front)
        for _ in range(8):
            states = pair.states(cache.batch_size, 4)
            end = cache.begin(chain(cache, 4), front=True)
            for layer, both in enumerate(states):
                views = cache.update(*both, layer)
                assert views[0].shape[2] == cache.states.front + end
                check_front(cache, views, front[layer])
            rows = cache.batch_size
            cache.commit([2, 1, 1][:rows], torch.tensor([[0, 2], [0, 3], [0, 1]])[:rows])
            pair.accept(states, [[0, 2], [0], [0]][:rows])
        pair.select([1, 0])
        new = Pair(pair.specs, [6], 4, seed)
        with pytest.raises(ValueError, match="rows with front 0 cannot join rows with front"):
            cache.join(new.cache)
        new.cache.states.set_front(front)
        pair.join(new)
    pair.step()  # without being asked for it is not there


def test_each_process_has_its_own_heads_in_front() -> None:
    learned = learned_front([(4, 4, 4)] * 3, 3)
    pair = Pair(SPECS["equal"], [4], 4, seed=0)
    pair.cache.states.set_front(learned, own=lambda states, heads: states[heads:])
    pair.cache.begin(chain(pair.cache, 5), front=True)
    for layer, states in enumerate(pair.states(1, 5)):
        views = pair.cache.update(*states, layer)
        check_front(pair.cache, views, [part[2:] for part in learned[layer]])


def test_front_of_another_model_is_refused() -> None:
    cache = Pair(SPECS["equal"][:1], [3], 4, seed=0).cache
    with pytest.raises(ValueError, match="2 layers of learned states for 1"):
        cache.states.set_front(learned_front([(2, 4, 4)] * 2, 3))
    with pytest.raises(ValueError, match="layer 0.*2 heads of dimension 4"):
        cache.states.set_front(learned_front([(2, 8, 8)], 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_learned_numbers_are_bounded(dtype: torch.dtype) -> None:
    """Products of two of them are finite; those of an ordinary size stay as they are."""
    most = torch.finfo(dtype).max
    given = torch.tensor([[[torch.nan, torch.inf, most, -most, 200.0, -0.1]]], dtype=dtype)
    cache = pack(dynamic([tuple(torch.zeros(2, 1, 1, 1, 6, dtype=dtype))]), None, 4)
    cache.states.set_front([(given, given)])
    found = cache.layers[0].with_front["keys"][0, 0, cache.states.front - 1]
    assert found[:2].tolist() == [0, 0] and found[2] == -found[3] >= 255
    assert torch.equal(found[4:], given[0, 0, 4:])
    assert bool((found * found).isfinite().all())
