"""``exact="strict"``: which models and calls it works with.

A model is tried before its first call, once for each dtype, number of threads, batch size and kind
of forward: after a random prompt, logits along a path of a tree must have the bits of plain
generation's. What no trial would show is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.memory import memory
from hf_spec.core.probes import ProbeGroup
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree import Tree
from hf_spec.decoding.selfcheck import Trial
from hf_spec.decoding.strategy import Strategy
from hf_spec.drafting.options import STRICT
from modeling_patches.attention_masks import local_attention
from modeling_patches.bitwise import obstacle
from modeling_patches.cache_name import CACHE
from modeling_patches.dynamic_rope import followers
from modeling_patches.linear_attention import recurrent_rules
from modeling_patches.positions import needs_positions
from modeling_patches.ranks import Ranks
from modeling_patches.weights import placement

#: Tokens of a trial's prompt and of its output. Keys are an odd number, with a rest after vectors
#: of any size.
_PROMPT, _NEW = 19, 8
#: A path on which each node but the last has a sibling, which comes first.
_TREE = TokenTree.from_paths([[1] * depth + [rank] for depth in range(_NEW - 2) for rank in (0, 1)])
_PATH = [2 * depth for depth in range(_NEW - 1)]


@torch.no_grad()
def check_strict(
    strategy: Strategy,
    batch_size: int,
    attention_mask: Tensor | None,
    given: Any,
    synced_gpus: bool,
) -> None:
    """Raise a ValueError unless a call equals plain generation bit for bit.

    Args:
        strategy: the call's; its drafter does not prune afterwards.
        attention_mask, given: the prompt's mask and KV cache.
        synced_gpus: whether other processes generate at the same time.
    """
    model, drafter, why = strategy.model, strategy.drafter, None
    if strategy.graphs is not None:
        why = "cache_implementation='static': compiled code rounds in a way of its own"
    elif synced_gpus:
        why = "synced_gpus=True: ranks would try their products at different times"
    elif strategy.samples and batch_size > 1:
        why = (
            "do_sample=True for several sequences: each draws random numbers of its own, in plain "
            "generation all draw the same ones in turn. Sample one at a time"
        )
    elif isinstance(given, TreeCache) and given.max_length:
        why = (
            f"a TreeCache as {CACHE}: new tokens of a prompt run after it one tree at a time, in "
            "plain generation all at once. Give a DynamicCache"
        )
    elif (
        type(given) is DynamicCache  # perhaps created without a config
        and any(local_attention(model).values())
        and not any(getattr(layer, "is_sliding", False) for layer in given.layers)
    ):
        why = (
            f"a {CACHE} that holds more than the windows of {type(model).__name__}. Create it by "
            "DynamicCache(config=model.config)"
        )
    elif attention_mask is not None and not bool(attention_mask.all()):
        why = (
            "a prompt with padding: how plain generation rounds a row depends on the padding "
            "before it. Give prompts of equal length, or one at a time"
        )
    elif drafter.pruning is not None and drafter.pruning.always:
        why = "prune=True: pruned forwards leave nodes out midway. Give prune=False or 'auto'"
    if why is not None:
        raise ValueError(f"exact={STRICT!r} with {why}. Or leave one of the two out.")
    drafter.pruning = None
    placed, attention = placement(model), model.config.get_text_config(decoder=True)
    kind = (
        placed, torch.get_num_threads(), attention._attn_implementation, batch_size,
        drafter.kind_of_forward, strategy.packed is not None,
    )  # fmt: skip
    checked = memory(model).setdefault("strict checks", set())
    if kind in checked:
        return
    try:
        why = _obstacle(model) or _trial(strategy, batch_size)
    except ValueError as error:
        why = str(error).removesuffix(".")
    if why is not None:
        raise ValueError(
            f"{type(model).__name__} in {placed.dtype} does not work with exact={STRICT!r} "
            f"({strategy.method.name}): {why}. Leave exact={STRICT!r} out."
        )
    checked.add(kind)


def _obstacle(model: Any) -> str | None:
    """Why a model's steps cannot be strict; None if no reason is known."""
    if recurrent_rules(model):
        return "its recurrent layers add up several tokens in another order than one"
    if needs_positions(model) or followers(model):
        return "its positions depend on more than the token"
    if Ranks(model).size > 1:
        return "it is split over several processes"
    return obstacle(model)


def _trial(strategy: Strategy, batch_size: int) -> str | None:
    """What a trial has found; None if all bits are equal."""
    trial, drafter = Trial(strategy.model, rows=batch_size, width=_PROMPT), strategy.drafter
    plain, device = trial.plain(_NEW), trial.prompt.device
    target = trial.target(drafter, drafter.reads, strict=True, packed=strategy.packed)
    tokens = plain.sequences[:, _PROMPT:]
    on_path, beside = tokens[:, : len(_PATH)], tokens.flip(1)
    nodes = torch.stack([on_path[:, 1:], beside[:, : len(_PATH) - 1]], 2)
    nodes = torch.cat([on_path[:, :1], nodes.flip(2).flatten(1)], 1)
    tree = Tree.of_shapes([_TREE] * batch_size, device).with_tokens(nodes)
    if drafter.probe_inputs is not None:
        tree = tree.attach_probes(ProbeGroup.causal(len(drafter.probe_inputs.embeddings)))
    # The path's last node runs once more, alone, after what the cache has kept of the others.
    kept = _PATH[:-1]
    output = target(tree)
    path = torch.tensor([kept] * batch_size, device=device)
    target.cache.commit([len(kept)] * batch_size, path, output.tree.slots)
    again = target(Tree.roots(on_path[:, -1])).logits[:, 0]
    found = [*output.logits[:, _PATH].unbind(1), again]
    expected = [*plain.logits[1:], plain.logits[-1]]
    different = sum(not torch.equal(*pair) for pair in zip(found, expected, strict=True))
    if not different:
        return None
    return f"in a trial {different} of {len(found)} rows of logits differ from plain steps"
