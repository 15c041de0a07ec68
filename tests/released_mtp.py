"""Random layers for multi-token prediction in checkpoints, under the names of released ones."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import architectures
import torch
from random_mtp import random_layers
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_spec.methods.mtp import SINGLE
from hf_spec.modeling_patches.mtp import MtpLayers

#: Types whose checkpoints have such layers, and how these are called there.
FAMILIES = {
    "deepseek_v3": "numbered", "glm4_moe": "numbered", "glm4_moe_lite": "numbered",
    "exaone_moe": "shared", "mellum": "shared", "qwen3_next": "shared", "qwen3_5_text": "shared",
    "qwen3_5_moe_text": "shared", "mimo_v2_flash": "mimo", "ernie4_5_moe": "ernie",
    "nemotron_h": "nemotron",
}  # fmt: skip
NAMES = {
    "numbered": ("model.layers.4.", "model.layers.4.", {"post_norm": "shared_head.norm"}),
    "shared": (
        "mtp.layers.0.", "mtp.",
        {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden",
         "post_norm": "norm"},
    ),
    "mimo": ("model.mtp.layers.0.", "model.mtp.layers.0.", {"post_norm": "final_layernorm"}),
    "ernie": (
        "model.mtp_block.0.", "model.mtp_",
        {"eh_proj": "linear_proj.0", "enorm": "emb_norm.0", "hnorm": "hidden_norm.0"},
    ),
    "nemotron": (
        "mtp.layers.", "mtp.layers.",
        {"eh_proj": "0.eh_proj", "enorm": "0.enorm", "hnorm": "0.hnorm",
         "post_norm": "1.final_layernorm"},
    ),
}  # fmt: skip
#: Parts of blocks that are called otherwise.
RENAMED = {"mimo": ("post_attention_layernorm", "pre_mlp_layernorm")}


def released(model_type: str, layer: Any) -> dict[str, Tensor]:
    """The tensors of a layer by the released names of the first one, experts one by one."""
    family = FAMILIES[model_type]
    block, others, names = NAMES[family]
    found: dict[str, Tensor] = {}
    for name, tensor in layer.state_dict().items():
        part, _, rest = name.partition(".")
        if part != "mtp_block":
            found[f"{others}{names.get(part, part)}.{rest}"] = tensor
            continue
        for own, value in _experts(rest.replace(*RENAMED.get(family, ("", ""))), tensor):
            found[block + own] = value
    if family == "ernie":  # which has no norm behind its layer
        del found[f"{others}post_norm.weight"]
    return found


def _experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    stem, _, last = name.rpartition(".")
    if not stem.endswith("experts"):
        yield name, tensor
        return
    for number, expert in enumerate(tensor):
        halves = expert[: len(expert) // 2], expert[len(expert) // 2 :]
        parts = {"gate_proj": halves[0], "up_proj": halves[1]}
        for key, value in (parts if last == "gate_up_proj" else {last: expert}).items():
            yield f"{stem}.{number}.{key}.weight", value.contiguous()


def checkpoint(model_type: str, folder: Path) -> tuple[Any, MtpLayers]:
    """A tiny random model that was loaded from a folder, and its layers for multi-token prediction,
    which the folder has."""
    model: Any = copy.deepcopy(architectures.build(model_type))
    ernie = FAMILIES[model_type] == "ernie"
    if ernie:
        torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
    model.save_pretrained(folder)
    made = random_layers(model, torch.device("cpu"), torch.float32, sparse=not ernie)
    if ernie:
        made.layers[0].post_norm.weight = model.model.norm.weight
    add_tensors(model, folder, released(model_type, made.layers[0]))
    return model, made


def add_tensors(model: Any, folder: Path, more: dict[str, Tensor]) -> None:
    """Put tensors into a checkpoint of one file, and let the model be loaded from it."""
    tensors = load_file(folder / SINGLE)
    save_file({**tensors, **more}, folder / SINGLE, metadata={"format": "pt"})
    model.config.name_or_path = model.name_or_path = str(folder)
