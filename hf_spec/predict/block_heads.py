"""Heads of block drafters, which correct a block's predictions by its earlier tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.adapters.config import vocab_size
from hf_spec.modeling_patches.weights import is_plain, is_updated, output_bias, output_weight
from hf_spec.predict.markov import ConditionalHead, DraftVocabulary, Remembered, drafted_logits
from hf_spec.target.hidden_states import shapes_logits
from hf_spec.threads import cached_property

# --------------------------------------------------------------------------------------------------
# What the head of a block drafter is: how drafted tokens change the predictions of those after
# them.

#: Shapes of tensors by name.
Shapes = dict[str, tuple[int, ...]]


class BlockHead(ConditionalHead):
    """A head of a block, whose slots are predicted from without the tokens drafted before them.

    A new one defines :meth:`shapes` and :meth:`features`, and stands in the table
    :data:`~hf_spec.predict.blocks.HEADS`.

    Args:
        network: the :class:`~hf_spec.predict.blocks.BlockNetwork`.

    Attributes:
        buffers: names of tensors that are not trained.
        output: name of the tensor with a row for each token that is drafted; empty if there is
            none.
        causal: whether blocks have to be causal.
        of_masks: whether only the slots of masks may predict.
        reads_ahead: whether :meth:`read` needs the token ahead of a block's first.
        reads_context: whether it needs the context of that token.
        by_rank: whether it needs the likeliest tokens by the block's logits, also for a sample.
        weights: the adapter's tensors by name; gradients flow to its parameters.
        vocabulary: the tokens that are drafted, of heads that name it in :attr:`held`; None for
            all.
        chooses: whether drafted tokens are chosen among the likeliest of a slot only.
        top_k: of how many of these; None for all, as in training.
    """

    buffers: ClassVar[Collection[str]] = ()
    output: ClassVar[str] = ""
    causal: ClassVar[bool] = False
    of_masks: ClassVar[bool] = False
    reads_ahead: ClassVar[bool] = False
    reads_context: ClassVar[bool] = False
    by_rank: ClassVar[bool] = False
    chooses: ClassVar[bool] = False
    vocabulary: DraftVocabulary | None

    def __init__(self, network: Any):
        self.network, self.weights = network, network.adapter.tensors()
        self.config = network.config
        self.top_k: int | None = None
        if "vocabulary" in self.held:
            self.vocabulary = DraftVocabulary.of(self.weights, network.model)

    @classmethod
    @abstractmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        """Shapes of its tensors by name.

        Args:
            config: the :class:`BlockConfig`, with the shape of the base recorded.
            known: how many tokens may come before.
        """

    @classmethod
    def fresh(cls, config: Any, known: int, model: Any) -> dict[str, Tensor]:
        """Tensors of a new head on a base model by name, with which it changes nothing: random
        matrices, whose outputs are of the size of their inputs, and zeros."""
        made = {}
        for name, shape in cls.shapes(config, known).items():
            random = len(shape) == 2 and name != cls.output
            made[name] = torch.randn(shape) / shape[-1] ** 0.5 if random else torch.zeros(shape)
        return made

    def given(
        self, logits: Tensor, previous: Tensor, states: Tensor, memory: Tensor | None = None,
        among: Tensor | None = None,
    ) -> Remembered:  # fmt: skip
        """See :class:`ConditionalHead`; of the tokens ``among``, ``(..., k)``, or of all. Logits of
        tokens that the model has gained since stay as they are."""
        features, memory = self.features(previous, states, memory)
        weight = self.weights[self.output]
        if among is None:
            change = products(features, weight, None)
            change = functional.pad(change, (0, logits.shape[-1] - len(weight)))
        elif len(weight) < (self.config.draft_vocab_size or vocab_size(self.network.model)):
            change = products(features, weight, among.clamp(max=len(weight) - 1))
            change = change.masked_fill(among >= len(weight), 0.0)
        else:
            change = products(features, weight, among)
        return logits + change.to(logits), memory

    @abstractmethod
    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        """What the rows of :attr:`output` are multiplied with, and the memory of the tokens after;
        see :meth:`given`."""

    def linear(self, names: Sequence[str], inputs: Tensor) -> Tensor:
        """The product with a matrix, and the bias if there is one, of these names."""
        return functional.linear(inputs, *(self.weights[name] for name in names))

    def after_layer(self, index: int, hidden: Tensor, anchors: Tensor) -> Tensor:
        """What becomes of a layer's output.

        Args:
            index: of the layer.
            hidden: ``(batch, blocks, block_size, hidden)``
            anchors: ``(batch, blocks)`` first tokens of the blocks.
        """
        return hidden

    def read(
        self, states: Tensor, last: Tensor, ahead: Tensor | None, context: Tensor | None
    ) -> Tensor:
        """What :meth:`given` gets of blocks: their states, and more features if it needs some.

        Args:
            states: ``(batch, blocks, block_size, hidden)`` that logits are computed from.
            last: the last layer's output, before :meth:`after_layer`.
            ahead: ``(batch, blocks)`` tokens ahead of the blocks, if :attr:`reads_ahead`.
            context: ``(batch, blocks, hidden)`` of these tokens, if :attr:`reads_context`.
        """
        return states

    def prepare(self, logits: Tensor, among: Tensor, states: Tensor) -> Tensor:
        """States for :meth:`given`, with what it computes of all slots at once.

        Args:
            logits: ``(..., distances, tokens)``
            among: ``(..., distances, k)`` tokens that are given, likeliest first if
                :attr:`by_rank`.
            states: ``(..., distances, features)`` of :meth:`read`.
        """
        return states

    def along(self, logits: Tensor, previous: Tensor, states: Tensor) -> Tensor:
        """With -inf for tokens that it does not choose among."""
        given = super().along(logits, previous, states)
        if self.top_k is None:
            return given
        least = logits.topk(min(self.top_k, logits.shape[-1])).values[..., -1:]
        return given.masked_fill(logits < least, -torch.inf)

    def confidence(self, previous: Tensor, states: Tensor) -> Tensor | None:
        """``(...)`` how likely the likeliest token is accepted, if those before it are; None if it
        does not know. ``previous`` and ``states`` are as in :meth:`given`."""
        return None


def drafted(config: Any, known: int) -> int:
    """How many tokens are drafted, of so many."""
    return config.draft_vocab_size or known


def look_up(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of a table. Tokens that the model has gained since have none: they get the last one."""
    return functional.embedding(tokens.to(table.device).clamp(max=len(table) - 1), table)


