"""Rotary frequencies that follow the longest position of a forward, token by token.

Dynamic NTK and LongRoPE (the 128k Phi models) choose their frequencies by the largest position id
of a forward. Plain generation thus rotates a token with the frequencies of the batch's length in
the step of the token: its *reach*. A forward over several tokens, or over sequences of different
lengths, would use the frequencies of the longest one for all.

Here the caller provides every token's reach, and copies of the rotary modules run once per set of
frequencies; copies, because some modules store the longest length seen. Such modules are detected
by their outputs, not by name or implementation.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from modeling_patches.cache_name import CACHE
from modeling_patches.per_call import Changes

#: A length that no sequence has.
_NEVER = 2**62


class Reach:
    """The reach of the tokens of one call; copies the rotary modules in their current state.

    Args:
        lead: for each sequence, the reach of its first token: more than 1 if another sequence is
            longer.
        forgets: see :func:`forgets_at`; None if the sequences are already longer.

    Attributes:
        least: smallest reach of all tokens, while a forward is part of a longer one.
    """

    def __init__(self, model: Any, lead: Sequence[int], forgets: int | None = None):
        self.lead = list(lead)
        self.least = 0
        self._ends = [_NEVER if forgets is None else forgets] * len(self.lead)
        #: Of the running forward: each token's reach, the smallest and the largest one.
        self._running: tuple[Tensor, int, int] | None = None
        self._changes = Changes()
        for module in followers(model):
            self._changes.after(module, partial(self._rotated, _Frozen(module)))

    def select(self, rows: Sequence[int]) -> None:
        """Follow the batch, whose row ``i`` is now the former ``rows[i]``."""
        self.lead = [self.lead[row] for row in rows]
        self._ends = [self._ends[row] for row in rows]

    def next(self, lengths: Sequence[int]) -> list[int]:
        """Reach of the next token of each sequence after this many tokens."""
        return [max(length + lead, self.least) for length, lead in zip(lengths, self.lead)]

    def room(self, lengths: Sequence[int]) -> list[int]:
        """How much deeper than the next token the draft tokens of each sequence may be; negative
        if it must be recomputed before its next token."""
        return [end - reach for end, reach in zip(self._ends, self.next(lengths))]

    def renewed(self, lengths: Sequence[int]) -> None:
        """Called after sequences without room have been recomputed."""
        self._ends = [end if room >= 0 else _NEVER
                      for end, room in zip(self._ends, self.room(lengths))]  # fmt: skip

    def run(
        self, function: Callable[..., Any], lengths: Sequence[int], depths: Tensor, deepest: int,
        **inputs: Any,
    ) -> Any:  # fmt: skip
        """Run a forward with the reach of each token.

        Args:
            lengths: number of tokens of each sequence before the forward.
            depths: ``(batch, tokens)`` depth of each token below the next one.
            deepest: the largest depth.
        """
        first = [length + lead for length, lead in zip(lengths, self.lead)]
        # Memory that is not pinned is copied at once: the host does not wait.
        start = torch.tensor(first, device="cpu").to(depths.device, non_blocking=True)
        reach = start[:, None] + depths
        least, most = min(self.next(lengths)), max(self.next(lengths)) + deepest
        self._running = reach.clamp(min=self.least), least, most
        return self._changes.run(function, **inputs)

    def _rotated(self, frozen: _Frozen, args: tuple, kwargs: dict, output: Any) -> Any:
        """The output of a rotary module, for each token as in its own step."""
        assert self._running is not None
        reach, least, most = self._running
        given = {**dict(zip(frozen.names, args)), **kwargs}
        last, *earlier = reversed(frozen.last_of_each(least, most, given.get("layer_type")))
        made = frozen.run(last, given)
        for last in earlier:
            within = (reach <= last)[..., None]  # (batch, tokens, 1)
            made = [torch.where(within.to(new.device), new, old)
                    for new, old in zip(frozen.run(last, given), made)]  # fmt: skip
        return tuple(made) if isinstance(output, tuple) else made[0]


class _Frozen:
    """A copy of a rotary module in its original state."""

    def __init__(self, module: nn.Module, device: Any = None):
        self._module = _copy(module, device)
        self.names = _inputs(module)
        self._rotations: dict[tuple[str | None, int], list[Tensor]] = {}

    def run(self, reach: int, given: dict[str, Any]) -> list[Tensor]:
        """The outputs in a forward whose largest position is ``reach - 1``."""
        ids = given["position_ids"]
        longest = torch.full_like(ids[..., :1], reach - 1)
        # A token's position is below its reach, so clamped positions belong to other reaches.
        ids = torch.cat([ids.clamp(max=reach - 1), longest], dim=-1)
        module = _copy(self._module)
        made = type(module).forward(module, **{**given, "position_ids": ids})
        return [part[..., :-1, :] for part in (made if isinstance(made, tuple) else [made])]

    def last_of_each(self, low: int, high: int, kind: str | None) -> list[int]:
        """For each set of frequencies, the largest reach in ``low .. high`` that has it, ascending.
        ``kind`` is the type of layer, if the module has several."""
        # Frequencies change monotonically, so equal ends imply equal values in between.
        if low == high or self.same(low, high, kind):
            return [high]
        middle = (low + high) // 2
        first = self.last_of_each(low, middle, kind)
        joined = self.same(middle, middle + 1, kind)
        return first[: -1 if joined else None] + self.last_of_each(middle + 1, high, kind)

    def same(self, one: int, other: int, kind: str | None) -> bool:
        """Whether both reaches give the same rotation."""
        return all(map(torch.equal, self._rotation(one, kind), self._rotation(other, kind)))

    def _rotation(self, reach: int, kind: str | None) -> list[Tensor]:
        """The rotation of two positions, computed on the CPU to avoid a synchronization."""
        if (kind, reach) not in self._rotations:
            given: dict[str, Any] = {
                self.names[0]: torch.zeros(1, 1, 2, 8, device="cpu"),
                "position_ids": torch.tensor([[0, 1]], device="cpu"),
            }
            if kind is not None:
                given["layer_type"] = kind
            self._rotations[kind, reach] = _Frozen(self._module, "cpu").run(reach, given)
        return self._rotations[kind, reach]


def _inputs(module: nn.Module) -> list[str]:
    """Names of the inputs of a module's forward."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _copy(module: nn.Module, device: Any = None) -> Any:
    """A copy with its own buffers, as these are written in place."""
    made = copy.copy(module)
    made._buffers = {name: b if b is None else b.to(device, copy=True)
                     for name, b in module._buffers.items()}  # fmt: skip
    for name, value in vars(module).items():
        if device is not None and isinstance(value, Tensor):
            vars(made)[name] = value.to(device)
    return made


