"""Options and fields of configs that do not go together, or that are too large.

That wrong values are refused one by one is for ``tests/test_method_contract.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec.methods.registry import get_method


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bita", {"tree": "round"}, "tree='round'.*adaptive, efficient, full, chain, straightf"),
        ("bita", {"tree": "online"}, "tree='online': choose one of adaptive, efficient"),
        ("bita", {"tree": "straightforward", "lookup": True}, "lookup=True with .*='chain'"),
        ("bita", {"tree": [[0, 0]]}, "parent .* missing"),
        ("bita", {"tree": "efficient", "top_k": 10**7}, "top_k=10000000.* from 1 to 1024"),
        ("bita", {"top_k": 2}, "top_k=2 is of the trees"),
        ("bita", {"drafting": "on"}, "drafting='on'"),
        ("layer_skip", {"draft_exit": "never"}, "'never': choose one of policy, adaptive, thresh"),
        ("layer_skip", {"draft_exit": "fixed", "threshold": 0.5}, "threshold=0.5 with draft_exit"),
        ("layer_skip", {"draft_exit": "threshold", "beta1": 0.4}, "belongs to 'policy' and 'ad"),
        ("layer_skip", {"skip_mlp": "12"}, "skip_mlp must be a list of layer indices, got '12'"),
        ("layer_skip", {"skip_mlp": [1, -1]}, "skip_mlp must list integers >= 0"),
        ("layer_skip", {"skip_attention": [1.0]}, "skip_attention must list integers .*, got 1.0"),
        ("medusa", {"tree": []}, r"tree=\[\]: choose one of adaptive, sparse"),
        ("medusa", {"tree": None}, "tree=None: choose one of adaptive, sparse, chain, or give ra"),
        ("ppd", {"tree": "full"}, "tree='full'.*adaptive, static, chain, dynamic"),
        ("ppd", {"tree": "dynamic", "max_depth": 2}, "max_depth=2 with tree='dynamic'"),
        (
            "ppd",
            {"tree": "static", "num_draft_tokens": 3},
            "=3 is of tree='adaptive'",
        ),
        ("prompt_lookup", {"min_ngram": 3, "max_ngram": 2}, "min_ngram=3 is above max_ngram=2"),
        ("prompt_lookup", {"max_ngram": 10**7}, "max_ngram=10000000.* from 1 to 1024"),
        ("prompt_lookup", {"acceptance": "rejection"}, "'rejection'.*Use acceptance='match'"),
        ("propd", {"tree": "round"}, "choose one of adaptive, sparse, chain, online, or give"),
        (
            "propd",
            {"tree": "online", "num_draft_tokens": 4},
            "=4 is of tree='adaptive'",
        ),
        ("propd", {"prune": "always"}, "prune='always'.*'auto', True or False"),
        ("propd", {"typical_delta": 0.5}, "typical_delta=0.5 with acceptance='match'.* 'typical'"),
        ("propd", {"drafter": "propd"}, "drafter='propd': give 'heads', or the name of another"),
        ("propd", {"drafter": "medusas"}, "'medusas' is unknown"),
        ("propd", {"drafter": "layer_skip"}, "drafter='layer_skip' runs the model to draft"),
        ("propd", {"drafter_kwargs": {"tree": "chain"}}, "with the adapter's own heads"),
        ("propd", {"drafter": "bita", "tree": "chain"}, "tree='chain' with drafter='bita'"),
        ("propd", {"drafter": "bita", "drafter_kwargs": {"depth": 1}}, "'bita' has no option 'de"),
        ("propd", {"drafter": "bita", "drafter_kwargs": {"lookup": True}}, "'lookup' is an"),
        ("propd", {"acceptance": "rejection"}, "acceptance='rejection'"),
        (
            "space",
            {"acceptance": "rejection", "num_draft_tokens": 3},
            "tree='adaptive', whose",
        ),
    ],
)
def test_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_method(name).parse_options(options)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("bita", {"num_prompt_tokens": 0}, "prompt_depth='deep' with num_prompt_tokens=0"),
        ("bita", {"prompt_depth": "medium"}, "prompt_depth='medium'.*deep, shallow, none"),
        ("layer_skip", {"draft_rank": 2, "draft_alpha": 0}, r"draft_alpha=0: .* number in \(0"),
        ("layer_skip", {"draft_target_modules": []}, r"draft_target_modules=\[\]: give a list"),
        ("medusa", {"decay": 0}, "decay=0"),
        ("ppd", {"ept_aggregation": "learned"}, "ept_aggregation='learned' with num_ept=1"),
        ("ppd", {"head": "residual", "head_rank": 0}, "head_rank=0"),
        ("ppd", {"head_rank": 4}, "head_rank=4 with head='none'.*residual"),
        ("ppd", {"head_stages": 3}, "head_stages=3.*from 1 to 2"),
        ("propd", {"prune_layer": 0}, "prune_layer=0"),
        ("space", {"update": "adapter"}, "update='adapter': choose one of gated, lora, full, none"),
        ("space", {"rank": 0}, "rank=0: must be a whole number from 1 to 16384"),
        ("space", {"target_modules": []}, r"target_modules=\[\]: give a list of names"),
        ("space", {"masks": "noise", "update": "lora"}, "masks='noise' with update='lora'"),
        ("space", {"masks": "noise", "shared_mask": True}, "masks='noise' with update="),
    ],
)
def test_configs(name: str, fields: dict[str, Any], message: str) -> None:
    config: Any = get_method(name).adapter_config
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_only_typical_acceptance_is_lossy() -> None:
    for rule in ("match", "typical"):
        options = get_method("prompt_lookup").parse_options({"acceptance": rule})
        assert options.lossless == (rule == "match")
