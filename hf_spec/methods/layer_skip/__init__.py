"""``layer_skip``: draft with the model itself, leaving out layers (Draft & Verify)."""

from hf_spec.methods.layer_skip.adapter import LayerSkipAdapter, LayerSkipConfig, loss
from hf_spec.methods.layer_skip.drafter import LayerSkipDrafter
from hf_spec.methods.layer_skip.options import LayerSkipOptions
from hf_spec.methods.registry import Method

METHOD = Method(
    name="layer_skip",
    summary="the model drafts for itself with some layers left out; needs no training",
    options=LayerSkipOptions,
    drafter=LayerSkipDrafter,
    adapter_config=LayerSkipConfig,
    adapter_module=LayerSkipAdapter,
    objective=loss,
    # For low-rank updates of the drafting path; the number of epochs is that of appendix F.
    training={"learning_rate": 1e-3, "num_train_epochs": 3},
    num_anchors=16,
)
