"""The host reads one small tensor per step; on a GPU each further one would be another wait.

Here are compiled steps, whose tensors' methods are counted; for others see `test_on_a_device.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from architectures import assistant_for, base_of
from conftest import ragged
from covering import covering
from replay import RECORDED
from running import as_if, family
from test_compiled import CAPTURED, adapt, generate
from two_tokenizers import LETTERS, WORDS, make, of_words

from hf_spec.draft.policy import StepPolicy
from hf_spec.methods.registry import methods
from hf_spec.predict.network import LevelPredictor

#: What brings numbers to the host.
READS = ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
#: Methods that run a forward for each level of a tree.
BY_LEVELS = [name for name, one in methods().items() if issubclass(one.declares, LevelPredictor)]


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the reads in this block; a read inside another one is none."""
    seen: list[str] = []
    inside = False

    def watched(name: str) -> Any:
        stock = getattr(torch.Tensor, name)

        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            outer, inside = inside, True
            if not outer:
                seen.append(name)
            try:
                return stock(self, *args, **kwargs)
            finally:
                inside = outer

        return read

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, watched(name))
        yield seen


#: Reads per step. Assistants go on from tokens that the host knows.
READS_OF = {"draft_model": 2}
NAMES = (
    "prompt_lookup", "medusa", "propd", "bita", "space", "ppd", "dflash", "dspark", "eagle3",
    "mtp", "draft_model", "token_recycling",
)  # fmt: skip


def made(shallow: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """A model with an adapter or an assistant, and the keywords of its calls."""
    kwargs: dict[str, Any] = {"assistant_strategy": name, "eos_token_id": None}
    if name == "shared keys":
        kwargs["assistant_strategy"] = "draft_model"
        return base_of("shared"), kwargs | {"assistant_model": assistant_for("shared", True)}
    if name == "other tokens":
        kwargs["assistant_strategy"] = name = "draft_model"
        own = make([*reversed(LETTERS), *WORDS[:12]])
        kwargs |= {"tokenizer": of_words(), "assistant_tokenizer": own}
    if name == "draft_model":
        kwargs["assistant_model"] = shallow(layers=1)
    return adapt(shallow(layers=1 + (name == "propd")), name), kwargs  # it looks at earlier layers


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("name", "way", "options"),
    [
        *((*case, {}) for case in covering(
            product(NAMES, ("compiled", "recorded")),
            lambda name, way: [(family(name), way)] if way == "recorded" or name == "medusa" else []
        )),
        ("shared keys", "compiled", {"max_depth": 2}),  # few levels, each a graph
        ("other tokens", "compiled", {"max_depth": 2}),
    ],
)  # fmt: skip
def test_one_read_per_step(
    shallow: Any, monkeypatch: pytest.MonkeyPatch, name: str, way: str, options: dict[str, Any]
) -> None:
    as_if(True, monkeypatch)
    model, kwargs = made(shallow, name)
    kwargs["assistant_kwargs"] = {"drafting": "always", **options}
    kwargs |= RECORDED if way == "recorded" else CAPTURED
    # In the first call much is made that the later one finds.
    generate(model, ragged(), max_new_tokens=10, **kwargs)
    with counted(monkeypatch) as seen:
        output = generate(model, ragged(), max_new_tokens=110, **kwargs)
    steps = output.spec_stats.num_steps
    # Some more to begin with, while rows end, when it matters how many tokens are left, and where a
    # size is recorded that the first call did not have.
    expected, more = READS_OF.get(kwargs["assistant_strategy"], 1) * steps, 40
    assert more < steps and len(seen) < expected + more, (steps, len(seen))


@pytest.mark.parametrize(
    ("name", "cost"),
    covering(product(BY_LEVELS, [0.0, 0.8, 2.0]), lambda name, cost: [name, cost]),
)
def test_levels_are_chosen_without_reads(
    shallow: Any, monkeypatch: pytest.MonkeyPatch, name: str, cost: float
) -> None:
    """Where the policy decides how deep trees grow, by what a level must bring."""
    as_if(True, monkeypatch)
    monkeypatch.setattr(StepPolicy, "draft_cost", lambda self: cost)
    monkeypatch.setattr(StepPolicy, "paused", False)
    model, kwargs = made(shallow, name)
    prompts = {key: values[:1] for key, values in ragged().items()}
    with counted(monkeypatch) as seen:
        output = generate(model, prompts, max_new_tokens=80, **kwargs)
    plain = generate(model, prompts, eos_token_id=None, max_new_tokens=80)
    assert torch.equal(output.sequences, plain.sequences)
    stats = output.spec_stats
    per_step = stats.num_draft_forwards / stats.num_steps
    often_right = name == "draft_model"  # as the model drafts for itself
    expected = {0.0: per_step > 4, 0.8: 0.1 < per_step < (8 if often_right else 4)}
    assert expected.get(cost, per_step < 0.1), per_step
    assert len(seen) < 2 * stats.num_steps + 25, len(seen)
