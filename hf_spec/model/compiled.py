"""A target's forward by compiled code: padded to recurring shapes, with all that changes from step
to step as its inputs."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.buckets import bucket
from hf_spec.core.transfer import sent
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult
from hf_spec.model.block import Block
from hf_spec.model.graphs import Graphs
from hf_spec.model.programs import DraftProgram, VerifyProgram
from hf_spec.model.target import Output, Pass, Target
from modeling_patches.per_call import Changes

#: Attributes of a target that differ between calls: tensors, or values by name.
_VARIABLES = (
    "position_shift", "last_position", "padding", "axes", "probe_embeddings", "front_seen",
    "model_kwargs", "per_token",
)  # fmt: skip
#: Least number of nodes, padding included, of a tree that is forwarded in parts.
PARTS = 64


class CompiledTarget(Target):
    """A target whose steps are compiled; prompts are not."""

    graphs: Graphs  # keeps the compiled code

    def __init__(self, *args: Any, graphs: Graphs, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.graphs = graphs

    @property
    def prepared(self) -> int:
        return self.graphs.made

    def details(self) -> dict[str, Any]:
        return {"compiled": self.graphs.details()}

    def step(
        self, tree: Tree, first: int, keys: int, changes: Changes | None,
        verify: VerifyProgram | None, after: DraftProgram | None,
    ) -> Output:  # fmt: skip
        """By compiled code, which leaves accepted nodes that it knows in the first slots."""
        if first and self.cache.recurrent is not None:
            # What earlier forwards of the step have kept has no recurring size.
            return super().step(tree, first, keys, changes, verify, after)
        if first:
            width = bucket(tree.num_tokens - first)
            padded = tree.padded(max(PARTS, bucket(first + width)), 0)
        else:
            padded = tree.padded(bucket(tree.num_tokens), bucket(tree.num_probes))
            width = padded.num_nodes
        cache, graphs = self.cache, self.graphs
        cache.reserve(max(padded.num_nodes, first + width), first)
        buffers, parts = cache.tensors(), padded.tensors()
        before, drafting = ([], []) if after is None else (after.buffers, after.inputs)
        named, others = self.variables()
        start = sent([first] if first else [], cache.lengths.device)
        rules = () if verify is None else verify.inputs
        small = [cache.lengths, *parts, *named.values(), start, *rules, *drafting]

        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = iter(tensors)
            fixed = [next(given) for _ in before]
            held = [next(given) for _ in buffers]
            lengths, rows = next(given), padded.with_tensors([next(given) for _ in parts])
            variables = {place: next(given) for place in named}
            nodes, start = torch.arange(width, device=lengths.device), next(given)
            if first:
                nodes = nodes + start
            slots = lengths[:, None] + nodes
            traced = cache.traced_with(held, lengths, slots, rows, not graphs.compiles)
            own = self.traced_with(traced, variables)
            block = Block.of(rows, nodes if first else slice(None))
            output = own.forward(block, cache.capacity, changes)
            found = [output.logits] + ([] if output.hidden is None else [output.hidden])
            kept = [] if traced.recurrent is None else traced.recurrent.kept_tensors()
            if verify is None:
                return (*found, *kept)
            ruling = [next(given) for _ in rules]
            result = verify.function(rows, output.logits, ruling)
            if not graphs.compiles and result.path.shape[1] > 1:  # else the root, which is in place
                traced.states.move(lengths, result.path)
            if after is not None:
                noise = verify.noise and verify.noise(ruling, result, after.depth)
                read = output.read(self.reads, result)
                drafted = after.function([*fixed, *given], result, read, noise)
                return (*found, result.packed(), *drafted, *kept)
            return (*found, result.packed(), *kept)

        def eager() -> tuple[Tensor, ...]:
            output = self.forward(Block.of(tree, slice(first, None)), keys, changes)
            return tuple(part for part in output[1:3] if part is not None)

        count, probes = tree.num_tokens - first, tree.num_probes
        has_hidden = changes is None and self.reads_hidden(tree)

        def cut(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            logits, *rest = tensors
            if has_hidden:
                hidden = rest[0][:, :count]
                if probes:
                    behind = rest[0][:, padded.num_tokens :][:, :probes]
                    hidden = torch.cat([hidden, behind], dim=1)
                rest[0] = hidden
            return [logits[:, :count], *rest]

        def left(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            """Without what is needed no more."""
            count = 1 + has_hidden
            return [*(one[:, :0] for one in tensors[:count]), *tensors[count:]]

        key = (
            "forward", cache.layout, changes is not None, tuple(named), others, bool(first),
            verify and verify.key, padded.group, after and after.key,
        )  # fmt: skip
        inputs = [*before, *buffers, *(tensor.contiguous() for tensor in small)]
        static = len(before) + len(cache.states.members)  # each commit makes other recurrent states
        logits, *found = graphs.run(
            key, function, inputs, eager, cut, static, left if after is not None else None
        )
        hidden = found.pop(0) if has_hidden else None
        # Where the code was just made, the forward has run uncompiled.
        result, drafted = None, found[:0]
        if verify is not None and found:
            result, found = StepResult.unpacked(found[0]), found[1:]
            if graphs.compiles and result.path.shape[1] > 1:
                # At once for all layers, which takes no compiling and few kernels.
                cache.states.move(cache.lengths, result.path)
            if after is not None:
                drafted, found = found[: after.num_results], found[after.num_results :]
        if found and cache.recurrent is not None:
            cache.recurrent.set_kept(found)
        return Output(tree, logits, hidden, result, drafted)

    def variables(self) -> tuple[dict[tuple[str, str], Tensor], Hashable]:
        """What forwards read besides the tree and the KV cache: tensors by attribute and name,
        which :meth:`traced_with` replaces, and a key of everything else."""
        named: dict[tuple[str, str], Tensor] = {}
        others = []
        for attribute in _VARIABLES:
            held = getattr(self, attribute)
            for name, value in (held if isinstance(held, dict) else {"": held}).items():
                if isinstance(value, Tensor):
                    named[attribute, name] = value
                else:
                    others.append((attribute, name, repr(value)))
        return named, tuple(others)

    def traced_with(
        self, cache: TreeCache, variables: dict[tuple[str, str], Tensor]
    ) -> CompiledTarget:
        """The same with these cache and :meth:`variables`, as a graph sees them."""
        own = copy.copy(self)
        own._watching, own._prunes, own._pass = None, False, Pass()
        own.cache = cache
        for (attribute, name), value in variables.items():
            held = {**getattr(own, attribute), name: value} if name else value
            setattr(own, attribute, held)
        return own
