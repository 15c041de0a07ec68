"""A cache that is nothing but lists of the accepted tokens' keys and values, as an oracle."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from random_trees import path_to, random_tree
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_spec.cache.attention import ALIGNMENT
from hf_spec.cache.tree_cache import TreeCache, take_over
from hf_spec.core.tree import Tree
from hf_spec.modeling_patches.modules import CACHE

#: (heads, key dim, value dim) of each layer.
Spec = tuple[int, int, int]
SPECS: dict[str, list[Spec]] = {
    "equal": [(2, 4, 4)] * 3,
    "keys and values differ": [(2, 6, 4)] * 2,
    "layers differ": [(2, 4, 4), (1, 8, 8), (2, 4, 4), (3, 4, 2)],
}


def row_of(cache: TreeCache, row: int, layer: int) -> tuple[Tensor, Tensor]:
    """Accepted keys and values of one row and layer: ``(kv_heads, length, head_dim)``."""
    own, length = cache.layers[layer], cache.host_lengths[row]
    return own.held("keys", 0, length)[row], own.held("values", 0, length)[row]


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

    def accept(self, nodes: list[tuple[Tensor, Tensor]], paths: Sequence[Sequence[int]]) -> None:
        """Append the states of each row's path."""
        for layer, (keys, values) in enumerate(nodes):
            for row, path in enumerate(paths):
                states = [(keys[row, :, node], values[row, :, node]) for node in path]
                self.states[layer][row] += states

    def row(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        heads, key_dim, value_dim = self.specs[layer]
        if not self.states[layer][row]:
            return torch.zeros(heads, 0, key_dim), torch.zeros(heads, 0, value_dim)
        keys, values = zip(*self.states[layer][row])
        return torch.stack(keys, 1), torch.stack(values, 1)

    def join(self, other: "NaiveCache") -> None:
        self.states = [own + new for own, new in zip(self.states, other.states)]

    def map_rows(self, change: Callable[[list], list]) -> None:
        self.states = [change(layer) for layer in self.states]


class Pair:
    """A TreeCache and the naive one, driven together."""

    def __init__(
        self, specs: Sequence[Spec], lengths: Sequence[int], capacity: int, seed: int,
        windows: Sequence[int | None] = (),
    ):  # fmt: skip
        self.specs, self.rng = specs, random.Random(seed)
        self.windows = windows or [None] * len(specs)
        self.generator = torch.Generator().manual_seed(seed)
        rows, width = len(lengths), max(lengths)
        prompt = self.states(rows, width)
        mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]  # padding on the left
        self.naive = NaiveCache(specs, rows)
        self.naive.accept(prompt, [row.nonzero()[:, 0].tolist() for row in mask])
        self.cache = pack(dynamic(prompt, windows), None if mask.all() else mask, capacity)

    def states(self, rows: int, nodes: int) -> list[tuple[Tensor, Tensor]]:
        """Random keys and values (batch, heads, nodes, dim) of every layer."""
        return random_states(self.specs, rows, nodes, self.generator)

    def forward(self, nodes: int, offset: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Open a block and write it; check what attention would see."""
        cache = self.cache
        states = self.states(cache.batch_size, nodes)
        end = cache.begin(chain(cache, offset + nodes), offset)
        assert end >= cache.max_length + offset + nodes
        assert end % ALIGNMENT == 0 or end == cache.capacity
        for layer, (keys, values) in enumerate(states):
            seen = cache.update(keys, values, layer)
            for view, written, accepted in zip(seen, (keys, values), zip(*self.rows(layer))):
                size = cache.states.slots(self.windows[layer])
                assert view.shape[2] == min(end, size)
                for row, length in enumerate(self.naive.lengths):
                    first, start = self.first(layer, length), length + offset
                    before = torch.arange(first, length) % size
                    own = torch.arange(start, start + nodes) % size
                    assert torch.equal(view[row, :, before], accepted[row][:, first:])
                    assert torch.equal(view[row, :, own], written[row])
            self.check_shown(layer)
        return states

    def check_shown(self, layer: int) -> None:
        """What keys and values of a layer read as, in an open block also of rows that differ."""
        own, longest = self.cache.layers[layer], max(self.naive.lengths)
        for shown, accepted in zip((own.keys, own.values), zip(*self.rows(layer))):
            first = self.first(layer, longest)
            assert shown.shape[2] == longest - first
            for row, length in enumerate(self.naive.lengths):
                if length == longest:
                    assert torch.equal(shown[row], accepted[row][:, first:])

    def first(self, layer: int, length: int) -> int:
        """The first token that the one after so many sees."""
        window = self.windows[layer]
        return 0 if window is None else max(length - window + 1, 0)

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
        self.accept(states, paths)

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        self.naive.map_rows(lambda layer: [layer[row] for row in rows])

    def join(self, other: "Pair") -> None:
        self.cache.join(other.cache)
        self.naive.join(other.naive)
        self.check()

    def accept(self, states: list[tuple[Tensor, Tensor]], paths: Sequence[Sequence[int]]) -> None:
        """What the cache has committed."""
        self.naive.accept(states, paths)
        self.check()

    def check(self) -> None:
        cache = self.cache
        assert cache.host_lengths == cache.lengths.tolist() == self.naive.lengths
        assert cache.max_length == cache.get_seq_length() == max(self.naive.lengths)
        assert cache.block is None
        for layer in range(len(self.specs)):
            for row in range(cache.batch_size):
                first = self.first(layer, self.naive.lengths[row])
                for own, wanted in zip(row_of(cache, row, layer), self.naive.row(layer, row)):
                    assert torch.equal(own[:, first:], wanted[:, first:])
            if cache.is_uniform:
                self.check_shown(layer)


def random_states(
    specs: Sequence[Spec], rows: int, seq: int, seed: int | torch.Generator = 0
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values ``(rows, heads, seq, dim)`` of every layer."""
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    return [
        tuple(torch.randn(rows, heads, seq, dim, generator=generator) for dim in dims)
        for heads, *dims in specs
    ]


def write(cache: Any, states: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Update each layer with its states; gives what attention sees."""
    return [cache.update(*both, layer) for layer, both in enumerate(states)]


def small_buffers(patch: pytest.MonkeyPatch, **sizes: float) -> None:
    """Buffers that are soon too small, two for all layers that are alike."""
    for name, value in {"GROWTH": 1, "LARGE": 0, "SHARE": 0.5, **sizes}.items():
        patch.setattr(f"hf_spec.cache.attention.{name}", value)


def dynamic(states: Sequence[tuple[Tensor, Tensor]], windows: Sequence[int | None] = ()):
    """A DynamicCache that saw these states; ``windows`` names sliding layers."""
    cache = DynamicCache()
    for layer in range(len(states)):
        window = windows[layer] if windows else None
        cache.layers.append(DynamicSlidingWindowLayer(window) if window else DynamicLayer())
    write(cache, states)
    return cache


@torch.no_grad()
def prefilled(model: Any, input_ids: Tensor, attention_mask: Tensor) -> DynamicCache:
    """What Transformers' cache holds after a batch of prompts."""
    cache, positions = DynamicCache(config=model.config), attention_mask.cumsum(-1) - 1
    model(
        input_ids, attention_mask=attention_mask, position_ids=positions.clamp(min=0),
        use_cache=True, **{CACHE: cache},
    )  # fmt: skip
    return cache


def pack(source: DynamicCache, mask: Tensor | None, capacity: int) -> TreeCache:
    """The states of a prefill in a new cache."""
    keys = (getattr(layer, "keys", None) for layer in source.layers)
    rows = next(len(tensor) for tensor in keys if tensor is not None)
    cache = TreeCache(len(source.layers), rows, "cpu")
    cache.states.reserve(capacity)
    take_over(cache, source, mask, more=0)
    cache.states.limit = None
    return cache


def chain(cache: TreeCache, nodes: int) -> Tree:
    """A tree of so many nodes for every row."""
    return Tree.chain(torch.zeros(cache.batch_size, nodes, dtype=torch.long))


def buffers(cache: TreeCache) -> list[int]:
    return [tensor.data_ptr() for layer in cache.layers for tensor in layer.views.values()]
