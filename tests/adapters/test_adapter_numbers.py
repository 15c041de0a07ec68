"""Numbers of an adapter: finite ones of any size leave the output as it is."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from conftest import VOCAB, prompt
from covering import covering
from running import drafting

import hf_spec
from hf_spec.adapters.loading import find_active
from hf_spec.methods.registry import methods
from hf_spec.predict.table import distribution

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}

#: Strategy, its config's fields, and options.
ADAPTERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bita": ("bita", {}, {}),
    "bita Markov head": ("bita", {"markov_rank": 2}, {}),
    "bita efficient": ("bita", {}, {"tree": "efficient"}),
    "bita shallow": ("bita", {"prompt_depth": "shallow"}, {}),
    "ppd": ("ppd", {"num_prefix_tokens": 2, "num_ept": 2}, {}),
    "ppd head": ("ppd", {"head": "residual"}, {"tree": "static"}),
    "space": ("space", {"update": "none"}, {}),
    "space gated": ("space", {"markov_rank": 2}, {"tree": "chain"}),
    "medusa": ("medusa", {"projection": "own"}, {"tree": "sparse"}),
    "layer_skip": (
        "layer_skip", {"skip_attention": [1], "draft_rank": 2},
        {"draft_exit": "fixed", "num_draft_tokens": 3},
    ),
    "propd": ("propd", {"markov_rank": 2}, {"prune": True}),
    "propd online": ("propd", {}, {"tree": "online", "prune": True}),
}  # fmt: skip


def spoilt(model: Any, name: str, change: Callable[[torch.Tensor], Any]) -> tuple[Any, Any]:
    """The model with an adapter whose tensors have been changed, and what it drafts with."""
    strategy, fields, options = ADAPTERS[name]
    config: Any = methods()[strategy].adapter_config
    model.add_adapter(config(**fields))
    with torch.no_grad():
        for weight in find_active(model, config.type_name).tensors().values():
            if weight.is_floating_point():
                change(weight)
    return model.eval(), drafting(strategy, **options)


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
def test_numbers_as_large_as_there_are_and_none(fresh, name, attention, dtype, change):
    """What layers make of them is infinite or NaN, and stays where it is: drafts suffer alone."""
    plain, ids = fresh("llama", attention, dtype), prompt(batch=2)
    wanted = plain.generate(ids, **GREEDY)
    model, spec = spoilt(plain, name, CHANGES[change])
    assert torch.equal(model.generate(ids, **GREEDY, **spec), wanted)
    assert change != "largest" or hf_spec.last_stats(model).num_drafted_tokens > 0


def test_distribution():
    scores = torch.tensor([[0.0, 0.0], [1.0, -torch.inf], [torch.nan, 1.0], [torch.inf, 1.0]])
    assert distribution(scores).tolist() == [[0.5, 0.5], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bita", "medusa", "propd"])
def test_a_candidate_that_the_model_cannot_read(fresh, name, attention):
    """Rows of the embeddings that no text uses may hold anything; a draft may name them."""
    model, ids = fresh("llama", attention), prompt(batch=2)
    wanted = model.generate(ids, **GREEDY)
    used = set(wanted.flatten().tolist())
    unused = [token for token in range(VOCAB) if token not in used]
    with torch.no_grad():
        model.get_input_embeddings().weight[unused] = torch.nan
    # Random heads and probes name any tokens.
    generator = torch.Generator().manual_seed(0)
    _, spec = spoilt(model, name, lambda weight: weight.normal_(generator=generator))
    assert torch.equal(model.generate(ids, **GREEDY, **spec), wanted)
    assert hf_spec.last_stats(model).num_drafted_tokens > 0
