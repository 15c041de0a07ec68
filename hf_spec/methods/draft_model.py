"""``draft_model``: another, smaller model with the same tokenizer drafts.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), with trees
that grow level by level as in EAGLE-2 (Li et al., 2024, section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_spec.cache.convert import take_over
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.limits import MAX_DRAFT_TOKENS
from hf_spec.core.transfer import sent
from hf_spec.core.tree import Tree
from hf_spec.drafting.forward_drafter import ForwardDrafter, GrowOptions
from hf_spec.drafting.grow import Frontier, extended
from hf_spec.drafting.options import key_of
from hf_spec.drafting.state import DecodeState
from hf_spec.methods.registry import Method
from hf_spec.model.appending import append
from hf_spec.model.hidden_states import Reads, taken
from hf_spec.model.target import Target
from modeling_patches.cache_name import CACHE
from modeling_patches.linear_attention import recurrent_rules
from modeling_patches.per_call import Changes
from modeling_patches.support import check_model
from modeling_patches.weights import input_features, placement

#: Rows by which the embeddings of models with the same tokenizer may differ: some are padded.
PADDING = 1024


class DraftModelDrafter(ForwardDrafter):
    """An assistant model drafts, with a KV cache of its own.

    Args:
        assistant: the causal language model that drafts.

    Raises:
        ValueError: the assistant has another tokenizer, or cannot run trees.
    """

    runs_modules: ClassVar[bool] = True
    reads = Reads()
    options: GrowOptions

    def __init__(self, model: Any, options: GrowOptions, assistant: Any):
        super().__init__(model, options, ("draft_model", key_of(options)), owner=assistant)
        if not hasattr(assistant, "get_input_embeddings"):
            raise ValueError(
                f"assistant_model={assistant!r}: give a loaded model, such as "
                "AutoModelForCausalLM.from_pretrained returns."
            )
        check_model(assistant)
        _check_tokenizer(model, assistant)
        self.assistant = assistant
        known, wanted = input_features(assistant)[0], input_features(model)[0]
        #: Tokens that both models have.
        self.shared = min(known, wanted)
        self._ids = None if self.shared == wanted else torch.arange(self.shared)
        self._target: Target | None = None  # of the assistant
        self._logits: Tensor | None = None  # (batch, vocab) after each sequence's last token
        self._block: Tree | None = None  # the drafted nodes

    @property
    def token_ids(self) -> Tensor | None:
        return self._ids

    def start(self, state: DecodeState) -> None:
        super().start(state)
        if self._ids is not None:
            self._ids = self._ids.to(placement(self.assistant).device)
        self._target = None

    def catch_up(self, state: DecodeState) -> None:
        target = self._target
        if target is None:
            self._target = self._prompt(state)
            return
        rows = self._known(
            tokens[length:] for tokens, length in zip(state.tokens, target.cache.host_lengths)
        )
        new = [row for row, tokens in enumerate(rows) if tokens]
        if new:  # finished sequences have none
            assert self._logits is not None
            self._logits[new] = append(target, rows).logits

    def _prompt(self, state: DecodeState) -> Target:
        """The assistant after the text so far, which runs as Transformers runs a prompt."""
        assistant, rows = self.assistant, self._known(state.tokens)
        text, device = assistant.config.get_text_config(decoder=True), placement(assistant).device
        lengths, width = [len(row) for row in rows], max(map(len, rows))
        ids = sent([[0] * (width - len(row)) + row for row in rows], device)
        padding = sent([width - length for length in lengths], device)
        columns = torch.arange(width, device=device)
        mask = columns >= padding[:, None]
        source = DynamicCache(config=text)
        given = taken(
            assistant, input_ids=ids, attention_mask=mask.long(), use_cache=True, logits_to_keep=1,
            position_ids=(columns - padding[:, None]).clamp(min=0), **{CACHE: source},
        )  # fmt: skip
        self._logits = assistant(**given).logits[:, -1].clone()
        cache = TreeCache(
            len(source.layers), len(rows), device, rules=recurrent_rules(assistant)
        )  # fmt: skip
        ends = list(map(sum, zip(lengths, state.remaining)))
        take_over(cache, source, mask, max(ends) + MAX_DRAFT_TOKENS, seq=width)
        # A table of positions may be shorter than the text.
        context = getattr(text, "max_position_embeddings", None) or max(ends)
        last = sent([min(end, context) - 1 for end in ends], device)
        return Target(assistant, cache, last, padding=padding)

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

    def finish(self) -> None:
        assert self._target is not None
        self._target.cache.rollback()
        self._block = None

    def select(self, rows: Sequence[int]) -> None:
        if self._target is not None:
            self._target.cache.select(rows)
            self._target.select(rows)
        if self._logits is not None:
            self._logits = self._logits[torch.tensor(rows, device=self._logits.device)]

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


def _check_tokenizer(model: Any, assistant: Any) -> None:
    """Raise a ValueError if two models cannot have the same tokenizer, by their configs."""
    sizes = [input_features(one)[0] for one in (model, assistant)]
    ids = [{name: _special(one, name) for name in ("bos", "eos")} for one in (model, assistant)]
    other = [
        f"{name}_token_id {sorted(ids[0][name])} and {sorted(ids[1][name])}"
        for name in ids[0]
        if ids[0][name] and ids[1][name] and not ids[0][name] & ids[1][name]
    ]
    if abs(sizes[0] - sizes[1]) >= PADDING:
        other.insert(0, f"{sizes[0]} and {sizes[1]} tokens")
    if other:
        raise ValueError(
            f"assistant_model={type(assistant).__name__} has another tokenizer than "
            f"{type(model).__name__}: {'; '.join(other)}. Give an assistant of the same family, or "
            "generate without assistant_strategy: Transformers translates between tokenizers."
        )


def _special(model: Any, name: str) -> set[int]:
    """The ids of a special token, of which models may have several."""
    found: set[int] = set()
    for config in (model.config.get_text_config(decoder=True), model.generation_config):
        value = getattr(config, f"{name}_token_id", None)
        found |= set() if value is None else {value} if isinstance(value, int) else {*value}
    return found


METHOD = Method(
    name="draft_model",
    summary="a smaller model with the same tokenizer drafts: generate(assistant_model=...)",
    options=GrowOptions,
    drafter=DraftModelDrafter,
    needs_assistant=True,
)
