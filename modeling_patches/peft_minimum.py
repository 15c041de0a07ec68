"""Lets Transformers' adapter methods work with the PEFT that hf_spec is tested with.

Transformers 5.24 refuses every PEFT before 0.22 in ``load_adapter``, ``add_adapter`` and
``set_adapter``, and no such PEFT is released yet; they work with 0.21.
"""

from __future__ import annotations

from transformers.integrations import peft as integration

#: The oldest PEFT that hf_spec supports; setup.cfg requires it.
OLDEST = "0.21.0"


def accept() -> None:
    """Make :data:`OLDEST` the minimum of Transformers' integration of PEFT."""
    integration.MIN_PEFT_VERSION = OLDEST
