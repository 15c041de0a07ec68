"""Forwards over whole sequences, with probes at many anchors or without, for training.

Each batch row is a sequence with anchors ``t`` and a group of probes under each anchor. A probe
sees the tokens up to its anchor, the probes of its group that the group allows, and the learned
front states. Positions and masks are those of decoding, with a tree node at each anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from hf_spec.cache.recurrent import sequence_cache, states_before
from hf_spec.core.device import to_device
from hf_spec.core.shapes import ProbeGroup
from hf_spec.core.tree import since
from hf_spec.modeling_patches.attention_masks import Local, TreeAttention
from hf_spec.modeling_patches.forwards import averaged_exits, learned_embeddings
from hf_spec.modeling_patches.linear_attention import Running, tree_recurrences
from hf_spec.modeling_patches.modules import (
    CACHE,
    num_layers,
    only_logits,
)
from hf_spec.modeling_patches.per_call import Changes, changing
from hf_spec.modeling_patches.support import checkpoints
from hf_spec.modeling_patches.weights import Ranks, output_features, placement
from hf_spec.target.hidden_states import captured, model_logits, supported_kwargs
from hf_spec.target.target import ProbeInputs, first_near

#: Keeps what a model says of sequences that recur. From what computes it of ids and mask, these
#: two, and its kind, to kept tensors or computed ones.
Keeper = Callable[
    [Callable[[Tensor, Tensor], Sequence[Tensor]], Tensor, Tensor, Sequence[int]], Sequence[Tensor]
]
#: That of the running training.
KEEPER: ContextVar[Keeper | None] = ContextVar("hf_spec_keeper", default=None)

#: Tokens of a sequence whose logits are computed at once.
AT_ONCE = 128
#: Label of tokens that are not predicted, as everywhere in Transformers.
IGNORED = -100


class ProbedSequences(NamedTuple):
    """Final hidden states of a forward over sequences with probes."""

    probe_hidden: Tensor  # (batch, anchors, group, hidden)
    token_hidden: Tensor  # (batch, seq, hidden)


def probe_sequences(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None, anchors: Tensor,
    group: ProbeGroup, probe_inputs: ProbeInputs, frozen: bool = True,
    while_probing: Changes | None = None,
) -> ProbedSequences:  # fmt: skip
    """Run sequences with a group of probes under every anchor.

    Args:
        model: the base model.
        input_ids: ``(batch, seq)``.
        attention_mask: ``(batch, seq)``, 0 for padding, on either side; None if there is none.
        anchors: ``(batch, anchors)`` columns of ``input_ids`` that have probes.
        group: the probes under each anchor.
        probe_inputs: their embeddings, the same under all anchors or ``(batch, anchors, group,
            hidden)``, and the learned front states; gradients flow to these.
        frozen: whether the model is frozen. If so, the tokens run separately without gradients,
            only the probes are differentiated, and dropout is off, as in decoding. Otherwise,
            everything runs and is differentiated together.
        while_probing: changes to a frozen model while the probes run.
    """
    attention = TreeAttention(model, checkpointing=not frozen and checkpoints(model))
    run = _Run(model, attention, input_ids, attention_mask, anchors, group, probe_inputs)
    if not frozen:
        return run.together()
    with _evaluating(model):
        return run.apart(while_probing)


@contextmanager
def _evaluating(model: Any) -> Any:
    """The model in evaluation mode; afterwards, each module's previous mode is restored."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class _Run:
    """One forward over sequences with probes."""

    def __init__(
        self, model: Any, attention: TreeAttention, input_ids: Tensor, mask: Tensor | None,
        anchors: Tensor, group: ProbeGroup, inputs: ProbeInputs,
    ):  # fmt: skip
        self.model, self.attention, self.inputs = model, attention, inputs
        self.device, self.dtype = placement(model)
        self.input_ids = input_ids.to(self.device)
        self.real = (torch.ones_like(input_ids) if mask is None else mask).to(self.device).bool()
        self.anchors = anchors = anchors.to(self.device)
        self.batch, self.seq = input_ids.shape
        self.group = group
        offsets = to_device(group.offsets, self.device, torch.long)
        self.within = to_device(group.visible, self.device, torch.bool)
        self.positions = (self.real.long().cumsum(-1) - 1).clamp(min=0)
        at = self.positions.gather(1, anchors)
        self.probe_positions = (at[:, :, None] + offsets).flatten(1)
        self.states = states_before(model, self.batch)

    def _changes(self, visible: Tensor, first: int = 0) -> Changes:
        """The changes with which tokens or probes run, after ``first`` tokens that have run;
        ``visible`` ``(batch, n, first + n)`` bool is what each of them sees."""
        changes = Changes().update(self.attention.changes)
        if self.states is not None:
            running = Running()
            running.states = self.states
            self.states.begin(lambda: visible, first, plain=False)
            tree_recurrences(self.model, changes, running)
        return changes

    def _embeddings(self) -> Tensor:
        """The probes': (batch, anchors * group, hidden)."""
        learned = self.inputs.embeddings.to(self.device, self.dtype)
        if learned.ndim == 4:  # different ones under each anchor
            return learned.flatten(1, 2)
        return learned.repeat(self.anchors.shape[1], 1).expand(self.batch, -1, -1)

    def _with_probes(self, ids: Tensor) -> Tensor:
        """Ids of tokens ``(batch, n)``, and any for the probes behind them."""
        return pad(ids, (0, self.probe_positions.shape[1]))

    def _token_rows(self) -> Tensor:
        """What tokens see of tokens, padding itself at least: (batch, seq, seq) bool."""
        places = torch.arange(self.seq, device=self.device)
        own = places[None] == places[:, None]
        return (places[None] <= places[:, None]) & self.real[:, None] | own

    def _probe_rows(self) -> Tensor:
        """What probes see of tokens and probes: (batch, probes, seq + probes) bool."""
        size, count = len(self.group), self.anchors.shape[1]
        anchor = self.anchors.repeat_interleave(size, dim=1)[:, :, None]
        tokens = (torch.arange(self.seq, device=self.device) <= anchor) & self.real[:, None]
        same = torch.eye(count, dtype=torch.bool, device=self.device)
        own = torch.kron(same, self.within).expand(self.batch, -1, -1)
        return torch.cat([tokens, own], dim=2)

    def _mask(self, visible: Tensor, query_positions: Tensor, front: int) -> Any:
        """``visible``: (batch, queries, seq [+ probes]) without the front slots. None if no layer
        attends."""
        if self.states is not None and not self.states.beside_keys:
            return None
        key_positions = torch.cat([self.positions, self.probe_positions], dim=1)
        key_positions = key_positions[:, : visible.shape[2]]
        seen: dict[Local | None, Tensor] = {None: visible[:, None]}
        for local in {local for local in self.attention.locals.values() if local is not None}:
            begin = first_near(local, query_positions)
            seen[local] = visible[:, None] & since(begin, key_positions)
        if front:
            kinds = torch.arange(len(self.group), device=self.device).repeat(self.anchors.shape[1])
            learned = self.inputs.sees_front(kinds).expand(self.batch, 1, -1, -1)
            seen = {local: torch.cat([learned, mask], dim=3) for local, mask in seen.items()}
        by_layers = {kind: seen[local] for kind, local in self.attention.locals.items()}
        return self.attention.convert(by_layers, self.dtype)

    def apart(self, while_probing: Changes | None) -> ProbedSequences:
        with torch.no_grad():
            visible, cache = self._token_rows(), sequence_cache(self.states)
            mask = self._mask(visible, self.positions, 0)
            token_hidden = self._forward(
                self._changes(visible), self.positions, mask, cache, self.input_ids
            )
        front, ranks = self.inputs.num_front, Ranks(self.model)
        full = sequence_cache(self.states)
        for index, layer in enumerate(cache.layers):
            if not layer.is_initialized:  # one with recurrent states only
                continue
            states = [layer.keys, layer.values]
            for place, learned in enumerate(self.inputs.front[index] if front else ()):
                own = ranks.own_heads(learned.to(states[0]), states[0].shape[1])
                own = own.expand(self.batch, -1, -1, -1)
                states[place] = torch.cat([own, states[place]], dim=2)
            full.update(*states, index)
        visible = self._probe_rows()
        changes = self._changes(visible, self.seq)
        if while_probing is not None:
            changes.update(while_probing)
        learned_embeddings(self.model, changes, self._embeddings)
        averaged_exits(self.model, changes, self.inputs.exits)
        if self.inputs.update is not None:
            self.inputs.update.add_to(changes)
        mask, ids = self._mask(visible, self.probe_positions, front), self.input_ids[:, :0]
        hidden = self._forward(changes, self.probe_positions, mask, full, self._with_probes(ids))
        return self._split(hidden, token_hidden)

    def together(self) -> ProbedSequences:
        if self.inputs.num_front or self.inputs.update is not None:
            raise ValueError("what probes alone have learned needs a frozen base model.")
        tokens = self._token_rows()
        unseen = tokens.new_zeros(self.batch, self.seq, self.probe_positions.shape[1])
        visible = torch.cat([torch.cat([tokens, unseen], 2), self._probe_rows()], dim=1)
        positions = torch.cat([self.positions, self.probe_positions], dim=1)
        changes = self._changes(visible)
        learned_embeddings(self.model, changes, self._embeddings)
        averaged_exits(self.model, changes, self.inputs.exits, lambda: self.seq)
        # Recurrent layers ask their cache for states.
        cache = None if self.states is None else sequence_cache(self.states)
        mask, ids = self._mask(visible, positions, 0), self._with_probes(self.input_ids)
        hidden = self._forward(changes, positions, mask, cache, ids)
        return self._split(hidden[:, self.seq :], hidden[:, : self.seq])

    def _forward(
        self, changes: Changes, positions: Tensor, mask: Any, cache: Any, ids: Tensor
    ) -> Tensor:
        """The final hidden states of a forward."""
        seen = captured(self.model, changes)
        held = {} if cache is None else {CACHE: cache}
        changes.run(
            self.model, input_ids=ids, attention_mask=mask, use_cache=bool(held), **held,
            **_without_logits(self.model, position_ids=positions),
        )  # fmt: skip
        return seen[0]

    def _split(self, probes: Tensor, tokens: Tensor) -> ProbedSequences:
        shape = (self.batch, self.anchors.shape[1], len(self.group), probes.shape[-1])
        return ProbedSequences(probes.reshape(shape), tokens)


