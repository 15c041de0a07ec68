"""What heads and probes predict, the likeliest tokens at each distance and their probabilities; and
the heads that methods share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad

from hf_spec.adapters.config import VOCABULARY, ObjectiveConfig, PredictingConfig, of_tokens
from hf_spec.adapters.layer import Adapter
from hf_spec.core.checks import MAX_BLOCKS, MAX_FUTURE, check_count, choice, count, setting
from hf_spec.core.device import to_device
from hf_spec.core.shapes import ProbeGroup, TokenTree, TreeStates
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult
from hf_spec.draft.grow import Children, Frontier, levels_of, ranked
from hf_spec.draft.options import ADAPTIVE, CHAIN, DraftOptions
from hf_spec.draft.predictor import DecodeState, MakeTree, Predictor
from hf_spec.modeling_patches.weights import (
    output_bias,
    output_dtype,
    output_features,
    output_weight,
    placement,
)
from hf_spec.predict.markov import ConditionalHead, DraftVocabulary, MarkovHead
from hf_spec.target.hidden_states import Reads, model_logits, output_logits, shapes_logits
from hf_spec.target.noise import TRUST, as_sampled
from hf_spec.target.sequences import probe_sequences, token_hidden
from hf_spec.target.target import ProbeInputs

#: Tokens per distance that a Markov head rescores.
SHORTLIST = 32


class Predictions:
    """The likeliest tokens at each distance after the root.

    A Markov head rescores this shortlist given the previous token; all other tokens together keep
    their probability without it.

    Args:
        logits: ``(batch, distances, vocab)``; distance 1 is that of the root's children.
        width: tokens to keep per distance, at least `SHORTLIST` with a Markov head; all tokens of a
            smaller vocabulary.
        known: distances that each row has predictions for; others are arbitrary. A tensor
            ``(batch,)`` if the host does not know them yet.
        markov_head: how the previous token changes the predictions.
        states: ``(batch, distances, hidden)`` that give the logits; for the Markov head.
        ids: ``(vocab,)`` token ids of the logits; None if these are the indices.
        noise: ``(batch, distances, vocab)`` that the tokens will be sampled with, see
            :func:`as_sampled`; None if they are not sampled.

    Attributes:
        tokens: ``(batch, distances, width)`` ids, likeliest first.
        log_probs: ``(batch, distances, width)`` float32, independent of the previous token.
        states: the argument.
    """

    def __init__(
        self, logits: Tensor, width: int, known: Sequence[int] | Tensor,
        markov_head: MarkovHead | None = None, states: Tensor | None = None,
        ids: Tensor | None = None, noise: Tensor | None = None,
    ):  # fmt: skip
        self.distances, self.device = logits.shape[1], logits.device
        self.known: Any = known if isinstance(known, Tensor) else tuple(known)
        self._head: Any = markov_head
        self.states, self._ids = states, ids
        self._noise = None if noise is None else noise.to(logits.device)
        scores = logits if self._noise is None else as_sampled(logits, self._noise)
        self._choose(logits, scores, width)

    def _choose(self, logits: Tensor, scores: Tensor, width: int) -> None:
        """Choose tokens; ``scores`` are the logits, or what sampling makes of them."""
        width = width if self._head is None else max(width, SHORTLIST)
        chosen, self.log_probs = top_log_probs(scores, width)
        self.tokens = self._named(chosen)
        #: :meth:`given` each possible previous token: a tree's root at distance 1,
        #: and :attr:`tokens` of the previous distance, in order, at the others.
        self._table: Tensor | None = None

    def _named(self, tokens: Tensor) -> Tensor:
        """The ids of tokens given as indices of logits."""
        return tokens if self._ids is None else self._ids[tokens]

    def expand(self, frontier: Frontier) -> Children | None:
        """See :class:`hf_spec.draft.grow.Expands`. In rows without predictions of that distance,
        no token has a probability."""
        place, device = frontier.depth, self.tokens.device
        if place >= self.distances:
            return None
        given = self.log_probs[:, place, None]
        if self._head is not None:
            if self._table is None:  # all distances at once: one product instead of many
                root = frontier.tokens[:, :1, None].to(device).expand(-1, 1, given.shape[-1])
                self._table = self.given(torch.cat([root, self.tokens[:, :-1]], dim=1))
            chosen = frontier.choices.to(device)[:, :, None].expand(-1, -1, given.shape[-1])
            last = self._table.shape[2] - 1
            after = self._table[:, place].gather(1, chosen.clamp(max=last))
            given = torch.where(chosen > last, given, after)  # tokens that others have named
        return Children(self.tokens[:, place, None], self.where_known(given, place))

    def where_known(self, log_probs: Tensor, place: int) -> Tensor:
        """Log-probabilities ``(batch, nodes, width)`` of a distance, counted from 0; -inf in rows
        without predictions of it."""
        if isinstance(self.known, Tensor) or min(self.known) <= place:
            known = to_device(self.known, log_probs.device)[:, None, None]
            log_probs = log_probs.masked_fill(known <= place, -torch.inf)
        return log_probs

    def given(self, previous: Tensor) -> Tensor:
        """Log-probabilities ``(batch, distances, n, width)`` of :attr:`tokens` by the Markov head.

        Args:
            previous: ``(batch, distances, n)`` tokens before each distance.
        """
        assert self.states is not None
        trust = 1.0 if self._noise is None else TRUST
        return reweighed(self._head, previous, self.tokens, self.log_probs, self.states, trust)


def reweighed(
    head: Any, previous: Tensor, tokens: Tensor, log_probs: Tensor, states: Tensor,
    trust: float = 1.0,
) -> Tensor:  # fmt: skip
    """:meth:`Predictions.given`, whose attributes the other arguments are; ``trust``: weight of
    what the Markov head says."""
    plain = log_probs[:, :, None]
    bias = head.bias(previous.to(tokens.device), states, tokens)
    weighed = plain + (bias if trust == 1 else trust * bias)
    # Probability of all other tokens, independent of the previous one.
    rest = torch.log1p(-plain.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    found = weighed - torch.logaddexp(weighed.logsumexp(-1, keepdim=True), rest)
    return torch.where(found.isnan(), plain, found)


def distribution(scores: Tensor) -> Tensor:
    """Softmax of a draft's scores ``(..., vocab)``, to sample draft tokens from.

    Uniform where values have overflowed: any draft distribution is valid.
    """
    return scores.softmax(-1).nan_to_num(1 / scores.shape[-1])


def top_log_probs(
    logits: Tensor, width: int, others: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Indices of the ``width`` largest of logits ``(..., vocab)``, or all, largest first, and their
    log-probabilities, in float32 at least. ``others``, ``(..., 1)``, is the logarithm of the sum of
    the exponentials of further logits.

    Uniform where values have overflowed: any draft distribution is valid.
    """
    best = logits.topk(min(width, logits.shape[-1]), dim=-1)
    precise = torch.promote_types(logits.dtype, torch.float32)
    total = logits.to(precise).logsumexp(-1, keepdim=True)
    log_probs = best.values - (total if others is None else torch.logaddexp(total, others))
    alike = -math.log(logits.shape[-1])
    return best.indices, log_probs.masked_fill(log_probs.isnan(), alike)


