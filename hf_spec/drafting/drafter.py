"""The interface between the loop and drafters: state in, drafts out, feedback."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from hf_spec.core.cache import TreeCache
from hf_spec.core.probes import ProbeGroup, ProbeRows
from hf_spec.core.pruning import Survivors
from hf_spec.core.stats import SpecStats
from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.drafting.noise import SamplingNoise
from hf_spec.model.tree_forward import ProbeInputs, Pruning, TreeForward
from modeling_patches.per_call import Changes


class Chances(NamedTuple):
    """A draft's candidates and their probabilities, on the host, likeliest first.

    Attributes:
        paths: ``(batch, nodes)`` float64 probability that all candidates down to a node are
            accepted: 1 for the root, 0 for padding, never more than the parent's.
        parents: ``(batch, nodes)`` int64; 0 for padding.
        depths: ``(batch, nodes)`` int64
        tokens: ``(batch, nodes)`` int64; arbitrary on padding.
    """

    paths: Any
    parents: Any
    depths: Any
    tokens: Any


class Found(NamedTuple):
    """The result of a look-up.

    Attributes:
        tree: the continuations.
        tokens: tokens of its nodes; the root's is arbitrary.
        chances: probabilities of its nodes, likeliest first.
    """

    tree: TokenTree
    tokens: list[int]
    chances: list[float]


@dataclass
class Draft:
    """Candidates for one step.

    Attributes:
        tree: the tree of each sequence; node 0 is the root.
        tokens: ``(batch, nodes)`` int64; column 0 is the root's token.
        distributions: ``(batch, nodes, vocab)`` q from which each candidate was sampled, after all
            logits processors; None if candidates were not sampled. Column 0 is ignored.
        probes: step tokens after the nodes from which the drafter predicts future tokens.
        chances: probabilities of the candidates; None if unknown.
        whole: whether all candidates and probes are forwarded. Otherwise, if ``chances`` are known,
            the policy chooses how many of them are.
        pruned: whether the model drops unlikely candidates in its deeper layers.
    """

    tree: TreeBatch
    tokens: Tensor
    distributions: Tensor | None = None
    probes: ProbeRows | None = None
    chances: Chances | None = None
    pruned: bool = False
    whole: bool = False

    def left_with(self, survivors: Survivors) -> Draft:
        """The draft without the candidates that pruning dropped."""
        tokens = self.tokens.gather(1, survivors.nodes)
        return Draft(survivors.tree, tokens, None, survivors.probes, pruned=True)


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
class DecodingState:
    """What the loop shows a drafter, which must not change it.

    It holds the batch rows that are still carried: the batch shrinks as sequences finish
    (:meth:`select`).

    Attributes:
        model: the model.
        forward: runs the model on the nodes of a tree after the cached tokens.
        cache: the cache; it holds all tokens of a sequence except the last, the root.
        tokens: the tokens of each sequence so far, with the prompt, without padding.
        root: ``(batch,)`` the last token of each sequence.
        active: whether each sequence is unfinished.
        remaining: how many tokens each sequence may still emit.
        do_sample: whether tokens are sampled.
        process: applies the call's logits processors.
        stats: the statistics of the call so far.
        probe_hidden: ``(batch, group, hidden)`` hidden states of the probes under the last accepted
            node of each sequence, from the last step or the prompt; None if there were none.
        probe_counts: how many of them are valid in each sequence; 0 in finished ones.
        probe_sizes: ``(batch,)`` the same on the device, before the host knows it.
        hidden: ``(batch, hidden)`` final hidden state of each sequence's last accepted node, from
            which the model made the root's token; at first, of the prompt's last token. Arbitrary
            in finished sequences. None unless the drafter wants it, or while it is unknown.
        rows: the index in the call of each batch row.
        timed: whether the amount of drafting may depend on step times.
        foreseen: what :meth:`Drafter.foresee` returned, on the host; None if nothing.
        draft_price: tokens that one more drafting forward must bring to pay for its time; None
            while unknown.
        found: this step's look-ups, by sequence; they are among the candidates anyway.
        noise: what the next tokens will be sampled with; None if the output would depend on it.
    """

    model: Any
    forward: TreeForward
    cache: TreeCache
    tokens: list[list[int]]
    root: Tensor
    active: list[bool]
    remaining: list[int]
    do_sample: bool
    process: Process
    stats: SpecStats = field(default_factory=SpecStats)
    probe_hidden: Tensor | None = None
    probe_counts: list[int] = field(default_factory=list)
    hidden: Tensor | None = None
    rows: list[int] = field(default_factory=list)
    timed: bool = False
    probe_sizes: Tensor | None = None
    foreseen: Any = None
    draft_price: Callable[[], float | None] = lambda: None
    found: Sequence[Found] = ()
    noise: SamplingNoise | None = None

    def __post_init__(self) -> None:
        self.probe_counts = self.probe_counts or [0] * len(self.tokens)
        self.rows = self.rows or list(range(len(self.tokens)))

    def select(self, rows: Sequence[int]) -> None:
        """Follow the cache, whose row ``i`` is now the former ``rows[i]``; for the loop."""
        self.forward.select(rows)
        for name in ("tokens", "active", "remaining", "probe_counts", "rows"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])
        self.foreseen = None
        if self.noise is not None:
            self.noise.select(rows)
        for name in ("root", "probe_hidden", "probe_sizes", "hidden"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor[torch.tensor(rows, device=tensor.device)])

    @property
    def batch_size(self) -> int:
        """Batch rows that are still carried."""
        return len(self.tokens)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest candidate that any sequence can use; one token is the bonus."""
        left = [n for n, active in zip(self.remaining, self.active) if active]
        return max(left, default=1) - 1


