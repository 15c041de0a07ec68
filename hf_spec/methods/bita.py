"""``bita``: learned mask tokens predict the next tokens in the verifying forward.

Lin et al., "BiTA: Bi-Directional Tuning for Lossless Acceleration in Large Language Models" (2024).
Every node has a group of mask tokens. The group under the last accepted node predicts the tokens
after the next one, which are the draft tokens of the next step (section 3.2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_spec.adapters.config import PrefixKVConfig
from hf_spec.adapters.layer import Adapter
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.checks import (
    MAX_DRAFT_TOKENS,
    MAX_FUTURE,
    MAX_PREFIX_KV,
    choice,
    count,
    explained,
    setting,
)
from hf_spec.core.shapes import ProbeGroup, TokenTree
from hf_spec.core.tree import Tree
from hf_spec.draft.options import CHAIN, DraftOptions
from hf_spec.methods.registry import Method
from hf_spec.modeling_patches.weights import input_features
from hf_spec.predict.losses import Ahead, future_losses, mean_loss
from hf_spec.predict.table import ProbePredictor, chain_tree
from hf_spec.target.sequences import computed_states, probe_sequences
from hf_spec.target.target import ProbeInputs

#: Models with more parameters get four mask tokens (section 4.1).
LARGE = 13e9


@dataclass
class BitaConfig(PrefixKVConfig):
    """Config of a BITA adapter: mask tokens that draft, and prompt tokens that only they attend to.

    Raises:
        ValueError: if a field is invalid.
    """

    type_name: ClassVar[str] = "BITA"

    num_mask_tokens: int | None = setting(
        None,
        "M, mask tokens, each drafting one future token. Default: 3, or 4 for a base model of more "
        "than 13 billion parameters.",
        count(1, MAX_FUTURE),
    )
    num_prompt_tokens: int = setting(
        16, "P, learned prompt tokens that only mask tokens see.", count(0, MAX_PREFIX_KV)
    )
    prompt_depth: str = setting(
        "deep",
        "deep: a learned prefix KV in every layer. shallow: learned input embeddings. none: "
        "mask tokens only.",
        choice("deep", "shallow", "none"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_depth == "none":
            self.num_prompt_tokens = 0
        elif not self.num_prompt_tokens:
            raise ValueError(
                f"prompt_depth={self.prompt_depth!r} with num_prompt_tokens=0: give at least 1, "
                "or prompt_depth='none'."
            )

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        if self.num_mask_tokens is None:
            parameters = sum(p.numel() for p in model.parameters())
            self.num_mask_tokens = 4 if parameters > LARGE else 3
        if self.prompt_depth == "deep":
            self.record_shape(model)


#: Standard deviation of initial embeddings (section 4.1).
INIT_STD = 0.02


class BitaAdapter(Adapter):
    """Mask tokens, and prompt tokens by depth of prompting.

    ``masks`` is ``(M, hidden)``. Shallow prompts are ``prompts``, ``(P, hidden)``; deep ones are
    ``prompt_keys`` and ``prompt_values``, ``(layers, kv_heads, P, head_dim)`` each.
    """

    def __init__(self, config: BitaConfig, model: Any) -> None:
        super().__init__(config, model)
        assert config.num_mask_tokens is not None  # set by check_base
        _, hidden = input_features(model)
        count = config.num_prompt_tokens
        tensors = {"masks": torch.randn(config.num_mask_tokens, hidden) * INIT_STD}
        if config.prompt_depth == "shallow":
            tensors["prompts"] = torch.randn(count, hidden) * INIT_STD
        elif config.prompt_depth == "deep":
            tensors |= config.fresh_states("prompt", count, INIT_STD)
        self.hold({**tensors, **config.fresh_shared(model, config.num_mask_tokens)})


def probe_inputs(model: Any, weights: Mapping[str, Tensor]) -> ProbeInputs:
    """The adapter's parameters as inputs of probes; gradients flow to the parameters."""
    if "prompt_keys" in weights:
        prefix_kv = list(zip(weights["prompt_keys"].unbind(0), weights["prompt_values"].unbind(0)))
    elif "prompts" in weights:
        # Prompts attend to prompts only, so their states do not depend on what follows.
        prefix_kv = list(computed_states(model, weights["prompts"]))
    else:
        prefix_kv = []
    return ProbeInputs(weights["masks"], prefix_kv)


