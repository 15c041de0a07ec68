"""Trains an adapter on a base model's own answers: data, Trainer, adapter folder."""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import BatchSampler
from tqdm.auto import tqdm
from transformers import set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_spec.adapters.config import weights_digest
from hf_spec.adapters.loading import load_unattached, save_unattached
from hf_spec.adapters.tuner import Fit, TrainingBatch
from hf_spec.core.checks import check_same_settings
from hf_spec.decoding.call import check_stored
from hf_spec.decoding.strategy import check_tree_forward
from hf_spec.files import read_json, replacing, write_json, writing
from hf_spec.methods.registry import Method
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.modeling_patches.support import check_model
from hf_spec.modeling_patches.weights import placement
from hf_spec.target.sequences import KEEPER
from hf_spec.tools.bench.environment import device_name, packages
from hf_spec.tools.hub import TRAINING, attached, save_adapter, save_spec_config
from hf_spec.tools.training.arguments import (
    SpecArguments,
    config_fields,
    config_of,
    spec_arguments,
    trainable_method,
)
from hf_spec.tools.training.dataset import (
    AnswerDataset,
    NewAnchors,
    SimilarLengths,
    answers_of,
    collate,
    set_vocabulary,
    spans,
    split,
)
from hf_spec.tools.training.trainer import EvalDecoding, SpecTrainer, gathered, save_model

logger = logging.getLogger(__name__)

#: How names of files end.
SUFFIX = ".safetensors"


