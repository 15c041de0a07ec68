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

from modeling_patches.cache_name import CACHE

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
LOOKUP = drafting("prompt_lookup")
#: An index in every layer, in every other one, chunks, and positions that a decoder inside takes.
KINDS = ("deepseek_v32", "glm_moe_dsa", "dots3_note_text", "llama4_text", "whisper")

every_kind = pytest.mark.parametrize("kind", KINDS)


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
