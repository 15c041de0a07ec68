"""TreeCache against a cache that is nothing but lists of the accepted tokens' keys and values."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from covering import covering
from random_trees import path_to, random_tree
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from hf_spec.cache.buffers import ALIGNMENT, bounded
from hf_spec.cache.convert import check_packable, pack, unpack_into
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree import Tree
from modeling_patches.cache_name import CACHE

#: (heads, key dim, value dim) of each layer.
Spec = tuple[int, int, int]
SPECS: dict[str, list[Spec]] = {
    "equal": [(2, 4, 4)] * 3,
    "keys and values differ": [(2, 6, 4)] * 2,
    "layers differ": [(2, 4, 4), (1, 8, 8), (2, 4, 4), (3, 4, 2)],
}


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that are soon too small."""
    monkeypatch.setattr("hf_spec.cache.buffers.SMALLEST", ALIGNMENT)


class NaiveCache:
    """``states[layer][row]``: (key, value) of each accepted token, and nothing else."""

    def __init__(self, specs: Sequence[Spec], rows: int):
        self.specs = specs
        self.states: list[list[list[tuple[Tensor, Tensor]]]] = [
            [[] for _ in range(rows)] for _ in specs
        ]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.states[0]]

    def accept(self, nodes: list[tuple[Tensor, Tensor]], row: int, path: Sequence[int]) -> None:
        for layer, (keys, values) in enumerate(nodes):
            for node in path:
                self.states[layer][row].append((keys[row, :, node], values[row, :, node]))

    def row(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        heads, key_dim, value_dim = self.specs[layer]
        if not self.states[layer][row]:
            return torch.zeros(heads, 0, key_dim), torch.zeros(heads, 0, value_dim)
        keys, values = zip(*self.states[layer][row])
        return torch.stack(keys, 1), torch.stack(values, 1)

    def map_rows(self, change: Callable[[list], list]) -> None:
        self.states = [change(layer) for layer in self.states]


class Pair:
    """A TreeCache and the naive one, driven together."""

    def __init__(self, specs: Sequence[Spec], lengths: Sequence[int], capacity: int, seed: int):
        self.specs, self.rng = specs, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        rows, width = len(lengths), max(lengths)
        prompt = self.states(rows, width)
        mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]  # padding on the left
        self.naive = NaiveCache(specs, rows)
        for row in range(rows):
            self.naive.accept(prompt, row, mask[row].nonzero()[:, 0].tolist())
        source = dynamic(prompt)
        self.cache = pack(source, None if mask.all() else mask, capacity, "cpu")

    def states(self, rows: int, nodes: int) -> list[tuple[Tensor, Tensor]]:
        """Random keys and values (batch, heads, nodes, dim) of every layer."""

        def random_states(heads: int, dim: int) -> Tensor:
            return torch.randn(rows, heads, nodes, dim, generator=self.generator)

        return [(random_states(h, k), random_states(h, v)) for h, k, v in self.specs]

    def forward(self, nodes: int, offset: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Open a block and write it; check what attention would see."""
        cache = self.cache
        states = self.states(cache.batch_size, nodes)
        end = cache.begin(chain(cache, offset + nodes), offset)
        assert end >= cache.max_length + offset + nodes
        assert end % ALIGNMENT == 0
        for layer, (keys, values) in enumerate(states):
            seen = cache.update(keys, values, layer)
            for view, written, accepted in zip(seen, (keys, values), zip(*self.rows(layer))):
                assert view.shape[2] == end
                for row, length in enumerate(self.naive.lengths):
                    start = length + offset
                    assert torch.equal(view[row, :, :length], accepted[row])
                    assert torch.equal(view[row, :, start : start + nodes], written[row])
        return states

    def rows(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        return [self.naive.row(layer, row) for row in range(self.cache.batch_size)]

    def step(self, same_counts: bool = False, idle: bool = True) -> None:
        """One step: a random tree per row, a random accepted path, rubbish behind it."""
        rng, rows = self.rng, self.cache.batch_size
        if same_counts:
            trees = [random_tree(rng, rng.randint(1, 7))] * rows
        else:
            trees = [random_tree(rng, rng.randint(1, 7)) for _ in range(rows)]
        tree = Tree.of_shapes(trees)
        states = self.forward(tree.num_nodes)
        paths = [path_to(one.parents, rng.randrange(len(one))) for one in trees]
        if same_counts:
            count = rng.randint(1, max(map(len, paths)))
            ends = [n for n in range(len(trees[0])) if trees[0].depths[n] == count - 1]
            paths = [path_to(trees[0].parents, rng.choice(ends)) for _ in range(rows)]
        elif idle:
            paths = [[] if rng.random() < 0.15 else path for path in paths]  # a finished row
        depth = tree.max_depth + 1
        padded = [
            path + [rng.randrange(tree.num_nodes) for _ in range(depth - len(path))]
            for path in paths
        ]
        in_place = all(path == list(range(len(path))) for path in paths)
        moved = None if in_place and rng.random() < 0.5 else torch.tensor(padded)
        self.cache.commit([len(path) for path in paths], moved)
        for row, path in enumerate(paths):
            self.naive.accept(states, row, path)
        self.check()

    def check(self) -> None:
        cache = self.cache
        assert cache.host_lengths == cache.lengths.tolist() == self.naive.lengths
        assert cache.max_length == cache.get_seq_length() == max(self.naive.lengths)
        assert cache.block is None
        for layer in range(len(self.specs)):
            for row in range(cache.batch_size):
                for own, wanted in zip(cache.row(row, layer), self.naive.row(layer, row)):
                    assert torch.equal(own, wanted)


def dynamic(states: Sequence[tuple[Tensor, Tensor]], windows: Sequence[int | None] = ()):
    """A DynamicCache that saw these states; ``windows`` names sliding layers."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(states):
        window = windows[layer] if windows else None
        cache.layers.append(DynamicSlidingWindowLayer(window) if window else DynamicLayer())
        cache.update(keys, values, layer)
    return cache


def chain(cache: TreeCache, nodes: int) -> Tree:
    """A tree of so many nodes for every row."""
    return Tree.chain(torch.zeros(cache.batch_size, nodes, dtype=torch.long))


def buffers(cache: TreeCache) -> list[int]:
    return [tensor.data_ptr() for layer in cache.layers for tensor in (layer.keys, layer.values)]


def uniform(batch: int = 2, length: int = 5, capacity: int = 64, seed: int = 0) -> Pair:
    return Pair(SPECS["layers differ"], [length] * batch, capacity, seed)


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


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_rows_of_one_length_stay_together(rows: int, seed: int) -> None:
    pair = Pair(SPECS["layers differ"], [4] * rows, capacity=128, seed=seed)
    for _ in range(12):
        pair.step(same_counts=True)
        assert pair.cache.uniform_length() == pair.naive.lengths[0]


@pytest.mark.parametrize("lengths", [[5, 5], [1, 6, 4]], ids=str)
def test_growth_beyond_the_capacity_keeps_everything(lengths: list[int]) -> None:
    pair = Pair(SPECS["layers differ"], lengths, capacity=1, seed=3)
    assert pair.cache.capacity == ALIGNMENT
    capacities = {pair.cache.capacity}
    while max(pair.naive.lengths) <= 2 * ALIGNMENT:
        pair.step(idle=False)
        capacities.add(pair.cache.capacity)
        assert all(layer.keys.shape[2] == pair.cache.capacity for layer in pair.cache.layers)
    # Doubling: few sizes, each at least twice the one before.
    sizes = sorted(capacities)
    assert all(large >= 2 * small for small, large in zip(sizes, sizes[1:]))


@pytest.mark.parametrize("lengths", [[5], [5, 5], [2, 7]], ids=str)
def test_nodes_drafted_one_by_one_are_overwritten_by_the_verifying_forward(
    lengths: list[int],
) -> None:
    pair = Pair(SPECS["layers differ"], lengths, capacity=64, seed=1)
    for node in range(4):
        pair.forward(1, offset=node)
    pair.cache.rollback()
    pair.check()
    states = pair.forward(4)
    pair.cache.commit([3] * len(lengths))
    for row in range(len(lengths)):
        pair.naive.accept(states, row, [0, 1, 2])
    pair.check()


@pytest.mark.parametrize("lengths", [[5, 5], [2, 7]], ids=str)
def test_a_block_may_be_written_in_two_parts(lengths: list[int]) -> None:
    pair = Pair(SPECS["equal"], lengths, capacity=64, seed=1)
    parts = [pair.forward(2), pair.forward(3, offset=2)]
    pair.cache.commit([3, 3], torch.tensor([[0, 2, 4], [0, 1, 3]]))
    states = [tuple(torch.cat(both, dim=2) for both in zip(*layer)) for layer in zip(*parts)]
    pair.naive.accept(states, 0, [0, 2, 4])
    pair.naive.accept(states, 1, [0, 1, 3])
    pair.check()


def test_unwritten_slots_are_zero_not_rubbish() -> None:
    pair = uniform(length=3)
    end = pair.cache.begin(chain(pair.cache, 2))
    keys, values = pair.cache.layers[0].keys[:, :, :end], pair.cache.layers[0].values[:, :, :end]
    assert not keys[:, :, 3:].any()
    assert not values[:, :, 3:].any()


# -- packing -------------------------------------------------------------------------------------

MASKS = {
    "no padding": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
    "left": [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]],
    "middle": [[1, 1, 0, 0, 1, 1], [1, 0, 1, 0, 1, 1]],  # a second turn's padding
    "right": [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]],
    "everywhere": [[0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 1]],
}


