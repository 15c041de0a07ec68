"""What a drafter does between two steps, as a function of tensors that can be recorded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_spec.core.verify import StepResult
from hf_spec.model.graphs import Graphs


class DraftProgram(NamedTuple):
    """Takes what a step has committed and grows the next trees. It reads nothing on the host.

    Attributes:
        key: what it depends on besides the shapes of its inputs.
        buffers: tensors in fixed memory, which it may write into if doing so twice does no harm.
        inputs: all others that change from step to step.
        function: given :attr:`buffers` and :attr:`inputs`, the step's result, and what the drafter
            reads of its hidden states, returns the packed trees (:meth:`Tree.packed`), empty ones
            if none are wanted, and what the drafter gets besides.
        num_results: number of tensors that it returns.
    """

    key: Hashable
    buffers: Sequence[Tensor]
    inputs: Sequence[Tensor]
    function: Callable[[Sequence[Tensor], StepResult, Tensor | None], tuple[Tensor, ...]]
    num_results: int = 1

    def run(self, result: StepResult, hidden: Tensor | None) -> tuple[Tensor, ...]:
        """Run it as it is."""
        return self.function([*self.buffers, *self.inputs], result, hidden)

    def run_by(
        self, graphs: Graphs, result: StepResult, hidden: Tensor | None
    ) -> Sequence[Tensor]:  # fmt: skip
        """Run it by code of its own."""
        own = [*self.buffers, *self.inputs]
        given = [*result.on_device(), *([] if hidden is None else [hidden])]

        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            results, read = tensors[len(own) : len(own) + 6], tensors[len(own) + 6 :]
            result = StepResult.of(results)
            found = self.function(tensors[: len(own)], result, read[0] if read else None)
            # New code is checked by how likely the nodes are: which of several equally likely ones
            # it takes, as there are many in 16 bits, may differ.
            packed, *others = found
            return packed.view(torch.int32), packed.chunk(4, dim=1)[3], *others

        inputs = [*own, *(one.contiguous() for one in given)]
        packed, _, *others = graphs.run(
            ("draft", self.key, len(given)), function, inputs, lambda: function(*inputs), tuple,
            static=len(self.buffers),
        )  # fmt: skip
        return [packed.view(torch.float32), *others]
