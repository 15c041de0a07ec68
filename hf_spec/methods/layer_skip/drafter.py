"""Draft with the model itself, leaving out layers; weights and cache are shared.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding" (2023), algorithms 3 and 4. What a drafted token writes into the cache is overwritten by
the verifying forward, so every layer ends up with the full model's states.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter, find_active
from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.drafting.drafter import DecodingState, Draft, Drafter
from hf_spec.drafting.predictions import distribution
from hf_spec.methods.layer_skip.options import LayerSkipOptions
from hf_spec.policy.memory import alone, recall
from modeling_patches.layer_skip import LayerSkipper
from modeling_patches.low_rank import MergedCopies
from modeling_patches.per_call import Changes


class LayerSkipDrafter(Drafter):
    """Drafts a chain token by token with the chosen sublayers left out."""

    single_forward: ClassVar[bool] = False
    runs_modules: ClassVar[bool] = True
    options: LayerSkipOptions
    drafting: Changes

    def __init__(self, model: Any, options: LayerSkipOptions):
        super().__init__(model, options)
        attention, mlp, adapter = _choice(model, options)
        self.drafting = LayerSkipper(model, attention, mlp).changes
        layer: Any = None if adapter is None else adapter.layer
        update = None if adapter is None else layer.updates.get(adapter.name)
        self.learned = None if update is None else MergedCopies(update, self.drafting)
        name = None if adapter is None else adapter.name
        key = "layer_skip", name, tuple(attention), tuple(mlp), repr(options)
        self._left_out = tuple(attention), tuple(mlp), adapter is not None
        self.exit = recall(model, key, lambda: DraftExit(options))

    @property
    def kind_of_forward(self) -> Hashable:
        return super().kind_of_forward, self._left_out

    def start(self, state: DecodingState) -> None:
        graphs = state.forward.graphs
        if graphs is not None and self.learned is not None:
            graphs.hold(self.learned.weights.values())

    def propose(self, state: DecodingState) -> Draft:
        depth = min(self.options.max_draft, state.max_depth)
        samples = self.options.samples and state.do_sample
        tokens = state.root[:, None]
        drafting = list(state.active)
        lengths = [0] * len(drafting)
        drafted: list[list[int]] = [[] for _ in drafting]
        distributions: list[Tensor] = []
        for k in range(depth):
            if not any(drafting):
                break
            chain = TokenTree.chain(k).batch(len(drafting), tokens.device)
            output = state.forward(tokens, chain, first=k, changes=self.drafting)
            logits = output.logits[:, -1]
            state.stats.num_draft_forwards += 1
            # What the drafting model itself says: a low temperature is always sure.
            own = distribution(logits.float())
            scores = state.process(logits, drafted, drafting)
            if samples:
                distributions.append(distribution(scores))
                token = torch.multinomial(distributions[-1], 1)
            else:
                token = scores.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, token], dim=1)
            confidence = own.gather(1, token)[:, 0].tolist()
            for row, chosen in enumerate(token[:, 0].tolist()):
                if drafting[row]:
                    drafted[row].append(chosen)
                    lengths[row] = k + 1
                    drafting[row] = self.exit.go_on(confidence[row])
        state.cache.rollback()
        tree = TreeBatch.stack([TokenTree.chain(n) for n in lengths], tokens.device)
        stacked = None
        if distributions:
            stacked = torch.stack([torch.zeros_like(distributions[0]), *distributions], dim=1)
        return Draft(tree, tokens, stacked)

    def observe(self, state: DecodingState, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        drafted = sum(depth for path, depth in zip(nodes, draft.tree.row_depths) if path)
        if drafted:
            self.exit.update(sum(len(path) - 1 for path in nodes if path) / drafted)

    def details(self) -> dict[str, Any]:
        merged = {} if self.learned is None else {"merged_bytes": self.learned.num_bytes}
        return {"threshold": round(self.exit.gamma, 4), **merged}

    def chain(self, input_ids: Tensor) -> list[int]:
        output = self.drafting.run(
            self.model.generate, input_ids, max_new_tokens=self.options.max_draft, do_sample=False,
            num_beams=1, assistant_strategy=None,
        )  # fmt: skip
        return output[0, input_ids.shape[1] :].tolist()


class DraftExit:
    """When to stop drafting: section 3.4, eqs. (2)-(4).

    A drafting stage moves gamma by (1 - beta2) epsilon, 0.001 with the paper's numbers, so that it
    takes hundreds of them to adapt; hence one object serves all calls, those of several threads,
    too.
    """

    def __init__(self, options: LayerSkipOptions):
        self.options = options
        self.gamma = options.threshold
        self.acceptance: float | None = None

    def go_on(self, confidence: float) -> bool:
        """Whether to draft another token after one of this draft probability."""
        return self.options.draft_exit == "fixed" or confidence >= self.gamma

    @alone
    def update(self, acceptance: float) -> None:
        """Adapt gamma to the acceptance rate AR_e of the e-th drafting stage, over all its rows."""
        if self.options.draft_exit != "adaptive":
            return
        o = self.options
        beta1 = o.beta1 if self.acceptance is not None else 0.0
        smoothed = beta1 * (self.acceptance or 0.0) + (1 - beta1) * acceptance  # eq. (2)
        step = o.threshold_step if smoothed <= o.target_acceptance else -o.threshold_step
        gamma = o.beta2 * self.gamma + (1 - o.beta2) * (self.gamma + step)  # eqs. (3), (4)
        # Beyond these all drafts are alike; from far beyond there would be no way back.
        self.gamma = min(max(gamma, 0.0), 1.0)
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
