"""``bita``: learned mask tokens predict the next tokens in the verifying forward (BiTA)."""

from hf_spec.adapters.predicting import TRAINED
from hf_spec.methods.bita.adapter import BitaAdapter
from hf_spec.methods.bita.config import BitaConfig
from hf_spec.methods.bita.drafter import BitaDrafter
from hf_spec.methods.bita.objective import loss
from hf_spec.methods.bita.options import BitaOptions
from hf_spec.methods.registry import Method

METHOD = Method(
    name="bita",
    summary="learned mask tokens predict the next tokens in the verifying forward",
    options=BitaOptions,
    drafter=BitaDrafter,
    adapter_config=BitaConfig,
    adapter_layer=BitaAdapter,
    objective=loss,
    needs_adapter=True,
    # Section 4.1; its batch of 128 has one anchor per sequence.
    training={"learning_rate": 3e-2, "num_train_epochs": 8},
    trained=TRAINED,
    num_anchors=32,
)
