"""``ppd``: prompt tokens predict the next tokens (PPD)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_spec.adapters.config import ObjectiveConfig, PrefixKVConfig, of_tokens, text_embeddings
from hf_spec.adapters.layer import Adapter
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.checks import (
    MAX_FUTURE,
    MAX_PREFIX_KV,
    MAX_PROBES,
    MAX_RANK,
    check_count,
    choice,
    count,
    setting,
)
from hf_spec.core.shapes import ProbeGroup, TokenTree, TreeStates
from hf_spec.draft.options import CHAIN, DraftOptions, refuse
from hf_spec.methods.ppd.dynamic_tree import DYNAMIC, dynamic_states, states_of
from hf_spec.methods.ppd.dynamic_tree import make_dynamic_tree as make_dynamic_tree
from hf_spec.methods.registry import Method
from hf_spec.modeling_patches.modules import num_layers
from hf_spec.modeling_patches.weights import output_features
from hf_spec.predict.losses import Ahead, future_losses, mean_loss, own_predictions
from hf_spec.predict.markov import DraftVocabulary
from hf_spec.predict.table import ProbePredictor, chain_tree
from hf_spec.target.hidden_states import Head, model_logits
from hf_spec.target.sequences import probe_sequences
from hf_spec.target.target import ProbeInputs

# -- The PPD adapter: prompt tokens, what they predict, and how they are trained -------------------
#
# Chen, "Parallel Prompt Decoding: A Cost-Effective and Memory-Efficient Approach for Accelerating
# LLM Inference" (2024), chapter 4. The thesis inserts prompt tokens anywhere in the input to train
# them (section 4.3.1); here, only in answers, which alone are what they continue later: the model's
# text.
#
# Published prompt tokens of the author's code (github.com/hmarkc, ppd-* on the Hub) are read, too.
# The author saves adapters as PEFT saves prompt tuning: ``adapter_model.safetensors`` (or ``.bin``)
# has one tensor ``prompt_embeddings``, ``(prompt tokens * EPTs, hidden)``. As here, the EPTs of
# distance 1 come first. The published adapters have one EPT each, for which all masks are equal.
# Learned weights, heads and prefixes are in other files, which are not read.

#: With two stages, share of the steps that train everything but the head.
FIRST_STAGE = 0.5


@dataclass
class PPDConfig(ObjectiveConfig, PrefixKVConfig):
    """Config of a PPD adapter: prompt tokens that draft.

    Raises:
        ValueError: if a field is invalid.
    """

    type_name: ClassVar[str] = "PPD"

    num_prompt_tokens: int = setting(
        3, "m, prompt tokens, each drafting one future token.", count(1, MAX_FUTURE)
    )
    num_ept: int = setting(1, "n, ensemble prompt tokens (EPTs) per prompt token.")
    ept_mask: str = setting(
        "ensemble",
        "Which other EPTs an EPT sees. ensemble: the one of its own number in each earlier prompt "
        "token. decoder: all before it. encoder: all of earlier prompt tokens and of its own.",
        choice("ensemble", "decoder", "encoder"),
    )
    ept_aggregation: str = setting(
        "average", "How EPTs are combined: average, or learned weights.",
        choice("average", "learned"),
    )  # fmt: skip
    decay: float | None = 0.8
    num_prefix_tokens: int = setting(
        0,
        "Tokens of a learned prefix KV in every layer for each prompt token, which alone sees them "
        "(prefix tuning).",
    )
    head: str = setting(
        "none",
        "A decoding head for prompt tokens. none: the base's. vocabulary: a second output layer. "
        "residual: a block of hidden size before the base's.",
        choice("none", "vocabulary", "residual"),
    )
    head_rank: int | None = setting(
        None,
        "Rank of a residual head's matrix; a low one keeps the adapter below 0.1 % of the base.  "
        "[default: a full matrix]",
        count(1, MAX_RANK),
        {"head": ("residual",)},
    )
    head_stages: int = setting(
        2,
        "1: the head is trained from the first step. 2: the head is trained in the second half of "
        "the steps, together with the rest.",
        count(1, 2),
    )
    num_exits: int = setting(
        1, "Last layers whose hidden states are averaged (multi-exit ensemble).", count()
    )

    dynamic_tree: list[dict[str, Any]] | None = setting(
        None,
        "The dynamic sparse tree (recorded): of each state, ``paths`` of ranks and the number of "
        "``probes`` under each node.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dynamic_tree is not None:
            states_of(self.dynamic_tree)
        check_count("num_ept", self.num_ept, high=MAX_PROBES // self.num_prompt_tokens)
        most = MAX_PREFIX_KV // self.num_prompt_tokens
        check_count("num_prefix_tokens", self.num_prefix_tokens, low=0, high=most)
        if self.num_ept == 1 and self.ept_aggregation == "learned":
            raise ValueError(
                "ept_aggregation='learned' with num_ept=1: there is nothing to weigh. Give at "
                "least 2 EPTs, or ept_aggregation='average'."
            )

    def untrained(self, progress: float) -> frozenset[str]:
        waiting = self.head_stages == 2 and progress < FIRST_STAGE
        parts = {"head", "head_down", "head_up", "head_bias"}
        return frozenset(parts) if waiting else frozenset()

    @property
    def reads_head(self) -> bool:
        return self.head != "vocabulary"

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        if self.num_exits > 1:
            check_count("num_exits", self.num_exits, 1, num_layers(model), "As the model's layers.")
        if self.num_prefix_tokens:
            self.record_shape(model)


#: Standard deviation of initial prefix tokens, which are not initialized from text.
INIT_STD = 0.02


class PPDAdapter(Adapter):
    """Prompt tokens, and further parameters by config.

    ``prompts`` is ``(m * n, hidden)`` for m prompt tokens of n EPTs, those of distance 1 first.
    Depending on the config, there are also:

    * ``weights`` ``(m, n)`` of the EPTs;
    * ``prefix_keys`` and ``prefix_values``, ``(layers, kv_heads, m * prefix tokens, head_dim)``;
    * ``head`` ``(vocab, hidden)``, added to the base's output embeddings; or ``head`` ``(hidden,
      hidden)`` and ``head_bias`` ``(hidden,)`` of a residual block before them, with a rank
      ``head_down`` ``(rank, hidden)`` and ``head_up`` ``(hidden, rank)`` instead of ``head``.
    """

    def __init__(self, config: PPDConfig, model: Any) -> None:
        super().__init__(config, model)
        distances, ept = config.num_prompt_tokens, config.num_ept
        tensors = {"prompts": text_embeddings(model, distances * ept)}
        if config.ept_aggregation == "learned":
            tensors["weights"] = torch.full((distances, ept), 1 / ept)
        if config.num_prefix_tokens:
            tensors |= config.fresh_states("prefix", distances * config.num_prefix_tokens, INIT_STD)
        # At first, the head changes nothing.
        hidden = output_features(model)[0]
        if config.head == "vocabulary":
            tensors["head"] = torch.zeros(config.known_tokens(model), hidden)
        elif config.head == "residual":
            if config.head_rank is None:
                tensors["head"] = torch.zeros(hidden, hidden)
            else:  # as in LoRA, one factor is zero
                rank = config.head_rank
                tensors["head_down"] = torch.randn(rank, hidden) / hidden**0.5
                tensors["head_up"] = torch.zeros(hidden, rank)
            tensors["head_bias"] = torch.zeros(hidden)
        self.hold({**tensors, **config.fresh_shared(model, distances)})


@lru_cache(maxsize=64)
def ept_group(distances: int, num_ept: int, mask: str) -> ProbeGroup:
    """EPTs of all prompt tokens, those of distance 1 first (section 4.4.3, figures 4.6 to 4.8)."""
    places = [(distance, number) for distance in range(distances) for number in range(num_ept)]
    sees = {
        "ensemble": lambda q, k: k[1] == q[1] and k[0] <= q[0],
        "decoder": lambda q, k: k <= q,
        "encoder": lambda q, k: k[0] <= q[0],
    }[mask]
    visible = tuple(tuple(sees(query, key) for key in places) for query in places)
    return ProbeGroup(tuple(distance + 1 for distance, _ in places), visible)


class PromptTokens:
    """Applies an adapter's parameters; gradients flow to them.

    Args:
        distances: number of prompt tokens to use; None for all.

    Attributes:
        group: the EPTs under a node.
        inputs: their inputs of a forward.
    """

    def __init__(self, adapter: Adapter, distances: int | None = None):
        self.config: Any = adapter.config
        self.weights: Mapping[str, Tensor] = adapter.tensors()
        self.distances: int = distances or self.config.num_prompt_tokens
        self.group = ept_group(self.distances, self.config.num_ept, self.config.ept_mask)
        prefix = self.config.num_prefix_tokens
        prefix_kv, seen = [], None
        if prefix:
            slots = self.distances * prefix
            keys, values = self.weights["prefix_keys"], self.weights["prefix_values"]
            prefix_kv = list(zip(keys[:, :, :slots].unbind(0), values[:, :, :slots].unbind(0)))
            # Figure 4.4: prompt token i attends to the prefix tokens i only.
            own = torch.eye(self.distances, dtype=torch.bool, device=keys.device)
            seen = own.repeat_interleave(self.config.num_ept, 0).repeat_interleave(prefix, 1)
        embeddings = self.weights["prompts"][: len(self.group)]
        self.inputs = ProbeInputs(embeddings, prefix_kv, seen, self.config.num_exits)

    def states(self, hidden: Tensor) -> Tensor:
        """The states that predict, ``(batch, n * distances, hidden)``, from final hidden states of
        the probes under n nodes, ``(batch, n * EPTs, hidden)``.

        EPTs are combined before the output embeddings, which are linear: this equals the weighted
        sum of logits of section 4.4.4, except that a bias of the output embeddings counts once.
        """
        config, weights = self.config, self.weights
        if config.num_ept > 1:
            each = hidden.unflatten(1, (-1, config.num_ept))
            if config.ept_aggregation == "average":
                hidden = each.mean(2)
            else:
                count = each.shape[1]
                share = weights["weights"][: self.distances].to(hidden)
                share = share.repeat(-(-count // self.distances), 1)[:count]
                hidden = (each * share[:, :, None]).sum(2)
        if config.head == "residual":
            names = ("head",) if config.head_rank is None else ("head_down", "head_up")
            inner = hidden
            for name in names:
                inner = torch.nn.functional.linear(inner, weights[name].to(hidden))
            hidden = hidden + torch.nn.functional.silu(inner + weights["head_bias"].to(hidden))
        return hidden

    def logits(self, model: Any, states: Tensor, head: Head | None = None) -> Tensor:
        """Logits ``(batch, n, tokens)`` of :meth:`states`, by the base's output embeddings or what
        replaces them, with its scaling and soft cap."""
        if self.config.head == "vocabulary":  # added to logits, so their scale matters
            own = states @ self.weights["head"].to(states).T
            return model_logits(model, states) + of_tokens(model, own, 0.0)
        return model_logits(model, states, head=head)


def loss(model: Any, adapter: Adapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """Divergence from the base's distributions, averaged per sequence and then over sequences.

    The loss of distance i has weight decay^(i-1). The base's distribution is that at the same
    position of the same sequence, from the same forward; the divergence is KL(base || prompt
    token), as in distillation and in the authors' code. With ``loss="hard"`` it is the
    cross-entropy of the sequence's token.
    """
    prompts = PromptTokens(adapter)
    config, weights = prompts.config, prompts.weights
    found = probe_sequences(
        model, batch.input_ids, batch.attention_mask, batch.anchors, prompts.group, prompts.inputs
    )
    ahead = Ahead.of(batch, prompts.distances, found.probe_hidden.device)
    states = prompts.states(found.probe_hidden.flatten(1, 2)).unflatten(1, ahead.wanted.shape[1:])
    own = None
    if config.loss == "distillation":
        vocabulary = DraftVocabulary.of(weights, model)
        own = own_predictions(model, found.token_hidden, ahead.columns, vocabulary)
    predict = partial(prompts.logits, model)
    losses = future_losses(model, weights, states, ahead, own, predict)
    return mean_loss(*losses, config.decay, pooled=True)


# -- Drafts with prompt tokens in the verifying forward: PPD, sections 4.5 and 5.4 -----------------
#
# The tree's nodes have prompt tokens. Those under the last accepted node predict the tokens after
# the next one, which are the draft tokens of the next step. Their number is the sequence's state,
# and each state may have its own tree.

#: Rank paths of the static tree: many at depth 1, which every step verifies, and few below.
STATIC: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,), (4,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1),
)  # fmt: skip


@dataclass(frozen=True)
class PPDOptions(DraftOptions):
    """Options of ``ppd`` (PPD, chapters 4 and 5).

    Attributes:
        tree: ``static``: ten draft tokens, all prompt tokens under each node (section 5.3).
            ``chain``: the likeliest ones only. ``dynamic``: the dynamic sparse tree of section
            5.4, which :func:`make_dynamic_tree` has made. All values in :class:`DraftOptions` are
            allowed, too.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree == DYNAMIC:
            refuse(
                self, ["max_depth"],
                f"with tree={DYNAMIC!r}, which says itself how deep it is. Leave one of the two "
                "out.",
            )  # fmt: skip