def loss(model: Any, adapter: Adapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """Cross-entropy of the future tokens, averaged per sequence and then over sequences."""
    weights = adapter.tensors()
    inputs = probe_inputs(model, weights)
    group = ProbeGroup.causal(inputs.embeddings.shape[0])
    hidden = probe_sequences(
        model, batch.input_ids, batch.attention_mask, batch.anchors, group, inputs
    ).probe_hidden
    ahead = Ahead.of(batch, len(group), hidden.device)
    return mean_loss(*future_losses(model, weights, hidden, ahead), pooled=True)


#: The tree with mask tokens after the last token only: the first line of table 4.
STRAIGHTFORWARD = "straightforward"


@dataclass(frozen=True)
class BitaOptions(DraftOptions):
    """Options of ``bita`` (BiTA, section 3.2).

    Attributes:
        tree: ``efficient``: ``top_k`` draft tokens per level, all under the likeliest one of the
            level above (figure 5). ``full``: ``top_k`` under every draft token. ``chain``: the
            likeliest ones only, like ``full`` with k = 1. ``straightforward``: the same chain
            with one group of mask tokens, which do not attend to the draft tokens (figure 4). All
            values in :class:`DraftOptions` are allowed, too.
        top_k: k, draft tokens per mask token of ``efficient`` and ``full`` trees.
    """

    top_k: int = setting(5, rule=count(1, MAX_DRAFT_TOKENS), only={"tree": ("efficient", "full")})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree == STRAIGHTFORWARD and self.lookup is True:
            raise ValueError(
                "lookup=True with tree='straightforward', whose one group of mask tokens is for "
                "its own chain. Use tree='chain'."
            )


def top_k_tree(options: BitaOptions, depth: int) -> TokenTree:
    """``top_k`` draft tokens per level: under all of the level above, or under its likeliest."""
    paths: list[list[int]] = []
    level: list[list[int]] = [[]]
    for _ in range(depth):
        parents = level if options.tree == "full" else level[:1]
        level = [[*parent, rank] for parent in parents for rank in range(options.top_k)]
        paths += level
        if len(paths) > MAX_DRAFT_TOKENS:  # refused below; deeper levels may not fit in memory
            break
    with explained(f"tree={options.tree!r} with top_k={options.top_k}", ValueError):
        return TokenTree.from_paths(paths)


class BitaPredictor(ProbePredictor):
    """Trees of the mask tokens' likeliest tokens."""

    trees = {
        "efficient": top_k_tree, "full": top_k_tree, CHAIN: chain_tree,
        STRAIGHTFORWARD: chain_tree,
    }  # fmt: skip
    options: BitaOptions

    def __init__(self, model: Any, options: BitaOptions, adapter: Adapter):
        super().__init__(model, options, adapter, adapter.config.num_mask_tokens)
        weights = adapter.tensors()
        used = {**weights, "masks": weights["masks"][: self.depth]}
        self.probe_inputs = probe_inputs(model, used)

    def attach_probes(self, tree: Tree, ahead: Sequence[Sequence[int]]) -> Tree:
        if self.options.tree != STRAIGHTFORWARD:
            return super().attach_probes(tree, ahead)
        # After c accepted draft tokens, the first c predictions of the root's group are outdated.
        counts = [[len(self.group)] + [0] * (len(row) - 1) for row in ahead]
        return tree.attach_probes(self.group, counts, shared=True)


METHOD = Method(
    name="bita",
    summary="learned mask tokens predict the next tokens in the verifying forward",
    options=BitaOptions,
    predictor=BitaPredictor,
    adapter_config=BitaConfig,
    adapter_module=BitaAdapter,
    objective=loss,
    needs_adapter=True,
    # Section 4.1; its batch of 128 has one anchor per sequence.
    training={"learning_rate": 3e-2, "num_train_epochs": 8},
    num_anchors=32,
)
