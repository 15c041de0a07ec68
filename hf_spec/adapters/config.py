"""Configurations of adapters: base model, predicted tokens, files beside the weights."""

import filecmp
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Self

import peft
import torch
from packaging.version import Version
from peft import PeftConfig
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin

from hf_spec.adapters.checkpoint import CONFIG, WEIGHTS
from hf_spec.core.checks import (
    INSTALL,
    MAX_RANK,
    MAX_SHAPE,
    MAX_SIZE,
    SHARE,
    check_count,
    check_fields,
    choice,
    count,
    nearest,
    setting,
)
from hf_spec.files import read_json, staging, write_atomically
from hf_spec.modeling_patches.modules import num_layers
from hf_spec.modeling_patches.support import check_model, kv_shape
from hf_spec.modeling_patches.weights import input_features, output_features, placement

# --------------------------------------------------------------------------------------------------
# What adapters and answers record of their base model: its shape, and a short hash of its
# weights.
#
# An adapter fits a base of the same shape (`check_facts`). Answers are continued by a model of the
# same weights only (`weights_digest`).

#: Fields of a model's config; their names are Transformers' own.
FACTS = ("model_type", "hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size")
#: Entries per parameter that `weights_digest` reads, evenly spaced.
ENTRIES = 64


def facts_of(model: Any) -> dict[str, Any]:
    """`FACTS` of a causal language model, without those that its config lacks."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return {}
    config = config.get_text_config()
    found = {name: getattr(config, name, None) for name in FACTS}
    # Falcon has a name of its own; without grouped queries there are as many as heads.
    for other in ("num_kv_heads", "num_attention_heads"):
        if found["num_key_value_heads"] is None:
            found["num_key_value_heads"] = getattr(config, other, None)
    return {name: value for name, value in found.items() if value is not None}


def check_facts(adapter: str, made_for: dict[str, Any], base: str | None, model: Any) -> None:
    """Raise a ValueError unless a model has the shape of the base that an adapter was trained for.

    Its vocabulary may have grown since, as it does by ``resize_token_embeddings``.

    Args:
        adapter: the adapter's type, such as "BITA".
        made_for: facts of its base; those that the model's config lacks are skipped.
        base: name of its base.
    """
    found = facts_of(model)
    for name, value in made_for.items():
        here = found.get(name, value)
        grew = name == "vocab_size" and isinstance(value, int) and here > value
        if here == value or grew:
            continue
        where = f" ({base})" if base else ""
        resized = f" Or add the missing tokens first: resize_token_embeddings({value})."
        raise ValueError(
            f"this {adapter} adapter was made for a model with {name}={value!r}{where}, "
            f"{type(model).__name__} has {name}={here!r}. Load it onto "
            f"{base or 'the model it was made for'}, or make one for this model."
            f"{resized if name == 'vocab_size' else ''}"
        )


def weights_digest(model: Any) -> str | None:
    """16 hex digits that tell models of other weights apart; None if weights are not in memory.

    They depend on the dtype, and not on hf_spec's adapters. Changes to entries that are not read
    (all but :data:`ENTRIES` of each parameter), or to quantized weights, are not detected.
    """
    digest = hashlib.sha256(repr(facts_of(model)).encode())
    for name, parameter in model.named_parameters():
        # Quantized parameters are subclasses that not every operation works for.
        if name.startswith("spec_modules.") or type(parameter) is not nn.Parameter:
            continue
        if parameter.is_meta:  # as those are that accelerate has offloaded
            return None
        flat = parameter.detach().flatten()
        entries = flat[:: -(-len(flat) // ENTRIES) or 1].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + entries.numpy().tobytes())
    return digest.hexdigest()[:16]


def check_read_layers(model: nn.Module, layers: Sequence[int]) -> None:
    """Raise a ValueError if a published drafter reads the states of the base's last layer, by the
    numbers of ``output_hidden_states``."""
    last = num_layers(model)
    if last in layers:
        raise ValueError(
            f"it reads states {list(layers)} of {type(model).__name__}, which has {last} layers. "
            "Those of the last one are before the final norm in some programs, after it in others, "
            "and config.json does not say which. Take a drafter that reads earlier layers only"
        )


# -- Files beside an adapter's weights that describe how to decode with them -----------------------
#
# `generation_config.json` names the strategy and its options, for `SpecConfig.from_pretrained`;
# `custom_generate/generate.py` does the same for `generate(custom_generate=...)`.

CARD = "README.md"
#: What was measured of the adapter.
MEASURED = ("search.json", "training.json", "results.json")
#: The library in the metadata of a card.
OF_PEFT = re.compile(r"(\A---\n(?:(?!---\n).*\n)*?)library_name: peft\n")
GENERATION, SHIM = "generation_config.json", "custom_generate/generate.py"
#: The line of the shim that is filled in.
EMPTY = "SETTINGS: dict[str, Any] = {}\n"


def shim_text(
    strategy: str, options: dict[str, Any], peft_type: str | None, repository: str | None = None
) -> str:
    """`custom_generate/generate.py` for a strategy with these options, and for the adapter's type
    and repository on the Hub, if there are any.

    They are written into it, since Transformers runs a copy of the file elsewhere.
    """
    settings = {
        "strategy": strategy, "options": options, "peft_type": peft_type, "install": INSTALL,
        "repository": repository,
    }  # fmt: skip
    text = (files("hf_spec.hub_cards") / SHIM).read_text(encoding="utf-8")
    return text.replace(EMPTY, EMPTY.replace("{}", repr(settings)))


def says_the_same(shim: str, strategy: str, options: dict[str, Any], peft_type: str | None) -> bool:
    """Whether a shim's text is that of `shim_text` for some repository."""
    repository = re.search(r"'repository': '([\w./-]+)'}\n", shim)
    expected = shim_text(strategy, options, peft_type, repository[1] if repository else None)
    return shim.rstrip() == expected.rstrip()


