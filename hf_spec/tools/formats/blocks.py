"""Released block drafters: DFlash, DFlash 2, JetSpec, DSpark, Domino, DSpine and xPress.

Formats name most tensors as :class:`BlockAdapter` does; by their ``config.json`` they are:

* speculators': ``speculators_model_type``, with the layers described by a part of it.
* z-lab's and SpecForge's, which SGLang reads: the config of Qwen3 layers with ``dflash_config``.
  ``target_layer_ids`` number layers by their *outputs*, one less; without them, they are evenly
  spaced.
* DeepSpec's: the same fields without ``dflash_config``, beside ``num_anchors``; -1 is the
  embeddings, of which it has a frozen copy. Layers may be those of Gemma 4.
* Transformers' ``muse_glimmer_assistant``: likewise; two tensors have other names, and slots of
  layers with a window see those behind them.

A field that is not known is an error; in flat configs, which hold fields of models, one that is on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_spec.drafting.block_diffusion.dspark import CONFIDENCE
from hf_spec.drafting.draft_vocabulary import HEAD
from hf_spec.tools.formats import block_kinds as kinds
from hf_spec.tools.formats import block_writers, tables
from hf_spec.tools.formats.tables import KIND, OF_DEEPSPEC, Files, Reader


def kind_of(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """One of :data:`KINDS`, by a checkpoint's config and, where that says no more than DFlash, the
    names of its tensors; None if it is none of them."""
    part = tables.group(config, kinds.GROUP)
    named = config.get(KIND) or part.get("projector_type")
    architectures = " ".join(map(str, config.get("architectures") or ()))
    if named is not None:
        found = named if named in kinds.KINDS else None
    else:
        likely = [name for name, kind in kinds.KINDS.items() if kind.name in architectures]
        found = "dflash" if part or config.get("model_type") == kinds.MUSE else None
        found = likely[-1] if likely else found
    if found == "dflash":
        own = [
            name for name, kind in kinds.KINDS.items()
            if kind.tensors and any(one.startswith(kind.tensors) for one in names)
        ]  # fmt: skip
        found = own[0] if own else found
    return found


def recognizes(strategy: str, config: Mapping[str, Any], names: Collection[str]) -> bool:
    kind = kind_of(config, {tables.own_name(name, kinds.NAMES) for name in names})
    return kind is not None and kinds.KINDS[kind].strategy == strategy


def convert(strategy: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Files:
    """Fields of ``BlockConfig`` and the adapter's parameters, from a released checkpoint.

    Args:
        strategy: ``dflash`` or ``dspark``.

    Raises:
        ValueError: naming the field or tensor that is missing, unknown, or does not fit.
    """
    layers, weights = tables.described(config), tables.renamed(tensors, kinds.NAMES)
    kind = kind_of(config, weights)
    if kind is None:
        raise ValueError(
            f"config.json is that of no known layout: it has neither {KIND} nor {kinds.GROUP}"
        )
    if kinds.KINDS[kind].strategy != strategy:
        raise ValueError(f"it is of type {kind!r}: give --type {kinds.KINDS[kind].strategy}")
    if not bool(weights.pop(kinds.READY, torch.tensor(True))):
        raise ValueError(
            f"{kinds.READY!r} is false: its codes have not been made, and cannot be now"
        )
    fields = _Said(kind, config, layers).fields()
    known, stated = fields["base_facts"].get("vocab_size", 0), fields.get("draft_vocab_size")
    drafted = fields["draft_vocab_size"] = tables.take_vocabulary(weights, known, stated)
    fields["head"] = "own" if drafted or HEAD in weights else "base"
    if fields.get("confidence_head"):
        weights.setdefault(CONFIDENCE[1], torch.zeros(1))  # DeepSpec's has none
    return fields, weights


class _Said:
    """What ``config.json`` says of a drafter of the kind ``name``.

    Attributes:
        ours: whether it is in speculators' format.
        part, own: the groups of fields of all block drafters, and of this kind, if it has them.
        all: fields wherever they stand.
    """

    def __init__(self, name: str, config: Mapping[str, Any], layers: Mapping[str, Any]):
        self.config, self.layers, self.kind = config, layers, kinds.KINDS[name]
        self.dspark, self.muse = name == "dspark", config.get("model_type") == kinds.MUSE
        self.ours, self.part = KIND in config, tables.group(config, kinds.GROUP)
        self.own = tables.group(config, self.kind.group)
        self.all = tables.merged(self.own, self.part, config)
        deepspec = not (self.ours or self.part)
        self.type = tables.layer_type(layers, kinds.TYPES, kinds.TYPES[0], deepspec)

    def fields(self) -> dict[str, Any]:
        """Fields of ``BlockConfig``, before the weights are looked at."""
        self._check()
        facts = self._base_facts()
        fields: dict[str, Any] = {
            "sample_from_anchor": self.dspark,
            **tables.layer_fields(self.layers, self.type),
            "attention_bias": self.layers.get("attention_bias", False),
            "base_facts": facts,
            "causal": _causal(self.config, self.part),
            **tables.fields_of(self.all, kinds.FIELDS | kinds.SCALES | dict(self.kind.fields)),
            "draft_vocab_size": self.all.get("draft_vocab_size"),
        }
        self._head(fields)
        if self.ours:
            fields["layers"] = tables.numbered(self.config.get(kinds.IDS), 0)
        else:
            spaced = _spaced(facts.get("num_hidden_layers"), self.layers["num_hidden_layers"])
            fields["layers"] = tables.numbered(self.all.get(OF_DEEPSPEC, spaced), 1)
        return fields | self._windows()

    def _check(self) -> None:
        """Raise a ValueError for a field that is not known, or not supported."""
        flags, known = {**self.part, **self.own}, kinds.KNOWN
        if self.ours:
            flags, known = dict(self.config), kinds.KNOWN | kinds.OF_SPECULATORS
        elif not flags:  # fields that are on, and none of the model that the layers are of
            of_model = self.type.config_class()().to_dict()
            flags = {n: one for n, one in self.config.items() if one is True and n not in of_model}
        tables.check_known(flags, known)
        stated = kinds.NEUTRAL.keys() & self.config.keys()
        tables.check_known({name: self.config[name] for name in stated}, kinds.NEUTRAL)
        tables.check_size("num_hidden_layers", self.layers.get("num_hidden_layers"))

    def _base_facts(self) -> dict[str, Any]:
        """What is known of the base."""
        names = ("hidden_size",) if self.muse else ("hidden_size", "vocab_size")
        facts: dict[str, Any] = {name: self.layers.get(name) for name in names}
        if self.config.get("num_target_layers"):
            facts["num_hidden_layers"] = self.config["num_target_layers"]
        for fact, value in facts.items():
            tables.check_size(fact, value)
        return facts

    def _head(self, fields: dict[str, Any]) -> None:
        """Complete the fields of heads; a ValueError if one is missing."""
        needed = {name: name for name in ("block_size", "mask_token_id")}
        if self.kind.head not in (None, "selector"):
            needed |= self.kind.fields
        for field, theirs in needed.items():
            if field not in fields:
                raise ValueError(f"config.json has no {theirs}")
        if fields.setdefault("markov_rank", 0) and self.kind.head is not None:
            fields["markov_head"] = self.kind.head
        if kinds.RATIO in self.all:
            tables.check_size(kinds.RATIO, self.all[kinds.RATIO])
            fields["markov_width"] = self.all[kinds.RATIO] * fields["markov_rank"]
        has_confidence, with_markov = kinds.CONFIDENCE_HEAD
        if self.dspark and self.all.get(has_confidence):
            fields["confidence_head"] = "markov" if self.all.get(with_markov, True) else "state"

    def _windows(self) -> dict[str, Any]:
        """Fields of layers with a sliding window; empty if there are none."""
        types = enumerate(self.layers.get("layer_types") or [])
        sliding = [place for place, one in types if one == "sliding_attention"]
        if not sliding:
            return {}
        # z-lab's are causal, unless they say that they are not.
        both = self.muse or self.config.get("is_causal") is not None
        return {
            "sliding_layers": sliding, "sliding_window": self.layers.get("sliding_window"),
            "sliding_window_from": "anchor" if self.ours else "query",
            kinds.CAUSAL: self.config.get(kinds.CAUSAL, False) if self.ours else both,
        }  # fmt: skip


def _causal(config: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether blocks are causal: none of the flags means that they are not."""
    places = {kinds.GROUP: part, "config.json": config}
    said = {
        f"{name} of {place}": fields[name]
        for place, fields in places.items() for name in kinds.CAUSAL_BLOCK
        if fields.get(name) is not None
    }  # fmt: skip
    if any(type(value) is not bool for value in said.values()) or len({*said.values()}) > 1:
        raise ValueError(
            f"config.json does not say whether blocks are causal: {said}. Ask whoever made it, and "
            "let all say the same, true or false"
        )
    return any(said.values())


def _spaced(base: int | None, count: Any) -> list[int] | None:
    """The layers of a base that so many layers read, by their outputs, where none are named."""
    if base is None or count == 1:
        return None if base is None else [base // 2]
    return [round(1 + (base - 4) * place / (count - 1)) for place in range(count)]


READERS = {
    kind: Reader(
        lambda name: not name.endswith(kinds.UNUSED), partial(convert, kind),
        partial(recognizes, kind),
        partial(tables.without_copy, name=HEAD, head="base"),
    )
    for kind in ("dflash", "dspark")
}  # fmt: skip
WRITERS = {"speculators": block_writers.speculators, "sglang": block_writers.specforge}
