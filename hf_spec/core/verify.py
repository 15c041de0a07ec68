"""Acceptance rules: which draft tokens of a tree the model accepts, and the token that follows.

``match`` and ``rejection`` are exact: what they emit follows the target distribution. ``typical``
is lossy. The rules see a tree, its tokens and the target's scores, but no model.

Symbols: p is the target distribution at a node (after all logits processors), q the draft's.

All stay on the device, down to the deepest draft token. Where the host may read tensors at no cost,
a rule that walks down the tree can be told to ask (``early_exit``) whether any row goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_spec.core.device import to_device
from hf_spec.core.tree import Tree
from hf_spec.threads import RUNNING

#: ``scores(nodes, active, depth)``: processed target scores (batch, vocab) at one node per row;
#: rows where ``active`` (batch,) is False may hold anything. Called along the accepted path only,
#: in order: nodes of depth 0 (the roots), 1, ...
ScoreFn = Callable[[Tensor, Tensor, int], Tensor]
#: ``choose(nodes, active, depth)``: the target's token (batch,) there, argmax or a sample, -1 if
#: there is none, see :func:`sample`. Called like a :data:`ScoreFn`.
ChooseFn = Callable[[Tensor, Tensor, int], Tensor]


class HostResult(NamedTuple):
    """A step's result on the host, per row.

    Attributes:
        path: accepted nodes, the root first, as many as a stop left.
        tokens: emitted tokens, as many as accepted nodes; the last one is -1 if it could not be
            sampled.
        num_probes: probes of the last accepted node.
    """

    path: Sequence[Sequence[int]]
    tokens: list[list[int]]
    num_probes: list[int]

    @property
    def counts(self) -> list[int]:
        """Accepted nodes of each row."""
        return list(map(len, self.path))


class StepResult(NamedTuple):
    """What one step accepted, on the device.

    Attributes:
        path: ``(batch, depth + 1)`` node indices, root first; entries past ``counts`` are 0.
        counts: ``(batch,)`` accepted nodes, the root included, at least 1.
        tokens: ``(batch, depth + 1)`` emitted tokens: the accepted draft tokens, then the bonus
            token, -1 if it could not be sampled; entries past ``counts`` are padding.
        num_probes: ``(batch,)`` probes of the last accepted node.
        last: ``(batch,)`` last accepted node of each row.
        bonus: ``(batch,)`` last emitted token of each row; 0 if it could not be sampled.
        host: the same on the host; None where it is not known there, as in recorded code.
    """

    path: Tensor
    counts: Tensor
    tokens: Tensor
    num_probes: Tensor
    last: Tensor
    bonus: Tensor
    host: HostResult | None = None

    def padded(self, width: int) -> StepResult:
        """The same with paths of ``width`` entries, if they have fewer: a size that recurs."""
        more = width - self.path.shape[1]
        if more <= 0:
            return self
        return self._replace(path=pad(self.path, (0, more)), tokens=pad(self.tokens, (0, more)))

    def of_rows(self, rows: Sequence[int]) -> StepResult:
        """The result of some of the batch's rows."""
        tensors: Any = [one[to_device(rows, one.device)] for one in self[:-1]]
        host: Any = self.host and [[part[row] for row in rows] for part in self.host]
        return StepResult(*tensors)._replace(host=host and HostResult(*host))

    def packed(self) -> Tensor:
        """All that is on the device, as one tensor ``(batch, 4 + 2 (depth + 1))``."""
        columns = self.counts, self.num_probes, self.last, self.bonus
        return torch.cat([*(one[:, None] for one in columns), self.path, self.tokens], 1)

    @staticmethod
    def unpacked(packed: Tensor) -> StepResult:
        """Inverse of :meth:`packed`."""
        (counts, num_probes, last, bonus), rest = packed[:, :4].unbind(1), packed[:, 4:]
        path, tokens = rest.chunk(2, 1)
        return StepResult(path, counts, tokens, num_probes, last, bonus)

    def to_host(self, more: Tensor | None = None) -> tuple[HostResult, Any]:
        """Copy the result to the host: the step's one transfer.

        Args:
            more: ``(batch, n)`` float32 numbers to transfer along with it.

        Returns:
            The result, and ``more`` as a NumPy array.
        """
        packed, numbers, first = self.packed(), None, 4 + self.path.shape[1]  # of the tokens
        if more is None:
            rows = packed.tolist()
        else:  # float32 represents integers below 2 ** 24, and so all tokens, exactly
            both = torch.cat([packed.to(more), more], 1).cpu().numpy()
            numbers = both[:, packed.shape[1] :]
            rows = both[:, : packed.shape[1]].astype(int).tolist()
        path = [row[4 : 4 + row[0]] for row in rows]
        tokens = [row[first : first + row[0]] for row in rows]
        return HostResult(path, tokens, [row[1] for row in rows]), numbers


