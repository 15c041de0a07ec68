"""Drafts with a tree whose unlikely nodes are pruned after the first layers: ProPD, section 4."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from hf_spec.adapters.module import Adapter
from hf_spec.core.checks import SHARE, count, setting
from hf_spec.core.limits import MAX_DRAFT_TOKENS
from hf_spec.core.pruning import connected
from hf_spec.core.transfer import to_device
from hf_spec.core.tree import Tree
from hf_spec.drafting.drafter import FORWARDS, Drafter
from hf_spec.drafting.heads import HeadDrafter
from hf_spec.drafting.options import TREE_OPTIONS, DraftOptions, refuse
from hf_spec.methods.propd.adapter import BIAS, GAIN, MATRIX, early_states
from hf_spec.methods.propd.online_tree import HIT_ALPHA, ONLINE, RANKS, OnlineDrafter
from hf_spec.methods.registry import Method, get_method
from hf_spec.model.hidden_states import gather_hidden, model_logits
from hf_spec.modeling_patches.linear_attention import recurrent_rules
from hf_spec.modeling_patches.modules import num_layers
from hf_spec.modeling_patches.weights import placement

#: Value of ``drafter`` for the adapter's own heads.
HEADS = "heads"


@dataclass(frozen=True)
class ProPDOptions(DraftOptions):
    """Options of ``propd`` (ProPD, section 4).

    Attributes:
        tree, num_draft_tokens, max_depth: for the adapter's own heads, as in ``medusa``. ``online``
            is ProPD's dynamic token tree generation (section 4.2).
        drafter: ``heads``, the adapter's own; or another strategy with one forward per step, whose
            trees are pruned. Its adapter must be active, too.
        drafter_kwargs: options of that strategy.
        prune: whether to drop unlikely draft tokens after the adapter's ``prune_layer`` (section
            4.1).
        prune_top_k: k, from 1: draft tokens that are not among the k likeliest tokens after their
            parent are dropped; None for the adapter's value. In a batch all rows keep equally many:
            as many as are among them in all rows together.
        hit_alpha, hit_ranks: with ``tree="online"`` (section 4.2.2): least weight of a new token in
            the accuracies, in (0, 1], and K, the number of ranks that have one.
    """

    drafter: str = setting(HEADS, only={"prune": (True,)})
    drafter_kwargs: dict[str, Any] = field(default_factory=dict)
    prune: bool = setting(False)
    prune_top_k: int | None = setting(None, rule=count(), only={"prune": (True,)})
    hit_alpha: float = setting(HIT_ALPHA, rule=SHARE, only={"tree": (ONLINE,)})
    hit_ranks: int = setting(RANKS, rule=count(1, MAX_DRAFT_TOKENS), only={"tree": (ONLINE,)})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.drafter_kwargs, dict):
            raise ValueError(f"drafter_kwargs={self.drafter_kwargs!r}: give a dict of options.")
        if self.drafter != HEADS:
            drafting_method(self)
        elif self.drafter_kwargs:
            raise ValueError(
                f"drafter_kwargs={self.drafter_kwargs!r} with the adapter's own heads: their "
                "options are propd's own (tree, max_depth)."
            )


def drafting_method(options: ProPDOptions) -> Method:
    """The strategy that the option ``drafter`` names.

    Raises:
        ValueError: there is no such strategy, its trees cannot be pruned, or its options are
            invalid.
    """
    name = options.drafter
    method = get_method(name) if isinstance(name, str) else None
    if method is None or method.wraps is not None:
        raise ValueError(f"drafter={name!r}: give {HEADS!r}, or the name of another strategy.")
    if method.drafter.runs == FORWARDS:
        raise ValueError(
            f"drafter={name!r} runs the model to draft: only the trees of strategies with one "
            "forward per step are pruned."
        )
    refuse(
        options, TREE_OPTIONS,
        f"with drafter={name!r}: it is an option of the adapter's heads. Put the drafter's own "
        "into drafter_kwargs.",
    )  # fmt: skip
    for one in fields(DraftOptions):
        if one.name in options.drafter_kwargs and one.name not in TREE_OPTIONS:
            raise ValueError(
                f"drafter_kwargs: {one.name!r} is an option of the whole strategy; give it to "
                "propd itself."
            )
    method.parse_options(options.drafter_kwargs)
    return method


class EarlyPruning:
    """Drops draft tokens that are unlikely by the early head, which reads the states behind so many
    layers, and their subtrees; see :class:`hf_spec.core.pruning.Pruning`."""

    def __init__(self, model: Any, weights: Mapping[str, Tensor], layer: int, top_k: int):
        dtype = placement(model).dtype  # of hidden states
        names = (MATRIX, BIAS, GAIN)
        self.model, self.layer, self.top_k = model, layer, top_k
        self.weights = {name: weights[name].detach().to(dtype) for name in names}

    def likely(self, hidden: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
        inner, place = (part.to(hidden.device) for part in _inner(tree))
        tokens = tree.tokens.to(hidden.device)
        # Only nodes with children need predictions.
        states = early_states(self.weights, gather_hidden(hidden, inner)).to(hidden)
        logits = model_logits(self.model, states).float()
        own = logits.flatten(1).gather(1, place * logits.shape[-1] + tokens)
        count = min(self.top_k, logits.shape[-1])
        least = logits.topk(count, dim=-1).values[..., -1].gather(1, place)
        log_p = own - logits.logsumexp(-1).gather(1, place)
        log_p[:, 0] = 0.0
        wanted, log_p = (own >= least).to(tree.valid.device), log_p.to(tree.valid.device)
        return connected(tree, wanted), (tree.ancestors * log_p[:, None, :]).sum(-1)


def _inner(tree: Tree) -> tuple[Tensor, Tensor]:
    """Nodes with children ``(batch, inner)``, padded with roots, and each node's parent among them
    ``(batch, tokens)``."""
    assert tree.host is not None
    above = tree.host.parents.tolist()
    rows = [sorted({0, *row[1 : size + 1]}) for row, size in zip(above, tree.row_sizes)]
    most = max(map(len, rows))
    inner = [row + [0] * (most - len(row)) for row in rows]
    at = [{node: index for index, node in enumerate(row)} for row in rows]
    place = [[index.get(node, 0) for node in row] for index, row in zip(at, above)]
    device = tree.parents.device
    return to_device(inner, device), to_device(place, device)


class ProPDDrafter(HeadDrafter):
    """The trees of the adapter's heads.

    Draft tokens are never sampled, as pruning depends on their tokens.
    """

    trees = {**HeadDrafter.trees, ONLINE: None}


def make_drafter(model: Any, options: ProPDOptions, adapter: Adapter) -> Drafter:
    """The drafter of the heads, or of another strategy; with early pruning if it is asked for."""
    drafter: Drafter
    if options.drafter == HEADS:
        kind = OnlineDrafter if options.tree == ONLINE else ProPDDrafter
        drafter = kind(model, options, adapter)
    else:
        method = drafting_method(options)
        drafter = method.make_drafter(model, method.parse_options(options.drafter_kwargs))
    if options.prune:
        layer, top_k = adapter.config.prune_layer, adapter.config.prune_top_k
        _check_prunable(drafter, layer)
        weights = adapter.tensors()
        drafter.pruning = EarlyPruning(model, weights, layer, options.prune_top_k or top_k)
    return drafter


def _check_prunable(drafter: Drafter, layer: int) -> None:
    """Raise a ValueError if prompt tokens leave the model before draft tokens are pruned, or layers
    have recurrent states, which are computed of all nodes."""
    if recurrent_rules(drafter.model):
        raise ValueError(
            f"prune=True: {type(drafter.model).__name__} has recurrent layers, which run on all "
            "draft tokens or none. Leave it out."
        )
    exits = 1 if drafter.probe_inputs is None else drafter.probe_inputs.exits
    layers = num_layers(drafter.model)
    if layers - exits < layer:
        raise ValueError(
            f"the drafter's adapter averages the last {exits} of {layers} layers, and "
            f"draft tokens are pruned after layer {layer}: leave prune=True out, or train "
            "an early head for fewer layers."
        )
