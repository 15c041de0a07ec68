"""Models that do something else once a sequence is long: rotary frequencies that follow the
longest position (dynamic NTK, LongRoPE), caches that are computed anew, keys that are not kept."""

import copy
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from architectures import OVERRIDES, build
from conftest import _LLAMA, STRATEGIES, prompt, ragged
from covering import covering
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from hf_spec.modeling_patches.modules import CACHE

#: Where frequencies change.
END = 32
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
_LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": END, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": END}),
    "interleaved": ("cohere", {"rope_parameters": _DYNAMIC, "max_position_embeddings": END}),
    "longrope": ("llama", {"rope_parameters": _LONG}),
    # Plain generation computes the cache anew when frequencies change.
    "phi3": ("phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": END}),
    "phimoe": ("phimoe", {
        "rope_parameters": {**_LONG, "short_mscale": 1.1, "long_mscale": 1.3},
        "original_max_position_embeddings": END, "num_local_experts": 4, "num_experts_per_tok": 2,
    }),
    "by layer type": ("gemma3_text", {
        "head_dim": 8, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": _LONG,
        },
    }),
}  # fmt: skip
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@cache
def _build(kind: str) -> Any:
    model_type, fields = MODELS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **_LLAMA | fields))
    return model.eval()


def fresh(kind: str) -> Any:
    """Dynamic NTK remembers the longest position, so that each call gets a model of its own."""
    return copy.deepcopy(_build(kind))


def check_same(kind: str, given: dict[str, Any], spec: dict[str, Any], new: int = 24) -> Any:
    settings = {
        **GREEDY, "max_new_tokens": new, "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    plain = fresh(kind).generate(**given, **settings)
    ours = fresh(kind).generate(**given, **settings, **spec)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for found, wanted in zip(ours.logits, plain.logits):
        # fp32 in other orders of reduction; wrong frequencies are above 0.1.
        assert float((found - wanted).norm() / wanted.norm()) < 1e-3
    return ours.spec_stats


LENGTHS = [(31,), (32,), (33,), (20, 9, 15), (28, 33, 5)]


@pytest.mark.parametrize(
    ("kind", "lengths", "name"),
    covering(
        product(MODELS, LENGTHS, STRATEGIES),
        lambda kind, lengths, name: [
            (kind, name), (kind, len(lengths)), (lengths, name), (kind.startswith("phi"), lengths)
        ],
    ),
    ids=str,
)  # fmt: skip
def test_calls_that_cross_the_end(kind: str, lengths: tuple[int, ...], name: str) -> None:
    given = ragged(lengths) if len(lengths) > 1 else {"input_ids": prompt(*lengths)}
    check_same(kind, given, STRATEGIES[name])


@pytest.mark.parametrize(
    ("kind", "lengths", "new", "plain"),
    [
        ("dynamic", (5, 9), 20, 0),  # the call stays before the end
        ("dynamic", (20, 9), 24, 23),  # it does not: plain steps, in which rows stay together
        ("dynamic", (33,), 12, 11),
        ("longrope", (20, 9), 36, 12),  # until the longest has passed the end
        ("phi3", (33, 9), 24, 0),
    ],
    ids=str,
)
def test_where_steps_are_plain(kind: str, lengths: tuple[int, ...], new: int, plain: int) -> None:
    stats = check_same(kind, ragged(lengths), STRATEGIES["layer_skip"], new)
    assert (stats.num_drafted_tokens == 0) == (plain == new - 1)
    assert plain + 1 <= stats.num_steps <= new


@pytest.mark.parametrize("kind", ["longrope", "phi3"])
def test_a_chat_that_crosses_the_end(kind: str, spec: dict[str, Any]) -> None:
    """In the second answer, in the second prompt, or before."""
    model = fresh(kind)
    for length, more in ((12, 4), (12, 16), (28, 4)):
        ids, plain_cache = prompt(length), DynamicCache(config=model.config)
        caches: list[Any] = [DynamicCache(config=model.config), None]
        for turn in range(2):
            settings = {**GREEDY, "max_new_tokens": 8, "return_dict_in_generate": True}
            expected = model.generate(ids, **settings, **{CACHE: plain_cache})
            plain_cache = expected[CACHE]
            for place, own in enumerate(caches):
                out = model.generate(ids, **settings, **spec, **{CACHE: own})
                assert out.sequences.tolist() == expected.sequences.tolist()
                caches[place] = out[CACHE]
            ids = torch.cat([expected.sequences, prompt(more, seed=turn)], dim=1)


def test_positions_of_the_callers_own() -> None:
    given = {"input_ids": prompt(12), **GREEDY, **STRATEGIES["prompt_lookup"]}
    given["position_ids"] = torch.arange(3, 15)[None]
    with pytest.raises(ValueError, match="position_ids.*Phi3ForCausalLM.*position 32.*Leave them"):
        fresh("phi3").generate(**given, max_new_tokens=2)


def test_doge_past_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OVERRIDES, "doge", {"keep_window_size": 24})
    build.cache_clear()
    model = build("doge")
    build.cache_clear()
    given = {"input_ids": prompt(), **GREEDY, **STRATEGIES["prompt_lookup"]}
    plain = model.generate(prompt(), **GREEDY, max_new_tokens=12)
    assert model.generate(**given, max_new_tokens=12).tolist() == plain.tolist()
    with pytest.raises(ValueError, match="Doge.*keep_window_size=24.*25 tokens.*Lower max_new"):
        model.generate(**given, max_new_tokens=13)