def _without_logits(model: Any, **inputs: Tensor) -> dict[str, Any]:
    """Those of ``inputs`` that the model's forward takes, and what leaves out its logits: they are
    computed later, from the hidden states of the wanted tokens."""
    return supported_kwargs(model, logits_to_keep=1, **inputs) | only_logits(model)


def token_hidden(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, layers: Sequence[int] = ()
) -> Tensor:
    """Hidden states of sequences, ``(batch, seq, hidden)``, from a frozen model.

    By default the inputs of the model's output embeddings; without gradients and dropout, as in
    decoding.

    Args:
        model: the base model.
        input_ids, attention_mask: as of :func:`probe_sequences`.
        layers: see :class:`Reads`.
    """
    return token_states(model, input_ids, attention_mask, layers)[0]


def token_states(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, layers: Sequence[int] = (),
    likeliest: int = 0,
) -> Sequence[Tensor]:  # fmt: skip
    """:func:`token_hidden`; and, from the same forward, the model's own probabilities of its
    likeliest tokens, and these, both ``(batch, seq, likeliest)``, if any are asked for."""
    device = placement(model).device
    input_ids = input_ids.to(device)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(device)
    read = (*layers, num_layers(model)) if likeliest and layers else layers

    def compute(input_ids: Tensor, mask: Tensor) -> Sequence[Tensor]:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        changes = Changes()
        seen = captured(model, changes, read)
        with torch.no_grad(), _evaluating(model):
            changes.run(
                model, input_ids=input_ids, attention_mask=mask, use_cache=False,
                **_without_logits(model, position_ids=positions),
            )  # fmt: skip
            if not likeliest:
                return seen
            width = output_features(model)[0]
            final, states = seen[0][..., -width:], seen[0][..., :-width] if layers else seen[0]
            best = []
            for part in final.split(AT_ONCE, 1):
                found = model_logits(model, part).float().softmax(-1)
                best.append(found.topk(min(likeliest, found.shape[-1])))
            probabilities, tokens = (torch.cat(some, 1) for some in zip(*best))
            return states, probabilities, tokens.int()

    keeper = KEEPER.get()
    if keeper is None or changing():  # changes may read what a forward computes on its way
        return compute(input_ids, mask)
    return keeper(compute, input_ids, mask, (*read, *[-likeliest] * bool(likeliest)))


def computed_states(model: Any, embeddings: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
    """Keys and values per layer of ``embeddings`` (tokens, hidden) as the start of a sequence.

    Gradients flow to the embeddings; dropout is off, as in decoding. Each result:
    ``(kv_heads, tokens, head_dim)``.
    """
    cache = DynamicCache()
    dtype = placement(model).dtype
    ids = torch.zeros(1, len(embeddings), dtype=torch.long, device=embeddings.device)
    changes = Changes()
    learned_embeddings(model, changes, lambda: embeddings[None].to(dtype))
    with _evaluating(model):
        given = {"input_ids": ids, CACHE: cache, "use_cache": True, **_without_logits(model)}
        changes.run(model, **given)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]
