"""``draft_model``: another, smaller model drafts.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), with trees
that grow level by level as in EAGLE-2 (Li et al., 2024, section 4.1).
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hf_spec.cache.attention import aligned
from hf_spec.cache.tree_cache import TreeCache, take_over
from hf_spec.core.device import Holds, is_async, to_device
from hf_spec.core.shapes import Row
from hf_spec.core.tree import Tree, filled
from hf_spec.core.verify import StepResult
from hf_spec.draft.grow import Frontier, extended, grow
from hf_spec.draft.options import key_of
from hf_spec.draft.policy import amount
from hf_spec.draft.predictor import DecodeState
from hf_spec.draft.translation import Assistant, Translation, translation
from hf_spec.methods.registry import Method
from hf_spec.modeling_patches.attention_masks import TreeAttention
from hf_spec.modeling_patches.forwards import shared_kv_sources, takes_shared_kv, with_given_masks
from hf_spec.modeling_patches.linear_attention import recurrent_rules
from hf_spec.modeling_patches.modules import CACHE, only_logits, unwrapped
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.modeling_patches.support import check_model
from hf_spec.modeling_patches.weights import input_features, placement, vocabulary
from hf_spec.predict.network import GrowOptions, LevelPredictor, Levels
from hf_spec.target.compiled import PARTS, CompiledTarget
from hf_spec.target.hidden_states import Reads, captured, gather_hidden, supported_kwargs
from hf_spec.target.target import Slots, Target, append

# -- What drafters with an assistant model have in common: the two models' tokens ------------------

#: Rows by which the embeddings of models with the same tokenizer may differ: some are padded.
PADDING = 1024


class AssistantPredictor(LevelPredictor):
    """An assistant model drafts.

    Args:
        assistant: the causal language model that drafts, or this with the call's tokenizers.

    Raises:
        ValueError: it is not a model, has another tokenizer that the call does not give, or is in
            training mode with dropout.
    """

    options: GrowOptions

    def __init__(self, model: Any, options: GrowOptions, assistant: Any):
        super().__init__(model, options, ("draft_model", key_of(options)))
        given = assistant if isinstance(assistant, Assistant) else None
        assistant = assistant if given is None else given.model
        if not hasattr(assistant, "get_input_embeddings"):
            raise ValueError(
                f"assistant_model={assistant!r}: give a loaded model, such as "
                "AutoModelForCausalLM.from_pretrained returns."
            )
        if not hasattr(assistant, "generate"):
            raise ValueError(
                f"assistant_model={type(assistant).__name__} does not generate by itself. If it is "
                "a released drafter, make an adapter of it: hf-spec import REPOSITORY --model M "
                "--output drafter/"
            )
        if hasattr(assistant.get_input_embeddings(), "assistant_overlap_token_ids"):
            raise ValueError(
                f"assistant_model={type(assistant).__name__} has lost a part of its vocabulary: "
                "Transformers' assisted decoding with an assistant_tokenizer and do_sample=True "
                "replaces embeddings of the assistant for good. Load it anew."
            )
        if _drops_out(assistant):
            raise ValueError(
                f"assistant_model={type(assistant).__name__} is in training mode, with dropout: it "
                "would draft at random, and draw random numbers that tokens are sampled with. Call "
                "its eval() first."
            )
        self.assistant, self.owner, self.beside = assistant, assistant, (assistant,)
        #: Between the tokens of two tokenizers; None if there is one.
        self.translation: Translation | None = None
        if given is None:
            _check_tokenizer(model, assistant)
        else:
            self.translation = self.kind = translation(model, given)
        known, wanted = vocabulary(assistant), vocabulary(model)
        #: Tokens that both models have, if they have the same ids.
        self.shared = min(known, wanted)
        if self.translation is not None:
            self.token_ids = self.translation.token_ids
        elif self.shared != wanted:
            self.token_ids = torch.arange(self.shared, device=placement(assistant).device)


def _check_tokenizer(model: Any, assistant: Any) -> None:
    """Raise a ValueError if two models cannot have the same tokenizer, by their configs."""
    known, wanted = input_features(assistant)[0], input_features(model)[0]
    other = [f"{wanted} and {known} tokens"] if abs(wanted - known) >= PADDING else []
    for name in ("bos_token_id", "eos_token_id"):
        own, theirs = _special(model, name), _special(assistant, name)
        if own and theirs and not own & theirs:
            other.append(f"{name} {sorted(own)} and {sorted(theirs)}")
    if other:
        raise ValueError(
            f"assistant_model={type(assistant).__name__} has another tokenizer than "
            f"{type(model).__name__}: {'; '.join(other)}. Give both, generate(tokenizer=..., "
            "assistant_tokenizer=...), or an assistant of the same family."
        )


def _drops_out(model: nn.Module) -> bool:
    """Whether forwards draw random numbers for dropout, of a module or of a rate."""
    rates = (
        [part.p] if isinstance(part, nn.Dropout)
        else [value for name, value in vars(part).items() if "dropout" in name]
        for part in model.modules() if part.training
    )  # fmt: skip
    return any(isinstance(rate, float) and rate > 0 for some in rates for rate in some)


def _special(model: Any, name: str) -> set[int]:
    """The ids of a special token, of which models may have several."""
    found: set[int] = set()
    for config in (model.config.get_text_config(decoder=True), model.generation_config):
        value = getattr(config, name, None)
        found |= set() if value is None else {value} if isinstance(value, int) else {*value}
    return found


# --------------------------------------------------------------------------------------------------
# An assistant that attends to the model's keys and values, such as those published for Gemma 4.
#
# A row of it is a token and the model's final state of the token before; where the model has not
# been, the assistant's own output takes the place of this state. All rows of a step stand at the
# position of its root and see the committed tokens before it, not each other. So a level of a tree
# is as many rows of their own, and the assistant has no cache: nothing is written, run again or
# undone.


class Seen(NamedTuple):
    """What all rows of a step see, on the assistant's device.

    Attributes:
        states: by layer type, keys and values ``(batch, kv_heads, slots, head_dim)``: views of the
            model's cache, unless that is on another device or in another dtype.
        masks: by layer type, ``(batch, 1, 1, slots)`` bool, True for what is seen; or packed.
        positions: ``(batch, 1)`` of the roots.
    """

    states: dict[str, tuple[Tensor, ...]]
    masks: dict[str, Tensor]
    positions: Tensor


@dataclass
class ModelStates(Holds):
    """What the model has run.

    Attributes:
        cache: its KV cache.
        shift: ``(batch, 1)`` from lengths to positions.
    """

    held = ("cache",)
    per_row = ("shift",)
    cache: TreeCache
    shift: Tensor


class SharedKVPredictor(AssistantPredictor):
    """An assistant drafts from the model's keys, values and final states.

    Raises:
        ValueError: see :class:`AssistantPredictor`; or the assistant is not one for this model.
    """

    reads = Reads("last")
    reads_cache = True
    held = ("_known",)
    of_rows = ("_hidden",)

    def __init__(self, model: Any, options: GrowOptions, assistant: Any):
        super().__init__(model, options, assistant)
        assistant = self.assistant
        if self.translation is not None:
            raise ValueError(
                f"assistant_model={type(assistant).__name__} with an assistant_tokenizer that has "
                "other tokens than tokenizer: this assistant reads the model's states, so that its "
                "tokens are the model's. Give the tokenizer it was made with, or none."
            )
        self._sources = shared_kv_sources(model, assistant)
        self._attention = TreeAttention(assistant, beside=model)
        with_given_masks(assistant, self._attention.changes)
        self._hidden: Tensor | None = None  # (batch, hidden) the model's, before each root
        self._known: ModelStates | None = None
        self._seen: Seen | None = None  # while a tree grows

    def start(self, state: DecodeState) -> None:
        super().start(state)
        self._target: Any = state.target
        graphs = state.target.graphs
        #: What programs that contain the assistant depend on; None if there are none.
        self._kind = None if graphs is None else graphs.admit(self.assistant)
        if self._kind is None:
            self.outside = "the assistant is on another device, or cannot be recorded"

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        self._hidden = hidden
        if self._known is not None and self._known.cache.is_given:  # else the loop commits
            self._known.cache.lengths = self._known.cache.lengths + result.counts

    def reserve(self, tree: Tree, levels: int) -> None:
        self._target.reserve(tree)
        self._known = ModelStates(self._target.cache, self._target.position_shift)

    @property
    def layout(self) -> Hashable:
        return self._kind, super().layout

    def catch_up(self, state: DecodeState) -> None:
        self._known = ModelStates(state.cache, state.target.position_shift)

    def levels(self, root: Tensor, depth: int, width: int, noise: Tensor | None) -> Levels:
        assert self._known is not None
        self._seen = self._see(self._known)
        return super().levels(root, depth, width, noise)

    def _see(self, known: ModelStates) -> Seen:
        """The tokens before the roots."""
        device, dtype = placement(self.assistant)
        cache, shift = known.cache, known.shift
        keys = cache.capacity if cache.is_given else aligned(cache.max_length)
        lengths, seen = cache.lengths.to(device), {}
        states, none = {}, torch.zeros(len(lengths), 1, 0, dtype=torch.bool, device=device)
        for kind, source in self._sources.items():
            layer = cache.layers[source.layer]
            slots = Slots.of(cache.states, lengths, 0, keys, layer.window)
            both = layer.views["keys"], layer.views["values"]
            parts = (part[:, :, : slots.held.shape[1]] for part in both)
            states[kind] = tuple(part.to(device, dtype) for part in parts)
            # The window of the model's own layer. Transformers' reaches two tokens further back, of
            # which the cache of a longer prompt has nothing.
            at = lengths[:, None]
            begin = None if source.window is None else at - source.window + 1
            seen[kind] = slots.mask(none, lengths, self._attention.packs, begin, at)
        return Seen(states, seen, lengths[:, None] + shift.to(device))

    def level(self, frontier: Frontier) -> Tensor:
        assert self._seen is not None and self._hidden is not None
        states, visible, positions = self._seen
        before = self._hidden[:, None]
        if frontier.depth:
            assert self._after is not None
            before = gather_hidden(self._after, frontier.parents)
        ids, count = frontier.tokens.to(placement(self.model).device), frontier.tokens.shape[1]
        embeddings = self.model.get_input_embeddings()(ids)
        attention, dtype = self._attention, placement(self.assistant).dtype
        found = attention.changes.run(
            self.assistant,
            inputs_embeds=torch.cat([embeddings, before.to(embeddings)], dim=-1).to(dtype),
            attention_mask=attention.convert(
                {kind: mask.expand(-1, -1, count, -1) for kind, mask in visible.items()}, dtype
            ),
            position_ids=positions.expand(-1, count),
            shared_kv_states=states, use_cache=False, return_dict=True,
            # Of rows given by number none are cut off, which fails without per-layer embeddings.
            logits_to_keep=torch.arange(count, device=positions.device),
            **only_logits(self.assistant),
        )  # fmt: skip
        self._after = found.last_hidden_state
        return found.logits[..., : self.shared]

    def finish(self) -> None:
        super().finish()
        self._seen = None

    # -- stock assisted decoding -------------------------------------------------------------

    def chain(self, input_ids: Tensor) -> list[int]:
        model, known = self.model, input_ids[:, :-1].to(placement(self.model).device)
        if not known.shape[1]:  # nothing to attend to
            return []
        source = DynamicCache(config=model.config.get_text_config(decoder=True))
        changes = Changes()
        states = captured(model, changes)
        inputs = {"input_ids": known, "use_cache": True, "logits_to_keep": 1, CACHE: source}
        changes.run(model, **supported_kwargs(model, **inputs))
        cache = TreeCache(len(source.layers), 1, known.device)
        take_over(cache, source, more=0)
        own = copy.copy(self)
        own._hidden, none = states[0][:, -1], torch.zeros_like(known[:, :1])
        own._seen = own._see(ModelStates(cache, none))
        return own.chain_after(input_ids[:, -1:])


# -- An assistant that reads the text itself, as any causal language model does --------------------


class DraftModelPredictor(AssistantPredictor):
    """An assistant model drafts, with a KV cache of its own.

    Its cache holds the text in its own tokens, of which there may be more than the model's, or
    fewer. In both, what the drafted tokens are is known on the device.

    Raises:
        ValueError: see :class:`AssistantPredictor`; or the assistant cannot run trees.
    """

    per_row = ("_logits",)
    of_rows = (*LevelPredictor.of_rows, "_target", "_read")

    def __init__(self, model: Any, options: GrowOptions, assistant: Any):
        super().__init__(model, options, assistant)
        self.outside = "the assistant's forwards are code of their own"
        check_model(self.assistant)
        self._target: Target | None = None  # of the assistant
        self._read: list[int] | None = None  # the model's tokens that it has read, of each row
        self._logits: Tensor | None = None  # (batch, vocab) after each sequence's last token

    def catch_up(self, state: DecodeState) -> None:
        target, read = self._target, self._read
        self._read = [len(tokens) for tokens in state.tokens]
        if target is None or read is None:
            self._target = self._prompt(state)
            self.cache = self._target.cache
            return
        rows = [self._known(tokens[length:]) for tokens, length in zip(state.tokens, read)]
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
        tokens = to_device(filled(rows), device)
        logits = target(Tree.chain(tokens), changes=Changes()).logits
        target.cache.commit(counts)
        ends = to_device(counts, logits.device)[:, None]
        last = gather_hidden(logits, (ends - 1).clamp(min=0))[:, 0]
        assert self._logits is not None
        return torch.where(ends > 0, last, self._logits)

    def _prompt(self, state: DecodeState) -> Target:
        """The assistant after the text so far, which runs as Transformers runs a prompt."""
        assistant, rows = self.assistant, [self._whole(tokens) for tokens in state.tokens]
        text, device = assistant.config.get_text_config(decoder=True), placement(assistant).device
        lengths, width = [len(row) for row in rows], max(map(len, rows))
        ids = to_device([[0] * (width - len(row)) + row for row in rows], device)
        padding = to_device([width - length for length in lengths], device)
        longest = 1 if self.translation is None else self.translation.longest
        ends = [length + longest * left for length, left in zip(lengths, state.remaining)]
        # A table of positions may be shorter than the text.
        context = getattr(text, "max_position_embeddings", None) or max(ends)
        columns = torch.arange(width, device=device)
        mask = columns >= padding[:, None]
        positions = (columns - padding[:, None]).clamp(0, context - 1)
        source = DynamicCache(config=text)
        rules = recurrent_rules(assistant)
        # A recurrent state is not continued by several tokens everywhere.
        at_once = width if rules else state.prompt_part
        for start in range(0, width, at_once):
            end = start + at_once
            if start:
                state.between_parts()
            given = supported_kwargs(
                assistant, input_ids=ids[:, start:end], attention_mask=mask[:, :end].long(),
                position_ids=positions[:, start:end], use_cache=True, logits_to_keep=1,
                **{CACHE: source},
            )  # fmt: skip
            logits = assistant(**given).logits
        self._logits = logits[:, -1].clone()
        graphs = state.target.graphs
        own = graphs and graphs.beside(assistant, "draft_model")
        allocator = None if own is None else graphs
        cache = TreeCache(len(source.layers), len(rows), device, allocator, rules)
        take_over(cache, source, mask, longest * max(state.remaining), seq=width)
        last = to_device([min(end, context) - 1 for end in ends], device)
        if own is None:
            return Target(assistant, cache, last, beside=self.model)
        return CompiledTarget(assistant, cache, last, beside=self.model, graphs=own)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """The model's tokens as the assistant gets them: in its own, or, with the same tokenizer,
        some other one for what it does not know."""
        if self.translation is not None:
            return self.translation.read(tokens)
        return [min(token, self.shared - 1) for token in tokens]

    def _whole(self, tokens: Sequence[int]) -> list[int]:
        """:meth:`_known` of a whole text."""
        if self.translation is not None:
            return self.translation.begin(tokens)
        return self._known(tokens)

    def _shared(self, logits: Tensor) -> Tensor:
        """Of the assistant's logits those of :attr:`token_ids`."""
        if self.translation is not None:
            return logits.index_select(-1, self.translation.columns)
        return logits[..., : self.shared]

    def _own(self, tokens: Tensor) -> Tensor:
        """Drafted tokens, of which recycled ones may be any of the model's, as :meth:`_known`."""
        if self.translation is None:
            return tokens if self.token_ids is None else tokens.clamp(max=self.shared - 1)
        by_token = self.translation.by_token
        return by_token[tokens.to(by_token.device)]

    def level(self, frontier: Frontier) -> Tensor:
        assert self._target is not None and self._logits is not None
        if not frontier.depth:
            return self._shared(self._logits[:, None])
        frontier = frontier._replace(tokens=self._own(frontier.tokens))
        self._block, first = extended(self._block, frontier)
        # With changes, even none, a single node is not the last one that recurrent layers see.
        logits = self._target(self._block, first=first, changes=Changes()).logits
        return self._shared(logits)

    def complete(self, state: DecodeState) -> None:
        if self._target is None:
            self.catch_up(state)

    # -- stock assisted decoding -------------------------------------------------------------

    def chain(self, input_ids: Tensor) -> list[int]:
        drafted = takewhile(
            lambda token: token is not None, map(self._drafts, self._ahead(input_ids))
        )
        return [token for token in drafted if token is not None]

    def _ahead(self, input_ids: Tensor) -> list[int]:
        """The likeliest tokens after a sequence, in the assistant's."""
        whole = self._whole(input_ids[0].tolist())
        known = to_device([whole], placement(self.assistant).device)
        found = self.assistant.generate(
            known, attention_mask=torch.ones_like(known), max_new_tokens=self.depth,
            do_sample=False, num_beams=1, assistant_strategy=None,
        )  # fmt: skip
        tokens: list[int] = found[0, known.shape[1] :].tolist()
        return tokens

    def _drafts(self, token: int) -> int | None:
        """The model's token that one of the assistant's is; None if there is none."""
        if self.translation is not None:
            return self.translation.by_own.get(token)
        return token if token < self.shared else None


