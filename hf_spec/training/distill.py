"""Generates training data: a model's own answers to prompts.

The prompts are divided into units of similar length. The content of a unit depends only on the
settings and its number, not on interruptions or the number of processes. This module knows no
command line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from hf_spec.adapters.base_model import fingerprint
from hf_spec.bench.contenders import Contender
from hf_spec.bench.environment import environment_of
from hf_spec.bench.prompts import Prompt, encode_prompts, read_prompts, spread
from hf_spec.bench.session import Session, own_generation_config
from hf_spec.training.answer_folder import AnswerFolder
from hf_spec.training.dataset import read_provenance

if TYPE_CHECKING:
    from accelerate import PartialState

#: Batches' worth of prompts that a strategy decodes before they are written.
BATCHES = 8
#: Longest time that processes wait for each other at the end.
PATIENCE = timedelta(days=7)
NOTE = (
    "The answers are the model's own: a strategy makes generating faster and changes nothing else. "
    "Greedy answers equal plain generate's token for token in float32, and in bfloat16 or float16 "
    "wherever no two tokens tie within rounding. Sampled answers follow the same distribution; "
    "which of them are drawn depends on strategy, batch size and seed."
)


@dataclass(frozen=True)
class Question(Prompt):
    """A prompt.

    Attributes:
        source: name of its file.
    """

    source: str = ""


@dataclass(frozen=True)
class Settings:
    """The settings that determine the answers; a folder can only be continued with the same.

    Attributes:
        model: path or repository of the model.
        prompts: ``name``, ``sha256`` and ``count`` of each prompt file.
        limit: most prompts; None for all.
        max_new_tokens: limit for each answer.
        batch_size: prompts decoded at the same time.
        strategy: name of the strategy; None for plain ``generate``.
        strategy_kwargs: its options.
        adapter: path or repository of its adapter; None for none.
        dtype: dtype of the model.
        seed: seed of the sampling.
        do_sample: whether tokens are sampled.
        temperature, top_k, top_p: None for the model's defaults.
    """

    model: str
    prompts: list[dict[str, Any]]
    limit: int | None = None
    max_new_tokens: int = 128
    batch_size: int = 8
    strategy: str | None = None
    strategy_kwargs: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    dtype: str = "bfloat16"
    seed: int = 0
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for ``generate``, without those of the strategy."""
        values = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        given = {name: value for name, value in values.items() if value is not None}
        return {"do_sample": self.do_sample, "max_new_tokens": self.max_new_tokens, **given}


