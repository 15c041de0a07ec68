"""Trees that ``hf-spec tune`` has chosen for devices: ``tree.json``, beside an adapter's weights.

A file has an entry for each device (its name, the model's dtype, and on a CPU the threads); an
entry has dynamic trees for one or more batch sizes and context lengths. Anything not in the file
uses the nearest entry.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.core.checks import check_count, check_range
from hf_spec.core.limits import MAX_FUTURE, MAX_JSON, MAX_SECONDS, MAX_SIZE
from hf_spec.core.tree_states import TreeStates
from hf_spec.policy.devices import device_name

logger = logging.getLogger(__name__)

#: File name, and the version that this release writes and the newest that it reads.
TREE_FILE, VERSION = "tree.json", 1


@dataclass(frozen=True)
class Device:
    """Where a model runs, as far as step times depend on it.

    Attributes:
        name: the hardware's name.
        kind: ``cpu``, ``cuda``, ...
        dtype: the model's dtype, such as ``bfloat16``.
        threads: number of CPU threads; None on other devices.
    """

    name: str
    kind: str
    dtype: str
    threads: int | None = None

    @classmethod
    def of(cls, model: Any) -> Device:
        """The device of a model."""
        device = model.device
        threads = torch.get_num_threads() if device.type == "cpu" else None
        dtype = str(model.dtype).removeprefix("torch.")
        return cls(device_name(device), device.type, dtype, threads)

    def __str__(self) -> str:
        return f"{self.name}, {self.dtype}"

    def distance(self, other: Device) -> tuple[float, ...]:
        """How different another device is; the most important parts come first."""
        threads = math.log((self.threads or 1) / (other.threads or 1))
        differs = (self.kind != other.kind, self.name != other.name, self.dtype != other.dtype)
        return (*map(float, differs), abs(threads))


@dataclass(frozen=True)
class TunedSetting:
    """Trees for a batch size and a context length in tokens, and step seconds by step tokens."""

    batch_size: int
    context: int
    states: TreeStates
    seconds: dict[int, float]

    @classmethod
    def from_json(cls, data: Any, where: str) -> TunedSetting:
        for name, low in (("batch_size", 1), ("context", 0)):
            check_count(f"{where}.{name}", _field(data, name, where), low, MAX_SIZE)
        try:
            states = TreeStates.from_json(_field(data, "states", where))
        except ValueError as error:
            raise ValueError(f"{where}.states: {error}") from error
        seconds = data.get("seconds", {})
        if not isinstance(seconds, dict) or not all(rows.isdecimal() for rows in seconds):
            raise ValueError(f"{where}.seconds: must be an object of seconds by numbers of rows.")
        for rows, spent in seconds.items():
            check_range(f"{where}.seconds[{rows}]", spent, 0.0, MAX_SECONDS, open_low=True)
        seconds = {int(rows): float(spent) for rows, spent in seconds.items()}
        return cls(data["batch_size"], data["context"], states, seconds)


@dataclass(frozen=True)
class TunedDevice:
    """A device with its trees.

    Attributes:
        device: what it is.
        settings: its trees, at least one.
        accuracies: ``[d - 1][r]``: how often the token of rank r is right at distance d; None in
            files of releases that did not write it.
    """

    device: Device
    settings: tuple[TunedSetting, ...]
    accuracies: tuple[tuple[float, ...], ...] | None

    @classmethod
    def from_json(cls, data: Any, where: str) -> TunedDevice:
        device = Device(
            *(_field(data, name, where) for name in ("device", "kind", "dtype", "threads"))
        )
        if not all(isinstance(name, str) for name in (device.name, device.kind, device.dtype)):
            raise ValueError(f"{where}: device, kind and dtype must be words.")
        if device.threads is not None:
            check_count(f"{where}.threads", device.threads, high=MAX_SIZE)
        settings = _field(data, "settings", where)
        if not isinstance(settings, list) or not settings:
            raise ValueError(f"{where}.settings holds no trees; run hf-spec tune.")
        for name in ("accuracies", "landed_accuracies"):
            if name in data:
                _check_accuracies(data[name], f"{where}.{name}")
        table = data.get("accuracies")
        return cls(
            device,
            tuple(
                TunedSetting.from_json(one, f"{where}.settings[{at}]")
                for at, one in enumerate(settings)
            ),
            None if table is None else tuple(tuple(map(float, row)) for row in table),
        )

    def nearest(self, batch_size: int, context: int) -> TunedSetting:
        """The most similar setting; the batch size matters most."""

        def unlike(one: TunedSetting) -> tuple[float, float]:
            return (
                abs(math.log(batch_size / one.batch_size)),
                abs(math.log((context + 1) / (one.context + 1))),
            )

        return min(self.settings, key=unlike)


def _field(data: Any, name: str, where: str) -> Any:
    if not isinstance(data, dict) or name not in data:
        raise ValueError(f"{where} has no usable {name!r}; run hf-spec tune.")
    return data[name]


def _check_accuracies(table: Any, where: str) -> None:
    """Raise ValueError unless it is a table of probabilities with one table row per distance."""
    if not isinstance(table, list) or not 1 <= len(table) <= MAX_FUTURE:
        raise ValueError(f"{where}: must be a list for 1 to {MAX_FUTURE} distances.")
    for distance, row in enumerate(table):
        if not isinstance(row, list) or not row or len(row) != len(table[0]):
            raise ValueError(
                f"{where}[{distance}]: must be a list of probabilities, equally many for each "
                "distance."
            )
        for rank, chance in enumerate(row):
            check_range(f"{where}[{distance}][{rank}]", chance, 0.0, 1.0)


@dataclass(frozen=True)
class TunedTrees:
    """The part of a ``tree.json`` that decoding needs.

    Attributes:
        entries: devices with their trees, at least one.
    """

    entries: tuple[TunedDevice, ...]

    @classmethod
    def from_json(cls, data: Any) -> TunedTrees:
        """Read the content of a file.

        Raises:
            ValueError: if the content is invalid or of a later version; names the field.
        """
        if not isinstance(data, dict) or not isinstance(data.get("devices"), list):
            raise ValueError('expected {"version": 1, "devices": [...]} as hf-spec tune writes it.')
        if data.get("version") != VERSION:
            raise ValueError(
                f"version {data.get('version')!r}: this hf_spec reads version {VERSION}. Upgrade, "
                "or run hf-spec tune."
            )
        if not data["devices"]:
            raise ValueError("it holds no trees; run hf-spec tune.")
        return cls(
            tuple(
                TunedDevice.from_json(item, f"devices[{at}]")
                for at, item in enumerate(data["devices"])
            )
        )

    @property
    def max_probes(self) -> int:
        """Largest number of predicted future tokens and of probes under a node, over all trees."""
        return max(states.max_probes for states in self._all())

    @property
    def max_rank(self) -> int:
        """Largest rank of a candidate."""
        return max(states.max_rank for states in self._all())

    def _all(self) -> list[TreeStates]:
        return [one.states for entry in self.entries for one in entry.settings]

    def select(self, device: Device, batch_size: int, context: int) -> TreeStates:
        """The trees of the nearest device, batch size and context length.

        Logs once if the file has no entry for this hardware or dtype.
        """
        entry = min(self.entries, key=lambda entry: device.distance(entry.device))
        if any(device.distance(entry.device)[:-1]):
            _warn_of_other_device(str(device), str(entry.device))
        return entry.nearest(batch_size, context).states


@functools.cache  # once per pair, however often they meet
def _warn_of_other_device(here: str, found: str) -> None:
    logger.warning(
        "%s has no entry for this device (%s): the trees tuned for %s are taken, which may be "
        "slower than need be; outputs stay exact. Run hf-spec tune here.",
        TREE_FILE, here, found,
    )  # fmt: skip


def read_trees(path: Path) -> TunedTrees:
    """The trees of a file.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    stat = path.stat()
    return _read(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=16)
