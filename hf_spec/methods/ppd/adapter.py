"""The PPD adapter: prompt tokens, what they predict, and how they are trained.

Chen, "Parallel Prompt Decoding: A Cost-Effective and Memory-Efficient Approach for Accelerating LLM
Inference" (2024), chapter 4. The thesis inserts prompt tokens anywhere in the input to train them
(section 4.3.1); here, only in answers, which alone are what they continue later: the model's text.

Published prompt tokens of the author's code (github.com/hmarkc, ppd-* on the Hub) are read, too.
The author saves adapters as PEFT saves prompt tuning: ``adapter_model.safetensors`` (or ``.bin``)
has one tensor ``prompt_embeddings``, ``(prompt tokens * EPTs, hidden)``. As here, the EPTs of
distance 1 come first. The published adapters have one EPT each, for which all masks are equal.
Learned weights, heads and prefixes are in other files, which are not read: prefix tuning, a head
of their own and averaged exits (sections 4.4.1, 4.4.2 and 4.4.5) are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_spec.adapters.module import Adapter
from hf_spec.adapters.predicting import PredictingConfig, text_embeddings
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.checks import SHARE, check_count, choice, count, setting
from hf_spec.core.limits import MAX_FUTURE, MAX_PROBES
from hf_spec.core.probes import ProbeGroup
from hf_spec.drafting.draft_vocabulary import DraftVocabulary
from hf_spec.drafting.losses import Ahead, future_losses, mean_loss, own_logits
from hf_spec.methods.ppd.dynamic_tree import states_of
from hf_spec.model.probe_inputs import ProbeInputs
from hf_spec.model.sequences import probe_sequences


@dataclass
class PPDConfig(PredictingConfig):
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
    loss: str = setting(
        "distillation",
        "distillation: KL divergence from the base's own distributions. hard: cross-entropy of the "
        "answers' tokens.",
        choice("distillation", "hard"),
    )
    decay: float = setting(
        0.8, "alpha; the weight of distance i in the loss is alpha^(i-1).", SHARE
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
        if self.num_ept == 1 and self.ept_aggregation == "learned":
            raise ValueError(
                "ept_aggregation='learned' with num_ept=1: there is nothing to weigh. Give at "
                "least 2 EPTs, or ept_aggregation='average'."
            )


class PPDAdapter(Adapter):
    """Prompt tokens, and what predictions are conditioned on.

    ``prompts`` is ``(m * n, hidden)`` for m prompt tokens of n EPTs, those of distance 1 first;
    learned ``weights`` of EPTs are ``(m, n)``.
    """

    def __init__(self, config: PPDConfig, model: Any) -> None:
        super().__init__(config, model)
        distances, ept = config.num_prompt_tokens, config.num_ept
        tensors = {"prompts": text_embeddings(model, distances * ept)}
        if config.ept_aggregation == "learned":
            tensors["weights"] = torch.full((distances, ept), 1 / ept)
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
        self.inputs = ProbeInputs(self.weights["prompts"][: len(self.group)])

    def states(self, hidden: Tensor) -> Tensor:
        """The states that predict, ``(batch, n * distances, hidden)``, from final hidden states of
        the probes under n nodes, ``(batch, n * EPTs, hidden)``.

        EPTs are combined before the output embeddings, which are linear: this equals the weighted
        sum of logits of section 4.4.4, except that a bias of the output embeddings counts once.
        """
        if self.config.num_ept == 1:
            return hidden
        each = hidden.unflatten(1, (-1, self.config.num_ept))
        if self.config.ept_aggregation == "average":
            return each.mean(2)
        count = each.shape[1]
        share = self.weights["weights"][: self.distances].to(hidden)
        share = share.repeat(-(-count // self.distances), 1)[:count]
        return (each * share[:, :, None]).sum(2)


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
        own = own_logits(model, found.token_hidden, ahead.columns, vocabulary)
    losses = future_losses(model, weights, states, ahead, own)
    return mean_loss(*losses, config.decay, pooled=True)
