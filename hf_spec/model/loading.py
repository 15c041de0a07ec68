"""Loads a model by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_spec.core.checks import first_line

#: A model's folder has one of these, the second one if it is an adapter of PEFT.
CONFIGS = ("config.json", "adapter_config.json")


def load_model(
    path: str, dtype: str, device: str | None = None, attn_implementation: str | None = None
) -> tuple[Any, Any]:
    """A causal language model in evaluation mode on its device, and its tokenizer.

    Raises:
        ValueError: it cannot be loaded, or there is no such device.
    """
    import torch
    from huggingface_hub.utils import logging as hub_logging
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if is_path(path) and not Path(path).is_dir():
        raise ValueError(f"cannot load model {path!r}: there is no such folder")
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in CONFIGS):
        raise ValueError(f"cannot load model {path!r}: the folder has no {CONFIGS[0]}")

    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = "cpu" if accelerator is None else accelerator.type
    logging.disable_progress_bar()
    # Its retries would bury the one line that says what is wrong.
    hub_logging.set_verbosity_error()
    extra = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        target = torch.device(device)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **extra).to(target)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, AssertionError) as error:
        raise ValueError(f"cannot load model {path!r}: {first_line(error)}") from error
    return model.eval(), tokenizer


def is_path(name: str) -> bool:
    """Whether a model's name cannot be a repository on the Hub, ``name`` or ``owner/name``."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1
