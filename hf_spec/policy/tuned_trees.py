"""Trees that ``hf-spec tune`` has chosen for devices: ``tree.json``, beside an adapter's weights.

A file has an entry for each device (its name, the model's dtype, and on a CPU the threads), an
entry has dynamic trees for one or more batch sizes and context lengths. What does not stand in the
file takes the nearest.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.core.tree_states import TreeStates
from hf_spec.policy.devices import device_name

logger = logging.getLogger(__name__)

#: The file, and the newest version that this release reads and the one it writes.
TREE_FILE, VERSION = "tree.json", 1


@dataclass(frozen=True)
class Device:
    """Where a model runs, as far as step times depend on it.

    Attributes:
        name: the hardware's.
        kind: ``cpu``, ``cuda``, ...
        dtype: the model's, as ``bfloat16``.
        threads: of the CPU; None elsewhere.
    """

    name: str
    kind: str
    dtype: str
    threads: int | None = None

    @classmethod
    def of(cls, model: Any) -> Device:
        """A model's."""
        device = model.device
        threads = torch.get_num_threads() if device.type == "cpu" else None
        dtype = str(model.dtype).removeprefix("torch.")
        return cls(device_name(device), device.type, dtype, threads)

    def __str__(self) -> str:
        return f"{self.name}, {self.dtype}"

    def distance(self, other: Device) -> tuple[float, ...]:
        """How unlike another it is; the parts that matter most stand first."""
        threads = math.log((self.threads or 1) / (other.threads or 1))
        differs = (self.kind != other.kind, self.name != other.name, self.dtype != other.dtype)
        return (*map(float, differs), abs(threads))


@dataclass(frozen=True)
class TunedSetting:
    """The trees for a batch size and a context length, in tokens."""

    batch_size: int
    context: int
    states: TreeStates


@dataclass(frozen=True)
class TunedTrees:
    """What a ``tree.json`` holds, as far as decoding needs it.

    Attributes:
        entries: devices with their trees.
    """

    entries: tuple[tuple[Device, tuple[TunedSetting, ...]], ...]

    @classmethod
    def from_json(cls, data: Any) -> TunedTrees:
        """Read the content of a file.

        Raises:
            ValueError: it is no such content, or of a later version.
        """
        if not isinstance(data, dict) or not isinstance(data.get("devices"), list):
            raise ValueError('expected {"version": 1, "devices": [...]} as hf-spec tune writes it.')
        if data.get("version") != VERSION:
            raise ValueError(
                f"version {data.get('version')!r}: this hf_spec reads version {VERSION}. Upgrade, "
                "or run hf-spec tune."
            )
        entries = []
        for item in data["devices"]:
            try:
                device = Device(item["device"], item["kind"], item["dtype"], item["threads"])
                settings = [
                    TunedSetting(
                        int(one["batch_size"]), int(one["context"]),
                        TreeStates.from_json(one["states"]),
                    )
                    for one in item["settings"]
                ]  # fmt: skip
            except (KeyError, TypeError) as error:
                raise ValueError(f"an entry has no usable {error}; run hf-spec tune.") from error
            entries.append((device, tuple(settings)))
        if not all(settings for _, settings in entries) or not entries:
            raise ValueError("it holds no trees; run hf-spec tune.")
        return cls(tuple(entries))

    @property
    def max_probes(self) -> int:
        """Most future tokens that any tree's states know of, and probes under a node."""
        return max(one.states.max_probes for _, settings in self.entries for one in settings)

    def select(self, device: Device, batch_size: int, context: int) -> TreeStates:
        """The trees of the nearest device, batch size and context length.

        Another hardware or dtype than the file has entries for is logged, once.
        """
        found, settings = min(self.entries, key=lambda entry: device.distance(entry[0]))
        if any(device.distance(found)[:-1]):
            _warn_of_other_device(str(device), str(found))
        return min(
            settings,
            key=lambda one: _apart(one.batch_size, one.context, batch_size, context),
        ).states


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
        return TunedTrees.from_json(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:  # of JSON, too
        raise ValueError(f"{str(path)!r} is no file of tuned trees: {error}") from error


@dataclass(frozen=True)
class Measurements:
    """What ``hf-spec tune`` has measured, for trees that are chosen while decoding.

    Attributes:
        accuracies: ``[d - 1][r]``: how often the token of rank r is right at distance d.
        seconds: of steps on this device, by their rows; empty if they were timed elsewhere.
    """

    accuracies: tuple[tuple[float, ...], ...]
    seconds: dict[int, float]


def measurements(
    adapter: ActiveAdapter, device: Device, batch_size: int, context: int
) -> Measurements | None:
    """Those of the nearest entry of the ``tree.json`` beside an adapter; None if there are none.

    Raises:
        ValueError: the file cannot be read.
    """
    path = adapter.config.file_beside(TREE_FILE)
    if path is None:
        return None
    read_trees(path)  # checks it
    entries = [one for one in json.loads(path.read_text("utf-8"))["devices"] if "accuracies" in one]
    if not entries:
        return None

    def unlike(entry: dict[str, Any]) -> tuple[float, ...]:
        names = ("device", "kind", "dtype", "threads")
        return device.distance(Device(*(entry[name] for name in names)))

    entry = min(entries, key=unlike)
    accuracies = tuple(tuple(map(float, row)) for row in entry["accuracies"])
    seconds = {}
    if not any(unlike(entry)):
        one = min(
            entry["settings"],
            key=lambda one: _apart(one["batch_size"], one["context"], batch_size, context),
        )
        if one["batch_size"] == batch_size:
            seconds = {int(rows): float(spent) for rows, spent in one.get("seconds", {}).items()}
    return Measurements(accuracies, seconds)


def _apart(
    tuned_size: int, tuned_context: int, batch_size: int, context: int
) -> tuple[float, float]:
    """How unlike a setting is to one that was tuned: the batch size matters most."""
    return (
        abs(math.log(batch_size / tuned_size)),
        abs(math.log((context + 1) / (tuned_context + 1))),
    )
