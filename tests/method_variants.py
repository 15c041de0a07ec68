"""Options that the contract test runs each method with.

A package that registers a method of its own adds an entry in its ``conftest.py``.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

Options = Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Variants:
    """What the contract test runs one method with.

    Attributes:
        options: options worth a run of their own, by name.
        hitting: the one whose candidates are accepted without training where few tokens are
            allowed; None if all are.
        sampled: options that sample candidates and verify them by rejection; only tests of sampling
            need them.
        adapters: fields of the adapter's config for options that need others than the defaults.
            Such an adapter's parameters are random, so that all of them matter.
        configs: fields of configs whose adapters have different parameters, by name.
        trained: fields of the config that is trained in the tests.
        architectures: those of the tests' that it can run on; None for all.
    """

    options: Options
    hitting: str | None = None
    sampled: Options = field(default_factory=dict)
    adapters: Options = field(default_factory=dict)
    configs: Options = field(default_factory=lambda: {"default": {}})
    trained: dict[str, Any] = field(default_factory=dict)
    architectures: Collection[str] | None = None


#: The tree of every token of the tests' models.
WIDE: dict[str, Any] = {"tree": [[rank] for rank in range(61)], "max_depth": 1}
#: The likeliest tokens after the next one.
LEVEL: dict[str, Any] = {"num_draft_tokens": 32, "max_depth": 1}
#: Architectures whose decoder layers are given rotations.
ROTARY = (
    "llama", "llama_tied", "qwen2", "qwen3", "mistral", "gemma3", "gemma2", "phi", "phi3",
    "stablelm", "starcoder2", "mixtral", "cohere2",
)  # fmt: skip
SHARED = {"markov_rank": 4, "draft_vocab_size": 40}
SLIDING = {"sliding_layers": [1], "sliding_window": 5, "sliding_window_non_causal": False}
DFLASH_2 = {
    "markov_rank": 4, "markov_head": "selector", "selector_top_k": 9, "conv_kernel_size": 2,
    "conv_group_size": 4,
}  # fmt: skip
DOMINO = {"draft_vocab_size": 0, "markov_rank": 4, "markov_head": "domino", "markov_width": 6}
DSPINE = {"markov_rank": 8, "markov_head": "dspine", "markov_width": 6, "selector_top_k": 9}
XPRESS = {"markov_rank": 4, "markov_head": "xpress", "markov_width": 6, "block_size": 4}
LILICORR = {
    "markov_rank": 4, "markov_head": "lilicorr", "markov_width": 6, "selector_top_k": 5,
    "lattice_heads": 2,
}  # fmt: skip
FIRST_LAYER = {"skip_attention": [0], "skip_mlp": [], "draft_exit": "fixed"}
MERGED = {"skip_attention": [1], "skip_mlp": [], "num_draft_tokens": 3, "lookup": True}

VARIANTS: dict[str, Variants] = {
    "bita": Variants(
        {
            "adaptive": {},
            "efficient": {"tree": "efficient"},
            "full": {"tree": "full", "top_k": 2, "lookup": True},
            "chain": {"tree": "chain", "max_depth": 2},
            "straightforward": {"tree": "straightforward"},
            "wide": WIDE,
        },
        hitting="wide",
        adapters={"adaptive": SHARED},
        configs={
            "deep": {"num_prompt_tokens": 5, "num_mask_tokens": 2},
            "shallow": {"num_prompt_tokens": 5, "prompt_depth": "shallow"},
            "masks only": {"prompt_depth": "none"},
        },
    ),
    "draft_model": Variants(
        {
            "adaptive": {},
            "chain": {"tree": "chain", "max_depth": 3, "lookup": True},
            "narrow": {"num_draft_tokens": 6, "width": 2, "recycle": True},
            "wide": LEVEL,
        },
        hitting="wide",
    ),
    "eagle3": Variants(
        {
            "adaptive": {},
            "chain": {"tree": "chain", "max_depth": 3, "lookup": True},
            "narrow": {"num_draft_tokens": 5, "width": 2, "max_depth": 4, "recycle": True},
            "wide": {"num_draft_tokens": 61, "max_depth": 1},
            "parallel": {"max_depth": 4},
        },
        hitting="wide",
        adapters={
            "adaptive": {"draft_vocab_size": 40, "fc_norm": False},  # as in the paper
            "parallel": {"mask_token_id": 3},
            "chain": {"fc_norm": True, "norm_output": True, "num_layers": 2},
        },
        configs={
            "default": {},
            "flags": {
                "architecture": "qwen3", "num_layers": 2, "norm_before_residual": True,
                "fc_norm": True, "norm_output": True,
            },
            "own": {"own_embeddings": True, "norm_before_fc": True, "draft_vocab_size": 40},
        },
    ),
    "dflash": Variants(
        {
            "adaptive": {},
            "chain": {"tree": "chain", "max_depth": 2, "lookup": True},
            "domino": {},
            "dspine": {},
            "xpress": {},
            "lilicorr": {},
            "wide": WIDE,
        },
        hitting="wide",
        adapters={
            "adaptive": {"draft_vocab_size": 40, **SLIDING},
            "chain": {"head": "own", "causal": True}, "domino": DOMINO, "dspine": DSPINE,
            "xpress": XPRESS, "lilicorr": LILICORR,
            "wide": DFLASH_2,
        },
        configs={
            "default": {},
            "own head": {"num_layers": 1, "head": "own", "layers": [0, 3]},
            "few tokens": {
                "num_layers": 1, "block_size": 3, "draft_vocab_size": 40, "loss": "distillation",
            },
            "sliding": {"block_size": 4, "loss": "distillation", **SLIDING},
            "second": {"block_size": 4, "num_layers": 1, **DFLASH_2},
            "domino": {"num_layers": 1, "sample_from_anchor": True, **DOMINO},
            "dspine": {"block_size": 4, "draft_vocab_size": 40, **DSPINE},
            "xpress": {"num_layers": 1, "draft_vocab_size": 40, **XPRESS},
            "lilicorr": {
                "num_layers": 1, "block_size": 4, "draft_vocab_size": 40, **LILICORR,
                "selector_top_k": 40,  # so that it learns of each pair of tokens
            },
        },
    ),
    "dspark": Variants(
        {
            "adaptive": {},
            "paths": {"tree": [[0], [2], [0, 0], [0, 1], [0, 0, 0]], "lookup": True},
            "chain": {"tree": "chain"},
            "wide": WIDE,
        },
        hitting="wide",
        adapters={
            "adaptive": {"markov_rank": 4, "markov_head": "rnn", "confidence_head": "markov"},
            "paths": {"markov_rank": 4, "markov_head": "rnn", "sample_from_anchor": False},
            "chain": {"markov_rank": 4, "markov_head": "gated", "draft_vocab_size": 40},
        },
        configs={
            "default": {},
            "gated": {
                "markov_rank": 4, "markov_head": "gated", "confidence_head": "markov",
                "loss": "distillation",
            },
            "rnn": {
                "num_layers": 1, "markov_rank": 4, "markov_head": "rnn", "draft_vocab_size": 40,
                "block_size": 3, "sample_from_anchor": False,
            },
        },
    ),
    "layer_skip": Variants(
        {
            "first_layer": FIRST_LAYER,
            "adaptive": {
                "skip_attention": [1], "skip_mlp": [2], "draft_exit": "adaptive", "threshold": 0.2,
                "num_draft_tokens": 4, "recycle": True,
            },
            "merged": MERGED,
        },
        sampled={
            "rejection": {**FIRST_LAYER, "acceptance": "rejection"},
            "sampled": {**MERGED, "acceptance": "rejection"},
        },
        configs={
            "all": {"skip_attention": [1], "skip_mlp": [2], "draft_rank": 3},
            "some": {
                "skip_attention": [0, 1], "skip_mlp": [2], "draft_rank": 2,
                "draft_target_modules": ["q_proj", "up_proj"],
            },
        },
        trained={"skip_attention": [], "skip_mlp": [1], "draft_rank": 4},
    ),
    "medusa": Variants(
        {
            "adaptive": {},
            "recycled": {"recycle": True},
            "sparse": {"tree": "sparse"},
            "chain": {"tree": "chain", "max_depth": 2, "lookup": True},
            "wide": WIDE,
        },
        hitting="wide",
        adapters={
            "adaptive": SHARED, "recycled": SHARED,
            "sparse": {"num_layers": 2, "projection": "own"},
        },
        configs={
            "shared": {"num_layers": 2, "num_heads": 3},
            "own": {"projection": "own"},
        },
    ),
    "mtp": Variants(
        {
            "adaptive": {},
            "chain": {"tree": "chain", "max_depth": 3, "lookup": True},
            "narrow": {"num_draft_tokens": 6, "width": 2},
            "wide": LEVEL,
        },
        hitting="wide",
        architectures=ROTARY,
    ),
    "plain": Variants({"default": {}}),
    "ppd": Variants(
        {
            "adaptive": {},
            "recycled": {"recycle": True},
            "static": {"tree": "static"},
            "paths": {"tree": [[0], [2], [0, 0], [0, 1], [0, 0, 0]], "lookup": True},
            "wide": WIDE,
        },
        hitting="wide",
        adapters={
            "adaptive": {**SHARED, "num_ept": 2}, "recycled": {**SHARED, "num_ept": 2},
        },
        configs={
            "plain": {},
            "one": {"num_prompt_tokens": 1},
            "ensemble": {"num_ept": 2},
            "decoder": {"num_ept": 2, "ept_mask": "decoder"},
            "encoder": {"num_ept": 3, "ept_mask": "encoder", "num_prompt_tokens": 2},
            "learned": {"num_ept": 2, "ept_aggregation": "learned"},
            "prefix": {"num_prefix_tokens": 2},
            "vocabulary": {"head": "vocabulary"},
            "residual": {"head": "residual"},
            "low rank": {"head": "residual", "head_rank": 2},
            "exits": {"num_exits": 2},
            "all": {
                "num_ept": 2, "ept_mask": "encoder", "ept_aggregation": "learned",
                "num_prefix_tokens": 1, "head": "vocabulary", "num_exits": 3,
            },
        },
    ),
    "prompt_lookup": Variants(
        {"tree": {}, "chain": {"max_matches": 1, "max_ngram": 2, "max_depth": 4}}
    ),
    "propd": Variants(
        {
            "adaptive": {"prune_top_k": 20, "prune": True},
            "recycled": {"prune_top_k": 20, "prune": True, "recycle": True},
            "sparse": {"tree": "sparse", "prune_top_k": 20, "prune": True},
            "online": {"tree": "online"},
            "chain": {"tree": "chain", "prune_top_k": 20, "prune": True, "lookup": True},
            "looked up": {"drafter": "prompt_lookup", "prune_top_k": 8, "prune": True},
            "wide": WIDE,
        },
        hitting="wide",
        adapters={"adaptive": SHARED},
        configs={"default": {}, "first layer": {"prune_layer": 1, "projection": "own"}},
    ),
    "space": Variants(
        {
            "adaptive": {},
            "chain": {"tree": "chain"},
            "match": {"tree": "chain", "acceptance": "match", "max_depth": 2, "lookup": True},
        },
        hitting="chain",
        sampled={"rejection": {"acceptance": "rejection"}},
        adapters={
            "adaptive": {**SHARED, "update": "gated"},
            "chain": {},
            "match": {"update": "gated"},
        },
        configs={
            "gated": {"rank": 2, "markov_rank": 3},
            "lora": {"update": "lora", "rank": 3, "num_mask_tokens": 2, "p_ar": 0.0},
            "shared": {"update": "none", "shared_mask": True},
        },
    ),
    "token_recycling": Variants(
        {
            "adaptive": {},
            "paths": {"tree": [[0], [2], [0, 0], [0, 1], [0, 0, 0]], "lookup": True},
            "chain": {"tree": "chain", "max_depth": 3, "keep_table": False},
        },
        configs={"table": {"num_entries": 300, "table_size": 2000}, "empty": {}},
    ),
}  # fmt: skip
