"""Options that the contract test runs with."""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "static": {"tree": "static"},
    "dynamic": {
        "tree": [
            {"paths": [], "probes": [3]},
            {"paths": [[0], [1]], "probes": [2, 1, 3]},
            {"paths": [[0], [2], [0, 0]], "probes": [1, 3, 0, 2]},
            {"paths": [[0], [0, 0], [0, 1], [0, 0, 0]], "probes": [0, 2, 1, 3, 0]},
        ],
        "retrieval": True,
    },
    "wide": {"tree": [[rank] for rank in range(61)], "max_depth": 1},  # every token of its models
}
#: Variant whose candidates are accepted without training, if few tokens are allowed.
HITTING = "wide"
#: Fields of the adapter's config by variant; the parameters are random.
ADAPTERS: dict[str, dict[str, Any]] = {
    "adaptive": {"transition_rank": 4, "root_rank": 3, "draft_vocab_size": 40, "num_ept": 2}
}
