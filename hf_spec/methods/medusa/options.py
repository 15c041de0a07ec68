"""Options of ``medusa``."""

from dataclasses import dataclass

from hf_spec.methods.head_options import HeadOptions


@dataclass(frozen=True)
class MedusaOptions(HeadOptions):
    """Options of ``medusa``: those of all strategies with heads."""
