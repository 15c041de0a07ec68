"""What Transformers calls the KV cache: ``cache`` from 5.24 on, ``past_key_values`` before.

The name is that of the argument of ``generate`` and of models' forwards, of the field of their
outputs, and of the entry of ``model_kwargs``.
"""

from transformers.generation import GenerateDecoderOnlyOutput

#: The newest name that this Transformers knows; older ones are deprecated there.
CACHE = "cache" if hasattr(GenerateDecoderOnlyOutput, "cache") else "past_key_values"