def random_states(specs: Sequence[Spec], rows: int, seq: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seq)
    return [
        tuple(torch.randn(rows, heads, seq, dim, generator=generator) for dim in dims)
        for heads, *dims in specs
    ]


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("padding", MASKS)
def test_pack_drops_padding_wherever_it_stands(specs: str, padding: str) -> None:
    states = random_states(SPECS[specs], 2, 6)
    mask = torch.tensor(MASKS[padding])
    source = dynamic(states)
    cache = pack(source, mask, 32, "cpu")
    assert cache.host_lengths == mask.sum(1).tolist()
    for layer, (keys, values) in enumerate(states):
        for row in range(2):
            own = cache.row(row, layer)
            assert torch.equal(own[0], keys[row][:, mask[row].bool()])
            assert torch.equal(own[1], values[row][:, mask[row].bool()])
    assert all(layer.keys is None and layer.values is None for layer in source.layers)


@pytest.mark.parametrize("padding", ["no padding", "left", "middle"])
@pytest.mark.parametrize("window", [2, 4, 6, 7, 50])
def test_pack_leaves_the_slots_that_a_sliding_layer_dropped_at_zero(
    padding: str, window: int
) -> None:
    states = random_states([(2, 4, 4)] * 2, 2, 6)
    mask = torch.tensor(MASKS[padding])
    source = dynamic(states, [None, window])
    cache = pack(source, None if mask.all() else mask, 32, "cpu")
    kept = torch.arange(6) >= 6 - (window - 1)
    for layer, seen in ((0, torch.ones(6, dtype=torch.bool)), (1, kept)):
        for row in range(2):
            for own, full in zip(cache.row(row, layer), states[layer]):
                wanted = full[row] * seen[:, None]
                assert torch.equal(own, wanted[:, mask[row].bool()])


