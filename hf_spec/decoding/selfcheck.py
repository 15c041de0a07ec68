"""A self-check of the tree forward on models that our tests do not cover.

Those are other architectures, and all models that are not as Transformers has made them: with hooks
or attention of their users' own, or other modules. It runs once for each way in which a model runs
and kind of forward: small trees after a short random prompt must give the logits of plain
generation along each path. A model that mishandles explicit masks or positions, or a drafter's
changes, is refused here; otherwise it would silently generate wrong tokens, or fail in the middle
of a call.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from hf_spec.core.memory import memory
from hf_spec.core.probes import ProbeGroup
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree import Tree
from hf_spec.decoding.cache_owner import CacheOwner
from hf_spec.decoding.call_sequences import Sequences
from hf_spec.decoding.prefill import Prompt
from hf_spec.drafting.drafter import Drafter
from hf_spec.model.hidden_states import Reads, output_logits, supported_kwargs
from hf_spec.model.rounding import tolerance
from hf_spec.model.target import Target
from hf_spec.modeling_patches.cache_name import CACHE
from hf_spec.modeling_patches.fingerprint import Fingerprint, fingerprint
from hf_spec.modeling_patches.modules import decoder_of, only_logits
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.modeling_patches.support import VERIFIED, empty_cache
from hf_spec.modeling_patches.weights import placement

#: The root with two children, of which the second has a child; and the path there, which plain
#: generation decodes, which pruning leaves, and which is committed. The root follows it once more.
_TREE, _PATH = TokenTree.from_paths([[0], [1], [1, 0]]), [0, 2, 3]
_PROMPT, _PADDING = 8, 3
#: Number of verdicts that are kept for a model.
KEPT = 64

_NO_TREE = (
    "does not take explicit masks and positions as tree attention needs them. Generate without "
    "assistant_strategy, or try attn_implementation='eager'"
)
_NO_HOOKS = (
    "computes other logits over a tree's tokens than token by token. Remove the hooks if they tell "
    "tokens of a forward apart, or generate without assistant_strategy"
)
_NO_STATES = (
    "makes its logits of more than its decoder's final states, which heads and probes are read "
    "from. Choose prompt_lookup, layer_skip, or none"
)


@torch.no_grad()
def check_tree_forward(
    model: Any, name: str, drafter: Drafter | None = None, padded: bool = False,
    running: Fingerprint | None = None, rows: int = 2,
) -> None:  # fmt: skip
    """Raise a ValueError unless the model's tree forward equals plain generation; free for known
    models that are as Transformers has made them.

    Args:
        name: name of the feature that needs it, for errors.
        drafter: a drafter whose changes to forwards are checked, too. None if final states are
            read instead.
        padded: whether a call may have padding; equal on all ranks that share the model.
        running: how the model runs; None to find out.
        rows: the call's batch size, which hooks may count on; likewise equal on all ranks.
    """
    running = fingerprint(model) if running is None else running
    if running.stock and model.config.get_text_config(decoder=True).model_type in VERIFIED:
        return
    rows = rows if running.rows_stay else 2
    kind = None if drafter is None else drafter.kind_of_forward
    key = running.state, rows, padded, kind
    checked: dict[Hashable, None] = memory(model).setdefault("self-checks", {})
    if key in checked:
        return
    reads = drafter is None or (drafter.reads.tokens is not None and not drafter.reads.layers)
    _try(Trial(model, padded, rows), name, drafter, reads, running)
    checked[key] = None
    for old in [*checked][:-KEPT]:
        checked.pop(old, None)


def _try(
    trial: Trial, name: str, drafter: Drafter | None, reads: bool, running: Fingerprint
) -> None:
    """Raise a ValueError unless a trial succeeds."""
    model = trial.model
    hooks = f" with hooks ({', '.join(sorted(running.hooks))})" if running.hooks else ""
    what = f"{type(model).__name__}{hooks} does not work with {name}"
    try:
        problem, error = trial.run(drafter, reads)
    except torch.OutOfMemoryError:
        raise
    except Exception as raised:
        raise ValueError(
            f"{what}: a trial raised {type(raised).__name__}: {raised} Choose another strategy, or "
            "none."
        ) from raised
    if error <= tolerance(trial.dtypes):  # which NaN is not
        return
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

    def __init__(self, layer: int):
        self.layer = layer

    def likely(self, hidden: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
        likely = torch.zeros_like(tree.valid)
        likely[:, _PATH] = True
        return likely, -tree.depths.float()


class Trial:
    """Random prompts, the last one perhaps padded, and a tree after each.

    Attributes:
        dtypes: what was computed in; known after :meth:`run`.
    """

    def __init__(self, model: Any, padded: bool = False, rows: int = 2):
        self.model, self.padded, self.dtypes = model, padded, {model.dtype}
        self.config = GenerationConfig(return_dict_in_generate=True, output_logits=True)
        self.config._pad_token_tensor = None
        # A separate generator, so that the caller's seeded generator is not advanced.
        generator = torch.Generator("cpu").manual_seed(0)
        vocab, nodes = model.config.get_text_config(decoder=True).vocab_size, len(_TREE)
        ids = torch.randint(vocab, (rows, _PROMPT + nodes), generator=generator, device="cpu")
        self.prompt, self.nodes = ids.to(placement(model).device).split([_PROMPT, nodes], dim=1)
        self.mask = torch.ones_like(self.prompt)
        self.mask[-1, : _PADDING * padded] = 0

    def _inputs(self) -> dict[str, Any]:
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        return {
            "attention_mask": self.mask, CACHE: empty_cache(self.model), "use_cache": True,
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
        tree = Tree.of_shapes([_TREE] * rows, device).with_tokens(self.nodes)
        if drafter is not None and drafter.probe_inputs is not None:
            probes = len(drafter.probe_inputs.embeddings)
            tree = tree.attach_probes(ProbeGroup.causal(probes))
        output = target(tree)
        if output.hidden is not None:
            hidden = output.hidden[:, : tree.num_tokens]
            error = _disagreement(output_logits(model, hidden), output.logits)
            if not error <= tolerance(self.dtypes):
                return _NO_STATES, error
        accepted, errors = _PATH, [_error(output.logits[:, _PATH], expected)]
        if drafter is not None and drafter.pruning is not None:
            output = target(tree, pruning=_Pruning(drafter.pruning.layer))
            accepted = [*range(len(_PATH))]
            errors.append(_error(output.logits, expected))
        # The cache must then hold the accepted path as if it had been forwarded alone.
        nodes = torch.tensor([accepted] * rows, device=device)
        target.cache.commit([len(accepted)] * rows, nodes, output.tree.slots)
        errors.append(_error(target(Tree.roots(self.nodes[:, 0])).logits[:, 0], again))
        return _NO_TREE, float(torch.tensor(errors, device="cpu").max())  # NaN if any is

    def _plain(self) -> Sequence[Tensor]:
        """Plain generation's logits ``(rows, vocab)`` after each node of the path, and after the
        root once more."""
        forced, changes = self.nodes[:, [*_PATH, 0]], Changes()
        changes.before(decoder_of(self.model), self._note_dtype)

        def force(ids: Tensor, scores: Tensor) -> Tensor:
            step = min(ids.shape[1] - _PROMPT, forced.shape[1] - 1)
            return torch.full_like(scores, -torch.inf).scatter_(1, forced[:, step, None], 0.0)

        output = changes.run(
            GenerationMixin._sample, self.model, self.prompt, LogitsProcessorList([force]),
            _until(_PROMPT + forced.shape[1] + 1), self.config, **self._inputs(),
        )  # fmt: skip
        logits: Sequence[Tensor] = output.logits
        return logits[1:]

    def _note_dtype(self, args: Any, kwargs: Any) -> None:
        """Before a forward: note the dtype of autocast, which may be on in the forward alone."""
        device = self.nodes.device.type
        if torch.is_autocast_enabled(device):
            self.dtypes.add(torch.get_autocast_dtype(device))


def _until(length: int) -> StoppingCriteriaList:
    return StoppingCriteriaList([MaxLengthCriteria(length)])


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
