"""Lets linear modules compute with copies of their weights, in the forwards of some calls."""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_spec.modeling_patches.low_rank import Factors, LowRank, merged, unmergeable
from hf_spec.modeling_patches.per_call import Changes, plain
from hf_spec.modeling_patches.weights_version import made_anew
from hf_spec.threads import Lock, cached_property


class MergedCopies:
    """Lets modules compute with copies of their weights, W + scale BA, where ``changes`` run.

    The modules keep their weights. If a module has no plain one, as it is quantized, offloaded or
    split over ranks, its output is updated instead. Copies are made when they are first needed; all
    calls share them until a weight or a factor changes or the update is deleted.
    """

    def __init__(self, update: LowRank, changes: Changes) -> None:
        self._update = update
        self._factors: dict[str, Factors] = {}
        for name, module in update.modules.items():
            factors = update.factors(name)
            if factors is not None and _copyable(module, factors):
                self._factors[name] = factors
                changes.instead(module, "forward", partial(self._forward, name))
            else:
                LowRank({name: module}, update.factors).add_to(changes)

    def _forward(self, name: str, inputs: Tensor) -> Tensor:
        module, weight = self._update.modules[name], self.weights[name]
        weight = weight.T if isinstance(module, Conv1D) else weight
        return nn.functional.linear(inputs, weight, module.bias)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The copies by name of module, in the shape of the originals."""
        modules = {name: self._update.modules[name] for name in self._factors}
        parts = [part for factors in self._factors.values() for part in factors[:2]]
        sources = [*(module.weight for module in modules.values()), *parts]

        def make() -> dict[str, Tensor]:
            return {name: merged(modules[name], fac) for name, fac in self._factors.items()}

        with _COPYING:
            return made_anew(_COPIES, self._update, sources, make)

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies; 0 while they are not needed."""
        made: dict[str, Tensor] = vars(self).get("weights", {})
        return sum(weight.nbytes for weight in made.values())


#: The copies of each update. They are not an attribute of it, so models are copied and pickled
#: without them.
_COPIES: WeakKeyDictionary[LowRank, Any] = WeakKeyDictionary()
_COPYING = Lock()


def _copyable(module: Any, factors: Factors) -> bool:
    """Whether a module only multiplies with a plain weight that is not split."""
    runs = getattr(plain(module, "forward"), "__func__", None)
    shape = factors.up.shape[0], factors.down.shape[1]
    if isinstance(module, Conv1D):
        shape = shape[::-1]
    return (
        runs in (nn.Linear.forward, Conv1D.forward)
        and not unmergeable(module)
        and tuple(module.weight.shape) == shape
    )
