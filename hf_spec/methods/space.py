"""``space``: mask tokens and a semi-autoregressively trained model (SPACE), or mask tokens with
low-rank updates of their own (Samragh et al., 2025)."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_spec.adapters.config import PredictingConfig, text_embeddings
from hf_spec.adapters.layer import ALPHA, DOWN, UP, Adapter, LowRankAdapter, check_targets
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.checks import MAX_FUTURE, MAX_RANK, SHARE, choice, count, number, setting
from hf_spec.core.shapes import ProbeGroup
from hf_spec.core.tree import Tree
from hf_spec.core.verify import sample
from hf_spec.draft.options import ADAPTIVE, AUTO, CHAIN, DraftOptions, samples_drafts
from hf_spec.draft.predictor import DecodeState
from hf_spec.methods.registry import Method
from hf_spec.modeling_patches.modules import linear_modules, output_projections
from hf_spec.modeling_patches.support import check_unquantized
from hf_spec.predict.losses import Ahead, future_losses, prediction_losses, wanted_mean
from hf_spec.predict.markov import MarkovHead
from hf_spec.predict.table import ProbePredictor, distribution
from hf_spec.target.hidden_states import model_logits
from hf_spec.target.sequences import IGNORED, probe_sequences
from hf_spec.target.target import ProbeInputs

# -- The SPACE adapter: mask tokens, low-rank updates, and how both are trained --------------------
#
# Yi et al., "Generation Meets Verification: Accelerating Large Language Model Inference with Smart
# Parallel Auto-Correct Decoding" (2024), section 3.1. While an adapter that fine-tunes the model is
# active, every call of the model uses its updates, as with LoRA.

#: Learning rate by kind of update; that of ``full`` is the paper's (table 2). Mask tokens alone are
#: soft prompts, which need a higher one.
LEARNING_RATES = {"gated": 3e-3, "lora": 1e-3, "full": 5e-5, "none": 3e-2}


@dataclass
class SpaceConfig(PredictingConfig):
    """Config of a SPACE adapter.

    Raises:
        ValueError: a field is invalid; the message names it, its value and the rule.
    """

    type_name: ClassVar[str] = "SPACE"
    retired: ClassVar[Mapping[str, Any]] = {"masks": "learned"}
    num_mask_tokens: int = setting(
        4, "k, mask tokens, each drafting one future token.", count(1, MAX_FUTURE)
    )
    shared_mask: bool = setting(
        False, "One embedding for all mask tokens, as in the paper, instead of k."
    )
    p_ar: float = setting(
        0.5, "Share of autoregressive sequences in training; 1 is plain fine-tuning.",
        number(0.0, 1.0),
    )  # fmt: skip
    update: str = setting(
        "gated",
        "What is trained besides the mask tokens. gated: low-rank updates of mask tokens only; the "
        "model's output stays the same. lora: low-rank updates of the model, and full: all its "
        "weights, saved beside the adapter; both fine-tune the model, as in the paper. none: "
        "nothing.",
        choice(*LEARNING_RATES),
    )
    rank: int = setting(16, "Rank of the low-rank updates.", count(1, MAX_RANK))
    update_learning_rate: float = setting(
        5e-3, "Peak learning rate of gated updates; mask tokens have that of training.", SHARE
    )
    alpha: float = setting(32, "The updates are scaled by alpha / rank.", ALPHA)
    target_modules: list[str] | str | None = setting(
        None,
        "Linear modules that get low-rank updates: names, or a regular expression. Default: all in "
        "the decoder layers; for gated updates the last one of each layer.",
        check_targets,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_modules is not None and not isinstance(self.target_modules, str):
            self.target_modules = sorted(self.target_modules)

    @property
    def trains_base(self) -> bool:
        return self.update == "full"

    def training_defaults(self) -> dict[str, Any]:
        if self.update == "none" and self.p_ar == 1:
            raise ValueError(
                "update='none' with p_ar=1.0: nothing is trained. Lower p_ar, or choose another "
                "update."
            )
        rate = {"learning_rate": LEARNING_RATES[self.update]}
        if not self.changes_model:
            return {**rate, "num_train_epochs": 8}
        # The checkpoint of the lowest loss is kept: tau would favor models that repeat themselves,
        # which are easy to predict. Epochs are those of table 2.
        return {**rate, "metric_for_best_model": "loss", "greater_is_better": False}

    def learning_rates(self) -> dict[str, float]:
        gated = self.update == "gated"
        own = dict.fromkeys((DOWN, UP), self.update_learning_rate) if gated else {}
        return {**super().learning_rates(), **own}

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """The modules of `model` that have low-rank updates, by name."""
        if self.update == "gated" and self.target_modules is None:
            return output_projections(model)
        low_rank = self.update in ("gated", "lora")
        return linear_modules(model, self.target_modules) if low_rank else {}

    @property
    def changes_model(self) -> bool:  # type: ignore[override]
        return self.update in ("lora", "full")

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        found = self.modules(model)
        if isinstance(self.target_modules, str):  # PEFT would match it again, however long it takes
            self.target_modules = sorted(found) or None
        elif self.target_modules is None and self.update == "gated":
            # What the default means may change; what a trained adapter has must not.
            ends = sorted({name.rpartition(".")[2] for name in found})
            alike = linear_modules(model, ends).keys() == found.keys()
            self.target_modules = ends if alike else sorted(found)
        if self.trains_base and not self.inference_mode:
            check_unquantized(model, "update='full'", "update='lora' or 'none'")


class SpaceAdapter(LowRankAdapter):
    """Mask tokens and low-rank updates, which are part of the model unless gated.

    ``masks`` is ``(k, hidden)``, ``(1, hidden)`` if shared.
    """

    def __init__(self, config: SpaceConfig, model: Any) -> None:
        super().__init__(config, model)
        count = 1 if config.shared_mask else config.num_mask_tokens
        self.hold({"masks": text_embeddings(model, count)})
        self.hold_factors(config.modules(model), config.rank, config.alpha)
        self.hold(config.fresh_shared(model, config.num_mask_tokens))


def mask_tokens(adapter: Adapter) -> ProbeInputs:
    """The k mask tokens as probes, with the low-rank updates if these are gated.

    Gradients flow to the adapter's parameters.
    """
    config: Any = adapter.config
    embeddings = adapter.tensors()["masks"].expand(config.num_mask_tokens, -1)
    return ProbeInputs(embeddings, update=adapter.update if config.update == "gated" else None)


def loss(model: Any, adapter: Adapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """Eq. (4), averaged over sequences (semi-autoregressive supervised fine-tuning, section 3.1).

    In training, the loss of a sequence is the autoregressive L_AR with probability p_ar, otherwise
    the semi-autoregressive L_SAR, averaged over its anchors; the choice is a function of its tokens
    and anchors. In evaluation, both count with these probabilities. If the model is not trained,
    the loss is that of the mask tokens alone. An anchor is y_(m-1); k mask tokens follow it. Each
    loss is a mean over the tokens it predicts, where the paper's equations have a sum. The token
    y_m, which is in both sums of eq. (3), counts once.

    Returns:
        ``loss``, a scalar; unless no sequence has mask tokens, ``logits`` and ``labels``, see
        :func:`mean_loss`.
    """
    input_ids, labels, anchors, attention_mask = batch
    config: Any = adapter.config
    frozen = not config.changes_model
    group = ProbeGroup.causal(config.num_mask_tokens)
    ahead = Ahead.of(batch, len(group), labels.device)
    useful = (ahead.wanted != IGNORED).any(-1)  # (batch, anchors); padding has nothing to predict
    share = _sar_share(config, model.training, input_ids, labels, anchors, useful)
    if not bool(share.any()):
        anchors, useful, ahead = anchors[:, :0], useful[:, :0], Ahead(*(x[:, :0] for x in ahead))
    inputs = mask_tokens(adapter)
    hidden = probe_sequences(model, input_ids, attention_mask, anchors, group, inputs, frozen)

    states, device = hidden.token_hidden, hidden.token_hidden.device
    anchors, useful, share = (one.to(device) for one in (anchors, useful, share))
    ahead = Ahead(*(one.to(device) for one in ahead))
    output: dict[str, Tensor] = {}
    sums = states.new_zeros(useful.shape, dtype=torch.promote_types(states.dtype, torch.float32))
    counts = torch.zeros_like(useful, dtype=torch.long)  # both (batch, anchors)
    if useful.shape[1]:
        losses, logits, wanted = future_losses(model, adapter.tensors(), hidden.probe_hidden, ahead)
        output = {"logits": logits, "labels": wanted}
        sums, counts = losses.sum(-1), (wanted >= 0).sum(-1)
    ar_loss = sums.new_zeros(len(useful))
    if not frozen:
        losses, following = _next_token_losses(model, states, labels)
        ar_loss = wanted_mean(losses, following, 1)
        # The first sum of eq. (3): the tokens up to y_m, which the anchor itself predicts.
        sums = sums + losses.cumsum(-1).gather(1, anchors)
        counts = counts + (following != IGNORED).cumsum(-1).gather(1, anchors)
    sar_losses = torch.where(useful, sums / counts.clamp(min=1), 0.0)
    sar_loss = sar_losses.sum(-1) / useful.sum(-1).clamp(min=1)
    share = torch.where(useful.any(-1), share, 0.0)  # an answer too short for a mask token
    mean = ((1 - share) * ar_loss + share * sar_loss).mean()
    if model.training and not useful.shape[1]:
        # Other processes have mask tokens: DDP waits for a gradient of every parameter in each.
        trained = [one for one in adapter.tensors().values() if one.requires_grad]
        mean = mean + 0.0 * torch.stack([one.sum().to(mean) for one in trained]).sum()
    return {"loss": mean, **output}


def _next_token_losses(model: Any, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of the token after each one, and these tokens, both ``(batch, seq)``."""
    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).to(states.device)
    real = following != IGNORED
    found = prediction_losses(model_logits(model, states[real][None])[0], following[real])
    return found.new_zeros(real.shape).masked_scatter(real, found), following


