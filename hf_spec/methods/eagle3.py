"""``eagle3``: a small decoder on the model's hidden states (EAGLE-3; Li et al., 2025).

Names of parameters are those of published checkpoints: besides those of ``Decoder``,
``layers.0.hidden_norm``; with some configs ``embed_tokens``, ``input_norm``, ``fc_norm.j``,
``mask_hidden``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_spec.adapters.config import VOCABULARY, vocab_size
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.checks import setting
from hf_spec.core.tree import Tree
from hf_spec.draft.grow import Frontier
from hf_spec.draft.options import key_of
from hf_spec.draft.policy import LevelCost
from hf_spec.methods.registry import Method
from hf_spec.modeling_patches.modules import num_layers
from hf_spec.modeling_patches.weights import device_of, input_features, output_features
from hf_spec.predict.decoder import Decoder, DecoderConfig, DecoderNetwork
from hf_spec.predict.losses import ChainConfig, chain_loss
from hf_spec.predict.markov import DraftVocabulary, check_tokens
from hf_spec.predict.network import DraftNetwork, GrowOptions, MaskRows, NetworkPredictor, Rows
from hf_spec.target.hidden_states import Reads

#: What changes the numbers, and no shapes but those of the norms.
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
#: Standard deviation of a new adapter's matrices.
INITIAL = 0.02
#: Steps of the training-time test.
STEPS = 7


@dataclass
class Eagle3Config(ChainConfig, DecoderConfig):
    """Config of an EAGLE3 adapter; sizes that are left out are those of the base.

    It reads the layers 2, L // 2 and L - 3 of L by default. Rows of a mask token, if it has one,
    draft all further tokens in one forward (P-EAGLE).

    Raises:
        ValueError: a field is invalid; the message names it, its value and the rule.
    """

    type_name: ClassVar[str] = "EAGLE3"
    norm_before_residual: bool = setting(
        False, "Whether the first layer's residual is the normed feature."
    )
    norm_before_fc: bool = setting(False, "Whether the states that it reads are normed together.")
    fc_norm: bool = setting(
        True, "Whether each of the states that it reads is normed, as in EAGLE 3.1."
    )
    norm_output: bool = setting(
        False, "Whether the next row takes its output after the norm (3.1)."
    )
    own_embeddings: bool = setting(False, "Whether it has input embeddings of its own.")
    ttt_steps: int | None = setting(STEPS, "Steps of the training-time test.")

    def _defaults(self, model: Any) -> dict[str, Any]:
        count = num_layers(model)
        layers = sorted({min(2, count), count // 2, max(count - 3, 1)})
        return {"layers": layers, "ttt_steps": STEPS, **super()._defaults(model)}

    def alternatives(self, model: nn.Module) -> list[dict[str, Any]]:
        """Other flags, and other layers; see :class:`SpecPeftConfig`. Norms whose tensors are
        there may be left out, and not the other way round."""
        free = {"norm_before_residual", "norm_output"}
        flags = [name for name in FLAGS if name in free or getattr(self, name)]
        return [{name: not getattr(self, name)} for name in flags] + super().alternatives(model)

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        _, embedding = input_features(model)
        if self.hidden_size != embedding and not self.own_embeddings:
            raise ValueError(
                f"hidden_size={self.hidden_size}: the base's embeddings have {embedding} "
                "dimensions. Choose this number, or own_embeddings=True."
            )


class Eagle3Adapter(Decoder):
    """A decoder whose first layer takes embedding and feature side by side."""

    def __init__(self, config: Eagle3Config, model: Any) -> None:
        super().__init__(config, model, own_head=True)
        hidden, count = self.fc.out_features, len(config.layers or ())
        if config.norm_before_fc:
            self.input_norm = self.rms_norm(count * self.target_hidden)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(self.rms_norm(self.target_hidden) for _ in range(count))
        first: Any = self.layers[0]
        for name in ("q_proj", "k_proj", "v_proj"):
            made = getattr(first.self_attn, name)
            if made is not None:
                of_both = nn.Linear(2 * hidden, made.out_features, bias=False)
                setattr(first.self_attn, name, of_both)
        first.hidden_norm = self.rms_norm(hidden)
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, count * self.target_hidden))
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(self.known, hidden)
        if not config.inference_mode:  # otherwise the weights are loaded later
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=INITIAL)
            if config.mask_token_id is not None:
                nn.init.normal_(self.mask_hidden, std=INITIAL)
            self._start_head(torch.arange(self.lm_head.out_features), model)

    @torch.no_grad()
    def _start_head(self, tokens: Tensor, model: Any) -> None:
        """Let the output matrix start as the base's rows of these tokens, if it has such."""
        own = self.lm_head.weight
        if not own.is_meta and output_features(model)[0] == own.shape[1]:
            own.copy_(DraftVocabulary(tokens, model).weight)

    def set_vocabulary(self, tokens: Tensor, model: Any) -> None:
        super().set_vocabulary(tokens, model)
        self._start_head(tokens, model)