# -- Static trees: those that the option ``tree`` names, and whether they fit an adapter -----------


def drafted_depth(options: DraftOptions, distances: int) -> int:
    """Number of distances that are drafted, of those that the adapter predicts; a ValueError if
    ``max_depth`` is larger."""
    if options.max_depth is not None:
        why = "The adapter predicts no more tokens."
        check_count("max_depth", options.max_depth, 1, distances, why)
    return options.max_depth or distances


def static_tree(
    options: DraftOptions, trees: Mapping[str, MakeTree | None], depth: int
) -> TokenTree:
    """The static tree of the options, over predictions of ``depth`` future tokens; a ValueError if
    the given paths are deeper."""
    if isinstance(options.tree, str):
        make = trees[options.tree]
        assert make is not None
        return make(options, depth)
    tree = TokenTree.from_paths(options.tree)
    if tree.max_depth > depth:
        raise ValueError(
            f"tree has paths of {tree.max_depth} ranks, {depth} future tokens are drafted: give "
            "shorter paths."
        )
    return tree


def check_states(
    states: TreeStates, where: str, model: Any, adapter: Adapter, distances: int
) -> None:
    """Raise a ValueError if trees are too deep for the adapter or their ranks too large.

    Args:
        where: what names the trees, for the message.
        distances: number of future tokens that the adapter predicts.
    """
    if states.max_probes > distances:
        raise ValueError(
            f"{where} has states up to {states.max_probes} predicted tokens, the adapter drafts "
            f"{distances} tokens. Give another tree."
        )
    drafted = adapter.tensors().get(VOCABULARY)
    whose, tokens = "adapter predicts", 0 if drafted is None else len(drafted)
    if drafted is None:
        whose, tokens = "model has", model.config.get_text_config(decoder=True).vocab_size
    if states.max_rank >= tokens:
        raise ValueError(
            f"{where} has a draft token of rank {states.max_rank}: ranks count from 0, and the "
            f"{whose} {tokens} tokens. Give another tree."
        )


