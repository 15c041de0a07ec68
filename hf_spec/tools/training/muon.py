"""Muon for the matrices of layers beside AdamW for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Muon, Optimizer

#: Learning rate of Muon, as a multiple of the other one.
RATE = 4.0


def layer_matrices(model: nn.Module) -> set[Tensor]:
    """What is trained of a model's linear maps, but for output embeddings."""
    maps = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {
        module.weight
        for name, module in maps.items()
        if module.weight.requires_grad and not name.endswith("lm_head")
    }


class WithMuon(Optimizer):
    """An optimizer some of whose parameters are stepped by `torch.optim.Muon` instead (Jordan et
    al., 2024), with updates of equal size in matrices of all shapes (Liu et al., "Muon is Scalable
    for LLM Training", 2025).

    Args:
        other: the optimizer of all parameters.
        matrices: those that Muon takes over.
    """

    def __init__(self, other: Optimizer, matrices: Iterable[Tensor]):
        chosen, groups = set(matrices), []
        for group in other.param_groups:
            own = [one for one in group["params"] if one in chosen]
            group["params"] = [one for one in group["params"] if one not in chosen]
            rate, decay = RATE * group["lr"], group["weight_decay"]
            groups.append({"params": own, "lr": rate, "weight_decay": decay})
        self.parts = (other, Muon(groups, adjust_lr_fn="match_rms_adamw"))
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        groups = iter(self.param_groups)
        for part in self.parts:  # whose groups and state a loaded state replaces
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state
            part.step()
        return loss
