"""A model's input embeddings as the rows of their matrix."""

from typing import Any

from torch import Tensor

from hf_spec.modeling_patches.per_call import Changes
from hf_spec.modeling_patches.weights import in_use


class RowEmbeddings:
    """Looks up rows as they are, as drafters that others have trained take them. Gemma's module
    scales them and Muse's norms them.

    Attributes:
        plain: whether the model itself takes them as they are.
    """

    def __init__(self, model: Any):
        self._module = model.get_input_embeddings()
        norm = getattr(in_use(self._module), "embed_norm", None)
        self._scale: Any = getattr(in_use(self._module), "embed_scale", 1.0)
        self._changes = Changes()
        if norm is not None:
            self._changes.instead(norm, "forward", lambda rows: rows)
        scaled = isinstance(self._scale, Tensor) or self._scale != 1.0
        self.plain = norm is None and not scaled

    def __call__(self, tokens: Tensor) -> Tensor:
        """``(..., hidden)`` of tokens ``(...)`` on the model's device."""
        if self.plain:
            found: Tensor = self._module(tokens)
            return found
        found = self._changes.run(self._module, tokens)
        return found / (self._scale.to(found) if isinstance(self._scale, Tensor) else self._scale)