def _sar_share(
    config: Any, training: bool, input_ids: Tensor, labels: Tensor, anchors: Tensor, useful: Tensor
) -> Tensor:
    """``(batch,)`` weight of L_SAR in each sequence's loss: 0 or 1 in training."""
    if not config.changes_model:
        return torch.ones(len(labels))
    if not training:
        return torch.full((len(labels),), 1.0 - config.p_ar)
    rows = zip(input_ids, labels, anchors, useful)
    return torch.tensor([_draw(*row) / 2**63 >= config.p_ar for row in rows], dtype=torch.float32)


def _draw(ids: Tensor, labels: Tensor, anchors: Tensor, useful: Tensor) -> int:
    """A pseudo-random number below 2**63, a function of a sequence and its anchors.

    It does not depend on padding or the number of processes. Anchors differ between epochs.
    """
    parts = (ids[labels != IGNORED].tolist(), anchors[useful].tolist())
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


# -- Auto-correct decoding: SPACE, section 3.2, algorithm 1 ----------------------------------------
#
# A step forwards k draft tokens with a group of k mask tokens after the last token and after each
# draft token, eqs. (5)-(7). The group after the last accepted token gives the next k draft tokens.


@dataclass(frozen=True)
class SpaceOptions(DraftOptions):
    """Options of ``space`` (SPACE, section 3.2).

    Attributes:
        tree: ``chain``: one draft token for each mask token, as in the paper. All values in
            :class:`DraftOptions` are allowed, too. Only draft tokens of a chain can be sampled, so
            ``acceptance="rejection"`` uses a chain instead of an adaptive tree.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.acceptance != "rejection" or self.tree == CHAIN:
            return
        if self.tree != ADAPTIVE or self.num_draft_tokens != AUTO:
            raise ValueError(
                f"acceptance='rejection' with tree={self.tree!r}, whose draft tokens are not "
                "sampled. Use tree='chain', or acceptance='match', which is exact for them."
            )


class SpacePredictor(ProbePredictor):
    """Trees of the mask tokens' predictions, or chains of likeliest or sampled tokens."""

    markov_head: MarkovHead | None

    can_sample = True
    options: SpaceOptions

    def __init__(self, model: Any, options: SpaceOptions, adapter: Adapter):
        if options.acceptance == "rejection":
            options = replace(options, tree=CHAIN)
        super().__init__(model, options, adapter, adapter.config.num_mask_tokens)
        inputs = mask_tokens(adapter)
        self.probe_inputs = replace(inputs, embeddings=inputs.embeddings[: self.depth])

    def start(self, state: DecodeState) -> None:
        super().start(state)
        if self._by_scores(state):
            self.outside = "the call's processors choose draft tokens"

    def _by_scores(self, state: DecodeState) -> bool:
        """Whether draft tokens are chosen by what the call's processors make of predictions."""
        samples = samples_drafts(self.options, state.do_sample)
        return self.options.tree == CHAIN and (samples or not state.process.trivial)

    def chosen(self, state: DecodeState, depth: int) -> Tree | None:
        """A token from each mask position (line 23), with its distribution q (line 24) if sampled.

        q is the whole distribution after the call's processors, which see the earlier draft tokens.
        """
        if not self._by_scores(state):
            return None
        samples = samples_drafts(self.options, state.do_sample)
        assert self.hidden is not None
        states = self.given_root(self.hidden[:, :depth], state.root)
        logits = model_logits(self.model, states)  # (batch, depth, vocab)
        tokens, distributions = [state.root.to(logits.device)], []
        for place in range(depth):
            own = logits[:, place]
            if self.markov_head is not None:
                own = own + self.markov_head.logits(tokens[-1], states[:, place]).to(own)
            drafted = torch.stack(tokens, 1)[:, 1:]
            q = distribution(state.process(own, drafted, state.active, drafting=True))
            tokens.append(sample(q).clamp(min=0) if samples else q.argmax(-1))
            distributions.append(q)
        columns = torch.stack([token.to(state.root.device) for token in tokens], dim=1)
        chain = Tree.chain(columns)
        if not samples:
            return chain
        nothing = torch.zeros_like(distributions[0])  # of the root
        return chain.with_tokens(columns, torch.stack([nothing, *distributions], dim=1))


METHOD = Method(
    name="space",
    summary="mask tokens with low-rank updates of their own predict the next tokens",
    options=SpaceOptions,
    predictor=SpacePredictor,
    adapter_config=SpaceConfig,
    adapter_module=SpaceAdapter,
    objective=loss,
    needs_adapter=True,
    training={"num_train_epochs": 2},
    num_anchors=32,
)
