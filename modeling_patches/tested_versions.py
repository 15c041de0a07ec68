"""The newest versions of the libraries underneath that hf_spec is tested with.

This is the only place that looks at a version: whatever differs between versions is found by what
is there. A newer one may well work, so it is warned of and not refused.
"""

import functools
import importlib
import logging

from packaging.version import Version

logger = logging.getLogger(__name__)

#: Major and minor version by package, as in constraints.txt.
NEWEST_TESTED = {"transformers": "5.24", "peft": "0.21"}


@functools.cache
def warn_of_newer() -> None:
    """Warn, once, of each library of a newer minor version."""
    for name, tested in NEWEST_TESTED.items():
        found = importlib.import_module(name).__version__
        if Version(found).release[:2] > Version(tested).release:
            logger.warning(
                "hf_spec is tested up to %s %s; this is %s: should something fail or differ from "
                "plain generate, install '%s==%s.*'.", name, tested, found, name, tested,
            )  # fmt: skip
