"""Costs of self-speculative decoding's forwards on this machine; measured once, then stored.

The cost of a verifying forward depends on its number of nodes. That of a drafting forward is a sum:
a base (embeddings, head, the drafter's own work), a little for each layer that runs at all, and a
price for each attention and MLP that runs; sublayers of equal shape have equal prices. This module
knows models and caches, but not acceptance or the search.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_spec.core.cache import TreeCache
from hf_spec.core.token_tree import TokenTree
from hf_spec.model.tree_forward import TreeForward
from modeling_patches.cache_name import cache_in
from modeling_patches.layer_skip import LayerSkipper
from modeling_patches.modules import decoder_layers, num_layers
from modeling_patches.weights import placement

#: Node counts that are measured; those between are interpolated.
NODE_COUNTS = (1, 2, 3, 4, 6, 8, 10, 13, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Skip:
    """A choice z of sublayers that drafting skips (Draft & Verify, section 3.3).

    Attributes:
        attention, mlp: indices of the layers whose attention / MLP is skipped.
    """

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.attention) + len(self.mlp)

    def options(self) -> dict[str, list[int]]:
        """The choice as ``assistant_kwargs`` and as fields of the adapter's config."""
        return {"skip_attention": list(self.attention), "skip_mlp": list(self.mlp)}


@dataclass(frozen=True)
class Sublayers:
    """The sublayers of a model that can be skipped, and which of them have equal shapes.

    Attributes:
        count: number of layers of the model.
        attention, mlp: indices of the layers whose attention / MLP can be skipped.
        groups: ``("attention" or "mlp", layers)`` for each set of sublayers of equal shape.
    """

    count: int
    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, model: Any) -> Sublayers:
        """Find the sublayers of a model.

        Raises:
            ValueError: the architecture's layers cannot be found, or nothing can be skipped.
        """
        count = num_layers(model)
        layers, windows = decoder_layers(model), _layer_types(model, count)
        found: dict[str, list[int]] = {"attention": [], "mlp": []}
        groups: dict[tuple[Any, ...], list[int]] = {}
        reason = ""
        for index in range(count):
            for kind in found:
                try:
                    LayerSkipper(model, **{f"skip_{kind}": [index]})
                except ValueError as error:
                    reason = str(error)
                    continue
                found[kind].append(index)
                shapes = tuple(tuple(p.shape) for p in layers[index].parameters())
                groups.setdefault((kind, windows[index], shapes), []).append(index)
        if reason and not any(found.values()):
            raise ValueError(f"no sublayer can be skipped: {reason}")
        listed = tuple((key[0], tuple(indices)) for key, indices in groups.items())
        return cls(count, tuple(found["attention"]), tuple(found["mlp"]), listed)


