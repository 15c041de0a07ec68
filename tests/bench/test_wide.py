"""A widened model says what the small one says, and its adapters draft the same."""

from typing import Any

import pytest
import torch
from adapter_oracle import added
from conftest import prompt
from running import drafting
from scripts import load_script
from tiny_checkpoint import make_model

import hf_spec
from hf_spec.tools.demo import StepStreamer

IDS = prompt(9, seed=0)
CONFIGS = {
    "medusa": hf_spec.MedusaConfig(num_heads=3, num_layers=1, markov_rank=4),
    "eagle3": hf_spec.Eagle3Config(layers=[0, 1], norm_before_fc=True),
    "ppd": hf_spec.PPDConfig(num_prompt_tokens=3, markov_rank=4),
    "bita": hf_spec.BitaConfig(num_mask_tokens=3),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_text_and_drafts(name: str) -> None:
    wide: Any = load_script("wide")
    small = make_model()
    with torch.no_grad():
        for norm in (small.model.norm, small.model.layers[0].input_layernorm):
            norm.weight.uniform_(0.5, 2.0)
    added(small, CONFIGS[name], name, std=0.3)
    shape = wide.Shape(84, 4, 12, 3, 200)
    large = wide.widened(small, shape, torch.device("cpu"), torch.float32)
    wide.widen_adapter(name, small, large)
    with torch.no_grad():
        logits = [model(IDS).logits for model in (small, large)]
    # Sums of the same numbers in another order.
    assert torch.allclose(*logits, atol=2e-5)
    assert large.num_parameters() > 5 * small.num_parameters()
    found = []
    for model in (small, large):
        seen = StepStreamer()
        output = model.generate(
            IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=16, do_sample=False,
            eos_token_id=None, pad_token_id=0, streamer=seen, **drafting(name, lookup=False),
        )  # fmt: skip
        trees = [(step.tree, step.tokens, step.accepted) for step in seen.trees.values()]
        found.append((output.tolist(), trees))
    assert found[0] == found[1]
    assert any(len(tokens) > 3 for _, tokens, _ in found[0][1])


@pytest.mark.parametrize("shape", [(16, 4, 12, 3, 200), (84, 4, 12, 12, 200)], ids=str)
def test_what_does_not_fit(shape: tuple[int, ...]) -> None:
    wide: Any = load_script("wide")
    with pytest.raises(ValueError, match="does not fit into a Llama"):
        wide.widened(make_model(), wide.Shape(*shape), torch.device("cpu"), torch.float32)
