"""The output folder of ``hf-spec distill``.

Each finished unit of prompts is a file of its own, so that an interrupted run can be continued; the
last step merges them.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_spec.core.checks import first_line
from hf_spec.files import exclusive, write_atomically
from hf_spec.hub.folder import read_json, staging
from hf_spec.training.dataset import DATA, PARTS, PROVENANCE

if TYPE_CHECKING:
    import pyarrow

#: Files in the folder of parts: the settings, the lock of the writing process, units by number.
SETTINGS, LOCK, UNIT = "settings.json", "lock", "unit-{:08d}.parquet"
#: Folders that :func:`~hf_spec.hub.folder.staging` leaves behind if the process is killed.
HALF_WRITTEN = ".writing-*"
#: Rows of a file of answers; while units are merged, so many are in memory.
SHARD_ROWS = 100_000
#: Key of the costs in the metadata of a unit's file.
COST_KEY = b"hf_spec"


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
            table = self._unit(number, columns=["index", "answer_ids"])
            costs.append(json.loads(table.schema.metadata[COST_KEY]))
            indices += table.column("index").to_pylist()
            tokens += compute.sum(compute.list_value_length(table.column("answer_ids"))).as_py()
        if sorted(indices) != list(range(questions)):
            raise ValueError(
                f"the units in {str(self.parts)!r} do not hold each prompt once: give another "
                "--output"
            )
        seconds, steps = (sum(cost[name] for cost in costs) for name in ("seconds", "row_steps"))
        record = {
            **provenance,
            "rows": questions,
            "answer_tokens": tokens,
            "mean_answer_tokens": tokens / questions,
            "measured": {  # seconds in ``generate``, added up over processes
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "tau": tokens / steps,
                "devices": sorted({cost["device"] for cost in costs}),
            },
        }
        shards, index = -(-questions // SHARD_ROWS), compute.field("index")
        with staging(self.path) as temporary:
            for shard in range(shards):
                first, end = (number * questions // shards for number in (shard, shard + 1))
                inside = (index >= first) & (index < end)
                parts = [self._unit(number, filters=inside) for number in range(count)]
                merged = pyarrow.concat_tables(parts).sort_by("index").replace_schema_metadata(None)
                path = temporary / DATA.format(shard, shards)
                path.parent.mkdir(exist_ok=True)
                parquet.write_table(merged, path)
            # "provenance.json" comes after "data/..." in the alphabet, the order of moving.
            write_atomically(temporary / PROVENANCE, json.dumps(record, indent=1))
        self.clear()

    def _unit(self, number: int, **what: Any) -> pyarrow.Table:
        """A finished unit, or those of its columns and rows that ``read_table`` is asked for.

        Raises:
            ValueError: it cannot be read.
        """
        import pyarrow
        import pyarrow.parquet as parquet

        path = self.parts / UNIT.format(number)
        try:
            return parquet.read_table(path, **what)
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


def _shown(value: Any) -> str:
    """A setting as text for an error; prompt files are abbreviated."""
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        return ", ".join(f"{one['name']} (sha256 {one['sha256'][:8]}...)" for one in value)
    return repr(value)
