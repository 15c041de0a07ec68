"""Options shared by all strategies, by those with trees, and by those with heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_spec.core.checks import check_choices, check_count, check_range
from hf_spec.core.limits import MAX_CANDIDATES
from hf_spec.core.token_tree import TokenTree

#: Acceptance rules and whether they keep the target distribution.
ACCEPTANCE_RULES = {"match": True, "rejection": True, "typical": False}


@dataclass(frozen=True)
class StrategyOptions:
    """Options of every strategy; a method's own options derive from this class.

    Attributes:
        acceptance: ``match`` (exact: accepts a candidate if it is the target's own token, greedy or
            sampled), ``rejection`` (exact, also for sampled candidates) or ``typical`` (lossy).
        typical_epsilon, typical_delta: thresholds of typical acceptance, in (0, 1].
        lookup: whether to merge the candidates of ``prompt_lookup`` into the strategy's tree.
            ``auto``: where the policy chooses candidates by probability.
        drafting: ``auto``: only as much as pays, and plain steps while nothing does, unless the
            output depends on which steps draft (sampled candidates, ``typical``). ``always``: every
            step drafts, and nothing depends on time.
    """

    acceptance: str = "match"
    lookup: bool | str = "auto"
    drafting: str = "auto"
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3

    #: Whether candidates can be sampled; they then carry the distribution they were sampled from.
    can_sample: ClassVar[bool] = False
    #: Options that only some values of another one use: name -> (the other's name, its values).
    belongs: ClassVar[dict[str, tuple[str, tuple[str, ...]]]] = {
        "typical_epsilon": ("acceptance", ("typical",)),
        "typical_delta": ("acceptance", ("typical",)),
    }

    def __post_init__(self) -> None:
        check_choices(self, acceptance=tuple(ACCEPTANCE_RULES), drafting=("auto", "always"))
        if self.acceptance == "rejection" and not self.can_sample:
            raise ValueError(
                "acceptance='rejection': this strategy's candidates are not sampled from a "
                "distribution. Use acceptance='match', which is exact for them."
            )
        if not isinstance(self.lookup, bool) and self.lookup != "auto":
            raise ValueError(f"lookup={self.lookup!r}: must be 'auto', True or False.")
        for name in ("typical_epsilon", "typical_delta"):
            check_range(name, getattr(self, name), 0.0, 1.0, open_low=True)
        for name, (other, users) in self.belongs.items():
            value, chosen = getattr(self, name), getattr(self, other)
            if value != getattr(type(self), name) and chosen not in users:
                raise ValueError(
                    f"{name}={value!r} with {other}={chosen!r}: it belongs to "
                    f"{' and '.join(map(repr, users))}. Leave one of the two out."
                )

    @property
    def samples(self) -> bool:
        """Whether candidates are sampled if the call samples."""
        return self.acceptance == "rejection"

    def looks_up(self, timed: bool) -> bool:
        """Whether look-ups are merged into the candidates.

        Args:
            timed: whether the amount of drafting may depend on step times.
        """
        return self.lookup is True

    def untimed(self) -> dict[str, Any]:
        """Option changes that make drafting independent of step times and of earlier calls.

        For comparable figures, such as those of training checkpoints.
        """
        return {"drafting": "always"}

    @property
    def other_adapters(self) -> tuple[str, ...]:
        """Strategies whose adapters must be active in addition to the strategy's own."""
        return ()

    @property
    def lossless(self) -> bool:
        """Whether the acceptance rule preserves the model's distribution."""
        return ACCEPTANCE_RULES[self.acceptance]


#: Value of the option ``tree``: trees grown from a step's own probabilities.
ADAPTIVE = "adaptive"
#: The likeliest tokens only, if the method has this name among its trees.
CHAIN = "chain"
#: In each step, as many candidates as pay.
AUTO = "auto"
#: Number of candidates if it must not depend on time.
CANDIDATES = 8


