"""What ``transformers serve`` lacks: requests in turns, errors with a reason, a stop in time.

Imports the packages of ``transformers[serving]``.
"""

from modeling_patches.serving.patches import patch
from modeling_patches.serving.turns import Generation

__all__ = ["Generation", "patch"]
