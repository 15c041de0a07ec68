"""Nodes that are dropped after some layers: the others come out as if nothing had happened."""

from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, VOCAB, Tiny, ragged
from naive_cache import pack, prefilled
from running import added
from torch import Tensor

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.pruning import connected
from hf_spec.core.shapes import ProbeGroup, TokenTree
from hf_spec.core.tree import Tree
from hf_spec.modeling_patches.forwards import early_pruning, layer_input
from hf_spec.modeling_patches.modules import num_layers
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.target.target import Output, ProbeInputs, Target

LENGTHS = (12, 9, 6)
SHAPE = TokenTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 1, 0], [2, 0, 0]])


class Keep:
    """Calls given nodes likely, with all their ancestors."""

    def __init__(self, layer: int, wanted: Tensor):
        self.layer, self.wanted = layer, wanted

    def likely(self, hidden: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
        return connected(tree, self.wanted), -0.1 * tree.depths


def run(
    model: Any, tree: Tree, pruning: Any, probe_inputs: ProbeInputs | None = None
) -> tuple[Output, TreeCache]:
    """One forward of a tree behind prompts of different lengths."""
    given, rows = ragged(LENGTHS[: tree.batch_size]), tree.batch_size
    cache = pack(prefilled(model, **given), given["attention_mask"], 99)
    target = Target(model, cache, torch.full((rows,), 1000), probe_inputs=probe_inputs)
    return target(tree, pruning=pruning), cache


def setting(seed: int, rows: int) -> tuple[Tree, Tensor]:
    """Trees, and nodes that are wanted."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (rows, len(SHAPE)), generator=generator)
    wanted = torch.rand(rows, len(SHAPE), generator=generator) < 0.6
    return Tree.of_shapes([SHAPE] * rows).with_tokens(tokens), wanted


def kept(output: Output) -> list[list[int]]:
    """The nodes of the whole trees that are left in each row; all rows have equally many."""
    slots, valid = output.tree.slots, output.tree.without_probes.valid
    assert slots is not None and valid.all()
    return slots.tolist()


MODELS = [(name, None) for name in ARCHITECTURES] + [("llama", "eager"), ("gemma3", "eager")]


@pytest.mark.parametrize(
    ("architecture", "implementation", "rows"),
    [(*model, 1 if place % 3 == 0 else 3) for place, model in enumerate(MODELS)],
)
@torch.no_grad()
def test_what_is_kept_comes_out_as_without_pruning(
    tiny: Tiny, architecture: str, implementation: str | None, rows: int
) -> None:
    """And every layer's cache holds the same in its slots."""
    model = tiny(architecture, implementation)
    tree, wanted = setting(7, rows)
    whole, cache = run(model, tree, None)
    for layer in range(1, num_layers(model)):
        pruned, other = run(model, tree, Keep(layer, wanted))
        left = kept(pruned)
        assert len(left[0]) < len(SHAPE)
        for row, nodes in enumerate(left):
            # Sums of floats in another order; a wrong mask or position gives errors near 1.
            torch.testing.assert_close(
                pruned.logits[row], whole.logits[row, nodes], rtol=1e-4, atol=1e-4
            )
            slots = [LENGTHS[row] + node for node in nodes]
            for one, two in zip(cache.layers, other.layers):
                for name in ("keys", "values"):
                    torch.testing.assert_close(
                        two.views[name][row, :, slots], one.views[name][row, :, slots],
                        rtol=1e-4, atol=1e-4,
                    )  # fmt: skip
        # Shallow layers hold every node, deeper ones nothing of those that went. (The slots behind
        # the other rows' shorter prompts are not empty to begin with.)
        gone = [LENGTHS[0] + n for n in range(len(SHAPE)) if n not in left[0]]
        for index, one in enumerate(other.layers):
            states = one.views["keys"][0, :, gone]
            assert bool(states.abs().sum() > 0) == (index < layer)


@pytest.mark.parametrize("exits", [1, 2])
@pytest.mark.parametrize("counts", ["all", "some"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
@torch.no_grad()
def test_probes_of_what_is_kept(tiny: Tiny, architecture: str, counts: str, exits: int) -> None:
    model = tiny(architecture)
    bare, wanted = setting(5, 3)
    wanted[:, -1] = False
    sizes = [[(n + row) % 3 for n in range(len(SHAPE))] for row in range(3)]
    tree = bare.attach_probes(ProbeGroup.causal(2), None if counts == "all" else sizes)
    inputs = ProbeInputs(
        torch.randn(2, 32, generator=torch.Generator().manual_seed(1)), exits=exits
    )
    whole, _ = run(model, tree, None, inputs)
    pruned, _ = run(model, tree, Keep(1, wanted), inputs)
    left = pruned.tree
    assert 0 < left.num_probes < tree.num_probes
    for row, nodes in enumerate(kept(pruned)):
        own, was = [], []
        for place, node in enumerate(nodes):
            size = int(tree.probe_counts[row, node])
            assert left.probe_counts[row, place] == size
            own += [place, *left.probes_of(torch.full((3,), place))[row, :size].tolist()]
            was += [node, *tree.probes_of(torch.full((3,), node))[row, :size].tolist()]
        torch.testing.assert_close(
            pruned.hidden[row, own], whole.hidden[row, was], rtol=1e-4, atol=1e-4
        )


def test_a_layer_that_is_not_there(tiny: Tiny) -> None:
    for layer in (0, 3):
        message = rf"layer={layer}: the model has 3 layers, so .* 1 to 2"
        with pytest.raises(ValueError, match=message):
            early_pruning(tiny("llama"), Changes(), layer, lambda hidden: None)


@torch.no_grad()
def test_layer_input(fresh: Tiny) -> None:
    model = fresh("llama")  # transformers leaves its hooks for hidden states behind
    ids = torch.tensor([[5, 6, 7]])
    with added(layer_input, model, 2) as seen:
        hidden = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(seen[0], hidden[2])
    model(ids + 1)
    assert torch.equal(seen[0], hidden[2]), "only forwards with the changes are looked at"
