"""Round weights so that they compress: ``python benchmarks/round_weights.py FILE.safetensors ...``.

Floating-point tensors become bfloat16 with `BITS` significant bits instead of eight, in place: the
three bits that are zero take no space in a wheel or in git. The demo model's predictions change by
7e-4 nats (KL divergence over the demo's prompts), and `test_distribution.py` bounds its size.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

BITS = 5


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """The nearest bfloat16 numbers of `BITS` significant bits; tensors of integers as they are."""
    if not tensor.is_floating_point():
        return tensor
    mantissa, exponent = torch.frexp(tensor.float())
    return torch.ldexp((mantissa * 2**BITS).round() / 2**BITS, exponent).bfloat16().contiguous()


def main(files: list[str]) -> None:
    for file in files:
        with safe_open(file, "pt") as source:
            metadata = source.metadata()
            names = source.keys()
            tensors = {name: rounded(source.get_tensor(name)) for name in names}
        temporary = Path(file).with_suffix(".tmp")
        save_file(tensors, temporary, metadata)
        temporary.replace(file)


if __name__ == "__main__":
    main(sys.argv[1:])