def _read(path: Path, changed: int, size: int) -> TunedTrees:
    try:
        if size > MAX_JSON:
            raise ValueError(f"it has {size} bytes, at most {MAX_JSON} are read.")
        return TunedTrees.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:  # of JSON, too
        raise ValueError(f"{str(path)!r} is no file of tuned trees: {error}") from error


@dataclass(frozen=True)
class Measurements:
    """What ``hf-spec tune`` has measured, for trees that are chosen while decoding.

    Attributes:
        accuracies: ``[d - 1][r]``: how often the token of rank r is right at distance d.
        seconds: step seconds on this device, by step tokens; empty if timed on other hardware.
    """

    accuracies: tuple[tuple[float, ...], ...]
    seconds: dict[int, float]


def measurements(
    adapter: ActiveAdapter, device: Device, batch_size: int, context: int
) -> Measurements | None:
    """Measurements of the nearest entry of an adapter's ``tree.json``; None if there are none.

    They are only an initial guess: the Hub is not contacted, and an unreadable file counts as none.
    """
    path = adapter.file_beside(TREE_FILE, ask=False)
    entries: Sequence[TunedDevice] = ()
    with suppress(OSError, ValueError):
        entries = () if path is None else read_trees(path).entries
    entries = [one for one in entries if one.accuracies is not None]
    if not entries:
        return None
    entry = min(entries, key=lambda one: device.distance(one.device))
    assert entry.accuracies is not None
    one = entry.nearest(batch_size, context)
    here = not any(device.distance(entry.device)) and one.batch_size == batch_size
    return Measurements(entry.accuracies, one.seconds if here else {})
