"""Options that the contract test runs with."""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "adaptive": {"prune_top_k": 20, "prune": True},
    "sparse": {"tree": "sparse", "prune_top_k": 20, "prune": True},
    "online": {"tree": "online"},
    "chain": {"tree": "chain", "prune_top_k": 20, "prune": True, "retrieval": True},
    "looked up": {"drafter": "prompt_lookup", "prune_top_k": 8},
    "wide": {"tree": [[rank] for rank in range(61)], "max_depth": 1},  # every token of its models
}
#: Variant whose candidates are accepted without training, if few tokens are allowed.
HITTING = "wide"
#: Fields of the adapter's config by variant; the parameters are random.
ADAPTERS: dict[str, dict[str, Any]] = {
    "adaptive": {"transition_rank": 4, "root_rank": 3, "draft_vocab_size": 40}
}
