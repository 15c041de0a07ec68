"""The host reads one small tensor per step; on a GPU each further one would be another wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import ragged
from test_compiled import CAPTURED, adapt, generate

#: What brings numbers to the host.
READS = ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the reads in this block; a read inside another one is none."""
    seen: list[str] = []
    inside = False

    def watched(name: str) -> Any:
        stock = getattr(torch.Tensor, name)

        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            outer, inside = inside, True
            if not outer:
                seen.append(name)
            try:
                return stock(self, *args, **kwargs)
            finally:
                inside = outer

        return read

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, watched(name))
        yield seen


CASES = [(name, {}) for name in ("prompt_lookup", "medusa", "propd", "bita", "space", "ppd")]
CASES += [(name, CAPTURED) for name in ("prompt_lookup", "space")]


@pytest.mark.parametrize(("name", "compiled"), CASES)
def test_one_read_per_step(
    shallow: Any, monkeypatch: pytest.MonkeyPatch, name: str, compiled: dict[str, Any]
) -> None:
    model = adapt(shallow(layers=1 + (name == "propd")), name)  # which looks at an earlier layer
    options: dict[str, Any] = {"drafting": "always"}
    if name == "propd":
        options["prune"] = False
    kwargs = {"assistant_strategy": name, "assistant_kwargs": options, **compiled}
    kwargs["max_new_tokens"] = 80
    # In the first call much is made that the later one finds, above all code for each size.
    generate(model, ragged(), **kwargs)
    with counted(monkeypatch) as seen:
        output = generate(model, ragged(), **kwargs)
    steps = output.spec_stats.num_steps
    # Some more to begin with, and while rows end, when it matters how many tokens are left.
    assert steps > 40 and len(seen) < steps + 25, (steps, len(seen))
