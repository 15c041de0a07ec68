"""``propd``: Medusa heads with early pruning and trees made while decoding (ProPD)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad

from hf_spec.adapters.layer import Adapter
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.checks import MAX_DRAFT_TOKENS, SHARE, check_count, count, setting
from hf_spec.core.device import is_async, to_device
from hf_spec.core.pruning import connected
from hf_spec.core.tree import Tree, filled
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.draft.drafter import Drafter
from hf_spec.draft.grow import Children, Frontier
from hf_spec.draft.learned import Array
from hf_spec.draft.options import TREE_OPTIONS, DraftOptions, refuse
from hf_spec.draft.predictor import FORWARDS, DecodeState
from hf_spec.methods.registry import Method, get_method
from hf_spec.modeling_patches.forwards import layer_input
from hf_spec.modeling_patches.linear_attention import recurrent_rules
from hf_spec.modeling_patches.modules import num_layers
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.modeling_patches.weights import output_features, placement
from hf_spec.predict.losses import Ahead, heads_loss, mean_loss, own_predictions, prediction_losses
from hf_spec.predict.table import HeadPredictor, HeadsAdapter, HeadsConfig, Predictions, reweighed
from hf_spec.target.hidden_states import gather_hidden, model_logits
from hf_spec.target.sequences import token_hidden
from hf_spec.threads import locked, recall

# -- The PROPD adapter: the heads of Medusa, and the early head that prunes ------------------------
#
# Zhong et al., "ProPD: Dynamic Token Tree Pruning and Generation for LLM Parallel Decoding" (2024),
# section 4.1. The early head maps hidden states after the first layers to final ones, for the
# model's own output embeddings: ``gain * rms_norm(h + A h + b)``, the form of the tuned lens
# (Belrose et al., "Eliciting Latent Predictions from Transformers with the Tuned Lens", 2023). On a
# 22M model, after layer 4, its 50 likeliest tokens contain the model's own at 82 % of positions; a
# residual block as in Medusa's heads reaches 73 % (docs/methods/propd.md).

#: Default number of layers before pruning (section 5.3).
PRUNE_LAYER = 4


@dataclass
class ProPDConfig(HeadsConfig):
    """Config of a PROPD adapter."""

    type_name: ClassVar[str] = "PROPD"

    prune_layer: int | None = setting(
        None,
        "Layers that run on the whole tree; the early prediction head reads the hidden states "
        f"behind them.  [default: {PRUNE_LAYER}, or all but one where there are fewer]",
        count(),
    )
    prune_top_k: int = setting(
        50, "k: draft tokens that are not among the early head's k likeliest tokens are dropped.",
        count(),
    )  # fmt: skip

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        layers = num_layers(model)
        if layers < 2:
            raise ValueError(
                "the model has 1 layer: there are no deeper ones to leave draft tokens out of. Use "
                "medusa."
            )
        if self.prune_layer is None:
            self.prune_layer = min(PRUNE_LAYER, layers - 1)
        why = f"The model has {layers} layers, behind the last of which nothing is left to save."
        check_count("prune_layer", self.prune_layer, 1, layers - 1, why)


#: Names of the head's parameters: A (hidden, hidden), b (hidden,) and gain (hidden,).
MATRIX, BIAS, GAIN = "early_matrix", "early_bias", "early_gain"
EPSILON = 1e-6


def early_states(weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    """Apply the early head to hidden states, ``(..., hidden)``, in its parameters' dtype."""
    hidden = hidden.to(weights[MATRIX])
    moved = hidden + functional.linear(hidden, weights[MATRIX], weights[BIAS])
    wide = moved.to(torch.promote_types(moved.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return wide.to(moved.dtype) * weights[GAIN]


class ProPDAdapter(HeadsAdapter):
    """The parameters of the heads, and ``early_matrix`` (hidden, hidden), ``early_bias`` (hidden,)
    and ``early_gain`` (hidden,) of the early head."""

    def __init__(self, config: ProPDConfig, model: Any) -> None:
        super().__init__(config, model)
        hidden, _ = output_features(model)
        inside = model.config.get_text_config(decoder=True).hidden_size
        if inside != hidden:
            raise ValueError(
                f"{type(model).__name__} has layers of size {inside} and output embeddings of "
                f"{hidden}: an early head would have to be projected. Use medusa."
            )
        matrix, bias, gain = torch.zeros(hidden, hidden), torch.zeros(hidden), torch.ones(hidden)
        self.hold({MATRIX: matrix, BIAS: bias, GAIN: gain})


def loss(model: Any, adapter: Adapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """The heads' loss plus that of the early head, which predicts token t + 1 at each anchor t.

    With ``loss="hard"``, the latter is the cross-entropy of the answer's token, with
    ``distillation`` the KL divergence from the model's distribution: a mean over the anchors of a
    sequence, then over sequences. The early head shares no parameters with the other heads, so the
    losses need no weights.
    """
    config: Any = adapter.config
    changes = Changes()
    seen = layer_input(model, changes, config.prune_layer)
    hidden = changes.run(token_hidden, model, batch.input_ids, batch.attention_mask)
    found = heads_loss(model, adapter, batch, hidden)
    states = early_states(
        adapter.tensors(), gather_hidden(seen[0].to(hidden.device), batch.anchors)
    )
    logits = model_logits(model, states.to(hidden))[:, :, None]
    ahead = Ahead.of(batch, 1, hidden.device, first=0)
    own = own_predictions(model, hidden, ahead.columns) if config.loss == "distillation" else None
    early = mean_loss(prediction_losses(logits, ahead.wanted, own), logits, ahead.wanted)
    return {**found, "loss": found["loss"] + early["loss"]}


# -- ProPD's dynamic token tree generation (``tree="online"``): section 4.2 of the paper -----------
#
# While decoding, it counts how often the k likeliest tokens of each distance contain the right one;
# a path's probability follows from its ranks (section 4.2.2). The policy chooses the number of
# draft tokens, by the step times that it learns (sections 4.2.1 and 4.2.3).

#: Value of the option ``tree``.
ONLINE = "online"
#: Weight alpha of a new hit, and K, number of ranks that are distinguished, unless options say so.
HIT_ALPHA, RANKS = 1 / 128, 16
#: Number of hits that the initial guess stands for.
GUESSED = 16
#: Steps whose hits are counted at once where the host would wait for each.
COUNTED = 16


class HitRates:
    """P_i^k: how often the right token is among the k likeliest at distance i.

    Args:
        depth: number of distances.
        alpha: least weight of a new hit.
        ranks: K.

    Attributes:
        cumulative: ``(depth, K)`` P, at [i - 1, k - 1].
        counts: ``(depth,)`` hits and misses that it stands for.
    """

    def __init__(self, depth: int, alpha: float = HIT_ALPHA, ranks: int = RANKS):
        self.alpha, self.ranks = alpha, ranks
        # Typical of trained heads: the accuracy of the first rank falls with distance, that of the
        # others hardly (docs/methods/medusa.md).
        first = 0.55 * 0.85 ** np.arange(depth)[:, None]
        others = np.broadcast_to(0.1 / np.arange(1, ranks), (depth, ranks - 1))
        self.cumulative: Array = np.concatenate([first, others], axis=1).cumsum(1).clip(max=1.0)
        self.counts: Array = np.full(depth, GUESSED)
        self._on_device: dict[torch.device, Tensor] = {}

    def observe(self, distance: int, rank: int) -> None:
        """P <- (1 - alpha) P + alpha [the token is among the k likeliest].

        Args:
            distance: from 1.
            rank: of the right token, from 0; K for a miss.
        """
        row, hits = self.cumulative[distance - 1], rank <= np.arange(self.ranks)
        # At first, a plain mean.
        alpha = max(self.alpha, 1 / (self.counts[distance - 1] + 1))
        row += alpha * (hits - row)
        self.counts[distance - 1] += 1

    @property
    def chances(self) -> Array:
        """``(depth, K)`` p_i^k = P_i^k - P_i^(k-1)."""
        return np.diff(self.cumulative, axis=1, prepend=0.0).clip(min=0.0)

    @locked
    def chances_on(self, device: torch.device) -> Tensor:
        """:attr:`chances` on a device, float32, always in the same memory."""
        with torch.inference_mode(False):  # written to in both modes
            found = to_device(self.chances.astype(np.float32), device)
            return self._on_device.setdefault(device, found).copy_(found)


class Ranked:
    """Predictions scored by the probabilities ``(depth, K)`` of their ranks."""

    def __init__(self, predictions: Predictions, chances: Tensor):
        self._predictions, self._chances = predictions, chances

    def expand(self, frontier: Frontier) -> Children | None:
        found = self._predictions.expand(frontier)
        if found is None:
            return None
        own, row = found.log_probs, self._chances[frontier.depth, : found.log_probs.shape[-1]]
        order = own.argsort(dim=-1, descending=True, stable=True)
        probs = pad(row, (0, own.shape[-1] - len(row))).to(own.device).log().expand_as(own)
        ranked = torch.empty_like(probs).scatter_(-1, order, probs)
        return Children(found.tokens, ranked.masked_fill(own == -torch.inf, -torch.inf))


class OnlinePredictor(HeadPredictor):
    """Trees of the heads' likeliest ranks.

    Attributes:
        hits: how often predictions are right, by distance; updated.
    """

    weighs = False
    held = (*HeadPredictor.held, "_chances")
    of_rows = (*HeadPredictor.of_rows, "_made")
    #: Of the trees that have grown last, and of this step's with their root: see :meth:`learn`.
    _made: tuple[Any, ...] = ()
    _predicted: Sequence[Any] = ()

    def __init__(self, model: Any, options: Any, adapter: Adapter):
        super().__init__(model, options, adapter)
        key = self.depth, options.hit_alpha, options.hit_ranks
        self.hits = recall(model, (HitRates, adapter.name, *key), lambda: HitRates(*key))
        self._chances = self.hits.chances_on(placement(model).device)
        #: Of steps that are not counted yet, the likeliest tokens (batch, depth, K), and what came.
        self._uncounted: list[tuple[Tensor, list[Sequence[int]]]] = []

    def static_states(self, adapter: Adapter) -> None:
        return None

    @property
    def _num_made(self) -> int:
        return 1 if self.markov_head is None else 3

    def renewed(self) -> Sequence[Tensor]:
        return self._made

    def received(self, found: Iterator[Tensor], result: StepResult) -> None:
        super().received(found, result)
        self._made = tuple(islice(found, self._num_made))

    def join(self, other: Self) -> None:
        self._made = other._made = ()  # what comes next is not learned from
        super().join(other)

    def levels(self, root: Tensor, depth: int, width: int, noise: Tensor | None = None) -> Any:
        made = super().levels(root, depth, max(width, self.hits.ranks))
        self._made = (made.tokens, made.log_probs, made.states)[: self._num_made]
        return Ranked(made, self._chances)

    def proposed(self, root: Tensor) -> None:
        self._predicted = (root, *self._made) if self._made else ()

    @locked
    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        if self._predicted:
            self.learn_ranks(result.tokens, *self._predicted)
        self._predicted = ()

    def learn_ranks(
        self, emitted: Sequence[Sequence[int]], root: Tensor, tokens: Tensor, *given: Any
    ) -> None:
        """Learn from what each sequence emitted after its root ``(batch,)``.

        Args:
            tokens: what was predicted, see :attr:`Predictions.tokens`.
            given: for a Markov head, the other two arguments of :func:`reweighed`.
        """
        depth = tokens.shape[1]
        if self.markov_head is not None:
            before = [[*row, *[0] * depth][: depth - 1] for row in emitted]
            later = to_device(before, root.device, root.dtype).view(len(emitted), -1)
            previous = torch.cat([root[:, None], later], 1).to(tokens.device)[:, :, None]
            found = reweighed(self.markov_head, previous, tokens, *given)[:, :, 0]
            tokens = tokens.gather(2, found.argsort(stable=True, dim=-1, descending=True))
        came = [row[:depth] for row in emitted]
        self._uncounted.append((tokens[..., : self.hits.ranks], came))
        if len(self._uncounted) >= (COUNTED if is_async(tokens.device) else 1):
            self._count()

    def _count(self) -> None:
        """Count hits and misses, in one transfer."""
        steps, self._uncounted = self._uncounted, []
        if not steps:
            return
        best = iter(torch.cat([order.flatten(0, 1) for order, _ in steps]).tolist())
        for order, came in steps:
            for tokens in came:
                likeliest = list(islice(best, order.shape[1]))
                for distance, (ranks, token) in enumerate(zip(likeliest, tokens), 1):
                    rank = ranks.index(token) if token in ranks else self.hits.ranks
                    self.hits.observe(distance, rank)
        self.hits.chances_on(self._chances.device)

    @locked
    def details(self) -> dict[str, Any]:
        self._count()
        return {"online": {"hits": self.hits.cumulative.tolist()}}


# -- Drafts with a tree whose unlikely nodes are pruned after the first layers: ProPD, section 4 ---

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
    if method.declares.runs == FORWARDS:
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
    at = [{node: index for index, node in enumerate(row)} for row in rows]
    place = [[index.get(node, 0) for node in row] for index, row in zip(at, above)]
    device = tree.parents.device
    return to_device(filled(rows), device), to_device(place, device)


class ProPDPredictor(HeadPredictor):
    """The trees of the adapter's heads.

    Draft tokens are never sampled, as pruning depends on their tokens.
    """

    trees = {**HeadPredictor.trees, ONLINE: None}


def make_drafter(model: Any, options: ProPDOptions, adapter: Adapter) -> Drafter:
    """The drafter of the heads, or of another strategy; with early pruning if it is asked for."""
    if options.drafter == HEADS:
        kind = OnlinePredictor if options.tree == ONLINE else ProPDPredictor
        drafter = Drafter(model, options, kind(model, options, adapter))
    else:
        method = drafting_method(options)
        drafter = method.make_drafter(model, method.parse_options(options.drafter_kwargs))
    if options.prune:
        layer, top_k = adapter.config.prune_layer, adapter.config.prune_top_k
        _check_prunable(drafter, options.drafter, layer)
        weights = adapter.tensors()
        drafter.pruning = EarlyPruning(model, weights, layer, options.prune_top_k or top_k)
    return drafter


def _check_prunable(drafter: Drafter, name: str, layer: int) -> None:
    """Raise a ValueError if prompt tokens leave the model before draft tokens are pruned, the
    drafter reads layers that pruned ones do not reach, or layers have recurrent states, which are
    computed of all nodes; ``name``: the option ``drafter``."""
    if drafter.reads.layers:
        raise ValueError(
            f"drafter={name!r} with prune=True: it reads the states of layers "
            f"{list(drafter.reads.layers)}, which the draft tokens that are pruned do not reach. "
            "Leave prune=True out, or name another drafter."
        )
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


METHOD = Method(
    name="propd",
    summary="heads predict the next tokens; an early head can drop unlikely ones",
    options=ProPDOptions,
    predictor=ProPDPredictor,
    make=make_drafter,
    adapter_config=ProPDConfig,
    adapter_module=ProPDAdapter,
    objective=loss,
    needs_adapter=True,
    training={"learning_rate": 3e-3, "num_train_epochs": 8},
    wraps="drafter",
)
