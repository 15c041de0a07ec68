"""Base class of hf_spec's adapter configs, which are saved as `adapter_config.json`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import peft
from packaging.version import Version
from peft import PeftConfig
from torch import nn
from transformers import GenerationMixin

from hf_spec.adapters.base_model import check_facts, facts_of
from hf_spec.adapters.repo_files import write_companions
from hf_spec.core.checks import INSTALL, check_fields, nearest, setting
from hf_spec.modeling_patches.support import check_model

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
