"""Options of ``medusa``."""

from dataclasses import dataclass

from hf_spec.drafting.options import HeadOptions


@dataclass(frozen=True)
class MedusaOptions(HeadOptions):
    """Options of ``medusa`` (Medusa, sections 2.1.2 and 2.3.3), those of all strategies with heads.

    Attributes:
        tree: ``sparse``, ``chain``, or rank paths.
        max_depth: number of heads used; None for all that the adapter has.
    """
