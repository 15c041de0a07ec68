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

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, DynamicCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from hf_spec.adapters.module import Adapter
from hf_spec.drafting.block_diffusion.config import BlockConfig
from hf_spec.drafting.transitions import fresh, prefix, shapes
from hf_spec.model.hidden_states import soft_capped
from hf_spec.model.row_embeddings import RowEmbeddings
from hf_spec.model.sequences import token_hidden
from modeling_patches.cache_name import CACHE
from modeling_patches.weights import device_of, placement


class BlockAdapter(Adapter):
    """The parameters of a block drafter, by their names in released checkpoints.

    ``fc.weight`` (hidden, features * hidden), ``hidden_norm.weight``, ``layers.i.*`` as in models
    with such layers, ``norm.weight``; with convolutions, ``layers.i.attention_conv`` and
    ``layers.i.mlp_conv``, see :class:`Convolutions`. If not all tokens are predicted,
    ``draft_vocabulary`` (tokens,), int64 ids in ascending order; with a head of its own,
    ``lm_head.weight`` (tokens, hidden). With a Markov head, ``markov_head.*`` or
    ``candidate_selector.*``, see :mod:`hf_spec.drafting.transitions`. Buffers, which are not
    trained: ``confidence_head.proj.*``, and Gemma 4's ``layers.i.layer_scalar``.
    """

    config: BlockConfig
    fc: nn.Linear
    hidden_norm: nn.Module
    layers: nn.ModuleList
    norm: nn.Module

    def __init__(self, config: BlockConfig, model: Any) -> None:
        super().__init__(config, model)
        for name, module in modules(config, config.known_tokens(model)).items():
            self.add_module(name, module)
        self.hold(config.fresh_vocabulary())


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


def modules(config: BlockConfig, known: int) -> dict[str, nn.Module]:
    """The modules of an adapter by name, given the number of the base's tokens."""
    layers, rank, drafted = config.layers(), config.markov_rank, config.draft_vocab_size or known
    hidden, features = layers.hidden_size, config.feature_layers or ()
    kind = config.layer_type
    layer = partial(ConvolvedLayer, config) if config.conv_kernel_size else kind.layer
    made: dict[str, nn.Module] = {
        "fc": nn.Linear(len(features) * hidden, hidden, bias=False),
        "hidden_norm": kind.norm(hidden, layers.rms_norm_eps),
        "layers": nn.ModuleList(layer(layers, index) for index in range(config.num_layers)),
        "norm": kind.norm(hidden, layers.rms_norm_eps),
    }
    if config.head == "own":
        made["lm_head"] = nn.Linear(hidden, drafted, bias=False)
    if rank:
        tensors = fresh(shapes(config.markov_head, rank, hidden, known, drafted))
        made[prefix(config.markov_head)[:-1]] = _tree_of(tensors, nn.Parameter)
    if config.confidence_head != "none":
        width = hidden + rank * (config.confidence_head == "markov")
        tensors = {"proj.weight": torch.zeros(1, width), "proj.bias": torch.zeros(1)}
        made["confidence_head"] = _tree_of(tensors, nn.Buffer)
    return made


def _tree_of(tensors: dict[str, Tensor], kind: Any) -> nn.Module:
    """Modules whose tensors have these names."""
    made = nn.Module()
    for name, tensor in tensors.items():
        parent, _, leaf = name.rpartition(".")
        if parent and not hasattr(made, parent):
            made.add_module(parent, nn.Module())
        setattr(made.get_submodule(parent), leaf, kind(tensor))
    return made


