"""The inputs of a call and the forward of its prompts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from hf_spec.cache.tree_cache import TreeCache, check_packable, take_over
from hf_spec.core.device import to_device
from hf_spec.decoding.cache_reuse import (
    CacheOwner,
    begin_rope,
    check_gaps,
    check_positions,
    new_tokens,
    size_of,
)
from hf_spec.modeling_patches.attention_masks import sees_beyond_windows
from hf_spec.modeling_patches.linear_attention import recurrent_rules
from hf_spec.modeling_patches.modules import CACHE, takes
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.target.compiled import CompiledTarget
from hf_spec.target.graphs import Graphs
from hf_spec.target.hidden_states import Reads, captured, gather_hidden
from hf_spec.target.packed_weights import warn_if_slow
from hf_spec.target.target import Prefilled, ProbeInputs, Target, append

# --------------------------------------------------------------------------------------------------
# Inputs of the model's forward beside those that the loop provides, and which forwards get them.
#
# The model's own ``prepare_inputs_for_generation`` decides, as in plain generation: ``labels``
# reach no forward, an image only the prompt's, and a setting such as ``num_items_in_batch`` each
# one.

#: Inputs that the loop provides.
_MADE = (
    "input_ids", "attention_mask", "position_ids", "cache_position", CACHE, "use_cache",
    "logits_to_keep", "inputs_embeds",
)  # fmt: skip
#: Inputs of a sound's frames, which Transformers passes to later forwards, too.
_OF_FRAMES = ("feature_attention_mask",)


def prompt_ids(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
    """The prompt as int64, which plain generation makes of it with the first token it appends.

    Args:
        input_ids: ``(batch, width)`` integers; empty where the prompt is given as embeddings.

    Raises:
        ValueError: there is no token that generation could continue, or they are not integers.
    """
    if not input_ids.numel() and model_kwargs.get("inputs_embeds") is None:
        raise ValueError(
            f"input_ids of shape {tuple(input_ids.shape)}: there is no token to continue. Give "
            "each prompt at least one, such as the tokenizer's bos_token."
        )
    if input_ids.is_floating_point():
        raise ValueError(f"input_ids of dtype {input_ids.dtype}: tokens are integers (torch.long).")
    return input_ids.long()


class PromptInputs(NamedTuple):
    """What the prompt's forward gets.

    Attributes:
        positions: ``(batch, width)``, or ``(axes, batch, width)`` of a model that rotates by
            several; None if it takes none.
        others: what the loop does not provide, by name.
    """

    positions: Tensor | None
    others: dict[str, Any]

    @classmethod
    def of(cls, model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> PromptInputs:
        """Ask the model; ``model_kwargs`` are as ``generate`` passes them to a decoding method."""
        return cls(*_asked(model, input_ids, model_kwargs, first=True))

    def once(self, later: LaterInputs) -> list[str]:
        """Names of the inputs of the prompt's forward alone."""
        return [key for key in self.others if key not in later.others | later.per_token]

    def changed(self, later: LaterInputs) -> dict[str, float]:
        """What generated tokens have of inputs with a value per token, by name, where the last
        token of a prompt has something else."""
        return {
            key: value.flatten()[0].item()
            for key, value in later.per_token.items()
            if key in self.others and bool((self.others[key][:, -1:] != value).any())
        }

    def check_tokens_alone(
        self, later: LaterInputs, counts: list[int], generated: dict[str, float]
    ) -> None:  # fmt: skip
        """Raise a ValueError unless a continued TreeCache needs no more than tokens.

        Args:
            counts: new tokens of each row, the last of the prompt. An input with a value per token,
                such as its type, must be that of generated tokens for all of them, or 0 where these
                have none: text.
            generated: what :meth:`changed` returned for the cached prompt.
        """

        def is_text(key: str) -> bool:
            value, kinds = self.others[key], later.per_token.get(key)
            if key in generated or kinds is None:
                kinds = torch.full((len(counts), 1), generated.get(key, 0), device="cpu")
            return (
                isinstance(value, Tensor)
                and value.ndim == 2
                and value.shape[1] >= max(counts)
                and len(value) == len(counts)
                and all(
                    bool((row[len(row) - n :] == kind.to(row.device)).all())
                    for row, kind, n in zip(value, kinds, counts)
                )
            )

        missing = [key for key in self.others if key not in later.others and not is_text(key)]
        if missing:
            raise ValueError(
                f"an image or the like ({', '.join(missing)}) with a TreeCache as {CACHE}: it is "
                "continued by tokens alone, of the kind that is generated. Leave out what it has "
                f"seen, or leave {CACHE} out."
            )


