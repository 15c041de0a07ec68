"""What ``hf-spec tune`` saves beside an adapter, and new processes start from: ``learned.json``.

The file has an entry for each device and each set of the strategy's options: step times by size,
batch size and context, the calibration, and a tree of the method's own if it has one. An entry for
other conditions is ignored: everything in it would be learned anew within some hundred steps.
"""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.core.checks import check_count, check_range
from hf_spec.core.limits import MAX_FUTURE, MAX_JSON, MAX_SECONDS, MAX_SIZE
from hf_spec.drafting.calibration import Calibration
from hf_spec.drafting.options import DraftOptions, changed
from hf_spec.files import write_atomically
from hf_spec.policy.devices import device_name
from hf_spec.policy.learned import Learned, Setting
from hf_spec.policy.step_times import SizeTime, StepTimes

logger = logging.getLogger(__name__)

#: File name, and the version that this release reads and writes.
LEARNED_FILE, VERSION = "learned.json", 1


def device_of(model: Any) -> dict[str, Any]:
    """Where a model runs, as far as step times depend on it: hardware, dtype, CPU threads."""
    device = model.device
    return {
        "device": device_name(device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }


def same_device(entry: dict[str, Any], model: Any) -> bool:
    """Whether an entry was made on the model's device."""
    return all(entry.get(name) == value for name, value in device_of(model).items())


def conditions(model: Any, strategy: str | None, options: DraftOptions) -> dict[str, Any]:
    """What an entry holds for: device, strategy, and options that are not the default."""
    return {**device_of(model), "strategy": strategy, "options": changed(options)}


# -- the file ------------------------------------------------------------------------------------


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The entries of a file; a ValueError that names it if it is broken, or of another version."""
    stat = path.stat()
    return _read(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=16)
def _read(path: Path, changed: int, size: int) -> list[dict[str, Any]]:
    try:
        if size > MAX_JSON:
            raise ValueError(f"it has {size} bytes, at most {MAX_JSON} are read.")
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']!r}, this hf_spec reads {VERSION}.")
        entries: list[dict[str, Any]] = data["entries"]
        for entry in entries:
            Saved(entry).learned("")
            Saved(entry).calibration(1)
        return entries
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        reason = f"missing {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{str(path)!r} is not what hf-spec tune writes: {reason} Delete the file, and run "
            "hf-spec tune again."
        ) from error


def write_entry(path: Path, entry: dict[str, Any]) -> None:
    """Add an entry to a file, atomically; it replaces that of the same conditions. A ValueError if
    there is a file, and it is broken."""

    def key(one: dict[str, Any]) -> list[Any]:
        return [one.get(name) for name in ("device", "dtype", "threads", "strategy", "options")]

    kept = [one for one in (read_entries(path) if path.is_file() else []) if key(one) != key(entry)]
    write_atomically(path, json.dumps({"version": VERSION, "entries": [*kept, entry]}, indent=1))


# -- an entry ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """An entry of a file, as :func:`read_entries` has checked it."""

    entry: dict[str, Any]

    def learned(self, device: str) -> Learned:
        """What the policy starts with on a device, as ``str(model.device)`` gives it."""
        found = Learned()
        check_range("prediction_value", self.entry["prediction_value"], 0.0, MAX_FUTURE)
        found.prediction_value = float(self.entry["prediction_value"])
        for one in self.entry["settings"]:
            check_count("batch_size", one["batch_size"], 1, MAX_SIZE)
            check_count("context_bits", one["context_bits"], 0, MAX_SIZE)
            key = one["batch_size"], one["context_bits"], device
            found.settings[key] = Setting(_times(one["times"]), _times(one["pruned"]))
        return found

    def calibration(self, depth: int) -> Calibration:
        """The calibration of a drafter for so many distances; a new one if none of them was
        saved."""
        found = Calibration(depth)
        for name, values in self.entry["calibration"].items():
            if name not in ("expected", "hits", "trials"):
                raise ValueError(f"calibration has no {name!r}.")
            for value in values:
                check_range(f"calibration.{name}", value, 0.0, MAX_SIZE, open_low=True)
            known = np.array(values[:depth], dtype=float)
            getattr(found, name)[: len(known)] = known
        return found


def saved_for(adapter: ActiveAdapter | None, model: Any, options: DraftOptions) -> Saved | None:
    """The entry beside an adapter for these conditions; None if there is none. A ValueError if the
    file is broken. The Hub is not contacted: what is saved there is of other devices."""
    if adapter is None:
        return None
    path = adapter.file_beside(LEARNED_FILE, ask=False)
    if path is None:
        return None
    wanted = conditions(model, adapter.config.strategy, options)
    for entry in read_entries(path):
        if all(entry.get(name) == value for name, value in wanted.items()):
            return Saved(entry)
    logger.debug("%s has no entry for %s; it is ignored.", path, wanted)
    return None


def to_entry(learned: Learned, calibration: Calibration | None) -> dict[str, Any]:
    """The part of an entry besides its conditions, as JSON types."""
    sums = {} if calibration is None else {
        name: getattr(calibration, name).tolist() for name in ("expected", "hits", "trials")
    }  # fmt: skip
    return {
        "prediction_value": learned.prediction_value,
        "settings": [
            {
                "batch_size": batch_size, "context_bits": bits,
                "times": _numbers(one.times), "pruned": _numbers(one.pruned),
            }
            for (batch_size, bits, _), one in sorted(learned.settings.items())
        ],
        "calibration": sums,
    }  # fmt: skip


def _numbers(times: StepTimes) -> dict[str, Any]:
    return {
        "seconds": {str(rows): spent for rows, spent in sorted(times.means.items())},
        "drafting": times.drafting_seconds,
        "drafted": times.drafted_seconds,
    }


def _times(data: dict[str, Any]) -> StepTimes:
    seconds: dict[int, float] = {}
    for rows, spent in data["seconds"].items():
        check_range(f"seconds[{rows}]", spent, 0.0, MAX_SECONDS, open_low=True)
        check_count("step tokens", int(rows), 1, MAX_SIZE)
        seconds[int(rows)] = float(spent)
    times = StepTimes.guessed(seconds)
    for name in ("drafting", "drafted"):
        if data[name] is not None:
            check_range(name, data[name], 0.0, MAX_SECONDS)
            setattr(times, name, SizeTime(float(data[name])))
    return times