def test_a_layer_without_keys_stays_without() -> None:
    states = random_states([(2, 4, 4)] * 2, 1, 3)
    source = dynamic(states)
    source.layers.append(DynamicLayer())
    cache = pack(source, None, 16, "cpu")
    assert len(cache) == 3
    with pytest.raises(RuntimeError, match="this layer had no keys when the cache was packed"):
        cache.update(*states[0], 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_pack_keeps_the_dtype(dtype: torch.dtype) -> None:
    states = [
        (keys.to(dtype), values.to(dtype)) for keys, values in random_states([(1, 2, 2)], 1, 3)
    ]
    cache = pack(dynamic(states), None, 16, "cpu")
    assert cache.layers[0].keys.dtype == dtype
    assert torch.equal(cache.row(0, 0)[0], states[0][0][0])


# -- unpacking -----------------------------------------------------------------------------------


def assert_same_dynamic(own: DynamicCache, wanted: DynamicCache, mask: Tensor | None) -> None:
    assert own.get_seq_length() == wanted.get_seq_length()
    for mine, theirs in zip(own.layers, wanted.layers):
        assert mine.get_seq_length() == theirs.get_seq_length()
        assert mine.get_mask_sizes(1) == theirs.get_mask_sizes(1)
        for tensor, full in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            if mask is not None:
                full = full * mask[:, None, -full.shape[2] :, None]
            assert torch.equal(tensor, full)


@pytest.mark.parametrize(
    ("windows", "padding", "accepted"),
    covering(
        product(
            [(None, None), (None, 4), (3, None), (4, 50)],
            ["no padding", "left", "middle"],
            [(0, 0), (1, 1), (5, 5), (4, 2), (0, 3)],
        )
    ),
    ids=str,
)
def test_unpacked_it_is_the_cache_that_plain_generation_leaves(
    windows: tuple[int | None, ...], padding: str, accepted: tuple[int, ...]
) -> None:
    specs = [(2, 4, 4), (1, 6, 4)]
    prompt, new = random_states(specs, 2, 6), random_states(specs, 2, 5)
    mask = torch.tensor(MASKS[padding])
    longest = max(accepted)

    # Plain generation appends token by token; rows that are done get padding.
    plain = dynamic(prompt, windows)
    for token in range(longest):
        for layer, states in enumerate(new):
            plain.update(*(s[:, :, token : token + 1] for s in states), layer)

    ours = dynamic(prompt, windows)
    layers = list(ours.layers)
    cache = pack(ours, None if mask.all() else mask, 32, "cpu")
    cache.begin(chain(cache, 5))
    for layer, states in enumerate(new):
        cache.update(*states, layer)
    cache.commit(accepted)
    tail = torch.arange(longest) < torch.tensor(accepted)[:, None]
    whole = torch.cat([mask.bool(), tail], dim=1)
    unpack_into(cache, ours, None if whole.all() else whole)

    assert list(ours.layers) == layers  # filled in place
    assert_same_dynamic(ours, plain, None if whole.all() else whole)
    following = random_states(specs, 2, 1)
    for layer, states in enumerate(following):
        for grown, full in zip(ours.update(*states, layer), plain.update(*states, layer)):
            assert grown.shape == full.shape
            if whole.all():
                assert torch.equal(grown, full)


def test_an_index_follows_its_keys() -> None:
    """In every step: packed, written, moved, selected, pickled and unpacked."""

    def update(cache: Any, keys: Tensor) -> None:
        cache.update(keys, keys, 0)
        cache.update_indexer(2 * keys[:, 0, :, :3], 0)

    def check(cache: TreeCache) -> None:
        layer = cache.layers[0]
        for row, length in enumerate(cache.host_lengths):
            index = layer.indexer_keys[row, 0, :length]
            assert length and torch.equal(index, 2 * layer.keys[row, 0, :length, :3])

    source = DynamicCache()
    source.layers.append(DynamicIndexedLayer())
    generator = torch.Generator().manual_seed(0)
    update(source, torch.randn(3, 1, 6, 4, generator=generator))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6, [0, 1, 1, 1, 1, 1]])
    target = copy.deepcopy(source)
    cache = pack(source, mask, 32, "cpu")
    check(cache)
    shape = TokenTree.from_paths([[0], [1], [1, 0]])
    for _ in range(2):
        cache.begin(Tree.of_shapes([shape] * 3))
        update(cache, torch.randn(3, 1, 4, 4, generator=generator))
        cache.commit([3, 1, 2], torch.tensor([[0, 2, 3], [0, 0, 0], [0, 2, 2]]))
        check(cache)
    check(pickle.loads(pickle.dumps(cache)))
    cache.padding = [2, 0, 1]
    cache.select([2, 1])
    check(cache)
    assert cache.padding == [1, 0]
    cache.batch_select_indices(torch.tensor([0, 0, 1]))
    check(cache)
    target.layers[0] = DynamicIndexedLayer()
    cache.truncate([6, 6, 6])
    unpack_into(cache, target, None)
    layer = target.layers[0]
    assert layer.indexer_keys.shape == (3, 6, 3)
    assert torch.equal(layer.indexer_keys, 2 * layer.keys[:, 0, :, :3])


