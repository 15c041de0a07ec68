"""TreeCache against a cache that is nothing but lists of the accepted tokens' keys and values."""

import copy
import pickle
from typing import Any
from weakref import ref

import pytest
import torch
from naive_cache import (
    SPECS,
    NaiveCache,
    Pair,
    buffers,
    chain,
    dynamic,
    pack,
    random_states,
    row_of,
    small_buffers,
    write,
)  # fmt: skip
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from hf_spec.cache.attention import ALIGNMENT
from hf_spec.cache.tree_cache import TreeCache, check_packable, unpack_into
from hf_spec.core.shapes import TokenTree
from hf_spec.core.tree import Tree


@pytest.fixture(autouse=True)
def buffers_soon_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_buffers(monkeypatch, STEP=ALIGNMENT, NODES=0)


# -- speculative steps ---------------------------------------------------------------------------


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("lengths", [[3], [5, 5], [1, 6, 4], [0, 2]], ids=str)
def test_rows_hold_exactly_their_accepted_tokens(specs: str, lengths: list[int]) -> None:
    pair = Pair(SPECS[specs], lengths, capacity=128, seed=len(lengths))
    before = buffers(pair.cache)
    pair.check()
    for _ in range(12):
        pair.step()
    assert buffers(pair.cache) == before  # nothing was reallocated


@pytest.mark.parametrize("lengths", [[5, 5], [1, 6, 4]], ids=str)
def test_growth_beyond_the_capacity_keeps_everything(lengths: list[int]) -> None:
    pair = Pair(SPECS["layers differ"], lengths, capacity=1, seed=3)
    sizes = [pair.cache.capacity]
    while max(pair.naive.lengths) <= 8 * ALIGNMENT:
        pair.step(idle=False)
        if pair.cache.capacity != sizes[-1]:
            sizes.append(pair.cache.capacity)
    assert sizes[0] == ALIGNMENT
    assert all(large >= 1.25 * small for small, large in zip(sizes, sizes[1:]))  # few sizes
    assert all(large <= 1.25 * small + 2 * ALIGNMENT for small, large in zip(sizes, sizes[1:]))


@pytest.mark.parametrize("lengths", [[5], [5, 5], [2, 7]], ids=str)
def test_a_block_in_parts(lengths: list[int]) -> None:
    """Drafted node by node and overwritten by the verifying forward; or verified in two parts."""
    pair, rows = Pair(SPECS["layers differ"], lengths, capacity=64, seed=1), len(lengths)
    for node in range(4):
        pair.forward(1, offset=node)
    pair.cache.rollback()
    pair.check()
    states = pair.forward(4)
    pair.cache.commit([3] * rows)
    pair.accept(states, [[0, 1, 2]] * rows)
    parts, paths = [pair.forward(2), pair.forward(3, offset=2)], [[0, 2, 4], [0, 1, 3]][:rows]
    pair.cache.commit([3] * rows, torch.tensor(paths))
    states = [tuple(torch.cat(both, dim=2) for both in zip(*layer)) for layer in zip(*parts)]
    pair.accept(states, paths)


@pytest.mark.parametrize("lengths", [[3], [2, 4]], ids=str)
def test_a_block_holds_finite_numbers(lengths: list[int]) -> None:
    """A slot that is not seen has the weight 0, and 0 * NaN would reach who does not see it."""
    pair = Pair(SPECS["equal"], lengths, 16, 0)
    end = pair.cache.begin(chain(pair.cache, 3))
    for layer, states in enumerate(pair.states(len(lengths), 3)):
        wanted = [part.clone() for part in states]
        for given, part in zip(states, wanted):
            given[:, :, -1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
            part[:, :, -1, :3] = 0
        for view, written in zip(pair.cache.update(*states, layer), wanted):
            for row, length in enumerate(lengths):
                assert torch.equal(view[row, :, length : length + 3], written[row])
                assert not view[row, :, length + 3 : end].any()


# -- from a cache of Transformers, and back ------------------------------------------------------

MASKS = {
    "no padding": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
    "left": [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]],
    "middle": [[1, 1, 0, 0, 1, 1], [1, 0, 1, 0, 1, 1]],  # a second turn's padding
    "right": [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]],
    "everywhere": [[0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 1]],
}


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("padding", MASKS)
def test_pack_drops_padding_wherever_it_stands(specs: str, padding: str) -> None:
    """A sliding layer has the last tokens only."""
    mask = torch.tensor(MASKS[padding])
    for window in (None, 2, 4, 6, 7, 50):
        states = random_states(SPECS[specs], 2, 6)
        windows = [None] + [window] * (len(states) - 1)
        cache = pack(source := dynamic(states, windows), mask, 32)
        assert cache.host_lengths == mask.sum(1).tolist()
        for layer, both in enumerate(states):
            held = torch.arange(6) >= 6 - ((windows[layer] or 99) - 1)
            for row in range(2):
                for own, full in zip(row_of(cache, row, layer), both):
                    real = mask[row].bool()
                    assert torch.equal(own[:, held[real]], full[row][:, real & held])
        assert all(layer.keys is None and layer.values is None for layer in source.layers)


