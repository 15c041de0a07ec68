"""Adapters that change between calls, as in training: each call drafts with what is there."""

import copy
from itertools import cycle
from typing import Any

import pytest
import torch
from adapter_oracle import randomise
from conftest import prompt
from running import drafting

from hf_spec.core.tree import Tree
from hf_spec.methods.registry import methods
from hf_spec.model.target import Target

FIELDS: dict[str, dict[str, Any]] = {
    "layer_skip": {"skip_attention": [1], "skip_mlp": [1], "draft_rank": 4},
    "space": {"markov_rank": 4, "draft_vocab_size": 30},
    "medusa": {"num_heads": 3, "markov_rank": 4, "draft_vocab_size": 30},
    "propd": {"markov_rank": 4}, "ppd": {"markov_rank": 4}, "bita": {"markov_rank": 4},
}  # fmt: skip


def drafts(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tokens of all forwards of a call."""
    seen, forward = [], Target.__call__

    def noting(self: Target, tree: Tree, *args: Any, **kwargs: Any) -> Any:
        seen.append(tree.drafted.tokens.tolist())
        return forward(self, tree, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Target, "__call__", noting)
        model.generate(prompt(), max_new_tokens=12, do_sample=False, **drafting(name))
    return seen


@pytest.mark.parametrize(
    ("name", "optimizer"), [*zip(FIELDS, cycle(["fused", "foreach"])), ("layer_skip", "foreach")]
)
def test_an_optimizer_step_between_calls(
    fresh: Any, name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh()
    torch.manual_seed(0)
    config: Any = methods()[name].adapter_config
    model.add_adapter(config(**FIELDS[name]), "one")
    weights = randomise(model, config.type_name)
    before = drafts(model, name, monkeypatch)
    learned = [x for x in weights.values() if x.is_floating_point()]
    for x in learned:
        x.grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    torch.optim.AdamW(learned, lr=0.3, **{optimizer: True}).step()
    after = drafts(model, name, monkeypatch)
    assert after != before, "the step is large enough to change what is drafted"
    assert after == drafts(copy.deepcopy(model), name, monkeypatch), "nothing old is left"
