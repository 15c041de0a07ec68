"""A table of what the model itself has predicted after its last tokens, which drafts are made of.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
Recycling" (ACL 2025), section 3: an adjacency matrix from a token to its latest likely successors,
entered at every verified node, rejected ones included. Longer contexts, with probabilities, are
those of Song et al., "Accelerated Test-Time Scaling with Model-Free Speculative Sampling" (2025),
section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_spec.core.device import is_async, to_device
from hf_spec.core.memory import recall
from hf_spec.core.shapes import TreeStates
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult
from hf_spec.draft.grow import Children, Frontier, GoesOn
from hf_spec.draft.options import ADAPTIVE, CHAIN
from hf_spec.draft.predictor import Holds, Predictor
from hf_spec.draft.state import DecodeState
from hf_spec.modeling_patches.weights import vocabulary
from hf_spec.predict.table import chain_tree, static_tree
from hf_spec.target.hidden_states import NUM_READ, Predicted, Reads, gather_hidden
from hf_spec.target.noise import TRUST

#: Most tokens of a context.
ORDERS = 3
#: How far the probabilities of an entry are trusted, by the length of its context, and the weight
#: that it has beside those of other lengths (docs/inside/appendix_choices.md).
TRUSTED, WEIGHTS = (0.55, 0.7, 0.95), (1.0, 2.0, 5.0)
#: Likeliest successors of a context that are looked at.
WIDTH = 12
#: Ranks of accepted nodes are larger than those of all others.
MAX_NODES = 1 << 20
#: Tokens of a text that are entered at once.
AT_ONCE = 256
#: Where the host may read, a tree ends at a level whose paths are all less likely.
UNLIKELY = math.log(0.01)
#: The mean of Gumbel noise, for all tokens that an entry does not name.
MEAN_NOISE = 0.5772


class SuccessorTable(Holds):
    """The likeliest successors of contexts of one to :data:`ORDERS` tokens.

    Contexts of one token have an entry each. Those of more share ``size`` entries by their number
    of tokens: the later one replaces the earlier one, and a key says whose it is.

    Args:
        vocab: number of tokens.
        size: entries of contexts of each length above one.
        device: where it is.

    Attributes:
        keys: ``(entries + 1,)`` int64, -1 for an empty entry. The last one takes what is left out.
        successors: ``(entries + 1, NUM_READ)`` int32 tokens.
        log_probs: ``(entries + 1, NUM_READ)`` float16.
        trusted, weights: ``(ORDERS,)`` float32, see :data:`TRUSTED`.
    """

    held: ClassVar[Sequence[str]] = ("keys", "successors", "log_probs", "trusted", "weights")

    def __init__(self, vocab: int, size: int, device: torch.device):
        self.vocab, self.size = vocab, largest_prime(size)
        entries, width = vocab + (ORDERS - 1) * self.size, min(NUM_READ, vocab)
        self.keys = torch.full((entries + 1,), -1, dtype=torch.int64, device=device)
        self.successors = torch.zeros(entries + 1, width, dtype=torch.int32, device=device)
        self.log_probs = torch.zeros(entries + 1, width, dtype=torch.float16, device=device)
        self.trusted, self.weights = to_device([TRUSTED, WEIGHTS], device)

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(one.nbytes for one in self.tensors())

    def places(self, contexts: Tensor) -> tuple[Tensor, Tensor]:
        """The keys of contexts ``(..., ORDERS)``, latest token last, of each length from one, and
        the indices of their entries: ``(..., ORDERS)`` int64 each."""
        keys, base = [contexts[..., -1]], self.vocab + 1  # one more than tokens: before a text
        factor = base
        for order in range(2, ORDERS + 1):
            keys.append(keys[-1] + factor * contexts[..., -order])
            factor *= base
        found = [keys[0]]
        for place, key in enumerate(keys[1:]):
            found.append(self.vocab + place * self.size + key % self.size)
        return torch.stack(keys, -1), torch.stack(found, -1)

    def find(self, contexts: Tensor) -> tuple[Tensor, Tensor]:
        """What has followed contexts ``(..., ORDERS)``: tokens ``(..., WIDTH)`` int64, likeliest
        first, and their log-probabilities, float32; -inf where nothing is known.

        The entries of all lengths are averaged, longer ones with more weight.
        """
        keys, places = self.places(contexts)
        known = torch.where(self.keys[places] == keys, self.weights, 0.0)
        share = known / known.sum(-1, keepdim=True).clamp(min=1e-9) * self.trusted
        chances = self.log_probs[places].float().exp() * share[..., None]
        chances, tokens = chances.flatten(-2), self.successors[places].flatten(-2)
        same = tokens[..., :, None] == tokens[..., None, :]
        order = torch.arange(tokens.shape[-1], device=tokens.device)
        again = (same & (order < order[:, None])).any(-1)
        total = (same * chances[..., None, :]).sum(-1).masked_fill(again, 0.0)
        best = total.topk(min(WIDTH, total.shape[-1]), dim=-1)
        return tokens.gather(-1, best.indices).long(), best.values.log()

    def learn(self, before: Tensor, found: Predicted, rank: Tensor) -> None:
        """Enter what the model predicts after the nodes of trees.

        Args:
            before: ``(batch, ORDERS - 1)`` tokens before the roots.
            rank: ``(batch, nodes)`` of several nodes with the same entry, that of the largest rank
                is entered, and the last one of those alike; below 0, none.
        """
        parts = contexts_of(before, found), found.following, found.log_probs, rank
        contexts, following, log_probs, ranks = (one.flatten(0, 1) for one in parts)
        keys, places = (one.T for one in self.places(contexts))  # (ORDERS, n)
        same = places[:, :, None] == places[:, None, :]
        order = torch.arange(len(ranks), device=ranks.device)
        ahead = (ranks > ranks[:, None]) | (ranks == ranks[:, None]) & (order > order[:, None])
        beaten = (same & ahead).any(-1) | (ranks < 0)
        places = places.masked_fill(beaten, len(self.keys) - 1)
        self.keys[places] = keys
        self.successors[places] = following.to(self.successors.dtype).expand(ORDERS, -1, -1)
        self.log_probs[places] = log_probs.to(self.log_probs.dtype).expand(ORDERS, -1, -1)


def contexts_of(before: Tensor, found: Predicted) -> Tensor:
    """The last tokens at the nodes of trees, themselves included: ``(batch, nodes, ORDERS)``;
    ``before``: ``(batch, ORDERS - 1)`` tokens before the roots."""
    tokens, first = torch.cat([before, found.tokens], 1), before.shape[1]
    order = torch.arange(first, device=tokens.device).expand(len(tokens), -1)
    above = torch.where(found.parents < 0, first - 1, found.parents + first)
    above = torch.cat([(order - 1).clamp(min=0), above], 1)
    columns, node = [tokens], above
    for _ in range(ORDERS - 1):
        columns.append(tokens.gather(1, node))
        node = above.gather(1, node)
    return torch.stack(columns[::-1], -1)[:, first:]


class RecyclingPredictor(Predictor):
    """Predicts from a :class:`SuccessorTable`, which it fills as the model verifies drafts."""

    reads = Reads("nodes")
    trees = {CHAIN: chain_tree}
    runs = ""
    held = ("table",)
    per_row = ("_before",)

    def __init__(self, model: Any, options: Any):
        super().__init__(model, options)
        self.depth = options.max_depth
        if options.tree != ADAPTIVE:
            tree = static_tree(options, self.trees, self.depth)
            self.static = TreeStates.uniform(tree, self.depth, False)
            self.weighs = self.policy_chooses = False
        self.table: SuccessorTable | None = None
        #: ``(batch, ORDERS - 1)`` the tokens before each row's last one.
        self._before: Tensor | None = None

    def start(self, state: DecodeState) -> None:
        super().start(state)
        size, device, vocab = self.options.table_size, state.root.device, vocabulary(self.model)

        def make() -> SuccessorTable:
            return SuccessorTable(vocab, size, device)

        key = type(self), size, str(device), vocab
        # Where the output depends on drafts, these must not depend on earlier calls.
        keeps = self.options.keep_table and self.options.acceptance != "typical"
        self.table = recall(self.model, key, make) if keeps else make()
        none = [vocab] * (ORDERS - 1)
        before = [[*none, *row][1 - ORDERS :] for row in state.tokens]
        self._before = to_device(before, device)
        self.num_predicted = [self.depth] * state.batch_size

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        if hidden is None:  # after the prompt
            return
        assert self.table is not None and self._before is not None
        before, found = self._before, Predicted.unpacked(hidden.to(self._before.device))
        order = torch.arange(found.tokens.shape[1], device=before.device)
        depth = torch.arange(result.path.shape[1], device=before.device)
        accepted = depth < result.counts[:, None]
        # What was accepted is entered last, the latest at the end; of the rest the likeliest.
        rank = torch.where(found.valid, len(order) - order, -1)
        ahead = torch.where(accepted, MAX_NODES + result.path, 0)
        rank = rank.scatter_add(1, torch.where(accepted, result.path, 0), ahead)
        self.table.learn(before, found, rank)
        text = torch.cat([before, found.tokens[:, :1], result.tokens], 1)
        last = result.counts[:, None] + torch.arange(ORDERS - 1, device=text.device)
        self._before = text.gather(1, last)

    def limits(self, state: DecodeState, depth: int) -> tuple[int, GoesOn | None]:
        return depth, None if is_async(state.root.device) else _goes_on

    def ready(self, tree: Tree, grows: bool) -> bool:
        return True

    def num_levels(self, state: DecodeState, grows: bool) -> int:
        return self.depth if grows else 0

    def levels(self, root: Tensor, depth: int, width: int, noise: Tensor | None) -> Successors:
        assert self.table is not None and self._before is not None
        return Successors(self.table, self._before, noise)

    def chain(self, input_ids: Tensor) -> list[int]:
        model, device, none = self.model, input_ids.device, vocabulary(self.model)
        table = SuccessorTable(none, self.options.table_size, device)
        before = input_ids.new_full((1, ORDERS - 1), none)
        found = Predicted.of(Tree.chain(input_ids), model(input_ids).logits.to(device))
        for rows in found.parts(AT_ONCE):
            table.learn(before, rows, torch.arange(rows.tokens.shape[1], device=device)[None])
            before = torch.cat([before, rows.tokens], 1)[:, 1 - ORDERS :]
        tokens = [int(found.following[0, -1, 0])]
        while len(tokens) <= self.depth:
            text = torch.cat([before, input_ids.new_tensor([tokens])], 1)
            following, log_probs = table.find(text[:, -ORDERS:])
            if log_probs[0, 0] == -torch.inf:
                break
            tokens.append(int(following[0, 0]))
        return tokens


class Successors:
    """See :class:`hf_spec.draft.grow.Expands`.

    Args:
        before: ``(batch, ORDERS - 1)`` tokens before each root.
        noise: see :meth:`Predictor.levels`.
    """

    def __init__(self, table: SuccessorTable, before: Tensor, noise: Tensor | None):
        self._table, self._before, self._noise = table, before, noise
        self._contexts: Tensor  # (batch, nodes, ORDERS) of the frontier before

    def expand(self, frontier: Frontier) -> Children:
        """The successors of the frontier's nodes."""
        tokens = frontier.tokens
        if frontier.depth:
            above = gather_hidden(self._contexts, frontier.parents)[..., 1:]
        else:
            above = self._before[:, None].expand(-1, tokens.shape[1], -1)
        self._contexts = torch.cat([above, tokens[..., None]], -1)
        found, log_probs = self._table.find(self._contexts)
        if self._noise is not None:
            here = self._noise[:, frontier.depth].to(log_probs)
            drawn = here.gather(1, found.flatten(1)).view_as(log_probs)
            rest = torch.log1p(-log_probs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-3))
            scores = TRUST * torch.cat([log_probs + drawn, rest + MEAN_NOISE], -1)
            log_probs, order = scores.log_softmax(-1)[..., :-1].sort(descending=True, dim=-1)
            found = found.gather(-1, order)
            log_probs = log_probs.masked_fill(log_probs.isnan(), -torch.inf)
        return Children(found, log_probs)


def _goes_on(frontier: Frontier) -> bool:
    """Whether a path down to this level is likely enough to be drafted further."""
    return bool(frontier.log_probs.max() > UNLIKELY)


def largest_prime(most: int) -> int:
    """The largest prime number that is no larger."""
    while any(most % factor == 0 for factor in range(2, int(most**0.5) + 1)):
        most -= 1
    return most
