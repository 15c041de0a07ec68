"""``space`` with gated updates, its default: mask tokens are changed, the base's output is not."""

from typing import Any

import pytest
import torch
from adapter_oracle import added, hooked, with_updates
from conftest import Tiny, prompt
from naive_cache import pack, row_of
from torch import Tensor
from transformers import DynamicCache

import hf_spec
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.shapes import ProbeGroup, TokenTree
from hf_spec.core.tree import Tree
from hf_spec.methods.space import mask_tokens
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.target.target import Output, ProbeInputs, Target

TREE = TokenTree.from_paths([[0], [1], [0, 0], [0, 1]])


def gated(model: Any) -> Any:
    """The gated adapter that a model gets, which would change it much."""
    return added(model, hf_spec.SpaceConfig(num_mask_tokens=3), std=0.3)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(prompt(9)).logits


def step(model: Any, inputs: ProbeInputs) -> tuple[Output, TreeCache]:
    """A tree with mask tokens at each node, behind a prompt; its root is then accepted."""
    source = DynamicCache()
    with torch.no_grad():
        model(input_ids=prompt(9), **{CACHE: source}, use_cache=True)
    cache = pack(source, None, 40)
    target = Target(model, cache, torch.tensor([100]), probe_inputs=inputs)
    tree = Tree.of_shapes([TREE]).with_tokens(prompt(5, seed=1))
    with torch.no_grad():
        output = target(tree.attach_probes(ProbeGroup.causal(3)))
    cache.commit([1])
    return output, cache


def masks_of(model: Any, inputs: ProbeInputs) -> Tensor:
    """(1, 15, hidden) of the mask tokens of :func:`step`."""
    return step(model, inputs)[0].hidden[:, 5:]


@pytest.mark.parametrize(
    "architecture", ["llama", "gemma3", "gpt2", "opt", "falcon", "gptj", "mixtral"]
)
def test_rows_of_tokens_are_those_of_the_base(fresh: Tiny, architecture: str) -> None:
    """Bit for bit, in plain forwards and in forwards with mask tokens; theirs are others."""
    model = fresh(architecture)
    base = logits(model)
    inputs = mask_tokens(gated(model))
    assert inputs.update is not None and hooked(model) == 0
    assert torch.equal(logits(model), base)
    plain, plain_cache = step(model, ProbeInputs(inputs.embeddings))
    ours, our_cache = step(model, inputs)
    if architecture == "mixtral":
        # Mask tokens choose other experts, whose products are then of another number of rows.
        torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-5, atol=1e-5)
        return
    assert torch.equal(ours.logits, plain.logits)
    assert (ours.hidden - plain.hidden)[:, 5:].abs().max() > 0.1
    for layer in range(len(our_cache.layers)):
        for one, two in zip(row_of(our_cache, 0, layer), row_of(plain_cache, 0, layer)):
            assert torch.equal(one, two)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_rows_of_mask_tokens_are_those_of_the_updated_model(fresh: Tiny, architecture: str) -> None:
    """They see the base's keys and values of the tokens, and one another as the update makes them.

    The oracle forwards the tokens through the base, then the mask tokens behind each node through
    a model whose weights hold the update.
    """
    model = fresh(architecture)
    adapter = gated(model)
    inputs = mask_tokens(adapter)
    ours = masks_of(model, inputs)
    updated = with_updates(model, adapter)
    ids, candidates = prompt(9), prompt(5, seed=1)[0]
    for node in range(5):
        path, at = [], node
        while at >= 0:
            path.insert(0, at)
            at = TREE.parents[at]
        with torch.no_grad():
            seen = model(torch.cat([ids, candidates[path][None]], dim=1), use_cache=True)[CACHE]
            positions = torch.arange(3)[None] + 9 + len(path)
            given = {} if architecture == "opt" else {"position_ids": positions}
            out = updated(
                inputs_embeds=inputs.embeddings[None], **{CACHE: seen},
                output_hidden_states=True, **given,
            )  # fmt: skip
        expected = out.hidden_states[-1][0]
        # fp32 with other reduction orders; values up to about 10.
        torch.testing.assert_close(ours[0, 3 * node : 3 * node + 3], expected, rtol=1e-3, atol=1e-3)


def test_experts_are_left_out(fresh: Tiny) -> None:
    """Each sees some of the rows, in an order of the router's."""
    model = fresh("mixtral")
    modules = hf_spec.SpaceConfig().modules(model)
    assert modules and not any("expert" in name for name in modules)
