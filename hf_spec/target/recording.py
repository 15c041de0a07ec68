"""When a call's steps are recorded as CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_spec.core.checks import check_switch
from hf_spec.core.memory import memory
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.modeling_patches.ranks import tensor_parallel_size
from hf_spec.modeling_patches.weights import placement
from hf_spec.target.captures import RECORDERS

logger = logging.getLogger(__name__)

#: Why, if it is so: a condition, and what it says.
Reason = tuple[object, str]


# -- Asked for by `record` ------------------------------------------------------------------------

#: In a model's memory: what `record` was told, and whether it has said that there is no device.
_ASKED, _TOLD = "record", "told of recording"


def record(model: nn.Module, on: bool = True) -> None:
    """Record the steps of a model's calls as CUDA graphs from now on, in every call that can.

    On a GPU an eager step takes as long as the host launches kernels. A recorded step launches them
    all at once. Calls with a strategy record a step when its sizes first occur, a fraction of a
    second each, as with ``compile_config=CompileConfig(backend="cudagraphs")``. Calls that cannot
    be recorded run as without it, and ``print(hf_spec.last_stats(model))`` says why: with
    ``disable_compile=True``, ``prune=True`` or ``synced_gpus``, and see the guide "Recorded and
    compiled steps". Without a CUDA device it does nothing, and says so once. A copied or reloaded
    model is not recorded.

    Args:
        model: a causal language model or a `PeftModel`.
        on: False ends this, and frees what was recorded. Calls with a ``compile_config`` of their
            own are not concerned.

    Raises:
        ValueError: ``on`` is neither True nor False.
    """
    check_switch("on", on)
    model = unwrapped(model)
    kept = memory(model)
    kept[_ASKED] = on
    if not on:
        if "graphs" in kept:
            kept["graphs"].drop_records()
        return
    device = placement(model).device
    if device.type not in RECORDERS and not kept.get(_TOLD):
        kept[_TOLD] = True
        logger.warning(
            "hf_spec.record: %s is on %s, and CUDA graphs need a CUDA device: nothing is recorded "
            "until it is on one.", type(model).__name__, device,
        )  # fmt: skip


def is_asked(model: Any) -> bool | None:
    """Whether :func:`record` has turned a model's records on or off; None if it was not called."""
    asked: bool | None = memory(model).get(_ASKED)
    return asked


# -- A hint where it is not -----------------------------------------------------------------------

#: A device is idle in eager steps whose one read waits for less than this share of the step: by
#: then it had done nearly all. The hint comes after so many of them, one after the other.
IDLE_SHARE, IDLE_STEPS = 0.1, 32
_IDLE = (
    "%s: the GPU waits for the host, which launches its kernels one by one: in %d steps the host "
    "spent less than %d %% of the time on waiting for it. hf_spec.record(model) launches those of "
    "a step at once, as CUDA graphs; hf_spec.record(model, False) ends this hint."
)


class Hint:
    """Tells when it is known that a device waits for the host; once in a process.

    Attributes:
        given: whether it has.
    """

    def __init__(self) -> None:
        self.given, self._steps = False, 0

    def due(self, seconds: float, waited: float) -> bool:
        """Count an eager step; return whether this one makes it known."""
        self._steps = self._steps + 1 if waited < IDLE_SHARE * seconds else 0
        due = self._steps >= IDLE_STEPS and not self.given
        self.given |= due
        return due


_HINT = Hint()


# -- Where steps can be recorded ------------------------------------------------------------------


@dataclass
class Recording:
    """Whether and when a call's steps are recorded.

    Attributes:
        on: whether they are.
        why: why not, if :func:`record` asks for it; else None.
        hints: the model's name if they could be, and would be faster where the device is idle.
    """

    on: bool = False
    why: str | None = None
    hints: str | None = None

    @classmethod
    def of(
        cls, model: Any, hooks: Collection[str], disabled: bool, prunes: bool, synced: bool
    ) -> Recording:
        """Of a call that has no ``compile_config`` for it.

        Args:
            hooks: names of the hooks of its modules.
            disabled: whether it has ``disable_compile=True``.
            prunes: whether its strategy prunes.
            synced: whether several ranks run the model together, on batches of their own.
        """
        asked = is_asked(model)
        reasons = _of_the_call(model, disabled, prunes, synced)
        why = next((reason for holds, reason in reasons if holds), None)
        if asked:
            return cls(why is None, why)
        useful = asked is None and why is None and not _HINT.given
        if useful and placement(model).device.type == "cuda" and not obstacle(model, hooks, True):
            return cls(hints=type(model).__name__)
        return cls()

    def observe(self, seconds: float, waited: float) -> None:
        """Learn from a step that took so many seconds, in which the host waited for the device."""
        if self.hints is not None and _HINT.due(seconds, waited):
            logger.warning(_IDLE, self.hints, IDLE_STEPS, 100 * IDLE_SHARE)

    def details(self) -> dict[str, Any]:
        """Entries for ``SpecStats.details``."""
        return {} if self.why is None else {"not_recorded": self.why}


def _of_the_call(model: Any, disabled: bool, prunes: bool, synced: bool) -> Iterator[Reason]:
    """Why the steps of a call cannot be recorded."""
    device = placement(model).device
    yield device.type not in RECORDERS, f"the model is on {device}, and CUDA graphs need CUDA"
    yield disabled, "the call has disable_compile=True"
    yield prunes, "with prune=True, what is pruned differs from step to step"
    yield synced, "with synced_gpus, ranks with other prompts would wait for one that records"


def obstacle(model: Any, hooks: Collection[str], records: bool) -> str | None:
    """Why a model with these hooks cannot be compiled, or recorded, at all; None if no reason is
    known."""
    sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    if sharded or tensor_parallel_size(model) > 1:
        return (
            "its weights are split among processes, all of which would have to make the same code"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        return "some of its weights are offloaded"
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if records and len(devices) > 1:
        return f"its weights are on {' and '.join(devices)}, and a CUDA graph is for one device"
    if hooks:
        return f"its modules have hooks ({', '.join(sorted(hooks))}), which compiled code omits"
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        return "its quantization cannot be compiled"
    return None
