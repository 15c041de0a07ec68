"""Tells whether weights have changed."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def bit_sums(parameters: Iterable[Tensor]) -> str:
    """A hash of parameters bit by bit; that of a base model must survive training."""
    digest = hashlib.sha256()
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for part in itertools.chain.from_iterable(map(_parts, parameters)):
        # A change of single bits is unlikely to keep both sums.
        flat = part.detach().contiguous().view(kinds[part.element_size()]).flatten().long()
        digest.update(f"{int(flat.sum())} {int((flat[::2]).sum())}".encode())
    return digest.hexdigest()


def _parts(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that make up a tensor subclass of a quantizer; otherwise the tensor."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor
