"""``bita``: learned mask tokens predict the next tokens in the verifying forward (BiTA)."""

from hf_spec.methods.base import Method
from hf_spec.methods.bita import adapter as adapter  # registers BITA with PEFT
from hf_spec.methods.bita.config import BitaConfig
from hf_spec.methods.bita.drafter import BitaDrafter
from hf_spec.methods.bita.options import BitaOptions

METHOD = Method(
    name="bita",
    summary="learned mask tokens predict the next tokens in the verifying forward; output unchanged",
    options=BitaOptions,
    drafter=BitaDrafter,
    adapter_config=BitaConfig,
    needs_adapter=True,
    # Section 4.1.
    training={
        "learning_rate": 3e-2,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 16,
        "num_train_epochs": 4,
    },
)
