"""Probes of training and of decoding are the same: masks, positions, learned states in front.

The oracle runs one group at a time behind its own prefix, without our masks and caches: the learned
states stand in front of a stock cache, and a plain causal forward follows.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from architectures import build
from conftest import Tiny, prompt
from covering import covering
from naive_cache import pack
from recurrent_models import CONFIGS, shared_recurrent
from transformers import DynamicCache, PreTrainedModel

from hf_spec.core.shapes import ProbeGroup
from hf_spec.core.tree import Tree
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.modeling_patches.support import kv_shape
from hf_spec.target.sequences import probe_sequences
from hf_spec.target.target import ProbeInputs, Target

#: Everything that moves a mask or a position: windows, hybrids, learned positions.
ARCHITECTURES = ["llama", "mistral", "gemma3", "gpt2", "opt"]
GROUP = ProbeGroup.causal(3)
#: Models with recurrent layers.
RECURRENT = sorted(CONFIGS)
#: Rounding of fp32 under another order of reductions, for states of size about 10.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def learned(model: PreTrainedModel, slots: int = 0) -> ProbeInputs:
    generator = torch.Generator().manual_seed(0)
    hidden = model.get_input_embeddings().weight.shape[1]
    embeddings = torch.randn(len(GROUP), hidden, generator=generator)
    if not slots:
        return ProbeInputs(embeddings)
    layers, heads, dim = kv_shape(model)
    states = torch.randn(layers, 2, heads, slots, dim, generator=generator)
    return ProbeInputs(embeddings, [(keys, values) for keys, values in states])


def decoded(
    model: Any, ids: torch.Tensor, inputs: ProbeInputs, group: ProbeGroup = GROUP
) -> torch.Tensor:
    """(group, hidden) of a step whose root is the last of ``ids`` (seq,)."""
    source = DynamicCache()
    model(input_ids=ids[None, :-1], **{CACHE: source}, use_cache=True)
    cache = pack(source, None, len(ids) + 8)
    target = Target(model, cache, torch.tensor([1000]), probe_inputs=inputs)
    return target(Tree.roots(ids[-1:]).attach_probes(group)).hidden[0, 1:]


#: Kinds that share positions, and slots that each of them sees.
KINDS = ProbeGroup((1, 1, 2), ((1, 1, 0), (1, 1, 0), (1, 0, 1)))
SEEN = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 0, 0, 1], [0, 0, 1, 0, 0]]).bool()


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "slots", "group", "exits"),
    [
        (architecture, *case)
        for architecture in ARCHITECTURES
        for case in ((0, GROUP, 1), (5, GROUP, 1), (5, KINDS, 2))
    ],
)
def test_training_runs_what_decoding_runs(
    tiny: Tiny, architecture: str, slots: int, group: ProbeGroup,
    exits: int,
) -> None:  # fmt: skip
    """Also kinds that see slots of their own, and that leave the model by several exits."""
    model, seen = tiny(architecture), SEEN if group is KINDS else None
    inputs = replace(learned(model, slots), front_seen=seen, exits=exits)
    ids = prompt(14, 2)
    padded = torch.cat([torch.zeros(2, 2, dtype=torch.long), ids, ids[:, :1]], dim=1)
    mask = torch.tensor([[0, 0] + [1] * 14 + [0]] * 2)
    anchors = torch.tensor([[3, 9, 13], [2, 6, 11]])

    def run(inputs: ProbeInputs) -> torch.Tensor:
        return probe_sequences(model, padded, mask, anchors + 2, group, inputs).probe_hidden

    hidden = run(inputs)
    for row in range(2):
        for column, anchor in enumerate(anchors[row].tolist()):
            alone = decoded(model, ids[row, : anchor + 1], inputs, group)
            torch.testing.assert_close(hidden[row, column], alone, **CLOSE)
    if seen is not None:
        assert not torch.allclose(hidden, run(replace(inputs, front_seen=None)), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["gemma3n_text", "gemma4_text"])
def test_inputs_of_every_layer(architecture: str) -> None:
    """Models that look them up by token ids, which probes have none of."""
    model = build(architecture)
    inputs = learned(model)
    ids, anchors = prompt(14), torch.tensor([[3, 9, 13]])
    runs = [probe_sequences(model, ids, None, anchors, GROUP, inputs, fixed) for fixed in (1, 0)]
    for column, anchor in enumerate(anchors[0].tolist()):
        alone = decoded(model, ids[0, : anchor + 1], inputs)
        for run in runs:
            torch.testing.assert_close(run.probe_hidden[0, column], alone, **CLOSE)


@pytest.mark.parametrize(
    ("kind", "frozen"),
    covering(product(RECURRENT, [True, False]), lambda kind, frozen: [kind, frozen]),
)
def test_recurrent_models(kind: str, frozen: bool) -> None:
    """A causal group is what would follow its anchor: the model's own forward is the oracle."""
    model = shared_recurrent(kind)
    embed, inputs = model.get_input_embeddings(), learned(model)
    embeddings = inputs.embeddings.requires_grad_(True)
    ids, anchors = prompt(10, 2), torch.tensor([[3, 7], [2, 9]])
    padded = torch.cat([torch.zeros(2, 2, dtype=torch.long), ids], dim=1)
    mask = torch.tensor([[0, 0] + [1] * 10] * 2)
    found = probe_sequences(model, padded, mask, anchors + 2, GROUP, inputs, frozen)
    found.probe_hidden.square().sum().backward()
    ours, embeddings.grad = embeddings.grad, None
    total = torch.zeros(())
    for row in range(2):
        for column, anchor in enumerate(anchors[row].tolist()):
            joined = torch.cat([embed(ids[row, : anchor + 1]), embeddings])[None]
            alone = model(inputs_embeds=joined, output_hidden_states=True).hidden_states[-1]
            total = total + alone[0, -len(GROUP) :].square().sum()
            torch.testing.assert_close(
                found.probe_hidden[row, column], alone[0, -len(GROUP) :], **CLOSE
            )
    total.backward()
    torch.testing.assert_close(ours, embeddings.grad, rtol=1e-3, atol=1e-3)
