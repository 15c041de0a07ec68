"""``dflash``: one forward of a small decoder predicts a block of tokens.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (2026). The decoder reads
hidden states of some layers of the base at all committed tokens; see
:mod:`hf_spec.predict`.
"""

from dataclasses import dataclass
from typing import ClassVar

from hf_spec.draft.options import DraftOptions
from hf_spec.methods.registry import Method
from hf_spec.predict.blocks import BlockAdapter, BlockConfig, BlockPredictor
from hf_spec.predict.losses import block_loss


@dataclass
class DFlashConfig(BlockConfig):
    """Layers that predict a block of tokens from the base's hidden states."""

    type_name: ClassVar[str] = "DFLASH"


METHOD = Method(
    name="dflash",
    summary="a small decoder predicts a block of tokens in one forward",
    options=DraftOptions,
    predictor=BlockPredictor,
    adapter_config=DFlashConfig,
    adapter_module=BlockAdapter,
    objective=block_loss,
    needs_adapter=True,
    training={"learning_rate": 1e-3, "num_train_epochs": 8, "optim": "muon"},
    num_anchors=32,
    formats="hf_spec.tools.formats.blocks",
)