class Eagle3Network(DecoderNetwork, DraftNetwork):
    """An adapter's decoder on its base.

    Raises:
        ValueError: the model lacks some of the tokens that it predicts.
    """

    def __init__(self, model: Any, adapter: Eagle3Adapter):
        super().__init__(model, adapter)
        self.masks: MaskRows | None = None if self.config.mask_token_id is None else self._masks
        known, size = vocab_size(model), adapter.lm_head.out_features
        self.token_ids: Tensor | None = getattr(adapter, VOCABULARY, None)
        if self.token_ids is not None:
            check_tokens(self.token_ids, known)
        elif size < known:
            self.token_ids = torch.arange(size, device=device_of(adapter.lm_head))

    def features(self, states: Tensor) -> Tensor:
        net, states = self.adapter, states.to(self.device, self.dtype)
        if self.config.norm_before_fc:
            states = net.input_norm(states)
        if self.config.fc_norm:
            parts = states.chunk(len(net.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(net.fc_norm, parts)], -1)
        return self.fused(states)

    def run(self, tokens: Tensor, hidden: Tensor, rows: Rows, cache: Any) -> tuple[Tensor, Tensor]:
        """See :class:`DraftNetwork` (EAGLE-3, section 3.1)."""
        net, mask = self.adapter, rows.mask().to(self.device)
        angles = self._rotary(hidden, rows.positions.to(self.device))
        for index, layer in enumerate(net.layers):
            inputs = layer.input_layernorm(hidden if index else self.embedded(tokens))
            if not index:
                normed = layer.hidden_norm(hidden)
                inputs = torch.cat([inputs, normed], -1)
                hidden = normed if self.config.norm_before_residual else hidden
            attended = layer.self_attn(inputs, **self.inputs(angles, mask, cache))[0]
            hidden = self._kind.rest(layer, hidden, attended)
        normed = net.norm(hidden)
        return normed, normed if self.config.norm_output else hidden

    def _masks(self, batch: int, count: int) -> tuple[Tensor, Tensor]:
        hidden = self.features(self.adapter.mask_hidden).expand(batch, count, -1)
        token = self.config.mask_token_id
        return torch.full((batch, count), token, device=hidden.device), hidden


def loss(model: Any, adapter: Any, batch: TrainingBatch) -> dict[str, Tensor]:
    """See :func:`chain_loss`."""
    network = Eagle3Network(model, adapter)
    return chain_loss(model, network, batch, adapter.config, adapter.config.layers)


@dataclass(frozen=True)
class Eagle3Options(GrowOptions):
    """Options of ``eagle3`` (EAGLE-2, section 4.1; EAGLE-3, section 4).

    Attributes:
        width: draft tokens of a level that are continued, the likeliest ones; the paper's top-k.
    """

    width: int = 8


class Eagle3Predictor(NetworkPredictor):
    """Trees of the adapter's decoder.

    With a mask token, rows of it draft the tokens at all distances in one forward ("P-EAGLE:
    Parallel-Drafting EAGLE with Scalable Training", 2026). A distance then has one
    distribution, whatever was drafted before.
    """

    options: Eagle3Options
    network: Eagle3Network

    def __init__(self, model: Any, options: Eagle3Options, adapter: Any):
        network = Eagle3Network(model, adapter)
        self.level_cost = LevelCost.EACH if network.masks is None else LevelCost.FIRST
        self._all: Tensor | None = None  # (batch, depth, tokens) logits of all distances
        super().__init__(
            model, options, network, Reads("committed", tuple(adapter.config.layers)),
            ("eagle3", adapter.name, key_of(options)),
        )  # fmt: skip

    def level(self, frontier: Frontier) -> Tensor:
        if self.level_cost is LevelCost.EACH:
            return super().level(frontier)
        if not frontier.depth:
            self._all = self._of_all_distances()
        assert self._all is not None
        return self._all[:, frontier.depth, None]

    def _of_all_distances(self) -> Tensor:
        """Logits ``(batch, depth, tokens)``: the first of the root, the others of mask rows."""
        assert self._root is not None
        states, cache, network = self._root[0], self.cache, self.network
        if self.depth > 1:
            assert network.masks is not None
            tokens, hidden = network.masks(len(states), self.depth - 1)
            found, _ = network.run(tokens, hidden, cache.open(Tree.chain(tokens)), cache)
            states = torch.cat([states, found], 1)
        return network.logits(states)


METHOD = Method(
    name="eagle3",
    summary="a small decoder on the model's hidden states drafts token by token (EAGLE-3)",
    options=Eagle3Options,
    predictor=Eagle3Predictor,
    adapter_config=Eagle3Config,
    adapter_module=Eagle3Adapter,
    objective=loss,
    needs_adapter=True,
    training={"learning_rate": 1e-3, "num_train_epochs": 4, "optim": "muon"},
    num_anchors=32,
    formats="hf_spec.tools.formats.eagle3",
)
