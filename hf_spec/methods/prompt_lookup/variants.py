"""Options that are worth a run of the contract test of their own."""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "tree": {},
    "chain": {"max_matches": 1, "max_ngram": 2, "max_depth": 4},
}
