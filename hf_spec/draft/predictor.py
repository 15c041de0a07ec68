"""What a method writes, a predictor, and what it may look at: the state of a call's decoding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.device import FollowsRows, Holds, to_device
from hf_spec.core.shapes import HostTree, ProbeGroup, Row, TokenTree, TreeStates
from hf_spec.core.stats import SpecStats
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.draft.forced import BatchForced
from hf_spec.draft.grow import Expands, GoesOn
from hf_spec.draft.learned import Calibration
from hf_spec.draft.lookup import BatchLookup
from hf_spec.draft.options import AUTO, DraftOptions
from hf_spec.draft.policy import DraftExit, LevelCost, fixed_size
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.target.hidden_states import Predicted, Reads
from hf_spec.target.noise import SamplingNoise
from hf_spec.target.target import ProbeInputs, Target
from hf_spec.threads import recall

#: Drafting runs modules of the model, such as its output embeddings.
MODULES = "modules"
#: Drafting runs forwards of its own, also of a part of the model or of another one.
FORWARDS = "forwards"
#: Makes a static tree from the options and the depth that is drafted.
MakeTree = Callable[[Any, int], TokenTree]


class Predictor(FollowsRows, Holds):
    """Predicts what may follow the committed tokens. One instance serves one ``generate()`` call.

    A new one declares what it ``reads``, and defines :meth:`advance` if it reads hidden states,
    :meth:`learn` if it reads what the model predicts, :meth:`levels`, and :meth:`chain` for stock
    assisted decoding. All else has a default.
    :class:`Drafter` makes trees of it, eagerly or within recorded and compiled steps.

    Attributes:
        reads: what :meth:`advance` and :meth:`learn` get.
        trees: values of the option ``tree`` besides ``adaptive``, the default of the static ones
            first; None for one that is made in a way of its own. If there are static ones, rank
            paths are a value, too.
        unused: options of all strategies that it has no use for.
        can_sample: whether draft tokens can be sampled; they then carry the distribution that they
            were sampled from.
        runs: what drafting runs: nothing, :data:`MODULES` or :data:`FORWARDS`.
        depth: how many tokens after the next one it predicts.
        width: nodes of a level that go on, the likeliest ones; None for all.
        siblings: draft tokens of a level, if ``width`` is 1.
        level_cost: what a level takes; by it the policy decides how many are drafted.
        static: the tree of each state, that is, for each number of predicted tokens; None for trees
            that grow by probabilities.
        weighs: whether trees use the probabilities of predictions; otherwise only their order.
        policy_chooses: whether the policy chooses among its draft tokens by their probabilities.
        exactly: number of draft tokens, with which trees are forwarded whole; None if the policy
            chooses among them.
        exit: what is learned of its drafts, and how deep they pay; None to take probabilities as
            they are.
        key, owner: what is learned is kept by this key for this model.
        token_ids: ``(tokens,)`` int64 ids that it predicts, ascending; None for all.
        probe_inputs: the learned inputs of its probes, if it has any.
        group: the probes of a node; empty if there are none.
        per_distance: probes per distance; 0 if predictions take no step tokens, so that every step
            has all of them.
        num_predicted: distances that each row has predictions for; a tensor ``(batch,)`` if the
            host does not know.
        held, per_row: names of attributes with tensors that programs take, see :class:`Holds`. In
            ``per_row`` is what :meth:`advance` makes of each sequence from what is there, ``(batch,
            ...)``; it follows the batch.
        of_rows: names of all else that follows the batch, see :class:`FollowsRows`.
        cache: a KV cache of its own; None if it has none.
        forwards: forwards that have run while a tree grew.
        drafting: changes to the model while it drafts; None if drafting does not run it.
        beside: modules beside the model that drafting runs, such as an assistant.
        kind: what forwards depend on besides all this.
        outside: why drafting is not in recorded or compiled code; None if it is.
        reads_cache: whether it reads the model's KV cache.
    """

    reads: Reads = Reads()
    trees: ClassVar[Mapping[str, MakeTree | None]] = {}
    unused: ClassVar[Sequence[str]] = ()
    can_sample: ClassVar[bool] = False
    runs: ClassVar[str] = MODULES
    depth: int
    width: int | None = None
    siblings: int = 1
    level_cost: LevelCost = LevelCost.NOTHING
    static: TreeStates | None = None
    weighs: bool = True
    exactly: int | None = None
    exit: DraftExit | None = None
    key: Sequence[Hashable]
    token_ids: Tensor | None = None
    probe_inputs: ProbeInputs | None = None
    group: ProbeGroup = ProbeGroup.causal(0)
    per_distance: int = 0
    num_predicted: Any = ()
    held: ClassVar[Sequence[str]] = ("cache",)
    of_rows: ClassVar[Sequence[str]] = ("cache", "num_predicted")
    cache: Any = None
    forwards: int = 0
    drafting: Changes | None = None
    beside: Sequence[nn.Module] = ()
    kind: Hashable = None
    outside: str | None = None
    reads_cache: bool = False

    def __init__(self, model: PreTrainedModel, options: DraftOptions):
        self.model, self.owner = model, model
        self.options: Any = options  # of the method's own class
        self.key = type(self).__module__, type(self).__qualname__
        if options.max_depth is not None and hasattr(self, "depth"):
            self.depth = min(self.depth, options.max_depth)
        self.policy_chooses = options.num_draft_tokens == AUTO

    # -- the two verbs -------------------------------------------------------------------------

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        """Called when tokens have been committed; the arguments as of :meth:`Drafter.advance`.
        Within recorded and compiled steps the host knows nothing of the result."""

    def learn(self, result: StepResult, predicted: Predicted) -> None:
        """Called after :meth:`advance`, but for the prompt, with what the model predicts after each
        node of the step's trees."""

    def levels(self, root: Tensor, depth: int, width: int, noise: Tensor | None) -> Expands:
        """What a tree grows from.

        Args:
            root: ``(batch,)`` tokens.
            depth: number of levels, from 1.
            width: largest number of children that a node may need.
            noise: ``(batch, depth, tokens)`` what draft tokens, of :attr:`token_ids`, will be
                sampled with, see :func:`as_sampled`; None if they are not sampled.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define levels()")

    def joined(self, source: Expands, noise: Tensor | None) -> Expands:
        """What a tree grows from where this predictor's candidates join those of another one."""
        raise NotImplementedError(f"{type(self).__name__} does not define joined()")

    def continued(self, state: DecodeState, known: Sequence[Row]) -> Sequence[Row]:
        """See :meth:`Drafter.continued`: for predictors that draft by tokens alone."""
        return known

    def chain(self, input_ids: Tensor) -> list[int]:
        """The likeliest tokens after a sequence, ``(1, seq)`` without padding."""
        raise NotImplementedError(f"{type(self).__name__} does not define chain()")

    # -- a call ------------------------------------------------------------------------------

    def start(self, state: DecodeState) -> None:
        """Called once, before the prompt's :meth:`advance`."""
        self.exactly = fixed_size(self.options.num_draft_tokens, state.timed)
        runs = self.level_cost.runs
        # Where nothing may depend on time, nor may drafts depend on earlier calls.
        if state.timed and self.weighs and (runs or self.policy_chooses):
            key = DraftExit, *self.key, self.depth, state.do_sample  # sampled text is harder
            self.exit = recall(self.owner, key, lambda: DraftExit(self.depth))
        elif runs:
            self.exit = DraftExit(self.depth)

    @property
    def calibration(self) -> Calibration | None:
        """Learned of its trees, and learning; None to take probabilities as they are."""
        return None if self.exit is None else self.exit.calibration

    @property
    def trust(self) -> Sequence[float]:
        """Terms to add to log-probabilities, per distance."""
        return () if self.calibration is None else self.calibration.log_factors

    @property
    def reach(self) -> int:
        """How deep trees may be that grow outside of programs, by what rows have predictions of."""
        return self.depth

    def catch_up(self, state: DecodeState) -> None:
        """Called before trees grow outside of recorded and compiled steps."""

    def chosen(self, state: DecodeState, depth: int) -> Tree | None:
        """The step's chains, at most so deep, where not simply the likeliest tokens are drafted,
        with their distributions if they are sampled; None where trees grow. If :attr:`static` is
        given, its trees, which are chains, get these tokens."""
        return None

    @property
    def goes_on(self) -> GoesOn | None:
        """Decides before each level of an eager step, in a way of its own, whether trees go on, by
        reading its frontier; None to leave it to the policy, see :func:`amount`."""
        return None

    def finish(self) -> None:
        """Discard what a tree that has grown leaves behind."""

    def proposed(self, root: Tensor) -> None:
        """Called with the roots of the step whose trees have grown."""

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        """Called after each step; the arguments as of :meth:`Drafter.observe`."""

    def attach_probes(self, tree: Tree, ahead: Sequence[Sequence[int]]) -> Tree:
        """See :meth:`Drafter.attach_probes`."""
        return tree

    def complete(self, state: DecodeState) -> None:
        """See :meth:`Drafter.complete`."""

    def release(self) -> list[Tensor]:
        """The buffers that compiled code of later calls may use, once the call is over."""
        return [] if self.cache is None else self.cache.states.release()

    def details(self) -> dict[str, Any]:
        """Entries for ``SpecStats.details``."""
        return {}

    # -- within recorded and compiled steps ----------------------------------------------------

    def ready(self, tree: Tree, grows: bool) -> bool:
        """Whether :meth:`advance` can be part of a step with these trees; ``grows``: whether trees
        of the next step are wanted."""
        return grows

    def reserve(self, tree: Tree, levels: int) -> None:
        """Make room for a step with these trees and a tree of so many levels, so that buffers stay
        where they are."""

    def received(self, found: Iterator[Tensor], result: StepResult) -> None:
        """Called after the step in place of :meth:`advance`; next in ``found`` is what its copy has
        :meth:`renewed`."""
        self.take(found)
        if self.cache is not None:
            assert result.host is not None
            self.cache.commit(result.host.counts)


