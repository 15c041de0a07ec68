"""A decoding state to draft from with ``layer_skip``, and what a stock cache drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from running import running
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_spec.cache.convert import pack
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.drafting.state import DecodeState
from hf_spec.model.target import Target
from modeling_patches.cache_name import CACHE
from modeling_patches.layer_skip import LayerSkipper

#: name -> what is skipped; layer 0 among it, since a stock cache takes its length from there.
SKIPS: dict[str, dict[str, list[int]]] = {
    "nothing": {"skip_attention": [], "skip_mlp": []},
    "attention 0": {"skip_attention": [0], "skip_mlp": []},
    "layer 0": {"skip_attention": [0], "skip_mlp": [0]},
    "middle": {"skip_attention": [1], "skip_mlp": [2]},
    "first two": {"skip_attention": [0, 1], "skip_mlp": [0, 1]},
}


def rows_of(model: PreTrainedModel, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    vocab = model.config.vocab_size
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


class Setting:
    """A decoding state after a prefill of ``rows``, whose last tokens are the roots."""

    def __init__(self, model: PreTrainedModel, rows: list[list[int]]):
        self.model, self.rows = model, rows
        width = max(map(len, rows)) - 1
        ids = torch.tensor([[0] * (width + 1 - len(row)) + row[:-1] for row in rows])
        mask = torch.tensor([[0] * (width + 1 - len(row)) + [1] * (len(row) - 1) for row in rows])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        prefilled = model(ids, attention_mask=mask, position_ids=positions, use_cache=True)
        cache = pack(prefilled[CACHE], mask, width + 16, "cpu")
        target = Target(model, cache, torch.full((len(rows),), 1000))
        self.state = DecodeState(
            model, None, target, cache, rows,
            root=torch.tensor([row[-1] for row in rows]), active=[True] * len(rows),
            remaining=[50] * len(rows), do_sample=False,
            process=lambda logits, suffixes, active, drafting: logits.float(),
        )  # fmt: skip

    def verify(self, tree: Tree) -> Tensor:
        return self.state.target(tree).logits


def chains(*counts: int) -> HostResult:
    """The result of a step that accepts so many nodes of each row's chain."""
    return HostResult([[*range(n)] for n in counts], [[7] * n for n in counts], [0] * len(counts))


def draft_by_stock_cache(
    model: PreTrainedModel, row: list[int], skips: dict[str, list[int]], length: int
) -> tuple[list[int], list[Tensor]]:
    """Prefix states of the full model, then greedy tokens of the skipping model one by one."""
    cache: DynamicCache = model(torch.tensor([row[:-1]]), use_cache=True)[CACHE]
    tokens, logits = [row[-1]], []
    with running(LayerSkipper(model, **skips).changes):
        for step in range(length):
            place = len(row) - 1 + step
            visible = torch.zeros(1, 1, 1, place + 1, dtype=torch.float64)  # all of it
            out = model(
                torch.tensor([tokens[-1:]]), **{CACHE: cache}, attention_mask=visible,
                position_ids=torch.tensor([[place]]),
            )  # fmt: skip
            logits.append(out.logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
    return tokens[1:], logits
