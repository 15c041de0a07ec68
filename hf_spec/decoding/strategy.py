"""The strategy that a generation config names, set up on a model for one call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from hf_spec.core.memory import recall
from hf_spec.decoding.compiling import graphs_for
from hf_spec.decoding.selfcheck import check_tree_forward
from hf_spec.drafting.drafter import Drafter
from hf_spec.drafting.options import AUTO, DraftOptions, key_of, samples_drafts
from hf_spec.methods.registry import Method, get_method
from hf_spec.model.graphs import Graphs
from hf_spec.model.packed_weights import packed_weights
from hf_spec.modeling_patches.fingerprint import fingerprint
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.policy.learned import Learned


@dataclass
class Strategy:
    """The strategy that a generation config names, set up on a model for one call.

    Attributes:
        timed: whether the amount of drafting may depend on step times.
        lookup: whether lookups are merged into the draft.
        samples: whether the call samples.
        kind: what compiled code and what is learned are kept by.
        graphs: compiled code for its steps; None if they are not compiled.
        packed: lets forwards compute with packed copies of weights; None if there are none.
        rows_stay: whether each forward must have all rows of the batch in their order, as hooks may
            count on it.
        alone: whether steps are of one token, as code of the user's may tell tokens apart.
    """

    model: Any
    method: Method
    options: DraftOptions
    drafter: Drafter
    timed: bool
    lookup: bool
    samples: bool
    kind: tuple[str, str, str | None, int]
    graphs: Graphs | None
    packed: Changes | None
    rows_stay: bool
    alone: bool

    @classmethod
    def of(
        cls, model: Any, config: GenerationConfig, rows: int = 1, padded: bool = False,
        synced: bool = False, assistant: Any = None,
    ) -> Strategy:  # fmt: skip
        """Set up the strategy of a prepared config.

        Args:
            rows: the batch size.
            padded: whether rows are padded.
            synced: whether several ranks run the model together, on batches of their own.
            assistant: the call's assistant model, if it has one.

        Raises:
            ValueError: if the model or another option does not work with the strategy.
        """
        method = get_method(config.assistant_strategy)
        options = method.parse_options(config.assistant_kwargs)
        drafter = method.make_drafter(model, options, assistant)
        running = fingerprint(model)
        # Ranks must run the same trials, whatever their batches.
        rows = 2 if synced else rows
        alone = check_tree_forward(model, method.name, drafter, padded or synced, running, rows)
        samples = bool(config.do_sample)
        timed, lookup = resolve(options, drafter, samples)
        if alone:
            drafter, timed, lookup = _plain(model), False, False
        adapter = None
        with suppress(ValueError):  # several are active; the drafter raises if that is a problem
            adapter = method.active_adapter(model, options.adapter)  # on which acceptance depends
        copies, packed = packed_weights(model, *drafter.beside), Changes()
        for one in copies:
            one.add_to(packed)
        name = None if adapter is None else adapter.name
        kind = method.name, key_of(options), name, len(copies)
        # Code is for what the model holds, which would be another thing in each call.
        compiles = not alone or bool(running.apart)
        graphs = graphs_for(model, config, drafter, kind, synced) if compiles else None
        return cls(
            model, method, options, drafter, timed, lookup, samples, kind, graphs,
            packed if copies else None, running.rows_stay, alone,
        )  # fmt: skip

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, whose forwards compute with packed copies of weights if there are any;
        else the model runs as it is, compiled if it is compiled."""
        if self.packed is None:
            return function(*args, **kwargs)
        return self.packed.run(function, *args, **kwargs)

    @property
    def learned(self) -> Learned:
        """What earlier calls have learned."""
        # Sampled text is harder to predict, and choosing its tokens takes longer.
        key = Learned, self.kind, self.graphs is not None, self.samples
        return recall(self.model, key, Learned)


def _plain(model: Any) -> Drafter:
    """A drafter that drafts nothing."""
    method = get_method("plain")
    return method.make_drafter(model, method.parse_options(None))


def resolve(options: DraftOptions, drafter: Drafter, do_sample: bool) -> tuple[bool, bool]:
    """Whether the amount of drafting may depend on step times, and whether lookups are merged into
    the draft, where options leave it open."""
    # Sampled draft tokens take random numbers of their own, and typical acceptance is lossy in
    # drafting steps: the output depends on which steps draft.
    exact = options.acceptance != "typical" and not samples_drafts(options, do_sample)
    timed = options.drafting == AUTO and exact
    if options.lookup == AUTO:
        return timed, timed and drafter.policy_chooses
    return timed, bool(options.lookup)
