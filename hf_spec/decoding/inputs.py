"""Inputs of the model's forward beside those that the loop provides, and which forwards get them.

The model's own ``prepare_inputs_for_generation`` decides, as in plain generation: ``labels`` reach
no forward, an image only the prompt's, and a setting such as ``num_items_in_batch`` each one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_spec.modeling_patches.cache_name import CACHE
from hf_spec.modeling_patches.modules import takes

#: Inputs that the loop provides.
_MADE = (
    "input_ids", "attention_mask", "position_ids", "cache_position", CACHE, "use_cache",
    "logits_to_keep", "inputs_embeds",
)  # fmt: skip


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
            elif cut or value.shape[1] in widths:
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
