"""``space``: the model, fine-tuned to guess several tokens at once, corrects itself (SPACE)."""

from hf_spec.adapters.predicting import TRAINED
from hf_spec.methods.registry import Method
from hf_spec.methods.space.adapter import SpaceAdapter
from hf_spec.methods.space.config import SpaceConfig
from hf_spec.methods.space.drafter import SpaceDrafter
from hf_spec.methods.space.objective import loss
from hf_spec.methods.space.options import SpaceOptions

METHOD = Method(
    name="space",
    summary="the model, fine-tuned to guess several tokens at once, verifies its own guesses",
    options=SpaceOptions,
    drafter=SpaceDrafter,
    adapter_config=SpaceConfig,
    adapter_layer=SpaceAdapter,
    objective=loss,
    needs_adapter=True,
    # Section 4.1 and table 2. What is kept is the best model: one that repeats itself is guessed
    # easily, so that tau does not tell.
    training={
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
    },
    trained=TRAINED,
    num_anchors=8,
)
