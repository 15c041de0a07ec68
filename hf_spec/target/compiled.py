"""A target's forward by compiled code: padded to recurring shapes, with all that changes from step
to step as its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.device import Holds, bucket, to_device
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult, VerifyProgram
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.target.graphs import DraftProgram, Graphs
from hf_spec.target.target import Block, ForwardContext, Output, Target

#: Least number of nodes, padding included, of a tree that is forwarded in parts.
PARTS = 64


class CompiledTarget(Target, Holds):
    """A target whose steps are compiled; prompts are not."""

    held = ("cache",)
    taken = (
        "position_shift", "last_position", "axes", "probe_embeddings", "front_seen",
        "model_kwargs", "row_kwargs", "per_token",
    )  # fmt: skip
    graphs: Graphs  # keeps the compiled code

    def __init__(self, *args: Any, graphs: Graphs, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.graphs = graphs

    @property
    def prepared(self) -> int:
        return self.graphs.prepared

    def details(self) -> dict[str, Any]:
        return {"compiled": self.graphs.details()}

    def reserve(self, tree: Tree) -> None:
        """Make room for a step with this tree, so that the cache's buffers stay where they are."""
        self.cache.reserve(bucket(tree.num_tokens) + bucket(tree.num_probes))

    def step(
        self, tree: Tree, first: int, keys: int, changes: Changes | None,
        verify: VerifyProgram | None, after: DraftProgram | None,
    ) -> Output:  # fmt: skip
        """By compiled code, which leaves accepted nodes that it knows in the first slots."""
        if first and self.cache.recurrent is not None:
            # What earlier forwards of the step have kept has no recurring size.
            return super().step(tree, first, keys, changes, verify, after)
        return _Step(self, tree, first, keys, changes, verify, after).run()

    def using(self, tensors: Iterator[Tensor], changing: Iterator[Tensor]) -> Self:
        """See :class:`hf_spec.core.device.Holds`; as it is before its first forward."""
        own = super().using(tensors, changing)
        own._watching, own._prunes, own._context = None, False, ForwardContext()
        return own


class _Inputs(NamedTuple):
    """What the code of a step gets: first what is at the same places in most steps.

    Attributes:
        drafter: buffers of the :class:`DraftProgram`.
        target: the target's, with those of the KV cache.
        changing: those of its that differ from call to call, and the cache's lengths.
        tree: the parts of the padded tree.
        first: ``(1,)`` the first node to forward, if it is not the root.
        rule, drafting: what changes for the two programs.
    """

    drafter: Sequence[Tensor]
    target: Sequence[Tensor]
    changing: Sequence[Tensor]
    tree: Sequence[Tensor]
    first: Sequence[Tensor]
    rule: Sequence[Tensor]
    drafting: Sequence[Tensor]


