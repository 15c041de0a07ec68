"""Makes an adapter in one pass over answers, without gradients: batches, checkpoints, record."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import BatchSampler
from tqdm.auto import tqdm
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_spec.adapters.loading import load_unattached, save_unattached
from hf_spec.adapters.tuner import Fit, TrainingBatch
from hf_spec.core.checks import check_same_settings
from hf_spec.files import read_json, write_json
from hf_spec.methods.registry import Method
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.modeling_patches.weights import placement
from hf_spec.tools.bench.environment import PACKAGES, device_name, package_version
from hf_spec.tools.hub.folder import save_spec_config
from hf_spec.tools.training.arguments import SpecArguments, config_fields
from hf_spec.tools.training.dataset import AnswerDataset, SimilarLengths, collate
from hf_spec.tools.training.evaluation import EvalDecoding


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
        "versions": {name: package_version(name) for name in PACKAGES},
        "device": device_name(placement(model).device),
        "history": history,
    }
