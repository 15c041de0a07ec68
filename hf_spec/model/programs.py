"""What a step does besides the model's forward, as functions of tensors: recorded steps are one
program, from the forward to the next step's trees."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hf_spec.core.verify import StepResult
from hf_spec.model.graphs import Graphs


class DraftProgram(NamedTuple):
    """Takes what a step has committed and grows the next trees.

    Attributes:
        key: what it depends on besides the shapes of its inputs.
        buffers: tensors in fixed memory, which it may write into if doing so twice does no harm.
        inputs: all others that change from step to step.
        function: given :attr:`buffers` and :attr:`inputs`, the step's result, what the drafter
            reads of its hidden states, and what the next tokens will be sampled with (see
            :class:`hf_spec.core.verify.VerifyProgram`), returns the packed trees
            (:meth:`Tree.packed`), and what the drafter gets besides.
        depth: depth of the trees.
        num_results: number of tensors that it returns.
        reads_cache: whether it reads the model's KV cache, where accepted nodes must be in their
            places.
    """

    key: Hashable
    buffers: Sequence[Tensor]
    inputs: Sequence[Tensor]
    function: Callable[
        [Sequence[Tensor], StepResult, Tensor | None, Tensor | None], tuple[Tensor, ...]
    ]
    depth: int
    num_results: int = 1
    reads_cache: bool = False

    def run(
        self, graphs: Graphs | None, result: StepResult, hidden: Tensor | None,
        noise: Tensor | None,
    ) -> Sequence[Tensor]:  # fmt: skip
        """Run it by code of its own, or as it is."""
        own = [*self.buffers, *self.inputs]
        if graphs is None:
            return self.function(own, result, hidden, noise)
        read = [one for one in (hidden, noise) if one is not None]

        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = iter(tensors)
            first = [next(given) for _ in own]
            result = StepResult.unpacked(next(given))
            states, ahead = (None if one is None else next(given) for one in (hidden, noise))
            return self.function(first, result, states, ahead)

        inputs = [*own, result.packed(), *(one.contiguous() for one in read)]
        key = "draft", self.key, hidden is None, noise is None
        return graphs.run(
            key, function, inputs, static=len(self.buffers),
            compared=partial(self.compared, graphs=graphs),
        )  # fmt: skip

    @staticmethod
    def compared(found: Sequence[Tensor], graphs: Graphs) -> list[Tensor]:
        """What is checked of the results, of which the first are packed trees: the nodes, and how
        likely they are. Compiled code may take others of equally likely ones, as there are many in
        16 bits."""
        *nodes, likely = found[0].chunk(4, dim=1)
        taken = [] if graphs.compiles else [torch.cat(nodes, dim=1).to(torch.int64)]
        return [*taken, likely, *found[1:]]
