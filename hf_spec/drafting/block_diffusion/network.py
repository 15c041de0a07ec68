"""The decoder of a block drafter: a few layers that see the base's states as keys and values.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (2026), section 3. The states
of some layers of the base at a token, its *features*, become one context vector, c = R(W f), with
RMS norm R. Every layer projects it to a key and a value. A block stands behind the context: the
anchor, the token without features, then mask tokens. All of its slots see the context and each
other, so that one forward predicts all of them. Features depend on committed tokens only, so what
is cached of them never becomes invalid. DFlash 2 has convolutions over a block's slots around
attention and MLPs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, DynamicCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from hf_spec.drafting.block_diffusion.config import BlockConfig
from hf_spec.drafting.block_diffusion.dspark import CONFIDENCE
from hf_spec.drafting.block_diffusion.heads import HEADS
from hf_spec.drafting.decoder import Decoder, DecoderNetwork
from hf_spec.model.hidden_states import Head, model_logits, output_logits
from hf_spec.model.sequences import token_hidden
from hf_spec.modeling_patches.weights import placement


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
            output: Tensor = self.self_attn(hidden_states=inputs, **given)[0]
            return output

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

    def append(self, features: Tensor, positions: Tensor, cache: Cache) -> None:
        """Write keys and values of context into a cache.

        Args:
            features: ``(batch, n, features)`` of some tokens.
            positions: ``(batch, n)`` int64, of these tokens.
        """
        context = self.adapter.hidden_norm(self.fused(features))
        angles = self._rotary(context, positions)
        for index, layer in enumerate(self.adapter.layers):
            # The attention's forward would make queries, too.
            keys, values = self._kind.keys_values(layer.self_attn, context, angles)
            cache.update(keys, values, index)

    def run(
        self, anchors: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: Cache,
        ahead: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run blocks.

        Args:
            anchors: ``(batch, blocks)`` their first tokens.
            positions: ``(batch, blocks * block_size)`` int64
            masks: what their slots see in layers without and with a window, see :func:`visible`.
            ahead: ``(batch, blocks)`` the tokens ahead of the anchors, for heads that read these.

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
            states = head.read(states, last.view(apart), ahead)
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
    network.append(features.to(device), places, cache)

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
    return network.run(roots, queries, masks, cache, ids.gather(1, anchors))
