"""Drafts with the model itself, skipping layers; weights and cache are shared.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding" (2023), algorithms 3 and 4. The verifying forward overwrites the drafted tokens' cache
entries, so every layer ends up with the full model's states.

Each drafting forward adds several draft tokens if the policy chooses among them by probability:
drafting continues from the likeliest one, and the next likeliest ones become its siblings.
"""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import find_active
from hf_spec.adapters.module import Adapter
from hf_spec.core.host_tree import Row
from hf_spec.core.memory import recall
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.transfer import to_device
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, sample
from hf_spec.drafting.drafter import FORWARDS
from hf_spec.drafting.grow import Children, Frontier, grow
from hf_spec.drafting.growth import GrowingDrafter
from hf_spec.drafting.noise import as_sampled
from hf_spec.drafting.options import key_of, samples_drafts
from hf_spec.drafting.predictions import distribution
from hf_spec.drafting.state import DecodeState
from hf_spec.methods.layer_skip.options import POLICY, LayerSkipOptions, ThresholdExit
from hf_spec.modeling_patches.layer_skip import LayerSkipper
from hf_spec.modeling_patches.merged_copies import MergedCopies
from hf_spec.modeling_patches.per_call import Changes

#: Draft tokens per drafting forward; drafting continues from the first.
RANKS = 3


class LayerSkipDrafter(GrowingDrafter):
    """Drafts token by token with the chosen sublayers left out."""

    can_sample = True
    unused = ("tree", "max_depth")
    runs = FORWARDS
    outside = "what a drafting forward says decides whether there is another"
    options: LayerSkipOptions
    drafting: Changes

    def __init__(self, model: Any, options: LayerSkipOptions):
        super().__init__(model, options)
        attention, mlp, adapter = _choice(model, options)
        self.drafting = LayerSkipper(model, attention, mlp).changes
        update = None if adapter is None else adapter.update
        self.learned = None if update is None else MergedCopies(update, self.drafting)
        name = None if adapter is None else adapter.name
        self._key = "layer_skip", name, tuple(attention), tuple(mlp), key_of(options)
        self._left_out = tuple(attention), tuple(mlp), adapter is not None
        self.exit = recall(model, self._key, lambda: ThresholdExit(options))
        self._lengths: list[int] | None = None  # of this step's chains
        self.policy_chooses = options.draft_exit == POLICY

    @property
    def kind_of_forward(self) -> Hashable:
        return super().kind_of_forward, self._left_out

    def start(self, state: DecodeState) -> None:
        if state.do_sample:  # other drafts are right
            key = *self._key, "sampled"
            self.exit = recall(self.model, key, lambda: ThresholdExit(self.options))
        self.calibration = self.exit.calibration
        graphs = state.target.graphs
        if graphs is not None and self.learned is not None:
            graphs.hold(self.learned.weights.values())

    def propose(self, state: DecodeState) -> Tree:
        depth = min(self.options.most, state.max_depth)
        samples = samples_drafts(self.options, state.do_sample)
        if self.options.draft_exit != POLICY or not state.timed or samples:
            return self._chain(state, depth, samples)
        return self.grown(state, partial(self._grow, state, depth))

    def _grow(self, state: DecodeState, depth: int, trust: Sequence[float]) -> Tensor:
        """Trees of the policy's exit, packed."""
        stage = Stage(self, state)
        packed = grow(stage, state.root, max(RANKS * depth, 1), depth, trust, expanded=1)
        state.cache.rollback()
        return packed

    def run(
        self, state: DecodeState, tokens: Tensor, drafting: Sequence[bool]
    ) -> tuple[Tensor, Tensor]:
        """The drafting model's logits and the call's scores ``(batch, vocab)`` in float32, after
        root and drafted tokens ``(batch, 1 + k)``.

        Exits use probabilities of the former: scores of a low temperature are always confident.
        """
        k = tokens.shape[1] - 1
        output = state.target(Tree.chain(tokens), first=k, changes=self.drafting)
        state.stats.num_draft_forwards += 1
        logits = output.logits[:, -1]
        return logits.float(), state.process(logits, tokens[:, 1:], drafting, drafting=True)

    def _chain(self, state: DecodeState, depth: int, samples: bool) -> Tree:
        """Chains with the paper's exits; sampled ones have their distributions."""
        tokens = state.root[:, None]
        drafting = list(state.active)
        lengths = [0] * len(drafting)
        distributions: list[Tensor] = []
        confidence: Tensor | None = None  # (batch,) draft probability of the last tokens
        for k in range(depth):
            if confidence is not None:  # one transfer: whether there is another forward
                go_on = map(self.exit.go_on, confidence.tolist())
                drafting = [on and more for on, more in zip(drafting, go_on)]
            if not any(drafting):
                break
            logits, scores = self.run(state, tokens, drafting)
            if samples:
                distributions.append(distribution(scores))
                token = sample(distributions[-1]).clamp(min=0)[:, None]
            else:
                token = scores.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, token], dim=1)
            lengths = [k + 1 if on else length for on, length in zip(drafting, lengths)]
            if self.exit.by_confidence:
                confidence = distribution(logits).gather(1, token)[:, 0]
        state.cache.rollback()
        self._lengths = lengths
        tree = Tree.of_shapes([TokenTree.chain(n) for n in lengths], tokens.device)
        stacked = None
        if distributions:
            stacked = torch.stack([torch.zeros_like(distributions[0]), *distributions], dim=1)
        return tree.with_tokens(tokens[:, : tree.num_tokens], stacked)

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        super().observe(state, tree, result)
        if self._lengths is not None:
            rows = [(len(path) - 1, n) for path, n in zip(result.path, self._lengths) if path]
            drafted = sum(length for _, length in rows)
            if drafted:
                self.exit.update(sum(min(row) for row in rows) / drafted)
        self._lengths = None

    def details(self) -> dict[str, Any]:
        merged = {} if self.learned is None else {"merged_bytes": self.learned.num_bytes}
        return {"threshold": round(self.exit.gamma, 4), **merged}

    def chain(self, input_ids: Tensor) -> list[int]:
        output = self.drafting.run(
            self.model.generate, input_ids, max_new_tokens=self.options.most, do_sample=False,
            num_beams=1, assistant_strategy=None,
        )  # fmt: skip
        return output[0, input_ids.shape[1] :].tolist()