def write_companions(folder: str | os.PathLike[str], config_class: Any, shim: bool = True) -> None:
    """Write the companions of an adapter, with its strategy's default options; without
    `custom_generate` unless ``shim``.

    Nothing that names a strategy is replaced: tuned options stay. A `generation_config.json` that
    names none, as Transformers saves a base model's, is completed. Adapters that belong to no
    strategy get no companions. In a card that PEFT has written, the library is hf_spec: the Hub
    would show PEFT's code for it, which does not know these adapters by itself.
    """
    if config_class.strategy is None:
        return
    card = Path(folder) / CARD
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    if OF_PEFT.match(text):
        write_atomically(card, OF_PEFT.sub(r"\1library_name: hf_spec\n", text))
    path = Path(folder) / GENERATION
    data = read_json(path, optional=True) or GenerationConfig().to_diff_dict()
    if not data.get("assistant_strategy"):
        # With _from_model_config=True, loading would drop the strategy.
        data |= {
            "_from_model_config": False, "assistant_strategy": config_class.strategy,
            "assistant_kwargs": {},
        }  # fmt: skip
        write_atomically(path, json.dumps(data, indent=2, sort_keys=True))
    if shim and not (Path(folder) / SHIM).is_file():
        options = data.get("assistant_kwargs") or {}
        text = shim_text(data["assistant_strategy"], options, config_class.type_name)
        write_atomically(Path(folder) / SHIM, text)


def check_replaces(folder: Path, kind: str | None) -> None:
    """Raise a ValueError if a folder holds a model, or an adapter of another type than ``kind``,
    whose files one of this type would replace."""
    found = read_json(folder / CONFIG, optional=True).get("peft_type")
    model = found is None and (folder / "config.json").is_file()
    if model or found not in (None, kind):
        what = "a model" if model else f"an adapter of type {found}"
        raise ValueError(
            f"{str(folder)!r} holds {what}, in whose place one of type {kind} would be written. "
            "Choose another folder."
        )


@contextmanager
def replacing_adapter(folder: Path, kind: str | None) -> Iterator[Path]:
    """Give a temporary folder for an adapter's config and weights, which move to ``folder`` after
    the block, unless it raises. Companions stay there; what was measured of an adapter with other
    weights is removed. See :func:`check_replaces`."""
    check_replaces(folder, kind)
    with staging(folder) as temporary:
        yield temporary
        for path in (CARD, GENERATION, SHIM):  # which saving writes, too
            (temporary / path).unlink(missing_ok=True)
        old = folder / WEIGHTS
        if old.is_file() and not filecmp.cmp(old, temporary / WEIGHTS, shallow=False):
            for name in MEASURED:
                (folder / name).unlink(missing_ok=True)


