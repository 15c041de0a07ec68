"""Speculative decoding inside ``generate()``, for any causal language model of Transformers.

Importing registers the strategies with ``generate()`` and the adapter types with PEFT, and changes
nothing else: a call that names no strategy runs as if hf_spec were not there.
"""

from __future__ import annotations

import sys as _sys
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from hf_spec.tools.bench.runner import benchmark

__version__ = "0.2.0"

if _find_spec("hf_spec.modeling_patches") is None:
    # Python runs in a clone, whose folder hides the installed package: there it lies beside this.
    __path__.append(str(_Path(__file__).resolve().parents[1]))

#: Whether ``hf-spec`` has been started, whose help does not wait for PyTorch: its commands run this
#: file once more (`hf_spec.tools.cli.common.load_library`).
_waits = (
    bool(_sys.argv)
    and _Path(_sys.argv[0]).name in ("hf-spec", "hf-spec.exe", "hf-spec-script.py")
    and "hf_spec.tools.cli.main" not in _sys.modules
)
if not _waits:
    from hf_spec.adapters.loading import merge_adapter, unmerge_adapter
    from hf_spec.core.shapes import TokenTree
    from hf_spec.core.stats import SpecStats
    from hf_spec.core.tree import Tree
    from hf_spec.decoding.batches import generate_batch as _generate_batch
    from hf_spec.decoding.batches import init_continuous_batching as _init_continuous_batching
    from hf_spec.decoding.call import SpecConfig, warm_up
    from hf_spec.decoding.call import check_arguments as _check_arguments
    from hf_spec.decoding.call import note_source as _note_source
    from hf_spec.decoding.call import validate_call as _validate_call
    from hf_spec.decoding.loop import SpecGenerateOutput, generate, last_stats
    from hf_spec.decoding.loop import decode as _decode
    from hf_spec.decoding.sharing import StepSharing, share_steps
    from hf_spec.draft.drafter import Drafter
    from hf_spec.draft.options import AUTO as _AUTO
    from hf_spec.draft.options import DraftOptions
    from hf_spec.draft.predictor import Predictor
    from hf_spec.draft.rollouts import RolloutHistory
    from hf_spec.methods.bita import BitaConfig
    from hf_spec.methods.dflash import DFlashConfig
    from hf_spec.methods.dspark import DSparkConfig
    from hf_spec.methods.eagle3 import Eagle3Config
    from hf_spec.methods.layer_skip import LayerSkipConfig
    from hf_spec.methods.medusa import MedusaConfig
    from hf_spec.methods.mtp import MtpConfig
    from hf_spec.methods.ppd import PPDConfig
    from hf_spec.methods.propd import ProPDConfig
    from hf_spec.methods.registry import Method, register_method
    from hf_spec.methods.registry import methods as _methods
    from hf_spec.methods.space import SpaceConfig
    from hf_spec.methods.token_recycling import TokenRecyclingConfig, save_table
    from hf_spec.modeling_patches import generation_mode as _generation_mode
    from hf_spec.modeling_patches.generation_mode import warn_of_newer as _warn_of_newer
    from hf_spec.target.packed_weights import pack_weights
    from hf_spec.target.recording import record

    _warn_of_newer()
    _generation_mode.register(
        _generation_mode.Mode(
            "hf_spec_decode",
            ("assistant_strategy", "assistant_kwargs"),
            _decode,
            _validate_call,
            loaded=_note_source,
            custom=generate,
            default=_AUTO,
            decode_batch=_generate_batch,
            batch_requests=_init_continuous_batching,
            check_arguments=_check_arguments,
        )
    )
    _methods()  # registers their adapter types with PEFT

    def __getattr__(name: str) -> _Any:
        # The one name of a tool, which takes a second to import: when it is first asked for.
        if name == "benchmark":
            from hf_spec.tools.bench.runner import benchmark

            globals()[name] = benchmark
            return benchmark
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    def strategies() -> dict[str, str]:
        """Every strategy's name with one line about it."""
        return {name: method.summary for name, method in _methods().items()}


__all__ = [
    "BitaConfig",
    "DFlashConfig",
    "DSparkConfig",
    "Drafter",
    "Eagle3Config",
    "LayerSkipConfig",
    "MedusaConfig",
    "Method",
    "MtpConfig",
    "PPDConfig",
    "Predictor",
    "ProPDConfig",
    "RolloutHistory",
    "SpaceConfig",
    "SpecConfig",
    "SpecGenerateOutput",
    "SpecStats",
    "StepSharing",
    "DraftOptions",
    "TokenRecyclingConfig",
    "TokenTree",
    "Tree",
    "benchmark",
    "generate",
    "last_stats",
    "merge_adapter",
    "pack_weights",
    "record",
    "register_method",
    "save_table",
    "share_steps",
    "strategies",
    "unmerge_adapter",
    "warm_up",
]
