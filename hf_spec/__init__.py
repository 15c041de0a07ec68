"""Speculative decoding inside ``generate()``, for any causal language model of Transformers.

Importing registers the strategies with ``generate()`` and the adapter types with PEFT, and changes
nothing else: a call that names no strategy runs as if hf_spec were not there.
"""

from __future__ import annotations

from hf_spec.core.stats import SpecStats
from hf_spec.core.tree import TokenTree
from hf_spec.decoding.config import SpecConfig
from hf_spec.decoding.config import note_source as _note_source
from hf_spec.decoding.loop import decode as _decode
from hf_spec.decoding.outputs import SpecGenerateOutput, last_stats
from hf_spec.decoding.validate import validate_call as _validate_call
from hf_spec.methods.active_adapter import merge_adapter, unmerge_adapter
from hf_spec.methods.base import methods as _methods
from modeling_patches import generation_mode as _generation_mode

__version__ = "0.1.0"

_generation_mode.register(
    "hf_spec_decode",
    ("assistant_strategy", "assistant_kwargs"),
    _decode,
    _validate_call,
    loaded=_note_source,
)

# Adapter configs (LayerSkipConfig, ...): each method's own, under its class name.
_configs = {
    method.adapter_config.__name__: method.adapter_config
    for method in _methods().values()
    if method.adapter_config is not None
}
globals().update(_configs)


def strategies() -> dict[str, str]:
    """Every strategy's name with one line about it."""
    return {name: method.summary for name, method in _methods().items()}


__all__ = [
    "SpecConfig",
    "SpecGenerateOutput",
    "SpecStats",
    "TokenTree",
    "last_stats",
    "merge_adapter",
    "strategies",
    "unmerge_adapter",
    *_configs,
]
