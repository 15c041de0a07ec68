"""What a drafter needs of forwards besides a tree: probes, pruning, skipped layers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import nn

from hf_spec.core.probes import ProbeGroup
from hf_spec.core.pruning import Pruning
from hf_spec.core.tree import Tree
from hf_spec.model.hidden_states import Reads
from hf_spec.model.probe_inputs import ProbeInputs
from modeling_patches.per_call import Changes


class ForwardNeeds:
    """Declares what forwards need; by default, nothing.

    Attributes:
        probe_inputs: the learned inputs of its probes, if it has any.
        group: the probes of a node; empty if there are none.
        distances: tokens after the next one that they predict.
        drafting: changes to the model while it drafts; None if drafting does not run it.
        beside: modules beside the model that drafting runs, such as an assistant.
        pruning: how unlikely draft tokens are dropped in deeper layers, if some steps do so. Which
            ones depends on their tokens, so a pruned tree must not carry distributions.
    """

    reads: Reads
    probe_inputs: ProbeInputs | None = None
    group: ProbeGroup = ProbeGroup.causal(0)
    distances: int = 0
    drafting: Changes | None = None
    beside: Sequence[nn.Module] = ()
    pruning: Pruning | None = None

    @property
    def kind_of_forward(self) -> Hashable:
        """What its forwards need besides a tree. Each kind is checked and compiled once."""
        inputs = self.probe_inputs
        probes = inputs and (len(inputs.embeddings), inputs.num_front, inputs.exits)
        return probes, self.reads, self.pruning and self.pruning.layer

    def attach_probes(self, tree: Tree, ahead: Sequence[Sequence[int]]) -> Tree:
        """The step's trees with probes.

        Args:
            tree: the draft tree of each sequence.
            ahead: number of distances to predict after each node, per sequence.
        """
        return tree
