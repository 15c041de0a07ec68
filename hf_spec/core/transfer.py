"""Small tensors on their way to a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sent(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.tensor(values, device=device)``, for which the host does not wait.

    It would otherwise wait for all that the device still has to do.
    """
    # From memory that is not pinned: the host's copy is made before this returns.
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