def static_tree(_: PPDOptions, depth: int) -> TokenTree:
    """The paths of `STATIC`, with the likeliest one as deep as predictions go."""
    chain = {(0,) * length for length in range(1, depth + 1)}
    return TokenTree.from_paths(sorted(chain.union(STATIC))).truncate(depth)


class PPDPredictor(ProbePredictor):
    """Static or dynamic trees of the prompt tokens' likeliest tokens."""

    trees = {"static": static_tree, CHAIN: chain_tree, DYNAMIC: None}
    options: PPDOptions

    def __init__(self, model: Any, options: PPDOptions, adapter: Adapter):
        super().__init__(model, options, adapter, adapter.config.num_prompt_tokens)
        self.prompts = PromptTokens(adapter, self.depth)
        self.probe_inputs, self.group = self.prompts.inputs, self.prompts.group
        self.per_distance = adapter.config.num_ept

    def static_states(self, adapter: Adapter) -> TreeStates | None:
        if self.options.tree == DYNAMIC:
            return dynamic_states(self.model, adapter)
        return super().static_states(adapter)

    def distance_states(self, hidden: Tensor) -> Tensor:
        return self.prompts.states(hidden)

    def logits(self, states: Tensor) -> Tensor:
        if self.prompts.config.head == "vocabulary":
            return self.prompts.logits(self.model, states)
        return super().logits(states)


METHOD = Method(
    name="ppd",
    summary="learned prompt tokens, distilled from the model, predict the next tokens",
    options=PPDOptions,
    predictor=PPDPredictor,
    adapter_config=PPDConfig,
    adapter_module=PPDAdapter,
    objective=loss,
    needs_adapter=True,
    training={"learning_rate": 1e-2, "num_train_epochs": 8},
    num_anchors=32,
    formats="hf_spec.tools.formats.papers",
)