def test_a_layer_without_keys_stays_without_and_others_keep_their_dtype() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        states = [tuple(part.to(dtype) for part in random_states([(2, 4, 4)], 1, 3)[0])]
        source = dynamic(states)
        source.layers.append(DynamicLayer())
        cache = pack(source, None, 16)
        assert row_of(cache, 0, 0)[0].dtype == dtype and torch.equal(
            row_of(cache, 0, 0)[0], states[0][0][0]
        )
        with pytest.raises(RuntimeError, match="this layer had no keys when the cache was packed"):
            cache.update(*states[0], 1)


@pytest.mark.parametrize("windows", [(None, None), (None, 4), (3, None), (4, 50)], ids=str)
@pytest.mark.parametrize("accepted", [0, 1, 5])
def test_unpacked_it_is_the_cache_that_plain_generation_leaves(
    windows: tuple[int | None, ...], accepted: int
) -> None:
    specs = [(2, 4, 4), (1, 6, 4)]
    prompt, new = random_states(specs, 2, 6), random_states(specs, 2, 5)
    plain = dynamic(prompt, windows)
    for token in range(accepted):  # plain generation appends token by token
        write(plain, [tuple(s[:, :, token : token + 1] for s in states) for states in new])

    ours = dynamic(prompt, windows)
    layers = list(ours.layers)
    cache = pack(ours, None, 32)
    cache.begin(chain(cache, 5))
    write(cache, new)
    cache.commit([accepted, accepted])
    unpack_into(cache, ours)

    assert list(ours.layers) == layers  # filled in place
    for mine, theirs in zip(ours.layers, plain.layers):
        assert mine.get_seq_length() == theirs.get_seq_length()
        assert mine.get_mask_sizes(1) == theirs.get_mask_sizes(1)
        for own, wanted in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert torch.equal(own, wanted)
    more = random_states(specs, 2, 1)
    for own, wanted in zip(write(ours, more), write(plain, more)):
        assert all(map(torch.equal, own, wanted))


def test_unpacking_fills_no_layer_twice_and_frees_each() -> None:
    """Never are both caches whole; an interrupt may come in between."""
    pair, target = Pair(SPECS["equal"], [5, 5], 64, seed=0), DynamicCache()
    target.layers = [DynamicLayer() for _ in pair.specs]
    views = [ref(layer.views["keys"].untyped_storage()) for layer in pair.cache.layers]

    def interrupted(*args: Any) -> None:
        # Of two buffers for three layers the first is no longer needed.
        assert [view() is None for view in views] == [True, True, False]
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(target.layers[2], "lazy_initialization", interrupted)
        unpack_into(pair.cache, target)
    first = target.layers[0].keys
    target.layers[1].values = None  # as where an interrupt came between the two
    unpack_into(pair.cache, target)
    assert target.layers[0].keys is first and not any(view() for view in views)
    for index, layer in enumerate(target.layers):
        for row in range(2):
            wanted = pair.naive.row(index, row)
            assert torch.equal(layer.keys[row], wanted[0])
            assert layer.values is None or torch.equal(layer.values[row], wanted[1])


# -- use as a stock cache ------------------------------------------------------------------------


def test_outside_blocks_states_are_appended() -> None:
    pair = Pair(SPECS["layers differ"], [5, 5], capacity=1, seed=0)
    cache = pair.cache
    for new in (1, 3, 40):  # more than the buffers hold
        states = pair.states(2, new)
        for layer, both in enumerate(states):
            assert cache.get_mask_sizes(new, layer) == (pair.naive.lengths[0] + new, 0)
            for view, own in zip(cache.update(*both, layer), both):
                assert view.shape[2] == pair.naive.lengths[0] + new  # not aligned
                assert torch.equal(view[:, :, -new:], own)
        pair.naive.accept(states, [range(new)] * 2)
        assert cache.get_seq_length() == pair.naive.lengths[0]
    cache.count_appended()
    cache.rollback()
    pair.check()
    # A forward that failed behind some layers does not count.
    write(cache, pair.states(2, 2)[:2])
    assert cache.get_seq_length() == pair.naive.lengths[0]
    cache.count_appended()
    pair.check()
    pair.step(same_counts=True)
    # What was appended is there when the cache is changed.
    states = pair.states(2, 2)
    write(cache, states)
    cache.batch_select_indices(torch.tensor([1]))
    pair.naive.accept(states, [range(2)] * 2)
    pair.naive.map_rows(lambda rows: [rows[1]])
    pair.check()
    states = pair.states(1, 3)
    write(cache, states)
    cache.crop(-1)
    pair.accept(states, [range(2)])