class KeptStates:
    """Hidden states of a frozen base model on disk, so that each sequence runs through it once.
    Those of a sequence are in a file that is named after its tokens and the kind of states.

    Drafters that read the base's states only (heads, decoders) see the same states in every epoch.

    Args:
        num_bytes: most bytes of all files; sequences that find no room are computed each time.
        base: identifies the base's weights.
    """

    def __init__(self, folder: Path, num_bytes: int, base: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.base = folder, base
        self.room = num_bytes - sum(one.stat().st_size for one in folder.glob(f"*{SUFFIX}"))

    def __call__(
        self, compute: Callable[[Tensor, Tensor], Sequence[Tensor]], input_ids: Tensor,
        mask: Tensor, kind: Sequence[int],
    ) -> Sequence[Tensor]:  # fmt: skip
        """Tensors ``(batch, seq, ...)`` of a kind, which ``compute`` gives for some rows and their
        mask, ``(batch, seq)`` both; those of padding, where the mask is 0, may be 0."""
        real = mask.bool()
        rows = [ids[own].tolist() for ids, own in zip(input_ids.cpu(), real.cpu())]
        paths = [self._path((self.base, row, list(kind))) for row in rows]
        new = [row for row, path in enumerate(paths) if not path.is_file()]
        computed = dict(zip(new, zip(*compute(input_ids[new], mask[new])))) if new else {}
        whole = []
        for row, path in enumerate(paths):
            if row in computed:
                own = [part[real[row].to(part.device)] for part in computed[row]]  # (tokens, ...)
                self._keep(path, own)
            else:
                found = load_file(path)
                own = [found[name] for name in sorted(found)]
            whole.append([part.to(input_ids.device) for part in own])
        kept = []
        for parts in zip(*whole):
            padded = parts[0].new_zeros(*input_ids.shape, *parts[0].shape[1:])
            padded[real] = torch.cat(parts)
            kept.append(padded)
        return kept

    def _path(self, key: Any) -> Path:
        digest = hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()
        return self.folder / f"{digest}{SUFFIX}"

    def _keep(self, path: Path, parts: Sequence[Tensor]) -> None:
        """Write the states of a sequence, if there is room."""
        size = sum(part.nbytes for part in parts)
        if size <= self.room and not path.exists():
            self.room -= size
            named = {str(at): part.cpu().contiguous() for at, part in enumerate(parts)}
            with replacing(path) as temporary:
                save_file(named, temporary)


@contextmanager
def kept_states(trainer: Any, folder: Path, base: str) -> Iterator[None]:
    """Keep states in the block, a training, if they recur; afterwards they are removed, unless it
    ends with an error: one that is resumed reads those of its first part. The folder is that of
    checkpoints; ``base`` as in :class:`KeptStates`."""
    args = trainer.args
    # Where layers are sharded, all processes run the base together.
    if args.num_train_epochs <= 1 or not args.kept_states or trainer.trains_base or trainer.sharded:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    room = min(args.kept_states * 1e9, shutil.disk_usage(folder).free / 2)
    own = folder / f"states-{args.process_index}"
    token = KEEPER.set(KeptStates(own, int(room / args.world_size), base))
    try:
        yield
    finally:
        KEEPER.reset(token)
    trainer.accelerator.wait_for_everyone()
    for one in folder.glob("states-*"):  # before it was resumed there may have been more processes
        shutil.rmtree(one, ignore_errors=True)


def check_lengths(rows: Any, max_length: int) -> None:
    """Raise a ValueError if sequences are cut before there is anything to predict in any of them;
    if that is so in some, the log says in how many."""
    # The token behind a prompt is certain; what is trained predicts those that follow it.
    short = sum(all(min(end, max_length) - start < 2 for start, end in spans(row)) for row in rows)
    message = (
        f"in {short} of {len(rows)} sequences the first max_length={max_length} tokens hold less "
        "than two of the answer, so that nothing is learned from them"
    )
    if short == len(rows):
        raise ValueError(f"{message}: raise it, or give longer answers")
    if short:
        logger.warning(message)


def train(
    model: Any, rows: Any, method_name: str, output: Path, config: dict[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None, options: dict[str, Any] | None = None,
    resume: bool = False, provenance: dict[str, Any] | None = None, callbacks: Sequence[Any] = (),
    tokenizer: Any = None, start: Path | None = None, dataset: str | None = None,
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
        dataset: name of the data on the Hub, stored in the record.

    Returns:
        The record, as written to ``training.json``; empty in all processes but the main one.
    """
    options, config, arguments = options or {}, config or {}, arguments or {}
    method = trainable_method(method_name)
    method.parse_options(options)
    check_stored(options, "options")
    folder = output / "checkpoints"
    last = _last_checkpoint(folder, resume)
    if method.fit is not None:
        if callbacks:
            raise ValueError(
                f"callbacks: {method_name!r} is trained without a Trainer. Leave them out."
            )
        check_model(model)
        check_tree_forward(model, "training")
        adapter_config = config_of(method, config, start)
        args = spec_arguments(method, folder, adapter_config, **arguments)
        parts = split(rows, args.held_out)
        check_lengths(parts[0], args.max_length)
        made = fit(model, method, adapter_config, args, options, parts, output, last, start)
        made["data"]["provenance"] = provenance
        return _written(made, output, dataset, start)
    record: dict[str, Any] = {}
    with ExitStack() as stack:
        # Of a model that was loaded in parts all weights are needed until training begins.
        with gathered(model.parameters()):
            # A model that cannot be decoded is refused before training.
            check_model(model)
            check_tree_forward(model, "training")
            set_seed(arguments.get("seed", 0))
            adapter_config = config_of(method, config, start)
            trains_base = adapter_config.trains_base
            args = spec_arguments(method, folder, adapter_config, **arguments)
            training_rows, held_out_rows = split(rows, args.held_out)
            check_lengths(training_rows, args.max_length)
            # Names only: parameters that are held here would stay whole where others are sharded.
            base = [name for name, _ in model.named_parameters()] if trains_base else []
            known = str(weights_digest(model))
            peft_model = stack.enter_context(
                attached(model, adapter_config, in_float32=True, trained=start)
            )
            for name in base:
                model.get_parameter(name).requires_grad_(True)
            if start is None:
                set_vocabulary(model, answers_of(training_rows))
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
            _written(record, output, dataset, start)
        trainer.accelerator.wait_for_everyone()
    return record


def _written(
    record: dict[str, Any], output: Path, dataset: str | None, start: Path | None
) -> dict[str, Any]:
    """Write the record, with the names of what the training was given; returns it."""
    if dataset is not None:
        record["data"]["dataset"] = dataset
    if start is not None:
        record["started_from"] = start.name
    write_json(output / TRAINING, record)
    return record


def _trainer(
    model: Any, args: SpecArguments, method: Method, options: dict[str, Any], rows: Any,
    held_out: Any,
) -> Any:  # fmt: skip
    """The Trainer of an adapter, which evaluates on rows that are held out."""
    anchors = args.num_anchors or method.num_anchors
    seed = args.seed if args.data_seed is None else args.data_seed
    data = {"num_anchors": anchors, "max_length": args.max_length, "seed": seed}
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
    args, state = trainer.args, trainer.state
    # The step of the weights that are written.
    step = (args.load_best_model_at_end and state.best_global_step) or state.global_step
    written = [entry for entry in evaluations if entry["step"] == step]
    return {
        "method": method.name,
        "base_model": config.base_model_name_or_path,
        "config": {name: getattr(config, name) for name in config_fields(method)},
        "options": options,
        "settings": {
            "steps": trainer.state.global_step, "batch_size": trainer.examples_per_step,
            "learning_rate": args.learning_rate, "schedule": args.lr_scheduler_type.value,
            "num_anchors": args.num_anchors or method.num_anchors,
            "max_length": args.max_length, "seed": args.seed,
        },
        "data": {
            "rows": len(trainer.train_dataset), "held_out": len(trainer.eval_dataset),
            "provenance": provenance,
        },
        "best": max(written, key=lambda entry: entry["eval_tau"], default=None),
        "trainable_parameters": trainer.unwrapped.get_nb_trainable_parameters()[0],
        "timed_steps": trainer.report.steps,  # those since the training was resumed
        "seconds": round(result.metrics.get("train_runtime", 0.0), 1),
        "versions": packages(),
        "device": device_name(args.device),
        "history": history,
    }  # fmt: skip


# -- Makes an adapter in one pass over answers, without gradients: batches, checkpoints, record ----


class OnePass:
    """A pass over answers, from which an adapter is made.

    Args:
        model: the base model.
        config: of the new adapter.
        output: the adapter folder.
        last: folder of the checkpoint from which the pass goes on; None to begin.
        start: folder of an adapter that it begins with.
    """

    def __init__(
        self, model: Any, method: Method, config: Any, args: SpecArguments, rows: Any, output: Path,
        last: str | None = None, start: Path | None = None,
    ):  # fmt: skip
        assert method.fit is not None and method.adapter_module is not None
        self.args, self.folder, self.begun_at = args, output / "checkpoints", 0
        self.data = AnswerDataset(rows, max_length=args.max_length, seed=args.seed)
        size = args.train_batch_size
        self.batches = list(BatchSampler(SimilarLengths(size, self.data), size, drop_last=False))
        self.settings = {
            "steps": len(self.batches), "batch_size": size, "max_length": args.max_length,
            "seed": args.seed,
        }  # fmt: skip
        config.check_base(model)
        fields = {name: getattr(config, name) for name in config_fields(method)}
        self._same = {**self.settings, **fields, "adapter": start and str(start)}
        if last is not None:
            state = read_json(Path(last, TRAINER_STATE_NAME))
            check_same_settings(f"{str(self.folder)!r} holds a training", state["same"], self._same)
            self.begun_at = state["global_step"]
            adapter = load_unattached(unwrapped(model), last)
        elif start is not None:
            adapter = load_unattached(unwrapped(model), str(start))
        else:
            adapter = method.adapter_module.build(config, model)
        self.learner: Fit = method.fit(model, adapter)

    def run(self) -> None:
        """Learn from all batches, with a progress bar."""
        todo, first = self.batches[self.begun_at :], self.begun_at + 1
        bar = tqdm(
            total=len(self.batches), initial=self.begun_at, dynamic_ncols=True, leave=False,
            disable=self.args.disable_tqdm,
        )  # fmt: skip
        with bar:
            for step, batch in enumerate(todo, first):
                self.learner.learn(TrainingBatch(**collate([self.data[one] for one in batch])))
                bar.update(1)
                if step % self.args.save_steps == 0 and step < len(self.batches):
                    self._save(step)

    def _save(self, step: int) -> None:
        place = self.folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        save_unattached(self.learner.adapter(), place)
        write_json(place / TRAINER_STATE_NAME, {"global_step": step, "same": self._same})  # last
        for other in self.folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            if other != place:
                shutil.rmtree(other, ignore_errors=True)


def fit(
    model: Any, method: Method, config: Any, args: SpecArguments, options: dict[str, Any],
    rows: Sequence[Any], output: Path, last: str | None, start: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Make an adapter of a method that has a :class:`Fit`, and write it to ``output``.

    Args:
        rows: those to learn from, and those that are held out.
        last, start: see :class:`OnePass`.

    Returns:
        The record, without the origin of the data.
    """
    if args.world_size > 1:
        raise ValueError(
            f"{args.world_size} processes: {method.name!r} learns in one pass, which is done by a "
            "single process. Start the command without 'accelerate launch'."
        )
    training, held_out = rows
    began = time.monotonic()
    learning = OnePass(model, method, config, args, training, output, last, start)
    learning.run()
    adapter = learning.learner.adapter()
    save_unattached(adapter, output)
    save_spec_config(output, method.name, options)
    shutil.rmtree(learning.folder, ignore_errors=True)

    prompts = [list(ids) for ids in held_out["prompt_ids"][: args.served_prompts]]
    steps, history = len(learning.batches), []
    for step, place in ((0, start), (steps, output)):
        used = {**options, "adapter": None if place is None else str(place)}
        stats = EvalDecoding(prompts, method.name, used, args.served_tokens).measure(model)
        history.append({"step": step, "eval_tau": stats.tau})
    return {
        "method": method.name,
        "base_model": adapter.config.base_model_name_or_path,
        "config": {name: getattr(adapter.config, name) for name in config_fields(method)},
        "options": options,
        "settings": learning.settings,
        "data": {"rows": len(training), "held_out": len(held_out)},
        "best": history[-1],
        "trainable_parameters": 0,
        "timed_steps": steps - learning.begun_at,
        "seconds": round(time.monotonic() - began, 1),
        "versions": packages(),
        "device": device_name(placement(model).device),
        "history": history,
    }
