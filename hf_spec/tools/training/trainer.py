"""The trainer of adapters, and what it reports: acceptance, accuracies, a bar, lines for people."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Muon, Optimizer
from tqdm.auto import tqdm
from transformers import EvalPrediction, ProgressCallback, Trainer, TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import EvalLoopOutput

import hf_spec
from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.layer import CONTAINER
from hf_spec.adapters.loading import find_active
from hf_spec.core.checks import duration
from hf_spec.core.stats import SpecStats
from hf_spec.decoding.sequences import pad_left
from hf_spec.files import staging
from hf_spec.modeling_patches.modules import decoder_layers
from hf_spec.target.sequences import IGNORED
from hf_spec.threads import forget
from hf_spec.tools.training.dataset import SimilarLengths

# -- What a training reports: acceptance by decoding, accuracies, a bar and lines for people -------


#: Positions whose acceptance is shown.
SHOWN = 4
#: Values of k of the top-k accuracies.
RANKS = (1, 5, 10)


class Report(TrainerCallback):
    """A progress bar, and a line per evaluation of a training, whose ``done`` is from 0 to 1. Its
    ``steps`` are those taken so far, without those before the training was resumed."""

    def __init__(self, trainer: Any):
        self.trainer: Any = trainer
        self._bar: tqdm | None = None
        self.steps, self._speaks = 0, False  # an evaluation may come without a training

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._speaks = state.is_world_process_zero
        self._began, self.steps, self._before = time.monotonic(), 0, self.trainer.done
        found = [entry["eval_tau"] for entry in state.log_history if "eval_tau" in entry]
        self._best = max(found, default=0.0)  # of a training that is resumed
        if self._speaks and not args.disable_tqdm:
            total = state.max_steps if args.max_minutes is None else None
            done = state.global_step
            self._bar = tqdm(total=total, initial=done, dynamic_ncols=True, leave=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        if self._bar is not None:
            self._bar.update(1)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        metrics: Mapping[str, Any] = kwargs.get("metrics") or {}
        if not self._speaks or "eval_loss" not in metrics:
            return
        parts = []
        if "eval_tau" in metrics:
            tau = metrics["eval_tau"]
            parts.append(f"tau {tau:.2f}{', the best so far' * (tau > self._best)}")
            self._best = max(tau, self._best)
        names = [f"eval_acceptance_{i}" for i in range(1, SHOWN + 1)]
        if shares := " ".join(f"{metrics[name]:.0%}" for name in names if name in metrics):
            parts.append(f"accepted {shares}")
        gone, done = time.monotonic() - self._began, self.trainer.done
        parts += [f"loss {metrics['eval_loss']:.3g}", duration(gone)]
        if self._before < done < 1:
            parts[-1] += f", {duration(gone * (1 - done) / (done - self._before))} left"
        of = f" of {state.max_steps:,}" if args.max_minutes is None else ""
        tqdm.write(f"step {state.global_step:,}{of}: {'; '.join(parts)}")
        sys.stdout.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar, if there is one; also where a training ends with an error."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def outcome(record: Mapping[str, Any]) -> list[str]:
    """What came out of a training, in words, by its record."""
    amount, settings, best = record["data"], record["settings"], record["best"]
    last = f", the last {record['timed_steps']:,}" * (record["timed_steps"] < settings["steps"])
    lines = [
        f"trained on {amount['rows']:,} answers, {settings['steps']:,} steps{last} in "
        f"{duration(record['seconds'])}; {amount['held_out']:,} answers held out"
    ]
    untrained = [one["eval_tau"] for one in record["history"] if one.get("step") == 0]
    if best is not None:
        before = "".join(f", {tau:.2f} before" for tau in untrained)
        lines.append(
            f"tau {best['eval_tau']:.2f} on held-out prompts, after {best['step']:,} steps"
            f"{before}: tokens per forward pass if every pass drafts"
        )
    return lines


@dataclass(frozen=True)
class EvalDecoding:
    """Token ids of prompts to decode in an evaluation, with the adapter's strategy."""

    prompts: Sequence[Sequence[int]]
    strategy: str
    options: dict[str, Any]
    max_new_tokens: int = 64
    batch_size: int = 8

    def measure(
        self, model: Any, share: slice = slice(None), seconds: float | None = None
    ) -> SpecStats:
        """Decode a share of the prompts (that of a process) greedily and add up the statistics;
        answers end when ``seconds`` are over, each batch's at its part of them."""
        total = SpecStats()
        forget(model)  # a checkpoint's figures must not depend on those before
        prompts = sorted(self.prompts[share], key=len)
        training, until = model.training, {}
        if seconds is not None:
            until["max_time"] = seconds / max(-(-len(prompts) // self.batch_size), 1)
        model.eval()
        for start in range(0, len(prompts), self.batch_size):
            rows = prompts[start : start + self.batch_size]
            model.generate(
                **pad_left(rows, 0, model.device), do_sample=False, num_beams=1,
                max_new_tokens=self.max_new_tokens, assistant_strategy=self.strategy,
                # Accepted lengths are measured, not whether drafting pays on this machine.
                assistant_kwargs={**self.options, "drafting": "always"},
                synced_gpus=False,  # sharded models decode the same prompts in all processes
                **until,
            )  # fmt: skip
            stats = hf_spec.last_stats(model)
            assert stats is not None
            total.merge(stats)
        model.train(training)
        return total


def top_k_counts(outputs: tuple[torch.Tensor, ...], _: Any = None) -> Any:
    """Count how often the right token is among the k likeliest, for each k in `RANKS`.

    Args:
        outputs: logits ``(batch, anchors, distances, tokens)`` and the indices of the right ones
            ``(batch, anchors, distances)``, `IGNORED` where there is none, and another number below
            0 for one without a logit; empty for a loss without logits.

    Returns:
        ``(batch, 1 + len(RANKS), distances)``: number of labels, then of hits with each k.
    """
    if not outputs:
        return outputs
    logits, labels = outputs
    best = logits.topk(min(max(RANKS), logits.shape[-1]), dim=-1).indices == labels[..., None]
    real = labels != IGNORED
    hits = [best[..., :k].any(-1) & real for k in RANKS]
    return torch.stack([real, *hits], dim=1).sum(2)


def top_k_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Top-k accuracies by name, from :func:`top_k_counts`: ``top1_2`` is that of k = 1 at distance
    2."""
    counts = prediction.predictions
    if not isinstance(counts, np.ndarray):
        return {}
    number, *hits = counts.sum(0)
    return {
        f"top{k}_{distance}": float(accuracy)
        for k, count in zip(RANKS, hits)
        for distance, accuracy in enumerate(count / number.clip(min=1), start=1)
    }


# -- Models whose parameters FSDP2 or DeepSpeed's ZeRO stage 3 splits over all processes -----------


def gathered(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
    """Within the context these parameters are whole; only ZeRO stage 3's are changed."""
    parts = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not parts:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(parts)


def gathered_state(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """A model's state dict, in which parameters of ZeRO stage 3 are copies, gathered one by one, in
    processes that keep them; all processes call this."""
    state = model.state_dict()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "ds_id"):
            with gathered([parameter]):
                if keep:
                    state[name] = parameter.detach().cpu().clone()
    return state


@contextmanager
def whole_root(model: Any) -> Iterator[None]:
    """Within the context the weights outside of decoder layers are whole in every process.

    Drafting reads embeddings, heads and adapters outside of the forwards, which would gather them.
    Layers are still gathered one after the other. The model, a ``PeftModel``, must have been
    trained for a step.
    """
    if isinstance(model, FSDPModule):
        # Decoding calls the base inside, so that no forward of this module reshards it.
        model.unshard()
        try:
            yield
        finally:
            model.reshard()
        return
    layers = set(decoder_layers(model).parameters())
    root: list[Any] = [parameter for parameter in model.parameters() if parameter not in layers]
    with gathered(root):
        # Forwards free what they have used unless it has another user.
        for parameter in root:
            parameter.ds_active_sub_modules.add(whole_root)
        try:
            yield
        finally:
            for parameter in root:
                parameter.ds_active_sub_modules.discard(whole_root)


# -- Saves and loads the weights of a base model that is trained together with its adapter ---------
#
# PEFT saves only adapters and assumes that the base model is unchanged.

#: The trained base model: file in a checkpoint, and folder beside an adapter.
CHECKPOINT, MODEL = "base_model.safetensors", "model"


def base_state(model: Any) -> dict[str, Tensor]:
    """The base model's weights by name, without those of adapters; shared tensors once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not name.startswith(f"{CONTAINER}.") and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def save_checkpoint(model: Any, folder: Path) -> None:
    """Add the base model's weights to a checkpoint of its adapter."""
    state = {name: tensor.contiguous() for name, tensor in base_state(model).items()}
    with staging(folder) as temporary:
        save_file(state, temporary / CHECKPOINT)


def load_checkpoint(model: Any, folder: Path) -> None:
    """Load the weights in a checkpoint into the base model; a ValueError if they are another's."""
    path = folder / CHECKPOINT
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} holds no {CHECKPOINT}: it is of another training")
    state = load_file(path)
    if state.keys() != base_state(model).keys():
        raise ValueError(f"{str(path)!r} holds the weights of another model")
    model.load_state_dict(state, strict=False)  # tied weights are stored once


def save_model(model: Any, folder: Path, config: Any, tokenizer: Any = None) -> None:
    """Save the trained base, to which adapters are attached, and its tokenizer as a model of its
    own in ``MODEL`` of an adapter folder; the adapter's config gets its name."""
    with staging(folder / MODEL) as temporary:
        model.save_pretrained(temporary, state_dict=base_state(model))
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
    config.base_model_name_or_path = str(folder / MODEL)


# -- Muon for the matrices of layers beside AdamW for the rest, as one optimizer -------------------

#: Learning rate of Muon, as a multiple of the other one.
RATE = 4.0


def layer_matrices(model: nn.Module) -> set[Tensor]:
    """What is trained of a model's linear maps, but for output embeddings."""
    maps = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {
        module.weight
        for name, module in maps.items()
        if module.weight.requires_grad and not name.endswith("lm_head")
    }


class WithMuon(Optimizer):
    """An optimizer some of whose parameters are stepped by `torch.optim.Muon` instead (Jordan et
    al., 2024), with updates of equal size in matrices of all shapes (Liu et al., "Muon is Scalable
    for LLM Training", 2025): of the parameters of the ``other`` optimizer, Muon takes ``matrices``.
    """

    def __init__(self, other: Optimizer, matrices: Iterable[Tensor]):
        chosen, groups = set(matrices), []
        for group in other.param_groups:
            own = [one for one in group["params"] if one in chosen]
            group["params"] = [one for one in group["params"] if one not in chosen]
            rate, decay = RATE * group["lr"], group["weight_decay"]
            groups.append({"params": own, "lr": rate, "weight_decay": decay})
        self.parts = (other, Muon(groups, adjust_lr_fn="match_rms_adamw"))
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        groups = iter(self.param_groups)
        for part in self.parts:  # whose groups and state a loaded state replaces
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state
            part.step()
        return loss


# -- The trainer -----------------------------------------------------------------------------------

#: Steps of a schedule that follows the time.
FINE = 10_000
#: Part of ``max_minutes`` that an evaluation may take.
EVALUATING = 0.1


class TimeLimit(TrainerCallback):
    """Ends a training so that its last evaluation is over after ``max_minutes``, those before it
    was resumed included."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        spent = [entry["minutes"] for entry in state.log_history if "minutes" in entry]
        self.trainer.began = time.monotonic() - 60 * max(spent, default=0.0)
        self.trainer.see_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.see_time()
        if self.trainer.progress >= 1:
            control.should_training_stop = control.should_log = True
            control.should_evaluate = control.should_save = True


class SpecTrainer(Trainer):
    """Trains a ``PeftModel`` with an adapter of hf_spec; evaluation decodes real prompts.

    ``evaluate`` also reports ``eval_top5_1`` etc. on ``eval_dataset``, and ``eval_tau``,
    ``eval_acceptance_1`` etc. of ``eval_decoding``. Each process decodes its share; where FSDP2 or
    ZeRO stage 3 shards the model, all decode the same prompts together. With ``max_minutes``, the
    learning rate follows its schedule by time, not by steps. If the adapter's config has
    ``trains_base``, checkpoints contain the base model's weights, too.
    """

    optimizer: Any

    def __init__(self, *args: Any, eval_decoding: EvalDecoding | None = None, **kwargs: Any):
        metrics = {"compute_metrics": top_k_metrics, "preprocess_logits_for_metrics": top_k_counts}
        super().__init__(*args, **metrics, **kwargs)
        self.eval_decoding = eval_decoding
        #: When the training began, by the clock; its seconds until the last step, and those of the
        #: last evaluation, at first a guess.
        self.began, self._time = 0.0, 0.0
        self._evaluation = EVALUATING * 60 * (self.args.max_minutes or 0.0)
        if self.args.max_minutes is not None:
            self.add_callback(TimeLimit(self))
        for usual in (ProgressCallback, PrinterCallback):
            self.remove_callback(usual)
        self.report = Report(self)
        self.add_callback(self.report)
        # The losses are means, so that Trainer must divide by the number of accumulated batches.
        self.model_accepts_loss_kwargs = False
        self.adapter_config: SpecPeftConfig = self.unwrapped.active_peft_config
        self.trains_base = self.adapter_config.trains_base
        if parse_flag_from_env("ACCELERATE_USE_FSDP") and not self.is_fsdp_enabled:
            raise ValueError(
                f"accelerate was told to use FSDP, and runs {self.args.world_size} process(es) on "
                f"{self.args.device.type!r} without it: it shards over several accelerators only. "
                "Launch it without FSDP, or where there are accelerators."
            )
        if self.is_fsdp_enabled and not self.accelerator.is_fsdp2:
            raise ValueError(
                "accelerate was told to use FSDP of version 1, which hf_spec does not support: "
                "launch it with --fsdp_version 2."
            )
        self.sharded: bool = self.is_fsdp_enabled or is_deepspeed_zero3_enabled()
        split = self.is_fsdp_enabled or self.is_deepspeed_enabled
        later, method = sorted(self._untrained()), self.adapter_config.strategy
        for unsupported, what, remedy in (
            (later, f"a second stage, that of {', '.join(later)},", "train in one stage"),
            (not self.adapter_config.shards, f"'hf-spec train {method}'",
             "several processes with whole copies of the model work"),
            (self.trains_base, "training the base model's own weights", "train low-rank updates"),
            (self.args.muon, "optim='muon'", "choose another, such as adamw_torch"),
        ):  # fmt: skip
            if split and unsupported:
                raise ValueError(
                    f"{what} does not run under FSDP or DeepSpeed here: launch it without them, or "
                    f"{remedy}."
                )

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the Trainer's optimizer, with the learning rates of the adapter's parts, and with
        Muon if that is chosen."""
        rates = self.adapter_config.learning_rates() if self.optimizer is None else {}
        optimizer: Any = super().create_optimizer(*args, **kwargs)
        for part, rate in rates.items():
            chosen = {p for name, p in self.model.named_parameters() if f".{part}" in name}
            for group in list(optimizer.param_groups):
                moved = [p for p in group["params"] if p in chosen]
                if moved:
                    group["params"] = [p for p in group["params"] if p not in chosen]
                    optimizer.add_param_group({**group, "params": moved, "lr": rate})
        if self.args.muon and not isinstance(optimizer, WithMuon):
            matrices = layer_matrices(self.model)
            if not matrices:
                raise ValueError(
                    f"optim='muon': an adapter of {self.adapter_config.strategy} has no matrices "
                    "of layers. Choose another, such as adamw_torch."
                )
            self.optimizer = WithMuon(optimizer, matrices)
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        return SimilarLengths(self.examples_per_step, self.train_dataset)

    @property
    def examples_per_step(self) -> int:
        """Those of all processes."""
        args = self.args
        return args.train_batch_size * args.gradient_accumulation_steps * args.world_size

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the Trainer's schedule, or the same over time."""
        if self.args.max_minutes is None:
            return super().create_scheduler(num_training_steps, optimizer)
        schedule: Any = super().create_scheduler(FINE, optimizer)
        if not hasattr(schedule, "lr_lambdas"):
            raise ValueError(
                f"lr_scheduler_type={self.args.lr_scheduler_type.value!r} cannot follow "
                "max_minutes: choose another, such as cosine, or give max_steps instead."
            )

        def by_time(rate: Any) -> Any:
            return lambda step: rate(round(FINE * self.progress))

        schedule.lr_lambdas = list(map(by_time, schedule.lr_lambdas))
        return schedule

    @property
    def progress(self) -> float:
        """The part of the training that is over, from 0 to 1, without the last evaluation."""
        if self.args.max_minutes is not None:
            whole = 60 * self.args.max_minutes
            return min(self._time / (whole - min(self._evaluation, whole / 2)), 1.0)
        return self.state.global_step / max(self.state.max_steps, 1)

    @property
    def done(self) -> float:
        """The part of the training that is over by now, from 0 to 1, with all evaluations."""
        if self.args.max_minutes is not None:
            return min((time.monotonic() - self.began) / (60 * self.args.max_minutes), 1.0)
        return self.progress

    def see_time(self) -> None:
        """Look at the clock; that of the first process decides."""
        seconds = [time.monotonic() - self.began, self._evaluation]
        if self.args.world_size > 1:
            broadcast_object_list(seconds)
        self._time, self._evaluation = seconds

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.args.max_minutes is not None and self.is_in_train:
            logs["minutes"] = round(self._time / 60, 3)
        super().log(logs, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.trains_base and self.args.should_save:
            save_checkpoint(self._base, Path(output_dir or self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.trains_base:
            load_checkpoint(self._base, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.trains_base:
            load_checkpoint(self._base, Path(self.state.best_model_checkpoint))

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(model, inputs, *args, **kwargs)
        for parameter in self._untrained().values():
            parameter.grad = None  # the optimizer skips it
        return loss

    def _untrained(self) -> dict[str, torch.nn.Parameter]:
        """Parameters of the adapter that are not trained yet, by name."""
        names = self.adapter_config.untrained(self.progress)
        adapter = find_active(self._base, self.adapter_config.type_name) if names else None
        weights: dict[str, Any] = {} if adapter is None else adapter.tensors()
        return {name: weight for name, weight in weights.items() if name in names}

    def whole_state(self) -> dict[str, Any]:
        """The model's state dict with whole tensors; all processes call this, and the first one
        gets those of sharded parameters."""
        if self.is_fsdp_enabled:
            return self.accelerator.get_state_dict(self.model)
        return gathered_state(self.unwrapped, self.is_world_process_zero())

    @property
    def unwrapped(self) -> Any:
        """The ``PeftModel`` inside accelerate's wrappers."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def _base(self) -> Any:
        return self.unwrapped.get_base_model()

    def evaluation_loop(
        self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """Compute loss and accuracies on held-out answers, and acceptance on held-out prompts."""
        began = time.monotonic()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self.eval_decoding is not None:
            stats = self._decode(self.eval_decoding, time.monotonic() - began)
            output.metrics[f"{metric_key_prefix}_tau"] = stats.tau
            for depth, rate in enumerate(stats.acceptance_per_position, start=1):
                output.metrics[f"{metric_key_prefix}_acceptance_{depth}"] = rate
        self._evaluation = time.monotonic() - began
        return output

    def _decode(self, decoding: EvalDecoding, spent: float) -> SpecStats:
        """Statistics of decoding; every process decodes its share of the prompts. With
        ``max_minutes`` it ends when the evaluation, which has ``spent`` some seconds, has had its
        part of them; it has a quarter of that at least."""
        if self.sharded:
            # Every forward gathers weights from all processes, so that they must run in step.
            with whole_root(self.model):
                return decoding.measure(self._base)
        share = slice(self.args.process_index, None, self.args.world_size)
        limit = self.args.max_minutes
        part = EVALUATING * 60 * (limit or 0.0)
        seconds = None if limit is None else max(part - spent, part / 4)
        total = SpecStats()
        for part in gather_object([decoding.measure(self._base, share, seconds)]):
            total.merge(part)
        return total
