"""Drafts with the model itself, skipping layers; weights and cache are shared.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding" (2023), algorithms 3 and 4. The verifying forward overwrites the drafted tokens' cache
entries, so every layer ends up with the full model's states.

Each drafting forward adds several candidates: drafting continues from the likeliest token, and the
next likeliest ones become its siblings, if the policy chooses candidates by probability.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter, find_active
from hf_spec.core.host_tree import Row
from hf_spec.core.memory import recall
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.drafting.drafter import Drafter
from hf_spec.drafting.options import key_of, samples_drafts
from hf_spec.drafting.predictions import distribution
from hf_spec.drafting.state import DecodeState
from hf_spec.methods.layer_skip.options import POLICY, DraftExit, LayerSkipOptions
from hf_spec.policy.tempering import Tempering
from modeling_patches.layer_skip import LayerSkipper
from modeling_patches.merged_copies import MergedCopies
from modeling_patches.per_call import Changes

#: Candidates per drafting forward; drafting continues from the first.
RANKS = 3


class LayerSkipDrafter(Drafter):
    """Drafts token by token with the chosen sublayers left out."""

    can_sample = True
    single_forward: ClassVar[bool] = False
    runs_modules: ClassVar[bool] = True
    options: LayerSkipOptions
    drafting: Changes

    def __init__(self, model: Any, options: LayerSkipOptions):
        super().__init__(model, options)
        attention, mlp, adapter = _choice(model, options)
        self.drafting = LayerSkipper(model, attention, mlp).changes
        layer: Any = None if adapter is None else adapter.layer
        update = None if adapter is None else layer.updates.get(adapter.name)
        self.learned = None if update is None else MergedCopies(update, self.drafting)
        name = None if adapter is None else adapter.name
        self._key = "layer_skip", name, tuple(attention), tuple(mlp), key_of(options)
        self._left_out = tuple(attention), tuple(mlp), adapter is not None
        self.exit = recall(model, self._key, lambda: DraftExit(options))
        #: Trees proposed in this step, if any. Look-ups may be merged into the forwarded ones.
        self._trees: tuple[list[float], list[Row]] | None = None
        self._lengths: list[int] | None = None
        self.policy_chooses = options.draft_exit == POLICY
        self.tempering = Tempering()
        #: Logits and noise of each drafted token of this step, where tokens are sampled.
        self._samples: list[tuple[Tensor, Tensor]] = []
        self._drafted: list[list[int]] = []
        self._sampled = 0

    @property
    def kind_of_forward(self) -> Hashable:
        return super().kind_of_forward, self._left_out

    def start(self, state: DecodeState) -> None:
        if state.do_sample:  # other drafts are right
            key = *self._key, "sampled"
            self.exit = recall(self.model, key, lambda: DraftExit(self.options))
            self.tempering = recall(self.model, (Tempering, *key), Tempering)
        graphs = state.target.graphs
        if graphs is not None and self.learned is not None:
            graphs.hold(self.learned.weights.values())

    def propose(self, state: DecodeState) -> Tree:
        depth = min(self.options.max_draft, state.max_depth)
        samples = samples_drafts(self.options, state.do_sample)
        if self.options.draft_exit == POLICY and state.timed and not samples:
            return self._tree(state, depth)
        return self._chain(state, depth, samples)

    def _run(
        self, state: DecodeState, tokens: Tensor, drafted: Sequence[Sequence[int]],
        drafting: Sequence[bool],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The drafting model's logits and the call's scores after the drafted tokens.

        Exits use probabilities of the former: scores of a low temperature are always confident.

        Args:
            tokens: ``(batch, 1 + k)`` root and drafted tokens.
            drafted: the drafted tokens of each sequence.
            drafting: whether each sequence still drafts.

        Returns:
            ``(batch, vocab)`` float32 logits and scores.
        """
        k = tokens.shape[1] - 1
        output = state.target(Tree.chain(tokens), first=k, changes=self.drafting)
        state.stats.num_draft_forwards += 1
        logits = output.logits[:, -1]
        return logits.float(), state.process(logits, tokens[:, 1:], drafting, drafting=True)

    def _expected(
        self, state: DecodeState, place: int, logits: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """:meth:`_run`'s results given what the tokens will be sampled with, if they are sampled.

        Args:
            place: drafted tokens before these.
        """
        if state.noise is None:
            return logits, scores
        learned, noise = self.tempering, state.noise.ahead(1, first=place)[:, 0].to(logits.device)
        self._samples.append((logits, noise))
        added = learned.share * noise
        scores = state.noise.temperature * scores  # as logits are
        return learned.sharpness * logits + added, learned.sharpness * scores + added

    def _tree(self, state: DecodeState, depth: int) -> Tree:
        """A chain as deep as it pays, with the next likeliest tokens as siblings."""
        active, tokens = state.active, state.root[:, None]
        drafted: list[list[int]] = [[] for _ in active]
        trust, price = self.exit.calibration.log_factors, state.draft_cost()
        paths = [float(on) for on in active]  # probability of all drafted tokens
        sure: list[float] = []
        looked_up = [_Followed(one) for one in state.lookups]
        rows = [Row.root(root) for root in state.root.tolist()]
        for k in range(depth):
            held = [one.held for one in looked_up]
            if not self.exit.pays(k + 1, paths, sure, price, held) and (k or not self.exit.due()):
                break
            logits, scores = self._run(state, tokens, drafted, active)
            logits, scores = self._expected(state, k, logits, scores)
            own = distribution(logits)
            best = scores.topk(min(RANKS, scores.shape[1]))
            # Tokens that processors rule out are never accepted.
            likely = own.gather(1, best.indices).masked_fill(best.values == -torch.inf, 0)
            # One transfer; tokens are below 2 ** 24, which float32 holds exactly.
            found, said = torch.stack([best.indices.to(likely), likely]).tolist()
            tokens = torch.cat([tokens, best.indices[:, :1]], dim=1)
            sure, factor = [one[0] for one in said], math.exp(trust[k])
            for row, (parents, ids, probs) in enumerate(rows):
                above = len(ids) - len(found[row]) if k else 0
                parents += [above] * len(found[row])
                ids += map(int, found[row])
                probs += [paths[row] * min(factor * one, 1.0) for one in said[row]]
                paths[row] *= min(factor * sure[row], 1.0)
                drafted[row].append(int(found[row][0]))
            for one, so_far in zip(looked_up, drafted):
                one.follow(so_far[-1])
        state.cache.rollback()
        trees = [
            row.likeliest_first() if on else Row.root(row.tokens[0])
            for row, on in zip(rows, active)
        ]
        self._trees, self._drafted = (trust, trees), drafted
        return Tree.of_rows(trees, state.root.device)

    def _chain(self, state: DecodeState, depth: int, samples: bool) -> Tree:
        """Chains with the paper's exits; sampled ones have their distributions."""
        tokens = state.root[:, None]
        drafting = list(state.active)
        lengths = [0] * len(drafting)
        drafted: list[list[int]] = [[] for _ in drafting]
        distributions: list[Tensor] = []
        for k in range(depth):
            if not any(drafting):
                break
            logits, scores = self._run(state, tokens, drafted, drafting)
            own = distribution(logits)
            if samples:
                distributions.append(distribution(scores))
                token = torch.multinomial(distributions[-1], 1)
            else:
                token = scores.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, token], dim=1)
            confidence = own.gather(1, token)[:, 0].tolist()
            for row, chosen in enumerate(token[:, 0].tolist()):
                if drafting[row]:
                    drafted[row].append(chosen)
                    lengths[row] = k + 1
                    drafting[row] = self.exit.go_on(confidence[row])
        state.cache.rollback()
        self._lengths = lengths
        tree = Tree.of_shapes([TokenTree.chain(n) for n in lengths], tokens.device)
        stacked = None
        if distributions:
            stacked = torch.stack([torch.zeros_like(distributions[0]), *distributions], dim=1)
        return tree.with_tokens(tokens[:, : tree.num_tokens], stacked)

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        if self._trees is not None:
            self.exit.learn(*self._trees, result.tokens)
            self._learn(result.tokens)
        if self._lengths is not None:
            rows = [(len(path) - 1, n) for path, n in zip(result.path, self._lengths) if path]
            drafted = sum(length for _, length in rows)
            if drafted:
                self.exit.update(sum(min(row) for row in rows) / drafted)
        self._trees = self._lengths = None

    def _learn(self, came: Sequence[Sequence[int]]) -> None:
        """Learn from the sampled tokens that followed drafted ones."""
        samples, self._samples = self._samples, []
        self._sampled += bool(samples)
        if not samples or not self.tempering.learns(self._sampled):
            return
        logits, noise = (torch.stack(parts, 1) for parts in zip(*samples))
        rows = [
            [
                tokens[k] if k < len(tokens) and tokens[:k] == drafted[:k] else -1
                for k in range(len(samples))
            ]
            for tokens, drafted in zip(map(list, came), self._drafted)
        ]
        tokens = torch.tensor(rows, device=logits.device).flatten()
        self.tempering.learn(
            logits.flatten(0, 1), noise.flatten(0, 1), tokens.clamp(min=0), tokens >= 0
        )

    def details(self) -> dict[str, Any]:
        merged = {} if self.learned is None else {"merged_bytes": self.learned.num_bytes}
        return {"threshold": round(self.exit.gamma, 4), **merged}

    def chain(self, input_ids: Tensor) -> list[int]:
        output = self.drafting.run(
            self.model.generate, input_ids, max_new_tokens=self.options.max_draft, do_sample=False,
            num_beams=1, assistant_strategy=None,
        )  # fmt: skip
        return output[0, input_ids.shape[1] :].tolist()