def test_unpacked_states_are_copies() -> None:
    pair = uniform()
    target = DynamicCache()
    target.layers = [DynamicLayer() for _ in pair.specs]
    unpack_into(pair.cache, target, None)
    for layer in target.layers:
        layer.keys.zero_()
    pair.check()


def test_layers_that_hold_states_are_not_filled_again() -> None:
    pair = uniform()
    target = DynamicCache()
    target.layers = [DynamicLayer() for _ in pair.specs]
    unpack_into(pair.cache, target, None)
    target.layers[1].values = None  # as where an interrupt came between the two
    kept = target.layers[0].keys
    pair.cache.crop(-1)
    unpack_into(pair.cache, target, None)
    assert target.layers[0].keys is kept
    assert [layer.keys.shape[2] for layer in target.layers] == [5, 4, 5, 5]


# -- use as a stock cache ------------------------------------------------------------------------


def test_outside_blocks_states_are_appended() -> None:
    pair = uniform()
    cache = pair.cache
    for new in (1, 3):
        states = pair.states(2, new)
        for layer, (keys, values) in enumerate(states):
            assert cache.get_mask_sizes(new, layer) == (pair.naive.lengths[0] + new, 0)
            seen = cache.update(keys, values, layer)
            for view, own in zip(seen, (keys, values)):
                assert view.shape[2] == pair.naive.lengths[0] + new  # not aligned
                assert torch.equal(view[:, :, -new:], own)
        for row in range(2):
            pair.naive.accept(states, row, range(new))
        assert cache.get_seq_length() == pair.naive.lengths[0]
    cache.count_appended()
    cache.rollback()
    pair.check()
    pair.step()


