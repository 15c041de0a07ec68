"""A small model in the shape of a larger one: the same text, the step times of the larger one.

For :mod:`gpu`. ``python benchmarks/wide.py MODEL --layers 48 --output D`` makes a deeper one, with
copies of adapters (``--adapter``) in ``D/adapters`` that fit it.

Hidden states are padded with zeros, for which norms are scaled. Heads and neurons that are new have
random weights and end in zeros; new layers add nothing. Adapters are widened alike, so that what is
accepted is that of a real drafter of a real model, and a step takes what the larger one takes.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_spec.adapters.config import MARKOV_HEAD, facts_of
from hf_spec.adapters.loading import find_active
from hf_spec.files import write_json
from hf_spec.predict.decoder import DecoderConfig

#: Standard deviation of random weights.
STD = 0.02
#: Parameters whose input is several hidden states side by side, in adapters.
BESIDE = ("fc", "q_proj", "k_proj", "v_proj", "input_norm")
#: Fields of a decoder's config that are as its base has them.
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 128256  # of models of random weights

    @classmethod
    def of(cls, config: Any) -> Shape:
        """That of a model, by its config."""
        return cls(
            config.hidden_size, config.num_hidden_layers, config.num_attention_heads,
            config.num_key_value_heads, config.intermediate_size, config.vocab_size,
        )  # fmt: skip

    def doubled(self) -> Shape:
        """Twice of everything, with one layer more."""
        return Shape(*(2 * size for size in self))._replace(
            layers=self.layers + 1, vocabulary=self.vocabulary
        )


#: Shapes of about so many parameters that SmolLM2-135M, with heads of 64, fits into; a tiny one.
SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 128, 512),
    "1b": Shape(2048, 30, 32, 8, 4096),
    "3b": Shape(3072, 30, 48, 12, 8192),
    "8b": Shape(4096, 32, 64, 16, 14336),
}


def built(kind: Any, config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of random weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return kind(config).eval()
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def widened(small: Any, shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama of this shape that computes what the small one does.

    Raises:
        ValueError: the model is no Llama, or does not fit into the shape.
    """
    config, own = copy.deepcopy(small.config), Shape.of(small.config)
    groups = own.heads // own.kv_heads <= shape.heads // shape.kv_heads
    if config.model_type != "llama" or not groups or any(a > b for a, b in zip(own[:5], shape)):
        raise ValueError(f"a {config.model_type} of {own} does not fit into a Llama of {shape}")
    config.update({
        "head_dim": getattr(config, "head_dim", None) or own.hidden // own.heads,
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate, "tie_word_embeddings": False,
        "rms_norm_eps": config.rms_norm_eps * own.hidden / shape.hidden,
    })  # fmt: skip
    wide = built(type(small), config, device, dtype)
    tensors = small.state_dict()
    for name, weight in wide.state_dict().items():
        kind = _kind(name)
        if kind in ("embed_tokens", "o_proj", "down_proj") or weight.ndim == 1:
            weight.zero_()
        else:
            weight.normal_(std=STD)
        if name in tensors:
            _put(weight, tensors[name], name, small.config, wide.config)
    wide.generation_config = small.generation_config
    return wide


@torch.no_grad()
def widen_adapter(name: str, small: Any, wide: Any) -> None:
    """Give the wide model the small one's adapter of this name, which drafts the same tokens.

    Raises:
        ValueError: it is a decoder of another shape than the model's.
    """
    config = copy.deepcopy(small.peft_config[name])
    config.base_facts = config.base_model_name_or_path = None
    config.inference_mode = False  # else shapes that are recorded stay
    if isinstance(config, DecoderConfig):
        config.rms_norm_eps *= small.config.hidden_size / wide.config.hidden_size
        for field in SIZES:
            found, here = (getattr(one, field, None) for one in (config, small.config))
            if here is not None and found != here:
                raise ValueError(f"adapter {name!r} with {field}={found}: the model has {here}")
            setattr(config, field, getattr(wide.config, field))
    wide.add_adapter(config, name)
    small.set_adapter(name)
    made, given = (find_active(model, config.peft_type) for model in (wide, small))
    assert made is not None and given is not None
    tensors = given.state_dict()
    for key, weight in made.state_dict().items():
        weight.zero_()
        _put(weight, tensors[key], key, small.config, wide.config)


def _kind(name: str) -> str:
    """Of a parameter, the module that it belongs to."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _put(weight: Tensor, known: Tensor, name: str, small: Any, wide: Any) -> None:
    """Write a tensor of a small model into the place that it has in a wide one's."""
    kind, known = _kind(name), known.to(weight)
    places = [torch.arange(size, device=weight.device) for size in known.shape]
    if kind in ("q_proj", "o_proj"):
        at = -2 if kind == "q_proj" else -1
        places[at] = _heads(small, wide).to(weight.device)
    if kind in BESIDE:
        count, rest = divmod(known.shape[-1], small.hidden_size)
        if not rest and count > 1:
            places[-1] = (places[-1].view(count, -1) + (
                torch.arange(count, device=weight.device)[:, None]
                * (wide.hidden_size - small.hidden_size)
            )).flatten()  # fmt: skip
    # Norms, and what reads embeddings of root mean square 1.
    if (weight.ndim == 1 and weight.is_floating_point()) or kind == MARKOV_HEAD[0]:
        known = known * (known.shape[-1] / weight.shape[-1]) ** 0.5
    weight[torch.meshgrid(*places, indexing="ij")] = known


def _heads(small: Any, wide: Any) -> Tensor:
    """Where the query heads of a small key-value head are among those of a wide one: rows of
    ``q_proj``."""
    each, wide_each = (
        config.num_attention_heads // config.num_key_value_heads for config in (small, wide)
    )
    head = torch.arange(small.num_attention_heads)
    first = (head // each * wide_each + head % each) * wide.head_dim
    return (first[:, None] + torch.arange(wide.head_dim)).flatten()


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a Llama, or repository on the Hub")
    parser.add_argument("--layers", type=int, required=True, help="number of layers afterwards")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--adapter", type=Path, action="append", default=[], help="folder")
    args = parser.parse_args(given)
    small: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    shape = Shape.of(small.config)._replace(layers=args.layers)
    try:
        wide = widened(small, shape, torch.device("cpu"), small.dtype)
    except ValueError as error:
        parser.error(str(error))
    wide.save_pretrained(args.output)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.output)
    for source in args.adapter:
        target = args.output / "adapters" / source.name
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("checkpoints"))
        place = target / "adapter_config.json"
        config = {**json.loads(place.read_text()), "base_facts": facts_of(wide)}
        write_json(place, config, indent=2)


if __name__ == "__main__":
    main()
