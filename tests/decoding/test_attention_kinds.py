"""Attention beside full and sliding: an index of keys, and chunks.

One model of each kind of ``architectures``, in every way that a cache is used.
"""

from typing import Any

import pytest
from architectures import LAYERS, build, random_model, tiny_config
from conftest import check_same, ragged
from running import CAPTURED, drafting

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
LOOKUP = drafting("prompt_lookup")
#: An index in every layer, in every other one, and chunks.
KINDS = ("deepseek_v32", "glm_moe_dsa", "dots3_note_text", "llama4_text")

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("kind", ["deepseek_v32", "llama4_text"])
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