DIFFERENT = r"rows of different lengths \[2, 4\].*assistant_strategy"
#: As beams and several answers to a prompt bring them to plain generation.
OTHERS = "2 rows, a forward has {}.*batch_repeat_interleave"


@pytest.mark.parametrize(
    ("lengths", "rows", "message"),
    [([2, 4], 2, DIFFERENT), ([3, 3], 1, OTHERS.format(1)), ([3, 3], 4, OTHERS.format(4))],
)
def test_what_a_stock_cache_cannot_do(lengths: list[int], rows: int, message: str) -> None:
    pair = Pair(SPECS["equal"], lengths, capacity=32, seed=0)
    with pytest.raises(ValueError, match=message):
        write(pair.cache, pair.states(rows, 1))
    if message == DIFFERENT:
        with pytest.raises(ValueError, match=message):
            pair.cache.get_mask_sizes(1, 0)
    pair.check()


# -- shortening, emptying, choosing rows ---------------------------------------------------------


@pytest.mark.parametrize("lengths", [[6, 6], [3, 7]], ids=str)
def test_rows_are_shortened_and_emptied(lengths: list[int]) -> None:
    pair = Pair(SPECS["layers differ"], lengths, capacity=64, seed=2)
    before = buffers(pair.cache)
    pair.step(idle=False)
    pair.cache.tokens = [list(range(length)) for length in pair.naive.lengths]
    pair.cache.crop(-2)
    pair.naive.map_rows(lambda rows: [row[:-2] for row in rows])
    pair.check()
    assert pair.cache.tokens == [list(range(length)) for length in pair.naive.lengths]
    shortest = min(pair.naive.lengths)
    with pytest.raises(ValueError, match=r"crop\(1\): give the number .* such as crop\(-1\)"):
        pair.cache.crop(1)
    with pytest.raises(ValueError, match=rf"crop\({-shortest - 1}\): rows of .* can be cut to"):
        pair.cache.crop(-shortest - 1)
    pair.cache.crop(0)
    pair.cache.truncate([2, 99])
    pair.naive.map_rows(lambda rows: [rows[0][:2], rows[1]])
    pair.check()
    pair.step()
    pair.cache.reset()
    pair.naive.map_rows(lambda rows: [[] for _ in rows])
    pair.check()
    for _ in range(4):
        pair.step()
    assert buffers(pair.cache) == before


@pytest.mark.parametrize(
    ("name", "argument", "order"),
    [
        (name, torch.tensor(order), order)
        for name in ("batch_select_indices", "reorder_cache")
        for order in ([0], [2, 0], [1, 1, 0, 2], [2, 2])
    ]
    + [("batch_repeat_interleave", 3, [0, 0, 0, 1, 1, 1, 2, 2, 2])],
    ids=str,
)
def test_rows_can_be_chosen_and_repeated(name: str, argument: Any, order: list[int]) -> None:
    pair = Pair(SPECS["layers differ"], [3, 5, 4], capacity=64, seed=4)
    pair.step(idle=False)
    pair.cache.tokens = tokens = [[row] * length for row, length in enumerate(pair.naive.lengths)]
    getattr(pair.cache, name)(argument)
    assert pair.cache.tokens == [tokens[row] for row in order]
    pair.naive.map_rows(lambda rows: [list(rows[index]) for index in order])
    pair.check()
    for _ in range(4):
        pair.step()


def test_keys_of_an_image_are_refused() -> None:
    """As in layers of cross-attention."""
    cache = dynamic(random_states([(1, 2, 2)] * 2, 1, 3))
    check_packable(cache)
    layer: Any = cache.layers[1]
    layer.keys = layer.keys[:, :, :2]
    with pytest.raises(ValueError, match=r"hold \[2, 3\] keys: some attend to an image"):
        check_packable(cache)


@pytest.mark.parametrize("specs", SPECS)
def test_an_empty_cache_takes_shapes_of_its_first_block(specs: str) -> None:
    """Rows keep their own number of nodes; then it is as if it had been packed."""
    pair = Pair(SPECS[specs], [4, 2], capacity=32, seed=3)
    pair.naive = NaiveCache(pair.specs, 2)
    pair.cache = cache = TreeCache(len(pair.specs), 2, "cpu")
    with pytest.raises(RuntimeError, match="no keys when the cache was packed"):
        cache.update(*pair.states(2, 3)[0], 0)
    states = pair.forward(5)
    cache.commit([5, 3])
    pair.accept(states, [range(5), range(3)])
    for _ in range(20):
        pair.step()


