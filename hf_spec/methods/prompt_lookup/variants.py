"""Options that the contract test runs with."""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "tree": {},
    "chain": {"max_matches": 1, "max_ngram": 2, "max_depth": 4},
}
