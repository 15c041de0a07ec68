"""Blocks at many places of whole sequences at once: for training, and for finished sequences."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_spec.drafting.block_diffusion.network import BlockNetwork, window
from hf_spec.model.sequences import token_hidden


def block_sequences(
    network: BlockNetwork, input_ids: Tensor, attention_mask: Tensor | None, anchors: Tensor
) -> Tensor:
    """Run blocks behind tokens of sequences, as in decoding; gradients flow to the adapter.

    Args:
        network: the drafter's decoder.
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
