"""A table of what the model itself has predicted after its last tokens, which drafts are made of.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
Recycling" (ACL 2025), section 3: an adjacency matrix from a token to its latest likely successors,
entered at every verified node, rejected ones included. Longer contexts, with probabilities, are
those of Song et al., "Accelerated Test-Time Scaling with Model-Free Speculative Sampling" (2025),
section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hf_spec.adapters.layer import Adapter
from hf_spec.adapters.loading import find_active
from hf_spec.core.device import Holds, is_async, to_device
from hf_spec.core.shapes import Row, TreeStates
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult
from hf_spec.draft.grow import Children, Expands, Frontier, grow
from hf_spec.draft.options import ADAPTIVE, CHAIN
from hf_spec.draft.policy import LevelCost, amount
from hf_spec.draft.predictor import DecodeState, Predictor
from hf_spec.modeling_patches.weights import made_anew, vocabulary
from hf_spec.predict.table import chain_tree, static_tree
from hf_spec.target.hidden_states import NUM_READ, Predicted, Reads, gather_hidden
from hf_spec.target.noise import TRUST
from hf_spec.threads import locked, recall

#: Most tokens of a context.
ORDERS = 3
#: Entries of contexts of each length above one, if neither options nor an adapter say how many.
TABLE_SIZE = 1 << 17
#: How far the probabilities of an entry are trusted, by the length of its context, and the weight
#: that it has beside those of other lengths (docs/inside/appendix_choices.md).
TRUSTED, WEIGHTS = (0.55, 0.7, 0.95), (1.0, 2.0, 5.0)
#: The weight that another source of predictions has beside them.
SOURCE = 5.0
#: The weight of a new prediction in a finished text beside what is known of its context already.
LATEST = 0.5
#: Likeliest successors of a context that are looked at.
WIDTH = 12
#: Ranks of accepted nodes are larger than those of all others.
MAX_NODES = 1 << 20
#: Log-probability of what is never predicted.
LEAST = torch.finfo(torch.float16).min
#: Tokens of a text that are entered at once, and nodes of a batch.
AT_ONCE = PAIRED = 256
#: Draft tokens behind what is known to follow a sequence.
CONTINUED = 15
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
        self.vocab, self.wanted, self.size = vocab, size, largest_prime(size)
        entries, width = vocab + (ORDERS - 1) * self.size, min(NUM_READ, vocab)
        with torch.inference_mode(False):  # written to in both modes
            self.keys = torch.empty(entries + 1, dtype=torch.int64, device=device)
            self.successors = torch.zeros(entries + 1, width, dtype=torch.int32, device=device)
            self.log_probs = torch.zeros(entries + 1, width, dtype=torch.float16, device=device)
            known = to_device([TRUSTED, WEIGHTS], device, torch.float32)
            self.trusted, self.weights = known.unbind()
        self.clear()

    def clear(self) -> None:
        """Forget all contexts."""
        self.keys.fill_(-1)

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

    def find(self, contexts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What has followed contexts ``(..., ORDERS)``.

        The entries of all lengths are averaged, longer ones with more weight.

        Returns:
            Tokens ``(..., WIDTH)`` int64, likeliest first; their log-probabilities, float32, -inf
            where nothing is known; and the weight of the entries, ``(..., 1)`` float32.
        """
        keys, places = self.places(contexts)
        known = torch.where(self.keys[places] == keys, self.weights, 0.0)
        weight = known.sum(-1, keepdim=True)
        share = known / weight.clamp(min=1e-9) * self.trusted
        chances = self.log_probs[places].float().exp() * share[..., None]
        tokens = self.successors[places].flatten(-2)
        tokens, chances = likeliest_of(tokens, chances.flatten(-2), WIDTH)
        return tokens.long(), chances.log(), weight

    def learn(self, before: Tensor, found: Predicted, rank: Tensor) -> None:
        """Enter what the model predicts after the nodes of trees.

        Args:
            before: ``(batch, ORDERS - 1)`` tokens before the roots.
            rank: ``(batch, nodes)`` of several nodes with the same entry, that of the largest rank
                is entered, and the last one of those alike; below 0, none. Beyond `PAIRED` nodes
                later ones of the batch come last.
        """
        parts = contexts_of(before, found), found.following, found.log_probs, rank
        # Of large batches in parts, as all pairs are compared; the last part is the latest.
        split = (one.flatten(0, 1).split(PAIRED) for one in parts)
        for contexts, following, log_probs, ranks in zip(*split):
            self._learn(contexts, following, log_probs, ranks)

    def _learn(
        self, contexts: Tensor, following: Tensor, log_probs: Tensor, ranks: Tensor
    ) -> None:  # fmt: skip
        keys, places = (one.T for one in self.places(contexts))  # (ORDERS, n)
        same = places[:, :, None] == places[:, None, :]
        order = torch.arange(len(ranks), device=ranks.device)
        ahead = (ranks > ranks[:, None]) | (ranks == ranks[:, None]) & (order > order[:, None])
        beaten = (same & ahead).any(-1) | (ranks < 0)
        places = places.masked_fill(beaten, len(self.keys) - 1)
        self.keys[places] = keys
        self.successors[places] = following.to(self.successors.dtype).expand(ORDERS, -1, -1)
        self.log_probs[places] = log_probs.to(self.log_probs.dtype).expand(ORDERS, -1, -1)

    def learn_text(self, before: Tensor, found: Predicted) -> None:
        """Enter what the model predicts after the nodes of chains, one after the other, averaged
        with what is known of their contexts (see :data:`LATEST`); ``before``: see :meth:`learn`.
        The host reads how often entries recur."""
        for part in found.parts(AT_ONCE):
            contexts = contexts_of(before, part)
            for row in zip(contexts, part.following, part.log_probs):
                self._average(*row)
            before = torch.cat([before, part.tokens], 1)[:, 1 - ORDERS :]

    def _average(self, contexts: Tensor, following: Tensor, log_probs: Tensor) -> None:
        keys, places = (one.T for one in self.places(contexts))  # (ORDERS, n)
        order = torch.arange(len(contexts), device=places.device)
        same = places[:, :, None] == places[:, None, :]
        turn = (same & (order < order[:, None])).sum(-1)  # each entry once in a turn
        following, chances = following.to(self.successors.dtype), log_probs.exp()
        for now in range(int(turn.max()) + 1):
            length, node = (turn == now).nonzero().unbind(-1)
            key, place = keys[length, node], places[length, node]
            before = torch.where(self.keys[place] == key, 1 - LATEST, 0.0)[:, None]
            known = self.log_probs[place].float().exp() * before
            tokens = torch.cat([following[node], self.successors[place]], -1)
            both = torch.cat([chances[node] * (1 - before), known], -1)
            tokens, both = likeliest_of(tokens, both, following.shape[-1])
            self.keys[place], self.successors[place] = key, tokens
            self.log_probs[place] = both.log().clamp(min=LEAST).to(self.log_probs.dtype)

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """What it knows, but for contexts that reach before a text.

        Returns:
            The contexts ``(n, ORDERS)`` int32, latest token last, with -1 in front of shorter ones;
            successors and log-probabilities ``(n, NUM_READ)``.
        """
        place = (self.keys[:-1] >= 0).nonzero()[:, 0]
        length = 1 + (1 + (place - self.vocab).div(self.size, rounding_mode="floor")).clamp(min=0)
        keys, columns = self.keys[place], []
        for back in range(ORDERS):
            columns.append((keys % (self.vocab + 1)).masked_fill(length <= back, -1))
            keys = keys // (self.vocab + 1)
        contexts = torch.stack(columns[::-1], -1)
        inside = (contexts < self.vocab).all(-1)
        place = place[inside]
        log_probs = self.log_probs[place].clamp(min=LEAST)  # finite, as files must be
        return contexts[inside].int(), self.successors[place], log_probs

    def enter(self, contexts: Tensor, successors: Tensor, log_probs: Tensor) -> None:
        """Enter what :meth:`entries` gives of a table, which may be of another size; of several
        contexts with the same entry here, the last one. What no table of this vocabulary can hold
        is left out."""
        contexts, length = contexts.long(), (contexts >= 0).sum(-1)
        fits = (contexts < self.vocab).all(-1) & (contexts[:, -1] >= 0)
        fits &= ((successors >= 0) & (successors < self.vocab)).all(-1)
        keys, places = (
            one.gather(-1, (length - 1).clamp(min=0)[:, None])[:, 0]
            for one in self.places(contexts)
        )
        left_out = len(self.keys) - 1
        places = places.masked_fill(~fits, left_out)
        order = torch.arange(len(places), device=places.device)
        last = torch.full_like(self.keys, -1).scatter_reduce(0, places, order, "amax")
        # Of several with one entry a GPU would write any.
        places = places.masked_fill(last[places] != order, left_out)
        width = min(self.successors.shape[1], successors.shape[1])
        self.keys[places] = keys
        self.log_probs[places] = LEAST  # where it has more successors
        self.successors[places, :width] = successors[:, :width]
        self.log_probs[places, :width] = log_probs[:, :width].to(self.log_probs.dtype)


