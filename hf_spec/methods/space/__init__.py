"""``space``: mask tokens with low-rank updates of their own (SPACE; Samragh et al., 2025)."""

from hf_spec.methods.registry import Method
from hf_spec.methods.space.adapter import SpaceAdapter, SpaceConfig, loss
from hf_spec.methods.space.drafter import SpaceDrafter, SpaceOptions

METHOD = Method(
    name="space",
    summary="mask tokens with low-rank updates of their own predict the next tokens",
    options=SpaceOptions,
    drafter=SpaceDrafter,
    adapter_config=SpaceConfig,
    adapter_module=SpaceAdapter,
    objective=loss,
    needs_adapter=True,
    training={"num_train_epochs": 2},
    num_anchors=32,
)