def test_appending_grows_the_buffers() -> None:
    pair = uniform(capacity=1)
    states = pair.states(2, 40)
    for layer, (keys, values) in enumerate(states):
        pair.cache.update(keys, values, layer)
    for row in range(2):
        pair.naive.accept(states, row, range(38))
    pair.cache.crop(-2)
    pair.check()


def test_rows_of_different_lengths_cannot_be_used_as_a_stock_cache() -> None:
    pair = Pair(SPECS["equal"], [2, 4], capacity=32, seed=0)
    message = r"rows of different lengths \[2, 4\].*assistant_strategy"
    with pytest.raises(ValueError, match=message):
        pair.cache.update(*pair.states(2, 1)[0], 0)
    with pytest.raises(ValueError, match=message):
        pair.cache.get_mask_sizes(1, 0)
    pair.check()


def test_an_append_that_stopped_on_the_way_does_not_count() -> None:
    """A forward that failed behind some layers."""
    pair = uniform()
    for layer, both in enumerate(pair.states(2, 2)[:2]):
        pair.cache.update(*both, layer)
    assert pair.cache.get_seq_length() == 5
    pair.cache.count_appended()
    pair.check()
    pair.step()


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_model_continues_from_it_as_from_a_dynamic_cache(
    tiny: Callable[..., PreTrainedModel], architecture: str
) -> None:
    model = tiny(architecture, dtype=torch.float64)
    ids = torch.randint(
        3, model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        plain = model(ids[:, :4], use_cache=True)[CACHE]
        cache = pack(copy.deepcopy(plain), None, 8, "cpu")
        for part in (ids[:, 4:7], ids[:, 7:8], ids[:, 8:]):
            wanted = model(part, **{CACHE: plain}).logits
            found = model(part, **{CACHE: cache}).logits
            # float64; sums may be taken in another order over views of another stride.
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    assert cache.get_seq_length() == 9


# -- shortening, emptying, choosing rows ---------------------------------------------------------


@pytest.mark.parametrize("lengths", [[6, 6], [3, 7]], ids=str)
def test_crop_forgets_the_last_tokens_of_every_row(lengths: list[int]) -> None:
    pair = Pair(SPECS["layers differ"], lengths, capacity=64, seed=2)
    pair.step(idle=False)
    pair.cache.crop(-2)
    pair.naive.map_rows(lambda rows: [row[:-2] for row in rows])
    pair.check()
    pair.cache.crop(0)
    pair.check()
    pair.step()


@pytest.mark.parametrize("number", [1, 5, -4])
def test_crop_refuses_other_numbers(number: int) -> None:
    pair = Pair(SPECS["equal"], [3, 5], capacity=32, seed=0)
    with pytest.raises(ValueError, match=rf"crop\({number}\): give a number from -3"):
        pair.cache.crop(number)
    pair.check()


def test_truncate_keeps_at_most_so_many_tokens_per_row() -> None:
    pair = Pair(SPECS["layers differ"], [3, 5, 4], capacity=64, seed=2)
    pair.cache.truncate([5, 2, 4])
    pair.naive.map_rows(lambda rows: [rows[0][:5], rows[1][:2], rows[2][:4]])
    pair.check()
    pair.step()


@pytest.mark.parametrize("padding", ["no padding", "left"])
def test_rows_are_not_cut_where_a_window_has_dropped_tokens(padding: str) -> None:
    """A query there would see them: cut to nothing, or refused."""
    specs, mask = [(2, 4, 4)] * 2, torch.tensor(MASKS[padding])
    states = random_states(specs, 2, 6)
    for window, safe in ((7, True), (6, False)):
        source = dynamic(states, [None, window])
        cache = pack(source, None if mask.all() else mask, 32, "cpu")
        lengths = list(cache.host_lengths)
        cache.begin(chain(cache, 2))
        for layer, new in enumerate(random_states(specs, 2, 2)):
            cache.update(*new, layer)
        cache.commit([2, 2])
        cache.tokens = [list(range(length + 2)) for length in lengths]
        cache.batch_select_indices(torch.tensor([1, 0]))
        lengths = lengths[::-1]
        cache.crop(-1)
        if not safe:
            with pytest.raises(ValueError, match=r"crop\(-2\): a sliding window has dropped"):
                cache.crop(-2)
        cache.truncate([lengths[0] - 1, 99])
        kept = [lengths[0] - 1 if safe else 0, lengths[1] + 1]
        assert cache.host_lengths == kept
        assert cache.tokens == [list(range(length)) for length in kept]
        cache.reset()
        assert cache.host_lengths == [0, 0]


def test_the_record_of_tokens_follows_its_rows() -> None:
    pair = Pair(SPECS["equal"], [3, 5], capacity=32, seed=0)
    cache = pair.cache
    cache.tokens = [[1, 2, 3], [4, 5, 6, 7, 8]]
    cache.crop(-1)
    assert cache.tokens == [[1, 2], [4, 5, 6, 7]]
    cache.batch_select_indices(torch.tensor([1, 1, 0]))
    assert cache.tokens == [[4, 5, 6, 7], [4, 5, 6, 7], [1, 2]]
    cache.truncate([1, 4, 2])
    assert cache.tokens == [[4], [4, 5, 6, 7], [1, 2]]
    cache.begin(chain(cache, 1))
    cache.commit([1, 1, 1])
    assert cache.tokens is None  # only the owner knows which


def test_reset_empties_the_rows_and_keeps_the_buffers() -> None:
    pair = uniform()
    before = buffers(pair.cache)
    pair.cache.update(*pair.states(2, 1)[0], 0)  # appended to one layer only
    pair.cache.reset()
    pair.naive.map_rows(lambda rows: [[] for _ in rows])
    pair.check()
    for _ in range(4):
        pair.step()
    assert buffers(pair.cache) == before


@pytest.mark.parametrize("name", ["batch_select_indices", "reorder_cache"])
@pytest.mark.parametrize("chosen", [[0], [2, 0], [1, 1, 0, 2], [2, 2]], ids=str)
def test_rows_can_be_chosen_and_repeated(name: str, chosen: list[int]) -> None:
    pair = Pair(SPECS["layers differ"], [3, 5, 4], capacity=64, seed=4)
    pair.step()
    getattr(pair.cache, name)(torch.tensor(chosen))
    pair.naive.map_rows(lambda rows: [list(rows[index]) for index in chosen])
    pair.check()
    for _ in range(4):
        pair.step()


@pytest.mark.parametrize("lengths", [[4], [3, 5]], ids=str)
def test_repeated_rows_stand_side_by_side_and_part(lengths: list[int]) -> None:
    pair = Pair(SPECS["equal"], lengths, capacity=64, seed=5)
    pair.cache.batch_repeat_interleave(3)
    pair.naive.map_rows(lambda rows: [list(row) for row in rows for _ in range(3)])
    pair.check()
    for _ in range(4):
        pair.step()


def test_appended_tokens_are_kept_when_rows_are_chosen() -> None:
    pair = uniform()
    states = pair.states(2, 2)
    for layer, both in enumerate(states):
        pair.cache.update(*both, layer)
    for row in range(2):
        pair.naive.accept(states, row, [0, 1])
    pair.cache.batch_select_indices(torch.tensor([1]))
    pair.naive.map_rows(lambda rows: [rows[1]])
    pair.check()


def test_a_deep_copy_lives_on_its_own() -> None:
    pair = uniform()
    pair.step()
    twin = copy.copy(pair)
    twin.cache, twin.naive = copy.deepcopy(pair.cache), copy.deepcopy(pair.naive)
    for _ in range(3):
        twin.step()
    twin.check()
    pair.check()


# -- what can be packed --------------------------------------------------------------------------


def test_other_caches_are_refused_by_name(tiny: Callable[..., PreTrainedModel]) -> None:
    class IndexedLayer(DynamicLayer):
        pass

    odd = dynamic(random_states([(1, 2, 2)], 1, 3))
    odd.layers.append(IndexedLayer())
    offloaded = DynamicCache()
    offloaded.offloading = True
    cases = [
        (StaticCache(config=tiny("llama").config, max_cache_len=8), "layer of type StaticLayer"),
        (odd, "layer of type IndexedLayer"),
        (offloaded, "an offloaded cache"),
        (((torch.zeros(1), torch.zeros(1)),), "given cache is tuple"),
    ]
    for cache, message in cases:
        with pytest.raises(ValueError, match=f"{message}.*Pass a DynamicCache"):
            check_packable(cache)


# -- slots in front of the tokens ------------------------------------------------------------------


def learned_front(specs: Sequence[Spec], slots: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(heads, slots, keys, generator=generator),
            torch.randn(heads, slots, values, generator=generator),
        )
        for heads, keys, values in specs
    ]


