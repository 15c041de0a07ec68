"""A model's strategy of a call, and the trial of the model before the first step."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from hf_spec.core.shapes import ProbeGroup, TokenTree
from hf_spec.core.tree import Tree
from hf_spec.decoding.cache_reuse import CacheOwner
from hf_spec.decoding.call import graphs_for
from hf_spec.decoding.prefill import Prompt
from hf_spec.decoding.sequences import Sequences
from hf_spec.draft.drafter import Drafter
from hf_spec.draft.learned import Learned
from hf_spec.draft.options import AUTO, DraftOptions, key_of, samples_drafts
from hf_spec.methods.registry import Method, get_method, recycler
from hf_spec.modeling_patches.fingerprint import ALIKE, Fingerprint, State, fingerprint
from hf_spec.modeling_patches.modules import CACHE, decoder_of, only_logits
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.modeling_patches.support import VERIFIED, empty_cache
from hf_spec.modeling_patches.weights import placement
from hf_spec.target.graphs import Graphs, tolerance
from hf_spec.target.hidden_states import Reads, output_logits, supported_kwargs
from hf_spec.target.packed_weights import packed_weights
from hf_spec.target.recording import CallFacts, Recording
from hf_spec.target.target import Target, runs_as
from hf_spec.threads import memory, recall

# -- A self-check of the tree forward on models that our tests do not cover ------------------------
#
# Those are other architectures, and all models that are not as Transformers has made them: with
# hooks or attention of their users' own, or other modules. It runs once for each way in which a
# model runs and kind of forward: small trees after a short random prompt must give the logits of
# plain generation along each path. A model that mishandles explicit masks or positions, or a
# drafter's changes, is refused here; otherwise it would silently generate wrong tokens, or fail in
# the middle of a call.
#
# A trial says nothing of hooks that act from the n-th token of a forward on, at certain tokens or
# in some forwards, nor of code that changes what it is switched by as it runs. There steps are of
# one token, as in plain generation, and so are those of the trial.

logger = logging.getLogger(__name__)

#: Nodes of a trial's tree: of a model of Transformers', whose code treats tokens alike; and of
#: another one, which may act from the n-th token of a forward on.
FEW, MANY = 4, 64
_PROMPT, _PADDING = 8, 3
#: Number of verdicts that are kept for a model.
KEPT = 64

_NO_TREE = (
    "does not take explicit masks and positions as tree attention needs them. Generate without "
    "assistant_strategy, or try attn_implementation='eager'"
)
_NO_HOOKS = (
    "computes other logits over a tree's tokens than token by token. If the hooks tell tokens of a "
    f"forward apart, don't set {ALIKE} on them, so that steps are of one token. Or generate "
    "without assistant_strategy"
)
_ALONE = (
    "computes other logits in steps of one token than in plain generation. Remove the hooks if "
    "they count on its masks, positions or cache, or generate without assistant_strategy"
)
_ONE_TOKEN = (
    "%s: %s, so that steps are of one token each, without drafts, as in plain generation. If %s "
    f"treat all tokens of a forward alike, whatever their number and places, set {ALIKE} = True on "
    "%s."
)
_NO_STATES = (
    "makes its logits of more than its decoder's final states, which heads and probes are read "
    "from. Choose token_recycling, prompt_lookup, layer_skip, or none"
)


class Verdict(NamedTuple):
    """What a trial says of a model.

    Attributes:
        alone: whether steps must be of one token, as no trial can tell that others are right.
        rows_stay: whether rows must stay in their places, as others give them other logits.
    """

    alone: bool
    rows_stay: bool


@torch.no_grad()
def check_tree_forward(
    model: Any, name: str, drafter: Drafter | None = None, padded: bool = False,
    running: Fingerprint | None = None, rows: int = 2,
) -> Verdict:  # fmt: skip
    """Raise a ValueError unless the model's tree forward equals plain generation; free for known
    models that are as Transformers has made them.

    Args:
        name: name of the feature that needs it, for errors.
        drafter: a drafter whose changes to forwards are checked, too. None if final states are
            read instead, of forwards over whole texts.
        padded: whether a call may have padding; equal on all ranks that share the model.
        running: how the model runs; None to find out.
        rows: the call's batch size, which hooks may count on; likewise equal on all ranks.

    Returns:
        How it must run; a warning says once that steps must be of one token.
    """
    running = fingerprint(model) if running is None else running
    if running.stock and model.config.get_text_config(decoder=True).model_type in VERIFIED:
        return Verdict(False, False)
    rows = rows if running.rows_stay else 2
    call = rows, padded, None if drafter is None else drafter.kind_of_forward
    checked: dict[Hashable, Verdict] = memory(model).setdefault("self-checks", {})
    keys = (running.code, call), (running.tried, call)
    found = next((checked[key] for key in keys if key in checked), None)
    if found is not None:
        return found
    trial = Trial(model, padded, rows, FEW if running.stock else MANY)
    reads = drafter is None or (drafter.reads.tokens is not None and not drafter.reads.layers)
    alone, changed = bool(running.apart) and drafter is not None, set[str]()
    if not alone:
        changed = _try(trial, name, drafter, reads, running)
        alone = bool(changed) and drafter is not None
    if alone:
        changed |= _try(trial, name, None, False, running, alone)
        _tell(model, running, changed)
    verdict = Verdict(alone, alone or trial.rows_stay)
    if alone and changed:  # what it holds is another thing in each call
        checked[running.code, call] = verdict
    else:
        checked[running.tried, call] = checked[fingerprint(model).tried, call] = verdict
    for old in [*checked][:-KEPT]:
        checked.pop(old, None)
    return verdict


def _tell(model: Any, running: Fingerprint, changed: Collection[str]) -> None:
    """Warn, once, that steps are of one token, and say how to change that."""
    why, they, what = f"its modules have hooks ({_listed(running.apart)})", "these", "each of them"
    if not running.apart:
        why = f"what its modules or functions hold changes as they run ({_listed(changed)})"
        they, what = "they", "their classes or the functions"
    told: set[str] = memory(model).setdefault("told", set())
    if why not in told:
        told.add(why)
        logger.warning(_ONE_TOKEN, type(model).__name__, why, they, what)


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:3]) + ", ..." * (len(names) > 3)


def _try(
    trial: Trial, name: str, drafter: Drafter | None, reads: bool, running: Fingerprint,
    alone: bool = False,
) -> set[str]:  # fmt: skip
    """Raise a ValueError unless a trial succeeds; ``alone``: of steps of one token. Returns names
    of what changed as it ran, of that which may switch the model."""
    model = trial.model
    hooks = f" with hooks ({', '.join(sorted(running.hooks))})" if running.hooks else ""
    what = f"{type(model).__name__}{hooks} does not work with {name}"
    try:
        problem, error = (_ALONE, trial.run_alone()) if alone else trial.run(drafter, reads)
    except torch.OutOfMemoryError:
        raise
    except Exception as raised:
        raise ValueError(
            f"{what}: a trial raised {type(raised).__name__}: {str(raised).rstrip('.')}. Choose "
            "another strategy, or none."
        ) from raised
    if error <= tolerance(trial.dtypes):  # which NaN is not
        changed = trial.before.held ^ fingerprint(model).held
        return {name.split(maxsplit=1)[-1] for name, _ in changed}
    if running.hooks and problem == _NO_TREE:
        problem = _NO_HOOKS
    if model.training:
        problem = f"is in training mode, in which dropout may differ, or {problem}"
    raise ValueError(
        f"{what}: it {problem} (relative error {error:.2g} in a trial"
        f"{' with padding' * trial.padded})."
        f"{' Call model.eval() first.' * model.training}"
    )


class _Pruning:
    """Keeps only the longest path."""

    def __init__(self, layer: int, path: Sequence[int]):
        self.layer, self._path = layer, path

    def likely(self, hidden: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
        likely = torch.zeros_like(tree.valid)
        likely[:, self._path] = True
        return likely, -tree.depths.float()


class Trial:
    """Random prompts, the last one perhaps padded, and a tree after each: a root with children, of
    which the last has a child. The path there is what plain generation decodes, what pruning leaves
    and what is committed; the root follows it once more.

    Attributes:
        dtypes: what was computed in; known after :meth:`run`.
        before: how the model ran after plain generation, which may have made what is made once.
        rows_stay: see :class:`Verdict`; known after :meth:`run`.
    """

    before: Fingerprint
    rows_stay = False

    def __init__(self, model: Any, padded: bool = False, rows: int = 2, nodes: int = FEW):
        self.model, self.padded, self.dtypes = model, padded, {model.dtype}
        self.config = GenerationConfig(return_dict_in_generate=True, output_logits=True)
        self.config._pad_token_tensor = None
        children = [[rank] for rank in range(nodes - 2)]
        self.tree = TokenTree.from_paths([*children, [nodes - 3, 0]])
        self.path = [0, nodes - 2, nodes - 1]
        # A separate generator, so that the caller's seeded generator is not advanced.
        generator = torch.Generator("cpu").manual_seed(0)
        vocab = model.config.get_text_config(decoder=True).vocab_size
        ids = torch.randint(vocab, (rows, _PROMPT + nodes), generator=generator, device="cpu")
        self.prompt, self.nodes = ids.to(placement(model).device).split([_PROMPT, nodes], dim=1)
        self.mask = torch.ones_like(self.prompt)
        self.mask[-1, : _PADDING * padded] = 0

    def _inputs(self) -> dict[str, Any]:
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        return {
            # Without padding ``generate`` has none, too.
            **({"attention_mask": self.mask} if self.padded else {}),
            CACHE: empty_cache(self.model), "use_cache": True,
            **supported_kwargs(self.model, position_ids=positions, logits_to_keep=1),
            **only_logits(self.model),
        }  # fmt: skip

    def _target(self, drafter: Drafter | None, reads: Reads) -> Target:
        """The tree forward that continues the prompts."""
        inputs = self._inputs()
        sequences = Sequences(self.prompt, self.mask.bool(), _until(2 * _PROMPT))
        owner = CacheOwner(inputs[CACHE], sequences, False)
        probes = None if drafter is None else drafter.probe_inputs
        given = self.model, self.prompt, self.config, inputs, owner, probes, reads
        return Prompt(*given).run().target

    def run(self, drafter: Drafter | None, reads: bool) -> tuple[str, float]:
        """What is wrong if the error, which is the largest relative one, is too large.

        Args:
            drafter: see :func:`check_tree_forward`.
            reads: whether final states must be the inputs of the output embeddings.
        """
        model, rows, device = self.model, len(self.nodes), self.nodes.device
        *path, again = self._plain()
        expected = torch.stack(path, 1)
        target = self._target(drafter, Reads("last" if reads else None))
        if drafter is not None and drafter.drafting is not None:
            for node in range(2):
                chain = Tree.chain(self.nodes[:, : node + 1])
                target(chain, first=node, changes=drafter.drafting)
            target.cache.rollback()
        tree = Tree.of_shapes([self.tree] * rows, device).with_tokens(self.nodes)
        if drafter is not None and drafter.probe_inputs is not None:
            probes = len(drafter.probe_inputs.embeddings)
            under = [probes * (node in self.path) for node in range(len(self.tree))]
            tree = tree.attach_probes(ProbeGroup.causal(probes), [under] * rows)
        output = target(tree)
        if output.hidden is not None:
            hidden = output.hidden[:, : tree.num_tokens]
            error = _disagreement(output_logits(model, hidden), output.logits)
            if not error <= tolerance(self.dtypes):
                return _NO_STATES, error
        accepted, errors = self.path, [_error(output.logits[:, self.path], expected)]
        if drafter is not None and drafter.pruning is not None:
            output = target(tree, pruning=_Pruning(drafter.pruning.layer, self.path))
            accepted = [*range(len(self.path))]
            errors.append(_error(output.logits, expected))
        # The cache must then hold the accepted path as if it had been forwarded alone.
        nodes = torch.tensor([accepted] * rows, device=device)
        target.cache.commit([len(accepted)] * rows, nodes, output.tree.slots)
        errors.append(_error(target(Tree.roots(self.nodes[:, 0])).logits[:, 0], again))
        self.rows_stay = not self._error_of_moved(target, again) <= tolerance(self.dtypes)
        return _NO_TREE, _largest(errors)

    def _error_of_moved(self, target: Target, expected: Tensor) -> float:
        """The error after the root where rows come in another order, as when others end."""
        order = [*reversed(range(len(self.nodes)))]
        for part in (target.cache, target):
            part.select(order)
        return _error(target(Tree.roots(self.nodes[order, 0])).logits[:, 0], expected[order])

    def run_alone(self) -> float:
        """The largest relative error of steps of one token each."""
        expected, target = self._plain(), self._target(None, Reads())
        errors = []
        for node, plain in zip([*self.path, 0], expected, strict=True):
            logits = target(Tree.roots(self.nodes[:, node])).logits[:, 0]
            target.cache.commit([1] * len(self.nodes))
            errors.append(_error(logits, plain))
        return _largest(errors)

    def _plain(self) -> Sequence[Tensor]:
        """Plain generation's logits ``(rows, vocab)`` after each node of the path, and after the
        root once more."""
        forced, changes = self.nodes[:, [*self.path, 0]], Changes()
        changes.before(decoder_of(self.model), self._note_dtype)

        def force(ids: Tensor, scores: Tensor) -> Tensor:
            step = min(ids.shape[1] - _PROMPT, forced.shape[1] - 1)
            return torch.full_like(scores, -torch.inf).scatter_(1, forced[:, step, None], 0.0)

        output = changes.run(
            GenerationMixin._sample, self.model, self.prompt, LogitsProcessorList([force]),
            _until(_PROMPT + forced.shape[1] + 1), self.config, **self._inputs(),
        )  # fmt: skip
        logits: Sequence[Tensor] = output.logits
        self.before = fingerprint(self.model)
        return logits[1:]

    def _note_dtype(self, args: Any, kwargs: Any) -> None:
        """Before a forward: note the dtype of autocast, which may be on in the forward alone."""
        device = self.nodes.device.type
        if torch.is_autocast_enabled(device):
            self.dtypes.add(torch.get_autocast_dtype(device))


def _until(length: int) -> StoppingCriteriaList:
    return StoppingCriteriaList([MaxLengthCriteria(length)])


def _largest(errors: Sequence[float]) -> float:
    return float(torch.tensor(errors, device="cpu").max())  # NaN if any is


def _error(found: Tensor, expected: Tensor) -> float:
    """Largest relative error of logits (..., vocab)."""
    expected = expected.to(found.device).float()
    return float(((found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def _disagreement(found: Tensor, logits: Tensor) -> float:
    """How far the argmax of ``found`` is below that of ``logits``, relative to their spread."""
    logits = logits.float()
    best = logits.amax(-1)
    missed = best - logits.gather(-1, found.argmax(-1, keepdim=True))[..., 0]
    return float((missed / (best - logits.mean(-1))).max())


# -- The strategy that a generation config names, set up on a model for one call -------------------


@dataclass
class Strategy:
    """The strategy that a generation config names, set up on a model for one call.

    Attributes:
        timed: whether the amount of drafting may depend on step times.
        lookup: whether lookups are merged into the draft.
        samples: whether the call samples.
        kind: what compiled code and what is learned are kept by.
        graphs: compiled code for its steps; None if they are not compiled.
        recording: whether and when they are recorded.
        run: calls a function, whose forwards compute with packed copies of weights if there are
            any; else the model runs as it is, compiled if it is compiled.
        rows_stay: whether each forward must have all rows of the batch in their order, as hooks or
            modules may count on it.
        alone: whether steps are of one token, as code of the user's may tell tokens apart.
        runs: how the model runs, see :class:`Fingerprint`.
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
    recording: Recording
    run: Callable[..., Any]
    rows_stay: bool
    alone: bool
    runs: State

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
        drafter, samples = method.make_drafter(model, options, assistant), bool(config.do_sample)
        timed, lookup = resolve(options, drafter, samples)
        if recycles(options, drafter, samples):
            drafter.add(recycler(model, options))
        running = fingerprint(model)
        runs_as(model, running.tried)
        # Ranks must run the same trials, whatever their batches.
        rows = 2 if synced else rows
        verdict = check_tree_forward(model, method.name, drafter, padded or synced, running, rows)
        alone, rows_stay = verdict.alone, running.rows_stay or verdict.rows_stay
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
        graphs, recording = None, Recording()
        if compiles:
            prunes, disabled = drafter.pruning is not None, bool(config.disable_compile)
            call = CallFacts(running, rows, disabled, prunes, synced)
            graphs, recording = graphs_for(model, config, drafter, kind, call)
        return cls(
            model, method, options, drafter, timed, lookup, samples, kind, graphs, recording,
            packed.run if copies else operator.call, rows_stay, alone, running.state,
        )  # fmt: skip

    def after_shortage(self, kind: type[BaseException] | None, *_: Any) -> None:
        """At the end of a call: where memory did not suffice, whatever for, free what was recorded
        and kept for it."""
        short = kind is not None and issubclass(kind, torch.OutOfMemoryError)
        if short and self.graphs is not None:
            self.graphs.drop_all()

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


def recycles(options: DraftOptions, drafter: Drafter, do_sample: bool) -> bool:
    """Whether recycled candidates join the drafter's trees.

    Raises:
        ValueError: they are to, and it has no trees that grow.
    """
    if not options.recycle:
        return False
    predictor, drawn = drafter.predictor, samples_drafts(options, do_sample)
    grows = predictor is not None and predictor.static is None and not drawn
    if not grows:
        raise ValueError(
            "recycle=True: recycled candidates join trees that grow by probabilities, with "
            "tree='adaptive' and without acceptance='rejection'. Leave recycle out."
        )
    return True
