"""``dspark``: a block drafter whose drafted tokens change the predictions of those after them.

"DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation" (2026). The
block is that of DFlash, with a prediction at the anchor's slot, too; a Markov head adds to each
slot's logits what the token before it says (:mod:`hf_spec.predict.block_heads`).
"""

from dataclasses import dataclass
from typing import ClassVar

from hf_spec.draft.options import DraftOptions
from hf_spec.methods.registry import Method
from hf_spec.predict.blocks import BlockAdapter, BlockConfig, BlockPredictor
from hf_spec.predict.losses import block_loss


@dataclass
class DSparkConfig(BlockConfig):
    """A :class:`DFlashConfig` that has a Markov head by default, and predicts from the anchor."""

    type_name: ClassVar[str] = "DSPARK"

    block_size: int = 7
    sample_from_anchor: bool = True
    markov_rank: int = 128


METHOD = Method(
    name="dspark",
    summary="a block predicted in one forward, and a Markov head that chains its tokens",
    options=DraftOptions,
    predictor=BlockPredictor,
    adapter_config=DSparkConfig,
    adapter_module=BlockAdapter,
    objective=block_loss,
    needs_adapter=True,
    training={"learning_rate": 1e-3, "num_train_epochs": 8, "optim": "muon"},
    num_anchors=32,
    formats="hf_spec.tools.formats.blocks",
)
