"""A target's forward that computes each node as a step over it alone does, bit for bit."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_spec.model.block import Block
from hf_spec.model.packed_weights import PackedWeights, packed_product
from hf_spec.model.target import Output, Target
from modeling_patches.bitwise import Bitwise, Nodes
from modeling_patches.per_call import Changes


class StrictTarget(Target):
    """A target whose forwards without ``changes`` equal plain steps bit for bit; prompts don't."""

    def __init__(self, model: Any, *args: Any, packed: PackedWeights | None = None, **kwargs: Any):
        super().__init__(model, *args, **kwargs)
        self._changes = Changes().update(self.attention.changes)
        arranged = {} if packed is None else packed.products
        self._bitwise = Bitwise(model, self._changes, arranged, packed_product)

    @property
    def prepared(self) -> int:
        return self._bitwise.tried

    def details(self) -> dict[str, Any]:
        return {"strict": {"products": self._bitwise.products}}

    def forward(
        self, block: Block, keys: int, changes: Changes | None = None,
        logits_at: Tensor | None = None,
    ) -> Output:  # fmt: skip
        if changes is None:
            tree = block.tree
            front = self.num_front and self.cache.states.front if tree.num_probes else 0
            self._bitwise.nodes = Nodes(self.cache.host_lengths, tree.parents_on_host(), front)
        return super().forward(block, keys, changes, logits_at)