class LaterInputs(NamedTuple):
    """What the forwards after the prompt's get.

    Attributes:
        positions: ``(axes, batch)``, or one column for all rows, of the token after the prompt;
            one axis for most models. None if the model takes none.
        per_token: ``(batch, 1, ...)`` tensors by name with one value for each token: that of the
            token after the prompt, which plain generation repeats from there on.
        others: what each forward gets as it is.
    """

    positions: Tensor | None
    per_token: dict[str, Tensor]
    others: dict[str, Any]

    @classmethod
    def of(
        cls, model: Any, input_ids: Tensor, model_kwargs: dict[str, Any], outputs: Any = None
    ) -> LaterInputs:
        """Ask the model for the inputs of the token after the prompt.

        Args:
            outputs: of Transformers' forward of the prompt, of which some models pass on a part;
                None if it did not run.

        Raises:
            ValueError: a forward after the prompt's gets an input with one value per prompt token,
                or one that differs from token to token.
        """
        given = dict(model_kwargs)
        ids = torch.cat([input_ids, input_ids.new_zeros(len(input_ids), 1)], dim=1)
        if outputs is not None:
            given = model._update_model_kwargs_for_generation(
                outputs, given, is_encoder_decoder=False
            )
        positions, others = _asked(model, ids, given, first=False)
        if positions is None and given.get("position_ids") is not None:
            raise ValueError(
                f"{type(model).__name__} drops position_ids and counts the slots of its cache "
                "instead, so siblings in a tree cannot share a position. Generate without "
                "assistant_strategy."
            )
        if positions is not None:
            # Without the prompt's outputs, the last position is still that of the prompt.
            positions = positions[..., -1] + int(outputs is None)
            positions = positions.reshape(-1, positions.shape[-1])
        prompts = (input_ids, model_kwargs.get("inputs_embeds"))
        widths = {prompt.shape[1] for prompt in prompts if prompt is not None}
        if positions is None and takes(model, "position_ids"):
            # ``generate`` asks the signature: a forward of (*args, **kwargs) gets none, and counts
            # the columns of the prompt, padding included.
            positions = ids.new_full((1, len(ids)), max(widths))
        per_token: dict[str, Tensor] = {}
        for key, value in others.items():
            before = model_kwargs.get(key)
            if not isinstance(value, Tensor) or value.ndim < 2 or not isinstance(before, Tensor):
                continue  # not of tokens, or made by the model
            cut = before.shape[1] != value.shape[1]
            if cut and before.shape[1] in widths and value.shape[1] == 1:
                per_token[key] = value
            elif (cut or value.shape[1] in widths) and key not in _OF_FRAMES:
                raise ValueError(
                    f"model input {key!r} has one value per prompt token: strategies don't know "
                    "its values for draft tokens. Generate without assistant_strategy."
                )
        shared = {key: value for key, value in others.items() if key not in per_token}
        return cls(positions, per_token, shared)

    @property
    def axes(self) -> int:
        """Positions of each token."""
        return 1 if self.positions is None else len(self.positions)

    def shift(self, lengths: Tensor) -> Tensor:
        """``(axes, batch)`` position of the next token minus the length ``(batch,)`` of the row."""
        if self.positions is None:
            return torch.zeros_like(lengths)[None]
        return self.positions.to(lengths.device) - lengths