def read_questions(
    paths: Sequence[Path], limit: int | None = None
) -> tuple[list[Question], list[dict[str, Any]]]:
    """Read at most ``limit`` prompts, divided evenly among categories.

    Returns:
        The prompts in the order of the files, and ``name``, ``sha256`` and ``count`` of each file.

    Raises:
        ValueError: a file cannot be read, is invalid, or is given twice.
    """
    questions: list[Question] = []
    files: list[dict[str, Any]] = []
    for path in paths:
        prompts = read_prompts(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest in [file["sha256"] for file in files]:
            raise ValueError(f"the prompts of {str(path)!r} are given twice: leave one of them out")
        files.append({"name": path.name, "sha256": digest, "count": len(prompts)})
        questions += [Question(**vars(prompt), source=path.name) for prompt in prompts]
    return cast(list[Question], spread(questions, limit)), files


def unit_size(settings: Settings) -> int:
    """Number of prompts of a unit, which is what an interruption can lose.

    If prompts join a running batch, a unit has several batches, so that the batch is mostly full.
    """
    return settings.batch_size * (1 if settings.strategy is None else BATCHES)


def units(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of the prompts of each unit, grouped by length, the longest first.

    The unit that takes most memory thus comes first, and all processes end at about the same time.

    Args:
        lengths: length of each prompt in tokens.
        size: prompts per unit.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[start : start + size] for start in range(0, len(order), size)]


def tokenizer_sha256(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's vocabulary, special tokens and chat template."""
    facts = [
        sorted(tokenizer.get_vocab().items()),
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        getattr(tokenizer, "chat_template", None),
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def processes(device: str | None) -> PartialState:
    """The processes of ``accelerate launch`` or ``torchrun``; otherwise this process alone."""
    from accelerate import PartialState

    launched = int(os.environ.get("LOCAL_RANK", -1)) >= 0
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    on_cpu = accelerator is None if device is None else device.startswith("cpu")
    return PartialState(cpu=launched and on_cpu, timeout=PATIENCE)


def distill(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    folder: AnswerFolder,
    settings: Settings,
    contender: Contender,
    state: PartialState,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> dict[str, Any]:
    """Generate the answers that the folder lacks, and finish it.

    Every process calls this function and generates its share of the units.

    Args:
        model: a causal language model in evaluation mode, on its device, with the adapter of
            ``contender`` loaded.
        tokenizer: its tokenizer.
        questions: the prompts, in the order of the output.
        folder: the output folder, locked by the main process.
        settings: the settings.
        contender: the strategy that ``settings`` names.
        state: the processes.
        progress: called as ``progress(done, total)`` with numbers of units.

    Returns:
        The provenance, as in the folder.

    Raises:
        ValueError: the folder was made with other settings, or the prompts do not fit the model.
    """
    token_ids, truncated = encode_prompts(model, tokenizer, questions, settings.max_new_tokens)
    with own_generation_config(model, tokenizer, greedy=not settings.do_sample):
        defaults = model.generation_config.to_diff_dict()
        defaults = {name: defaults[name] for name in defaults if name[0] != "_"}
        defaults.pop("transformers_version", None)
        facts = {
            **asdict(settings),
            "model_fingerprint": fingerprint(model),
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "generation_config": defaults,
        }
        facts = json.loads(json.dumps(facts))
        folder.check(facts)
        if state.is_main_process:
            folder.begin(facts)
        work = units([len(ids) for ids in token_ids], unit_size(settings))
        state.wait_for_everyone()
        missing = folder.missing(len(work))
        # No process writes a unit before all have listed the missing ones.
        state.wait_for_everyone()
        machine = environment_of(model, settings.model, None)
        session = Session(model, settings.generate_kwargs, managed=bool(contender.adapters))
        done = len(work) - len(missing)
        with closing(session):  # merged updates are removed again, also after an error
            for number in missing[state.process_index :: state.num_processes]:
                progress(done, len(work))
                # Each unit has its own seed, independent of process and time.
                torch.manual_seed((settings.seed * 1_000_003 + number) % 2**63)
                prompts = [token_ids[index] for index in work[number]]
                seconds, answers, row_steps, _ = session.stream(
                    contender, prompts, settings.batch_size
                )
                rows = [
                    _row(tokenizer, index, questions[index], token_ids[index], answer)
                    for index, answer in zip(work[number], answers)
                ]
                device = machine["device_name"]
                cost = {"seconds": seconds, "row_steps": row_steps, "device": device}
                folder.add(number, rows, cost)
                done = min(done + state.num_processes, len(work))
        progress(done, len(work))
    state.wait_for_everyone()
    if state.is_main_process:
        named = ("model", "prompts", "prompts_sha256", "argv")  # known or private
        provenance = {
            **facts,
            "model_revision": getattr(model.config, "_commit_hash", None),
            "truncated_prompts": truncated,
            "note": NOTE,
            "processes": state.num_processes,
            "environment": {name: machine[name] for name in machine if name not in named},
        }
        folder.finish(len(work), len(questions), provenance)
    state.wait_for_everyone()
    return read_provenance(folder.path)


def _row(
    tokenizer: Any, index: int, question: Question, prompt_ids: list[int], answer_ids: list[int]
) -> dict[str, Any]:
    return {
        "prompt_ids": prompt_ids,
        "answer_ids": answer_ids,
        "prompt": question.full_text,
        "answer": tokenizer.decode(answer_ids, skip_special_tokens=True),
        "category": question.category,
        "source": question.source,
        "question_id": str(question.question_id),
        "index": index,
    }
