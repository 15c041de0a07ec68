"""``layer_skip``: the model drafts with some of its layers (Draft & Verify)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.layer import ALPHA, Adapter, LowRankAdapter, check_targets
from hf_spec.adapters.loading import find_active
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.checks import (
    MAX_RANK,
    check_count,
    choice,
    count,
    distinct_layers,
    number,
    setting,
)
from hf_spec.core.device import to_device
from hf_spec.core.shapes import ProbeGroup, Row, TokenTree
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, sample
from hf_spec.draft.grow import Children, Frontier, GoesOn
from hf_spec.draft.options import AUTO, DraftOptions, key_of, samples_drafts
from hf_spec.draft.policy import DraftExit, LevelCost
from hf_spec.draft.predictor import FORWARDS, DecodeState, Predictor
from hf_spec.methods.registry import Method
from hf_spec.modeling_patches.forwards import LayerSkipper
from hf_spec.modeling_patches.low_rank import MergedCopies
from hf_spec.modeling_patches.modules import linear_modules
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.modeling_patches.weights import placement
from hf_spec.predict.losses import Ahead, mean_loss, own_predictions, prediction_losses
from hf_spec.predict.table import distribution
from hf_spec.target.hidden_states import model_logits
from hf_spec.target.noise import as_sampled
from hf_spec.target.sequences import probe_sequences
from hf_spec.target.target import ProbeInputs
from hf_spec.threads import locked, recall

# -- Options of ``layer_skip``, and when it stops drafting -----------------------------------------

#: Values of ``draft_exit``: the policy's exit, then those of the paper.
POLICY = "policy"
EXITS = (POLICY, "adaptive", "threshold", "fixed")
#: K of the paper by default.
MOST_DRAFTED = 12
#: Where gamma adapts, and where there is one.
ADAPTING = {"draft_exit": (POLICY, "adaptive")}
GAMMA = {"draft_exit": (POLICY, "adaptive", "threshold")}
SHARE = number(0.0, 1.0)


@dataclass(frozen=True)
class LayerSkipOptions(DraftOptions):
    """Options of ``layer_skip`` (Draft & Verify, section 3.4; defaults of its table 6).

    Drafts are greedy, or sampled if the call samples and ``acceptance="rejection"`` (algorithm 4).

    Attributes:
        skip_attention, skip_mlp: layers whose attention (or recurrence) / MLP the draft leaves out.
            None takes those of the active ``LAYER_SKIP`` adapter.
        draft_exit: when to stop drafting. ``policy``: when the next token is not worth the time of
            its forward; drafts are then trees, whose size the policy chooses.
            ``adaptive`` and ``threshold`` stop after a token whose draft probability is below
            gamma, which is adapted by eqs. (2)-(4) or fixed. ``fixed`` drafts ``num_draft_tokens``.
            Under ``adaptive``, a call continues with the gamma of the previous one. ``policy`` is
            ``adaptive`` if nothing may depend on time, or if the call samples its draft tokens.
        num_draft_tokens: K, most tokens drafted in a step; ``auto``: 12.
        threshold: gamma, its initial value under ``adaptive`` and ``policy``.
        threshold_step: epsilon of eq. (3).
        beta1, beta2: smoothing of the acceptance rate and of gamma.
        target_acceptance: alpha, the acceptance rate that ``adaptive`` aims at.
    """

    former_names = {"max_draft": "num_draft_tokens"}

    skip_attention: Sequence[int] | None = None
    skip_mlp: Sequence[int] | None = None
    draft_exit: str = setting(POLICY, rule=choice(*EXITS))
    threshold: float = setting(0.6, rule=SHARE, only=GAMMA)
    threshold_step: float = setting(0.01, rule=SHARE, only=ADAPTING)
    beta1: float = setting(0.5, rule=SHARE, only=ADAPTING)
    beta2: float = setting(0.9, rule=SHARE, only=ADAPTING)
    target_acceptance: float = setting(0.85, rule=SHARE, only=ADAPTING)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("skip_attention", "skip_mlp"):
            layers = getattr(self, name)
            if layers is not None:
                object.__setattr__(self, name, sorted(distinct_layers(name, layers)))

    @property
    def most(self) -> int:
        """K: most tokens drafted in a step."""
        return MOST_DRAFTED if self.num_draft_tokens == AUTO else int(self.num_draft_tokens)


class ThresholdExit(DraftExit):
    """Decides when to stop drafting: by what it costs, or by gamma (section 3.4, eqs. (2)-(4)).

    A drafting stage moves gamma by (1 - beta2) epsilon, 0.001 with the paper's numbers, so adapting
    takes hundreds of stages.

    Attributes:
        gamma: draft probability below which drafting stops.
        acceptance: AR, smoothed; None before the first stage.
    """

    def __init__(self, options: LayerSkipOptions):
        super().__init__(options.most)
        self.options = options
        self.gamma = options.threshold
        self.acceptance: float | None = None

    @property
    def by_confidence(self) -> bool:
        """Whether draft probabilities decide."""
        return self.options.draft_exit != "fixed"

    def go_on(self, confidence: float) -> bool:
        """Whether to draft another token after one of this draft probability."""
        return not self.by_confidence or confidence >= self.gamma

    @locked
    def update(self, acceptance: float) -> None:
        """Adapt gamma to AR_e, the acceptance rate of drafting stage e over all sequences."""
        if self.options.draft_exit not in (POLICY, "adaptive"):
            return
        o = self.options
        beta1 = o.beta1 if self.acceptance is not None else 0.0
        smoothed = beta1 * (self.acceptance or 0.0) + (1 - beta1) * acceptance  # eq. (2)
        step = o.threshold_step if smoothed <= o.target_acceptance else -o.threshold_step
        gamma = o.beta2 * self.gamma + (1 - o.beta2) * (self.gamma + step)  # eqs. (3), (4)
        # Values beyond [0, 1] have the same effect, but returning from them would take long.
        self.gamma = min(max(gamma, 0.0), 1.0)
        self.acceptance = smoothed


# -- The LAYER_SKIP adapter: the sublayers that drafting skips, and low-rank updates of the rest ---
#
# The updates, if there are any, are trained by distillation from the full model (Draft & Verify,
# appendix F). As in decoding, draft tokens see the full model's KV cache: the full model
# runs over a sequence once, and the drafting model runs over short pieces of it, as if they were
# drafted.


@dataclass
class LayerSkipConfig(SpecPeftConfig):
    """Attention and MLP sublayers that drafting skips.

    Both lists may be empty; drafting then costs as much as verifying. They are kept sorted. The
    adapter has weights only with a `draft_rank`.

    Raises:
        ValueError: if an entry is not an integer >= 0, is given twice, or exceeds the last layer
            of `base_facts`.
    """

    type_name: ClassVar[str] = "LAYER_SKIP"

    skip_attention: list[int] = field(
        default_factory=list, metadata={"help": "Layers whose attention drafting skips."}
    )
    skip_mlp: list[int] = field(
        default_factory=list, metadata={"help": "Layers whose MLP drafting skips."}
    )
    draft_rank: int = setting(
        0, "Rank of trained low-rank updates for drafting; 0: none.", count(0, MAX_RANK)
    )
    draft_alpha: float = setting(16, "The updates are scaled by draft_alpha / draft_rank.", ALPHA)
    draft_target_modules: list[str] | str | None = setting(
        None,
        "Linear modules with updates: names, or a regular expression. Default: all that drafting "
        "runs.",
        check_targets,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        layers: Any = (self.base_facts or {}).get("num_hidden_layers")
        if layers is not None:
            why = "Leave it out: attaching the adapter records it."
            check_count("num_hidden_layers of base_facts", layers, why=why)
        last, why = layers and layers - 1, "By base_facts, these are the base's. Correct one."
        for name in ("skip_attention", "skip_mlp"):
            setattr(self, name, sorted(distinct_layers(name, getattr(self, name), last, why)))

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        LayerSkipper(model, self.skip_attention, self.skip_mlp)  # finds every sublayer or raises
        self.draft_modules(model)

    def training_defaults(self) -> dict[str, Any]:
        if not self.draft_rank or not (self.skip_attention or self.skip_mlp):
            raise ValueError(
                f"draft_rank={self.draft_rank}, skip_attention={self.skip_attention}, skip_mlp="
                f"{self.skip_mlp}: nothing to train. What is trained are low-rank updates of a "
                "model with layers left out: give a draft_rank, such as 8, and layers to skip, "
                "such as `hf-spec search` finds. Without updates layer_skip needs no training."
            )
        return {}

    def draft_modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """The linear modules that drafting runs and that get updates, by name.

        Raises:
            ValueError: the config has a rank, but no module matches.
        """
        if not self.draft_rank:
            return {}
        skipper = LayerSkipper(model, self.skip_attention, self.skip_mlp)
        left_out = {id(module) for stubbed in skipper.replaced for module in stubbed.modules()}
        chosen = linear_modules(model, self.draft_target_modules)
        found = {name: module for name, module in chosen.items() if id(module) not in left_out}
        if not found:
            raise ValueError(
                f"draft_target_modules={self.draft_target_modules!r}: drafting leaves out all "
                "linear modules of that name. Choose others, or skip less."
            )
        return found


class LayerSkipAdapter(LowRankAdapter):
    """Two factors for each linear module of the drafting path, or no weights at all.

    They apply only while drafting; the model's own outputs do not change.
    """

    def __init__(self, config: LayerSkipConfig, model: Any) -> None:
        super().__init__(config, model)
        if config.draft_rank:
            self.hold_factors(config.draft_modules(model), config.draft_rank, config.draft_alpha)


#: Tokens of a piece, about as many as a step drafts.
PIECE = 4


def loss(model: Any, adapter: Any, batch: TrainingBatch) -> dict[str, Tensor]:
    """KL divergence of the drafting model's next-token distribution from the full model's.

    Averaged over the drafted tokens of a sequence and then over sequences. A piece of
    :data:`PIECE` tokens starts after each anchor.

    Returns:
        ``loss``, a scalar; ``logits``, ``(batch, anchors, PIECE, vocab)`` of the drafting model;
        ``labels``, ``(batch, anchors, PIECE)``, the token after each drafted one.
    """
    config: Any = adapter.config
    if not config.draft_rank:
        raise ValueError("draft_rank=0: the adapter has no weights to train.")
    drafting = LayerSkipper(model, config.skip_attention, config.skip_mlp).changes
    adapter.update.add_to(drafting)
    # Like a group of probes, a piece attends causally to the tokens up to its anchor and to itself.
    group, ahead = ProbeGroup.causal(PIECE), Ahead.of(batch, PIECE, placement(model).device)
    with torch.no_grad():
        pieces = ProbeInputs(model.get_input_embeddings()(ahead.before))
    hidden = probe_sequences(
        model, batch.input_ids, batch.attention_mask, batch.anchors, group, pieces,
        while_probing=drafting,
    )  # fmt: skip
    logits = model_logits(model, hidden.probe_hidden.flatten(1, 2), drafting)
    logits = logits.unflatten(1, (-1, PIECE))
    wanted = ahead.wanted.to(logits.device)
    own = own_predictions(model, hidden.token_hidden, ahead.columns)
    return mean_loss(prediction_losses(logits, wanted, own), logits, wanted, pooled=True)


# -- Drafts with the model itself, skipping layers; weights and cache are shared -------------------
#
# Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
# Decoding" (2023), algorithms 3 and 4. The verifying forward overwrites the drafted tokens' cache
# entries, so every layer ends up with the full model's states.
#
# Each drafting forward adds several draft tokens if the policy chooses among them by probability:
# drafting continues from the likeliest one, and the next likeliest ones become its siblings.

#: Draft tokens per drafting forward; drafting continues from the first.
RANKS = 3


class LayerSkipPredictor(Predictor):
    """Predicts token by token with the chosen sublayers left out."""

    can_sample = True
    unused = ("tree", "max_depth")
    width, siblings = 1, RANKS
    runs, level_cost = FORWARDS, LevelCost.EACH
    outside = "what a drafting forward says decides whether there is another"
    options: LayerSkipOptions
    drafting: Changes
    exit: ThresholdExit

    def __init__(self, model: Any, options: LayerSkipOptions):
        super().__init__(model, options)
        self.depth = options.most
        attention, mlp, adapter = _choice(model, options)
        self.drafting = LayerSkipper(model, attention, mlp).changes
        update = None if adapter is None else adapter.update
        self.learned = None if update is None else MergedCopies(update, self.drafting)
        name = None if adapter is None else adapter.name
        self.key = "layer_skip", name, tuple(attention), tuple(mlp), key_of(options)
        self.kind = tuple(attention), tuple(mlp), adapter is not None
        self.exit = recall(model, self.key, lambda: ThresholdExit(options))
        self._lengths: list[int] | None = None  # of this step's chains
        self.policy_chooses = options.draft_exit == POLICY

    def start(self, state: DecodeState) -> None:
        if state.do_sample:  # other drafts are right
            key = *self.key, "sampled"
            self.exit = recall(self.model, key, lambda: ThresholdExit(self.options))
        graphs = state.target.graphs
        if graphs is not None and self.learned is not None:
            graphs.hold(self.learned.weights.values())

    def chosen(self, state: DecodeState, depth: int) -> Tree | None:
        samples = samples_drafts(self.options, state.do_sample)
        if self.options.draft_exit == POLICY and state.timed and not samples:
            return None
        return self._chain(state, depth, samples)

    def catch_up(self, state: DecodeState) -> None:
        self._stage = Stage(self, state)

    @property
    def goes_on(self) -> GoesOn:
        return self._stage.goes_on

    def levels(self, root: Tensor, depth: int, width: int, noise: Tensor | None) -> Stage:
        self._stage.noise = noise
        return self._stage

    def finish(self) -> None:
        self._stage.state.cache.rollback()

    def run(
        self, state: DecodeState, tokens: Tensor, drafting: Sequence[bool]
    ) -> tuple[Tensor, Tensor]:
        """The drafting model's logits and the call's scores ``(batch, vocab)`` in float32, after
        root and drafted tokens ``(batch, 1 + k)``.

        Exits use probabilities of the former: scores of a low temperature are always confident.
        """
        k = tokens.shape[1] - 1
        chains = Tree.of_shapes([TokenTree.chain(k)] * len(tokens), tokens.device)
        output = state.target(chains.with_tokens(tokens), first=k, changes=self.drafting)
        state.stats.num_draft_forwards += 1
        logits = output.logits[:, -1]
        return logits.float(), state.process(logits, tokens[:, 1:], drafting, drafting=True)

    def _chain(self, state: DecodeState, depth: int, samples: bool) -> Tree:
        """Chains with the paper's exits; sampled ones have their distributions."""
        tokens = state.root[:, None]
        drafting = list(state.active)
        lengths = [0] * len(drafting)
        distributions: list[Tensor] = []
        confidence: Tensor | None = None  # (batch,) draft probability of the last tokens
        for k in range(depth):
            if confidence is not None:  # one transfer: whether there is another forward
                go_on = map(self.exit.go_on, confidence.tolist())
                drafting = [on and more for on, more in zip(drafting, go_on)]
            if not any(drafting):
                break
            logits, scores = self.run(state, tokens, drafting)
            if samples:
                distributions.append(distribution(scores))
                token = sample(distributions[-1]).clamp(min=0)[:, None]
            else:
                token = scores.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, token], dim=1)
            lengths = [k + 1 if on else length for on, length in zip(drafting, lengths)]
            if self.exit.by_confidence:
                confidence = distribution(logits).gather(1, token)[:, 0]
        state.cache.rollback()
        self._lengths = lengths
        tree = Tree.of_shapes([TokenTree.chain(n) for n in lengths], tokens.device)
        stacked = None
        if distributions:
            stacked = torch.stack([torch.zeros_like(distributions[0]), *distributions], dim=1)
        return tree.with_tokens(tokens[:, : tree.num_tokens], stacked)

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        if self._lengths is not None:
            rows = [(len(path) - 1, n) for path, n in zip(result.path, self._lengths) if path]
            drafted = sum(length for _, length in rows)
            if drafted:
                self.exit.update(sum(min(row) for row in rows) / drafted)
        self._lengths = None

    def details(self) -> dict[str, Any]:
        merged = {} if self.learned is None else {"merged_bytes": self.learned.num_bytes}
        return {"threshold": round(self.exit.gamma, 4), **merged}

    def chain(self, input_ids: Tensor) -> list[int]:
        output = self.drafting.run(
            self.model.generate, input_ids, max_new_tokens=self.options.most, do_sample=False,
            num_beams=1, assistant_strategy=None,
        )  # fmt: skip
        return output[0, input_ids.shape[1] :].tolist()