class _Followed:
    """Looked-up continuations along the drafted tokens."""

    def __init__(self, found: Row):
        self._found = found
        nodes = enumerate(zip(found.parents, found.tokens))
        self._children = {edge: node for node, edge in nodes}
        self._node: int | None = 0

    @property
    def held(self) -> float:
        """Probability that the drafted tokens and then one of the looked-up tokens follow."""
        nodes = zip(self._found.probs, self._found.parents)
        return sum(prob for prob, parent in nodes if parent == self._node)

    def follow(self, token: int) -> None:
        if self._node is not None:
            self._node = self._children.get((self._node, token))


def _choice(
    model: Any, options: LayerSkipOptions
) -> tuple[list[int], list[int], ActiveAdapter | None]:
    """Layers whose attention and MLP are skipped, and the active adapter if they are its own.

    Options take precedence. An adapter's updates compensate for its own skipped layers, and are not
    used with others.
    """
    attention, mlp = options.skip_attention, options.skip_mlp
    if attention is None and mlp is None:
        adapter = find_active(model, "LAYER_SKIP")
        if adapter is None:
            raise ValueError(
                "assistant_strategy='layer_skip' needs the layers to skip: give assistant_kwargs="
                "{'skip_attention': [...], 'skip_mlp': [...]}, load a LAYER_SKIP adapter "
                "(model.load_adapter), or find good layers with `hf-spec search`."
            )
        config: Any = adapter.config
        return config.skip_attention, config.skip_mlp, adapter
    return list(attention or ()), list(mlp or ()), None
