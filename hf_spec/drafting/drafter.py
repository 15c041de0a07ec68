"""Drafters: what the loop shows them, what they propose, and what they hear of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
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
from hf_spec.model.tree_forward import ProbeInputs, Pruning, TreeForward
from modeling_patches.per_call import Changes


class Chances(NamedTuple):
    """A draft's candidates and how likely they are, on the host; they stand best first.

    Attributes:
        paths: ``(batch, nodes)`` float64 chance that all candidates down to a node are accepted: 1
            for the root, 0 for padding, never more than the parent's.
        parents: ``(batch, nodes)`` int64; 0 for padding.
        depths: ``(batch, nodes)`` int64
        tokens: ``(batch, nodes)`` int64; any on padding.
    """

    paths: Any
    parents: Any
    depths: Any
    tokens: Any


class Found(NamedTuple):
    """What a look-up returns.

    Attributes:
        tree: of continuations.
        tokens: on its nodes, the root's, which is any, included.
        chances: of its nodes, which stand best first.
    """

    tree: TokenTree
    tokens: list[int]
    chances: list[float]


@dataclass
class Draft:
    """Candidates for one step.

    Attributes:
        tree: tree of each row; node 0 is the root.
        tokens: ``(batch, nodes)`` int64, column 0 the root's token.
        distributions: ``(batch, nodes, vocab)`` q from which each candidate was sampled, after all
            logits processors; None if candidates were not sampled. Column 0 is ignored.
        probes: rows that run behind the nodes and tell the drafter of future tokens.
        chances: how likely each candidate is; then how many are forwarded, and what probes hang
            under them, is the policy's choice. None: all, as they are.
        pruned: whether unlikely candidates are dropped on the way through the model.
    """

    tree: TreeBatch
    tokens: Tensor
    distributions: Tensor | None = None
    probes: ProbeRows | None = None
    chances: Chances | None = None
    pruned: bool = False

    def left_with(self, survivors: Survivors) -> Draft:
        """What pruning left of it."""
        tokens = self.tokens.gather(1, survivors.nodes)
        return Draft(survivors.tree, tokens, None, survivors.probes, pruned=True)


class Process(Protocol):
    """The call's logits processors."""

    @property
    def trivial(self) -> bool:
        """Whether they leave the order of the logits as it is, so that the likeliest stays so."""

    def __call__(
        self, logits: Tensor, suffixes: Sequence[Sequence[int]], active: Sequence[bool]
    ) -> Tensor:
        """Logits ``(batch, vocab)`` -> float32 scores after all processors, each active row's
        prefix being its tokens so far and then its suffix."""


