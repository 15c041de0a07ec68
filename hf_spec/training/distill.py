"""Generates training data: a model's own answers to prompts.

The prompts are divided into units of similar length. Each finished unit is written to a file of its
own, so that an interrupted run can be continued; the last step merges the units. The content of a
unit depends only on the settings and its number, not on interruptions or the number of processes.
This module knows no command line.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from hf_spec.adapters.base_model import fingerprint
from hf_spec.bench.contenders import Contender
from hf_spec.bench.prompts import Prompt, encode_prompts, read_prompts, spread
from hf_spec.bench.report import environment
from hf_spec.bench.session import Session, own_generation_config
from hf_spec.core.checks import first_line
from hf_spec.files import exclusive, write_atomically
from hf_spec.hub.folder import read_json, staging
from hf_spec.training.dataset import DATA, PARTS, PROVENANCE, read_provenance

if TYPE_CHECKING:
    import pyarrow
    from accelerate import PartialState

#: Files in the folder of parts: the settings, the lock of the writing process, units by number.
SETTINGS, LOCK, UNIT = "settings.json", "lock", "unit-{:08d}.parquet"
#: Folders that :func:`~hf_spec.hub.folder.staging` leaves behind if the process is killed.
HALF_WRITTEN = ".writing-*"
#: Rows of a file of answers; while units are merged, so many are in memory.
SHARD_ROWS = 100_000
#: Batches' worth of prompts that a strategy decodes before they are written.
BATCHES = 8
#: Key of the costs in the metadata of a unit's file.
COST_KEY = b"hf_spec"
#: Longest time that processes wait for each other at the end.
PATIENCE = timedelta(days=7)
NOTE = (
    "The answers are the model's own: a strategy makes generating faster and changes nothing else. "
    "Greedy answers equal plain generate's token for token in float32, and in bfloat16 or float16 "
    "wherever no two tokens tie within rounding. Sampled answers follow the same distribution; "
    "which of them are drawn depends on strategy, batch size and seed."
)


# ---------------------------------------------------------------------------------- what is asked


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
        questions += [
            Question(prompt.text, prompt.category, prompt.question_id, source=path.name)
            for prompt in prompts
        ]
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


# ------------------------------------------------------------------------------------- the folder


class AnswerFolder:
    """The output folder, from its first unit to the finished data set.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path):
        self.path = path
        self.parts = path / PARTS

    def check(self, settings: dict[str, Any]) -> bool:
        """Whether the folder is finished.

        Args:
            settings: the settings as JSON types; only these are compared.

        Raises:
            ValueError: the folder was generated with other settings; the message names them.
        """
        finished = (self.path / PROVENANCE).is_file()
        if finished:
            before = read_json(self.path / PROVENANCE)
        elif (self.parts / SETTINGS).is_file():
            before = read_json(self.parts / SETTINGS)
        elif any(self.path.glob("data/*")):
            raise ValueError(
                f"{str(self.path)!r} holds data that hf-spec distill did not make: give another "
                "--output"
            )
        else:
            return False
        changes = [
            f"{name} was {_shown(before.get(name))}, now {_shown(value)}"
            for name, value in settings.items()
            if before.get(name) != value
        ]
        if changes:
            raise ValueError(
                f"{str(self.path)!r} holds answers made with other settings "
                f"({'; '.join(changes)}): repeat its settings, or give another --output"
            )
        return finished

    def locked(self) -> AbstractContextManager[None]:
        """Lock the folder against other runs within the block."""
        self.parts.mkdir(parents=True, exist_ok=True)
        return exclusive(
            self.parts / LOCK,
            f"another hf-spec distill is writing to {str(self.path)!r}: wait for it, or give "
            "another --output",
        )

    def begin(self, settings: dict[str, Any]) -> None:
        """Store the settings."""
        write_atomically(self.parts / SETTINGS, json.dumps(settings, indent=1))

    def missing(self, count: int) -> list[int]:
        """Numbers of the unfinished units, out of ``count``."""
        there = set(os.listdir(self.parts))
        return [number for number in range(count) if UNIT.format(number) not in there]

    def add(self, number: int, rows: list[dict[str, Any]], cost: dict[str, Any]) -> None:
        """Write a unit atomically."""
        import pyarrow
        import pyarrow.parquet as parquet

        table = pyarrow.Table.from_pylist(rows, _schema())
        table = table.replace_schema_metadata({COST_KEY: json.dumps(cost)})
        with staging(self.parts) as temporary:
            parquet.write_table(table, temporary / UNIT.format(number))

    def finish(self, count: int, questions: int, provenance: dict[str, Any]) -> None:
        """Merge the units, write the provenance, and remove the units.

        The provenance is written last, so a folder that contains it is finished.

        Args:
            count: number of units.
            questions: number of prompts.
            provenance: how the data are generated.

        Raises:
            ValueError: a unit cannot be read, or the units do not contain each prompt once.
        """
        import pyarrow
        import pyarrow.compute as compute
        import pyarrow.parquet as parquet

        costs, indices, tokens = [], [], 0
        for number in range(count):
            table = self._unit(number, ["index", "answer_ids"])
            costs.append(json.loads(table.schema.metadata[COST_KEY]))
            indices.append(table.column("index").to_pylist())
            tokens += compute.sum(compute.list_value_length(table.column("answer_ids"))).as_py()
        if sorted(index for unit in indices for index in unit) != list(range(questions)):
            raise ValueError(
                f"the units in {str(self.parts)!r} do not hold each prompt once: give another "
                "--output"
            )
        record = {**provenance, **_figures(questions, tokens, costs)}
        with staging(self.path) as temporary:
            shards = -(-questions // SHARD_ROWS)
            for shard in range(shards):
                rows = range(shard * questions // shards, (shard + 1) * questions // shards)
                parts = [
                    self._unit(number).filter(pyarrow.array([index in rows for index in unit]))
                    for number, unit in enumerate(indices)
                    if any(index in rows for index in unit)
                ]
                merged = pyarrow.concat_tables(parts).sort_by("index").replace_schema_metadata(None)
                path = temporary / DATA.format(shard, shards)
                path.parent.mkdir(exist_ok=True)
                parquet.write_table(merged, path)
            # "provenance.json" comes after "data/..." in the alphabet, the order of moving.
            write_atomically(temporary / PROVENANCE, json.dumps(record, indent=1))
        self.clear()

    def _unit(self, number: int, columns: list[str] | None = None) -> pyarrow.Table:
        """A finished unit, or some of its columns.

        Raises:
            ValueError: it cannot be read.
        """
        import pyarrow
        import pyarrow.parquet as parquet

        path = self.parts / UNIT.format(number)
        try:
            return parquet.read_table(path, columns=columns)
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(
                f"cannot read {str(path)!r} ({first_line(error)}): delete it and repeat the command"
            ) from error

    def clear(self) -> None:
        """Remove units and temporary files from a finished folder."""
        for left in (self.parts, *self.path.glob(HALF_WRITTEN)):
            shutil.rmtree(left, ignore_errors=True)


def _schema() -> pyarrow.Schema:
    import pyarrow

    ids, text = pyarrow.list_(pyarrow.int32()), pyarrow.string()
    return pyarrow.schema(
        [
            ("prompt_ids", ids), ("answer_ids", ids), ("prompt", text), ("answer", text),
            ("category", text), ("source", text), ("question_id", text),
            ("index", pyarrow.int64()),
        ]
    )  # fmt: skip


def _figures(rows: int, tokens: int, costs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was made and measured; seconds are those in ``generate``, added up over processes."""
    seconds, row_steps = (sum(cost[name] for cost in costs) for name in ("seconds", "row_steps"))
    return {
        "rows": rows,
        "answer_tokens": tokens,
        "mean_answer_tokens": tokens / rows,
        "measured": {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "tau": tokens / row_steps,
            "devices": sorted({cost["device"] for cost in costs}),
        },
    }


def _shown(value: Any) -> str:
    """A setting as text for an error; prompt files are abbreviated."""
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        return ", ".join(f"{one['name']} (sha256 {one['sha256'][:8]}...)" for one in value)
    return repr(value)


# --------------------------------------------------------------------------------------- the work


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
        machine = environment(model, settings.model, None)
        joining = replace(contender, joining=not contender.stock)
        session = Session(model, settings.generate_kwargs, managed=bool(contender.adapters))
        done = len(work) - len(missing)
        with closing(session):  # merged updates are removed again, also after an error
            for number in missing[state.process_index :: state.num_processes]:
                progress(done, len(work))
                # Each unit has its own seed, independent of process and time.
                torch.manual_seed((settings.seed * 1_000_003 + number) % 2**63)
                prompts = [token_ids[index] for index in work[number]]
                seconds, answers, row_steps, _ = session.stream(
                    joining, prompts, settings.batch_size
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
        "prompt": question.text,
        "answer": tokenizer.decode(answer_ids, skip_special_tokens=True),
        "category": question.category,
        "source": question.source,
        "question_id": str(question.question_id),
        "index": index,
    }
