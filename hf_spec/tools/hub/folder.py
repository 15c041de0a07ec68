"""Writes adapter folders, and checks that they are complete. Every file is written atomically."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model

import hf_spec
from hf_spec.adapters.checkpoint import CONFIG, WEIGHTS, read_weights
from hf_spec.adapters.config import (
    CARD,
    GENERATION,
    MEASURED,
    SHIM,
    replacing_adapter,
    says_the_same,
    shim_text,
)
from hf_spec.core.checks import names_its_files
from hf_spec.files import is_path, read_json, write_atomically
from hf_spec.methods.registry import Method, get_method

REQUIRED = (CONFIG, WEIGHTS, GENERATION, CARD)
#: What was measured of the adapter.
SEARCH, TRAINING, RESULTS = MEASURED
#: Files that are uploaded if they exist; the shim is always written anew.
OPTIONAL = (*MEASURED, "*.png", "LICENSE")
#: Weights in formats that run code when they are loaded.
UNSAFE = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")


def save_adapter(
    model: Any, folder: Path, strategy: str, options: dict[str, Any],
    state: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write the adapter ``default`` of a ``PeftModel`` with its ``SpecConfig``: all of a folder but
    the card. ``state`` is the model's state dict, where its own tensors are sharded."""
    with replacing_adapter(folder) as temporary:
        model.save_pretrained(temporary, state_dict=state, save_embedding_layers=False)
    save_spec_config(folder, strategy, options)


@contextmanager
def attached(
    model: Any, adapter_config: Any, in_float32: bool = False, on_meta: bool = False,
    trained: Path | None = None,
) -> Iterator[Any]:  # fmt: skip
    """Give a ``PeftModel`` with an adapter; ``model`` is restored after the block.

    Args:
        adapter_config: the adapter's config; None for that of ``trained``.
        in_float32: whether an adapter of a 16-bit model is kept in float32, as PEFT does for
            training.
        on_meta: whether the adapter has no weights yet.
        trained: folder of a trained adapter whose weights it gets; None for a new one.
    """
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from PEFT's call of Transformers
        options = {"autocast_adapter_dtype": in_float32, "low_cpu_mem_usage": on_meta}
        if trained is None:
            peft_model = get_peft_model(model, adapter_config, **options)
        else:
            peft_model = PeftModel.from_pretrained(
                model, str(trained), config=adapter_config, is_trainable=True, **options
            )
    try:
        yield peft_model
    finally:
        peft_model.unload()
        for parameter, before in zip(model.parameters(), trainable):
            parameter.requires_grad_(before)


def save_spec_config(folder: Path, strategy: str, options: dict[str, Any]) -> None:
    """Write ``generation_config.json``, and the shim with the same strategy and options."""
    config = hf_spec.SpecConfig(assistant_strategy=strategy, assistant_kwargs=options)
    write_atomically(folder / GENERATION, config.to_json_string())
    write_shim(folder)


def write_shim(folder: Path) -> None:
    """Write ``custom_generate/generate.py`` with the strategy and options of the folder."""
    method, options = read_spec_config(folder)
    write_atomically(folder / SHIM, shim_text(method.name, options, method.peft_type))


@names_its_files
def read_spec_config(folder: Path) -> tuple[Method, dict[str, Any]]:
    """The strategy and options in ``generation_config.json``."""
    data = read_json(folder / GENERATION)
    strategy, options = data.get("assistant_strategy"), data.get("assistant_kwargs") or {}
    if not strategy:
        raise ValueError(f"{str(folder / GENERATION)!r} names no assistant_strategy")
    method = get_method(strategy)
    method.parse_options(options)
    return method, options


@names_its_files
def check_complete(folder: Path) -> None:
    """Check that a folder is a complete adapter repository whose files fit together."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}")
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    if missing:
        remedy = f"; 'hf-spec card {folder}' writes {CARD}" if CARD in missing else ""
        raise ValueError(f"{str(folder)!r} is no complete adapter: no {', '.join(missing)}{remedy}")
    unsafe = sorted(path.name for kind in UNSAFE for path in folder.glob(kind))
    if unsafe:
        raise ValueError(
            f"{str(folder)!r} holds weights that can run code when loaded ({', '.join(unsafe)}): "
            f"weights belong into {WEIGHTS}; remove them"
        )
    method, options = read_spec_config(folder)
    peft_type = read_json(folder / CONFIG).get("peft_type")
    if peft_type != method.peft_type:
        raise ValueError(
            f"{CONFIG} is of type {peft_type!r}, but {GENERATION} names strategy {method.name!r}, "
            f"whose adapters are of type {method.peft_type!r}"
        )
    if not read_weights(folder / WEIGHTS):
        raise ValueError(f"{str(folder / WEIGHTS)!r} holds no tensors; PEFT would not load it")
    shim = folder / SHIM
    if shim.is_file() and not says_the_same(
        shim.read_text(encoding="utf-8"), method.name, options, peft_type
    ):
        raise ValueError(
            f"{SHIM} does not say what {GENERATION} says; 'hf-spec card {folder}' writes it anew"
        )


def is_repository(name: str | None) -> bool:
    """Whether a name is a repository on the Hub (``name``, ``owner/name``) and no local folder."""
    return not (not name or is_path(name) or Path(name).is_dir())
