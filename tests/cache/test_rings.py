"""Layers with a window, which keep the last tokens only, against lists of all tokens."""

import copy
import random

import pytest
import torch
from naive_cache import Pair, chain, dynamic, pack, random_states, small_buffers, write

from hf_spec.core.tree import ring_places

SPECS = [(2, 4, 4), (1, 8, 8), (2, 4, 4), (3, 4, 2)]
WINDOWS = {"some": [None, 3, 20, 3], "all": [9] * 4, "one token": [None, 1, None, 1]}
LENGTHS = [[3], [50, 50], [1, 40, 18], [0, 2]]

every_window = pytest.mark.parametrize("windows", WINDOWS)
every_length = pytest.mark.parametrize("lengths", LENGTHS, ids=str)


@pytest.fixture(autouse=True)
def buffers_soon_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings that come round every few steps, and are soon too small for a block."""
    small_buffers(monkeypatch, STEP=1, NODES=1)


@pytest.mark.parametrize("ends", [[0, 1, 5, 6, 7, 23]])
@pytest.mark.parametrize("slots", [1, 6])
def test_the_token_in_each_slot(ends: list[int], slots: int) -> None:
    wanted = []
    for end in ends:
        row = list(range(slots))
        for token in range(end):
            row[token % slots] = token
        wanted.append(row)
    assert ring_places(torch.tensor(ends), slots).tolist() == wanted


@every_window
@every_length
def test_rows_hold_what_their_next_token_sees(windows: str, lengths: list[int]) -> None:
    pair = Pair(SPECS, lengths, 1, seed=len(lengths), windows=WINDOWS[windows])
    for _ in range(30):
        pair.step()
    for layer, window in zip(pair.cache.layers, WINDOWS[windows]):
        most = pair.cache.capacity if window is None else window - 1 + 8  # a block's nodes
        assert layer.views["keys"].shape[2] <= most
    assert max(pair.naive.lengths) > 40


@pytest.mark.parametrize("lengths", [[30], [30, 30], [2, 37]], ids=str)
def test_a_block_in_parts_outgrows_a_ring(lengths: list[int]) -> None:
    """What its first nodes wrote moves with the rest."""
    pair, rows = Pair(SPECS, lengths, 1, seed=1, windows=WINDOWS["some"]), len(lengths)
    for size in (1, 9):  # the room is 1 and 2, then 16 and 32
        parts = [pair.forward(size), pair.forward(size * 2, offset=size)]
        pair.cache.commit([3 * size] * rows)
        states = [tuple(torch.cat(both, dim=2) for both in zip(*layer)) for layer in zip(*parts)]
        pair.accept(states, [range(3 * size)] * rows)
    assert pair.cache.states.room == 32


@every_window
def test_rows_leave_and_copies_go_on(windows: str) -> None:
    pair = Pair(SPECS, [2, 57, 1, 33, 6, 4], 1, seed=0, windows=WINDOWS[windows])
    rng = random.Random(0)
    while pair.cache.batch_size > 1:
        rows = rng.sample(range(pair.cache.batch_size), rng.randint(1, pair.cache.batch_size - 1))
        pair.select(rows)
        for _ in range(3):
            pair.step()
        pair.cache = copy.deepcopy(pair.cache)
        pair.check()
    pair.cache.batch_select_indices(torch.tensor([0, 0]))
    pair.naive.map_rows(lambda layer: [list(layer[0]), list(layer[0])])
    for _ in range(10):
        pair.step()


@every_window
@pytest.mark.parametrize("seed", range(4))
def test_rows_come_and_go(windows: str, seed: int) -> None:
    """Rings of few slots join those of many, and many those of few; then rows go on, and leave."""
    rng, sizes = random.Random(seed), WINDOWS[windows]
    pair = Pair(SPECS, [rng.randint(1, 9)], 1, seed, sizes)
    for number in range(12):
        for _ in range(rng.randint(0, 3)):
            pair.step()
        new = Pair(SPECS, rng.choice(LENGTHS), rng.choice([1, 40]), 100 + number, sizes)
        for _ in range(rng.randint(0, 3)):
            new.step()
        for length in (1, 20):
            alone = [one.cache.reachable([length] * one.cache.batch_size) for one in (pair, new)]
            both = copy.deepcopy(pair.cache)
            both.join(copy.deepcopy(new.cache))
            assert both.reachable([length] * both.batch_size) == sum(alone, [])
        pair.join(new)
        assert new.cache.states.is_empty
        kept = rng.randint(1, min(pair.cache.batch_size, 5))
        pair.select(rng.sample(range(pair.cache.batch_size), kept))
        pair.check()
    pair.cache = copy.deepcopy(pair.cache)
    for _ in range(10):
        pair.step()


@every_window
@every_length
def test_rows_are_cut_as_far_as_their_windows_reach(windows: str, lengths: list[int]) -> None:
    sizes = WINDOWS[windows]
    pair = Pair(SPECS, lengths, 1, seed=3, windows=sizes)
    for _ in range(20):
        pair.step(idle=False)
    cut = 0
    for _ in range(10):
        least = list(pair.naive.lengths)
        for row, length in enumerate(pair.naive.lengths):
            while least[row] > 1:
                wanted = [*pair.naive.lengths]
                wanted[row] = least[row] - 1
                if pair.cache.reachable(wanted) != wanted:
                    assert pair.cache.reachable(wanted)[row] == 0
                    break
                least[row] -= 1
            cut = max(cut, length - least[row])
        pair.cache.truncate(least)
        pair.naive.map_rows(lambda rows, least=least: [x[:n] for x, n in zip(rows, least)])
        pair.check()
        with pytest.raises(ValueError, match=r"crop\(-1\): rows of .* A sliding window drops"):
            pair.cache.crop(-1)
        for _ in range(3):
            pair.step(idle=False)
    assert cut
    pair.cache.truncate([0] * len(lengths))
    pair.naive.map_rows(lambda rows: [[] for _ in rows])
    for _ in range(20):
        pair.step()
    pair.cache.reset()
    assert pair.cache.reachable([1] * len(lengths)) == [0] * len(lengths)


@pytest.mark.parametrize("windows", ["some", "all"])  # of one token stock keeps all
def test_outside_blocks_it_is_a_stock_cache(windows: str) -> None:
    """What attention gets, and how masks are made for it."""
    sizes, rows = WINDOWS[windows], 2
    prompt = random_states(SPECS, rows, 4)
    stock, cache = dynamic(prompt, sizes), pack(dynamic(prompt, sizes), None, 1)
    assert cache.is_sliding == stock.is_sliding
    generator = torch.Generator().manual_seed(1)
    for new in (1, 3, 40, 2, 1, 25):
        states = random_states(SPECS, rows, new, generator)
        for layer in range(len(states)):
            assert cache.get_mask_sizes(new, layer) == stock.get_mask_sizes(new, layer)
        for ours, theirs in zip(write(cache, states), write(stock, states)):
            assert all(map(torch.equal, ours, theirs))
        assert cache.get_seq_length() == stock.get_seq_length()
        if new == 2:  # a step in between
            cache.begin(chain(cache, 7))
            write(cache, random_states(SPECS, rows, 7, generator))
            cache.rollback()


def test_a_forward_that_failed_behind_some_layers() -> None:
    """They have lost what the row's next token sees: the row begins anew."""
    prompt = random_states(SPECS, 1, 30)
    for count, length in ((1, 30), (12, 0)):
        cache = pack(dynamic(prompt, WINDOWS["some"]), None, 1)
        cache.states.reserve(40, 2, lambda cache=cache: cache.lengths)  # a room of 2
        write(cache, random_states(SPECS, 1, count)[:2])
        cache.count_appended()
        assert cache.host_lengths == [length]
