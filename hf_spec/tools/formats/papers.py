"""Formats that are read, and not written: released heads of Medusa, alone or among the tensors of a
model that was trained with them; prompt tokens of PPD, in the format of PEFT's prompt tuning; and
fine-tuned layers for multi-token prediction.

Medusa's training script builds the blocks of a head from one module, so its files contain as many
equal copies, which are read as separate blocks. A head's own projection is missing if it is shared
(``"version": "2"``), or there is one copy of the base's (vLLM).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_spec.core.checks import MAX_BLOCKS, MAX_FUTURE
from hf_spec.modeling_patches.mtp import SPECULATORS, gathered
from hf_spec.predict.table import BIASES, PROJECTION, WEIGHTS
from hf_spec.tools.formats.tables import KIND, Files, Reader, check_size

#: Fields of both: without a Markov head, for all tokens.
AS_IN_PAPERS = {"markov_rank": 0, "draft_vocab_size": 0}
#: PPD's tensor.
EMBEDDINGS = "prompt_embeddings"

#: Names of tensors of head k, from 0, and its block j, for patterns below; of L blocks, ``k.L`` is
#: the projection. They may be behind ``medusa_head.``, ``medusa_heads.`` or ``medusa.``.
NAMES = (
    "{k}.{j}.linear.{part}", "{k}.{L}.weight",  # FasterDecoding's
    "{k}.medusa_layers.{j}.linear.{part}", "{k}.lm_head.weight",  # TensorRT-LLM's and ModelOpt's
    "blocks.{k}.layers.{j}.{part}", "lm_heads.{k}.weight",  # vLLM's
)  # fmt: skip
_PATTERNS = [
    re.compile(
        r"(?:module\.)?(?:(?:.+\.)?medusa(?:_heads?)?\.)?"
        + re.sub(r"\{(\w+)\}", r"(?P<\1>\\d+)", name.replace(".", r"\.")).replace(
            r"(?P<part>\d+)", "(?P<part>weight|bias)"
        )
    )
    for name in NAMES
]
#: Head and block; a projection has the number 0.
_Key = tuple[int, int]


def _parse(name: str) -> dict[str, str] | None:
    """The parts of a tensor's name by the names in `NAMES`; None if it is none of a head."""
    matches = (pattern.fullmatch(name) for pattern in _PATTERNS)
    return next((match.groupdict() for match in matches if match), None)


def convert(tensors: Mapping[str, Tensor], _: Mapping[str, Any]) -> Files:
    """Fields of ``MedusaConfig`` and the adapter's parameters, from released tensors by name."""
    found, ends = _by_kind(tensors)
    blocks, projections = found["weight"], found["projection"]
    if not blocks:
        raise ValueError(
            "it holds no heads: no '0.0.linear.weight' nor 'blocks.0.layers.0.weight', with "
            "'medusa_head.' or the like before it"
        )
    heads, layers = (1 + max(key[at] for key in blocks) for at in (0, 1))
    wanted = [(head, layer) for head in range(heads) for layer in range(layers)]
    hidden = next(iter(blocks.values())).shape[-1]
    weights = _stacked("block", blocks, wanted, (hidden, hidden))
    biases = weights.new_zeros(len(wanted), hidden)
    if found["bias"]:
        biases = _stacked("bias", found["bias"], wanted, (hidden,))
    result = {WEIGHTS: weights, BIASES: biases}
    result = {name: one.unflatten(0, (heads, layers)) for name, one in result.items()}
    shared = not projections or (set(projections) == {(0, 0)} and heads > 1)  # a copy of the base's
    if not shared:
        if wrong := [head for head, end in ends.items() if end != layers]:
            raise ValueError(
                f"head {wrong[0]} has its projection behind {ends[wrong[0]]} blocks, but {layers} "
                "blocks."
            )
        vocab = len(next(iter(projections.values())))
        keys = [(head, 0) for head in range(heads)]
        result[PROJECTION] = _stacked("projection", projections, keys, (vocab, hidden))
    projection = "shared" if shared else "own"
    fields = {"num_heads": heads, "num_layers": layers, "projection": projection}
    return {**fields, **AS_IN_PAPERS}, result


