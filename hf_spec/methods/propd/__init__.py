"""``propd``: trees whose unlikely draft tokens are pruned after the first layers (ProPD)."""

from hf_spec.methods.propd.adapter import ProPDAdapter, ProPDConfig, loss
from hf_spec.methods.propd.drafter import ProPDDrafter, ProPDOptions, make_drafter
from hf_spec.methods.registry import Method

METHOD = Method(
    name="propd",
    summary="heads predict the next tokens; an early head can drop unlikely ones",
    options=ProPDOptions,
    drafter=ProPDDrafter,
    make=make_drafter,
    adapter_config=ProPDConfig,
    adapter_module=ProPDAdapter,
    objective=loss,
    needs_adapter=True,
    training={"learning_rate": 3e-3, "num_train_epochs": 8},
    wraps="drafter",
)
