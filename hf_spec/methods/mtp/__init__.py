"""``mtp``: draft with the layers for multi-token prediction of the model's own checkpoint."""

from hf_spec.drafting.forward_drafter import GrowOptions
from hf_spec.methods.mtp.adapter import MtpAdapter, MtpConfig, loss
from hf_spec.methods.mtp.drafter import MtpDrafter
from hf_spec.methods.mtp.weights import mtp_layers
from hf_spec.methods.registry import Method

METHOD = Method(
    name="mtp",
    summary="the checkpoint's own layers for multi-token prediction, as they are or fine-tuned",
    options=GrowOptions,
    drafter=MtpDrafter,
    adapter_config=MtpConfig,
    adapter_module=MtpAdapter,
    objective=loss,
    included=mtp_layers,
    # The layers are trained already, so that rates of new ones would undo what they know.
    training={"learning_rate": 1e-4, "num_train_epochs": 2},
    num_anchors=32,
)