class Drafter(CandidateGenerator):
    """Proposes candidates. One instance serves one ``generate()`` call.

    Attributes:
        single_forward: whether a step is one forward pass; False if drafting runs the model, too.
        runs_modules: whether drafting runs modules of the model, such as its output embeddings.
        probe_inputs: the learned inputs of its probes, if it has any.
        wants_hidden: whether it reads ``DecodingState.hidden``.
        prune_layer: number of layers that run on all nodes, if some steps prune.
        drafting: changes to the model while it drafts; None if drafting does not run it.
        prunes: whether unlikely candidates are dropped in deeper layers; None: the policy decides
            in each step.
        distances: tokens after the next one that the probes under a node predict.
        num_probes: number of probes under a node; 0 if there are none, or drafts bring their own.
        group: these probes, which also run under the prompt's last token.
        looks_up: whether :meth:`look_up` can return part of its drafts without running the model.
    """

    single_forward: ClassVar[bool] = True
    runs_modules: ClassVar[bool] = False
    probe_inputs: ProbeInputs | None = None
    wants_hidden: bool = False
    prune_layer: int | None = None
    drafting: Changes | None = None
    prunes: bool | None = False
    distances: int = 0
    num_probes: int = 0
    group: ProbeGroup | None = None
    looks_up: bool = False

    def __init__(self, model: Any, options: Any):
        self.model = model
        self.options = options

    @property
    def pruning(self) -> Pruning | None:
        """How nodes of a draft are dropped in deeper layers; None if they are not.

        Which ones are dropped depends on their tokens, so a pruned draft must not carry
        distributions.
        """
        return None

    @property
    def kind_of_forward(self) -> Hashable:
        """What its forwards need besides a tree. Each kind is checked and compiled once."""
        inputs = self.probe_inputs
        probes = inputs and (len(inputs.embeddings), inputs.num_front, inputs.exits)
        return probes, self.wants_hidden, self.prune_layer

    def start(self, state: DecodingState) -> None:
        """Called once, after the prefill."""

    @abstractmethod
    def propose(self, state: DecodingState) -> Draft:
        """Candidates for the next step; just the root if there are none."""

    def foresee(self, state: DecodingState) -> Tensor | None:
        """Begin the next draft before the host knows how the step ended.

        The state's tensors are those after the step, its host-side fields those before. In
        sequences that turn out to be finished, tensors are arbitrary.

        Returns:
            ``(batch, n)`` float32 that :meth:`propose` finds in ``DecodingState.foreseen``, so that
            the host waits for the device once per step; None if there is nothing to begin.
        """
        return None

    def look_up(self, state: DecodingState) -> Draft:
        """Like :meth:`propose`, but if it :attr:`looks_up`, without running the model."""
        return self.propose(state)

    def observe(self, state: DecodingState, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        """Called after each step.

        Args:
            state: the state after the step.
            draft: what was forwarded; just the root, without chances, in a plain step.
            nodes: the accepted nodes of each sequence, root first; none if it was finished.
        """

    def hang(self, tree: TreeBatch, ahead: Sequence[Sequence[int]]) -> ProbeRows | None:
        """Probes under the nodes of a step's trees.

        Args:
            tree: the tree of each sequence.
            ahead: number of distances to predict under each node, per sequence.
        """
        return None

    def select(self, state: DecodingState, rows: Sequence[int]) -> None:
        """Called between two steps when finished sequences have left the batch.

        A drafter that keeps state per sequence selects it here.

        Args:
            state: the state of the smaller batch.
            rows: batch row ``i`` is the former ``rows[i]``; each at most once, in any order.
        """

    def warm(self, state: DecodingState) -> None:
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


def emitted(state: DecodingState, nodes: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens that each sequence emitted in the step that accepted these nodes."""
    return [tokens[len(tokens) - len(path) :] for tokens, path in zip(state.tokens, nodes)]
