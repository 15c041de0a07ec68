"""Folders with a tiny model and an untrained adapter, and ``hf-spec tune`` on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from tiny_checkpoint import save_checkpoint, write_prompts
from transformers import AutoModelForCausalLM

from hf_spec import cli


def make(root: Path, config: PeftConfig, *more: str) -> Path:
    """Model ``m``, prompts ``p.jsonl``, and an adapter, ``tuned`` with these options and not."""
    save_checkpoint(root / "m")
    rows = [{"prompt": text} for text in ("abab" * 4, "xyz xyz xyz", "one one one")]
    write_prompts(root / "p.jsonl", rows)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(root / "m", dtype=torch.float32)
    get_peft_model(model, config).save_pretrained(root / "tuned")
    (root / "tuned" / "README.md").unlink()  # PEFT's general one
    shutil.copytree(root / "tuned", root / "untuned")
    assert tune(root, *more) == 0
    return root


def tune(root: Path, *more: str, adapter: str = "tuned") -> int:
    return cli.main(
        [
            "tune", "--model", str(root / "m"), "--adapter", str(root / adapter),
            "--prompts", str(root / "p.jsonl"), "--dtype", "float32", "--device", "cpu",
            "--max-new-tokens", "24", "--max-size", "12", *more,
        ]
    )  # fmt: skip


def load(root: Path, adapter: str | None = "tuned") -> Any:
    model = AutoModelForCausalLM.from_pretrained(root / "m", dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    if adapter is not None:
        model.load_adapter(root / adapter)
    return model


def content(root: Path, adapter: str = "tuned") -> dict[str, Any]:
    return json.loads((root / adapter / "tree.json").read_text())
