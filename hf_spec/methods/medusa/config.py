"""Config of a MEDUSA adapter: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework
with Multiple Decoding Heads" (2024), section 2.1.1."""

from dataclasses import dataclass
from typing import ClassVar

from hf_spec.drafting.heads import HeadsConfig


@dataclass
class MedusaConfig(HeadsConfig):
    """Heads on the final hidden state, one per future token.

    Raises:
        ValueError: if a field is invalid.
    """

    type_name: ClassVar[str] = "MEDUSA"
