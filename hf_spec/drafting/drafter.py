"""The interface between the loop and drafters: state in, trees out, feedback."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from hf_spec.core.cache import TreeCache
from hf_spec.core.probes import ProbeGroup
from hf_spec.core.stats import SpecStats
from hf_spec.core.tree import Row, Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.drafting.noise import SamplingNoise
from hf_spec.model.probe_inputs import ProbeInputs
from hf_spec.model.target import Pruning, Target
from modeling_patches.per_call import Changes


@dataclass(frozen=True)
class Reads:
    """The target's hidden states that a drafter reads: final ones, after the last norm.

    Attributes:
        nodes: of which nodes: ``last``, the last accepted one, from which the target made the bonus
            token; ``probes``, that node's probes; None to read none.
    """

    nodes: Literal["last", "probes"] | None = None


class Process(Protocol):
    """The call's logits processors."""

    @property
    def trivial(self) -> bool:
        """Whether they keep the likeliest token the likeliest."""

    @property
    def stateful(self) -> Sequence[str]:
        """Names of those that may keep a state."""

    @property
    def eos(self) -> Collection[int]:
        """Tokens that end a sequence."""

    @property
    def lockstep(self) -> bool:
        """Whether all sequences must take equally many tokens in each step."""

    def __call__(
        self, logits: Tensor, suffixes: Sequence[Sequence[int]], active: Sequence[bool],
        drafting: bool = False,
    ) -> Tensor:  # fmt: skip
        """Logits ``(batch, vocab)`` -> float32 scores after all processors. The prefix of each
        active sequence is its tokens so far, then its suffix. While drafting, only processors run
        that keep no state."""


@dataclass
class DecodeState:
    """What the loop shows a drafter, which must not change it.

    It holds the batch rows that are still carried: the batch shrinks as sequences finish
    (:meth:`select`).

    Attributes:
        model: the model.
        target: runs the model on the nodes of a tree after the cached tokens.
        cache: the KV cache; it holds all tokens of a sequence except the last, the root.
        tokens: the tokens of each sequence so far, with the prompt, without padding.
        root: ``(batch,)`` the last token of each sequence.
        active: whether each sequence is unfinished.
        remaining: how many tokens each sequence may still emit.
        do_sample: whether tokens are sampled.
        process: applies the call's logits processors.
        stats: the statistics of the call so far.
        rows: the index in the call of each batch row.
        timed: whether the amount of drafting may depend on step times.
        prefetched: what :meth:`Drafter.prefetch` returned, on the host; None if nothing.
        draft_cost: tokens that one more drafting forward must bring to pay for its time; None
            while unknown.
        lookups: this step's prompt lookups, by sequence; they are among the draft tokens anyway.
        noise: what the next tokens will be sampled with; None if the output would depend on it.
    """

    model: Any
    target: Target
    cache: TreeCache
    tokens: list[list[int]]
    root: Tensor
    active: list[bool]
    remaining: list[int]
    do_sample: bool
    process: Process
    stats: SpecStats = field(default_factory=SpecStats)
    rows: list[int] = field(default_factory=list)
    timed: bool = False
    prefetched: Any = None
    draft_cost: Callable[[], float | None] = lambda: None
    lookups: Sequence[Row] = ()
    noise: SamplingNoise | None = None

    def __post_init__(self) -> None:
        self.rows = self.rows or list(range(len(self.tokens)))

    def select(self, rows: Sequence[int]) -> None:
        """Follow the cache, whose row ``i`` is now the former ``rows[i]``; for the loop."""
        self.target.select(rows)
        for name in ("tokens", "active", "remaining", "rows"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])
        self.prefetched = None
        if self.noise is not None:
            self.noise.select(rows)
        self.root = self.root[torch.tensor(rows, device=self.root.device)]

    @property
    def batch_size(self) -> int:
        """Batch rows that are still carried."""
        return len(self.tokens)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest draft token that any sequence can use; one token is the bonus."""
        left = [n for n, active in zip(self.remaining, self.active) if active]
        return max(left, default=1) - 1


class Drafter(CandidateGenerator):
    """Proposes draft trees. One instance serves one ``generate()`` call.

    Attributes:
        reads: the target's hidden states that :meth:`advance` gets.
        single_forward: whether a step is one forward pass; False if drafting runs the model, too.
        runs_modules: whether drafting runs modules of the model, such as its output embeddings.
        probe_inputs: the learned inputs of its probes, if it has any.
        prune_layer: number of layers that run on all nodes, if some steps prune.
        drafting: changes to the model while it drafts; None if drafting does not run it.
        prunes: whether unlikely draft tokens are dropped in deeper layers; None: the policy decides
            in each step.
        distances: tokens after the next one that the probes of a node predict.
        num_probes: number of probes of a node; 0 if there are none, or trees bring their own.
        group: these probes, which the prompt's last token gets, too.
        uses_lookup: whether :meth:`lookup` can return part of its trees without running the model.
    """

    reads: Reads = Reads()
    single_forward: ClassVar[bool] = True
    runs_modules: ClassVar[bool] = False
    probe_inputs: ProbeInputs | None = None
    prune_layer: int | None = None
    drafting: Changes | None = None
    prunes: bool | None = False
    distances: int = 0
    num_probes: int = 0
    group: ProbeGroup | None = None
    uses_lookup: bool = False

    def __init__(self, model: Any, options: Any):
        self.model = model
        self.options = options

    @property
    def pruning(self) -> Pruning | None:
        """How nodes are dropped in deeper layers; None if they are not.

        Which ones are dropped depends on their tokens, so a pruned tree must not carry
        distributions.
        """
        return None

    @property
    def kind_of_forward(self) -> Hashable:
        """What its forwards need besides a tree. Each kind is checked and compiled once."""
        inputs = self.probe_inputs
        probes = inputs and (len(inputs.embeddings), inputs.num_front, inputs.exits)
        return probes, self.reads, self.prune_layer

    def start(self, state: DecodeState) -> None:
        """Called once, after the prompt."""

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        """Called when tokens have been accepted, before the host knows them: after the prompt,
        whose last token is then the only accepted node, and after each step.

        Args:
            result: what was accepted.
            hidden: what :attr:`reads` asks for, ``(batch, hidden)`` of the last node, or ``(batch,
                len(group), hidden)`` of its probes, of which ``result.num_probes`` are valid. None
                if it is unknown: no probes, or a prompt in the caller's cache. Rows of finished
                sequences are arbitrary.
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

    def lookup(self, state: DecodeState) -> Tree:
        """Like :meth:`propose`, but if it :attr:`uses_lookup`, without running the model."""
        return self.propose(state)

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        """Called after each step.

        Args:
            state: the state after the step.
            tree: what was forwarded; just the root in a plain step.
            result: what each sequence accepted, without what a stop cut off; nothing if it was
                finished before.
        """

    def attach_probes(self, tree: Tree, ahead: Sequence[Sequence[int]]) -> Tree:
        """The step's trees with probes.

        Args:
            tree: the draft tree of each sequence.
            ahead: number of distances to predict after each node, per sequence.
        """
        return tree

    def select(self, state: DecodeState, rows: Sequence[int]) -> None:
        """Called between two steps when finished sequences have left the batch.

        A drafter that keeps state per sequence selects it here.

        Args:
            state: the state of the smaller batch.
            rows: batch row ``i`` is the former ``rows[i]``; each at most once, in any order.
        """

    def warm(self, state: DecodeState) -> None:
        """Compile what :meth:`propose` runs on hidden states."""

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