class Stage:
    """The drafting stage of one step; see :class:`hf_spec.drafting.grow.Expands`."""

    def __init__(self, drafter: LayerSkipDrafter, state: DecodeState):
        self.drafter, self.state = drafter, state
        cost = state.draft_cost()
        # While it is unknown, drafting ends where tokens are no longer likely to be accepted.
        self.cost = drafter.exit.gamma * sum(state.active) if cost is None else cost
        self._lookups = [_Followed(row) for row in state.looked_up]
        self._tokens = state.root[:, None]

    def expand(self, frontier: Frontier) -> Children | None:
        drafter, state, depth = self.drafter, self.state, frontier.depth
        paths: list[float] = [1.0] * len(state.active)
        if depth:  # one transfer; float32 represents tokens, which are below 2 ** 24, exactly
            parts = frontier.tokens[:, 0].to(frontier.log_probs), frontier.log_probs[:, 0].exp()
            numbers, paths = torch.stack(parts).tolist()
            for lookup, token in zip(self._lookups, numbers):
                lookup.follow(int(token))
            self._tokens = torch.cat([self._tokens, frontier.tokens], dim=1)
        paths = [path * on for path, on in zip(paths, state.active)]
        present = [lookup.probability for lookup in self._lookups]
        worth = drafter.exit.is_worth(depth + 1, paths, self.cost, present)
        if not worth and (depth or not drafter.exit.due()):
            return None
        logits, scores = drafter.run(state, self._tokens, state.active)
        logits, scores = self._as_sampled(logits, scores, depth)
        tops = scores.topk(min(RANKS, scores.shape[1]))
        # Tokens that processors rule out are never accepted, nor those of finished sequences.
        out = (tops.values == -torch.inf) | ~to_device(list(state.active), scores.device)[:, None]
        probs = distribution(logits).gather(1, tops.indices).masked_fill(out, 0)
        return Children(tops.indices[:, None], probs.log()[:, None])

    def _as_sampled(self, logits: Tensor, scores: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Logits and scores given what the tokens will be sampled with, if they are sampled."""
        noise = self.state.noise
        if noise is None:
            return logits, scores
        ahead = noise.ahead(1, first=depth)[:, 0].to(logits.device)
        # Scores are divided by the temperature, logits are not.
        return as_sampled(logits, ahead), as_sampled(noise.temperature * scores, ahead)


class _Followed:
    """A lookup's continuations along the drafted tokens."""

    def __init__(self, row: Row):
        self._row = row
        self._children = row.children
        self._node: int | None = 0

    @property
    def probability(self) -> float:
        """That the drafted tokens and then one of the lookup's tokens follow."""
        nodes = zip(self._row.probs, self._row.parents)
        return sum(prob for prob, parent in nodes if parent == self._node)

    def follow(self, token: int) -> None:
        if self._node is not None:
            self._node = self._children.get((self._node, token))


def _choice(model: Any, options: LayerSkipOptions) -> tuple[list[int], list[int], Adapter | None]:
    """Layers whose attention and MLP are skipped, and the active adapter if they are its own."""
    attention, mlp = options.skip_attention, options.skip_mlp
    if attention is not None or mlp is not None:
        # An adapter's updates compensate for its own skipped layers only.
        return list(attention or ()), list(mlp or ()), None
    adapter = find_active(model, "LAYER_SKIP", options.adapter)
    if adapter is None:
        raise ValueError(
            "assistant_strategy='layer_skip' needs the layers to skip: give assistant_kwargs="
            "{'skip_attention': [...], 'skip_mlp': [...]}, load a LAYER_SKIP adapter "
            "(model.load_adapter) or name one (adapter), or find good layers with `hf-spec search`."
        )
    return adapter.config.skip_attention, adapter.config.skip_mlp, adapter
