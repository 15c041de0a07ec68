"""``eagle3``: a small decoder on the model's hidden states (EAGLE-3; Li et al., 2025)."""

from hf_spec.methods.eagle3.adapter import Eagle3Adapter, Eagle3Config
from hf_spec.methods.eagle3.drafter import Eagle3Drafter, Eagle3Options
from hf_spec.methods.eagle3.network import loss
from hf_spec.methods.registry import Method

METHOD = Method(
    name="eagle3",
    summary="a small decoder on the model's hidden states drafts token by token (EAGLE-3)",
    options=Eagle3Options,
    drafter=Eagle3Drafter,
    adapter_config=Eagle3Config,
    adapter_module=Eagle3Adapter,
    objective=loss,
    needs_adapter=True,
    training={"learning_rate": 1e-3, "num_train_epochs": 4},
    num_anchors=32,
    formats="hf_spec.formats.eagle3",
)
