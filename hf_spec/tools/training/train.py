"""Trains an adapter on a base model's own answers: data, Trainer, adapter folder."""

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import TrainingArguments, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_spec.adapters.active import require_active
from hf_spec.adapters.base_model import fingerprint
from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.core.checks import check_count, check_range, nearest, said_of, setting
from hf_spec.decoding.selfcheck import check_tree_forward
from hf_spec.files import write_json, writing
from hf_spec.methods.registry import Method, methods
from hf_spec.tools.bench.environment import PACKAGES, device_name, package_version
from hf_spec.tools.hub.card import TRAINING
from hf_spec.tools.hub.folder import attached, save_adapter
from hf_spec.tools.training.anchors import AnswerDataset, NewAnchors, collate
from hf_spec.tools.training.base_weights import save_model
from hf_spec.tools.training.dataset import split
from hf_spec.tools.training.evaluation import EvalDecoding
from hf_spec.tools.training.kept_states import kept_states
from hf_spec.tools.training.sharded import gathered
from hf_spec.tools.training.start import config_of, set_vocabulary
from modeling_patches.support import check_model

logger = logging.getLogger(__name__)

#: Epochs of a training that ends by time.
UNCOUNTED = 10_000


@dataclass
class SpecArguments(TrainingArguments):
    """``TrainingArguments`` with what an adapter's training has besides."""

    num_anchors: int | None = setting(
        None, "Most random positions per sequence that have probes. Default: the method's."
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
    fields = added_fields(method.adapter_config, SpecPeftConfig)
    help_of = {name: field.metadata.get("help", "") for name, field in fields.items()}
    return {name: field for name, field in fields.items() if "recorded" not in help_of[name]}


def added_fields(kind: Any, base: Any) -> dict[str, dataclasses.Field[Any]]:
    """Fields of a dataclass that its base does not have, with all that is said of them."""
    found = {field.name: copy.copy(field) for field in dataclasses.fields(kind)}
    for name, field in found.items():
        field.metadata = MappingProxyType(said_of(kind, name))
    for field in dataclasses.fields(base):
        found.pop(field.name, None)
    return found


def check_lengths(rows: Any, max_length: int) -> None:
    """Raise a ValueError if sequences are cut before there is anything to predict in any of them;
    if that is so in some, the log says in how many."""
    pairs = zip(rows["prompt_ids"], rows["answer_ids"])
    # The token behind a prompt is certain; what is trained predicts those that follow it.
    short = sum(min(len(answer), max_length - len(prompt)) < 2 for prompt, answer in pairs)
    message = (
        f"in {short} of {len(rows)} sequences the first max_length={max_length} tokens hold less "
        "than two of the answer, so that nothing is learned from them"
    )
    if short == len(rows):
        raise ValueError(f"{message}: raise it, or give longer answers")
    if short:
        logger.warning(message)


def spec_arguments(method: Method, folder: Path, config: Any, **given: Any) -> SpecArguments:
    """The arguments of a training whose checkpoints go to ``folder``: fields that are given, those
    of the adapter's config, the method's, or the defaults; a ValueError names what is invalid."""
    assert method.training is not None
    values: dict[str, Any] = {
        "output_dir": str(folder), "seed": 0, "lr_scheduler_type": "cosine",
        "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 100,
        "save_total_limit": 2, "load_best_model_at_end": True,
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
    return SpecArguments(**values)


def train(
    model: Any, rows: Any, method_name: str, output: Path, config: dict[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None, options: dict[str, Any] | None = None,
    resume: bool = False, provenance: dict[str, Any] | None = None, callbacks: Sequence[Any] = (),
    tokenizer: Any = None, start: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train an adapter and write it to ``output``, except for the card.

    Args:
        model: the base model; unchanged afterwards, unless the config trains it.
        rows: a ``datasets.Dataset`` with ``prompt_ids`` and ``answer_ids``.
        output: the adapter folder; checkpoints go to ``checkpoints`` in it.
        config: fields of the method's adapter config.
        arguments: fields of :class:`SpecArguments`; the method's defaults are used for others.
        options: options of the strategy, stored beside the adapter and used in evaluation.
        resume: whether to continue from the last checkpoint in ``output``.
        provenance: origin of the data, stored in the record.
        tokenizer: saved beside the base model, if that is trained.
        start: folder of a trained adapter of the method, from whose weights training goes on.

    Returns:
        The record, as written to ``training.json``; empty in all processes but the main one.
    """
    options, config, arguments = options or {}, config or {}, arguments or {}
    method = trainable_method(method_name)
    method.parse_options(options)
    folder = output / "checkpoints"
    last = _last_checkpoint(folder, resume)
    record: dict[str, Any] = {}
    with ExitStack() as stack:
        # Of a model that was loaded in parts all weights are needed until training begins.
        with gathered(model.parameters()):
            # A model that cannot be decoded is refused before training.
            check_model(model)
            check_tree_forward(model, "training")
            set_seed(arguments.get("seed", 0))
            adapter_config = config_of(method, config, start, model)
            trains_base = adapter_config.trains_base
            args = spec_arguments(method, folder, adapter_config, **arguments)
            training_rows, held_out_rows = split(rows, args.held_out)
            check_lengths(training_rows, args.max_length)
            # Names only: parameters that are held here would stay whole where others are sharded.
            base = [name for name, _ in model.named_parameters()] if trains_base else []
            known = str(fingerprint(model))
            peft_model = stack.enter_context(
                attached(model, adapter_config, in_float32=True, trained=start)
            )
            for name in base:
                model.get_parameter(name).requires_grad_(True)
            adapter = require_active(model, adapter_config.type_name, method.name)
            if start is None:
                set_vocabulary(adapter, model, training_rows["answer_ids"])
        trainer = _trainer(peft_model, args, method, options, training_rows, held_out_rows)
        for callback in callbacks:
            trainer.add_callback(callback)
        stack.callback(trainer.report.close)
        with writing(folder), kept_states(trainer, folder, known):
            result = trainer.train(resume_from_checkpoint=last)
        state = trainer.whole_state()
        if trainer.is_world_process_zero():
            if trains_base:
                save_model(model, output, adapter_config, tokenizer)
            save_adapter(peft_model, output, method.name, options, state)
            record = _record(trainer, method, options, adapter_config, result, provenance)
            if start is not None:
                record["started_from"] = start.name
            write_json(output / TRAINING, record)
        trainer.accelerator.wait_for_everyone()
    return record


def _trainer(
    model: Any, args: SpecArguments, method: Method, options: dict[str, Any], rows: Any,
    held_out: Any,
) -> Any:  # fmt: skip
    """The Trainer of an adapter, which evaluates on rows that are held out."""
    from hf_spec.tools.training.trainer import SpecTrainer

    anchors = args.num_anchors or method.num_anchors
    data = {"num_anchors": anchors, "max_length": args.max_length, "seed": args.seed}
    prompts = [list(ids) for ids in held_out["prompt_ids"][: args.served_prompts]]
    return SpecTrainer(
        model=model, args=args, data_collator=collate, train_dataset=AnswerDataset(rows, **data),
        eval_dataset=AnswerDataset(held_out, **data, random=False),
        eval_decoding=EvalDecoding(prompts, method.name, options, args.served_tokens),
        callbacks=[NewAnchors()],
    )  # fmt: skip


def _last_checkpoint(folder: Path, resume: bool) -> str | None:
    """The last checkpoint that is whole, if there is one; a ValueError unless it is resumed."""
    found = {
        int(path.name.rpartition("-")[2]): str(path)
        for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (path / TRAINER_STATE_NAME).is_file()  # which is written last
    }
    if found and not resume:
        raise ValueError(
            f"{str(folder)!r} holds checkpoints of an earlier training: go on with --resume, or "
            "choose another --output"
        )
    return found[max(found)] if found else None


def _record(
    trainer: Any, method: Method, options: dict[str, Any], config: Any, result: Any,
    provenance: dict[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    history = [entry for entry in trainer.state.log_history if {"loss", "eval_loss"} & entry.keys()]
    evaluations = [entry for entry in history if "eval_tau" in entry]
    saved = [entry for entry in evaluations if entry["step"] == trainer.state.best_global_step]
    args = trainer.args
    batch_size = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
    return {
        "method": method.name,
        "base_model": config.base_model_name_or_path,
        "config": {name: getattr(config, name) for name in config_fields(method)},
        "options": options,
        "settings": {
            "steps": trainer.state.global_step, "batch_size": batch_size,
            "learning_rate": args.learning_rate, "schedule": args.lr_scheduler_type.value,
            "num_anchors": args.num_anchors or method.num_anchors,
            "max_length": args.max_length, "seed": args.seed,
        },
        "data": {
            "rows": len(trainer.train_dataset), "held_out": len(trainer.eval_dataset),
            "provenance": provenance,
        },
        "best": max(saved or evaluations, key=lambda entry: entry["eval_tau"], default=None),
        "trainable_parameters": trainer.unwrapped.get_nb_trainable_parameters()[0],
        "timed_steps": trainer.report.steps,  # those since the training was resumed
        "seconds": round(result.metrics.get("train_runtime", 0.0), 1),
        "versions": {name: package_version(name) for name in PACKAGES},
        "device": device_name(args.device),
        "history": history,
    }  # fmt: skip
