"""Rows that are dropped after some layers: the others come out as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, VOCAB, prompt
from running import added, fingerprint
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_spec.core.cache import TreeCache
from hf_spec.core.probes import ProbeGroup, ProbeRows, hang
from hf_spec.core.pruning import Survivors, connected, survive
from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.model.probe_inputs import ProbeInputs, TreeForward, TreeOutput
from modeling_patches.cache_name import CACHE
from modeling_patches.early_pruning import early_pruning, layer_input
from modeling_patches.modules import num_layers
from modeling_patches.per_call import Changes

TREE = TokenTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 1, 0], [2, 0, 0]])


def path_log_p(tree: TreeBatch, seed: int = 0) -> Tensor:
    """Log-probabilities of paths, each below that of the node before."""
    generator = torch.Generator().manual_seed(seed)
    own = -torch.rand(tree.parents.shape, generator=generator) - 0.1
    own[:, 0] = 0.0
    return (tree.ancestors * own[:, None, :]).sum(-1)


class Keep:
    """Calls given nodes likely, with all their ancestors."""

    def __init__(self, layer: int, wanted: Tensor):
        self.layer, self.wanted = layer, wanted
        self.hidden: Tensor | None = None

    def likely(self, hidden: Tensor, tokens: Tensor, tree: TreeBatch) -> tuple[Tensor, Tensor]:
        self.hidden = hidden
        return connected(tree, self.wanted.clone()), path_log_p(tree)


def run(
    model: Any, tree: TreeBatch, tokens: Tensor, prompts: list[list[int]], pruning: Any,
    wants_hidden: bool = False, probes: ProbeRows | None = None,
    probe_inputs: ProbeInputs | None = None,
) -> tuple[TreeOutput, TreeCache]:  # fmt: skip
    """One forward of a tree behind prompts of different lengths."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    source = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    takes = {} if model.config.model_type in ("bloom", "mpt") else {"position_ids": positions}
    model(input_ids=ids, attention_mask=mask, **{CACHE: source}, use_cache=True, **takes)
    cache = TreeCache.pack(source, mask, width + 64, "cpu")
    last = torch.full((len(prompts),), 1000)
    forward = TreeForward(model, cache, last, probe_inputs=probe_inputs, wants_hidden=wants_hidden)
    return forward(tokens, tree, pruning=pruning, probes=probes), cache


def setting(seed: int, rows: int) -> tuple[list[list[int]], Tensor, Tensor]:
    """Prompts, tokens on the tree's nodes, and nodes that are wanted."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, 12), generator=generator).tolist()
    prompts = [row[: 12 - 3 * index] for index, row in enumerate(ids)]
    tokens = torch.randint(3, VOCAB, (rows, len(TREE)), generator=generator)
    wanted = torch.rand(rows, len(TREE), generator=generator) < 0.6
    return prompts, tokens, wanted


MODELS = [(name, None) for name in ARCHITECTURES] + [("llama", "eager"), ("gemma3", "eager")]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("architecture", "implementation"), MODELS)
@torch.no_grad()
def test_survivors_come_out_as_without_pruning(
    tiny: Callable[..., PreTrainedModel], architecture: str, implementation: str | None, rows: int
) -> None:
    """And every layer's cache holds the same at the slots of the survivors."""
    model = tiny(architecture, implementation)
    prompts, tokens, wanted = setting(7, rows)
    tree = TREE.batch(rows)
    whole, cache = run(model, tree, tokens, prompts, None)
    for layer in range(1, num_layers(model)):
        pruned, other = run(model, tree, tokens, prompts, Keep(layer, wanted))
        left = pruned.survivors
        assert left is not None and left.nodes.shape[1] < len(TREE)
        assert pruned.logits.shape[1] == left.nodes.shape[1]
        for row in range(rows):
            kept = left.host_nodes[row][: left.counts[row] + 1]
            got, want = pruned.logits[row, : len(kept)], whole.logits[row, kept]
            # Sums of floats in another order; a wrong mask or position gives errors near 1.
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            start = len(prompts[row])
            slots = [start + node for node in kept]
            for one, two in zip(cache.layers, other.layers):
                for name in ("keys", "values"):
                    torch.testing.assert_close(
                        getattr(two, name)[row, :, slots], getattr(one, name)[row, :, slots],
                        rtol=1e-4, atol=1e-4,
                    )  # fmt: skip
        # Shallow layers hold every node, deeper ones nothing of those that went. (The slots behind
        # the other rows' shorter prompts are not empty to begin with.)
        gone = [len(prompts[0]) + n for n in range(len(TREE)) if n not in left.host_nodes[0]]
        for index, one in enumerate(other.layers):
            states = one.keys[0, :, gone]
            assert bool(states.abs().sum() > 0) == (index < layer)


