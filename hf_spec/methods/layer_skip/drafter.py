"""Draft with the model itself, leaving out layers; weights and cache are shared.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding" (2023), algorithms 3 and 4. What a drafted token writes into the cache is overwritten by
the verifying forward, so every layer ends up with the full model's states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.methods.active_adapter import ActiveAdapter, find_active
from hf_spec.methods.base import DecodingState, Draft, Drafter
from hf_spec.methods.layer_skip.drafting import DraftingModel
from hf_spec.methods.layer_skip.options import LayerSkipOptions


class LayerSkipDrafter(Drafter):
    """Drafts a chain token by token with the chosen sublayers left out."""

    single_forward: ClassVar[bool] = False
    options: LayerSkipOptions
    drafting: DraftingModel

    def __init__(self, model: Any, options: LayerSkipOptions):
        super().__init__(model, options)
        self.drafting = DraftingModel(model, *_choice(model, options))
        self.skipper = self.drafting.skipper

    def start(self, state: DecodingState) -> None:
        rows = state.batch_size
        self.exits = [DraftExit(self.options) for _ in range(rows)]
        self.all_exits = self.exits  # of the whole call; those of finished rows leave the others
        mode = self.options.draft_tokens
        self.samples = state.do_sample and mode in ("auto", "sampled")
        if self.options.acceptance == "match":
            self.samples = False

    def propose(self, state: DecodingState) -> Draft:
        depth = min(self.options.max_draft, state.max_depth)
        tokens = state.root[:, None]
        drafting = list(state.active)
        lengths = [0] * len(drafting)
        drafted: list[list[int]] = [[] for _ in drafting]
        distributions: list[Tensor] = []
        with self.drafting:
            for k in range(depth):
                if not any(drafting):
                    break
                chain = TokenTree.chain(k).batch(len(drafting), tokens.device)
                logits = state.forward(tokens, chain, first=k).logits[:, -1]
                state.stats.num_draft_forwards += 1
                q = state.process(logits, drafted, drafting).softmax(-1)
                if self.samples:
                    token = torch.multinomial(q, 1)
                    distributions.append(q)
                else:
                    token = q.argmax(-1, keepdim=True)
                tokens = torch.cat([tokens, token], dim=1)
                confidence = q.gather(1, token)[:, 0].tolist()
                for row, chosen in enumerate(token[:, 0].tolist()):
                    if drafting[row]:
                        drafted[row].append(chosen)
                        lengths[row] = k + 1
                        drafting[row] = self.exits[row].go_on(confidence[row])
        state.cache.rollback()
        tree = TreeBatch.stack([TokenTree.chain(n) for n in lengths], tokens.device)
        stacked = None
        if distributions:
            stacked = torch.stack([torch.zeros_like(distributions[0]), *distributions], dim=1)
        return Draft(tree, tokens, stacked)

    def observe(self, state: DecodingState, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        for one, path, drafted in zip(self.exits, nodes, draft.tree.row_depths):
            if path and drafted:
                one.update((len(path) - 1) / drafted)

    def select(self, state: DecodingState, rows: Sequence[int]) -> None:
        self.exits = [self.exits[row] for row in rows]

    def details(self) -> dict[str, Any]:
        exits = getattr(self, "all_exits", [])
        return {"threshold": [round(one.gamma, 4) for one in exits]}

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        # Stock decoding hands over no cache, so the draft runs on its own.
        with self.drafting:
            candidates = self.model.generate(
                input_ids, max_new_tokens=self.options.max_draft, do_sample=False,
                num_beams=1, assistant_strategy=None,
            )  # fmt: skip
        return candidates, None


class DraftExit:
    """When to stop drafting, for one row: section 3.4, eqs. (2)-(4)."""

    def __init__(self, options: LayerSkipOptions):
        self.options = options
        self.gamma = options.threshold
        self.acceptance: float | None = None

    def go_on(self, confidence: float) -> bool:
        """Whether to draft another token after one of this draft probability."""
        return self.options.draft_exit == "fixed" or confidence >= self.gamma

    def update(self, acceptance: float) -> None:
        """Adapt gamma to the acceptance rate AR_e of the e-th drafting stage."""
        if self.options.draft_exit != "adaptive":
            return
        o = self.options
        beta1 = o.beta1 if self.acceptance is not None else 0.0
        smoothed = beta1 * (self.acceptance or 0.0) + (1 - beta1) * acceptance  # eq. (2)
        step = o.threshold_step if smoothed <= o.target_acceptance else -o.threshold_step
        self.gamma = o.beta2 * self.gamma + (1 - o.beta2) * (self.gamma + step)  # eqs. (3), (4)
        self.acceptance = smoothed


def _choice(
    model: Any, options: LayerSkipOptions
) -> tuple[list[int], list[int], ActiveAdapter | None]:
    """Layers to skip: those of the options, else those of the active adapter, with what it learned.

    What an adapter learned makes up for its own layers, and is left out where others are skipped.
    """
    attention, mlp = options.skip_attention, options.skip_mlp
    if attention is None and mlp is None:
        adapter = find_active(model, "LAYER_SKIP")
        if adapter is None:
            raise ValueError(
                "assistant_strategy='layer_skip' needs the layers to skip: give assistant_kwargs="
                "{'skip_attention': [...], 'skip_mlp': [...]}, load a LAYER_SKIP adapter "
                "(model.load_adapter), or find good layers with `hf-spec search`."
            )
        config: Any = adapter.config
        return config.skip_attention, config.skip_mlp, adapter
    return list(attention or ()), list(mlp or ()), None
