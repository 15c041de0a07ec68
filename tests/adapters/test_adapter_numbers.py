"""Numbers of an adapter: finite ones of any size leave the output as it is."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from conftest import VOCAB, Tiny, prompt
from covering import covering
from running import drafting

import hf_spec
from hf_spec.adapters.active import find_active
from hf_spec.drafting.predictions import distribution

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}

#: Strategy, class of its config, the config's fields, and options.
ADAPTERS: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "bita": ("bita", hf_spec.BitaConfig, {}, {}),
    "bita Markov head": ("bita", hf_spec.BitaConfig, {"markov_rank": 2}, {}),
    "bita efficient": ("bita", hf_spec.BitaConfig, {}, {"tree": "efficient"}),
    "bita shallow": ("bita", hf_spec.BitaConfig, {"prompt_depth": "shallow"}, {}),
    "ppd": ("ppd", hf_spec.PPDConfig, {"num_prefix_tokens": 2, "num_ept": 2}, {}),
    "ppd head": ("ppd", hf_spec.PPDConfig, {"head": "residual"}, {"tree": "static"}),
    "space": ("space", hf_spec.SpaceConfig, {"update": "none"}, {}),
    "space gated": ("space", hf_spec.SpaceConfig, {"markov_rank": 2}, {"tree": "chain"}),
    "medusa": ("medusa", hf_spec.MedusaConfig, {"projection": "own"}, {"tree": "sparse"}),
    "layer_skip": (
        "layer_skip",
        hf_spec.LayerSkipConfig,
        {"skip_attention": [1], "draft_rank": 2},
        {"draft_exit": "fixed", "max_draft": 3},
    ),
    "propd": ("propd", hf_spec.ProPDConfig, {"markov_rank": 2}, {"prune": True}),
    "propd online": ("propd", hf_spec.ProPDConfig, {}, {"tree": "online", "prune": True}),
}


def spoilt(model: Any, config: Any, change: Callable[[torch.Tensor], Any], only: str = "") -> Any:
    """The model with an adapter whose tensors have been changed; returns the model."""
    model.add_adapter(config)
    weights = find_active(model, config.type_name).tensors()
    changed = [weight for name, weight in weights.items() if only in name]
    assert changed
    with torch.no_grad():
        for weight in changed:
            change(weight)
    return model.eval()


def largest(weight: torch.Tensor) -> None:
    """The largest numbers that the dtype has, of either sign."""
    signs = torch.randint(0, 2, weight.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    weight.copy_(signs * torch.finfo(weight.dtype).max)


def first_is(value: float) -> Callable[[torch.Tensor], Any]:
    """A number that no file may hold: loading refuses it."""
    return lambda weight: weight.view(-1)[0].fill_(value)


CHANGES = {
    "largest": largest, "nan": first_is(torch.nan), "inf": first_is(torch.inf),
    "-inf": first_is(-torch.inf),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "attention", "dtype", "change"),
    covering(
        product(ADAPTERS, ["sdpa", "eager"], [torch.float32, torch.float16], CHANGES),
        lambda name, attention, dtype, change: [
            (name, change == "largest"),
            (ADAPTERS[name][0], dtype, change == "largest"),
            (attention, dtype, change),
        ],
    ),
    ids=str,
)
def test_numbers_as_large_as_there_are_and_none(
    fresh: Tiny, name: str, attention: str, dtype: torch.dtype, change: str
) -> None:
    """What layers make of them is infinite or NaN, and stays where it is: drafts suffer alone."""
    strategy, config_class, fields, options = ADAPTERS[name]
    plain = fresh("llama", attention, dtype)
    ids = prompt(batch=2)
    wanted = plain.generate(ids, **GREEDY)
    model = spoilt(plain, config_class(**fields), CHANGES[change])
    found = model.generate(ids, **GREEDY, **drafting(strategy, **options))
    assert torch.equal(found, wanted)
    assert change != "largest" or hf_spec.last_stats(model).num_drafted_tokens > 0


def test_distribution() -> None:
    scores = torch.tensor([[0.0, 0.0], [1.0, -torch.inf], [torch.nan, 1.0], [torch.inf, 1.0]])
    assert distribution(scores).tolist() == [[0.5, 0.5], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bita", "medusa", "propd"])
def test_a_candidate_that_the_model_cannot_read(fresh: Tiny, name: str, attention: str) -> None:
    """Rows of the embeddings that no text uses may hold anything; a draft may name them."""
    strategy, config_class, fields, options = ADAPTERS[name]
    model = fresh("llama", attention)
    ids = prompt(batch=2)
    wanted = model.generate(ids, **GREEDY)
    used = set(wanted.flatten().tolist())
    unused = [token for token in range(VOCAB) if token not in used]
    with torch.no_grad():
        model.get_input_embeddings().weight[unused] = torch.nan
    # Random heads and probes name any tokens.
    generator = torch.Generator().manual_seed(0)
    spoilt(model, config_class(**fields), lambda weight: weight.normal_(generator=generator))
    found = model.generate(ids, **GREEDY, **drafting(strategy, **options))
    assert torch.equal(found, wanted)
    assert hf_spec.last_stats(model).num_drafted_tokens > 0
