"""Counts the bytes that a block of a test allocates."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocated:
    """Bytes on the CPU, known after the block.

    Attributes:
        peak: most that the block held at once of what it allocated.
        kept: what it has allocated and not freed.
    """

    peak: int = 0
    kept: int = 0


@contextmanager
def allocations() -> Iterator[Allocated]:
    """What PyTorch's allocator reports, whoever holds it: tensors, and temporaries of kernels."""
    found = Allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield found
    results = profiled.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"]
    for event in sorted(changes, key=lambda event: event.start_ns()):
        found.kept += event.nbytes()
        found.peak = max(found.peak, found.kept)
