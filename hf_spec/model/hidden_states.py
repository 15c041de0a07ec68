"""Final hidden states of a causal language model, and the logits that it makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from modeling_patches.per_call import Changes, eager


def output_logits(model: Any, hidden: Tensor) -> Tensor:
    """The model's output embeddings applied to final hidden states.

    A scaling or soft cap that some models apply afterwards is left out: for draft tokens, whose
    order it does not change.
    """
    # Flat: on CPUs a slice of rows, whose strides are another number of rows', takes a path of the
    # matrix product that is ten times slower.
    flat = model.get_output_embeddings()(hidden.flatten(0, -2))
    return flat.unflatten(0, hidden.shape[:-1])


def states_at(hidden: Tensor, rows: Tensor) -> Tensor:
    """``hidden`` (batch, rows, hidden) at some rows of each batch row, ``rows`` (batch, n)."""
    index = rows.to(hidden.device)[:, :, None].expand(-1, -1, hidden.shape[-1])
    return hidden.gather(1, index)


class _DecoderOutput(BaseModelOutput):
    """Final hidden states; whatever else a model looks for (caches, router logits) is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def model_logits(model: Any, hidden: Tensor, changes: Changes | None = None) -> Tensor:
    """The model's own logits of final hidden states (batch, rows, hidden).

    With all that it does to them, in contrast to :func:`output_logits`: for losses and for
    distributions to sample from. The model runs with its decoder left out, and without what a
    forward that asks on its way runs with.

    Args:
        changes: with which the model makes them.
    """
    # Slices take a slow path of the matrix product on CPUs; see output_logits.
    made = _DecoderOutput(last_hidden_state=hidden.contiguous())
    own = Changes()
    if changes is not None:
        own.update(changes)
    own.instead(model.get_decoder(), "forward", lambda *args, **kwargs: made)
    ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    logits = own.run_alone(eager(model), input_ids=ids, use_cache=False, return_dict=True).logits
    return logits.to(hidden.device)


def taken(model: Any, **inputs: Any) -> dict[str, Any]:
    """Those of ``inputs`` that the model's forward knows: not all take positions, for example."""
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in inputs.items() if name in known}


def final_hidden(
    model: Any, changes: Changes, rows: Callable[[], int] | None = None
) -> list[Tensor]:
    """A list that each forward of ``model`` with these changes fills with its final hidden states.

    ``(batch, rows, hidden)``: what the model's output embeddings are applied to.

    Args:
        model: a causal language model.
        changes: what this is added to.
        rows: how many rows, from the first, logits are made of; asked behind the decoder. None:
            of all.
    """
    seen: list[Tensor] = []

    def note(args: Any, kwargs: Any, output: Any) -> Any:
        seen[:] = [output[0]]
        if rows is None or rows() == output[0].shape[1]:
            return None
        # Not `contiguous()`, which keeps the stride of a single batch row: see output_logits.
        fewer = output[0][:, : rows()]
        fewer = fewer.flatten(0, 1).unflatten(0, fewer.shape[:2])
        if isinstance(output, tuple):
            return (fewer, *output[1:])
        output.last_hidden_state = fewer
        return output

    changes.after(model.get_decoder(), note)
    return seen