class VerifyProgram(NamedTuple):
    """Chooses what a step accepts.

    Attributes:
        key: what it depends on besides the shapes of its inputs.
        function: from the step's trees, logits ``(batch, tokens, vocab)`` and :attr:`inputs` to
            its result.
        inputs: tensors that change from step to step.
        noise: what tokens to come will be sampled with, ``(batch, depth, vocab)`` (see
            :func:`as_sampled`), given :attr:`inputs`, the result and the number of these tokens;
            None if they are not sampled.
    """

    key: Hashable
    function: Callable[[Tree, Tensor, Sequence[Tensor]], StepResult]
    inputs: Sequence[Tensor] = ()
    noise: Callable[[Sequence[Tensor], StepResult, int], Tensor] | None = None


def likeliest(logits: Tensor) -> Tensor:
    """The first largest entry of logits ``(..., vocab)``, as ``argmax`` finds it: ``(...)`` ids."""
    # PyTorch's argmax of bfloat16 and float16 takes four to eight times as long on CPUs.
    return logits.max(-1).indices


def greedy(tree: Tree, logits: Tensor, *_: object) -> StepResult:
    """:func:`match` with the likeliest token of logits ``(batch, tokens, vocab)`` at each node."""
    return match(tree, likeliest(logits))


def match(tree: Tree, targets: Tensor) -> StepResult:
    """Match rule with the target's token known at every node: no loop.

    Accept a child if it carries the token that the target emits at its parent. Exact for any
    draft that does not depend on it, whether targets are argmax or samples.

    Args:
        tree: the draft tree of each row.
        targets: ``(batch, tokens)`` the target's token after each node that has one.
    """
    tree, probes = tree.without_probes, tree.probe_counts
    nodes, tokens = tree.num_nodes, tree.tokens
    if nodes == 1:
        return _roots(targets, probes)
    parents = tree.parents.clamp(min=0)
    ok = (tokens == targets.gather(1, parents)) & tree.valid
    ok[:, 0] = True
    if nodes > 2 and not tree.is_chain:
        # Of siblings with the same token, only the first counts: the choice of subtree must not
        # depend on what the target emits in it.
        same = parents[:, :, None] == parents[:, None, :]
        earlier = torch.ones(nodes, nodes, dtype=torch.bool, device=ok.device).tril(-1)
        earlier[:, 0] = False
        ok &= ~(same & earlier & ok[:, None, :]).any(-1)
    accepted = ~(tree.ancestors & ~ok[:, None, :]).any(-1)
    # Only one path is accepted; its last node is the deepest accepted node.
    depth, last = torch.where(accepted, tree.depths, -1).max(-1)
    return _along_path(tree, last, depth + 1, targets.gather(1, last[:, None]), probes)