def test_few_arrivals_copy_what_is_there() -> None:
    """Rows have room for others, and those that have left make room."""
    pair, copies = Pair(SPECS["equal"], [3], 64, seed=0), 0
    for arrivals in range(1, 17):
        before = buffers(pair.cache)
        pair.join(Pair(SPECS["equal"], [5], 8, seed=arrivals))
        copies += buffers(pair.cache) != before
    assert pair.cache.batch_size == 17 and copies == 5  # 2, 4, 8, 16 and 32 rows
    pair.select([16, 1, 2])
    before, new = buffers(pair.cache), Pair(SPECS["equal"], [9, 2], 8, seed=0)
    pair.cache.tokens, new.cache.tokens = [[1] * 5] * 3, [[2] * 9, [3] * 2]
    pair.join(new)
    assert buffers(pair.cache) == before
    assert pair.cache.tokens == [[1] * 5] * 3 + [[2] * 9, [3] * 2]
    pair.step()
    pair.join(Pair(SPECS["equal"], [1], 8, seed=0))
    assert pair.cache.tokens is None  # nobody knows those of the last row


@pytest.mark.parametrize("arrives", ["narrow", "wide"])
def test_rows_join_in_the_wider_dtype(arrives: str) -> None:
    specs = SPECS["layers differ"]
    states = random_states(specs, 1, 4)
    half = [tuple(part.bfloat16() for part in layer) for layer in states]
    cache, new = pack(dynamic(half), None, 8), pack(dynamic(states), None, 8)
    if arrives == "narrow":
        cache, new = new, cache
    cache.join(new)
    for layer, both in enumerate(zip(states, half)):
        for row, wanted in enumerate(reversed(both) if arrives == "wide" else both):
            for own, part in zip(row_of(cache, row, layer), wanted):
                assert own.dtype == torch.float32 and torch.equal(own, part[0].float())


def test_rows_of_other_models_are_refused() -> None:
    cache = Pair(SPECS["equal"], [3], 8, seed=0).cache
    for other, why in (
        (Pair(SPECS["layers differ"], [3], 8, seed=0).cache, "rows with kinds .* cannot join"),
        (Pair(SPECS["equal"], [3], 8, 0, [None, 2, None]).cache, "rows with windows {1: 2} cannot"),
    ):
        with pytest.raises(ValueError, match=why):
            cache.join(other)
    other = Pair(SPECS["equal"], [3], 8, seed=0).cache
    other.made_by = "a LlamaForCausalLM with 2 layers of 8 features"
    with pytest.raises(ValueError, match="rows of a LlamaForCausalLM .* cannot join those of None"):
        cache.join(other)
    assert cache.batch_size == 1 and cache.host_lengths == [3]


def test_an_index_follows_its_keys() -> None:
    """In every step: packed, written, moved, selected, pickled and unpacked."""

    def update(cache: Any, keys: Tensor) -> None:
        cache.update(keys, keys, 0)
        cache.update_indexer(2 * keys[:, 0, :, :3], 0)

    def check(cache: TreeCache) -> None:
        layer = cache.layers[0]
        for row, length in enumerate(cache.host_lengths):
            views = layer.views
            index = views["indexer_keys"][row, 0, :length]
            assert length and torch.equal(index, 2 * views["keys"][row, 0, :length, :3])

    source = DynamicCache()
    source.layers.append(DynamicIndexedLayer())
    generator = torch.Generator().manual_seed(0)
    update(source, torch.randn(3, 1, 6, 4, generator=generator))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6, [0, 1, 1, 1, 1, 1]])
    target = copy.deepcopy(source)
    cache = pack(source, mask, 32)
    check(cache)
    shape = TokenTree.from_paths([[0], [1], [1, 0]])
    for _ in range(2):
        cache.begin(Tree.of_shapes([shape] * 3))
        update(cache, torch.randn(3, 1, 4, 4, generator=generator))
        cache.commit([3, 1, 2], torch.tensor([[0, 2, 3], [0, 0, 0], [0, 2, 2]]))
        check(cache)
    check(pickle.loads(pickle.dumps(cache)))
    cache.select([2, 1])
    check(cache)
    cache.batch_select_indices(torch.tensor([0, 0, 1]))
    check(cache)
    arriving = pickle.loads(pickle.dumps(cache))
    cache.join(arriving)
    check(cache)
    cache.select([0, 1, 2])
    target.layers[0] = DynamicIndexedLayer()
    cache.truncate([6, 6, 6])
    unpack_into(cache, target)
    layer = target.layers[0]
    assert layer.indexer_keys.shape == (3, 6, 3)
    assert torch.equal(layer.indexer_keys, 2 * layer.keys[:, 0, :, :3])
