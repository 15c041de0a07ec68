"""The LAYER_SKIP adapter: no weights, its config says it all. Importing this registers the type."""

from hf_spec.methods.layer_skip.config import LayerSkipConfig
from hf_spec.methods.peft_bridge import SpecAdapterLayer, register


class LayerSkipAdapter(SpecAdapterLayer):
    """Holds nothing but a one-number marker per adapter."""


register(LayerSkipConfig, LayerSkipAdapter)
