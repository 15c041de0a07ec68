"""Inputs of the model's forward beside those that the loop provides, and which forwards get them.

The model's own ``prepare_inputs_for_generation`` decides, as in plain generation: ``labels`` reach
no forward, an image only the prompt's, and a setting such as ``num_items_in_batch`` each one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from modeling_patches.cache_name import CACHE

#: Inputs that the loop provides.
_MADE = (
    "attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "inputs_embeds",
)  # fmt: skip


class OtherInputs(NamedTuple):
    """The caller's further inputs, by name.

    Attributes:
        first: those of the prompt's forward.
        later: those of the forwards after it.
    """

    first: dict[str, Any]
    later: dict[str, Any]

    @classmethod
    def of(cls, model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> OtherInputs:
        """Sort the inputs of a call.

        Args:
            model: a causal language model.
            input_ids: ``(batch, width)`` the prompt; empty where it is given as embeddings.
            model_kwargs: as ``generate`` passes them to a decoding method.

        Raises:
            ValueError: a forward after the prompt's gets an input with one value per prompt token.
        """
        given = {key: value for key, value in model_kwargs.items() if key not in _MADE}
        if not given:
            return cls({}, {})

        def passed(first: bool) -> dict[str, Any]:
            prepared = model.prepare_inputs_for_generation(
                input_ids.new_zeros(len(input_ids), 1), next_sequence_length=1, use_cache=True,
                is_first_iteration=first, **given,
            )  # fmt: skip
            return {key: value for key, value in given.items() if prepared.get(key) is not None}

        found = cls(passed(True), passed(False))
        prompts = (input_ids, model_kwargs.get("inputs_embeds"))
        widths = {prompt.shape[1] for prompt in prompts if prompt is not None}
        for key, value in found.later.items():
            if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] in widths:
                raise ValueError(
                    f"model input {key!r} has one value per prompt token: strategies don't know "
                    "its values for draft tokens. Generate without assistant_strategy."
                )
        return found

    def refuse_once(self) -> None:
        """Raise on inputs of the prompt's forward alone, which a continued TreeCache lacks.

        Raises:
            ValueError: naming them.
        """
        once = [key for key in self.first if key not in self.later]
        if once:
            raise ValueError(
                f"an image or the like ({', '.join(once)}) with a TreeCache as {CACHE}: it is "
                f"continued by tokens alone. Leave {CACHE} out."
            )