def _asked(
    model: Any, ids: Tensor, given: dict[str, Any], first: bool
) -> tuple[Tensor | None, dict[str, Any]]:
    """The positions and the other inputs that a model prepares for the prompt, or for one token."""
    # From a cache and a mask, models would make masks.
    given = {key: value for key, value in given.items() if key not in (CACHE, "attention_mask")}
    inputs = model.prepare_inputs_for_generation(
        ids, **{"next_sequence_length": None if first else 1, "use_cache": True,
                "is_first_iteration": first, **given},
    )  # fmt: skip
    # ``generate`` adds an empty dictionary of encoders' outputs to calls that have no image.
    others = {
        name: value for name, value in inputs.items()
        if name not in _MADE and value is not None and not (isinstance(value, dict) and not value)
    }  # fmt: skip
    return inputs.get("position_ids"), others


# -- The prompt's forward pass ---------------------------------------------------------------------
#
# Transformers itself prefills a new prompt (or a continued ``DynamicCache``), exactly as in plain
# generation; the result is packed into a ``TreeCache``. A continued ``TreeCache`` gets its new
# tokens in chunks through the tree forward; their number may differ between rows.


def real_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """``(batch, width)`` bool, False for padding; None if there is none.

    Raises:
        ValueError: if a row ends with padding, or is nothing else.
    """
    if attention_mask is None:
        return None
    if not bool((attention_mask[:, -1] != 0).all()):
        rows = (attention_mask[:, -1] == 0).nonzero()[:, 0].tolist()
        raise ValueError(
            f"attention_mask ends with padding in rows {rows}: generation continues each row at "
            "its right end. Pad on the left (tokenizer.padding_side = 'left'), and give each row a "
            "token."
        )
    width = input_ids.shape[1]
    return attention_mask[:, -width:].bool() if width else attention_mask[:, :0].bool()


def _nothing() -> None: ...


class Parts(NamedTuple):
    """How a prompt runs beside other calls.

    Attributes:
        most: tokens of each row that run at once; None: all of them.
        between: called between two parts.
    """

    most: int | None = None
    between: Callable[[], None] = _nothing


#: The whole prompt at once, unless the call says otherwise.
WHOLE = Parts()


