"""``medusa``: heads on the hidden state of the last accepted token predict the next tokens.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads"
(2024), section 2.1.
"""

from dataclasses import dataclass
from typing import ClassVar

from hf_spec.draft.options import DraftOptions
from hf_spec.methods.registry import Method
from hf_spec.predict.losses import heads_loss
from hf_spec.predict.table import HeadPredictor, HeadsAdapter, HeadsConfig


@dataclass
class MedusaConfig(HeadsConfig):
    """Heads on the final hidden state, one per future token."""

    type_name: ClassVar[str] = "MEDUSA"


@dataclass(frozen=True)
class MedusaOptions(DraftOptions):
    """Options of ``medusa`` (Medusa, sections 2.1.2 and 2.3.3), which are those of all strategies.

    Attributes:
        tree: ``sparse``: 15 draft tokens, most of them under likely ones. ``chain``: each head's
            likeliest token only, as in blockwise parallel decoding. Or what :class:`DraftOptions`
            says; rank paths are Medusa's choices.
    """


METHOD = Method(
    name="medusa",
    summary="heads on the final hidden state predict the next tokens",
    options=MedusaOptions,
    predictor=HeadPredictor,
    adapter_config=MedusaConfig,
    adapter_module=HeadsAdapter,
    objective=heads_loss,
    needs_adapter=True,
    training={"learning_rate": 3e-3, "num_train_epochs": 8},
    formats="hf_spec.tools.formats.papers",
)