def _by_kind(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[_Key, Tensor]], dict[int, int]]:
    """The weights and biases of blocks, and the projections; and by head how many blocks are before
    its projection, where the name says so."""
    found: dict[str, dict[_Key, Tensor]] = {"weight": {}, "bias": {}, "projection": {}}
    ends: dict[int, int] = {}
    for name, tensor in tensors.items():
        if (parts := _parse(name)) is None:
            continue
        if not tensor.is_floating_point():
            raise ValueError(f"{name!r} is of type {tensor.dtype}: heads are floating point.")
        head, block, end = (int(parts.get(one, "0")[:9]) for one in ("k", "j", "L"))
        if head >= MAX_FUTURE or max(block, end) > MAX_BLOCKS:
            raise ValueError(
                f"{name[:80]!r}: at most {MAX_FUTURE} heads of {MAX_BLOCKS} blocks each are read."
            )
        if "L" in parts:
            ends[head] = end
        same = found[parts.get("part", "projection")]
        if (head, block) in same:
            raise ValueError(f"{name!r} is there twice, under different names.")
        same[head, block] = tensor
    return found, ends


def _stacked(
    what: str, found: Mapping[_Key, Tensor], wanted: Sequence[_Key], shape: tuple[int, ...]
) -> Tensor:
    """One tensor of those of all heads, which must have them all, of this shape."""
    for head, block in wanted:
        if (head, block) not in found:
            where = f"head {head}" + f", block {block}" * (what != "projection")
            raise ValueError(f"{where} has no {what}, others have one.")
        if found[head, block].shape != shape:
            raise ValueError(
                f"a tensor of head {head} has shape {tuple(found[head, block].shape)}, expected "
                f"{shape}."
            )
    if unknown := found.keys() - set(wanted):
        raise ValueError(f"there is a {what} of head {min(unknown)[0]}, which has no blocks.")
    return torch.stack([found[key] for key in wanted])


def wants(name: str) -> bool:
    return _parse(name) is not None


def convert_prompts(tensors: Mapping[str, Tensor], _: Mapping[str, Any]) -> Files:
    """Fields of ``PPDConfig`` and the adapter's parameters."""
    found = tensors.get(EMBEDDINGS)
    if found is None or found.ndim != 2:
        raise ValueError(f"it has no tensor {EMBEDDINGS!r} (prompt tokens, hidden)")
    return {"num_prompt_tokens": len(found), **AS_IN_PAPERS}, {"prompts": found}


# -- Layers for multi-token prediction that others have fine-tuned, in speculators' format ---------
#
# Such files hold the layers alone, with a config that describes the model's decoder layers. What is
# the model's own, its embeddings, is not read. The table of names is ``SPECULATORS`` of
# :mod:`hf_spec.modeling_patches.mtp`.

#: Field with the number of layers, and prefix of all parameters of an adapter.
COUNT, LAYERS = "num_nextn_predict_layers", "layers."


def convert_mtp(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Files:
    """Fields of ``MtpConfig``, and the layers' tensors by their names in ``MtpLayers``."""
    if config.get(KIND) != "mtp":
        raise ValueError(
            f"config.json beside it does not say {KIND}='mtp': layers of a model's own checkpoint "
            "need no import, assistant_strategy='mtp' reads them"
        )
    count = config.get(COUNT)
    check_size(COUNT, count, high=MAX_BLOCKS)
    found, there = {}, set()
    for name, tensor in tensors.items():
        layer, own = SPECULATORS.parse(name, 0) or (None, None)
        there.add(layer)
        found[f"{LAYERS}{layer}.{own}"] = tensor
    if there != {*range(count or 0)}:
        raise ValueError(
            f"its config.json has {COUNT}={count}, its tensors are of layers "
            f"{', '.join(sorted(map(str, there))) or 'none'}"
        )
    return {"num_layers": count, "sparse": any(".experts." in name for name in found)}, found


def as_the_model_has_them(
    model: Any, config: Any, weights: dict[str, Tensor]
) -> tuple[Any, dict[str, Tensor]]:
    """The same with the tensors of blocks as the model's classes want them, with experts stacked,
    say."""
    sources = {}
    for name in weights:
        layer, own = name.removeprefix(LAYERS).split(".", 1)
        sources[int(layer), own] = name
    found = gathered(model, sources, weights.__getitem__)
    return config, {f"{LAYERS}{name}": tensor for name, tensor in found.items()}


READERS = {
    "medusa": Reader(wants, convert, lambda _, names: any(map(wants, names))),
    "ppd": Reader(EMBEDDINGS.__eq__, convert_prompts, lambda _, names: EMBEDDINGS in names),
    "mtp": Reader(
        lambda name: SPECULATORS.parse(name, 0) is not None, convert_mtp,
        recognizes=lambda config, _: config.get(KIND) == "mtp", share=as_the_model_has_them,
    ),
}  # fmt: skip
