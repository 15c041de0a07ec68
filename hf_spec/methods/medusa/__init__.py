"""``medusa``: heads on the final hidden state predict the next tokens (Medusa)."""

from hf_spec.adapters.predicting import TRAINED
from hf_spec.drafting.heads import HeadsAdapter, heads_loss
from hf_spec.methods.medusa.config import MedusaConfig
from hf_spec.methods.medusa.drafter import MedusaDrafter
from hf_spec.methods.medusa.options import MedusaOptions
from hf_spec.methods.medusa.published import FILES, convert, wants
from hf_spec.methods.registry import Method, Published

METHOD = Method(
    name="medusa",
    summary="heads on the final hidden state predict the next tokens",
    options=MedusaOptions,
    drafter=MedusaDrafter,
    adapter_config=MedusaConfig,
    adapter_layer=HeadsAdapter,
    objective=heads_loss,
    needs_adapter=True,
    training={"learning_rate": 3e-3, "num_train_epochs": 8},
    trained=TRAINED,
    num_anchors=64,
    published=Published(wants, convert, FILES),
)