class TextPredictor(DraftModelPredictor):
    """An assistant whose tokenizer has few of the model's tokens: its trees have any of its own
    tokens, and what is drafted is their text."""

    translation: Translation

    def __init__(self, model: Any, options: GrowOptions, assistant: Assistant):
        super().__init__(model, options, assistant)
        self.token_ids = None

    def chosen(self, state: DecodeState, depth: int) -> Tree | None:
        self.catch_up(state)
        root, reads = state.root, not is_async(state.root.device)
        count, depth, goes_on = amount(self, 0, self.depth, state.active, state.draft_cost, reads)
        levels = self.levels(root, depth, count, None)  # noise is of the model's tokens
        packed = grow(levels, root, count, depth, None, self.width, goes_on)
        state.stats.num_draft_forwards += self.forwards
        self.forwards = 0
        self.finish()
        tree = Tree.unpacked(packed)
        assert tree.host is not None
        rows = [
            self.translation.drafted(row, tokens[-1]).likeliest_first(1 + count)
            for row, tokens in zip(tree.host.rows(tree.row_sizes), state.tokens)
        ]
        return Tree.of_rows(rows, root.device).changed(whole=self.exactly is not None)

    def _shared(self, logits: Tensor) -> Tensor:
        return logits

    def _own(self, tokens: Tensor) -> Tensor:
        return tokens

    def chain(self, input_ids: Tensor) -> list[int]:
        root, tokens = int(input_ids[0, -1]), self._ahead(input_ids)
        own = Row([*range(-1, len(tokens))], [root, *tokens], [1.0] * (1 + len(tokens)))
        return self.translation.drafted(own, root).tokens[1:]


def make(model: Any, options: GrowOptions, assistant: Any) -> AssistantPredictor:
    """The predictor for an assistant: by what its forward takes.

    Raises:
        ValueError: the assistant is none, or none that drafts for this model.
    """
    given = assistant if isinstance(assistant, Assistant) else None
    assistant = assistant if given is None else given.model
    if getattr(getattr(assistant, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"assistant_model={type(assistant).__name__} of type "
            f"{assistant.active_peft_config.peft_type.value}: its adapter puts virtual tokens into "
            "the cache. Give the model without it: assistant_model=assistant.get_base_model()."
        )
    assistant = unwrapped(assistant)
    shares = hasattr(assistant, "forward") and takes_shared_kv(assistant)
    drafts = assistant if given is None else given._replace(model=assistant)
    if shares:
        return SharedKVPredictor(model, options, drafts)
    made = DraftModelPredictor(model, options, drafts)
    by_text = made.translation is not None and made.translation.by_text
    return TextPredictor(model, options, drafts) if by_text else made


METHOD = Method(
    name="draft_model",
    summary="a smaller model drafts: generate(assistant_model=...)",
    options=GrowOptions,
    predictor=DraftModelPredictor,
    needs_assistant=True,
    make=make,
)
