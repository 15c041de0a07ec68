"""The interface between the loop and drafters: state in, trees out, feedback."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_spec.core.probes import ProbeGroup
from hf_spec.core.pruning import Pruning
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.drafting.options import TREE_OPTIONS, DraftOptions
from hf_spec.drafting.state import DecodeState
from hf_spec.model.hidden_states import Reads
from hf_spec.model.probe_inputs import ProbeInputs
from modeling_patches.per_call import Changes

#: Drafting runs modules of the model, such as its output embeddings.
MODULES = "modules"
#: Drafting runs forwards of its own, also of a part of the model or of another one.
FORWARDS = "forwards"
#: Makes a static tree from the options and the number of distances that are drafted.
MakeTree = Callable[[Any, int], TokenTree]


class Drafter(CandidateGenerator):
    """Proposes draft trees. One instance serves one ``generate()`` call.

    Attributes:
        trees: values of the option ``tree`` besides ``adaptive``, the default of the static ones
            first; None for one that the drafter makes in a way of its own.
        unused: options of all strategies that it has no use for.
        can_sample: whether draft tokens can be sampled; they then carry the distribution that they
            were sampled from.
        policy_chooses: whether the policy chooses among its draft tokens by their probabilities.
        reads: the target's hidden states that :meth:`advance` gets.
        runs: what drafting runs: nothing, :data:`MODULES` or :data:`FORWARDS`.
        beside: modules beside the model that drafting runs, such as an assistant.
        probe_inputs: the learned inputs of its probes, if it has any.
        drafting: changes to the model while it drafts; None if drafting does not run it.
        pruning: how unlikely draft tokens are dropped in deeper layers, if some steps do so. Which
            ones depends on their tokens, so a pruned tree must not carry distributions.
        distances: tokens after the next one that the probes of a node predict.
        group: these probes, which the prompt's last token gets, too; empty if there are none.
    """

    trees: ClassVar[Mapping[str, MakeTree | None]] = {}
    unused: ClassVar[Sequence[str]] = TREE_OPTIONS
    can_sample: ClassVar[bool] = False
    policy_chooses: bool = False
    reads: Reads = Reads()
    runs: ClassVar[str] = ""
    beside: Sequence[nn.Module] = ()
    probe_inputs: ProbeInputs | None = None
    drafting: Changes | None = None
    pruning: Pruning | None = None
    distances: int = 0
    group: ProbeGroup = ProbeGroup.causal(0)

    def __init__(self, model: PreTrainedModel, options: DraftOptions):
        self.model = model
        self.options: Any = options  # of the method's own class

    @property
    def kind_of_forward(self) -> Hashable:
        """What its forwards need besides a tree. Each kind is checked and compiled once."""
        inputs = self.probe_inputs
        probes = inputs and (len(inputs.embeddings), inputs.num_front, inputs.exits)
        return probes, self.reads, self.pruning and self.pruning.layer

    def start(self, state: DecodeState) -> None:
        """Called once, after the prompt."""

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        """Called when tokens have been committed, before the host knows them: after the prompt,
        whose tokens are then the accepted nodes, and after each step.

        Args:
            result: the committed nodes, and the token that follows each of them.
            hidden: what :attr:`reads` asks for: ``(batch, features)`` of the last node; or
                ``(batch, nodes, features)`` of the ``result.counts`` nodes, or of the last one's
                ``result.num_probes`` probes, with arbitrary values behind them. None if there is
                nothing to read. Rows of finished sequences are arbitrary.
        """

    @abstractmethod
    def propose(self, state: DecodeState) -> Tree:
        """The draft trees of the next step; just the roots if there is nothing to draft."""

    def prefetch(self, state: DecodeState) -> Tensor | None:
        """Begin the next draft before the host knows how the step ended.

        The state's tensors are those after the step, its host-side fields those before. In
        sequences that turn out to be finished, tensors are arbitrary.

        Returns:
            ``(batch, n)`` float32 that :meth:`propose` finds in ``DecodeState.prefetched``, so that
            the host waits for the device once per step; None if there is nothing to begin.
        """
        return None

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        """Called after each step.

        Args:
            state: the state after the step.
            tree: what was forwarded; just the root in a plain step.
            result: what each sequence accepted, without what a stop cut off; nothing if it was
                finished before. Its paths are of what pruning left of the tree.
        """

    def attach_probes(self, tree: Tree, ahead: Sequence[Sequence[int]]) -> Tree:
        """The step's trees with probes.

        Args:
            tree: the draft tree of each sequence.
            ahead: number of distances to predict after each node, per sequence.
        """
        return tree

    def select(self, rows: Sequence[int]) -> None:
        """Called between two steps when finished sequences have left the batch.

        A drafter that keeps state per sequence selects it here.

        Args:
            rows: batch row ``i`` is the former ``rows[i]``; each at most once, in any order.
        """

    def warm(self, state: DecodeState) -> None:
        """Compile what :meth:`propose` runs on hidden states."""

    def release(self) -> list[Tensor]:
        """The buffers that compiled code of later calls may use, once the call is over."""
        return []

    def details(self) -> dict[str, Any]:
        """Entries for ``SpecStats.details``."""
        return {}

    # -- stock assisted decoding -------------------------------------------------------------

    @abstractmethod
    def chain(self, input_ids: Tensor) -> list[int]:
        """The likeliest tokens after a sequence, ``(1, seq)`` without padding."""

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """For Transformers' own assisted decoding, at batch size 1.

        Args:
            input_ids: ``(1, seq)``.

        Returns:
            ``(1, seq + candidates)`` ids followed by :meth:`chain`, and no logits.
        """
        with torch.no_grad():
            chain = self.chain(input_ids)
        candidates: Any = torch.cat([input_ids, input_ids.new_tensor([chain])], dim=1)
        return candidates, None

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        """Part of the ``CandidateGenerator`` interface; stock decoding reports matches here."""