class _Step:
    """A step as a function of tensors of recurring shapes; the arguments as of
    :meth:`Target.step`."""

    def __init__(
        self, target: CompiledTarget, tree: Tree, first: int, keys: int, changes: Changes | None,
        verify: VerifyProgram | None, after: DraftProgram | None,
    ):  # fmt: skip
        self.target, self.first, self.keys = target, first, keys
        self.changes, self.verify, self.after = changes, verify, after
        if first:
            self.width = bucket(tree.num_tokens - first)
            self.padded = tree.padded(max(PARTS, bucket(first + self.width)), 0)
        else:
            self.padded = tree.padded(bucket(tree.num_tokens), bucket(tree.num_probes))
            self.width = self.padded.num_nodes
        self.tree = tree.part_of(self.padded)
        self.has_hidden = changes is None and target.reads_hidden(tree)
        #: Whether the code moves accepted nodes to the first slots. Where it is compiled, the host
        #: does so for all layers at once, which takes no compiling and few kernels.
        self.moves = not target.graphs.compiles

    def run(self) -> Output:
        target, cache, graphs = self.target, self.target.cache, self.target.graphs
        cache.reserve(max(self.padded.num_nodes, self.first + self.width), self.first)
        parts = self._inputs()
        inputs, self.sizes = [*chain(*parts)], [len(part) for part in parts]
        after, verify = self.after, self.verify
        key = (
            "forward", target.layout, self.changes is not None, bool(self.first),
            verify and verify.key, self.padded.group, after and after.key,
        )  # fmt: skip
        # Each commit makes other recurrent states.
        static = len(cache.states.members) + (0 if after is None else len(after.buffers))
        found = graphs.run(
            key, self._function, inputs, self._eager, self._cut, static,
            None if verify is None else self._left, self._compared,
        )  # fmt: skip
        return self._output(*found)

    def _inputs(self) -> _Inputs:
        target, after = self.target, self.after
        first = [to_device([self.first], target.cache.lengths.device)] if self.first else []
        before, drafting = ([], []) if after is None else (after.buffers, after.inputs)
        rule = [] if self.verify is None else self.verify.inputs
        tree = [part for part in self.padded.tensors if part is not None]
        changing, tree, rule, drafting = (
            [one.contiguous() for one in part] for part in (target.changing(), tree, rule, drafting)
        )
        return _Inputs(before, target.tensors(), changing, tree, first, rule, drafting)

    def _function(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        given = _Inputs(*([*islice(rest, size)] for size in self.sizes))
        own = self.target.using(iter(given.target), iter(given.changing))
        cache, begun = own.cache, self.target.cache.block
        assert begun is not None
        rows = Tree.of_tensors(given.tree, self.padded.group)
        nodes = torch.arange(self.width, device=cache.lengths.device)
        for first in given.first:
            nodes = nodes + first
        cache.begin_given(rows, nodes, begun.front)
        block = Block.of(rows, nodes if self.first else slice(None))
        output = own.forward(block, self.target.cache.capacity, self.changes)
        found = [output.logits] + ([] if output.hidden is None else [output.hidden])
        kept = [] if cache.recurrent is None else cache.recurrent.kept_tensors()
        return (*found, *self._ending(rows, output, given, cache), *kept)

    def _ending(
        self, rows: Tree, output: Output, given: _Inputs, cache: TreeCache
    ) -> tuple[Tensor, ...]:
        """The packed result, and what was drafted."""
        verify, after = self.verify, self.after
        if verify is None:
            return ()
        result = verify.function(rows, output.logits, given.rule)
        if self.moves and result.path.shape[1] > 1:  # else the root, which is in place
            cache.states.move(cache.lengths, result.path)
        if after is None:
            return (result.packed(),)
        noise = verify.noise and verify.noise(given.rule, result, after.depth)
        read = output.read(self.target.reads, result)
        drafted = after.function([*given.drafter, *given.drafting], result, read, noise)
        return (result.packed(), *drafted)

    def _eager(self) -> tuple[Tensor, ...]:
        block = Block.of(self.tree, slice(self.first, None))
        output = self.target.forward(block, self.keys, self.changes)
        return tuple(part for part in output[1:3] if part is not None)

    def _cut(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results without those of padding."""
        count, probes = self.tree.num_tokens - self.first, self.tree.num_probes
        logits, *rest = tensors
        if self.has_hidden:
            hidden = rest[0][:, :count]
            if probes:
                behind = rest[0][:, self.padded.num_tokens :][:, :probes]
                hidden = torch.cat([hidden, behind], dim=1)
            rest[0] = hidden
        return [logits[:, :count], *rest]

    def _left(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results without what is needed no more: logits where they have been verified, and
        states where the drafter has read them."""
        logits, *rest = self._cut(tensors)
        if self.has_hidden and self.after is not None:
            rest[0] = rest[0][:, :0]
        reads_later = self.target.reads.predicted and self.after is None
        return [logits if reads_later else logits[:, :0], *rest]

    def _compared(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What is checked of these results."""
        if self.verify is None or self.after is None:
            return tensors
        behind = 2 + self.has_hidden  # logits, hidden states, and the packed result
        drafted = self.after.compared(tensors[behind:], self.target.graphs)
        return [*tensors[:behind], *drafted]

    def _output(self, logits: Tensor, *found: Tensor) -> Output:
        cache, rest = self.target.cache, list(found)
        hidden = rest.pop(0) if self.has_hidden else None
        # Where the code was just made, the forward has run uncompiled.
        result, drafted = None, rest[:0]
        if self.verify is not None and rest:
            result = StepResult.unpacked(rest.pop(0))
            if not self.moves and result.path.shape[1] > 1:
                cache.states.move(cache.lengths, result.path)
            if self.after is not None:
                behind = len(rest) - (0 if cache.recurrent is None else cache.recurrent.num_kept)
                drafted, rest = rest[:behind], rest[behind:]
        if rest and cache.recurrent is not None:
            cache.recurrent.set_kept(rest)
        return Output(self.tree, logits, hidden, result, drafted)