# -- The state of a call's decoding, as the loop and its drafter see it ----------------------------


class Grown(NamedTuple):
    """Trees that a drafter has grown, for the step that follows.

    Attributes:
        packed: see :meth:`Tree.packed`.
        numbers: the same on the host; None if they are still to be transferred.
        trust: terms that were added to their log-probabilities, per distance.
        depth: to which static trees were cut; None for whole ones.
    """

    packed: Tensor
    numbers: Any = None
    trust: Sequence[float] = ()
    depth: int | None = None

    def of_rows(self, rows: Sequence[int]) -> Grown:
        """Those of some of the batch's rows."""
        numbers = None if self.numbers is None else self.numbers[list(rows)]
        packed = self.packed[to_device(rows, self.packed.device)]
        return self._replace(packed=packed, numbers=numbers)

    def with_rows(self, other: Grown) -> Grown:
        """These, and behind them those of other rows."""
        nodes = max(one.packed.shape[1] // 4 for one in (self, other))
        packed = [Tree.repacked(one.packed, nodes) for one in (self, other)]
        return self._replace(packed=torch.cat(packed), numbers=None)


class Process(Protocol):
    """The call's logits processors."""

    @property
    def trivial(self) -> bool:
        """Whether they keep the likeliest token the likeliest."""

    def __call__(
        self, logits: Tensor, suffix: Tensor, active: Sequence[bool], drafting: bool = False
    ) -> Tensor:
        """Logits ``(batch, vocab)`` -> float32 scores after all processors, for active rows. The
        prefix of each is its tokens so far, then its ``suffix (batch, n)``. While drafting, only
        processors run that keep no state."""


@dataclass
class DecodeState(FollowsRows):
    """The sequences of a call that are still decoded, and the parts that follow them.

    It is what the loop shows a drafter, which must not change it. The batch shrinks as sequences
    finish (:meth:`select`), and those of other calls may join it.

    Attributes:
        model: the model.
        drafter: the call's drafter.
        target: runs the model on the nodes of a tree after the cached tokens.
        cache: the KV cache; it holds all tokens of a sequence except the last, the root.
        sequences: the call's sequences; :attr:`tokens`, :attr:`active` and so on are theirs.
        root: ``(batch,)`` the last token of each sequence.
        do_sample: whether tokens are sampled.
        process: applies the call's logits processors.
        stats: the statistics of the call so far.
        timed: whether the amount of drafting may depend on step times.
        grown: what has grown for this step; a tree if the drafter has made it in its own way.
        draft_cost: tokens that one more drafting forward of this step must bring to pay for its
            time; None while unknown.
        lookups: looks up what is merged into each step's draft; None if nothing is.
        forced: drafts what the call's processors leave; None if that is not asked for.
        looked_up: what this step has looked up for each sequence, and what is forced.
        noise: what the next tokens will be sampled with; None if the output would depend on it.
        prompt_part: most tokens of each prompt that a drafter should run at once.
        between_parts: to be called between two such parts: other calls may take steps.
    """

    model: Any
    drafter: Any
    target: Target
    cache: TreeCache
    sequences: Any
    root: Tensor
    do_sample: bool
    process: Process
    stats: SpecStats = field(default_factory=SpecStats)
    timed: bool = False
    grown: Grown | Tree | None = None
    draft_cost: float | None = None
    lookups: BatchLookup | None = None
    forced: BatchForced | None = None
    looked_up: Sequence[Row] = ()
    noise: SamplingNoise | None = None
    prompt_part: int = 4096
    between_parts: Callable[[], None] = lambda: None

    of_rows = ("sequences", "cache", "target", "drafter", "lookups", "forced", "noise", "root")

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each row so far, with the prompt, without padding."""
        found: list[list[int]] = self.sequences.now.tokens
        return found

    @property
    def active(self) -> list[bool]:
        """Whether each row is unfinished."""
        found: list[bool] = self.sequences.now.active
        return found

    @property
    def remaining(self) -> list[int]:
        """How many tokens each row may still emit."""
        found: list[int] = self.sequences.now.remaining
        return found

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows in this order, and have all parts follow; see :class:`FollowsRows`."""
        super().select(rows)
        if isinstance(self.grown, Grown):  # by a program; else trees are made for the rows left
            self.grown = self.grown.of_rows(rows)

    def join(self, other: DecodeState) -> None:
        """Take the sequences of another call, whose prompt has just run, behind these, and have all
        parts follow."""
        for state in (self, other):
            state.drafter.complete(state)
        if isinstance(self.grown, Grown):  # by a program, which leaves nothing to grow more from
            self.grown = self.grown.with_rows(other.drafter.grown(other))
        super().join(other)

    @property
    def looks_up(self) -> bool:
        """Whether the host may know what continues a sequence."""
        return self.lookups is not None or bool(self.forced)

    def lookup(self) -> Sequence[Row]:
        """Look up what continues each sequence, for this step."""
        rows: tuple[Sequence[Row], ...] = ()
        for source in (self.forced, self.lookups):
            if source:
                rows = (source.lookup(self.tokens, self.active, self.max_depth, *rows),)
        self.looked_up = rows[0] if rows else ()
        return self.looked_up

    def received(self, grown: Grown) -> tuple[Tree, HostTree]:
        """Trees that a drafter has grown."""
        tree = Tree.unpacked(grown.packed, grown.numbers)
        host = tree.host
        assert host is not None
        if not all(self.active):  # grown before it was known that rows stop short of their bonus
            host.tokens[:, 0] = [row[-1] for row in self.tokens]
        return tree, host

    @property
    def batch_size(self) -> int:
        """Batch rows that are still carried."""
        return len(self.sequences.rows)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest draft token that any sequence can use; one token is the bonus."""
        left = [n for n, active in zip(self.remaining, self.active) if active]
        return max(left, default=1) - 1
