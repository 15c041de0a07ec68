"""The interface between the loop and drafters: state in, trees out, feedback."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_spec.core.pruning import Pruning
from hf_spec.core.shapes import ProbeGroup, TokenTree
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.draft.options import TREE_OPTIONS, DraftOptions
from hf_spec.draft.state import DecodeState
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.target.graphs import DraftProgram
from hf_spec.target.hidden_states import Reads
from hf_spec.target.target import ProbeInputs

#: Drafting runs modules of the model, such as its output embeddings.
MODULES = "modules"
#: Drafting runs forwards of its own, also of a part of the model or of another one.
FORWARDS = "forwards"
#: Makes a static tree from the options and the number of distances that are drafted.
MakeTree = Callable[[Any, int], TokenTree]


class Drafter(CandidateGenerator):
    """Proposes draft trees. One instance serves one ``generate()`` call.

    A new one declares the hidden states that it ``reads``, and defines :meth:`advance` if it reads
    any, :meth:`propose`, and :meth:`chain` for stock assisted decoding.

    Attributes:
        reads: the target's hidden states that :meth:`advance` gets.
        trees: values of the option ``tree`` besides ``adaptive``, the default of the static ones
            first; None for one that the drafter makes in a way of its own. If there are static
            ones, rank paths are a value, too.
        unused: options of all strategies that it has no use for.
        drafts: whether it ever drafts anything.
        can_sample: whether draft tokens can be sampled; they then carry the distribution that they
            were sampled from.
        policy_chooses: whether the policy chooses among its draft tokens by their probabilities.
        runs: what drafting runs: nothing, :data:`MODULES` or :data:`FORWARDS`.
        probe_inputs: the learned inputs of its probes, if it has any.
        group: the probes of a node; empty if there are none.
        distances: tokens after the next one that they predict.
        drafting: changes to the model while it drafts; None if drafting does not run it.
        beside: modules beside the model that drafting runs, such as an assistant.
        outside: why drafting, or a part of it, is not in recorded or compiled code; None if it is.
        pruning: how unlikely draft tokens are dropped in deeper layers, if some steps do so. Which
            ones depends on their tokens, so a pruned tree must not carry distributions.
    """

    reads: Reads = Reads()
    trees: ClassVar[Mapping[str, MakeTree | None]] = {}
    unused: ClassVar[Sequence[str]] = TREE_OPTIONS
    drafts: ClassVar[bool] = True
    can_sample: ClassVar[bool] = False
    policy_chooses: bool = False
    runs: ClassVar[str] = ""
    probe_inputs: ProbeInputs | None = None
    group: ProbeGroup = ProbeGroup.causal(0)
    distances: int = 0
    drafting: Changes | None = None
    beside: Sequence[nn.Module] = ()
    outside: str | None = None
    pruning: Pruning | None = None

    def __init__(self, model: PreTrainedModel, options: DraftOptions):
        self.model = model
        self.options: Any = options  # of the method's own class

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

    def start(self, state: DecodeState) -> None:
        """Called once, before the prompt's :meth:`advance`."""

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        """Called when tokens have been committed: after the prompt, whose tokens are then the
        accepted nodes, and after each step.

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

    def program(self, state: DecodeState, tree: Tree, grows: bool) -> DraftProgram | None:
        """What recorded or compiled code does in place of :meth:`advance`, and ahead of
        :meth:`propose`; None if there is nothing to do. Not asked for if drafting is
        :attr:`outside`.

        Args:
            state: the state before the step.
            tree: the step's trees.
            grows: whether trees of the next step are wanted.
        """
        return None

    def received(self, found: Sequence[Tensor], result: StepResult) -> None:
        """Called after a step with what its :meth:`program` has found, in place of
        :meth:`advance`."""

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        """Called after each step.

        Args:
            state: the state after the step.
            tree: what was forwarded; just the root in a plain step.
            result: what each sequence accepted, without what a stop cut off; nothing if it was
                finished before. Its paths are of what pruning left of the tree.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Called between two steps when finished sequences have left the batch.

        A drafter that keeps state per sequence selects it here.

        Args:
            rows: batch row ``i`` is the former ``rows[i]``; each at most once, in any order.
        """

    def release(self) -> list[Tensor]:
        """The buffers that compiled code of later calls may use, once the call is over."""
        return []

    def details(self) -> dict[str, Any]:
        """Entries for ``SpecStats.details``."""
        return {}

    # -- stock assisted decoding, at batch size 1 ----------------------------------------------

    @abstractmethod
    def chain(self, input_ids: Tensor) -> list[int]:
        """The likeliest tokens after a sequence, ``(1, seq)`` without padding."""

    @torch.no_grad()
    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """``(1, seq + candidates)`` ids ``(1, seq)`` followed by :meth:`chain`, and no logits."""
        chain = input_ids.new_tensor([self.chain(input_ids)])
        candidates: Any = torch.cat([input_ids, chain], dim=1)
        return candidates, None

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        """Stock decoding reports matches here."""
