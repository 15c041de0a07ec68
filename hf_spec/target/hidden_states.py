"""Hidden states that drafters read, and logits computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.modeling_outputs import BaseModelOutput

from hf_spec.core.device import Ragged, bucket
from hf_spec.core.tree import Tree
from hf_spec.modeling_patches.forwards import layer_input
from hf_spec.modeling_patches.modules import decoder_of, num_layers, only_logits, takes
from hf_spec.modeling_patches.per_call import Changes, step_aside
from hf_spec.modeling_patches.weights import (
    features,
    in_use,
    input_features,
    output_bias,
    output_dtype,
    placement,
)
from hf_spec.threads import memory

# -- A model's input embeddings as the rows of their matrix ----------------------------------------


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
            return self._module(tokens)
        found = self._changes.run(self._module, tokens)
        return found / (self._scale.to(found) if isinstance(self._scale, Tensor) else self._scale)


# -- Final hidden states of a causal language model, and the logits that it computes from them -----

#: Replaces output embeddings: from hidden states (..., hidden) to logits.
Head = Callable[[Tensor], Tensor]


def output_logits(model: Any, hidden: Tensor, head: Head | None = None) -> Tensor:
    """The model's output embeddings applied to final hidden states.

    The scaling or soft cap that some models apply afterwards is left out, as it does not change
    the order of draft tokens.

    Args:
        hidden: ``(..., hidden)``; autocast may have given them another dtype than the weights'.
        head: replaces the output embeddings.
    """
    # Flat: on CPUs, the matrix product of a slice (non-contiguous) is ten times slower.
    flat = hidden.flatten(0, -2)
    if head is None:
        head, flat = model.get_output_embeddings(), flat.to(output_dtype(model) or flat.dtype)
    return head(flat).unflatten(0, hidden.shape[:-1])


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits x as c * tanh(x / c), within +-c; as they are without a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def linear_logits(model: Any, hidden: Tensor) -> Tensor:
    """:func:`output_logits` without the output embeddings' bias, so linear in ``hidden``."""
    logits, bias = output_logits(model, hidden), output_bias(model)
    return logits if bias is None else logits - bias


def gather_hidden(hidden: Tensor, rows: Tensor) -> Tensor:
    """``hidden`` (batch, tokens, hidden) at the indices ``rows`` (batch, n) of each batch row."""
    index = rows.to(hidden.device)[:, :, None].expand(-1, -1, hidden.shape[-1])
    return hidden.gather(1, index)


class _DecoderOutput(BaseModelOutput):
    """Final hidden states; anything else a model reads (caches, router logits) is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def model_logits(
    model: Any, hidden: Tensor, changes: Changes | None = None, head: Head | None = None
) -> Tensor:
    """The model's own logits of final hidden states (batch, tokens, hidden).

    Unlike :func:`output_logits`, they include scaling and soft caps: for losses, and for
    distributions to sample from. The model runs without its decoder, and without the changes of an
    enclosing forward.

    Args:
        changes: changes to the model that apply here.
        head: replaces the output embeddings.
    """
    # Slices take a slow path of the matrix product on CPUs; see output_logits.
    made = _DecoderOutput(last_hidden_state=hidden.contiguous())
    own = Changes() if changes is None else Changes().update(changes)
    own.instead(decoder_of(model), "forward", lambda *args, **kwargs: made)
    if head is not None:
        own.instead(model.get_output_embeddings(), "forward", head)
    ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    # The forward, not the model's __call__: hooks expect calls with real inputs.
    given = {"input_ids": ids, "use_cache": False, "return_dict": True, **only_logits(model)}
    logits = own.run_alone(model.forward, **given).logits
    return logits.to(hidden.device)


@torch.no_grad()
def shapes_logits(model: Any) -> bool:
    """Whether the model scales, caps or cuts off its logits, unlike :func:`output_logits`.

    Determined once per model, on a constant state with the largest logit of a confident model.
    """
    known = memory(model)
    if "shapes logits" not in known:
        step_aside(model)
        width, _ = features(in_use(model.get_output_embeddings())) or input_features(model)[::-1]
        device, dtype = placement(model)
        state = torch.ones(1, 1, width, dtype=dtype, device=device)
        state *= 30.0 / output_logits(model, state).abs().max().clamp(min=1e-3)
        plain, own = output_logits(model, state), model_logits(model, state)
        # Logits that differ by one rounding of bfloat16 count as equal.
        same = plain.shape == own.shape
        same = same and torch.allclose(plain.to(own), own, rtol=0.01, atol=1e-3)
        known["shapes logits"] = not same
    return bool(known["shapes logits"])


def supported_kwargs(model: Any, **inputs: Any) -> dict[str, Any]:
    """Those of ``inputs`` that the model's forward accepts; not all accept positions, say."""
    return {name: value for name, value in inputs.items() if takes(model, name)}


