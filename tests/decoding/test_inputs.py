"""Inputs beside the prompt reach the forwards that get them in plain generation, and no others."""

import copy
from typing import Any

import architectures
import pytest
import torch
from conftest import Tiny, check_same, prompt, ragged
from running import drafting

from hf_spec.modeling_patches.modules import CACHE

Spec = dict[str, Any]

GREEDY = {"max_new_tokens": 12, "do_sample": False}


def test_labels_are_dropped(tiny: Tiny, spec: Spec) -> None:
    """Data collators add them."""
    model, batch = tiny(), ragged()
    for labels in (batch["input_ids"].clone(), batch["input_ids"][:, :4].clone()):
        check_same(model, {**spec, "labels": labels}, **batch, **GREEDY)


def test_a_setting_reaches_every_forward(tiny: Tiny, spec: Spec) -> None:
    model, found = tiny(), []

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        found.append(kwargs.get("num_items_in_batch"))

    with model.register_forward_pre_hook(note, with_kwargs=True):  # which removes it
        model.generate(prompt(), num_items_in_batch=3, **GREEDY, **spec)
    assert len(found) > 1 and set(found) == {3}


@pytest.mark.parametrize("embedded", [False, True])
def test_values_per_token(tiny: Tiny, spec: Spec, embedded: bool) -> None:
    """Plain generation repeats the last one for new tokens."""
    model, types = tiny("gpt2"), torch.ones_like(prompt())
    given = {"inputs_embeds": model.get_input_embeddings()(prompt())} if embedded else {}
    given = given or {"input_ids": prompt()}
    ours = check_same(model, spec, **given, token_type_ids=types, **GREEDY)
    assert not torch.equal(model.generate(**given, **GREEDY), ours)


def test_values_per_token_in_the_next_turn(tiny: Tiny, spec: Spec) -> None:
    """New tokens run as generated ones do: with one value for all of them, in a ``TreeCache``."""
    model = tiny("gpt2")
    settings = {**GREEDY, **spec, "return_dict_in_generate": True}
    first = model.generate(prompt(), token_type_ids=torch.ones_like(prompt()), **settings)
    ids = torch.cat([first.sequences, prompt(5)], dim=1)
    types = torch.ones_like(ids)
    cache = {CACHE: copy.deepcopy(first[CACHE])}
    check_same(model, {**spec, **cache}, ids, token_type_ids=types, **GREEDY)
    types[:, -3] = 0
    with pytest.raises(ValueError, match=r"\(token_type_ids\) with a TreeCache.*kind that is gen"):
        model.generate(ids, token_type_ids=types, **settings, **{CACHE: first[CACHE]})


def test_positions_and_embeddings_in_the_next_turn(tiny: Tiny, spec: Spec) -> None:
    """A ``TreeCache`` is continued by tokens: what would count otherwise is refused."""
    model, settings = tiny("gpt2"), {**GREEDY, **spec, "return_dict_in_generate": True}
    given = ragged((9, 4))
    places = given["attention_mask"].cumsum(-1) + 4
    first = model.generate(**given, position_ids=places, **settings)
    ids = torch.cat([first.sequences, prompt(5, 2)], dim=1)
    mask = torch.cat([given["attention_mask"], torch.ones_like(ids[:, 9:])], dim=1)
    given = {"input_ids": ids, "attention_mask": mask}
    places = mask.cumsum(-1) + 4
    cache = {CACHE: copy.deepcopy(first[CACHE])}
    check_same(model, {**spec, **cache}, **given, position_ids=places, **GREEDY)
    places[1, -2:] += 1
    for more, message in (
        ({"position_ids": places}, r"position_ids with a TreeCache.*\[31, 26\].*Leave them out"),
        ({"inputs_embeds": model.get_input_embeddings()(ids)}, "inputs_embeds.*input_ids alone"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(**given, **more, **settings, **{CACHE: copy.deepcopy(first[CACHE])})


def passing_on(model: Any, drops: str = "") -> Any:
    """The model with a forward of ``(*args, **kwargs)``, as subclasses and wrappers write it."""

    class Passing(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop(drops, None)
            return super().forward(*args, **kwargs)

    model.__class__ = Passing
    return model


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_forward_that_names_no_argument(fresh: Tiny, architecture: str, spec: Spec) -> None:
    """Which ``generate`` gives no positions, so that padding counts."""
    model = passing_on(fresh(architecture))
    for inputs in ({"input_ids": prompt()}, ragged()):
        check_same(model, spec, **inputs, **GREEDY)


@pytest.mark.parametrize(
    ("drops", "message"),
    [("position_ids", "explicit masks and pos"), (CACHE, r"a trial raised .*\w\. Choose")],
)
def test_what_such_a_forward_drops_shows_in_a_trial(drops: str, message: str) -> None:
    model = passing_on(copy.deepcopy(architectures.build("smollm3")), drops)
    with pytest.raises(ValueError, match=f"Passing does not work with prompt_lookup: .*{message}"):
        model.generate(prompt(), **GREEDY, **drafting("prompt_lookup"))
    keeps = passing_on(copy.deepcopy(architectures.build("smollm3")))
    check_same(keeps, drafting("prompt_lookup"), **ragged(), **GREEDY)
