"""Models whose parameters FSDP2 or DeepSpeed's ZeRO stage 3 splits over all processes."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hf_spec.modeling_patches.modules import decoder_layers


def gathered(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
    """Within the context these parameters are whole; only ZeRO stage 3's are changed."""
    parts = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not parts:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(parts)


def gathered_state(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """A model's state dict, in which parameters of ZeRO stage 3 are copies, gathered one by one, in
    processes that keep them; all processes call this."""
    state = model.state_dict()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "ds_id"):
            with gathered([parameter]):
                if keep:
                    state[name] = parameter.detach().cpu().clone()
    return state


@contextmanager
def whole_root(model: Any) -> Iterator[None]:
    """Within the context the weights outside of decoder layers are whole in every process.

    Drafting reads embeddings, heads and adapters outside of the forwards, which would gather them.
    Layers are still gathered one after the other. The model, a ``PeftModel``, must have been
    trained for a step.
    """
    if isinstance(model, FSDPModule):
        # Decoding calls the base inside, so that no forward of this module reshards it.
        model.unshard()
        try:
            yield
        finally:
            model.reshard()
        return
    layers = set(decoder_layers(model).parameters())
    root: list[Any] = [parameter for parameter in model.parameters() if parameter not in layers]
    with gathered(root):
        # Forwards free what they have used unless it has another user.
        for parameter in root:
            parameter.ds_active_sub_modules.add(whole_root)
        try:
            yield
        finally:
            for parameter in root:
                parameter.ds_active_sub_modules.discard(whole_root)