# -- Base class of hf_spec's adapter configs, which are saved as `adapter_config.json` -------------

#: Version of adapter_config.json and weights that this release writes, and the newest it reads.
FORMAT_VERSION = 1


class SpecPeftType(str):
    """Name of a PEFT type of hf_spec: a string with the `name` and `value` of an enum member.

    PEFT and Transformers read `.value`, compare with strings and write JSON. A real enum would have
    to list all methods here, or it could not be pickled.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        return str(self)

    @property
    def value(self) -> str:
        return str(self)


@dataclass
class SpecPeftConfig(PeftConfig):
    """Base of hf_spec's adapter configs: a dataclass whose defaults all work.

    Subclasses set `type_name`; their fields say by :func:`setting` which values are right. They may
    override `__post_init__` and `check_base`, calling these.
    """

    #: PEFT type in capitals, such as "BITA".
    type_name: ClassVar[str] = ""
    #: The strategy that uses such adapters; set when its method is registered.
    strategy: ClassVar[str | None] = None
    #: Whether an active adapter changes the model's output.
    changes_model: ClassVar[bool] = False
    #: Fields that earlier versions wrote, and the values that still mean what is done.
    retired: ClassVar[Mapping[str, Any]] = {}
    #: Whether it can be trained under FSDP and DeepSpeed.
    shards: ClassVar[bool] = True
    #: Name of the adapter on the model that it is attached to.
    attached_as: ClassVar[str] = "default"

    format_version: int = setting(FORMAT_VERSION, "Version of the saved layout.")
    base_facts: dict[str, Any] | None = setting(None, "Shape of the base model (recorded).")

    def __new__(cls, *args: Any, **given: Any) -> Self:
        # PEFT would drop fields that it does not know, with a warning, whatever they say.
        known = [item.name for item in fields(cls)]
        retired = [name for name, value in cls.retired.items() if given.get(name) == value]
        unknown = sorted(given.keys() - {*known, *retired})
        version = given.get("format_version", FORMAT_VERSION)  # newer ones: see __post_init__
        # A field may also be one that a newer PEFT gives all configs.
        written_by = given.get("peft_version") or peft.__version__
        newer = Version(str(written_by)) > Version(peft.__version__)
        if unknown and version == FORMAT_VERSION and not newer:
            message = f"{cls.__name__} has no field {unknown[0]!r}{nearest(unknown[0], known)}."
            if "peft_type" in given:  # from a file
                message += (
                    " Another version of hf_spec wrote this adapter_config.json, and weights may "
                    f"need what the field says. If it was a newer one, install that: {INSTALL}. If "
                    "it was an older one, train the adapter again."
                )
            raise ValueError(message)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        name = type(self).type_name
        if self.task_type not in (None, "CAUSAL_LM"):
            raise ValueError(
                f"adapters of type {name} are for causal language models, got task_type="
                f"{self.task_type!r}. Leave it out."
            )
        self.task_type: Any = "CAUSAL_LM"  # for AutoPeftModelForCausalLM
        super().__post_init__()
        if self.peft_type not in (None, name):
            raise ValueError(
                f"{type(self).__name__} is of PEFT type {name}, got peft_type={self.peft_type!r}. "
                "Load the config with PeftConfig.from_pretrained, which picks the class."
            )
        self.peft_type: Any = SpecPeftType(name)
        version = self.format_version
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise ValueError(
                f"this {name} adapter has format_version={version!r}; this hf_spec reads versions "
                f"1 to {FORMAT_VERSION}. Install a newer one: {INSTALL}"
            )
        if not isinstance(self.base_facts, dict | None):
            raise ValueError(
                f"base_facts must be a dict or None, got {self.base_facts!r}. Leave it out: "
                "attaching the adapter records it."
            )
        check_fields(self)

    def check_base(self, model: nn.Module) -> None:
        """Raise a ValueError if the adapter does not fit `model`; runs before it is attached.

        The model must have the shape of the adapter's base. Other weights of the same shape, such
        as those of a fine-tuned base, and a vocabulary that grew are allowed. A config that is not
        trained yet records `base_facts`; overrides record what else the saved config needs.
        """
        made_for = self.base_facts or {}
        check_facts(type(self).type_name, made_for, self.base_model_name_or_path, model)
        if not self.inference_mode:
            self.base_facts = {**facts_of(model), **made_for} or None
        if isinstance(model, GenerationMixin):
            check_model(model)

    def alternatives(self, model: nn.Module) -> list[dict[str, Any]]:
        """Other values of fields with which the tensors fit as well: a checkpoint that says them
        wrongly loads, and drafts badly. ``hf-spec check`` tries them."""
        return []

    @property
    def trains_base(self) -> bool:
        """Whether training changes the base model's weights, which are then saved, too."""
        return False

    def training_defaults(self) -> dict[str, Any]:
        """Fields of `TrainingArguments` that differ from the defaults of the adapter's method; a
        ValueError if the config leaves nothing to train."""
        return {}

    def learning_rates(self) -> dict[str, float]:
        """Peak learning rates, by prefix of parameter names."""
        return {}

    def untrained(self, progress: float) -> frozenset[str]:
        """Names of the parameters that are not trained yet, at a share of the steps (0 to 1)."""
        return frozenset()

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Write `adapter_config.json`, and the files for `SpecConfig` and `custom_generate`: the
        strategy with its default options, unless the folder already names a strategy."""
        super().save_pretrained(str(save_directory), **kwargs)
        # Nothing looks for custom_generate in the folder that PEFT names by an adapter inside that
        # of a model, and push_to_hub fails on folders in folders.
        inside = Path(save_directory).name == self.attached_as != "default"
        write_companions(save_directory, type(self), shim=not inside)


# -- Base of adapters that predict future tokens: draft vocabularies, Markov heads, prefix KV ------

#: Parameter names of the Markov head: matrices from embeddings, to states and from states.
MARKOV_HEAD = "markov_embedding", "markov_output", "markov_state"
#: Parameter name of the predicted tokens, if these are not all tokens.
VOCABULARY = "draft_vocabulary"


@dataclass
class ObjectiveConfig(SpecPeftConfig):
    """Config of an adapter whose training says what its predictions learn from, and which count."""

    loss: str = setting(
        "distillation",
        "distillation: KL divergence from the base's own distributions. hard: cross-entropy of the "
        "answers' tokens.",
        choice("distillation", "hard"),
    )
    decay: float | None = setting(
        None,
        "Weight of a distance in the loss, relative to that of the distance before; null: what it "
        "adds to the expected number of accepted tokens (D-PACE).",
        SHARE,
    )


@dataclass
class VocabularyConfig(SpecPeftConfig):
    """Config of an adapter that may have a draft vocabulary of its own."""

    draft_vocab_size: int | None = setting(
        None,
        "Number of tokens that can be drafted, the commonest of the training answers; 0: all, as "
        "in the paper. Default: a quarter of the vocabulary.",
        count(0, MAX_SIZE),
    )

    @property
    def reads_head(self) -> bool:
        """Whether it can predict some tokens only."""
        return True

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        if self.draft_vocab_size is None:  # trained adapters say what they have
            part = self.reads_head and not self.inference_mode
            self.draft_vocab_size = vocab_size(model) // 4 if part else 0
        if self.draft_vocab_size and not self.reads_head:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size}: this adapter predicts tokens by a "
                "matrix of its own, which has them all. Leave it out."
            )
        if self.draft_vocab_size:
            why = "The model has no more tokens. Take fewer, or 0 for all."
            check_count("draft_vocab_size", self.draft_vocab_size, 0, vocab_size(model), why)

    def known_tokens(self, model: nn.Module) -> int:
        """Number of tokens that matrices of a loaded adapter have rows for: those of the model, or
        those that it had before its vocabulary grew."""
        now = facts_of(model).get("vocab_size", 0)
        before: int = (self.base_facts or {}).get("vocab_size", now)
        return before if before < now else vocab_size(model)

    def fresh_vocabulary(self) -> dict[str, Tensor]:
        """``draft_vocabulary`` (tokens,), int64 ids in ascending order, if not all are predicted:
        at first the smallest ids, which tend to be the most frequent tokens."""
        size = self.draft_vocab_size
        return {VOCABULARY: torch.arange(size)} if size else {}


@dataclass
class PredictingConfig(VocabularyConfig):
    """Config of an adapter that may have a Markov head and a vocabulary of its own."""

    markov_rank: int = setting(
        128,
        "Rank of the Markov head, which conditions predictions on the root and on the token "
        "before; 0: none, as in the paper.",
        count(0, MAX_RANK),
    )
    markov_learning_rate: float = setting(3e-3, "Peak learning rate of the Markov head.", SHARE)

    def learning_rates(self) -> dict[str, float]:
        return {"markov": self.markov_learning_rate} if self.markov_rank else {}

    def fresh_shared(self, model: nn.Module, distances: int) -> dict[str, Tensor]:
        """Parameters of a new adapter that predicts so many tokens after the next one.

        The Markov head, unless its rank is 0, with matrices for the token before and for the root
        at each distance: ``markov_embedding`` (1 + distances, rank, embedding), ``markov_output``
        (1 + distances, hidden, rank) and ``markov_state`` (1 + distances, rank, hidden). At first
        it adds 0. And :meth:`fresh_vocabulary`."""
        tensors = self.fresh_vocabulary()
        if rank := self.markov_rank:
            embedding, hidden = input_features(model)[1], output_features(model)[0]
            matrices = (
                torch.randn(1 + distances, rank, embedding) / embedding**0.5,
                torch.zeros(1 + distances, hidden, rank),
                torch.randn(1 + distances, rank, hidden) / hidden**0.5,
            )
            tensors.update(zip(MARKOV_HEAD, matrices))
        return tensors


@dataclass
class PrefixKVConfig(PredictingConfig):
    """Base of configs of adapters with a prefix KV, which has the shape of the base's KV cache."""

    num_layers: int | None = setting(
        None, "Layers of the base's cache (recorded).", count(1, MAX_SHAPE)
    )
    num_kv_heads: int | None = setting(
        None, "Key-value heads of the base (recorded).", count(1, MAX_SHAPE)
    )
    head_dim: int | None = setting(
        None, "Dimension of the base's heads (recorded).", count(1, MAX_SHAPE)
    )

    def record_shape(self, model: nn.Module) -> None:
        """Record the shape of the base's cache, unless a loaded adapter already has it."""
        if not (self.inference_mode and self.num_layers):
            self.num_layers, self.num_kv_heads, self.head_dim = kv_shape(model)

    def fresh_states(self, name: str, slots: int, std: float) -> dict[str, Tensor]:
        """``<name>_keys`` and ``<name>_values``, ``(layers, kv_heads, slots, head_dim)`` each."""
        assert self.num_layers and self.num_kv_heads and self.head_dim
        shape = (self.num_layers, self.num_kv_heads, slots, self.head_dim)
        return {f"{name}_{part}": torch.randn(shape) * std for part in ("keys", "values")}


def text_embeddings(model: Any, count: int) -> Tensor:
    """Input embeddings of random tokens, ``(count, hidden)``: where probes begin.

    Smaller vectors are enlarged by normalization layers, and so are their gradients: low-rank
    updates beside them then learn from noise first.
    """
    (tokens, width), device = input_features(model), placement(model).device
    ids = torch.randint(tokens, (count,))
    if ids.is_meta or device.type == "meta":  # only shapes are needed
        return torch.empty(count, width)
    with torch.no_grad():
        return model.get_input_embeddings()(ids.to(device)).float()


def of_tokens(model: Any, logits: Tensor, missing: float) -> Tensor:
    """Logits ``(..., tokens)`` of all tokens of a model: those of the adapter's, which are the
    first ones, and `missing` for tokens that only the model has."""
    return nn.functional.pad(logits, (0, vocab_size(model) - logits.shape[-1]), value=missing)


def vocab_size(model: Any) -> int:
    """Number of tokens that the model computes logits for."""
    return output_features(model)[1]
