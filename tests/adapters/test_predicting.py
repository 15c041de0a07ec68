"""Adapters with a Markov head, of every method that may have one."""

from itertools import product
from typing import Any

import pytest
import torch
from adapter_oracle import added
from conftest import prompt, ragged
from covering import covering
from running import drafting

import hf_spec
from hf_spec.adapters.config import MARKOV_HEAD, VOCABULARY
from hf_spec.adapters.loading import find_active
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.methods.registry import methods

#: Every method whose adapters may have a Markov head.
NAMES = [
    name for name, method in methods().items() if hasattr(method.adapter_config, "fresh_shared")
]


def config_of(name: str, **fields: Any) -> Any:
    config_class: Any = methods()[name].adapter_config
    return config_class(**fields)


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_markov_head_changes_nothing(fresh, name):
    """It adds zero, and draft tokens are those of the same adapter without."""
    found = []
    for rank in (0, 3):
        model, config = fresh("llama_tied"), config_of(name, markov_rank=rank)
        torch.manual_seed(0)
        model.add_adapter(config)
        out = model.generate(**ragged(), max_new_tokens=20, do_sample=False, **drafting(name))
        accepted = hf_spec.last_stats(model).accepted_histogram
        found.append((out.tolist(), accepted, find_active(model, config.type_name).tensors()))
    (*plain, without), (*ours, having) = found
    assert ours == plain
    assert having.keys() - without.keys() == {*MARKOV_HEAD} and without.keys() <= having.keys()
    embedding, output, state = (having[part] for part in MARKOV_HEAD)
    count = 1 + {"bita": 3, "medusa": 4, "ppd": 3, "propd": 4, "space": 4}[name]
    assert embedding.shape == state.shape == (count, 3, 32) and output.shape == (count, 32, 3)
    assert not output.any() and embedding.any() and state.any()


@pytest.mark.parametrize(
    ("architecture", "name", "size"),
    covering(product(["llama", "cohere2", "gemma2", "gpt2"], NAMES, [0, 20])),
)
def test_decoding_predicts_what_training_judges(fresh, architecture, name, size):
    """Also where the model scales or caps its logits: chances and biases depend on their size.

    With a vocabulary of its own an adapter predicts the same, but for tokens that it has not.
    """
    model, method = fresh(architecture), methods()[name]
    if architecture == "cohere2":
        model.config.logit_scale = model.logit_scale = 0.1
    if architecture == "gemma2":
        model.config.final_logit_softcapping = 2.0
    adapter = added(model, config_of(name, markov_rank=3, draft_vocab_size=size), std=0.3)
    assert (VOCABULARY in adapter.tensors()) == bool(size)
    if size:
        adapter.tensors()[VOCABULARY].copy_(torch.arange(1, 60, 3))
    ids = prompt(12)
    batch = {"input_ids": ids, "labels": ids, "anchors": torch.tensor([[5]])}
    with torch.no_grad():
        judged = method.objective(model, adapter, TrainingBatch(**batch))["logits"][0, 0]
        drafter = method.make_drafter(model, method.parse_options({}))
        (served,) = drafter.predictor.future_logits(ids, torch.tensor([5]))
    if size:
        assert judged.shape[-1] == size, "those of its tokens only"
        everything = torch.full_like(served[0], -torch.inf)
        everything[..., 1:60:3] = judged
        judged = everything
    # fp32 with other reduction orders.
    torch.testing.assert_close(served[0].softmax(-1), judged.softmax(-1), rtol=1e-4, atol=1e-5)
