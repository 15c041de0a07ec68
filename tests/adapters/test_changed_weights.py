"""Adapters that change between calls, as in training: each call drafts with what is there."""

import copy
from itertools import cycle
from typing import Any

import pytest
import torch
from adapter_oracle import added
from conftest import prompt
from running import drafting, proposals

from hf_spec.methods.registry import methods

FIELDS: dict[str, dict[str, Any]] = {
    "layer_skip": {"skip_attention": [1], "skip_mlp": [1], "draft_rank": 4},
    "space": {"markov_rank": 4, "draft_vocab_size": 30},
    "medusa": {"num_heads": 3, "markov_rank": 4, "draft_vocab_size": 30},
    "propd": {"markov_rank": 4}, "ppd": {"markov_rank": 4}, "bita": {"markov_rank": 4},
}  # fmt: skip


def drafts(model: Any, name: str) -> list[Any]:
    """All trees of a call."""
    with proposals(methods()[name].drafter) as seen:
        model.generate(prompt(), max_new_tokens=12, do_sample=False, **drafting(name))
    return [tree.tokens.tolist() for _, tree in seen]


@pytest.mark.parametrize(
    ("name", "optimizer"), [*zip(FIELDS, cycle(["fused", "foreach"])), ("layer_skip", "foreach")]
)
def test_an_optimizer_step_between_calls(fresh, name, optimizer):
    model = fresh()
    torch.manual_seed(0)
    config: Any = methods()[name].adapter_config
    weights = added(model, config(**FIELDS[name])).tensors()
    before = drafts(model, name)
    learned = [x for x in weights.values() if x.is_floating_point()]
    for x in learned:
        x.grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    torch.optim.AdamW(learned, lr=0.3, **{optimizer: True}).step()
    after = drafts(model, name)
    assert after != before, "the step is large enough to change what is drafted"
    assert after == drafts(copy.deepcopy(model), name), "nothing old is left"
