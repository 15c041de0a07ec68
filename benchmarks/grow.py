"""A deeper model with the same outputs: ``python benchmarks/grow.py MODEL --layers 32 --output D``.

Layers are appended whose sublayers add zero: copies of the last one with output projections of
zeros. Such a model costs what a deep one costs, and answers as the small one does: trained adapters
fit, and accept as much. Adapters given with ``--adapter`` are copied to ``D/adapters``, for the
grown model. For studies of depth on a machine where no deep model runs, such as ProPD's early
pruning; for Llama-like models.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_spec.adapters.base_model import facts_of
from hf_spec.files import write_atomically

#: What adds to the residual stream in a layer.
OUTPUTS = ("self_attn.o_proj", "mlp.down_proj")


def grow(model: Any, layers: int) -> None:
    """Append layers that add zero until the model has this many.

    Raises:
        ValueError: if the model has more, or is not like Llama.
    """
    have = model.model.layers if hasattr(model, "model") else ()
    named = dict(have[-1].named_modules()) if len(have) else {}
    if not all(name in named for name in OUTPUTS):
        raise ValueError(
            f"{type(model).__name__} has no layers with {' and '.join(OUTPUTS)}: give a model like "
            "Llama."
        )
    if layers < len(have):
        raise ValueError(f"--layers {layers}: the model has {len(have)} already; give more.")
    for index in range(len(have), layers):
        layer = copy.deepcopy(have[-1])
        layer.self_attn.layer_idx = index
        for name in OUTPUTS:
            for parameter in layer.get_submodule(name).parameters():
                torch.nn.init.zeros_(parameter)
        have.append(layer)
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        kinds = model.config.layer_types
        model.config.layer_types = [*kinds, *kinds[-1:] * (layers - len(kinds))]


def adapt(source: Path, target: Path, model: Any) -> None:
    """Copy an adapter for use on a grown model."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("checkpoints"))
    place = target / "adapter_config.json"
    config = json.loads(place.read_text())
    config |= {"base_facts": facts_of(model)}
    write_atomically(place, json.dumps(config, indent=2))


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder, or repository on the Hub")
    parser.add_argument("--layers", type=int, required=True, help="number of layers afterwards")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--adapter", type=Path, action="append", default=[], help="folder")
    args = parser.parse_args(given)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    grow(model, args.layers)
    model.save_pretrained(args.output)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.output)
    for adapter in args.adapter:
        adapt(adapter, args.output / "adapters" / adapter.name, model)


if __name__ == "__main__":
    main()
