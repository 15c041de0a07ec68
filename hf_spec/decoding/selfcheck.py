"""A trial of the tree forward on architectures that our tests do not cover.

Once per model: a small tree behind a short random prompt must give the logits that plain forward
passes give for each of its paths. A model that mishandles an explicit mask or explicit positions
is refused here, instead of generating something else without a word.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers import DynamicCache

from hf_spec.core.cache import TreeCache, check_packable
from hf_spec.core.tree import TokenTree
from hf_spec.model.tree_forward import TreeForward
from modeling_patches.support import VERIFIED

#: Largest relative error of the logits that rounding explains; a wrong mask or position is far
#: above it (0.1 and more in the tests' models).
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}

_checked: weakref.WeakSet[Any] = weakref.WeakSet()

_TREE = TokenTree.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 1, 0]])


@torch.no_grad()
def check_tree_forward(model: Any) -> None:
    """Raise unless the model's tree forward equals its plain forward; free for known models.

    Raises:
        ValueError: naming the architecture and the error that was found.
    """
    text_config = model.config.get_text_config(decoder=True)
    if text_config.model_type in VERIFIED or model in _checked:
        return
    device = model.get_input_embeddings().weight.device
    # A generator of its own: the caller's seeds must not notice.
    generator = torch.Generator().manual_seed(0)
    length = 8 + len(_TREE)
    ids = torch.randint(text_config.vocab_size, (1, length), generator=generator).to(device)
    prompt, nodes = ids[:, :8], ids[:, 8:]
    cache = DynamicCache(config=text_config)
    model(input_ids=prompt, past_key_values=cache, use_cache=True)
    check_packable(cache)
    packed = TreeCache.pack(cache, None, length, device)
    forward = TreeForward(model, packed, torch.tensor([length], device=device))
    tree_logits = forward(nodes, _TREE.batch(1, device)).logits[0].float()
    for node in range(len(_TREE)):
        path = [at for at in range(len(_TREE)) if bool(_TREE.batch().ancestors[0, node, at])]
        plain = model(input_ids=torch.cat([prompt, nodes[:, path]], 1), use_cache=False)
        expected = plain.logits[0, -1].float()
        error = float((tree_logits[node] - expected).norm() / expected.norm())
        if not error <= TOLERANCE.get(model.dtype, 5e-2):
            raise ValueError(
                f"{type(model).__name__} does not take explicit masks and positions as tree "
                f"attention needs them (relative error {error:.2g} in a trial). Generate without "
                "assistant_strategy, or try attn_implementation='eager'."
            )
    _checked.add(model)
