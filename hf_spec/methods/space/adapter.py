"""The SPACE adapter's parameters, and its changes to the model.

While an adapter that fine-tunes the model is active, every call of the model uses its updates, as
with LoRA.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.low_rank import LowRankLayer, fresh_factors
from hf_spec.methods.space.config import SpaceConfig
from modeling_patches.support import check_unquantised
from modeling_patches.weights import input_features

#: Standard deviation of initial mask tokens ("normal distribution", section 4.1).
INIT_STD = 0.02


class SpaceAdapter(LowRankLayer):
    """Mask tokens and the factors of low-rank updates, which are attached unless gated.

    ``masks`` is ``(k, hidden)``, ``(1, hidden)`` if shared; there is none if masks are noise.
    """

    def build(self, config: SpecPeftConfig, model: Any) -> Mapping[str, Tensor]:
        assert isinstance(config, SpaceConfig)
        count = 1 if config.shared_mask else config.num_mask_tokens
        _, hidden = input_features(model)
        factors = fresh_factors(config.modules(model), config.rank)
        learned = config.masks == "learned"
        masks = {"masks": torch.randn(count, hidden) * INIT_STD} if learned else {}
        return {**masks, **factors, **config.fresh_shared(model, config.num_mask_tokens)}

    def connect(self, adapter_name: str, config: SpecPeftConfig, model: nn.Module) -> None:
        assert isinstance(config, SpaceConfig)
        gated = config.update == "gated"
        modules = config.modules(model)
        self.add_updates(adapter_name, modules, config.rank, config.alpha, only_if_active=not gated)
        if modules and not gated:
            self.updates[adapter_name].attach()

    def disconnect(self, keep_merged: bool = False) -> None:
        if not keep_merged:
            self._take_apart()
        for update in self.updates.values():
            update.detach()
        self.updates = {}

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        wanted = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        active: Any = self.active_adapters
        if wanted != list(active):
            self._take_apart()
        super().set_adapter(adapter_names, inference_mode)

    def enable_adapters(self, enabled: bool) -> None:
        if not enabled:
            self._take_apart()
        super().enable_adapters(enabled)

    def delete_adapter(self, adapter_name: str) -> None:
        if adapter_name in self.merged_adapters:
            self._take_apart()
        super().delete_adapter(adapter_name)

    def merge_into(
        self, model: nn.Module, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> None:
        """Add the low-rank updates of the active adapter to the base's weights; mask tokens stay.

        Raises:
            ValueError: no active adapter can be merged, or the weights cannot be changed.
        """
        here = self._active_updates()
        if not here and adapter_names is None:
            raise ValueError(
                "no active SPACE adapter can be merged: only updates of the model (update='lora') "
                "go into its weights. Activate one with set_adapter, or use unload() to take the "
                "adapter off."
            )
        names = here if adapter_names is None else list(adapter_names)
        if len(here) != 1 or names != here:
            raise ValueError(
                f"merging takes the one active SPACE adapter with update='lora', got {names} with "
                f"{', '.join(here) or 'none'} active. Choose it with set_adapter first."
            )
        check_unquantised(model, "merging", "to leave the adapter unmerged")
        self.updates[here[0]].merge(model, check_finite=safe_merge)
        self.merged_adapters = here

    def unmerge_from(self, model: nn.Module) -> None:
        self._take_apart()

    def mergeable(self) -> list[str]:
        return [name for name in self._active_updates() if name not in self.merged_adapters]

    def _active_updates(self) -> list[str]:
        """Active adapters with low-rank updates of the model."""
        active: Any = () if self.disable_adapters else self.active_adapters
        return [name for name in active if name in self.updates and self.updates[name].attached]

    def _take_apart(self) -> None:
        """Undo a merge, which is only valid while the merged adapter is active."""
        for name in self.merged_adapters:
            self.updates[name].unmerge()
        self.merged_adapters = []