class BlockNetwork:
    """Runs the decoder of an adapter, with the input embeddings of its base model."""

    def __init__(self, adapter: BlockAdapter, model: Any):
        self.adapter, self.model, self.config = adapter, model, adapter.config
        # Of weights that accelerate has offloaded, too.
        self.device, self._dtype = device_of(adapter.fc), adapter.fc.weight.dtype
        self._kind = self.config.layer_type
        with torch.device("cpu"):
            self._rotary = self._kind.rotary(self.config.layers()).to(self.device)
        self._rows = RowEmbeddings(model)

    def append(self, features: Tensor, positions: Tensor, cache: Cache) -> None:
        """Write keys and values of context into a cache.

        Args:
            features: ``(batch, n, features)`` of some tokens.
            positions: ``(batch, n)`` int64, of these tokens.
        """
        net = self.adapter
        context = net.hidden_norm(net.fc(features.to(self.device, self._dtype)))
        angles = self._rotary(context, positions)
        for index, layer in enumerate(net.layers):
            # The attention's forward would make queries, too.
            keys, values = self._kind.keys_values(layer.self_attn, context, angles)
            cache.update(keys, values, index)

    def run(
        self, tokens: Tensor, positions: Tensor, full: Tensor, sliding: Tensor, cache: Cache
    ) -> Tensor:
        """Run blocks.

        Args:
            tokens: ``(batch, n)`` int64, see :meth:`blocks`.
            positions: ``(batch, n)`` int64
            full, sliding: ``(batch, 1, n, slots)`` bool, True where a slot of a block sees one of
                the cache, in layers without and with a window.

        Returns:
            ``(batch, n, hidden)`` states that logits are computed from.
        """
        net, windowed = self.adapter, self.config.sliding_layers or ()
        hidden = self._embedded(tokens)
        angles = self._rotary(hidden, positions)
        for index, layer in enumerate(net.layers):
            mask = sliding if index in windowed else full
            given = {CACHE: cache, **self._kind.given()}
            hidden = layer(hidden, attention_mask=mask, position_embeddings=angles, **given)
        states: Tensor = net.norm(hidden)
        return states

    def _embedded(self, tokens: Tensor) -> Tensor:
        rows = self._rows(tokens.to(placement(self.model).device))
        return rows.to(self.device, self._dtype) * self.config.embedding_scale

    def shaped(self, logits: Tensor) -> Tensor:
        """Scale and cap logits, as the drafter says."""
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        return soft_capped(logits, self.config.logit_softcap)

    def blocks(self, anchors: Tensor) -> Tensor:
        """Tokens of the block of each anchor: ``(...)`` -> ``(..., block_size)``."""
        size, mask = self.config.block_size, self.config.mask_token_id
        assert mask is not None
        masked = anchors.new_full((*anchors.shape, size), mask)
        masked[..., 0] = anchors
        return masked

    def predicting(self, states: Tensor) -> Tensor:
        """The slots that predict the tokens after the root: ``(..., block_size, hidden)`` ->
        ``(..., distances, hidden)``."""
        return states if self.config.sample_from_anchor else states[..., 1:, :]


def window(config: BlockConfig, anchors: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """What layers with a sliding window see, of what others see: ``(batch, 1, queries, keys)``.

    Args:
        anchors: ``(batch, queries)`` position of the anchor of each query's block.
        queries: ``(batch, queries)`` positions of the queries.
        keys: ``(batch, keys)`` positions of the keys.
    """
    size, own, key = config.sliding_window or 0, queries[:, None, :, None], keys[:, None, None]
    if config.sliding_window_from == "query":
        seen = (own - key).abs() < size
    else:  # speculators counts from the anchor, and one token further
        seen = key >= anchors[:, None, :, None] - size
    return seen if config.sliding_window_non_causal else seen & (key <= own)


def block_sequences(
    network: BlockNetwork, input_ids: Tensor, attention_mask: Tensor | None, anchors: Tensor
) -> Tensor:
    """Run blocks at many places of whole sequences, as in decoding: for training, and for finished
    sequences. Gradients flow to the adapter.

    Args:
        input_ids: ``(batch, seq)``
        attention_mask: ``(batch, seq)``, 0 for padding, on either side; None for no padding.
        anchors: ``(batch, anchors)`` columns t. The context of a block are the tokens up to t; its
            first token is that of column t + 1, or the last one of the sequence.

    Returns:
        ``(batch, anchors, distances, hidden)`` states that the tokens of columns t + 2, t + 3, ...
        are predicted from.
    """
    config, device = network.config, network.device
    layers = tuple(config.feature_layers or ())
    features = token_hidden(network.model, input_ids, attention_mask, layers).to(device)
    batch, seq = input_ids.shape
    ids, anchors = input_ids.to(device), anchors.to(device)
    real = torch.ones_like(ids) if attention_mask is None else attention_mask.to(device)
    places = (real.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache()
    network.append(features, places, cache)

    tokens = network.blocks(ids.gather(1, (anchors + 1).clamp(max=seq - 1)))
    count, size = anchors.shape[1], tokens.shape[-1]
    first = places.gather(1, anchors) + 1  # position of each block's first token
    own = first[:, :, None] + torch.arange(size, device=device)
    queries, keys = own.flatten(1), torch.cat([places, own.flatten(1)], 1)
    block = torch.arange(count, device=device).repeat_interleave(size)
    upto = torch.arange(seq, device=device) <= anchors[:, block, None]
    same = (block[:, None] == block).expand(batch, -1, -1)
    full = torch.cat([upto & (real[:, None] != 0), same], 2)[:, None]
    sliding = full
    if config.sliding_layers:
        sliding = full & window(config, first[:, block], queries, keys)
    hidden = network.run(tokens.flatten(1), queries, full, sliding, cache)
    return network.predicting(hidden.view(batch, count, size, -1))