# -- which models --------------------------------------------------------------------------------

_followers: weakref.WeakKeyDictionary[Any, list[nn.Module]] = weakref.WeakKeyDictionary()


def followers(model: Any) -> list[nn.Module]:
    """The modules of a model whose output depends on the largest position of a forward."""
    if model not in _followers:
        text = model.config.get_text_config(decoder=True)
        kinds = sorted(set(getattr(text, "layer_types", None) or [])) or [None]
        far = 2 * (getattr(text, "max_position_embeddings", None) or 2**16)
        _followers[model] = [module for module in model.modules() if _follows(module, kinds, far)]
    return _followers[model]


@contextmanager
def as_before(model: Any) -> Iterator[None]:
    """After the block, restore what :func:`followers` have stored about earlier positions."""
    states = {module: _copy(module) for module in followers(model)}
    try:
        yield
    finally:
        for module, state in states.items():
            module.__dict__ = state.__dict__


def _follows(module: nn.Module, kinds: Sequence[str | None], far: int) -> bool:
    names = _inputs(module)
    # In Transformers, the inputs are states, whose values do not matter, and positions.
    if names[1:2] != ["position_ids"] or any(True for _ in module.parameters()):
        return False
    frozen = _Frozen(module)
    for kind in kinds if "layer_type" in names else [None]:
        try:
            if not frozen.same(2, far, kind):
                return True
        except Exception:  # no such layers, or another signature
            continue
    return False


def forgets_at(model: Any) -> int | None:
    """The length past which plain generation recomputes the whole sequence, if it does: the Phi
    models do, when their frequencies change."""
    text = model.config.get_text_config(decoder=True)
    length = getattr(text, "original_max_position_embeddings", None)
    if length is None or not followers(model):
        return None
    cache: Any = DynamicCache(config=text)
    cache.get_seq_length = lambda layer_idx=0: length  # as if it were full
    ids = torch.zeros(1, length + 1, dtype=torch.long, device="cpu")
    inputs = model.prepare_inputs_for_generation(
        ids, attention_mask=torch.ones_like(ids), next_sequence_length=1,
        position_ids=torch.arange(length + 1, device="cpu")[None], **{CACHE: cache},
    )  # fmt: skip
    return length if inputs.get(CACHE) is None else None