@pytest.mark.parametrize("allocated", [0, 5, 40])
@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
def test_front_is_seen_when_asked_for_and_never_moves(specs: list[Spec], allocated: int) -> None:
    """Through commits, moves, growth and another front: tokens as without, front as given."""
    rows, prompt_length = 2, 3
    source = DynamicCache()
    generator = torch.Generator().manual_seed(3)
    states = [
        [torch.randn(rows, heads, prompt_length, dim, generator=generator) for dim in dims]
        for heads, *dims in specs
    ]
    for index, pair in enumerate(states):
        source.update(*(part.clone() for part in pair), index)
    cache = pack(source, None, 4, "cpu", front=allocated)
    kept = [[list(part.unbind(0)) for part in pair] for pair in states]  # [layer][name][row]
    for step, count in enumerate((5, 20)):
        front = learned_front(specs, count, seed=step)
        cache.states.set_front(front)
        for _ in range(8):
            nodes = 4
            new = [
                [torch.randn(rows, heads, nodes, dim, generator=generator) for dim in dims]
                for heads, *dims in specs
            ]
            end = cache.begin(chain(cache, nodes), front=True)
            for layer, pair in enumerate(new):
                views = cache.layers[layer].update(*pair)
                for name, view in enumerate(views):
                    assert view.shape[2] == cache.front + end
                    shown = view[:, :, cache.front - count : cache.front]
                    assert torch.equal(shown, front[layer][name].expand(rows, -1, -1, -1))
            path = torch.tensor([[0, 2], [0, 3]])
            cache.commit([2, 1], path)
            for layer, pair in enumerate(new):
                for name, part in enumerate(pair):
                    for row, nodes_kept in enumerate(([0, 2], [0])):
                        kept[layer][name][row] = torch.cat(
                            [kept[layer][name][row], part[row][:, nodes_kept]], dim=1
                        )
            for layer in range(len(specs)):
                for row in range(rows):
                    for name, part in enumerate(cache.row(row, layer)):
                        assert torch.equal(part, kept[layer][name][row])
    # Without being asked for it is not there.
    end = cache.begin(chain(cache, 1))
    new = [[torch.zeros(rows, heads, 1, dim) for dim in dims] for heads, *dims in specs]
    assert cache.layers[0].update(*new[0])[0].shape[2] == end
    cache.rollback()


