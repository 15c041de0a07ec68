"""What a training is given: a method, fields of its adapter's config, the Trainer's arguments."""

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from peft import PeftConfig
from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from hf_spec.adapters.checkpoint import WEIGHTS
from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.core.checks import check_count, check_range, explained, nearest, said_of, setting
from hf_spec.methods.registry import Method, methods
from hf_spec.tools.loading import BROKEN

#: Fields of configs that only training reads, beside learning rates.
OF_TRAINING = ("loss", "decay", "ttt_steps")
#: Arguments of a training that is one pass over the answers, without a Trainer.
OF_ONE_PASS = (
    "max_length", "held_out", "served_prompts", "served_tokens", "per_device_train_batch_size",
    "save_steps", "seed", "use_cpu", "disable_tqdm",
)  # fmt: skip
#: Arguments of the Trainer that the command has in its own hands, and what to do instead; those
#: that begin with ``hub_`` are for ``push_to_hub``.
OWNED = {
    "output_dir": "checkpoints lie in the adapter's folder. Give --output",
    "resume_from_checkpoint": "a training goes on from its last checkpoint. Give --resume",
    "push_to_hub": "'hf-spec push' uploads an adapter. Leave it out",
}
#: When a training evaluates, and writes a checkpoint that may be the best.
MOMENTS = ("steps", "epoch")
#: Epochs of a training that ends by time.
UNCOUNTED = 10_000


@dataclass
class SpecArguments(TrainingArguments):
    """``TrainingArguments`` with what an adapter's training has besides."""

    num_anchors: int | None = setting(
        None, "Random positions per sequence that are trained at, at most. Default: the method's."
    )
    max_minutes: float | None = setting(
        None,
        "Minutes to train for, evaluations included; each decodes for a tenth of them at most. The "
        "learning rate then follows the time, and epochs are not counted unless num_train_epochs "
        "is given.",
    )
    kept_states: float = setting(
        16.0,
        "Gigabytes of the base's hidden states that may be kept on disk until the training ends, "
        "instead of computed in every epoch; at most half of the free disk. 0: none.",
    )
    optim: str = setting(
        str(TrainingArguments.optim),
        "An optimizer of TrainingArguments, or muon: torch.optim.Muon for the matrices of layers, "
        "AdamW for the rest.",
    )
    max_length: int = setting(1024, "Longer sequences are cut, in tokens.")
    held_out: int = setting(32, "Answers kept for evaluation, at most a quarter of all.")
    served_prompts: int = setting(16, "Held-out prompts decoded at each evaluation.")
    served_tokens: int = setting(64, "New tokens of each.")

    def __post_init__(self) -> None:
        self.muon = self.optim == "muon"
        if self.muon:
            self.optim = TrainingArguments.optim
        counts = ["max_length", "held_out", "served_prompts", "served_tokens"]
        counts += ["max_steps"] * (self.max_steps != -1)  # the Trainer's default: by epochs
        counts += ["num_anchors"] * (self.num_anchors is not None)
        for name in counts:
            check_count(name, getattr(self, name))
        check_range("kept_states", self.kept_states, 0.0, 10**6)
        if self.max_minutes is not None:
            check_range("max_minutes", self.max_minutes, 0.0, 10**6, open_low=True)
            if self.warmup_steps >= 1:
                raise ValueError(
                    f"warmup_steps={self.warmup_steps}: with max_minutes the number of steps is "
                    "not known. Give a share of the training, below 1."
                )
        super().__post_init__()

    @property
    def n_gpu(self) -> int:
        """At most 1, as nn.DataParallel's copies have no named parameters: several devices take a
        process each."""
        return min(super().n_gpu, 1)


def trainable_method(name: str) -> Method:
    """The method of this name; a ValueError if there is none, or it cannot be trained."""
    known = methods()
    trainable = {name: method for name, method in known.items() if method.training is not None}
    if name not in trainable:
        reason = f"{name!r} has nothing" if name in known else f"there is no method {name!r}"
        raise ValueError(
            f"{reason} to train{nearest(name, trainable)}; choose one of {', '.join(trainable)}."
        )
    return trainable[name]


def config_fields(method: Method) -> dict[str, dataclasses.Field[Any]]:
    """Fields of the method's adapter config that a user may set."""
    fields = added_fields(method.adapter_config, SpecPeftConfig).items()
    return {name: one for name, one in fields if "recorded" not in one.metadata.get("help", "")}


