"""``ppd``: learned prompt tokens predict the next tokens in the verifying forward (PPD)."""

from hf_spec.methods.ppd.adapter import PPDAdapter, PPDConfig, loss
from hf_spec.methods.ppd.drafter import PPDDrafter, PPDOptions
from hf_spec.methods.ppd.dynamic_tree import make_dynamic_tree as make_dynamic_tree
from hf_spec.methods.registry import Method

METHOD = Method(
    name="ppd",
    summary="learned prompt tokens, distilled from the model, predict the next tokens",
    options=PPDOptions,
    drafter=PPDDrafter,
    adapter_config=PPDConfig,
    adapter_module=PPDAdapter,
    objective=loss,
    needs_adapter=True,
    training={"learning_rate": 1e-2, "num_train_epochs": 8},
    num_anchors=32,
    formats="hf_spec.tools.formats.prompts",
)