@dataclass
class Prompt:
    """A call's prompt, and what its forward needs.

    Attributes:
        probe_inputs: of the probes that later forwards run; None if they run none.
        reads: the hidden states that are returned.
        graphs: compiled code for the forwards after the prompt; the prompt itself runs uncompiled.
        parts: in which it runs if it can be divided, and the call does not say in which.
    """

    model: Any
    input_ids: Tensor
    config: GenerationConfig
    model_kwargs: dict[str, Any]
    owner: CacheOwner
    probe_inputs: ProbeInputs | None
    reads: Reads
    graphs: Graphs | None = None
    parts: Parts = WHOLE

    def __post_init__(self) -> None:
        sequences, given = self.owner.sequences, (self.model, self.input_ids, self.model_kwargs)
        self.first, self.later = PromptInputs.of(*given), LaterInputs.of(*given)
        self.budget = sequences.max_length - sequences.prompt_length
        mask = self.mask = self.model_kwargs.get("attention_mask")
        self.real = None if mask is None else mask.bool()
        columns = self.budget + (sequences.prompt_length if mask is None else mask.shape[1])
        self.continues = isinstance(self.owner.given, TreeCache)
        if not self.continues and self._can_be_kept:
            self.continues = self.owner.begin_with_kept()
        self.gaps = check_gaps(self.model, self.real, self.continues, columns)
        self._begun = False

    def run(self) -> Prefilled:
        """Run it; returns a tree forward that continues it, and what it leaves to the drafter."""
        prefilled = self.run_as_trees() if self.continues else self.run_by_transformers()
        self.owner.begin()
        begin_rope(prefilled.target, self.owner)
        return prefilled

    def run_as_trees(self) -> Prefilled:
        """Append the new tokens to a continued ``TreeCache``."""
        owner, cache, given = self.owner, self.owner.given, self.model_kwargs
        if given.get("inputs_embeds") is not None:
            raise ValueError(
                f"inputs_embeds with a TreeCache as {CACHE}: it is continued by tokens. Give "
                f"input_ids alone, or leave {CACHE} out."
            )
        rows = new_tokens(owner, self.mask, self.config, self.model)
        new = list(map(len, rows))
        self.first.check_tokens_alone(self.later, new, cache.generated)
        if self.graphs is None:
            cache.states.allocate_by(None)
        else:
            cache.states.rehouse(self.graphs)
        lengths = [length + count for length, count in zip(cache.host_lengths, new)]
        cache.states.limit = max(lengths) + self.budget
        counts, told = to_device([new, lengths], cache.lengths.device)
        target = self._target(cache, told, self.later)
        ends = told + target.position_shift[:, 0]
        check_positions(given.get("position_ids"), self.mask, counts, ends)
        if target.rope is not None:
            target.rope.move(max(lengths))
        return append(target, rows, *self.parts)

    def run_by_transformers(self) -> Prefilled:
        """Run the prompt as plain generation does, and take over its cache."""
        model, owner, reads = self.model, self.owner, self.reads
        if owner.given is not None:
            check_packable(owner.given)
            if owner.filled is not None:
                _check_single_row(self.input_ids, self.real)
        run, chunks, config, changes = model._prefill, [], self.config, Changes()
        if reads.nodes:
            chunks = captured(model, changes, reads.layers, _last, reads.tokens == "last")
        if self.parts is not WHOLE:  # the first such call installs the hook, also if it runs alone
            changes.before(model, self._between)
        in_parts = self.parts.most is not None
        if in_parts and config.prefill_chunk_size is None and self._can_be_divided:
            config = copy.copy(config)
            config.prefill_chunk_size = self.parts.most
        if reads.nodes or in_parts:  # otherwise the model runs as it is, compiled if it is compiled
            run = partial(changes.run, run)
        outputs = run(self.input_ids, config, self.model_kwargs, is_first_iteration=True)
        source = outputs.get(CACHE)
        warn_if_slow(model, source)
        check_packable(source)
        logits = outputs.logits[:, -1]
        hidden, following = _read(reads, chunks, self.input_ids, self.real)
        chunks.clear()
        cache = self._cache(source, logits)
        later = LaterInputs.of(model, self.input_ids, self.model_kwargs, outputs)
        cache.shift = later.shift(cache.lengths)
        cache.depend_on(self.first.once(later) + self.gaps)
        cache.generated = self.first.changed(later)
        return Prefilled(self._target(cache, cache.lengths, later), logits, hidden, following)

    @property
    def _can_be_divided(self) -> bool:
        """Whether forwards of parts of the prompt give what that of the whole gives."""
        given, rules = self.model_kwargs, recurrent_rules(self.model).values()
        tokens_alone = self.first.others.keys() <= self.later.others.keys()
        whole = sees_beyond_windows(self.model, self.input_ids.shape[1])
        # Transformers counts the tokens of earlier parts in layers of attention.
        counted = not all(getattr(given.get(CACHE), "is_linear", [True]))
        return (
            tokens_alone and not self.later.per_token and given.get("inputs_embeds") is None
            and counted and not whole and all(rule.goes_on for rule in rules)
        )  # fmt: skip

    @property
    def _can_be_kept(self) -> bool:
        """Whether the states of its tokens, in a cache, are all that a prompt that begins with them
        needs."""
        owner, (rows, width) = self.owner, self.input_ids.shape
        if owner.prefixes is None or rows > 1 or len(owner.sequences.now.tokens[0]) < width:
            return False
        if self.reads.tokens == "committed" or self.first.others or not self._can_be_divided:
            return False  # the drafter wants the states of all tokens, or they are of other inputs
        positions = self.first.positions
        counted = positions is None or bool(
            (positions == torch.arange(width, device=positions.device)).all()
        )
        return counted and not recurrent_rules(self.model)

    def _between(self, args: Any, kwargs: Any) -> None:
        """Before a forward of the prompt."""
        if self._begun:
            self.parts.between()
        self._begun = True

    def _cache(self, source: DynamicCache, logits: Tensor) -> TreeCache:
        """The call's cache, from the states that the prompt's forward left; ``logits`` ``(batch,
        vocab)`` are on its main device."""
        owner, width = self.owner, self.input_ids.shape[1]
        rules, rows = recurrent_rules(self.model), len(logits)
        # The call's before it takes over anything, as this empties what may be the caller's.
        cache = owner.cache = TreeCache(len(source.layers), rows, logits.device, self.graphs, rules)
        cache.made_by = size_of(self.model)
        if width:  # otherwise the prompt was given as embeddings
            owner.history = [[] for _ in range(rows)]
        front = 0 if self.probe_inputs is None else self.probe_inputs.num_front
        take_over(cache, source, self.real, self.budget, front, width)
        if owner.filled is None:  # nobody needs what is left, such as recurrent states
            source.layers.clear()
        return cache

    def _target(self, cache: TreeCache, lengths: Tensor, later: LaterInputs) -> Target:
        """A tree forward after prompts of these lengths."""
        shift = cache.shift
        if shift is None:
            shift = cache.shift = lengths.new_zeros(later.axes, len(lengths))
        # The last emitted token is never forwarded, hence - 2 and not - 1.
        limit = lengths + shift[0] + max(self.budget - 2, 0)
        make = Target if self.graphs is None else partial(CompiledTarget, graphs=self.graphs)
        return make(
            self.model, cache, limit, shift, later.others, later.per_token,
            self.probe_inputs, self.reads,
        )  # fmt: skip


