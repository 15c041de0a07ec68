"""Options that are worth a run of the contract test of their own."""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "sparse": {"tree": "sparse"},
    "chain": {"tree": "chain", "max_depth": 2, "retrieval": True},
    "wide": {"tree": [[rank] for rank in range(61)], "max_depth": 1},  # every token of its models
}
#: Hits, untrained as it is, where few tokens are allowed.
HITTING = "wide"
#: Fields of the adapter's config; its parameters are random then.
ADAPTERS: dict[str, dict[str, Any]] = {"adaptive": {"transition_rank": 4, "draft_vocab_size": 40}}
