"""Drafters that predict a block of tokens in one forward (block diffusion)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, DynamicCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from hf_spec.adapters.config import ObjectiveConfig, facts_of
from hf_spec.adapters.layer import Adapter
from hf_spec.core.checks import (
    ANOTHER,
    MAX_BLOCKS,
    MAX_FUTURE,
    MAX_RANK,
    MAX_SHAPE,
    MAX_SIZE,
    SHARE,
    check_count,
    choice,
    count,
    distinct_layers,
    setting,
)
from hf_spec.core.device import bucket
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult
from hf_spec.draft.grow import Children, Frontier
from hf_spec.draft.options import DraftOptions
from hf_spec.draft.predictor import DecodeState
from hf_spec.modeling_patches.modules import num_layers
from hf_spec.modeling_patches.weights import input_features, output_features, placement
from hf_spec.predict.block_heads import (
    CONFIDENCE,
    BlockHead,
    Domino,
    DSpine,
    GatedHead,
    RecurrentHead,
    Selector,
    VanillaHead,
    XPress,
)
from hf_spec.predict.decoder import FACTOR, Decoder, DecoderConfig, DecoderNetwork
from hf_spec.predict.lilicorr import LiLiCorr
from hf_spec.predict.network import DraftCache, committed
from hf_spec.predict.table import AT_ONCE, Predictions, TablePredictor, top_log_probs
from hf_spec.target.hidden_states import Head, Reads, gather_hidden, model_logits, output_logits
from hf_spec.target.noise import as_sampled
from hf_spec.target.sequences import token_hidden

# -- The heads that a block drafter can have, by the value of ``markov_head`` ----------------------

HEADS: dict[str, type[BlockHead]] = {
    "vanilla": VanillaHead,
    "gated": GatedHead,
    "rnn": RecurrentHead,
    "selector": Selector,
    "domino": Domino,
    "dspine": DSpine,
    "xpress": XPress,
    "lilicorr": LiLiCorr,
}

# -- The config of a block drafter's adapter -------------------------------------------------------

#: Type of layers that can have convolutions.
CONVOLVED = "qwen3"
#: Layers of the base that are read by default.
NUM_READ = 3


#: Markov heads whose tensors do not depend on the number of slots.
ANY_SLOTS = ("vanilla", "gated", "rnn")


@dataclass
class BlockConfig(ObjectiveConfig, DecoderConfig):
    """Config of an adapter that predicts a block of tokens.

    The layers that it reads are evenly spaced by default, its mask token is the base's last one,
    and its rotary embedding has the base's theta.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    of_layers: ClassVar[tuple[str, ...]] = (*DecoderConfig.of_layers, "attention_bias")

    architecture: str = "qwen3"
    block_size: int = setting(
        8, "Tokens of a block: the anchor, the root of a tree, and masks.", count(2, MAX_FUTURE)
    )
    num_layers: int = 2
    sample_from_anchor: bool = setting(
        False,
        "True: each slot of a block predicts the token after its own, the anchor's slot included. "
        "False: each mask's slot predicts its own token.",
    )
    causal: bool = setting(
        False,
        "Whether a slot of a block sees those before it and itself only (JetSpec), or all of them.",
    )
    markov_rank: int = setting(0, "Rank of the Markov head; 0: none.", count(0, MAX_RANK))
    markov_head: str = setting(
        "vanilla",
        "vanilla: the token before changes the predictions. gated: by more or less, as the slot's "
        "state says. rnn: all drafted tokens before do. selector: as gated, among each slot's "
        "likeliest tokens only (DFlash 2). domino: a recurrent state of all drafted tokens does. "
        "dspine: slots pass on what they would draft, layer by layer; causal. xpress: a mixer over "
        "the slots and the tokens before them. lilicorr: a transformer over the likeliest tokens "
        "of all slots.",
        choice(*HEADS),
    )
    markov_width: int = setting(
        512,
        "Width inside a head: of domino's recurrent state, dspine's messages, xpress' MLP, "
        "lilicorr's lattice.",
        count(1, MAX_SHAPE),
    )
    markov_skips: int = setting(
        1, "Distances at first that domino leaves as they are.", count(0, MAX_FUTURE)
    )
    selector_top_k: int = setting(
        16, "Tokens of a slot among which a selector, dspine, or lilicorr chooses.",
        count(1, MAX_SHAPE),
    )  # fmt: skip
    lattice_layers: int = setting(2, "Layers of lilicorr.", count(1, MAX_BLOCKS))
    lattice_heads: int = setting(
        8, "Attention heads of lilicorr, which divide markov_width.", count(1, MAX_SHAPE)
    )
    lattice_mlp_ratio: float = setting(
        2.0, "Width of lilicorr's MLPs, as a multiple of markov_width.", FACTOR
    )
    lattice_scale: float = setting(8.0, "Factor of lilicorr's cosines, its scores.", FACTOR)
    lattice_eps: float = setting(1e-6, "Least length that lilicorr divides a vector by.", SHARE)
    conv_kernel_size: int = setting(
        0, "Slots that convolutions around attention and MLPs see (DFlash 2); 0: none."
    )
    conv_group_size: int = setting(
        16, "Features that share the moving part of a convolution.", count(1, MAX_SHAPE)
    )
    head: str = setting(
        "base", "base: the base's output embeddings. own: a matrix (recorded).",
        choice("base", "own"),
    )  # fmt: skip
    confidence_head: str = setting(
        "none",
        "What a head of confidence reads: a slot's state, or that and the token before; trees are "
        "grown by it, next to a Markov head (recorded).",
        choice("none", "state", "markov"),
    )
    embedding_scale: float | None = 1.0
    logit_scale: float = setting(1.0, "Factor of the logits, before their cap (recorded).", FACTOR)
    attention_bias: bool = setting(False, "Whether attention has biases (recorded).")
    sliding_layers: list[int] | None = setting(None, "Layers with a sliding window (recorded).")
    sliding_window: int | None = setting(None, "Size of the window (recorded).", count(1, MAX_SIZE))
    sliding_window_from: str = setting(
        "anchor", "anchor: a block has one window. query: each slot has its own (recorded).",
        choice("anchor", "query"),
    )  # fmt: skip
    sliding_window_non_causal: bool = setting(
        True, "Whether slots of layers with a window see those behind them (recorded)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("conv_kernel_size", self.conv_kernel_size, low=0, high=self.block_size)
        if self.sliding_layers is not None:
            self.sliding_layers = distinct_layers("sliding_layers", self.sliding_layers)
            for layer in self.sliding_layers:
                check_count("sliding_layers", layer, low=0, high=self.num_layers - 1)
        if self.sliding_layers and self.sliding_window is None:
            raise ValueError(
                f"sliding_layers={self.sliding_layers!r}: these need a sliding_window."
            )
        if self.is_causal_always:
            self.causal = True
        if self.markov_rank and HEADS[self.markov_head].of_masks and self.sample_from_anchor:
            raise ValueError(
                f"sample_from_anchor=True with markov_head={self.markov_head!r}: its masks' "
                "slots predict their own tokens. Set it to False."
            )
        self._check_lattice()
        if self.confidence_head == "markov" and not self.markov_rank:
            raise ValueError("confidence_head='markov' needs a Markov head: set markov_rank.")
        if self.conv_kernel_size and self.architecture != CONVOLVED:
            raise ValueError(
                f"conv_kernel_size={self.conv_kernel_size}: convolutions stand in layers of "
                f"{CONVOLVED}, not in those of {self.architecture}. Set it to 0."
            )
        self._check_groups()

    def _check_lattice(self) -> None:
        if not self.markov_rank or self.markov_head != "lilicorr":
            return
        if self.markov_width % self.lattice_heads:
            raise ValueError(
                f"lattice_heads={self.lattice_heads}: must divide markov_width={self.markov_width}."
            )
        inner = self.markov_width * self.lattice_mlp_ratio
        if not 1 <= inner <= MAX_SHAPE:
            raise ValueError(
                f"lattice_mlp_ratio={self.lattice_mlp_ratio}: makes MLPs of width {inner}, which "
                f"must be from 1 to {MAX_SHAPE}."
            )

    def _check_groups(self) -> None:
        if self.conv_kernel_size and (self.hidden_size or 0) % self.conv_group_size:
            raise ValueError(
                f"conv_group_size={self.conv_group_size}: {self.hidden_size} features cannot be "
                "divided into such groups."
            )

    @property
    def distances(self) -> int:
        """How many tokens after the root it predicts."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    def is_causal_always(self) -> bool:
        """Whether its head is made for causal blocks only."""
        return bool(self.markov_rank) and HEADS[self.markov_head].causal

    def alternatives(self, model: nn.Module) -> list[dict[str, Any]]:
        """The other mask, the other slots, and other layers; see :class:`SpecPeftConfig`."""
        flags = []
        if not self.is_causal_always:
            flags.append("causal")
        if not self.markov_rank or self.markov_head in ANY_SLOTS:
            flags.append("sample_from_anchor")
        if self.sliding_layers and not self.causal:
            flags.append("sliding_window_non_causal")
        return [{name: not getattr(self, name)} for name in flags] + super().alternatives(model)

    @property
    def shapes_logits(self) -> bool:
        """Whether it says how logits are scaled or capped; otherwise the base's are as its own."""
        return self.logit_scale != 1.0 or self.logit_softcap is not None

    def _defaults(self, model: Any) -> dict[str, Any]:
        rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None)
        theta = rope.get("rope_theta", 10000.0) if isinstance(rope, dict) else 10000.0
        return {
            "layers": default_layers(num_layers(model)),
            "mask_token_id": min(input_features(model)[0], output_features(model)[1]) - 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": float(theta)},
            **super()._defaults(model),
        }

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        self._check_groups()
        if self.markov_head == "dspine":
            why = "It has no more directions: hidden_size is the limit of dspine's rank."
            check_count("markov_rank", self.markov_rank, 0, self.hidden_size, why)
        width, out = input_features(model)[1], output_features(model)[0]
        hidden = facts_of(model).get("hidden_size", width)
        if not width == out == hidden:
            raise ValueError(
                f"{type(model).__name__} has input embeddings of {width}, states of {hidden} and "
                f"output embeddings of {out} features: a block drafter takes all three, and needs "
                f"them to be of one size. {ANOTHER}"
            )
        if self.hidden_size != hidden:
            raise ValueError(
                f"hidden_size={self.hidden_size}: {type(model).__name__} has {hidden}. Give the "
                "base model that it was made for."
            )