def likeliest_of(tokens: Tensor, chances: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The likeliest of tokens ``(..., n)``, at most so many, and their probabilities, which are
    summed where a token recurs."""
    same = tokens[..., :, None] == tokens[..., None, :]
    order = torch.arange(tokens.shape[-1], device=tokens.device)
    again = (same & (order < order[:, None])).any(-1)
    total = (same * chances[..., None, :]).sum(-1).masked_fill(again, 0.0)
    best = total.topk(min(width, total.shape[-1]), dim=-1)
    return tokens.gather(-1, best.indices), best.values


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
    """Predicts from a :class:`SuccessorTable`, which it fills as the model verifies drafts. The
    table of an active adapter is where it starts, on a copy."""

    reads = Reads(predicted=True)
    unused = ("recycle",)
    trees = {CHAIN: chain_tree}
    runs = ""
    level_cost = LevelCost.LOOKUP
    held = (*Predictor.held, "table")
    per_row = ("_before",)

    def __init__(self, model: Any, options: Any):
        super().__init__(model, options)
        self.adapter = find_active(model, "TOKEN_RECYCLING", options.adapter)
        self.depth = options.max_depth
        if options.tree != ADAPTIVE:
            tree = static_tree(options, self.trees, self.depth)
            self.static = TreeStates.uniform(tree, self.depth, False)
            if self.static.max_rank >= WIDTH:
                raise ValueError(
                    f"tree has a draft token of rank {self.static.max_rank}: ranks count from 0, "
                    f"and {WIDTH} successors are looked at. Give another tree."
                )
            self.weighs = self.policy_chooses = False
        self.table: SuccessorTable | None = None
        #: Tables of calls that are over; None where the table is kept.
        self._spare: list[SuccessorTable] | None = None
        #: ``(batch, ORDERS - 1)`` the tokens before each row's last one.
        self._before: Tensor | None = None

    def start(self, state: DecodeState) -> None:
        super().start(state)
        device, vocab = state.root.device, vocabulary(self.model)
        self.table = self._table(vocab, device)
        none = [vocab] * (ORDERS - 1)
        before = [[*none, *row][1 - ORDERS :] for row in state.tokens]
        self._before = to_device(before, device)
        self.num_predicted = [self.depth] * state.batch_size

    @property
    def table_size(self) -> int:
        """As the option says, or as large as the adapter's was."""
        made_with = TABLE_SIZE if self.adapter is None else self.adapter.config.table_size
        return int(self.options.table_size or made_with)

    def _begun(self, table: SuccessorTable) -> SuccessorTable:
        """An empty table, or one with the adapter's entries."""
        if self.adapter is not None:
            device, tensors = table.keys.device, self.adapter.tensors()
            table.enter(**{name: one.to(device) for name, one in tensors.items()})
        return table

    def _table(self, vocab: int, device: torch.device) -> SuccessorTable:
        """The table that calls share, or one of this call."""
        adapter, key = self.adapter, (type(self), self.table_size, str(device), vocab)

        def make() -> SuccessorTable:
            return self._begun(SuccessorTable(vocab, self.table_size, device))

        # Where the output depends on drafts, these must not depend on earlier calls.
        if not self.options.keep_table or self.options.acceptance == "typical":
            self._spare = recall(self.model, (*key, "spare"), list)
            try:
                table: SuccessorTable = self._spare.pop()  # recorded code is for places in memory
            except IndexError:
                return make()
            table.clear()
            return self._begun(table)
        if adapter is None:
            table = recall(self.model, key, make)
        else:
            table = _of_adapter(self.model, (*key, Adapter), adapter, make)
        _last(self.model)[LAST] = table
        return table

    def learn(self, result: StepResult, predicted: Predicted) -> None:
        assert self.table is not None and self._before is not None
        before, found = self._before, predicted
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

    def release(self) -> list[Tensor]:
        if self._spare is not None and self.table is not None:
            self._spare.append(self.table)
        return super().release()

    def ready(self, tree: Tree, grows: bool) -> bool:
        return True

    def levels(self, root: Tensor, depth: int, width: int, noise: Tensor | None) -> Successors:
        assert self.table is not None and self._before is not None
        return Successors(self.table, self._before, noise)

    def joined(self, source: Expands, noise: Tensor | None) -> Joined:
        assert self.table is not None and self._before is not None
        return Joined(source, Successors(self.table, self._before, noise))

    def continued(self, state: DecodeState, known: Sequence[Row]) -> Sequence[Row]:
        """By the tokens at the end of each likeliest path."""
        assert self.table is not None
        ends = [row.end for row in known]
        paths = [row.path(end) for row, end in zip(known, ends)]
        depth = min(self.depth, state.max_depth - min(map(len, paths), default=0))
        if depth < 1 or not any(paths):
            return known
        none = [self.table.vocab] * (ORDERS - 1)
        texts = [[*none, *row, *path][-ORDERS:] for row, path in zip(state.tokens, paths)]
        context = to_device(texts, self.table.keys.device)
        source = Successors(self.table, context[:, :-1], None)
        reads = not is_async(context.device)
        _, depth, goes_on = amount(self, 0, depth, state.active, None, reads)
        packed = grow(source, context[:, -1], CONTINUED, depth, self.trust, goes_on=goes_on)
        tree = Tree.unpacked(packed)  # a transfer, of steps with forced tokens alone
        assert tree.host is not None
        more = tree.host.rows(tree.row_sizes)
        return [
            row.merge(one, end).likeliest_first() if end else row
            for row, one, end in zip(known, more, ends)
        ]

    def chain(self, input_ids: Tensor) -> list[int]:
        model, device, none = self.model, input_ids.device, vocabulary(self.model)
        table = self._begun(SuccessorTable(none, self.table_size, device))
        before = input_ids.new_full((1, ORDERS - 1), none)
        found = Predicted.of(Tree.chain(input_ids), model(input_ids).logits.to(device))
        table.learn_text(before, found)
        before = torch.cat([before, input_ids], 1)[:, 1 - ORDERS :]
        tokens = [int(found.following[0, -1, 0])]
        while len(tokens) <= self.depth:
            text = torch.cat([before, input_ids.new_tensor([tokens])], 1)
            following, log_probs, _ = table.find(text[:, -ORDERS:])
            if log_probs[0, 0] == -torch.inf:
                break
            tokens.append(int(following[0, 0]))
        return tokens


#: Key of the table that the last call has filled, if it is kept.
LAST = "last_table"


def _last(model: Any) -> dict[str, SuccessorTable]:
    return recall(model, LAST, dict)


@locked
def _of_adapter(
    model: Any, key: Hashable, adapter: Adapter, make: Callable[[], SuccessorTable]
) -> SuccessorTable:
    """The table that began as an adapter's, unless other tensors have been loaded into that."""
    tables: WeakKeyDictionary[Adapter, Any] = recall(model, key, WeakKeyDictionary)
    tensors = adapter.tensors().values()
    version = [(one.data_ptr(), None if one.is_inference() else one._version) for one in tensors]
    return made_anew(tables, adapter, (), make, version)


def learned_table(model: Any) -> SuccessorTable | None:
    """The table that the last call with a model has filled; None if there is none, or it was not
    kept."""
    return _last(model).get(LAST)


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
        return self.weighed(frontier)[0]

    def weighed(self, frontier: Frontier) -> tuple[Children, Tensor]:
        """The same, and the weight of what is known of each node, see
        :meth:`SuccessorTable.find`."""
        tokens = frontier.tokens
        if frontier.depth:
            above = gather_hidden(self._contexts, frontier.parents)[..., 1:]
        else:
            above = self._before[:, None].expand(-1, tokens.shape[1], -1)
        self._contexts = torch.cat([above, tokens[..., None]], -1)
        found, log_probs, weight = self._table.find(self._contexts)
        if self._noise is not None:
            here = self._noise[:, frontier.depth].to(log_probs)
            drawn = here.gather(1, found.flatten(1)).view_as(log_probs)
            rest = torch.log1p(-log_probs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-3))
            scores = TRUST * torch.cat([log_probs + drawn, rest + MEAN_NOISE], -1)
            log_probs, order = scores.log_softmax(-1)[..., :-1].sort(descending=True, dim=-1)
            found = found.gather(-1, order)
            log_probs = log_probs.masked_fill(log_probs.isnan(), -torch.inf)
        return Children(found, log_probs), weight


class Joined:
    """A source and a table together; see :class:`hf_spec.draft.grow.Expands`."""

    def __init__(self, source: Expands, table: Successors):
        self._source, self._table = source, table

    def expand(self, frontier: Frontier) -> Children | None:
        """The children by both, whose probabilities are averaged where the table knows any."""
        found = self._source.expand(frontier)
        if found is None:
            return None
        (more, likely), weight = self._table.weighed(frontier)
        shape = *more.shape[:2], -1
        tokens = found.tokens.to(more.device).expand(shape)
        own = found.log_probs.to(likely).expand(shape).exp()
        share = SOURCE / (SOURCE + weight)
        same, chances = tokens[..., None] == more[..., None, :], likely.exp()
        both = own * share + (same * chances[..., None, :]).sum(-1) * (1 - share)
        alone = chances.masked_fill(same.any(-2), 0.0) * (1 - share)
        return Children(torch.cat([tokens, more], -1), torch.cat([both, alone], -1).log())


def largest_prime(most: int) -> int:
    """The largest prime number that is no larger."""
    while any(most % factor == 0 for factor in range(2, int(most**0.5) + 1)):
        most -= 1
    return most
