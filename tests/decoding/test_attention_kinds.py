"""Attention beside full and sliding: an index of keys, chunks, and positions that count padding.

One model of each kind of ``architectures``, in every way that a cache is used.
"""

import copy
from typing import Any

import pytest
import torch
from architectures import LAYERS, build, random_model, tiny_config
from conftest import check_same, prompt, ragged
from running import CAPTURED, drafting
from transformers import DynamicCache

from hf_spec.cache.tree_cache import TreeCache
from modeling_patches.cache_name import CACHE

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
LOOKUP = drafting("prompt_lookup")
#: An index in every layer, in every other one, chunks, and positions that a decoder inside takes.
KINDS = ("deepseek_v32", "glm_moe_dsa", "dots3_note_text", "llama4_text", "whisper")

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_a_chat_in_one_cache(kind: str) -> None:
    """Rows of a TreeCache get ahead of each other, and the next prompts are padded otherwise."""
    model, batch = build(kind), ragged()
    first = model.generate(**batch, **GREEDY, **LOOKUP, return_dict_in_generate=True)
    assert isinstance(first[CACHE], TreeCache)
    more = prompt(5, 3, seed=9)
    ids = torch.cat([first.sequences, more], 1)
    mask = torch.cat([batch["attention_mask"], torch.ones(3, 21, dtype=torch.long)], 1)
    cache = first[CACHE]
    for _ in range(2):
        check_same(
            model, {**LOOKUP, CACHE: copy.deepcopy(cache)}, ids, attention_mask=mask, **GREEDY
        )
        ids, mask = (torch.nn.functional.pad(part, (2, 0)) for part in (ids, mask))


@every_kind
def test_a_callers_cache_is_filled_as_by_plain_generation(kind: str) -> None:
    model, batch = build(kind), ragged()
    config = model.config.get_text_config(decoder=True)
    plain, ours = DynamicCache(config=config), DynamicCache(config=config)
    expected = model.generate(**batch, **GREEDY, **{CACHE: plain})
    assert model.generate(**batch, **GREEDY, **LOOKUP, **{CACHE: ours}).tolist() == (
        expected.tolist()
    )
    real = torch.cat([batch["attention_mask"], torch.ones(3, 15, dtype=torch.long)], 1)
    for mine, theirs in zip(ours.layers, plain.layers, strict=True):
        assert type(mine) is type(theirs)
        for name in ("keys", "values", "indexer_keys"):
            found, wanted = getattr(mine, name, None), getattr(theirs, name, None)
            assert (found is None) == (wanted is None)
            if found is None or wanted is None:
                continue
            shown = real[:, -wanted.shape[-2] :, None]
            shown = shown if name == "indexer_keys" else shown[:, None]
            # fp32 in other orders of reduction, some layers deep
            torch.testing.assert_close(found * shown, wanted * shown, rtol=1e-4, atol=1e-4)
    turn = {"input_ids": torch.cat([expected, prompt(4, 3)], 1)}
    turn["attention_mask"] = torch.cat([batch["attention_mask"], torch.ones(3, 20).long()], 1)
    again = model.generate(**turn, **GREEDY, **LOOKUP, **{CACHE: ours})
    assert again.tolist() == model.generate(**turn, **GREEDY, **{CACHE: plain}).tolist()


@pytest.mark.parametrize("kind", ["deepseek_v32", "llama4_text", "whisper"])
def test_captured_steps(kind: str) -> None:
    model, batch = build(kind), ragged()
    if kind == "deepseek_v32":  # torch captures the grouped product of experts in bfloat16 only
        config = tiny_config(kind)
        config.mlp_layer_types = ["dense"] * LAYERS
        model = random_model(config)
    spec = {**LOOKUP, **CAPTURED, "return_dict_in_generate": True}
    out = check_same(model, spec, **batch, **GREEDY)
    graphs = out.spec_stats.details["compiled"]
    assert graphs["kept"] and not graphs["refused"], graphs


def test_new_tokens_alone_where_positions_count_padding() -> None:
    model, batch = build("whisper"), {key: value[1:2] for key, value in ragged().items()}
    first = model.generate(**batch, **GREEDY, **LOOKUP, return_dict_in_generate=True)
    cache, new = first[CACHE], prompt(4)
    whole = torch.cat([first.sequences[:, :-1], new], 1)
    mask = torch.cat([batch["attention_mask"], torch.ones(1, 19).long()], 1)
    expected = model.generate(whole, attention_mask=mask, **GREEDY)
    missing = {"input_ids": new, "attention_mask": mask[:, 2:]}
    with pytest.raises(ValueError, match=r"29 columns.* count \[7\].*WhisperForCausalLM does.*m"):
        model.generate(**missing, **GREEDY, **LOOKUP, **{CACHE: copy.deepcopy(cache)})
    alone = {"input_ids": new, "attention_mask": mask}
    ours = model.generate(**alone, **GREEDY, **LOOKUP, **{CACHE: cache})
    assert ours[0, 4:].tolist() == expected[0, whole.shape[1] :].tolist()
