"""``mtp``: draft with the layers for multi-token prediction of the model's own checkpoint."""

from hf_spec.methods.mtp.drafter import MtpDrafter, MtpOptions
from hf_spec.methods.mtp.weights import mtp_layers
from hf_spec.methods.registry import Method

METHOD = Method(
    name="mtp",
    summary="layers for multi-token prediction of the model's own checkpoint; nothing to train",
    options=MtpOptions,
    drafter=MtpDrafter,
    included=mtp_layers,
)
