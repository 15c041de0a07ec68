"""Additions to ``transformers serve``: requests in turns, errors with reasons, timely stops.

It imports the packages of ``transformers[serving]``.
"""

from modeling_patches.serving.patches import patch
from modeling_patches.serving.turns import Generation

__all__ = ["Generation", "patch"]