def added_fields(kind: Any, base: Any) -> dict[str, dataclasses.Field[Any]]:
    """Fields of a dataclass that its base does not have, with all that is said of them."""
    known = {field.name for field in dataclasses.fields(base)}
    found = [copy.copy(field) for field in dataclasses.fields(kind) if field.name not in known]
    for field in found:
        field.metadata = MappingProxyType(said_of(kind, field.name))
    return {field.name: field for field in found}


def config_of(method: Method, fields: dict[str, Any], start: Path | None = None) -> Any:
    """The config of a new adapter, with fields that the user sets; or that of a trained adapter
    from which training goes on. A ValueError if that cannot be trained on, or if fields change
    others than `OF_TRAINING` and learning rates."""
    assert method.adapter_config is not None
    if start is None:
        return method.adapter_config(**fields)
    with explained(f"cannot read adapter {str(start)!r}", *BROKEN):
        config: Any = PeftConfig.from_pretrained(str(start))
    if type(config) is not method.adapter_config:
        raise ValueError(
            f"{str(start)!r} is an adapter of type {config.peft_type}: {method.name!r} goes on "
            f"from its own, of type {method.peft_type}"
        )
    if config.trains_base:
        raise ValueError(
            f"training the adapter {str(start)!r} trains its base model, too: train it anew, on "
            "the model in its folder if it is to go on from there"
        )
    if not (start / WEIGHTS).is_file():
        raise ValueError(
            f"{str(start)!r} has no {WEIGHTS}: there is nothing to go on from. Leave out --adapter"
        )
    own = [name for name in fields if not (name in OF_TRAINING or name.endswith("learning_rate"))]
    if own:
        raise ValueError(f"{min(own)} belongs to what the adapter has learned: leave it out")
    return dataclasses.replace(config, **{**fields, "inference_mode": False})


def spec_arguments(method: Method, folder: Path, config: Any, **given: Any) -> SpecArguments:
    """The arguments of a training whose checkpoints go to ``folder``: fields that are given, those
    of the adapter's config, the method's, or the defaults; a ValueError names what is invalid."""
    assert method.training is not None
    for name in given:
        remedy = OWNED.get("push_to_hub" if name.startswith("hub_") else name)
        if remedy is not None:
            raise ValueError(f"{name}={given[name]!r}: {remedy}.")
        keeps_best = given.get("load_best_model_at_end", True)
        if name in ("eval_strategy", "save_strategy") and given[name] == "no" and keeps_best:
            raise ValueError(
                f"{name}='no': a training evaluates and saves, as the best checkpoint is kept. "
                f"Leave {name} out."
            )
    for name in given if method.fit is not None else ():
        if name not in OF_ONE_PASS:
            raise ValueError(
                f"{name}={given[name]!r}: {method.name!r} learns in one pass over the answers, "
                "without gradients, so that there is nothing that this would change. Leave it out; "
                f"beside the fields of its config there are {', '.join(OF_ONE_PASS)}."
            )
    # One of the two is enough.
    asked = [given.get(name) for name in ("eval_strategy", "save_strategy")]
    moment = next((one for one in asked if one in MOMENTS), MOMENTS[0])
    values: dict[str, Any] = {
        "output_dir": str(folder), "seed": 0, "lr_scheduler_type": "cosine",
        "eval_strategy": moment, "save_strategy": moment, "eval_steps": 100,
        "save_total_limit": 2, "load_best_model_at_end": method.fit is None,
        "metric_for_best_model": "tau", "greater_is_better": True,
        "logging_steps": 10, "report_to": [], "remove_unused_columns": False,
        "train_sampling_strategy": "group_by_length",  # little padding
        "use_cpu": not torch.accelerator.is_available(), "ddp_find_unused_parameters": False,
        **method.training, **config.training_defaults(),
        **({} if given.get("max_minutes") is None else {"num_train_epochs": UNCOUNTED}),
        **given,
    }  # fmt: skip
    values.setdefault("save_steps", values["eval_steps"])
    values.setdefault("per_device_eval_batch_size", values.get("per_device_train_batch_size", 8))
    made = SpecArguments(**values)
    with explained("report_to", RuntimeError):  # which need packages that may not be there
        for callback in get_reporting_integration_callbacks(made.report_to):
            callback()
    return made