def _last(hidden: Tensor) -> Tensor:
    # Transformers cuts it out: PyTorch's product of a part copies the whole weight in 16 bits.
    return hidden[:, -1:]


def _check_single_row(input_ids: Tensor, real: Tensor | None) -> None:
    """Refuse to fill a caller's ``DynamicCache`` where rows differ in length: one cache for all has
    the longest row's, and what plain generation runs to fill it up."""
    rows, padded = len(input_ids), real is not None and not bool(real.all())
    if rows > 1 or padded:
        what = f"{rows} rows" if rows > 1 else "padding in attention_mask"
        raise ValueError(
            f"a DynamicCache as {CACHE} with {what}: strategies go on with one of a single row "
            "without padding. Leave it out, and give the TreeCache that a call with "
            f"return_dict_in_generate=True returns as {CACHE} of the next."
        )


def _read(
    reads: Reads, chunks: list[Tensor], input_ids: Tensor, real: Tensor | None
) -> tuple[Tensor | None, list[list[int]]]:
    """``hidden`` and ``following`` of :class:`Prefilled`, of the states ``(batch, columns,
    features)`` that Transformers' forwards of a prompt have left; ``real``: ``(batch, columns)``
    bool, False for padding."""
    none: list[list[int]] = [[] for _ in range(len(input_ids))]
    if not chunks:
        return None, none
    if reads.tokens == "last":
        return chunks[-1][:, -1], none
    if not input_ids.shape[1]:
        return chunks[-1][:, -1:].clone(), none
    hidden = chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1)
    ids = input_ids[:, -hidden.shape[1] :]
    if real is None:
        return hidden, ids[:, 1:].tolist()
    real = real[:, -hidden.shape[1] :]
    order = torch.argsort(~real, dim=-1, stable=True)[:, : int(real.sum(-1).max())]
    rows = [row[keep].tolist()[1:] for row, keep in zip(ids, real)]
    return gather_hidden(hidden, order), rows
