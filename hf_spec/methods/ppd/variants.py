"""Options that the contract test runs with."""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "static": {"tree": "static"},
    "wide": {"tree": [[rank] for rank in range(61)], "max_depth": 1},  # every token of its models
}
#: Variant whose candidates are accepted without training, if few tokens are allowed.
HITTING = "wide"
#: Fields of the adapter's config by variant; the parameters are random.
ADAPTERS: dict[str, dict[str, Any]] = {
    "adaptive": {"transition_rank": 4, "root_rank": 3, "draft_vocab_size": 40, "num_ept": 2}
}
