"""Options that the contract test runs with."""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "chain": {"tree": "chain"},
    "match": {"tree": "chain", "acceptance": "match", "max_depth": 2, "retrieval": True},
}
#: Variant whose candidates are accepted without training, if few tokens are allowed.
HITTING = "chain"
#: Variants that sample candidates and verify them by rejection.
SAMPLED: dict[str, dict[str, Any]] = {"rejection": {"acceptance": "rejection"}}
#: Fields of the adapter's config by variant; the parameters are random.
ADAPTERS: dict[str, dict[str, Any]] = {
    "adaptive": {"transition_rank": 4, "root_rank": 3, "draft_vocab_size": 40, "update": "gated"},
    "chain": {},
    "match": {"update": "gated", "masks": "noise"},
}
