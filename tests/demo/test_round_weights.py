"""The weights that are shipped have few significant bits, so that they compress."""

import math

import torch
from safetensors.torch import load_file, save_file
from scripts import load_script

from hf_spec.tools import demo


def significant_bits(number: float) -> int:
    """Of a number's binary digits, those from the first 1 to the last."""
    mantissa, _ = math.frexp(abs(number))
    return next(bits for bits in range(64) if (mantissa * 2**bits).is_integer())


def test_numbers_are_rounded_to_the_nearest_of_five_bits(tmp_path):
    script = load_script("round_weights")
    torch.manual_seed(0)
    values = torch.cat(
        [torch.randn(2000) * 10.0 ** torch.randint(-30, 30, (2000,)), torch.zeros(1)]
    )
    file = tmp_path / "x.safetensors"
    save_file({"values": values, "ids": torch.arange(4096)}, file, {"format": "pt"})
    script.main([str(file)])
    found = load_file(file)
    assert torch.equal(found["ids"], torch.arange(4096)) and list(tmp_path.iterdir()) == [file]
    rounded = found["values"]
    assert rounded.dtype == torch.bfloat16 and rounded[-1] == 0
    assert max(map(significant_bits, rounded.tolist())) == script.BITS
    # Half of the last bit's worth, relative to the power of two below the number.
    assert ((rounded - values).abs() <= values.abs() / 2**script.BITS).all()
    assert torch.equal(script.rounded(rounded), rounded)


def test_the_shipped_weights_are_rounded():
    files = [demo.model_folder(), *demo.adapter_folders()]
    for file in (path for folder in files for path in folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            assert torch.equal(load_script("round_weights").rounded(tensor), tensor), name
