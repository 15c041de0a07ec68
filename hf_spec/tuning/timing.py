"""What is shared by all that times forwards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def rising(values: Sequence[float]) -> list[float]:
    """More nodes never cost less: a dip is noise, and would make longer drafts look free."""
    return np.maximum.accumulate(np.array(values)).tolist()