def match_along(
    tree: Tree, choose: ChooseFn, active: Tensor, early_exit: bool = False, lockstep: bool = False
) -> StepResult:
    """Match rule node by node: needs the target's tokens only along the accepted path.

    For logits processors, which must see each node's true prefix, and for sampling.

    Args:
        tree: as in :func:`match`.
        choose: see its type.
        active: ``(batch,)`` bool, unfinished rows; the others accept nothing.
        early_exit: stop as soon as no row goes on. This reads a tensor at each depth.
        lockstep: all unfinished rows accept equally many nodes: as many as the row that accepts
            the fewest.
    """
    tree, probes = tree.without_probes, tree.probe_counts
    unfinished, bonus = active, torch.zeros_like(tree.tokens[:, 0])
    last, counts = bonus, torch.ones_like(bonus)
    for depth in range(tree.max_depth + 1):
        bonus = torch.where(active, choose(last, active, depth), bonus)
        if tree.num_nodes == 1:
            return _roots(bonus[:, None], probes)
        hit = (tree.parents == last[:, None]) & (tree.tokens == bonus[:, None]) & tree.valid
        active = active & hit.any(-1)
        if lockstep:
            active = active & (active | ~unfinished).all()
        if early_exit and not active.any():
            break
        last = torch.where(active, hit.int().argmax(-1), last)
        counts = counts + active
    return _along_path(tree, last, counts, bonus[:, None], probes)


def without_last(tree: Tree, result: StepResult) -> StepResult:
    """A result whose rows with no token after an accepted draft token do not accept that one: it is
    their bonus token, behind which the next step asks once more."""
    tree, probes = tree.without_probes, tree.probe_counts
    emitted = result.tokens.gather(1, result.counts[:, None] - 1)[:, 0]
    none = (emitted < 0) & (result.counts > 1)
    parent, own = (
        of_nodes.gather(1, result.last[:, None])[:, 0] for of_nodes in (tree.parents, tree.tokens)
    )
    last, bonus = torch.where(none, parent, result.last), torch.where(none, own, emitted)
    return _along_path(tree, last, result.counts - none.long(), bonus[:, None], probes)