@dataclass
class DecodingState:
    """What the loop shows a drafter; read it, don't change it.

    Rows are those that the batch still carries: it shrinks as rows finish (:meth:`select`).

    Attributes:
        model: the model that is decoded.
        forward: runs the model on nodes of a tree behind the cached tokens.
        cache: the cache; all tokens of a row but its last (the root) are in it.
        tokens: each row's real tokens so far, prompt included, padding left out.
        root: ``(batch,)`` the last token of each row.
        active: rows that are not finished.
        remaining: how many tokens each row may still emit.
        do_sample: whether tokens are sampled.
        process: applies the call's logits processors.
        stats: the statistics of the call so far.
        probe_hidden: ``(batch, group, hidden)`` what the last step's forward, or the prompt's, made
            of the probes under each row's last accepted node; None if there were none.
        probe_counts: how many of them each row has; the others are any rows. 0 in finished rows.
        probe_sizes: ``(batch,)`` the same on the device, before the host knows it.
        hidden: ``(batch, hidden)`` final hidden state of each row's last accepted node, from which
            the model made the root's token; any states in finished rows. Of the prompt's last token
            at first. None unless the drafter wants it, or while it is not known.
        rows: which row of the call each of these is.
        timed: whether how much is drafted may depend on what steps take.
        foreseen: what :meth:`Drafter.foresee` wanted to know on the host; None if it was not asked.
        draft_price: tokens that one more forward of drafting must bring for its time; None while
            nothing is known of it.
        found: what was looked up in this step, by row; stands among the candidates anyway.
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

    def __post_init__(self) -> None:
        self.probe_counts = self.probe_counts or [0] * len(self.tokens)
        self.rows = self.rows or list(range(len(self.tokens)))

    def select(self, rows: Sequence[int]) -> None:
        """Follow the cache, whose row ``i`` is now the one that was ``rows[i]``; for the loop."""
        self.forward.select(rows)
        for name in ("tokens", "active", "remaining", "probe_counts", "rows"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])
        self.foreseen = None
        for name in ("root", "probe_hidden", "probe_sizes", "hidden"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor[torch.tensor(rows, device=tensor.device)])

    def replace_row(
        self, row: int, tokens: list[int], hidden: Tensor | None, probe_hidden: Tensor | None
    ) -> None:
        """A row goes on as another sequence, whose prompt the cache has; for the loop.

        Args:
            tokens: of the sequence, its first new token included.
            hidden: ``(1, hidden)``, see :attr:`hidden`; None if it is not known.
            probe_hidden: ``(1, group, hidden)``, see :attr:`probe_hidden`.
        """
        self.tokens[row] = tokens
        self.root = self.root.index_fill(0, _index(row, self.root), tokens[-1])
        self.hidden = _with_row(self.hidden, row, hidden, self.batch_size)
        if hidden is None:
            self.hidden = None
        if probe_hidden is not None:
            self.probe_hidden = _with_row(self.probe_hidden, row, probe_hidden, self.batch_size)
        self.probe_counts[row] = 0 if probe_hidden is None else probe_hidden.shape[1]
        self.foreseen = self.probe_sizes = None

    @property
    def batch_size(self) -> int:
        return len(self.tokens)

    @property
    def max_depth(self) -> int:
        """Deepest candidate that any row can still use: one token of the budget is the bonus."""
        left = [n for n, active in zip(self.remaining, self.active) if active]
        return max(left, default=1) - 1


def _index(row: int, like: Tensor) -> Tensor:
    return torch.tensor([row], device=like.device)


def _with_row(batch: Tensor | None, row: int, own: Tensor | None, size: int) -> Tensor | None:
    """A tensor of a batch of this size with another first entry of ``own`` as this row."""
    if own is None:
        return batch
    if batch is None:
        batch = own.new_zeros((size, *own.shape[1:]))
    return batch.index_copy(0, _index(row, batch), own[:1].to(batch))


class Drafter(CandidateGenerator):
    """Proposes candidates. One instance serves one ``generate()`` call.

    Attributes:
        single_forward: whether a step is one forward pass of the model; False if drafting runs
            the model, too.
        runs_modules: whether drafting runs modules of the model, such as its output embeddings.
        probe_inputs: what has been learned for the probes of its drafts, if they have any.
        wants_hidden: whether it reads ``DecodingState.hidden``.
        prune_layer: layers that run on all nodes, where some steps prune.
        drafting: with which the model runs while it drafts; None if it does not.
        prunes: whether the model drops unlikely candidates of its drafts on their way; None: the
            policy says so for each step.
        distances: tokens behind the next one that probes under a node predict.
        num_probes: of them under a node; 0: its drafts have none, or bring them along.
        group: these probes, which also hang under the prompt's last token.
        looks_up: whether :meth:`look_up` gives part of its drafts by itself.
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
        """Leaves out nodes of a draft on their way through the model, where it is to be pruned.

        Which ones depends on their tokens, so that such a draft must carry no distributions.
        """
        return None

    @property
    def kind_of_forward(self) -> Hashable:
        """What its forwards ask of the model, beside a tree."""
        inputs = self.probe_inputs
        probes = inputs and (len(inputs.embeddings), inputs.num_front, inputs.exits)
        return probes, self.wants_hidden, self.prune_layer

    def start(self, state: DecodingState) -> None:
        """Called once, after the prefill."""

    @abstractmethod
    def propose(self, state: DecodingState) -> Draft:
        """Candidates for the next step; a tree of the root alone if there are none."""

    def foresee(self, state: DecodingState) -> Tensor | None:
        """Begin the next draft while the host does not know yet how the step has ended.

        The state's tensors are as the step left them; what the host knows of it is as it was
        before. In rows that turn out to be finished, tensors may hold anything.

        Returns:
            ``(batch, n)`` float32 numbers that :meth:`propose` finds in ``DecodingState.foreseen``,
            so that the host waits for the device once per step; None if there is nothing to begin.
        """
        return None

    def look_up(self, state: DecodingState) -> Draft:
        """As :meth:`propose`; where it :attr:`looks_up`, only what takes no work of the model's."""
        return self.propose(state)

    def observe(self, state: DecodingState, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        """Called after each step with the accepted nodes per row, root first; none if finished.

        ``draft`` is what was forwarded; the root alone, without chances, where nothing was
        proposed.
        """

    def hang(self, tree: TreeBatch, ahead: Sequence[Sequence[int]]) -> ProbeRows | None:
        """Probes under the nodes of a step's trees.

        Args:
            tree: of each row.
            ahead: how many distances are to be predicted under each node of each row.
        """
        return None

    def select(self, state: DecodingState, rows: Sequence[int]) -> None:
        """Called between two steps when rows that are finished have left the batch.

        A drafter that keeps something for each row selects it here; the state is already that of
        the smaller batch.

        Args:
            rows: row ``i`` is now the one that was ``rows[i]``; each at most once, in any order.
        """

    def replace_row(self, state: DecodingState, row: int) -> None:
        """Called between two steps when a row has become another sequence.

        A drafter that keeps something for each row begins it anew here; the state is already that
        of the new sequence.
        """

    def warm(self, state: DecodingState) -> None:
        """Compile what :meth:`propose` runs, where there are hidden states to predict from."""

    def details(self) -> dict[str, Any]:
        """What the drafter reports in ``SpecStats.details``."""
        return {}

    # -- stock assisted decoding -------------------------------------------------------------

    @abstractmethod
    def chain(self, input_ids: Tensor) -> list[int]:
        """The likeliest tokens behind a sequence, ``(1, seq)`` and without padding."""

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """For Transformers' own assisted decoding, whose batches have one row.

        Args:
            input_ids: ``(1, seq)``.

        Returns:
            ``(1, seq + candidates)`` ids with :meth:`chain` behind them, and no logits.
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
    """The tokens that each row emitted in the step that accepted these nodes."""
    return [tokens[len(tokens) - len(path) :] for tokens, path in zip(state.tokens, nodes)]