# -- Predictors of a table: the tokens at all distances at once ------------------------------------

#: Predictions of finished sequences that are computed at once; each is a full vocabulary long.
AT_ONCE = 384


def chain_tree(_: Any, depth: int) -> TokenTree:
    """The likeliest token of each distance."""
    return TokenTree.chain(depth)


class TablePredictor(Predictor):
    """Predicts the tokens at all distances at once, from states that a method has for each.

    Args:
        adapter: the adapter that drafts; it may have a Markov head and a vocabulary.
        depth: number of future tokens that it predicts.

    Attributes:
        vocabulary: the tokens that are predicted; None for all.
        make_predictions: class of its predictions, with the arguments of :class:`Predictions`.
        hidden: what :attr:`reads` asks for; None while it is unknown.
    """

    trees = {CHAIN: chain_tree}
    held = (*Predictor.held, "markov_head", "vocabulary")
    of_rows = (*Predictor.of_rows, "hidden")
    make_predictions: Callable[..., Predictions] = Predictions

    def __init__(self, model: Any, options: Any, adapter: Adapter, depth: int):
        super().__init__(model, options)
        self.depth, weights = drafted_depth(options, depth), adapter.tensors()
        self.static = self.static_states(adapter)
        if self.static is not None:
            self.depth = self.static.max_probes
            self.weighs = self.policy_chooses = False
        self.key = adapter.config.type_name, adapter.name
        self.markov_head: ConditionalHead | None = MarkovHead.of(weights, model)
        self.vocabulary = DraftVocabulary.of(weights, model)
        self.hidden: Tensor | None = None

    @property
    def token_ids(self) -> Tensor | None:  # type: ignore[override]
        """``(tokens,)`` int64 ids that it predicts, ascending; None for all."""
        return None if self.vocabulary is None else self.vocabulary.tokens

    def static_states(self, adapter: Adapter) -> TreeStates | None:
        """:attr:`static`, of at most :attr:`depth`.

        Raises:
            ValueError: if trees are deeper than this, or have a rank beyond the vocabulary.
        """
        if self.options.tree == ADAPTIVE:
            return None
        tree = static_tree(self.options, self.trees, self.depth)
        states = TreeStates.uniform(tree, self.depth, bool(self.per_distance))
        check_states(states, "tree", self.model, adapter, self.depth)
        return states

    def start(self, state: DecodeState) -> None:
        super().start(state)
        _ = self.token_ids  # rows are made before they replace the output embeddings
        self.num_predicted = [self.depth] * state.batch_size

    @property
    def reach(self) -> int:
        return max(self.num_predicted)

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        self.hidden = hidden

    def received(self, found: Iterator[Tensor], result: StepResult) -> None:
        super().received(found, result)
        self.hidden = None  # that of the step is read

    def join(self, other: Self) -> None:
        if self.hidden is None or other.hidden is None:  # trees have grown of them
            self.hidden = other.hidden = None
        super().join(other)

    def levels(
        self, root: Tensor, depth: int, width: int, noise: Tensor | None = None
    ) -> Predictions:
        """Predictions from the hidden states of the previous step.

        Args:
            root: ``(batch,)`` tokens.
            depth: number of distances, at most those that are known.
            width: tokens to keep per distance.
            noise: see :class:`Predictions`, over :attr:`vocabulary`; for calls that sample.
        """
        states = self.states(self.hidden_after(root), depth)
        return self._predictions(states, root, self.num_predicted, width, noise)

    def hidden_after(self, root: Tensor) -> Tensor:
        """:attr:`hidden`, now that the root ``(batch,)`` is known."""
        assert self.hidden is not None
        return self.hidden

    def given_root(self, states: Tensor, root: Tensor) -> Tensor:
        """:meth:`states` given the root, where the adapter has a Markov head."""
        return states if self.markov_head is None else self.markov_head.given_root(states, root)

    def _predictions(
        self, states: Tensor, root: Tensor, known: Sequence[int] | Tensor, width: int,
        noise: Tensor | None = None,
    ) -> Predictions:  # fmt: skip
        states = self.given_root(states, root)
        made: Predictions = self.make_predictions(
            self.logits(states), width, known, self.markov_head, states, self.token_ids, noise
        )
        return made

    def given(self, states: Tensor, previous: Tensor) -> Tensor:
        """Logits ``(batch, depth, tokens)`` of all tokens of :attr:`vocabulary`, from
        :meth:`states`, if the token before each distance is known, ``(batch, depth)``; first the
        root."""
        states = self.given_root(states, previous[:, 0])
        logits = self.logits(states)
        if self.markov_head is None:
            return logits
        return self.markov_head.along(logits, previous, states)

    @abstractmethod
    def states(self, hidden: Tensor, depth: int) -> Tensor:
        """``(batch, depth, hidden)`` states that the distances are predicted from."""

    def logits(self, states: Tensor) -> Tensor:
        """Logits ``(batch, depth, tokens)`` of :meth:`states`, over :attr:`vocabulary` if it has
        one. The model's scaling and soft cap are applied only if :attr:`exact`."""
        if self.exact:
            return model_logits(self.model, states, head=self.vocabulary)
        return output_logits(self.model, states, self.vocabulary)

    @property
    def exact(self) -> bool:
        """Whether the magnitude of logits matters and the model scales or caps them."""
        return (self.weighs or self.markov_head is not None) and shapes_logits(self.model)

    @abstractmethod
    def future_states(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        """:meth:`states` at tokens of a finished sequence.

        Args:
            input_ids: ``(1, seq)``, without padding.
            places: ``(places,)`` columns of ``input_ids``.

        Yields:
            ``(some, distances, hidden)`` for consecutive parts of ``places``, in order.
        """

    def future_logits(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        """Predictions at tokens of a finished sequence, whose other tokens are the root and, with a
        Markov head, those before each distance.

        Args:
            input_ids, places: see :meth:`future_states`.

        Yields:
            ``(some, distances, vocab)``; distance d, from 1, predicts the token 1 + d columns
            after the place.
        """
        done, ids = 0, input_ids[0]
        for states in self.future_states(input_ids, places):
            some = places[done : done + len(states), None].to(ids.device)
            at = some + torch.arange(1, self.depth + 1, device=ids.device)
            before = ids[at.clamp(max=len(ids) - 1)].to(states.device)
            logits = self.given(states, before)
            done += len(states)
            yield logits if self.vocabulary is None else self.vocabulary.of_all(logits)

    def chain(self, input_ids: Tensor) -> list[int]:
        last = torch.tensor([input_ids.shape[1] - 1], device=input_ids.device)
        # The token before those that are predicted.
        own = self.model(input_ids).logits[:, -1:].argmax(-1).to(input_ids.device)
        (states,) = self.future_states(torch.cat([input_ids, own], dim=1), last)
        own = own[0].to(states.device)
        predictions = self._predictions(states, own, (self.depth,), 1)
        chain = levels_of((TokenTree.chain(self.depth),), str(own.device))
        return ranked(predictions, chain, self.depth, own)[0].tolist()


# -- Predictors with probes under the nodes of their trees ----------------------------------------


class ProbePredictor(TablePredictor):
    """Draft tokens are predicted by the probes under the last accepted node.

    A new one sets :attr:`probe_inputs`, with one embedding per probe of the group. Its probes are
    one per distance, each seeing those before it, unless it sets another :attr:`group`, of those
    of distance 1 first, :attr:`per_distance` for each.
    """

    reads = Reads("probes")
    per_distance = 1
    probe_inputs: ProbeInputs

    def __init__(self, model: Any, options: Any, adapter: Adapter, depth: int):
        super().__init__(model, options, adapter, depth)
        self.group = ProbeGroup.causal(self.depth)

    def start(self, state: DecodeState) -> None:
        super().start(state)
        self.num_predicted = [0] * state.batch_size

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        super().advance(result, hidden)
        if result.host is None:
            self.num_predicted = result.num_probes.div(self.per_distance, rounding_mode="floor")
        else:
            self.num_predicted = [n // self.per_distance for n in result.host.num_probes]

    def join(self, other: Self) -> None:
        known = [one.hidden for one in (self, other) if one.hidden is not None]
        width = max((hidden.shape[1] for hidden in known), default=0)
        for one in (self, other):  # those of a step without probes are arbitrary
            if one.hidden is None and known:
                one.hidden = known[0].new_zeros(len(one.num_predicted), *known[0].shape[1:])
            if one.hidden is not None:
                one.hidden = pad(one.hidden, (0, 0, 0, width - one.hidden.shape[1]))
        super().join(other)

    def ready(self, tree: Tree, grows: bool) -> bool:
        return grows and tree.num_probes > 0

    def received(self, found: Iterator[Tensor], result: StepResult) -> None:
        super().received(found, result)
        assert result.host is not None
        self.num_predicted = [n // self.per_distance for n in result.host.num_probes]

    def states(self, hidden: Tensor, depth: int) -> Tensor:
        return self.distance_states(hidden[:, : depth * self.per_distance])

    def distance_states(self, hidden: Tensor) -> Tensor:
        """Combine final hidden states of probes, ``(batch, probes, hidden)``, into one state per
        distance, ``(batch, distances, hidden)``."""
        return hidden

    def attach_probes(self, tree: Tree, ahead: Sequence[Sequence[int]]) -> Tree:
        if not any(map(any, ahead)):
            return tree
        counts = [[n * self.per_distance for n in row] for row in ahead]
        return tree.attach_probes(self.group, counts)

    def future_states(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        for some in places.split(max(AT_ONCE // len(self.group), 1)):
            probed = probe_sequences(
                self.model, input_ids, None, some[None], self.group, self.probe_inputs
            )
            yield self.distance_states(probed.probe_hidden[0])


# -- Heads on the final hidden state, one per future token -----------------------------------------
#
# Head k reads the hidden state that gives the model's next token, and predicts the token k places
# after that one (Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple
# Decoding Heads", 2024, section 2.1.1): residual blocks, x + SiLU(W x + b), then a projection to
# the vocabulary. Initially W = 0 and b = 0, so that every head starts as the LM head.


#: Names of the parameters: blocks' weights and biases, and the projections of heads with own ones.
WEIGHTS, BIASES, PROJECTION = HEAD_WEIGHTS = "weights", "biases", "projections"


@dataclass
class HeadsConfig(ObjectiveConfig, PredictingConfig):
    """Config of an adapter with heads.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    num_heads: int = setting(4, "Heads, each drafting one future token.", count(1, MAX_FUTURE))
    num_layers: int = setting(1, "Residual blocks of each head.", count(1, MAX_BLOCKS))
    projection: str = setting(
        "shared",
        "shared: heads use the model's output embeddings. own: each head trains a copy of them, "
        "num_heads * vocabulary * hidden parameters.",
        choice("shared", "own"),
    )
    loss: str = "hard"
    decay: float | None = 0.8

    @property
    def reads_head(self) -> bool:
        return self.projection == "shared"

    def check_base(self, model: nn.Module) -> None:
        """Raise ValueError if `model` has no output embeddings that the heads can start from."""
        super().check_base(model)
        output_features(model)
        quantized = output_dtype(model) is None
        if self.projection == "own" and not self.inference_mode and quantized:
            raise ValueError(
                "projection='own' starts from the output embeddings, which are quantized here: "
                "choose projection='shared', or load the model without quantization."
            )


class HeadsAdapter(Adapter):
    """``weights`` (heads, layers, hidden, hidden) and ``biases`` (heads, layers, hidden) of the
    blocks; with own projections ``projections`` (heads, vocab, hidden)."""

    def __init__(self, config: HeadsConfig, model: Any) -> None:
        super().__init__(config, model)
        hidden, _ = output_features(model)
        heads, layers = config.num_heads, config.num_layers
        tensors = {
            WEIGHTS: torch.zeros(heads, layers, hidden, hidden),
            BIASES: torch.zeros(heads, layers, hidden),
        }
        if config.projection == "own":
            if config.inference_mode:  # the weights are loaded later
                tensors[PROJECTION] = torch.zeros(heads, config.known_tokens(model), hidden)
            else:
                weight = output_weight(model)
                assert weight is not None
                rows = weight.detach()[: config.known_tokens(model)]
                tensors[PROJECTION] = rows.expand(heads, -1, -1)
        self.hold({**tensors, **config.fresh_shared(model, heads)})


def head_states(weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    """Apply the heads' blocks to final hidden states.

    Args:
        weights: the adapter's parameters; leave out heads by slicing them.
        hidden: ``(..., hidden)``.

    Returns:
        ``(..., heads, hidden)`` in the parameters' dtype, on their device.
    """
    blocks, biases = weights[WEIGHTS], weights[BIASES]
    states = hidden.to(blocks).reshape(-1, hidden.shape[-1]).expand(len(blocks), -1, -1)
    for layer in range(blocks.shape[1]):  # of all heads at once
        made = torch.baddbmm(biases[:, layer, None], states, blocks[:, layer].mT)
        states = states + functional.silu(made)
    return states.unflatten(1, hidden.shape[:-1]).movedim(0, -2)


def projected(model: Any, projections: Tensor, states: Tensor) -> Tensor:
    """Own projections of ``states`` (..., heads, hidden), with the model's bias if it has one.

    Tokens that the model has gained since get the lowest logits, and lost ones none.
    """
    # Some models' final states are in float32 (Falcon-Mamba).
    each = zip(states.to(projections).unbind(-2), projections)
    logits = torch.stack([functional.linear(x, weight, None) for x, weight in each], dim=-2)
    logits = of_tokens(model, logits, torch.finfo(logits.dtype).min)
    bias = output_bias(model)
    return logits if bias is None else logits + bias.to(logits)


#: ``tree="sparse"``: rank paths, the likeliest first. On held-out answers of a 22M model they are
#: worth 0.3 % less than the 15 best nodes there (docs/methods/medusa.md).
SPARSE: tuple[tuple[int, ...], ...] = (
    (0,), (0, 0), (1,), (0, 0, 0), (2,), (0, 1), (1, 0), (0, 0, 1), (0, 0, 0, 0), (3,), (0, 2),
    (2, 0), (1, 0, 0), (0, 1, 0), (4,),
)  # fmt: skip


def sparse_tree(_: Any, depth: int) -> TokenTree:
    """15 draft tokens, most of them under likely ones."""
    return TokenTree.from_paths(SPARSE).truncate(depth)


class HeadPredictor(TablePredictor):
    """Draft tokens are the heads' likeliest tokens; a step forwards only the tree.

    All heads predict in every step, so the tree is always that of the last state.

    Heads for distances that are not drafted are not used.

    Args:
        adapter: of a :class:`HeadsConfig`.
    """

    trees = {"sparse": sparse_tree, CHAIN: chain_tree}
    reads = Reads("last")
    held = (*TablePredictor.held, "weights")

    def __init__(self, model: Any, options: Any, adapter: Adapter):
        super().__init__(model, options, adapter, adapter.config.num_heads)
        dtype = placement(model).dtype  # of hidden states
        self.weights = {
            name: weight[: self.depth].detach().to(dtype)
            for name, weight in adapter.tensors().items()
            if name in HEAD_WEIGHTS
        }

    def states(self, hidden: Tensor, depth: int) -> Tensor:
        used = {name: tensor[:depth] for name, tensor in self.weights.items()}
        return head_states(used, hidden).to(hidden)

    def logits(self, states: Tensor) -> Tensor:
        if PROJECTION in self.weights:
            return projected(self.model, self.weights[PROJECTION], states)
        return super().logits(states)

    def future_states(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        hidden = token_hidden(self.model, input_ids)[0]
        for some in places.to(hidden.device).split(max(AT_ONCE // self.depth, 1)):
            yield self.states(hidden[some], self.depth)