@torch.no_grad()
def test_flex_attention_narrows_its_block_mask(tiny: Callable[..., PreTrainedModel]) -> None:
    prompts, tokens, wanted = setting(3, 1)
    tree = TREE.batch(1)
    whole, _ = run(tiny("llama"), tree, tokens, prompts, Keep(1, wanted))
    model = tiny("llama", "flex_attention")
    with torch.compiler.set_stance("force_eager"):  # Transformers compiles it, which takes long
        pruned, _ = run(model, tree, tokens, prompts, Keep(1, wanted))
    torch.testing.assert_close(pruned.logits, whole.logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_hidden_states_are_those_of_the_survivors(tiny: Callable[..., PreTrainedModel]) -> None:
    model = tiny("llama")
    prompts, tokens, wanted = setting(1, 2)
    keep = Keep(2, wanted)
    pruned, _ = run(model, TREE.batch(2), tokens, prompts, keep, wants_hidden=True)
    assert pruned.node_hidden is not None and keep.hidden is not None
    torch.testing.assert_close(model.lm_head(pruned.node_hidden), pruned.logits)
    assert keep.hidden.shape == (2, len(TREE), 32)


@pytest.mark.parametrize("exits", [1, 2])
@pytest.mark.parametrize("sizes", ["all", "some"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
@torch.no_grad()
def test_probes_under_survivors(
    tiny: Callable[..., PreTrainedModel], architecture: str, sizes: str, exits: int
) -> None:
    model = tiny(architecture)
    prompts, tokens, wanted = setting(5, 3)
    wanted[:, -1] = False
    tree, group = TREE.batch(3), ProbeGroup.causal(2)
    held = [[(n + row) % 3 for n in range(len(TREE))] for row in range(3)]
    probes = hang(group, tree, None if sizes == "all" else held)
    inputs = ProbeInputs(
        torch.randn(2, 32, generator=torch.Generator().manual_seed(1)), exits=exits
    )
    given: Any = {"probes": probes, "probe_inputs": inputs, "wants_hidden": True}
    whole, _ = run(model, tree, tokens, prompts, None, **given)
    pruned, _ = run(model, tree, tokens, prompts, Keep(1, wanted), **given)
    left = pruned.survivors
    assert left is not None and left.probes is not None
    assert left.probes.num_probes < probes.num_probes
    for row in range(3):
        for place, node in enumerate(left.host_nodes[row][: left.counts[row] + 1]):
            size = probes.sizes[row][node]
            assert left.probes.sizes[row][place] == size
            at = [torch.full((3,), index) for index in (node, place)]
            old, new = probes.under(at[0])[row, :size], left.probes.under(at[1])[row, :size]
            torch.testing.assert_close(
                pruned.probe_hidden[row, new], whole.probe_hidden[row, old], rtol=1e-4, atol=1e-4
            )
            torch.testing.assert_close(
                pruned.node_hidden[row, place], whole.node_hidden[row, node], rtol=1e-4, atol=1e-4
            )


@torch.no_grad()
def test_nothing_is_pruned_where_all_are_wanted(tiny: Callable[..., PreTrainedModel]) -> None:
    model = tiny("llama")
    prompts, tokens, wanted = setting(1, 2)
    everything = Keep(1, torch.ones_like(wanted))
    output, _ = run(model, TREE.batch(2), tokens, prompts, everything)
    assert output.survivors is None and output.logits.shape[1] == len(TREE)


def test_a_layer_that_is_not_there(tiny: Callable[..., PreTrainedModel]) -> None:
    for layer in (0, 3):
        message = rf"layer={layer}: the model has 3 layers, so .* 1 to 2"
        with pytest.raises(ValueError, match=message):
            early_pruning(tiny("llama"), Changes(), layer, lambda hidden: None)


@torch.no_grad()
def test_compiled_layers_run_uncompiled(fresh: Callable[..., PreTrainedModel]) -> None:
    model, ids = fresh("llama"), prompt(6)
    keep = torch.tensor([[0, 1, 5]])
    with added(early_pruning, model, 1, lambda hidden: keep):
        expected = model(ids, use_cache=False).logits
    for layer in model.model.layers:
        layer.compile(backend="eager")
    with added(early_pruning, model, 1, lambda hidden: keep):
        assert torch.equal(model(ids, use_cache=False).logits, expected)


@torch.no_grad()
def test_forwards_outside_are_as_before_and_a_second_use_adds_nothing(
    fresh: Callable[..., PreTrainedModel],
) -> None:
    model, (prompts, tokens, wanted) = fresh("llama"), setting(1, 2)
    ids, left = prompt(9), []
    plain = model(ids).logits
    for fails in (False, False, True):
        keep = Keep(1, wanted)
        if fails:
            keep.likely = lambda *_: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            run(model, TREE.batch(2), tokens, prompts, keep)
        assert torch.equal(model(ids).logits, plain)
        left.append(fingerprint(model))
    assert left == left[:1] * 3


@torch.no_grad()
def test_layer_input(fresh: Callable[..., PreTrainedModel]) -> None:
    model = fresh("llama")  # transformers leaves its hooks for hidden states behind
    ids = torch.tensor([[5, 6, 7]])
    with added(layer_input, model, 2) as seen:
        hidden = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(seen[0], hidden[2])
    model(ids + 1)
    assert torch.equal(seen[0], hidden[2]), "only forwards with the changes are looked at"


# -- the trees that are left -----------------------------------------------------------------


def naive_survivors(
    trees: list[TokenTree], wanted: list[list[bool]], log_p: Tensor
) -> list[list[int]]:
    """Each row's nodes: in all as many as are likely, the likely ones first."""
    likely: list[list[int]] = []
    for tree, marks in zip(trees, wanted):
        likely.append([0])
        for node, parent in enumerate(tree.parents[1:], 1):
            if marks[node] and parent in likely[-1]:
                likely[-1].append(node)
    room = 1
    while sum(min(room, len(tree)) for tree in trees) < sum(map(len, likely)):
        room += 1
    return [
        sorted(
            sorted(range(len(tree)), key=lambda n: (n not in nodes, -float(log_p[row, n])))[:room]
        )
        for row, (tree, nodes) in enumerate(zip(trees, likely))
    ]


def check(trees: list[TokenTree], wanted: Tensor, log_p: Tensor) -> Survivors | None:
    """The survivors, and that they are what the definition says."""
    batch = TreeBatch.stack(trees)
    left = survive(batch, connected(batch, wanted.clone()), log_p)
    expected = naive_survivors(trees, wanted.tolist(), log_p)
    if left is None:
        assert max(map(len, expected)) == batch.num_nodes
        return None
    assert left.tree.num_nodes == max(map(len, expected)), "no row is padded for another"
    for row, (tree, nodes) in enumerate(zip(trees, expected)):
        count = len(nodes)
        assert left.host_nodes[row][:count] == nodes and left.counts[row] == count - 1
        assert left.nodes[row].tolist() == left.host_nodes[row]
        padding = [False] * (left.tree.num_nodes - count)
        assert left.tree.valid[row].tolist() == [True] * count + padding
        smaller = TokenTree(
            tuple(nodes.index(tree.parents[n]) if n else -1 for n in nodes),
            tuple(tree.ranks[n] for n in nodes),
        ).batch()
        for name in ("parents", "depths"):
            assert torch.equal(getattr(left.tree, name)[row, :count], getattr(smaller, name)[0])
        assert torch.equal(left.tree.ancestors[row, :count, :count], smaller.ancestors[0])
    return left


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_trees_that_are_left(seed: int, rows: int) -> None:
    _, _, wanted = setting(seed, rows)
    wanted[:, -1] = False
    assert check([TREE] * rows, wanted, path_log_p(TREE.batch(rows), seed)) is not None


def test_rows_keep_as_many_as_are_likely_on_average() -> None:
    wanted = torch.zeros(2, len(TREE), dtype=torch.bool)
    wanted[0] = True
    left = check([TREE, TREE], wanted, path_log_p(TREE.batch(2)))
    assert left is not None and left.counts == [len(TREE) // 2] * 2  # 10 and 1 of 10 nodes
    whole = torch.ones_like(wanted)
    assert check([TREE, TREE], whole, path_log_p(TREE.batch(2))) is None


def test_rows_with_less_than_others() -> None:
    """A chain, a row that drafts nothing, and one whose candidates are all unlikely."""
    trees = [TREE, TokenTree.chain(2), TokenTree.chain(0), TREE]
    wanted = torch.ones(4, len(TREE), dtype=torch.bool)
    wanted[3] = False
    left = check(trees, wanted, path_log_p(TreeBatch.stack(trees)))
    # Of 10 + 3 + 1 + 1 likely nodes the chain and the third row hold 4, the others 6 each.
    assert left is not None and left.counts == [5, 2, 0, 5]
    nothing = check([TokenTree.chain(1)] * 2, torch.zeros_like(wanted[:2, :2]), torch.zeros(2, 2))
    assert nothing is not None and nothing.counts == [0, 0]


def test_impossible_and_certain_tokens_keep_the_tree_connected() -> None:
    chain = [TokenTree.chain(4)] * 2
    wanted = torch.ones(2, 5, dtype=torch.bool)
    wanted[0, 1:] = False
    for value in (-torch.inf, 0.0):
        log_p = torch.full((2, 5), value)
        log_p[:, 0] = 0.0
        left = check(chain, wanted, log_p)
        assert left is not None and left.host_nodes == [[0, 1, 2]] * 2


def test_inner_nodes() -> None:
    chain = TokenTree.chain(2)
    inner, place = TreeBatch.stack([TREE, chain]).inner
    assert inner.tolist() == [[0, 1, 2, 3, 5, 7], [0, 1, 0, 0, 0, 0]]
    for row, tree in enumerate((TREE, chain)):
        for node in range(1, len(tree)):
            assert inner[row, place[row, node]] == tree.parents[node]