def products(states: Tensor, weight: Tensor, among: Tensor | None) -> Tensor:
    """Of states ``(..., n, features)`` with all rows of a matrix, or those ``among`` ``(..., 1 or
    n, k)``: ``(..., n, rows or k)``."""
    if among is None:
        return functional.linear(states, weight)
    return torch.einsum("...kh,...h->...k", weight[among], states)


# -- DSpark's heads, and DFlash 2's: a change of logits by the token before, of low rank -----------
#
# DSpark ("DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation",
# 2026) adds W2 u to the logits of a slot, where u depends on the token before it, p, and, in some
# kinds, on the slot's state h and on the tokens before p::
#
#     vanilla   u = W1[p]
#     gated     u = sigmoid(G [h; W1[p]] + b) * W1[p]
#     rnn       g, c, o = J [s; W1[p]; h] + b
#               s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c),  u = tanh(o)
#     selector  u = W1[p] * P h
#
# The last one is DFlash 2's, which chooses among each slot's k tokens of the largest logits only.
#
# DSpark's head of confidence says how likely a slot's likeliest token is accepted, if all before it
# are: sigmoid(w [h; W1[p]] + b), or without W1[p]. Trees are grown by that.

#: Names of the tensors of the head of confidence, and of those of kinds.
CONFIDENCE = "confidence_head.proj.weight", "confidence_head.proj.bias"
_TABLES = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_GATE = "markov_head.gate_proj.weight", "markov_head.gate_proj.bias"
_JOINT = "markov_head.joint_proj.weight", "markov_head.joint_proj.bias"
_CODES = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
_PROJECTION = "candidate_selector.hidden_projection.weight"


