"""Adapters that learn from what their model generates, beside a training of the model itself."""

import copy
from pathlib import Path
from typing import Any

import adapter_oracle
import pytest
import torch
from conftest import Tiny, prompt
from method_variants import VARIANTS, Variants
from running import drafting

import hf_spec
from hf_spec.adapters.layer import CONTAINER
from hf_spec.adapters.loading import find_active, save_unattached
from hf_spec.adapters.tuner import random_anchors
from hf_spec.integrations import OnlineTraining, Text, batch_of
from hf_spec.methods.registry import methods
from hf_spec.target.sequences import IGNORED
from hf_spec.threads import forget

#: Methods whose adapters gradients train.
TRAINED = [name for name, method in methods().items() if method.objective]
TEXTS = [Text(ids, 4) for ids in prompt(14, 3).tolist()]


def training_of(model: Any, name: str, place: str | None = None, **more: Any) -> OnlineTraining:
    method = methods()[name]
    assert method.objective is not None
    return OnlineTraining(
        model, lambda: method.active_adapter(model, place), method.objective, 1e-2, 1e-2, 8, **more
    )


def with_adapter(model: Any, name: str, folder: Path) -> Any:
    """The model with an adapter that was loaded for drafting; it is trained itself."""
    fields = VARIANTS.get(name, Variants({})).trained
    adapter_oracle.added(model, methods()[name].adapter_config(**fields), std=0.05)
    save_unattached(find_active(model, methods()[name].peft_type), folder)
    model.delete_adapter("default")
    model.load_adapter(str(folder))
    model.requires_grad_(True)
    getattr(model, CONTAINER).requires_grad_(False)
    return model.train()


@pytest.mark.parametrize("name", TRAINED)
def test_it_learns_and_the_model_stays(fresh: Tiny, tmp_path: Path, name: str) -> None:
    """In its weights, gradients, modes and random numbers, as in those of who trains it."""
    model = with_adapter(fresh("llama"), name, tmp_path)
    adapter = find_active(model, methods()[name].peft_type)
    drafts = dict(adapter.named_parameters())
    own = {key: one for key, one in model.named_parameters() if CONTAINER not in key}
    for one in own.values():
        one.grad = torch.ones_like(one)
    before = {key: (one.clone(), one.grad.clone()) for key, one in own.items()}
    places = {key: (one.data_ptr(), one.clone()) for key, one in drafts.items()}
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.random.get_rng_state()

    training = training_of(model, name)
    losses = [training.learn(TEXTS) for _ in range(12)]

    assert min(losses[6:]) < losses[0]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    for key, one in own.items():
        assert one.requires_grad
        assert torch.equal(one, before[key][0]) and torch.equal(one.grad, before[key][1])
    assert {key: one.data_ptr() for key, one in drafts.items()} == {
        key: place for key, (place, _) in places.items()
    }
    assert not all(torch.equal(one, places[key][1]) for key, one in drafts.items())
    assert not any(one.requires_grad or one.grad is not None for one in drafts.values())


@pytest.mark.parametrize("name", TRAINED)
def test_it_drafts_with_what_it_has_learned(fresh: Tiny, tmp_path: Path, name: str) -> None:
    """As the same adapter, read from a file: tables made of its weights are made anew."""
    model = with_adapter(fresh("llama"), name, tmp_path / "before").eval()
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(prompt(9), **options)

    def drafted(other: Any) -> Any:
        forget(other)
        assert torch.equal(other.generate(prompt(9), **options, **drafting(name)), expected)
        stats = hf_spec.last_stats(other)
        assert stats is not None
        return stats.accepted_histogram, stats.num_steps

    drafted(model)  # makes tables
    training = training_of(model, name)
    for _ in range(12):
        training.learn([Text(expected[0].tolist(), 9)])
    save_unattached(training.adapter, tmp_path / "after")
    again = copy.deepcopy(fresh("llama"))
    again.load_adapter(str(tmp_path / "after"))
    assert drafted(model) == drafted(again)


def test_an_adapter_of_16_bits(fresh: Tiny, tmp_path: Path) -> None:
    """Learns in float32, where steps smaller than a rounding add up."""
    model = with_adapter(fresh("llama").bfloat16(), "medusa", tmp_path)
    training = training_of(model, "medusa")
    training.learn(TEXTS)
    for (name, own), one in zip(
        training.adapter.named_parameters(), find_active(model, "MEDUSA").parameters(), strict=True
    ):
        assert (own.dtype, one.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(own.bfloat16(), one), name


def test_a_text_that_gives_no_numbers(fresh: Tiny, tmp_path: Path) -> None:
    """Leaves the adapter as it is."""
    model = with_adapter(fresh("llama"), "medusa", tmp_path)
    training = training_of(model, "medusa")
    before = {key: one.clone() for key, one in training.adapter.named_parameters()}
    kept = model.model.norm.weight.detach().clone()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    training.learn(TEXTS)
    assert all(torch.equal(one, before[key]) for key, one in training.adapter.named_parameters())
    with torch.no_grad():
        model.model.norm.weight.copy_(kept)
    training.learn(TEXTS)
    assert not all(
        torch.equal(one, before[key]) for key, one in training.adapter.named_parameters()
    )


def test_parts_keep_the_ratio_of_their_rates(fresh: Tiny, tmp_path: Path) -> None:
    """Of Markov heads, say, to that of the rest."""
    model = with_adapter(fresh("llama"), "medusa", tmp_path)
    method = methods()["medusa"]
    training = OnlineTraining(
        model, lambda: method.active_adapter(model), method.objective, 1e-3, 2e-3
    )
    own_rate = training.adapter.config.markov_learning_rate
    rates = {
        name: group["lr"]
        for group in training._optimizer.param_groups
        for name, one in training.adapter.named_parameters()
        if any(one is other for other in group["params"])
    }
    assert rates["markov_output"] == pytest.approx(own_rate / 2) and rates["weights"] == 1e-3


def test_batches() -> None:
    """Each text with its own tokens as labels, and anchors before two of them."""
    texts = [Text([5, 6, 7, 8, 9], 2), Text([4, 4, 3, 2, 1, 9, 8], 5), Text([3, 1, 2], 1)]
    batch = batch_of(texts, 2, torch.Generator().manual_seed(0))
    assert batch.attention_mask is not None
    for row, text in enumerate(texts):
        size = len(text.tokens)
        assert batch.input_ids[row].tolist() == [*text.tokens, *[0] * (7 - size)]
        assert batch.attention_mask[row].tolist() == [1] * size + [0] * (7 - size)
        wanted = [token if text.prompt <= at else IGNORED for at, token in enumerate(text.tokens)]
        assert batch.labels[row].tolist() == wanted + [IGNORED] * (7 - size)
        fits = {at for at in range(size - 2) if at + 1 >= text.prompt}
        found = set(batch.anchors[row].tolist()) - {6}
        assert found <= fits and len(found) == min(len(fits), 2)


def test_anchors_by_a_generator_of_their_own() -> None:
    labels = torch.arange(3, 23)[None]
    state = torch.random.get_rng_state()
    generator = torch.Generator().manual_seed(3)
    first, second = (random_anchors(labels, 4, generator) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(random_anchors(labels, 4, torch.Generator().manual_seed(3)), first)
    assert torch.equal(torch.random.get_rng_state(), state)