@dataclass(frozen=True)
class Reads:
    """What a drafter reads of the target's forwards.

    Attributes:
        tokens: whose hidden states: ``last``, of the last accepted node, from which the target made
            the bonus token; ``committed``, of all accepted nodes and all tokens of the prompt;
            ``probes``, of the last accepted node's probes; None to read none.
        layers: whose states, numbered as in Transformers' ``output_hidden_states``, concatenated
            along the features; empty for the final states, which the output embeddings read. Not
            with early pruning.
        predicted: whether it reads what the model predicts after each node of a step, accepted or
            not, see :class:`Predicted`.
    """

    tokens: Literal["last", "committed", "probes"] | None = None
    layers: tuple[int, ...] = ()
    predicted: bool = False

    @property
    def nodes(self) -> bool:
        """Whether states of nodes with tokens are read."""
        return self.tokens in ("last", "committed")


class Read(NamedTuple):
    """What :class:`Reads` asks for.

    Attributes:
        hidden: see :meth:`Drafter.advance`.
        predicted: see :meth:`Predicted.packed`; None after the prompt.
    """

    hidden: Tensor | None = None
    predicted: Tensor | None = None


NO_STATES = Reads()
#: Likeliest tokens after each node that are read, see :class:`Predicted`.
NUM_READ = 8
#: Tokens of the vocabulary that are looked at together.
TOGETHER = 128
#: All other tokens of a block are as likely as so many of its likeliest one, less this one
#: (SmolLM2: the mean error of log-probabilities is 0.00, the largest 0.3).
OTHERS = 1.7


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` largest of logits ``(..., vocab)``, or all of a smaller vocabulary, in a
    fraction of the time of ``topk`` and ``logsumexp``.

    Returns:
        Their indices ``(..., count)``, largest first, their values in float32, and about the
        logarithm of the sum of all logits' exponentials, ``(..., 1)`` float32.
    """
    count = min(count, logits.shape[-1])
    if missing := -logits.shape[-1] % TOGETHER:
        logits = pad(logits, (0, missing), value=-torch.inf)
    blocks = logits.unflatten(-1, (-1, TOGETHER))
    largest = blocks.amax(-1)
    best = largest.topk(min(count, largest.shape[-1]), dim=-1).indices
    inside = blocks.gather(-2, best[..., None].expand(*best.shape, TOGETHER))
    found = inside.flatten(-2).topk(count, dim=-1)
    block, place = found.indices // TOGETHER, found.indices % TOGETHER
    others = largest.scatter(-1, best, -torch.inf).float().logsumexp(-1, keepdim=True)
    total = inside.flatten(-2).float().logsumexp(-1, keepdim=True)
    total = torch.logaddexp(total, others + math.log(OTHERS))
    return best.gather(-1, block) * TOGETHER + place, found.values.float(), total


class Predicted(NamedTuple):
    """What the model predicts after each node of the step's trees.

    Attributes:
        tokens: ``(batch, nodes)`` int64, of the nodes.
        parents: ``(batch, nodes)`` int64, -1 for the root.
        valid: ``(batch, nodes)`` bool, False for padding.
        following: ``(batch, nodes, NUM_READ)`` int64 likeliest tokens, in descending order.
        log_probs: ``(batch, nodes, NUM_READ)`` float32, before any logits processor, roughly:
            see :func:`largest`.
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    following: Tensor
    log_probs: Tensor

    @classmethod
    def of(cls, tree: Tree, logits: Tensor, ragged: Ragged | None = None) -> Predicted:
        """Of trees without probes; ``logits``: ``(batch, nodes, vocab)``, or without the padding
        of ``ragged`` nodes."""
        following, values, total = largest(logits, NUM_READ)
        log_probs = values - total
        if ragged is not None:
            following, log_probs = ragged.pad(following), ragged.pad(log_probs)
        return cls(tree.tokens, tree.parents, tree.valid, following, log_probs)

    def packed(self) -> Tensor:
        """As one tensor ``(batch, nodes, 3 + 2 * NUM_READ)`` of float32, which represents integers
        below 2 ** 24, and so all tokens, exactly. The nodes are padded to a size that recurs."""
        device = self.log_probs.device
        columns = [one.to(device, torch.float32) for one in self[:3]]
        found = torch.cat(
            [torch.stack(columns, -1), self.following.float(), self.log_probs], dim=-1
        )
        return pad(found, (0, 0, 0, bucket(found.shape[1]) - found.shape[1]))

    def parts(self, size: int) -> Iterator[Predicted]:
        """Chains of so many nodes, one after the other, instead of a long one."""
        for part in map(Predicted._make, zip(*(one.split(size, 1) for one in self))):
            order = torch.arange(part.tokens.shape[1], device=part.tokens.device)
            yield part._replace(parents=(order - 1).expand_as(part.tokens))

    @classmethod
    def unpacked(cls, packed: Tensor) -> Predicted:
        """Inverse of :meth:`packed`."""
        following, log_probs = packed[..., 3:].chunk(2, dim=-1)
        tokens, parents, valid = packed[..., :3].long().unbind(-1)
        return cls(tokens, parents, valid > 0, following.long(), log_probs)


def captured(
    model: Any, changes: Changes, layers: Sequence[int] = (),
    wanted: Callable[[Tensor], Tensor] | None = None, only_last: bool = False,
) -> list[Tensor]:  # fmt: skip
    """A list to which each forward of ``model`` with these changes appends its hidden states.

    Args:
        model: a causal language model.
        changes: the changes that this is added to.
        layers: see :class:`Reads`. The states are ``(batch, tokens, len(layers) * hidden)``.
        wanted: selects the final states ``(batch, n, hidden)`` to compute logits from, after the
            decoder. None for all.
        only_last: keep the states of each forward's last column only.

    Raises:
        ValueError: if there is no such layer.
    """
    step_aside(model)
    seen: list[Tensor] = []
    last = num_layers(model) if layers else 0
    if any(not 0 <= layer <= last for layer in layers):
        raise ValueError(f"layers {tuple(layers)}: the model's are numbered 0 to {last}.")
    inputs = {layer: layer_input(model, changes, layer) for layer in {*layers} - {last}}

    def note(args: Any, kwargs: Any, output: Any) -> Any:
        final = output[0]
        parts = [inputs[layer].pop() if layer in inputs else final for layer in layers]
        if any(part.shape[:-1] != final.shape[:-1] for part in parts):
            raise ValueError(
                f"{type(model).__name__} has several streams of hidden states between its layers, "
                f"so that states of layers {tuple(layers)} cannot be read. Choose a strategy that "
                "reads the final ones."
            )
        states = torch.cat([part.to(final.device) for part in parts], -1) if parts else final
        seen.append(states[:, -1:].clone() if only_last else states)
        fewer = final if wanted is None else wanted(final)
        if fewer.shape == final.shape:
            return None
        # Not `contiguous()`, which keeps the strides of a single batch row: see output_logits.
        fewer = fewer.clone(memory_format=torch.contiguous_format)
        if isinstance(output, tuple):
            return (fewer, *output[1:])
        output.last_hidden_state = fewer
        return output

    changes.after(decoder_of(model), note)
    return seen