class Stage:
    """The drafting stage of one step; see :class:`hf_spec.draft.grow.Expands`."""

    noise: Tensor | None = None  # (batch, depth, vocab) what tokens will be sampled with

    def __init__(self, predictor: LayerSkipPredictor, state: DecodeState):
        self.predictor, self.state = predictor, state
        cost = state.draft_cost
        # While it is unknown, drafting ends where tokens are no longer likely to be accepted.
        self.cost = predictor.exit.gamma * sum(state.active) if cost is None else cost
        rows = zip(state.looked_up, state.active)
        self._lookups = [_Followed(row) for row, active in rows if active]
        self._tokens = state.root[:, None]

    def goes_on(self, frontier: Frontier) -> bool:
        """Whether the next token pays."""
        paths: list[float] = [1.0] * len(frontier.tokens)
        if frontier.depth:
            # One transfer; float32 represents tokens, which are below 2 ** 24, exactly.
            parts = frontier.tokens[:, 0].to(frontier.log_probs), frontier.log_probs[:, 0].exp()
            numbers, paths = torch.stack(parts).tolist()
            for lookup, token in zip(self._lookups, numbers):
                lookup.follow(int(token))
        present = [lookup.probability for lookup in self._lookups]
        return self.predictor.exit.goes_on(frontier.depth + 1, paths, self.cost, present)

    def expand(self, frontier: Frontier) -> Children:
        state = self.state
        if frontier.depth:
            self._tokens = torch.cat([self._tokens, frontier.tokens], dim=1)
        logits, scores = self.predictor.run(state, self._tokens, state.active)
        logits, scores = self._as_sampled(logits, scores, frontier.depth)
        tops = scores.topk(min(RANKS, scores.shape[1]))
        # Tokens that processors rule out are never accepted, nor those of finished sequences.
        out = (tops.values == -torch.inf) | ~to_device(list(state.active), scores.device)[:, None]
        probs = distribution(logits).gather(1, tops.indices).masked_fill(out, 0)
        return Children(tops.indices[:, None], probs.log()[:, None])

    def _as_sampled(self, logits: Tensor, scores: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Logits and scores given what the tokens will be sampled with, if they are sampled."""
        noise = self.state.noise
        if noise is None or self.noise is None:
            return logits, scores
        ahead = self.noise[:, depth].to(logits.device)
        # Scores are divided by the temperature, logits are not.
        return as_sampled(logits, ahead), as_sampled(noise.scaled(scores), ahead)


class _Followed:
    """A lookup's continuations along the drafted tokens."""

    def __init__(self, row: Row):
        self._row = row
        self._children = row.children
        self._node: int | None = 0

    @property
    def probability(self) -> float:
        """That the drafted tokens and then one of the lookup's tokens follow."""
        nodes = zip(self._row.probs, self._row.parents)
        return sum(prob for prob, parent in nodes if parent == self._node)

    def follow(self, token: int) -> None:
        if self._node is not None:
            self._node = self._children.get((self._node, token))


def _choice(model: Any, options: LayerSkipOptions) -> tuple[list[int], list[int], Adapter | None]:
    """Layers whose attention and MLP are skipped, and the active adapter if they are its own."""
    attention, mlp = options.skip_attention, options.skip_mlp
    if attention is not None or mlp is not None:
        # An adapter's updates compensate for its own skipped layers only.
        return list(attention or ()), list(mlp or ()), None
    adapter = find_active(model, "LAYER_SKIP", options.adapter)
    if adapter is None:
        raise ValueError(
            "assistant_strategy='layer_skip' needs the layers to skip: give assistant_kwargs="
            "{'skip_attention': [...], 'skip_mlp': [...]}, load a LAYER_SKIP adapter "
            "(model.load_adapter) or name one (adapter), or find good layers with `hf-spec search`."
        )
    return adapter.config.skip_attention, adapter.config.skip_mlp, adapter


METHOD = Method(
    name="layer_skip",
    summary="the model drafts for itself with some layers left out; needs no training",
    options=LayerSkipOptions,
    predictor=LayerSkipPredictor,
    adapter_config=LayerSkipConfig,
    adapter_module=LayerSkipAdapter,
    objective=loss,
    # For low-rank updates of the drafting path; the number of epochs is that of appendix F.
    training={"learning_rate": 1e-3, "num_train_epochs": 3},
    num_anchors=16,
)
