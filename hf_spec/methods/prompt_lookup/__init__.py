"""``prompt_lookup``: n-gram matches in prompt and output, several continuations in one tree."""

from hf_spec.methods.prompt_lookup.drafter import PromptLookupDrafter
from hf_spec.methods.prompt_lookup.options import PromptLookupOptions
from hf_spec.methods.registry import Method

METHOD = Method(
    name="prompt_lookup",
    summary="n-gram matches in prompt and output form a tree; nothing to train",
    options=PromptLookupOptions,
    drafter=PromptLookupDrafter,
)
