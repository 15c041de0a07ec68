"""``prompt_lookup``: n-gram matches in prompt and output, several continuations in one tree."""

from hf_spec.methods.base import Method
from hf_spec.methods.prompt_lookup.drafter import PromptLookupDrafter
from hf_spec.methods.prompt_lookup.options import PromptLookupOptions

METHOD = Method(
    name="prompt_lookup",
    summary="n-gram matches in prompt and output, merged into a tree; nothing to train",
    options=PromptLookupOptions,
    drafter=PromptLookupDrafter,
)