def _layer_types(model: Any, count: int) -> list[Any]:
    """The type of attention of each layer, full or sliding, if the config names it."""
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    return list(types) if types is not None and len(types) == count else [None] * count


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of all parts of decoding one sequence.

    Attributes:
        verify: a full forward over n nodes, by n.
        draft_base: a drafting forward with everything skipped.
        layer: a layer that runs at all, without its sublayers.
        attention, mlp: the sublayer of each layer; 0 if it cannot be skipped, as ``draft_base``
            contains it.
        draft_overhead: the drafter's work per drafted token, outside the forward.
        step_overhead: acceptance, commit and the rest of a step, outside the forward.
        prefill: a prompt, up to its first new token.
        plain: a token of plain ``generate`` after the first.
        context: number of cached tokens that forwards are measured with.
        measured: the medians that the prices are fitted to.
    """

    verify: dict[int, float]
    draft_base: float
    layer: float
    attention: tuple[float, ...]
    mlp: tuple[float, ...]
    draft_overhead: float = 0.0
    step_overhead: float = 0.0
    prefill: float = 0.0
    plain: float = 0.0
    context: int = 0
    measured: dict[str, Any] = field(default_factory=dict)

    def verify_seconds(self, nodes: int) -> float:
        """Seconds of a verifying forward, interpolated between the measured numbers of nodes."""
        counts = sorted(self.verify)
        return float(np.interp(nodes, counts, [self.verify[n] for n in counts]))

    def draft_seconds(self, skip: Skip) -> float:
        """Seconds of a drafting forward that skips these sublayers."""
        total = self.draft_base
        for index, (attention, mlp) in enumerate(zip(self.attention, self.mlp)):
            kept = [index not in skip.attention, index not in skip.mlp]
            total += self.layer * any(kept) + attention * kept[0] + mlp * kept[1]
        return total

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepCosts:
        """Inverse of ``dataclasses.asdict`` followed by JSON."""
        verify = {int(nodes): seconds for nodes, seconds in data["verify"].items()}
        prices = {name: tuple(data[name]) for name in ("attention", "mlp")}
        return cls(**{**data, "verify": verify, **prices})


class ForwardTimer:
    """Times verifying and drafting forwards after a context, in turns.

    Args:
        model: the model in evaluation mode, on its device.
        context: token ids to put into the cache.
        max_nodes: largest number of nodes of a verifying forward.
        sublayers: sublayers that can be skipped.
    """

    @torch.no_grad()
    def __init__(self, model: Any, context: Sequence[int], max_nodes: int, sublayers: Sublayers):
        device = placement(model).device
        ids = torch.tensor([list(context)], device=device)
        past = cache_in(model(input_ids=ids, use_cache=True))
        self.model = model
        self.sublayers = sublayers
        self.cache = TreeCache.pack(past, None, len(context) + max_nodes, device)
        self.last = torch.tensor([len(context) + max_nodes], device=device)
        counts = sorted({n for n in NODE_COUNTS if n < max_nodes} | {max_nodes})
        depth = (max_nodes - 1) // 2  # a drafted token in the middle of a draft

        def chain(nodes: int) -> dict[str, Any]:
            tree = TokenTree.chain(nodes - 1).batch(1, device)
            return {"tokens": ids[:, -1:].expand(1, nodes), "tree": tree}

        #: Arguments of each forward, by number of nodes to verify or by the sublayers skipped.
        self.calls: dict[int | Skip, dict[str, Any]] = {nodes: chain(nodes) for nodes in counts}
        for skip in _patterns(sublayers):
            changes = LayerSkipper(model, skip.attention, skip.mlp).changes
            self.calls[skip] = {**chain(depth + 1), "first": depth, "changes": changes}
        self.spent: dict[int | Skip, list[float]] = {key: [] for key in self.calls}
        self.round(timed=False)  # first calls allocate and learn

    @torch.no_grad()
    def round(self, timed: bool = True) -> None:
        """Run every forward once.

        Args:
            timed: whether the times count.
        """
        forward = TreeForward(self.model, self.cache, self.last)
        for key, call in self.calls.items():
            start = time.perf_counter()
            forward(**call).logits[0, -1].argmax().item()  # reading a number waits for the device
            self.spent[key] += [time.perf_counter() - start] * timed
            self.cache.rollback()

    def result(self) -> StepCosts:
        """The costs of forwards, fitted to the medians over all rounds; all other costs are 0."""
        medians = {key: statistics.median(times) for key, times in self.spent.items()}
        drafted = {skip: spent for skip, spent in medians.items() if isinstance(skip, Skip)}
        counts = [nodes for nodes in medians if isinstance(nodes, int)]
        # More nodes never cost less: a dip is noise, and would make longer drafts look free.
        verified = np.maximum.accumulate([medians[nodes] for nodes in counts])
        rows = [
            {"skipped": len(skip), **skip.options(), "seconds": spent}
            for skip, spent in drafted.items()
        ]
        return StepCosts(
            verify=dict(zip(counts, verified.tolist())), **_fit(self.sublayers, drafted),
            measured={"draft": rows},
        )  # fmt: skip


def _patterns(sublayers: Sublayers) -> list[Skip]:
    """Choices that skip nothing, everything, all attention, all MLPs, and each kind of sublayer."""
    everything = Skip(sublayers.attention, sublayers.mlp)
    chosen = [Skip(), everything, Skip(everything.attention), Skip((), everything.mlp)]
    for kind, layers in sublayers.groups:
        chosen.append(Skip(layers) if kind == "attention" else Skip((), layers))
    return list(dict.fromkeys(chosen))


def _fit(sublayers: Sublayers, seconds: Mapping[Skip, float]) -> dict[str, Any]:
    """Prices of :class:`StepCosts` by least squares, none below zero."""
    layers = range(sublayers.count)
    rows = []
    for skip in seconds:
        whole = set(skip.attention) & set(skip.mlp)
        kept = [
            len(set(group) - set(skip.attention if kind == "attention" else skip.mlp))
            for kind, group in sublayers.groups
        ]
        rows.append([1.0, float(len(set(layers) - whole)), *map(float, kept)])
    base, layer, *prices = _prices(np.array(rows), np.array([*seconds.values()])).tolist()
    by_kind = {kind: [0.0] * sublayers.count for kind in ("attention", "mlp")}
    for (kind, group), price in zip(sublayers.groups, prices):
        for index in group:
            by_kind[kind][index] = price
    found = {kind: tuple(each) for kind, each in by_kind.items()}
    return {"draft_base": base, "layer": layer, **found}


def _prices(counts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Prices of parts by least squares: a part whose price comes out below zero costs nothing.

    Args:
        counts: ``(forwards, parts)`` how often each part runs.
        seconds: ``(forwards,)``
    """
    found = np.zeros(counts.shape[1])
    paid = np.ones(len(found), dtype=bool)
    while paid.any():
        prices = np.linalg.lstsq(counts[:, paid], seconds)[0]
        if (prices >= 0).all():
            found[paid] = prices
            break
        paid[np.flatnonzero(paid)[prices.argmin()]] = False
    return found
