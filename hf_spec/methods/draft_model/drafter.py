"""An assistant that reads the text itself, as any causal language model does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_spec.cache.convert import take_over
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.transfer import to_device
from hf_spec.core.tree import Tree
from hf_spec.drafting.forward_drafter import GrowOptions
from hf_spec.drafting.grow import Frontier, extended
from hf_spec.drafting.state import DecodeState
from hf_spec.methods.draft_model.assistant import AssistantDrafter
from hf_spec.model.appending import append
from hf_spec.model.compiled import PARTS, CompiledTarget
from hf_spec.model.hidden_states import gather_hidden, supported_kwargs
from hf_spec.model.target import Target
from hf_spec.modeling_patches.cache_name import CACHE
from hf_spec.modeling_patches.linear_attention import recurrent_rules
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.modeling_patches.support import check_model
from hf_spec.modeling_patches.weights import placement


class DraftModelDrafter(AssistantDrafter):
    """An assistant model drafts, with a KV cache of its own.

    Raises:
        ValueError: see :class:`AssistantDrafter`; or the assistant cannot run trees.
    """

    per_row = ("_logits",)

    def __init__(self, model: Any, options: GrowOptions, assistant: Any):
        super().__init__(model, options, assistant)
        self.outside = "the assistant's forwards are code of their own"
        check_model(assistant)
        self._target: Target | None = None  # of the assistant
        self._logits: Tensor | None = None  # (batch, vocab) after each sequence's last token

    def catch_up(self, state: DecodeState) -> None:
        target = self._target
        if target is None:
            self._target = self._prompt(state)
            self.cache = self._target.cache
            return
        rows = self._known(
            tokens[length:] for tokens, length in zip(state.tokens, target.cache.host_lengths)
        )
        new = [row for row, tokens in enumerate(rows) if tokens]
        if not new:  # finished sequences have none
            return
        assert self._logits is not None
        if target.graphs is None or max(map(len, rows)) > PARTS:
            index = to_device(new, self._logits.device)
            self._logits.index_copy_(0, index, append(target, rows).logits)
        else:
            self._logits = self._logits_after(target, rows)

    def _logits_after(self, target: Target, rows: list[list[int]]) -> Tensor:
        """:attr:`_logits` after some more tokens, by a forward of a size that recurs."""
        counts, device = [len(row) for row in rows], target.cache.lengths.device
        tokens = to_device([row + [0] * (max(counts) - len(row)) for row in rows], device)
        logits = target(Tree.chain(tokens), changes=Changes()).logits
        target.cache.commit(counts)
        ends = to_device(counts, logits.device)[:, None]
        last = gather_hidden(logits, (ends - 1).clamp(min=0))[:, 0]
        assert self._logits is not None
        return torch.where(ends > 0, last, self._logits)

    def _prompt(self, state: DecodeState) -> Target:
        """The assistant after the text so far, which runs as Transformers runs a prompt."""
        assistant, rows = self.assistant, self._known(state.tokens)
        text, device = assistant.config.get_text_config(decoder=True), placement(assistant).device
        lengths, width = [len(row) for row in rows], max(map(len, rows))
        ids = to_device([[0] * (width - len(row)) + row for row in rows], device)
        padding = to_device([width - length for length in lengths], device)
        columns = torch.arange(width, device=device)
        mask = columns >= padding[:, None]
        source, positions = DynamicCache(config=text), (columns - padding[:, None]).clamp(min=0)
        rules = recurrent_rules(assistant)
        # A recurrent state is not continued by several tokens everywhere.
        at_once = width if rules else state.prompt_part
        for start in range(0, width, at_once):
            end = start + at_once
            given = supported_kwargs(
                assistant, input_ids=ids[:, start:end], attention_mask=mask[:, :end].long(),
                position_ids=positions[:, start:end], use_cache=True, logits_to_keep=1,
                **{CACHE: source},
            )  # fmt: skip
            logits = assistant(**given).logits
        self._logits = logits[:, -1].clone()
        graphs = state.target.graphs
        own = graphs and graphs.beside(assistant, "draft_model")
        allocate = None if own is None or graphs is None else graphs.allocate
        cache = TreeCache(len(source.layers), len(rows), device, allocate, rules)
        ends = list(map(sum, zip(lengths, state.remaining)))
        take_over(cache, source, mask, max(state.remaining), seq=width)
        # A table of positions may be shorter than the text.
        context = getattr(text, "max_position_embeddings", None) or max(ends)
        last = to_device([min(end, context) - 1 for end in ends], device)
        if own is None:
            return Target(assistant, cache, last, beside=self.model)
        return CompiledTarget(assistant, cache, last, beside=self.model, graphs=own)

    def _known(self, rows: Iterable[Sequence[int]]) -> list[list[int]]:
        """Tokens as the assistant gets them, some other one for what it does not know."""
        return [[min(token, self.shared - 1) for token in row] for row in rows]

    def level(self, frontier: Frontier) -> Tensor:
        assert self._target is not None and self._logits is not None
        if not frontier.depth:
            return self._logits[:, None, : self.shared]
        self._block, first = extended(self._block, frontier)
        # With changes, even none, a single node is not the last one that recurrent layers see.
        logits = self._target(self._block, first=first, changes=Changes()).logits
        return logits[..., : self.shared]

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        if self._target is not None:
            self._target.select(rows)

    # -- stock assisted decoding -------------------------------------------------------------

    def chain(self, input_ids: Tensor) -> list[int]:
        known = input_ids.to(placement(self.assistant).device).clamp(max=self.shared - 1)
        found = self.assistant.generate(
            known, attention_mask=torch.ones_like(known), max_new_tokens=self.depth,
            do_sample=False, num_beams=1, assistant_strategy=None,
        )  # fmt: skip
        tokens: list[int] = found[0, input_ids.shape[1] :].tolist()
        wrong = (place for place, token in enumerate(tokens) if token >= self.shared)
        return tokens[: next(wrong, len(tokens))]
