"""Options that the contract test runs with."""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "first_layer": {"skip_attention": [0], "skip_mlp": [], "draft_exit": "fixed"},
    "adaptive": {
        "skip_attention": [1], "skip_mlp": [2], "draft_exit": "adaptive", "threshold": 0.2,
        "max_draft": 4,
    },
    "merged": {"skip_attention": [1], "skip_mlp": [], "max_draft": 3, "retrieval": True},
}  # fmt: skip
#: Variants that sample candidates and verify them by rejection.
SAMPLED: dict[str, dict[str, Any]] = {
    "rejection": {**VARIANTS["first_layer"], "acceptance": "rejection"},
    "sampled": {**VARIANTS["merged"], "acceptance": "rejection"},
}
