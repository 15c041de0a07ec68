"""Options that are worth a run of the contract test of their own."""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "chain": {"tree": "chain"},
    "match": {"tree": "chain", "acceptance": "match", "max_depth": 2, "retrieval": True},
}
#: Hits, untrained as it is, where few tokens are allowed.
HITTING = "chain"
#: Candidates are sampled, and verified by rejection.
SAMPLED: dict[str, dict[str, Any]] = {"rejection": {"acceptance": "rejection"}}
#: Fields of the adapter's config; its parameters are random then.
ADAPTERS: dict[str, dict[str, Any]] = {
    "adaptive": {"transition_rank": 4, "draft_vocab_size": 40, "update": "gated"},
    "match": {"update": "gated", "masks": "noise"},
}
