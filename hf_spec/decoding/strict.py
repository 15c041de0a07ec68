"""``exact="strict"``: which models and calls it works with.

A model is tried before its first call, once for each dtype, number of threads, batch size and kind
of forward: after a random prompt, logits along a path of a tree must have the bits of plain
generation's. What no trial would show is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LogitsProcessorList

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.memory import memory
from hf_spec.core.probes import ProbeGroup
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree import Tree
from hf_spec.decoding.handover import Handover
from hf_spec.decoding.prefill import prefill
from hf_spec.decoding.selfcheck import until
from hf_spec.decoding.sequences import Sequences
from hf_spec.drafting.drafter import Drafter
from hf_spec.drafting.options import STRICT
from hf_spec.model.hidden_states import taken
from hf_spec.model.packed_weights import PackedWeights
from modeling_patches.attention_masks import local_attention
from modeling_patches.bitwise import obstacle
from modeling_patches.cache_name import CACHE
from modeling_patches.dynamic_rope import followers
from modeling_patches.linear_attention import recurrent_rules
from modeling_patches.positions import needs_positions
from modeling_patches.ranks import Ranks
from modeling_patches.support import empty_cache
from modeling_patches.weights import placement

#: Tokens of a trial's prompt and of its output. Keys are an odd number, with a rest after vectors
#: of any size.
_PROMPT, _NEW = 19, 8
#: A path on which each node but the last has a sibling, which comes first.
_TREE = TokenTree.from_paths([[1] * depth + [rank] for depth in range(_NEW - 2) for rank in (0, 1)])
_PATH = [2 * depth for depth in range(_NEW - 1)]

_LEAVE = f"Leave exact={STRICT!r} out."


def check_strict_call(
    model: Any,
    attention_mask: Tensor | None,
    given: Any,
    *,
    synced_gpus: bool,
    compiled: bool,
    sampled: bool,
) -> None:
    """Raise if a call cannot equal plain generation bit for bit.

    Args:
        model: a causal language model.
        attention_mask: the prompt's.
        given: the call's KV cache.
        synced_gpus: whether other processes generate at the same time.
        compiled: whether steps are compiled.
        sampled: whether several sequences are sampled.

    Raises:
        ValueError: naming the argument.
    """
    why = None
    if compiled:
        why = "cache_implementation='static': compiled code rounds in a way of its own"
    elif synced_gpus:
        why = "synced_gpus=True: ranks would try their products at different times"
    elif sampled:
        why = (
            "do_sample=True for several sequences: each draws random numbers of its own, in plain "
            "generation all draw the same ones in turn. Sample one at a time"
        )
    elif isinstance(given, TreeCache) and given.max_length:
        why = (
            f"a TreeCache as {CACHE}: new tokens of a prompt run after it one tree at a time, in "
            "plain generation all at once. Give a DynamicCache"
        )
    elif type(given) is DynamicCache and _forgets(model, given):
        why = (
            f"a {CACHE} that holds more than the windows of {type(model).__name__}. Create it by "
            "DynamicCache(config=model.config)"
        )
    elif attention_mask is not None and not bool(attention_mask.all()):
        why = (
            "a prompt with padding: how plain generation rounds a row depends on the padding "
            "before it. Give prompts of equal length, or one at a time"
        )
    if why is not None:
        raise ValueError(f"exact={STRICT!r} with {why}. Or leave one of the two out.")


def _forgets(model: Any, given: DynamicCache) -> bool:
    """Whether a cache was created without a config, and the model has sliding windows."""
    windows = any(local_attention(model).values())
    return windows and not any(getattr(layer, "is_sliding", False) for layer in given.layers)


@torch.no_grad()
def check_strict(
    model: Any, name: str, drafter: Drafter, batch_size: int, packed: PackedWeights | None
) -> None:
    """Raise unless steps of a model equal plain generation's bit for bit.

    Args:
        model: a causal language model.
        name: name of the strategy, for errors.
        drafter: the call's drafter; it does not prune afterwards, unless it must.
        batch_size: of the call.
        packed: copies of weights that its steps may use.

    Raises:
        ValueError: naming the model and what stands in the way.
    """
    if drafter.pruning is not None and drafter.pruning.always:
        raise ValueError(
            f"exact={STRICT!r} with prune=True: pruned forwards leave nodes out midway. Give "
            "prune=False or 'auto', or leave one of the two out."
        )
    drafter.pruning = None
    placed, attention = placement(model), model.config.get_text_config(decoder=True)
    kind = (
        placed, torch.get_num_threads(), attention._attn_implementation, batch_size,
        drafter.kind_of_forward, packed is not None,
    )  # fmt: skip
    checked = memory(model).setdefault("strict checks", set())
    if kind in checked:
        return
    try:
        why = _obstacle(model) or _trial(model, drafter, batch_size, packed)
    except ValueError as error:
        why = str(error).removesuffix(".")
    if why is not None:
        raise ValueError(
            f"{type(model).__name__} in {placed.dtype} does not work with exact={STRICT!r} "
            f"({name}): {why}. {_LEAVE}"
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


def _trial(
    model: Any, drafter: Drafter, batch_size: int, packed: PackedWeights | None
) -> str | None:
    """What a trial has found; None if all bits are equal."""
    generator = torch.Generator("cpu").manual_seed(0)
    size = model.config.get_text_config(decoder=True).vocab_size
    prompt = torch.randint(size, (batch_size, _PROMPT), generator=generator, device="cpu")
    prompt = prompt.to(placement(model).device)
    config = GenerationConfig(return_dict_in_generate=True, output_logits=True)
    config._pad_token_tensor = None

    def inputs() -> dict[str, Any]:
        mask = torch.ones_like(prompt)
        positions = taken(model, position_ids=mask.cumsum(-1) - 1, logits_to_keep=1)
        return {"attention_mask": mask, CACHE: empty_cache(model), "use_cache": True, **positions}

    plain: Any = GenerationMixin._sample(
        model, prompt, LogitsProcessorList(), until(_PROMPT + _NEW), config, **inputs()
    )
    sequences = Sequences(prompt, None, until(_PROMPT + _NEW + 1))
    own = inputs()
    handover = Handover(own[CACHE], sequences, False)
    target = prefill(
        model, prompt, config, own, handover, drafter, drafter.reads, strict=True, packed=packed
    ).target
    tokens = plain.sequences[:, _PROMPT:]
    on_path, beside = tokens[:, : len(_PATH)], tokens.flip(1)
    nodes = torch.stack([on_path[:, 1:], beside[:, : len(_PATH) - 1]], 2)
    nodes = torch.cat([on_path[:, :1], nodes.flip(2).flatten(1)], 1)
    tree = Tree.of_shapes([_TREE] * batch_size, prompt.device).with_tokens(nodes)
    if drafter.probe_inputs is not None:
        tree = tree.attach_probes(ProbeGroup.causal(len(drafter.probe_inputs.embeddings)))
    # The path's last node runs once more, alone, after what the cache has kept of the others.
    kept = _PATH[:-1]
    output = target(tree)
    path = torch.tensor([kept] * batch_size, device=prompt.device)
    target.cache.commit([len(kept)] * batch_size, path, output.tree.slots)
    again = target(Tree.roots(on_path[:, -1])).logits[:, 0]
    found = [*output.logits[:, _PATH].unbind(1), again]
    expected = [*plain.logits[1:], plain.logits[-1]]
    different = sum(not torch.equal(*pair) for pair in zip(found, expected, strict=True))
    if not different:
        return None
    return f"in a trial {different} of {len(found)} rows of logits differ from plain steps"