@dataclass(frozen=True)
class TreeOptions(StrategyOptions):
    """Options of a strategy whose candidates form trees of predictions.

    Attributes:
        tree: ``adaptive``: the likeliest paths by the step's own probabilities. Or a name of the
            method's, or a list of rank paths, as ``TokenTree.from_paths`` takes it, with all
            probes under each node.
        num_draft_tokens: of an adaptive tree. ``auto``: as many as pay in each step, by its own
            probabilities and the time that steps take, 8 with ``drafting="always"``; a
            number takes
            exactly so many, with probes under all nodes.
        max_depth: future tokens drafted, besides the certain one; None takes as many as the adapter
            predicts.
    """

    tree: str | Sequence[Sequence[int]] = ADAPTIVE
    num_draft_tokens: int | str = AUTO
    max_depth: int | None = None

    #: Names of the method's own trees, the default of the static ones first.
    trees: ClassVar[tuple[str, ...]] = ()
    #: Trees that are grown while decoding.
    grown: ClassVar[tuple[str, ...]] = (ADAPTIVE,)
    #: Options that determine the trees' shape.
    shape: ClassVar[tuple[str, ...]] = ("tree", "num_draft_tokens", "max_depth")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_draft_tokens != AUTO:
            check_count("num_draft_tokens", self.num_draft_tokens, high=MAX_CANDIDATES)
            if self.tree != ADAPTIVE:
                raise ValueError(
                    f"num_draft_tokens={self.num_draft_tokens} is of tree={ADAPTIVE!r}; leave it "
                    "out with another one."
                )
        if self.max_depth is not None:
            check_count("max_depth", self.max_depth)
        if not isinstance(self.tree, Sequence) or not len(self.tree):
            self._refuse_tree()
        if not isinstance(self.tree, str):
            self._paths()
        elif self.tree not in (ADAPTIVE, *self.trees):
            self._refuse_tree()

    def _refuse_tree(self) -> None:
        names = ", ".join((ADAPTIVE, *self.trees))
        raise ValueError(f"tree={self.tree!r}: choose one of {names}, or give rank paths.")

    def looks_up(self, timed: bool) -> bool:
        if self.lookup != AUTO:
            return bool(self.lookup)
        return timed and self.tree in self.grown and self.num_draft_tokens == AUTO

    def depth(self, available: int) -> int:
        """Number of distances that are drafted.

        Args:
            available: future tokens that the adapter predicts.

        Raises:
            ValueError: if ``max_depth`` is larger.
        """
        if self.max_depth is not None and self.max_depth > available:
            raise ValueError(
                f"max_depth={self.max_depth}: the adapter predicts {available} future tokens."
            )
        return self.max_depth or available

    def named_tree(self, depth: int) -> TokenTree:
        """The static tree that ``tree`` names, over predictions of ``depth`` future tokens; only
        for names of the method's other than ``chain``."""
        raise NotImplementedError

    def make_tree(self, available: int) -> TokenTree:
        """The static tree of the options.

        Args:
            available: future tokens that the adapter predicts.

        Raises:
            ValueError: if the given paths or ``max_depth`` are deeper.
        """
        depth = self.depth(available)
        if isinstance(self.tree, str):
            return TokenTree.chain(depth) if self.tree == CHAIN else self.named_tree(depth)
        tree = self._paths()
        if tree.max_depth > depth:
            raise ValueError(
                f"tree has paths of {tree.max_depth} ranks, {depth} future tokens are drafted: "
                "give shorter paths."
            )
        return tree

    def _paths(self) -> TokenTree:
        paths: Any = self.tree
        return TokenTree.from_paths(paths)


#: ``sparse``: rank paths, the likeliest first. On held-out answers of a 22M model they are worth
#: 0.3 % less than the 15 best nodes there (docs/methods/medusa.md).
SPARSE: tuple[tuple[int, ...], ...] = (
    (0,), (0, 0), (1,), (0, 0, 0), (2,), (0, 1), (1, 0), (0, 0, 1), (0, 0, 0, 0), (3,), (0, 2),
    (2, 0), (1, 0, 0), (0, 1, 0), (4,),
)  # fmt: skip


@dataclass(frozen=True)
class HeadOptions(TreeOptions):
    """Options of a strategy with heads (Medusa, sections 2.1.2 and 2.3.3).

    Attributes:
        tree: ``sparse``: 15 candidates, most of them under likely ones. ``chain``: each head's
            likeliest token only, as in blockwise parallel decoding. Or what :class:`TreeOptions`
            says; rank paths are Medusa's choices.
        max_depth: heads used; None takes all that the adapter has.
    """

    trees: ClassVar[tuple[str, ...]] = ("sparse", CHAIN)

    def named_tree(self, depth: int) -> TokenTree:
        return TokenTree.from_paths(SPARSE).truncate(depth)
