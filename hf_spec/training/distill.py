"""Generates training data: a model's own answers to prompts.

The prompts are divided into batches of similar length. The answers of a batch depend only on the
settings and its number, not on interruptions or the number of processes. This module knows no
command line.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
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
from hf_spec.data import read_rows
from hf_spec.files import exclusive, write_atomically
from hf_spec.hub.folder import read_json
from hf_spec.training.dataset import ANSWERS, PROVENANCE

if TYPE_CHECKING:
    from accelerate import PartialState

logger = logging.getLogger(__name__)

#: Longest time that processes wait for each other.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Question(Prompt):
    """A prompt.

    Attributes:
        source: name of its file.
    """

    source: str = ""


@dataclass(frozen=True)
class Settings:
    """The settings that determine the answers, as the options of ``hf-spec distill``.

    ``prompts`` has the name of each file by its SHA-256. None stands for all prompts, plain
    ``generate``, no adapter and the model's own numbers.
    """

    model: str
    prompts: dict[str, str]
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
        names = ("do_sample", "max_new_tokens", "temperature", "top_k", "top_p")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


class AnswerFolder:
    """The output folder: answers are appended as JSON lines while they are made.

    The provenance is written before the first answer; that of a finished folder has ``rows``.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path):
        self.path = path
        self.answers, self.provenance = path / ANSWERS, path / PROVENANCE

    def check(self, settings: dict[str, Any]) -> bool:
        """Whether the folder is finished.

        Args:
            settings: the settings as JSON types; only these are compared.

        Raises:
            ValueError: the folder was generated with other settings; the message names them.
        """
        if not self.provenance.is_file():
            if self.answers.exists():
                raise ValueError(
                    f"{str(self.answers)!r} is not of hf-spec distill: give another --output"
                )
            return False
        before = read_json(self.provenance)
        changes = [
            f"{name} was {before.get(name)!r}, now {value!r}"
            for name, value in settings.items()
            if name not in before or before[name] != value
        ]
        if changes:
            raise ValueError(
                f"{str(self.path)!r} holds answers made with other settings "
                f"({'; '.join(changes)}): repeat its settings, or give another --output"
            )
        return "rows" in before

    def locked(self) -> AbstractContextManager[None]:
        """Lock the folder against other runs within the block."""
        return exclusive(
            self.path / ".lock",
            f"another hf-spec distill is writing to {str(self.path)!r}: wait for it, or give "
            "another --output",
        )

    def write_provenance(self, provenance: dict[str, Any]) -> None:
        """Write how the answers are made, atomically."""
        write_atomically(self.provenance, json.dumps(provenance, indent=1))

    def mend(self) -> None:
        """Drop a last line that was not written to its end."""
        if not self.answers.is_file():
            return
        with self.answers.open("rb+") as file:
            end = 0
            for line in file:
                if not line.endswith(b"\n"):
                    logger.warning("%s: the last line was cut off and is made again", self.answers)
                    break
                end += len(line)
            file.truncate(end)

    def lengths(self) -> dict[int, int]:
        """Number of tokens of each answer, by the index of its prompt.

        Raises:
            ValueError: a line cannot be read; the message names it.
        """
        rows = read_rows(self.answers) if self.answers.is_file() else ()
        return {row.fields["index"]: len(row.fields["answer_ids"]) for row in rows}

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append answers."""
        with self.answers.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)


def read_questions(
    paths: Sequence[Path], limit: int | None = None
) -> tuple[list[Question], dict[str, str]]:
    """At most ``limit`` prompts, divided evenly among categories, in the order of the files; and
    the name of each file by its SHA-256.

    Raises:
        ValueError: a file cannot be read, is invalid, or is given twice.
    """
    questions: list[Question] = []
    files: dict[str, str] = {}
    for path in paths:
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        if digest in files:
            raise ValueError(f"the prompts of {str(path)!r} are given twice: leave one of them out")
        prompts = read_prompts(path)
        files[digest] = path.name
        questions += [Question(**vars(prompt), source=path.name) for prompt in prompts]
    return cast(list[Question], spread(questions, limit)), files


def batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of the prompts of each batch, grouped by length, the longest first.

    Args:
        lengths: length of each prompt in tokens.
        size: prompts per batch.
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
    model: Any, tokenizer: Any, questions: Sequence[Question], folder: AnswerFolder,
    settings: Settings, contender: Contender, state: PartialState,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> dict[str, Any]:  # fmt: skip
    """Generate the answers that the folder lacks, and finish it.

    Every process calls this function and generates its share; the main process writes.

    Args:
        model: a causal language model in evaluation mode, on its device, with the adapter of
            ``contender`` loaded.
        tokenizer: its tokenizer.
        questions: the prompts, in the order of the output.
        folder: the output folder, locked by the main process.
        settings: the settings.
        contender: the strategy that ``settings`` names.
        state: the processes.
        progress: called as ``progress(done, total)`` with numbers of batches.

    Returns:
        The provenance, as in the folder; ``measured`` is of this run.

    Raises:
        ValueError: the folder was made with other settings, or the prompts do not fit the model.
    """
    from accelerate.utils import gather_object

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
        state.wait_for_everyone()  # no process writes before all have looked
        if state.is_main_process:
            folder.write_provenance(facts)
            folder.mend()
        state.wait_for_everyone()
        lengths = folder.lengths()
        everything = batches([len(ids) for ids in token_ids], settings.batch_size)
        work = [(i, one) for i, one in enumerate(everything) if not lengths.keys() >= set(one)]
        finished = len(everything) - len(work)
        seconds, steps, tokens = 0.0, 0, 0
        state.wait_for_everyone()
        with closing(
            Session(model, settings.generate_kwargs, managed=bool(contender.adapters))
        ) as session:  # merged updates are removed again, also after an error
            for start in range(0, len(work), state.num_processes):
                progress(finished + start, len(everything))
                share = work[start : start + state.num_processes]
                own: tuple[float, int, list[dict[str, Any]]] = (0.0, 0, [])
                if state.process_index < len(share):
                    number, indices = share[state.process_index]
                    # Each batch has its own seed, independent of process and time.
                    torch.manual_seed((settings.seed * 1_000_003 + number) % 2**63)
                    prompts = [token_ids[index] for index in indices]
                    spent, answers, row_steps, _ = session.generate(contender, prompts)
                    rows = [
                        _row(tokenizer, index, questions[index], token_ids[index], answer)
                        for index, answer in zip(indices, answers)
                    ]
                    own = spent, row_steps, rows
                for spent, row_steps, rows in gather_object([own]):
                    seconds, steps = seconds + spent, steps + row_steps
                    tokens += sum(len(row["answer_ids"]) for row in rows)
                    new = [row for row in rows if row["index"] not in lengths]
                    lengths |= {row["index"]: len(row["answer_ids"]) for row in new}
                    if state.is_main_process:
                        folder.add(new)
        progress(len(everything), len(everything))
    machine = environment_of(model, settings.model, None)
    private = ("model", "prompts", "prompts_sha256", "argv")  # known, or of this machine
    total = sum(lengths.values())
    provenance = {
        **facts,
        "model_revision": getattr(model.config, "_commit_hash", None),
        "truncated_prompts": truncated,
        "processes": state.num_processes,
        "environment": {name: machine[name] for name in machine if name not in private},
        "rows": len(questions),
        "answer_tokens": total,
        "mean_answer_tokens": total / len(questions),
        "measured": {  # seconds in ``generate``, added up over processes
            "answer_tokens": tokens, "seconds": seconds,
            "tokens_per_second": tokens / max(seconds, 1e-9), "tau": tokens / max(steps, 1),
        },
    }  # fmt: skip
    if state.is_main_process:
        folder.write_provenance(provenance)
    state.wait_for_everyone()
    return provenance


def _row(
    tokenizer: Any, index: int, question: Question, prompt_ids: list[int], answer_ids: list[int]
) -> dict[str, Any]:
    return {
        "prompt_ids": prompt_ids, "answer_ids": answer_ids, "prompt": question.full_text,
        "answer": tokenizer.decode(answer_ids, skip_special_tokens=True),
        "category": question.category, "source": question.source,
        "question_id": str(question.question_id), "index": index,
    }  # fmt: skip
