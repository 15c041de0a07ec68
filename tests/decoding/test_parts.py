"""A padded prompt in parts: the same as in one forward, with less padding."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from adapter_oracle import lent
from conftest import ARCHITECTURES, CLOSE, POSITIONS, Tiny, plainly, prompt, ragged
from covering import covering
from running import drafting
from transformers import DynamicCache, GenerationMixin

from hf_spec.decoding import loop, parts
from hf_spec.decoding.parts import like_lengths
from hf_spec.methods.registry import get_method
from hf_spec.model import packed_weights
from hf_spec.model.appending import Prefilled
from modeling_patches.cache_name import CACHE
from modeling_patches.linear_attention import recurrent_rules
from modeling_patches.positions import needs_positions

GREEDY = {"max_new_tokens": 16, "do_sample": False}
LENGTHS = (12, 3, 40, 13, 4)
#: The rows of these lengths, where a forward takes as long as six columns.
GROUPS = [[2], [0, 3], [1, 4]]


def cost(groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    return sum(parts.FORWARD + len(rows) * max(lengths[row] for row in rows) for rows in groups)


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    if not rows:
        yield []
        return
    first, *others = rows
    for found in partitions(others):
        yield [[first], *found]
        for index, group in enumerate(found):
            yield [*found[:index], [first, *group], *found[index + 1 :]]


@pytest.mark.parametrize("forward", [0, 3, 10, 1000])
def test_groups_take_the_least_time(monkeypatch: pytest.MonkeyPatch, forward: int) -> None:
    """Of all partitions of the rows."""
    monkeypatch.setattr(parts, "FORWARD", forward)
    generator = torch.Generator().manual_seed(forward)
    for _ in range(20):
        lengths = torch.randint(1, 40, (6,), generator=generator).tolist()
        groups = like_lengths(lengths)
        assert sorted(row for rows in groups for row in rows) == list(range(6))
        least = min(cost(found, lengths) for found in partitions(list(range(6))))
        assert cost(groups, lengths) == least
    assert like_lengths([7]) == [[0]]


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the prompts that Transformers forwards; small weights are packed, too."""
    shapes: list[tuple[int, ...]] = []

    def counted(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(input_ids.shape))
        return prefill(self, input_ids, *args, **kwargs)

    prefill = GenerationMixin._prefill
    monkeypatch.setattr(GenerationMixin, "_prefill", counted)
    monkeypatch.setattr(packed_weights, "SMALLEST", dict.fromkeys(packed_weights.SMALLEST, 1))
    monkeypatch.setattr(parts, "FORWARD", 6)
    return shapes


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each call has after its prompt."""
    found: list[dict[str, Any]] = []

    def noted(*args: Any, **kwargs: Any) -> Prefilled:
        result = prefill(*args, **kwargs)
        cache = result.target.cache
        rows = {
            (index, name): states.clone()
            for index, layer in enumerate(cache.layers)
            for name, states in layer.with_front.items()
        }
        rows["logits"] = result.logits
        if result.hidden is not None:
            rows["hidden"] = result.hidden
        found.append(
            {"rows": rows, "following": result.following, "lengths": cache.host_lengths,
             "shift": cache.shift.tolist()}
        )  # fmt: skip
        return result

    prefill = loop.prefill
    monkeypatch.setattr(loop, "prefill", noted)
    return found


def call(name: str, **options: Any) -> dict[str, Any]:
    return {**GREEDY, **drafting(name, pack_weights=True, **options)}


@pytest.mark.parametrize(
    ("name", "architecture"),
    covering(
        product(("prompt_lookup", "medusa", "eagle3"), ARCHITECTURES),
        lambda name, architecture: [architecture, (name, POSITIONS.get(architecture))],
    ),
)
def test_the_same_as_in_one_forward(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, forwards: list[Any], prefilled: list[Any],
    name: str, architecture: str,
) -> None:  # fmt: skip
    model, batch = tiny(architecture), ragged(LENGTHS)
    expected = plainly(model, **batch, **GREEDY)
    config: Any = get_method(name).adapter_config
    calls = []
    for forward in (6, 10_000):
        monkeypatch.setattr(parts, "FORWARD", forward)
        forwards.clear()
        with nullcontext() if config is None else lent(model, config(), random=True):
            out = model.generate(**batch, **call(name))
        assert out.tolist() == expected.tolist()
        calls.append(list(forwards))
    alone = needs_positions(model) or bool(recurrent_rules(model))
    assert calls[0] == ([(5, 40)] if alone else [(1, 40), (2, 13), (2, 4)])
    assert calls[1] == [(5, 40)]
    mine, theirs = prefilled
    rows, wanted = mine.pop("rows"), theirs.pop("rows")
    assert mine == theirs and mine["lengths"] == list(LENGTHS)
    assert rows.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert rows[name].shape == tensor.shape
        for one, other, length in zip(rows[name], tensor, LENGTHS):
            at = (slice(length),) if name == "hidden" and one.ndim == 2 else ()
            at = (slice(None), slice(length)) if isinstance(name, tuple) else at
            torch.testing.assert_close(one[at], other[at], **CLOSE)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
def test_the_callers_cache(tiny: Tiny, forwards: list[Any], architecture: str) -> None:
    """It is as after one forward, and plain generation goes on with it."""
    model, batch = tiny(architecture), ragged(LENGTHS)
    plain = DynamicCache(config=model.config)
    expected = model.generate(**batch, **GREEDY, **{CACHE: plain})
    forwards.clear()
    given = DynamicCache(config=model.config)
    out = model.generate(**batch, **call("prompt_lookup"), **{CACHE: given})
    assert len(forwards) == 3
    assert out.tolist() == expected.tolist()
    real = torch.cat([batch["attention_mask"], torch.ones(5, 15)], 1).bool()
    for mine, theirs in zip(given.layers, plain.layers):
        assert mine.keys.shape == theirs.keys.shape
        seen = real[:, -mine.keys.shape[2] :, None]
        for name in ("keys", "values"):
            one, other = (getattr(layer, name).transpose(0, 1) * seen for layer in (mine, theirs))
            torch.testing.assert_close(one, other, **CLOSE)


#: Prompts that run in one forward.
WHOLE: dict[str, dict[str, Any]] = {
    "without padding": {"input_ids": prompt(40, batch=5), "attention_mask": torch.ones(5, 40)},
    "positions": {"position_ids": torch.arange(40).expand(5, -1)},
}


@pytest.mark.parametrize("case", WHOLE)
def test_prompts_in_one_forward(tiny: Tiny, forwards: list[Any], case: str) -> None:
    model, given = tiny("llama"), {**ragged(LENGTHS), **WHOLE[case]}
    expected = plainly(model, **given, **GREEDY)
    forwards.clear()
    assert model.generate(**given, **call("prompt_lookup")).tolist() == expected.tolist()
    assert forwards == [(5, 40)]
