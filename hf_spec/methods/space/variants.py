"""Options that are worth a run of the contract test of their own."""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "auto": {},
    "match": {"acceptance": "match", "num_candidates": 2, "retrieval": True},
}
#: Hits, untrained as it is, where few tokens are allowed.
HITTING = "auto"
#: Candidates are sampled, and verified by rejection.
SAMPLED: dict[str, dict[str, Any]] = {"rejection": {"acceptance": "rejection"}}
