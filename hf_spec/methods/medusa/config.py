"""What a MEDUSA adapter holds: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework
with Multiple Decoding Heads" (2024), section 2.1.1."""

from dataclasses import dataclass
from typing import ClassVar

from hf_spec.drafting.heads import HeadsConfig


@dataclass
class MedusaConfig(HeadsConfig):
    """Config of a MEDUSA adapter.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    type_name: ClassVar[str] = "MEDUSA"