def default_layers(count: int) -> list[int]:
    """Layers of a base with so many that are read, as far apart as can be: neither the first states
    nor the final ones, if there are enough."""
    low, high = min(2, count), max(count - 2, 1)
    if high <= low:
        low, high = 1, count
    steps = [low + (high - low) * place / (NUM_READ - 1) for place in range(NUM_READ)]
    return sorted({round(step) for step in steps})


# --------------------------------------------------------------------------------------------------
# The decoder of a block drafter: a few layers that see the base's states as keys and values.
#
# Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (2026), section 3. The
# states of some layers of the base at a token, its *features*, become one context vector, c = R(W
# f), with RMS norm R. Every layer projects it to a key and a value. A block stands behind the
# context: the anchor, the token without features, then mask tokens. All of its slots see the
# context and each other, so that one forward predicts all of them. Features depend on committed
# tokens only, so what is cached of them never becomes invalid. DFlash 2 has convolutions over a
# block's slots around attention and MLPs.


class Convolutions(nn.Module):
    """Convolves a sublayer's input, and its output, over the slots of a block: of slot t,

        y_t = sum_j (b_j + d_tj) * x_(t-j)

    with b a parameter and d, equal within groups of features, projected from the input.

    Attributes:
        base_kernel: ``(2, slots, hidden)`` b of input and output.
        kernel_projection: to d of both.
    """

    def __init__(self, config: BlockConfig, hidden: int):
        super().__init__()
        self._block, self._group = config.block_size, config.conv_group_size
        kernel = torch.zeros(2, config.conv_kernel_size, hidden)
        kernel[:, 0] = 1.0  # at first each slot sees itself alone
        self.base_kernel = nn.Parameter(kernel)
        moving = 2 * config.conv_kernel_size * (hidden // self._group)
        self.kernel_projection = nn.Linear(hidden, moving, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, inputs: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """``(batch, n, hidden)`` of whole blocks to the same of the sublayer's output."""
        moving = self.kernel_projection(inputs).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        moving = moving.repeat_interleave(self._group, -1)
        before, after = (self.base_kernel + moving).unbind(2)
        return self._convolved(sublayer(self._convolved(inputs, before)), after)

    def _convolved(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        """Args: ``(batch, n, hidden)`` and ``(batch, n, slots, hidden)``."""
        blocks = inputs.unflatten(1, (-1, self._block))
        found = torch.zeros_like(inputs)
        for back in range(kernel.shape[2]):
            shifted = functional.pad(blocks, (0, 0, back, 0))[:, :, : self._block]
            found = found + shifted.flatten(1, 2) * kernel[:, :, back]
        return found


class ConvolvedLayer(Qwen3DecoderLayer):
    """A layer of Qwen3 with convolutions around attention and MLP."""

    def __init__(self, config: BlockConfig, layers: Any, index: int):
        super().__init__(layers, index)
        self.attention_conv = Convolutions(config, layers.hidden_size)
        self.mlp_conv = Convolutions(config, layers.hidden_size)

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        def attention(inputs: Tensor) -> Tensor:
            return self.self_attn(hidden_states=inputs, **given)[0]

        inner = self.attention_conv(self.input_layernorm(hidden_states), attention)
        hidden_states = hidden_states + inner
        inner = self.mlp_conv(self.post_attention_layernorm(hidden_states), self.mlp)
        return hidden_states + inner


class BlockAdapter(Decoder):
    """A decoder with a norm of what it reads, ``hidden_norm``.

    With convolutions, ``layers.i.attention_conv`` and ``layers.i.mlp_conv``, see
    :class:`Convolutions`. With a head, its tensors, see :meth:`BlockHead.fresh`. Buffers, which
    are not trained: the head's, ``confidence_head.proj.*``, and Gemma 4's
    ``layers.i.layer_scalar``.
    """

    config: BlockConfig

    def __init__(self, config: BlockConfig, model: Any) -> None:
        super().__init__(config, model, own_head=config.head == "own")
        hidden, rank = self.fc.out_features, config.markov_rank
        self.hidden_norm = self.rms_norm(hidden)
        if rank:
            head = HEADS[config.markov_head]
            for name, tensor in head.fresh(config, self.known, model).items():
                buffer = name in head.buffers
                self._add(name, nn.Buffer(tensor) if buffer else nn.Parameter(tensor))
        if config.confidence_head != "none":
            width = hidden + rank * (config.confidence_head == "markov")
            for name, tensor in zip(CONFIDENCE, (torch.zeros(1, width), torch.zeros(1))):
                self._add(name, nn.Buffer(tensor))

    def _add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor of this name, and the modules that it is in."""
        module: nn.Module = self
        *parents, leaf = name.split(".")
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        setattr(module, leaf, tensor)

    def layer(self, layers: Any, index: int) -> nn.Module:
        if self.config.conv_kernel_size:
            return ConvolvedLayer(self.config, layers, index)
        return super().layer(layers, index)


class BlockNetwork(DecoderNetwork):
    """An adapter's decoder on its base.

    Attributes:
        head: how drafted tokens change predictions; None if they do not.
        windows: of layers with a sliding window, the tokens that an anchor sees, itself included.
    """

    def __init__(self, model: Any, adapter: Any):
        super().__init__(model, adapter)
        config = self.config
        self.head = HEADS[config.markov_head](self) if config.markov_rank else None
        size = (config.sliding_window or 0) + (config.sliding_window_from == "anchor")
        self.windows = dict.fromkeys(config.sliding_layers or (), size)

    def append(self, features: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Write keys and values of context into a cache.

        Args:
            features: ``(batch, n, features)`` of some tokens.
            positions: ``(batch, n)`` int64, of these tokens.

        Returns:
            ``(batch, n, hidden)`` the context.
        """
        context: Tensor = self.adapter.hidden_norm(self.fused(features))
        angles = self._rotary(context, positions)
        for index, layer in enumerate(self.adapter.layers):
            # The attention's forward would make queries, too.
            keys, values = self._kind.keys_values(layer.self_attn, context, angles)
            cache.update(keys, values, index)
        return context

    def run(
        self, anchors: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: Cache,
        ahead: Tensor | None = None, context: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run blocks.

        Args:
            anchors: ``(batch, blocks)`` their first tokens.
            positions: ``(batch, blocks * block_size)`` int64
            masks: what their slots see in layers without and with a window, see :func:`visible`.
            ahead: ``(batch, blocks)`` the tokens ahead of the anchors, for heads that read these.
            context: ``(batch, blocks, hidden)`` of these tokens, likewise.

        Returns:
            ``(batch, blocks, distances, features)`` of the slots that predict: states that logits
            are computed from, and what a head reads besides.
        """
        head, windowed, tokens = self.head, self.windows, self.blocks(anchors)
        hidden = last = self.embedded(tokens.flatten(1))
        angles, apart = self._rotary(hidden, positions), (*tokens.shape, hidden.shape[-1])
        for index, layer in enumerate(self.adapter.layers):
            hidden = last = layer(hidden, **self.inputs(angles, masks[index in windowed], cache))
            if head is not None:
                hidden = head.after_layer(index, last.view(apart), anchors).flatten(1, 2)
        states: Tensor = self.adapter.norm(hidden).view(apart)
        if head is not None:
            states = head.read(states, last.view(apart), ahead, context)
        return states if self.config.sample_from_anchor else states[:, :, 1:]

    def shaped(self, logits: Tensor) -> Tensor:
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        return super().shaped(logits)

    def logits(self, states: Tensor, head: Head | None = None) -> Tensor:
        """``(..., tokens)`` of :meth:`run`'s states, by its own head, if it has one, or by the
        base's: ``head`` if this is given, which the drafter or the base scales and caps."""
        states = states[..., : self.adapter.fc.out_features]
        if self.config.head == "own":
            return super().logits(states)
        if self.config.shapes_logits:
            return self.shaped(output_logits(self.model, states, head))
        return model_logits(self.model, states.to(placement(self.model).dtype), head=head)

    def blocks(self, anchors: Tensor) -> Tensor:
        """Tokens of the block of each anchor: ``(...)`` -> ``(..., block_size)``."""
        size, mask = self.config.block_size, self.config.mask_token_id
        assert mask is not None
        masked = anchors.new_full((*anchors.shape, size), mask)
        masked[..., 0] = anchors
        return masked


def visible(
    config: BlockConfig, known: Tensor, anchors: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """What a slot of a block sees in layers without and with a sliding window, ``(batch, 1,
    queries, keys)`` bool.

    Args:
        known: ``(batch, 1, queries, keys)`` context and the slots of its own block.
        anchors: ``(batch, queries)`` position of the anchor of each query's block.
        queries: ``(batch, queries)`` positions of the queries.
        keys: ``(batch, keys)`` positions of the keys.
    """
    own, key, size = queries[:, None, :, None], keys[:, None, None], config.sliding_window or 0
    full = known & (key <= own) if config.causal else known
    if not config.sliding_layers:
        return full, full
    if config.sliding_window_from == "query":
        near = (own - key).abs() < size
    else:  # speculators counts from the anchor, and one token further
        near = key >= anchors[:, None, :, None] - size
    sliding = full & near
    return full, sliding if config.sliding_window_non_causal else sliding & (key <= own)


def block_sequences(
    network: BlockNetwork, input_ids: Tensor, attention_mask: Tensor | None, anchors: Tensor,
    features: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run blocks at many places of whole sequences, as in decoding: for training, and for finished
    sequences. Gradients flow to the adapter.

    Args:
        input_ids: ``(batch, seq)``
        attention_mask: ``(batch, seq)``, 0 for padding, on either side; None for no padding.
        anchors: ``(batch, anchors)`` columns t. The context of a block are the tokens up to t; its
            first token is that of column t + 1, or the last one of the sequence.
        features: ``(batch, seq, features)`` the base's states that it reads, if they are known.

    Returns:
        ``(batch, anchors, distances, features)`` that the tokens of columns t + 2, t + 3, ... are
        predicted from, see :meth:`BlockNetwork.run`.
    """
    config, device = network.config, network.device
    if features is None:
        features = token_hidden(network.model, input_ids, attention_mask, config.layers or ())
    batch, seq = input_ids.shape
    ids, anchors = input_ids.to(device), anchors.to(device)
    real = torch.ones_like(ids) if attention_mask is None else attention_mask.to(device)
    places = (real.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache()
    context = gather_hidden(network.append(features.to(device), places, cache), anchors)

    roots = ids.gather(1, (anchors + 1).clamp(max=seq - 1))
    count, size = anchors.shape[1], config.block_size
    first = places.gather(1, anchors) + 1  # position of each block's first token
    own = first[:, :, None] + torch.arange(size, device=device)
    queries, keys = own.flatten(1), torch.cat([places, own.flatten(1)], 1)
    block = torch.arange(count, device=device).repeat_interleave(size)
    upto = torch.arange(seq, device=device) <= anchors[:, block, None]
    same = (block[:, None] == block).expand(batch, -1, -1)
    known = torch.cat([upto & (real[:, None] != 0), same], 2)[:, None]
    masks = visible(config, known, first[:, block], queries, keys)
    return network.run(roots, queries, masks, cache, ids.gather(1, anchors), context)


# -- Predictions of a block given the tokens drafted before, level by level of a tree --------------

#: Likeliest tokens of a slot whose logits heads change, if no more are asked for: all would take
#: several times as long on CPUs as the block itself.
SHORTLIST = 256


class PathPredictions(Predictions):
    """Predictions given the tokens drafted before: of a shortlist of each slot's tokens, which a
    head gives other logits. All others keep theirs.
    """

    _head: BlockHead
    states: Tensor

    def _choose(self, logits: Tensor, scores: Tensor, width: int) -> None:
        self._width, top_k = width, self._head.top_k
        self._memory: Tensor | None = None  # (batch, n, rank) after the frontier's nodes
        size = min(max(top_k or SHORTLIST, width), logits.shape[-1])
        by = scores if top_k is None and not self._head.by_rank else logits
        self._among = among = by.topk(size).indices  # (batch, distances, size)
        self._logits = logits.gather(-1, among)
        self.states = self._head.prepare(logits, among, self.states)
        self._others: Tensor | None = None  # (batch, distances, 1) what all others sum up to
        if top_k is not None:
            self._logits[..., top_k:] = -torch.inf
        elif size < logits.shape[-1]:
            others = scores.scatter(-1, among, -torch.inf)
            self._others = others.to(torch.float32).logsumexp(-1, keepdim=True)
        if self._noise is not None:
            self._noise = self._noise.gather(-1, among)

    def expand(self, frontier: Frontier) -> Children | None:
        place, previous = frontier.depth, frontier.tokens
        if place >= self.distances:
            return None
        memory = self._memory if place else None
        if memory is not None:
            memory = gather_hidden(memory, frontier.parents)
        states, among = self.states[:, place, None], self._among[:, place, None]
        logits, self._memory = self._head.given(
            self._logits[:, place, None], previous, states, memory, among
        )
        if self._noise is not None:
            logits = as_sampled(logits, self._noise[:, place, None])
        others = None if self._others is None else self._others[:, place, None]
        chosen, log_probs = top_log_probs(logits, self._width, others)
        sure = self._head.confidence(previous, states)
        if sure is not None and self._noise is None:
            log_probs = with_confidence(log_probs, sure)
        tokens = among.expand(*chosen.shape[:-1], -1).gather(-1, chosen)
        return Children(self._named(tokens), self.where_known(log_probs, place))


def with_confidence(log_probs: Tensor, confidence: Tensor) -> Tensor:
    """Log-probabilities ``(..., width)`` of which the first, the largest, is replaced by a
    confidence ``(...)`` in [0, 1]; the others share the rest as before, none becomes the largest.
    """
    first, others = log_probs[..., :1], log_probs[..., 1:]
    # Of all other tokens together, those that are not listed included.
    among = others - torch.log1p(-first.exp().clamp(max=1 - 1e-6))
    second = among[..., :1].exp() if others.shape[-1] else torch.zeros_like(first)
    sure = confidence[..., None].to(first).clamp(max=1 - 1e-6)
    sure = torch.fmax(sure, second / (1 + second))  # also of one that has overflowed
    return torch.cat([sure.log(), among + torch.log1p(-sure)], -1)


# -- Predictions of a block: one forward of a small decoder per step predicts all distances --------


class BlockPredictor(TablePredictor):
    """Trees of a block's likeliest tokens.

    Args:
        adapter: the adapter, of a :class:`BlockConfig`.
    """

    per_row = ("_last", "_ahead", "_context")

    def __init__(self, model: Any, options: DraftOptions, adapter: Adapter):
        config = adapter.config
        super().__init__(model, options, adapter, config.distances)
        self.network = BlockNetwork(model, adapter)
        self.markov_head = head = self.network.head
        if head is not None:
            self.make_predictions = PathPredictions
            head.top_k = config.selector_top_k if head.chooses else None
        self.reads = Reads("committed", tuple(config.layers))

    def start(self, state: DecodeState) -> None:
        super().start(state)
        graphs = state.target.graphs
        self.cache = DraftCache.beside(state, self.network, self.network.device, graphs)
        head = self.network.head
        follows = head is not None and head.reads_ahead
        #: The root, and the token ahead of it, where the head reads that.
        self._last: Tensor | None = state.root if follows else None
        self._ahead = self._last
        #: Context of the token ahead of the root, where the head reads that.
        self._context: Tensor | None = None
        if head is not None and head.reads_context:
            size = state.batch_size, self.network.config.hidden_size
            kind = {"dtype": self.network.dtype, "device": self.network.device}
            self._context = torch.zeros(*size, **kind)

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        self.hidden = None
        self._follow(result)
        if hidden is None:
            return
        for tokens, states, counts, known in committed(result, hidden):
            rows = self.cache.open(Tree.chain(tokens))
            context = self.network.append(states, rows.positions, self.cache)
            self.cache.keep(counts, known)
            if self._context is not None:
                counts = counts.to(context.device)[:, None]
                last = gather_hidden(context, (counts - 1).clamp(min=0))[:, 0]
                self._context = torch.where(counts > 0, last, self._context)

    def _follow(self, result: StepResult) -> None:
        if self._last is not None:
            tokens = torch.cat([self._last[:, None], result.tokens], 1)
            self._ahead = tokens.gather(1, result.counts[:, None] - 1)[:, 0]
            self._last = result.bonus

    def hidden_after(self, root: Tensor) -> Tensor:
        if self.hidden is None:
            self.hidden = self._block(root)
        return self.hidden

    def reserve(self, tree: Tree, levels: int) -> None:
        self.cache.reserve(bucket(tree.num_tokens) + self.network.config.block_size)

    def _block(self, root: Tensor) -> Tensor:
        """``(batch, distances, features)`` of the slots that predict."""
        network, cache, first = self.network, self.cache, self.cache.lengths[:, None]
        anchors, count = root.to(network.device)[:, None], network.config.block_size
        rows = cache.open(Tree.chain(anchors.expand(-1, count)))
        positions = rows.positions
        block = torch.ones(len(first), 1, count, count, dtype=torch.bool, device=first.device)
        full, near = visible(network.config, block, first, positions, positions)
        masks = [rows.mask(visible=full[:, 0])] * 2
        for window in set(network.windows.values()):
            begin = positions - window + 1
            if network.config.sliding_window_from == "anchor":
                begin = begin[:, :1].expand_as(begin)
            masks[1] = rows.mask(begin, window, near[:, 0])
        ahead = None if self._ahead is None else self._ahead.to(network.device)[:, None]
        context = None if self._context is None else self._context[:, None]
        states = network.run(anchors, positions, masks, cache, ahead, context)
        cache.rollback()
        return states[:, 0]

    def states(self, hidden: Tensor, depth: int) -> Tensor:
        return hidden[:, :depth]

    def logits(self, states: Tensor) -> Tensor:
        return self.network.logits(states, self.vocabulary)

    def future_states(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        features = token_hidden(self.network.model, input_ids, layers=self.reads.layers)
        for some in places.split(max(AT_ONCE // self.depth, 1)):
            hidden = block_sequences(self.network, input_ids, None, some[None], features)
            yield hidden[0, :, : self.depth]