def rejection(tree: Tree, scores: ScoreFn, active: Tensor, early_exit: bool = False) -> StepResult:
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023), for trees as well as chains.

    For draft tokens x sampled independently from q: accept with min(1, p(x) / q(x)); after a
    rejection, p becomes norm(max(0, p - q)) for the next sibling and finally for the emitted token
    (SpecInfer, algorithm 2). This is also Draft & Verify, algorithm 4, with an independent random
    number for the acceptance test, and SPACE, algorithm 1, with the residual in line 18.

    Args:
        tree: the draft tree of each row, with the distributions ``q``.
        scores: see its type.
        active, early_exit: as in :func:`match_along`.
    """
    tree, probes = tree.without_probes, tree.probe_counts
    tokens, draft = tree.tokens, tree.q
    assert draft is not None
    rows = torch.arange(len(tokens), device=tokens.device)
    unfinished, last = active, torch.zeros_like(tokens[:, 0])
    counts = torch.ones_like(last)
    p = scores(last, active, 0).softmax(-1)
    # Most children that a node can have: one, and all that are not on the longest path.
    siblings = 1 + max(size - depth for size, depth in zip(tree.row_sizes, tree.row_depths))
    for depth in range(1, tree.max_depth + 1):
        children = (tree.parents == last[:, None]) & tree.valid & active[:, None]
        active = torch.zeros_like(active)
        for _ in range(siblings):
            considered = children.any(-1)
            if early_exit and not considered.any():
                break
            node = children.int().argmax(-1)
            x, q = tokens[rows, node][:, None], draft[rows, node].to(p.dtype)
            with RUNNING:
                u = torch.rand(len(rows), device=p.device, dtype=p.dtype)
            accept = considered & (u * q.gather(1, x)[:, 0] < p.gather(1, x)[:, 0])
            residual = (p - q).clamp(min=0)
            total = residual.sum(-1, keepdim=True)
            # p == q up to rounding leaves no residual; a rejection there has probability 0.
            residual = torch.where(total > 0, residual / total.clamp(min=1e-38), p)
            p = torch.where((considered & ~accept)[:, None], residual, p)
            last, active = torch.where(accept, node, last), active | accept
            children = children.scatter(1, node[:, None], False) & ~accept[:, None]
        if early_exit and not active.any():
            break
        counts = counts + active
        p = torch.where(active[:, None], scores(last, active, depth).softmax(-1), p)
    bonus = torch.where(unfinished, sample(p), 0)
    return _along_path(tree, last, counts, bonus[:, None], probes)


def typical(
    tree: Tree, scores: Tensor, select: Callable[[Tensor], Tensor], active: Tensor,
    epsilon: float = 0.09, delta: float = 0.3,
) -> StepResult:  # fmt: skip
    """Typical acceptance (Medusa, section 2.3.1; PPD, section 4.5.2). **Lossy**.

    Accept a draft token if p(x) > min(epsilon, delta * exp(-H(p))) at its parent; of the accepted
    paths take the longest, and of equally long ones the likeliest. The target chooses the step's
    last token, which is sampled where the call samples; PPD takes it greedily.

    Args:
        tree: as in :func:`match`.
        scores: ``(batch, tokens, vocab)`` processed target scores after each node with a token.
        select: chooses the bonus tokens (batch,) by scores (batch, vocab).
        active: ``(batch,)`` bool, unfinished rows.
        epsilon: hard threshold, in (0, 1].
        delta: weight of the entropy threshold, in (0, 1].
    """
    tree, probes = tree.without_probes, tree.probe_counts
    root = tree.depths == 0
    rows = torch.arange(len(root), device=root.device)
    log_p = scores.log_softmax(-1)
    entropy = -torch.nan_to_num(log_p.exp() * log_p).sum(-1)
    limit = (delta * (-entropy).exp()).clamp(max=epsilon)
    parents, tokens = tree.parents.clamp(min=0), tree.tokens.masked_fill(root, 0)
    log_x = log_p[rows[:, None], parents, tokens].masked_fill(root, 0.0)
    likely = tree.valid & (log_x.exp() > limit.gather(1, parents)) | root
    accepted = ~(tree.ancestors & ~likely[:, None, :]).any(-1)
    depth = torch.where(accepted, tree.depths, -1)
    deepest = depth.amax(-1, keepdim=True)
    log_path = torch.where(tree.ancestors, log_x[:, None, :], 0.0).sum(-1)
    last = torch.where(depth == deepest, log_path, -torch.inf).argmax(-1)
    bonus = torch.where(active, select(scores[rows, last]), 0)
    return _along_path(tree, last, deepest[:, 0] + 1, bonus[:, None], probes)


def sample(p: Tensor, noise: Tensor | None = None) -> Tensor:
    """A sample of each row: what ``torch.multinomial`` draws, which makes the host wait.

    Args:
        p: ``(batch, vocab)`` probabilities.
        noise: ``(batch, vocab)`` the random numbers, Exp(1); None to draw them.

    Returns:
        ``(batch,)`` int64; -1 where probabilities are not finite.
    """
    if noise is None:
        with RUNNING:
            noise = torch.empty_like(p).exponential_()
    largest, tokens = (p / noise).max(-1)  # NaN, if there is any
    return torch.where(largest.isnan(), -1, tokens)


def _roots(targets: Tensor, probes: Tensor | None) -> StepResult:
    """The result of a step without draft tokens. ``targets``: (batch, 1)."""
    path, counts = torch.zeros_like(targets), torch.ones_like(targets[:, 0])
    root, under = path[:, 0], path[:, 0] if probes is None else probes[:, 0]
    return StepResult(path, counts, targets, under, root, targets[:, 0].clamp(min=0))


def _along_path(
    tree: Tree, last: Tensor, counts: Tensor, bonus: Tensor, probes: Tensor | None
) -> StepResult:
    """Path from the root to ``last`` and the tokens it emits. ``bonus``: (batch, 1)."""
    depth = tree.max_depth
    rows = torch.arange(len(last), device=last.device)
    on_path = tree.ancestors[rows, last]
    # Nodes on the path write their index at their depth; the others write to a discarded column.
    column = torch.where(on_path, tree.depths, depth + 1)
    index = torch.arange(tree.num_nodes, device=last.device).expand_as(column)
    path = torch.zeros(len(last), depth + 2, dtype=torch.long, device=last.device)
    path = path.scatter_(1, column, index)[:, : depth + 1]
    emitted = tree.tokens.gather(1, torch.cat([path[:, 1:], path[:, :1]], dim=1))
    emitted = emitted.scatter(1, counts[:, None] - 1, bonus)
    under = torch.zeros_like(counts) if probes is None else probes.gather(1, last[:, None])[:, 0]
    return StepResult(path, counts, emitted, under, last, bonus[:, 0].clamp(min=0))