def test_front_of_another_model_is_refused() -> None:
    source = DynamicCache()
    source.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    cache = pack(source, None, 4, "cpu")
    with pytest.raises(ValueError, match="2 layers of learned states for 1"):
        cache.states.set_front(learned_front([(2, 4, 4)] * 2, 3))
    with pytest.raises(ValueError, match="layer 0.*2 heads of dimension 4"):
        cache.states.set_front(learned_front([(2, 8, 8)], 3))


# -- numbers that are not finite -------------------------------------------------------------------


def broken(states: Tensor) -> Tensor:
    """The states with NaN and both infinities among the numbers of the last node."""
    states[:, :, -1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return states


@pytest.mark.parametrize("lengths", [[3], [2, 4]], ids=str)
def test_a_block_holds_finite_numbers(lengths: list[int]) -> None:
    """A slot that is not seen has the weight 0, and 0 * NaN would reach who does not see it."""
    pair = Pair(SPECS["equal"], lengths, 16, 0)
    states = pair.states(len(lengths), 3)
    pair.cache.begin(chain(pair.cache, 3))
    for layer, (keys, values) in enumerate(states):
        wanted = [part.clone() for part in (keys, values)]
        for part in wanted:
            part[:, :, -1, :3] = 0
        seen = pair.cache.update(broken(keys), broken(values), layer)
        for view, written in zip(seen, wanted):
            assert bool(view.isfinite().all())
            for row, length in enumerate(lengths):
                assert torch.equal(view[row, :, length : length + 3], written[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_learned_numbers_are_bounded(dtype: torch.dtype) -> None:
    """Products of two of them are finite; those of an ordinary size stay as they are."""
    most = torch.finfo(dtype).max
    given = torch.tensor([torch.nan, torch.inf, most, -most, 200.0, -0.1], dtype=dtype)
    found = bounded(given)
    assert found[:2].tolist() == [0, 0] and found[2] == -found[3] >= 255
    assert torch.equal(found[4:], given[4:])
    assert bool((found * found).isfinite().all())
    cache = pack(dynamic([(torch.zeros(1, 1, 1, 6, dtype=dtype),) * 2]), None, 4, "cpu")
    cache.states.set_front([(given[None, None], given[None, None])])
    assert torch.equal(cache.layers[0].with_front["keys"][0, 0, cache.front - 1], found)


# -- rows that leave -------------------------------------------------------------------------


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [2, 7, 1, 3, 6, 4]], ids=str)
def test_rows_that_are_selected_go_on(specs: str, lengths: list[int]) -> None:
    """Rows leave in several goes, the others take steps and outgrow the buffers meanwhile."""
    pair = Pair(SPECS[specs], lengths, ALIGNMENT, seed=0)
    cache, rng = pair.cache, random.Random(0)
    pair.step()
    while cache.batch_size > 1:
        rows = rng.sample(range(cache.batch_size), rng.randint(1, cache.batch_size - 1))
        cache.select(rows)
        pair.naive.map_rows(lambda layer, rows=rows: [layer[row] for row in rows])
        assert all(layer.keys.shape[0] == len(rows) for layer in cache.layers)
        pair.check()
        for _ in range(3):
            pair.step()
    cache.repair()
    pair.check()


def test_front_slots_stay_where_rows_leave() -> None:
    pair = uniform(batch=3)
    states = learned_front(pair.specs, 5)
    pair.cache.states.set_front(states)
    pair.cache.select([2, 1])
    pair.naive.map_rows(lambda layer: [layer[2], layer[1]])
    pair.check()
    for layer, (keys, values) in zip(pair.cache.layers, states):
        for name, state in (("keys", keys), ("values", values)):
            front = layer.with_front[name][:, :, pair.cache.front - 5 : pair.cache.front]
            assert all(torch.equal(row, state) for row in front)


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
def test_an_empty_cache_takes_shapes_of_its_first_block(specs: list[Spec]) -> None:
    """Rows keep their own number of nodes; then it is as if it had been packed."""
    pair = Pair(specs, [4, 2], capacity=32, seed=3)
    pair.naive = NaiveCache(specs, 2)
    pair.cache = cache = TreeCache(len(specs), 2, "cpu")
    with pytest.raises(RuntimeError, match="no keys when the cache was packed"):
        cache.update(*pair.states(2, 3)[0], 0)
    states = pair.forward(5)
    cache.commit([5, 3])
    for row, count in enumerate((5, 3)):
        pair.naive.accept(states, row, range(count))
    pair.check()
    packed = Pair(specs, [5, 3], capacity=32, seed=3).cache
    assert cache.states.members == packed.states.members
    assert len(cache.states._groups) == len(packed.states._groups)
    for _ in range(20):
        pair.step()


def test_learned_states_in_front_of_an_empty_cache() -> None:
    """Seen by the first block that asks for them, and kept; each process has its own heads."""
    specs = SPECS["equal"]
    generator = torch.Generator().manual_seed(0)
    learned = [tuple(torch.randn(4, 3, 4, generator=generator) for _ in "kv") for _ in specs]
    cache = TreeCache(3, 1, "cpu")
    cache.states.set_front(learned, own=lambda states, heads: states[heads:])
    states = torch.randn(1, 2, 5, 4, generator=generator)
    cache.begin(chain(cache, 5), front=True)
    for layer, parts in enumerate(learned):
        for seen, part in zip(cache.update(states, states, layer), parts):
            assert torch.equal(seen[0, :, cache.front - 3 : cache.front], part[2:])
            assert torch.equal(seen[0, :, cache.front : cache.front + 5], states[0])
    cache.commit([4])
    for layer, parts in zip(cache.layers, learned):
        for name, part in zip(("keys", "values"), parts):
            assert torch.equal(
                layer.with_front[name][0, :, cache.front - 3 : cache.front], part[2:]
            )
    cache = TreeCache(3, 1, "cpu")
    cache.states.set_front([tuple(torch.zeros(2, 3, 5) for _ in "kv")] * 3)
    cache.begin(chain(cache, 5), front=True)
    with pytest.raises(ValueError, match="layer 0: learned keys of shape .2, 3, 5."):
        cache.update(states, states, 0)
