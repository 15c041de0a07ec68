"""Options of all strategies: what is asked for. Drafters declare what they offer."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_spec.core.checks import (
    AUTO,
    MAX_DRAFT_TOKENS,
    MAX_HISTORY,
    SHARE,
    check_count,
    check_fields,
    choice,
    count,
    count_or_auto,
    setting,
)
from hf_spec.draft.rollouts import RolloutHistory

#: Acceptance rules and whether they keep the target distribution.
ACCEPTANCE_RULES = {"match": True, "rejection": True, "typical": False}
#: Value of the option ``tree``: trees grown from a step's own probabilities.
ADAPTIVE = "adaptive"
#: Value of the option ``tree``: the likeliest tokens only, if the method has this tree.
CHAIN = "chain"
#: The rule of ``num_draft_tokens``.
DRAFT_SIZE = count_or_auto(MAX_DRAFT_TOKENS, "as many as pay")
#: Options of trees of predictions.
TREE_OPTIONS = ("tree", "num_draft_tokens", "max_depth")


def _place(name: str, value: Any) -> None:
    if not (isinstance(value, str) and value):
        raise ValueError(f"{name}={value!r}: give an adapter's folder or repository as a string.")


def with_place(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of which those that are paths are strings; a ValueError if ``adapter`` is none."""
    given = {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in options.items()
    }
    if given.get("adapter") is not None:
        _place("adapter", given["adapter"])
    return given


def _answers(name: str, value: Any) -> None:
    """The rule of ``lookup_history``."""
    if not (isinstance(value, str) and value):
        check_count(name, value, 0, MAX_HISTORY, why="Or give the path of a file.")


def _history(name: str, value: Any) -> None:
    if not isinstance(value, RolloutHistory):
        raise ValueError(
            f"{name}={value!r}: give a hf_spec.RolloutHistory(), which no file of a config holds."
        )


@dataclass(frozen=True)
class DraftOptions:
    """Options of all strategies; a method's own options derive from this class.

    Attributes:
        tree: ``adaptive``: the likeliest paths by the step's own probabilities. Or a name of the
            method's, or a list of rank paths, as ``TokenTree.from_paths`` takes it, with all
            probes under each node.
        num_draft_tokens: of an adaptive tree. ``auto``: as many as are worth their time in each
            step, by its own probabilities and the time that steps take, 8 with
            ``drafting="always"``; a number takes exactly so many, with probes under all nodes.
            In ``prompt_lookup`` and ``layer_skip`` it is the most that a step drafts.
        max_depth: future tokens drafted, besides the certain one; None takes as many as the adapter
            predicts.
        lookup: whether to merge the draft tokens of ``prompt_lookup`` into the strategy's tree.
            ``auto``: where the policy chooses draft tokens by probability.
        recycle: whether what the model predicted after the same tokens before, as
            ``token_recycling`` keeps it, joins the strategy's tree.
        lookup_history: lookups also search so many tokens at least of the answers that earlier
            calls of this process gave with the model; 0: none. Or the path of a file, in which the
            answers of earlier processes are, too, or those that ``hf-spec lookups`` wrote.
        forced: whether tokens that the call's logits processors leave no choice about, or little,
            are drafted, too: those of a method ``forced``, and of grammars.
        drafting: ``auto``: only as much as is worth its time, and plain steps while nothing is,
            unless the output depends on which steps draft (sampled draft tokens, ``typical``).
            ``always``: every step drafts, and nothing depends on time.
        acceptance: ``match`` (exact: accepts a draft token if it is the target's own token, greedy
            or sampled), ``rejection`` (exact, also for sampled draft tokens) or ``typical``
            (lossy).
        typical_epsilon, typical_delta: thresholds of typical acceptance, in (0, 1].
        adapter: folder (a string or path) or repository of the adapter that drafts, in place of one
            attached by ``load_adapter``: PEFT, training and saving do not see it. It is read again
            when the files of its folder have changed; a model keeps the 4 that were named last.
        history: a ``RolloutHistory``: first the earlier answers to the same prompts draft.
        max_rows: most sequences of a call at once. Of a larger batch the others wait, their prompts
            not yet run, until one has ended; prompts run without padding. An output then has no
            cache. None: all at once.
        former_names: (of the class) today's names of options by their former ones, which saved
            configurations may have.
    """

    former_names: ClassVar[Mapping[str, str]] = {}

    tree: str | Sequence[Sequence[int]] = ADAPTIVE
    num_draft_tokens: int | str = setting(AUTO, rule=DRAFT_SIZE, only={"tree": (ADAPTIVE,)})
    max_depth: int | None = setting(None, rule=count())
    lookup: bool | str = setting(AUTO, rule=choice(AUTO, True, False))
    recycle: bool = setting(False, rule=choice(True, False))
    lookup_history: int | str = setting(0, rule=_answers, only={"lookup": (AUTO, True)})
    forced: bool = setting(True, rule=choice(True, False))
    drafting: str = setting(AUTO, rule=choice(AUTO, "always"))
    acceptance: str = setting("match", rule=choice(*ACCEPTANCE_RULES))
    typical_epsilon: float = setting(0.09, rule=SHARE, only={"acceptance": ("typical",)})
    typical_delta: float = setting(0.3, rule=SHARE, only={"acceptance": ("typical",)})
    adapter: str | None = setting(None, rule=_place)
    history: RolloutHistory | None = setting(None, rule=_history, only={"acceptance": ("match",)})
    max_rows: int | None = setting(None, rule=count())

    def __post_init__(self) -> None:
        check_fields(self)


def refuse(options: DraftOptions, names: Sequence[str], why: str) -> None:
    """Raise a ValueError, which says why, if one of these options is not left at its default."""
    for name in names:
        if (value := getattr(options, name)) != getattr(type(options), name):
            raise ValueError(f"{name}={value!r} {why}")


def changed(options: DraftOptions) -> dict[str, Any]:
    """The options that are not left at their defaults, as JSON types."""
    found = {}
    for one in dataclasses.fields(options):
        value, make = getattr(options, one.name), one.default_factory
        if value != (one.default if make is dataclasses.MISSING else make()):
            found[one.name] = value
    plain: dict[str, Any] = json.loads(json.dumps(found, default=repr))  # tuples become lists
    return plain


def key_of(options: DraftOptions) -> str:
    """What is kept between calls is kept by: the same for options that ask for the same."""
    return json.dumps(changed(options), sort_keys=True)


def samples_drafts(options: DraftOptions, do_sample: bool) -> bool:
    """Whether draft tokens are sampled in a call that samples, or does not."""
    return do_sample and options.acceptance == "rejection"