class VanillaHead(BlockHead):
    """W1 ``(known, rank)`` and W2 ``(tokens, rank)``; logits change by W2 u.

    Attributes:
        tables: names of W1 and W2.
    """

    tables = _TABLES
    output = tables[1]

    @classmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        rank = config.markov_rank
        return dict(zip(cls.tables, ((known, rank), (drafted(config, known), rank))))

    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        return self._read(previous, states)[0], None

    def confidence(self, previous: Tensor, states: Tensor) -> Tensor | None:
        if CONFIDENCE[0] not in self.weights:
            return None
        before, states = self._read(previous, states)
        weight = self.weights[CONFIDENCE[0]]
        seen = states if weight.shape[1] == states.shape[-1] else torch.cat([states, before], -1)
        return self.linear(CONFIDENCE, seen)[..., 0].sigmoid()

    def _read(self, previous: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """W1[p], and h for each p."""
        before = look_up(self.weights[self.tables[0]], previous)
        return before, states.to(before).expand(*before.shape[:-1], -1)


class GatedHead(VanillaHead):
    """G ``(rank, hidden + rank)`` and its bias."""

    @classmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        rank, width = config.markov_rank, config.markov_rank + config.hidden_size
        return {**super().shapes(config, known), **dict(zip(_GATE, ((rank, width), (rank,))))}

    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        before, states = self._read(previous, states)
        return self.linear(_GATE, torch.cat([states, before], -1)).sigmoid() * before, None


class RecurrentHead(VanillaHead):
    """J ``(3 * rank, 2 * rank + hidden)`` and its bias."""

    remembers = True

    @classmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        size, width = 3 * config.markov_rank, 2 * config.markov_rank + config.hidden_size
        return {**super().shapes(config, known), **dict(zip(_JOINT, ((size, width), (size,))))}

    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        before, states = self._read(previous, states)
        memory = torch.zeros_like(before) if memory is None else memory
        joint = self.linear(_JOINT, torch.cat([memory, before, states], -1))
        gate, new, out = joint.chunk(3, -1)
        memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * new.tanh()
        return out.tanh(), memory


class Selector(VanillaHead):
    """P ``(rank, hidden)``."""

    chooses = True
    tables = _CODES
    output = tables[1]

    @classmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        return {
            **super().shapes(config, known),
            _PROJECTION: (config.markov_rank, config.hidden_size),
        }

    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        before, states = self._read(previous, states)
        return before * self.linear([_PROJECTION], states), None


# -- Domino's head: a recurrent state over the drafted tokens corrects the logits of a block -------
#
# "Domino" (arXiv 2605.29707), as SpecForge trains it. With the input embedding e of the token
# before and the state h of a slot::
#
#     s <- GRU(e, s), from 0 at the root
#     logits += P2 silu(P1 [h; s])
#
# The first ``markov_skips`` distances keep the block's own logits.

#: Names of the GRU's matrices for embeddings and states, of P1 and of P2.
NAMES = (
    "prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight",
    "embed_proj.2.weight",
)  # fmt: skip


class Domino(BlockHead):
    """``(3 * size, hidden)`` and ``(3 * size, size)``, whose rows are those of the reset and update
    gates and of the new state, P1 ``(rank, hidden + size)`` and P2 ``(tokens, rank)``."""

    output = NAMES[3]
    remembers = True
    plain_share = 1.0

    @classmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        hidden, rank, size = config.hidden_size, config.markov_rank, config.markov_width
        first, second = (rank, hidden + size), (drafted(config, known), rank)
        return dict(zip(NAMES, ((3 * size, hidden), (3 * size, size), first, second)))

    def read(
        self, states: Tensor, last: Tensor, ahead: Tensor | None, context: Tensor | None
    ) -> Tensor:
        """With 1 for slots whose logits are corrected, and 0 for others."""
        distances = torch.arange(states.shape[2], device=states.device)
        distances = distances + self.config.sample_from_anchor
        corrected = (distances > self.config.markov_skips).to(states)
        return torch.cat([states, corrected[:, None].expand(*states.shape[:-1], 1)], -1)

    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        of_inputs, of_states, first, _ = (self.weights[name] for name in NAMES)
        embedded = self.network.embedded(previous)
        if memory is None:
            memory = embedded.new_zeros(*embedded.shape[:-1], of_states.shape[1])
        flat = embedded.flatten(0, -2), memory.flatten(0, -2)
        memory = torch.gru_cell(*flat, of_inputs, of_states).view_as(memory)
        states, corrected = states.split([states.shape[-1] - 1, 1], -1)
        both = torch.cat([states.to(memory).expand(*memory.shape[:-1], -1), memory], -1)
        return corrected.to(memory) * functional.silu(functional.linear(both, first)), memory


# -- xPress' head: a small causal mixer over the slots of a block and the tokens before them -------
#
# "xPress" (arXiv 2608.02438), as speculators trains it. With the state h_k of slot k, the mean m of
# all slots' and the token p_k before it::
#
#     a_k = I [D h_k; E m; T[p_k]]
#     a_k += sum over j <= k of mix_kj * a_j,  channel by channel
#     a_k += SwiGLU(a_k)
#     logits += O a_k
#
# There, the block is refined several times at once, from its own tokens. Here each token follows
# those before it, which is what that converges to, and what trees need. Where the root's slot
# drafts nothing, it takes part in the sum, with the token ahead of the root before it.


def _name(part: str) -> str:
    return f"refiner_head.{part}" + ".weight" * (part != "mix_l")


class XPress(BlockHead):
    """T ``(known, rank)``, D and E ``(rank, hidden)``, I ``(rank, 3 * rank)``, mix ``(rank,
    block_size, block_size)``, the SwiGLU's three, and O ``(tokens, rank)``."""

    output = _name("readout")
    remembers = True
    reads_ahead = True
    plain_share = 0.6

    @classmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        hidden, rank, width = config.hidden_size, config.markov_rank, config.markov_width
        size, out = config.block_size, drafted(config, known)
        parts = {
            "token_embed": (known, rank), "down_h": (rank, hidden), "down_g": (rank, hidden),
            "in_proj": (rank, 3 * rank), "mix_l": (rank, size, size), "mlp_gate": (width, rank),
            "mlp_up": (width, rank), "mlp_down": (rank, width), "readout": (out, rank),
        }  # fmt: skip
        return {_name(part): shape for part, shape in parts.items()}

    def read(
        self, states: Tensor, last: Tensor, ahead: Tensor | None, context: Tensor | None
    ) -> Tensor:
        """With each slot's part of a_k, and what the root's slot adds to the sum."""
        rank, mean = self.config.markov_rank, states.mean(2, keepdim=True).expand(states.shape)
        parts = torch.cat([self._linear("down_h", states), self._linear("down_g", mean)], -1)
        inner = functional.linear(parts, self._matrix("in_proj")[:, : 2 * rank])
        added = torch.zeros_like(inner)
        if not self.config.sample_from_anchor:
            assert ahead is not None
            first = inner[:, :, 0] + self._of_token(ahead)
            added = self._matrix("mix_l")[:, :, 0].T * first[:, :, None]
        return torch.cat([states, inner, added], -1)

    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        rank, first = self.config.markov_rank, int(not self.config.sample_from_anchor)
        *_, inner, added = states.split([states.shape[-1] - 2 * rank, rank, rank], -1)
        own = self._of_token(previous) + inner
        memory = own if memory is None else torch.cat([memory, own], -1)
        path = memory.unflatten(-1, (-1, rank))  # of all slots of the path
        slot = first + path.shape[-2] - 1
        mixed = (self._matrix("mix_l")[:, slot, first : slot + 1].T * path).sum(-2)
        own = own + added + mixed
        gate = functional.silu(self._linear("mlp_gate", own)) * self._linear("mlp_up", own)
        return own + self._linear("mlp_down", gate), memory

    def _matrix(self, name: str) -> Tensor:
        return self.weights[_name(name)]

    def _linear(self, name: str, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self._matrix(name))

    def _of_token(self, tokens: Tensor) -> Tensor:
        """The part of a_k that the token before gives."""
        rank = self.config.markov_rank
        found = look_up(self._matrix("token_embed"), tokens)
        return functional.linear(found, self._matrix("in_proj")[:, 2 * rank :])


# -- DSpine's head: slots of a causal block pass on what they would draft, layer by layer ----------
#
# "DSpine" (Tencent), as SpecForge trains it. Every token has a fixed *code* of length sqrt(rank),
# its row of the output embeddings in a few directions. After each layer, a slot's feature f is its
# state h in the space of the codes, and it gets a message of the slot before, p being that slot's
# feature, or the code of the root::
#
#     f = sqrt(rank) * unit(R_i h)
#     h += rms(h) * W_i (sigmoid(G f + P p + b) * M p)
#
# Where tokens are drafted, the last layer's message is written once more, with the code of the
# drafted token as p, and among the slot's likeliest tokens the logits of that state count.

#: Name of the codes, one for each token.
CODES = "transfer_codes"
_MESSAGE, _OF_RECEIVER, _OF_SENDER = (
    f"injection.{name}.weight" for name in ("message", "receiver_gate", "predecessor_gate")
)
_BIAS = "injection.bias"


class DSpine(BlockHead):
    """Codes ``(known, rank)``; for each layer R ``(rank, hidden)``, ``injection.readouts.i``, and W
    ``(hidden, width)``, ``injection.writes.i``; of all, M, G and P ``(width, rank)`` and b."""

    held = ("vocabulary",)
    buffers = (CODES,)
    causal = chooses = of_masks = True
    plain_share = 1.0

    @classmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        shape = config.markov_width, config.markov_rank
        return {_BIAS: shape[:1], **dict.fromkeys((_MESSAGE, _OF_RECEIVER, _OF_SENDER), shape)}

    @classmethod
    def fresh(cls, config: Any, known: int, model: Any) -> dict[str, Tensor]:
        hidden, width, rank = config.hidden_size, config.markov_width, config.markov_rank
        loads = config.inference_mode or torch.empty(0).is_meta  # its codes come from a file
        codes, directions = codes_of(None if loads else output_weight(model), known, hidden, rank)
        made = {CODES: codes, **super().fresh(config, known, model)}
        for index in range(config.num_layers):
            made[_readout(index)] = directions.clone()
            made[_write(index)] = torch.zeros(hidden, width)
        return made

    def after_layer(self, index: int, hidden: Tensor, anchors: Tensor) -> Tensor:
        root = self._code(anchors)[:, :, None]
        features = self._feature(hidden[:, :, 1:], index)
        before = torch.cat([root, features[:, :, :-1]], 2)
        changed = self._written(hidden[:, :, 1:], features, before, index)
        return torch.cat([hidden[:, :, :1], changed], 2)

    def read(
        self, states: Tensor, last: Tensor, ahead: Tensor | None, context: Tensor | None
    ) -> Tensor:
        """With the states before the last message."""
        return torch.cat([states, last], -1)

    def given(
        self, logits: Tensor, previous: Tensor, states: Tensor, memory: Tensor | None = None,
        among: Tensor | None = None,
    ) -> Remembered:  # fmt: skip
        states, _ = self.features(previous, states, memory)
        if among is None:
            return self._all_logits(states).to(logits), None
        if self._shapes_logits:
            found = self._all_logits(states).gather(-1, among.expand(*states.shape[:-1], -1))
        else:
            weight = self._output_weight()
            assert weight is not None
            found = products(states.to(weight), weight, among)
        return found.to(logits).masked_fill(logits == -torch.inf, -torch.inf), None

    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        """States with the drafted tokens' message."""
        last = states[..., states.shape[-1] // 2 :].to(self.weights[_MESSAGE])
        index = self.config.num_layers - 1
        written = self._written(last, self._feature(last, index), self._code(previous), index)
        return self.network.adapter.norm(written), None

    def _all_logits(self, states: Tensor) -> Tensor:
        flat, predict = states.flatten(0, -2)[None], self.network.logits
        logits = drafted_logits(self.vocabulary, lambda head: predict(flat, head))
        return logits.view(*states.shape[:-1], -1)

    def _output_weight(self) -> Tensor | None:
        """``(tokens, hidden)`` output embeddings of the drafted tokens."""
        if self.vocabulary is not None:
            return self.vocabulary.weight
        return output_weight(self.network.model)

    @cached_property
    def _shapes_logits(self) -> bool:
        """Whether logits are more than products of states and output embeddings."""
        model, weight = self.network.model, self._output_weight()
        updated = self.vocabulary is None and is_updated(model.get_output_embeddings())
        shaped = self.config.shapes_logits or shapes_logits(model)
        return updated or shaped or not is_plain(weight) or output_bias(model) is not None

    def _code(self, tokens: Tensor) -> Tensor:
        found = look_up(self.weights[CODES], tokens)
        return (found.shape[-1] ** 0.5 * found).to(self.weights[_MESSAGE])

    def _feature(self, hidden: Tensor, index: int) -> Tensor:
        found = functional.linear(hidden, self.weights[_readout(index)])
        return found.shape[-1] ** 0.5 * functional.normalize(found, dim=-1)

    def _written(self, hidden: Tensor, features: Tensor, before: Tensor, index: int) -> Tensor:
        """States with a message: all ``(..., features)``, broadcast."""
        of_receiver = functional.linear(features, self.weights[_OF_RECEIVER], self.weights[_BIAS])
        gate = of_receiver + functional.linear(before, self.weights[_OF_SENDER])
        message = gate.sigmoid() * functional.linear(before, self.weights[_MESSAGE])
        size = hidden.pow(2).mean(-1, keepdim=True).sqrt()
        return hidden + size * functional.linear(message, self.weights[_write(index)])


def _readout(index: int) -> str:
    return f"injection.readouts.{index}.weight"


def _write(index: int) -> str:
    return f"injection.writes.{index}.weight"


@torch.no_grad()
def codes_of(rows: Tensor | None, known: int, hidden: int, rank: int) -> tuple[Tensor, Tensor]:
    """Codes ``(known, rank)`` of tokens and the directions ``(rank, hidden)`` that they are read
    in: unit rows of the output embeddings, centered, in their widest directions, whitened, of
    length 1. Random ones where there are no rows, or quantized ones."""
    if rows is None or rows.is_meta or not rows.is_floating_point() or len(rows) < known:
        codes, directions = torch.randn(known, rank), torch.randn(rank, hidden) / hidden**0.5
        return functional.normalize(codes, dim=-1), directions
    rows = functional.normalize(rows[:known].float(), dim=-1)
    rows = rows - rows.mean(0)
    values, vectors = torch.linalg.eigh(rows.T @ rows)
    values, vectors = values[-rank:].clamp(min=1e-12), vectors[:, -rank:]
    return functional.normalize(rows @ vectors / values.sqrt(), dim=-1), vectors.T
