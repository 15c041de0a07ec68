"""A model's weights: where they are, what they are, whether they have changed; and the ranks that
share them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import (
    AuxiliaryTrainingWrapper,
    ModulesToSaveWrapper,
    TrainableTokensWrapper,
)
from torch import Tensor, distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

# -- A model's weights as the model uses them, whatever PEFT and accelerate have made of them ------
#
# PEFT puts modules of its own in the place of embeddings: of a LoRA, of `modules_to_save`, of
# `trainable_token_indices`. These pass on some attributes of the module inside, and compute others
# anew at each access, such as a copy of the whole weight. So nothing reads attributes of what
# `get_input_embeddings` and `get_output_embeddings` return, but asks here.
#
# A weight that accelerate has offloaded has no data outside its module's forward: a hook brings it
# to the device that the module computes on, and drops it afterwards. So modules are called as
# always, and what needs a weight itself gets it from here.

#: Attributes with the numbers of input and output features: of torch's linear module and most
#: quantized ones, of Transformers' `Conv1D`, and of GPTQ.
_FEATURES = (("in_features", "out_features"), ("nx", "nf"), ("infeatures", "outfeatures"))


def features(module: nn.Module) -> tuple[int, int] | None:
    """Numbers of input and output features of a linear module; None for other modules."""
    for names in _FEATURES:
        inputs, outputs = (getattr(module, name, None) for name in names)
        if isinstance(inputs, int) and isinstance(outputs, int):
            return inputs, outputs
    return None


# -- modules with PEFT's adapters ----------------------------------------------------------------


def _layers(module: Any) -> Iterator[Any]:
    """A module, and what is inside it as long as that is PEFT's wrapper of another one."""
    while module is not None:
        yield module
        if isinstance(module, ModulesToSaveWrapper) and not module.disable_adapters:
            names = [name for name in module.active_adapters if name in module.modules_to_save]
            module = module.modules_to_save[names[0]] if names else module.original_module
        elif isinstance(module, TrainableTokensWrapper):
            module = module.token_adapter
        elif isinstance(module, AuxiliaryTrainingWrapper):
            module = module.original_module
        else:
            module = getattr(module, "base_layer", None)


def in_use(module: Any) -> Any:
    """The module inside PEFT's wrappers that the model uses: of its shape, type and device."""
    for layer in _layers(module):
        module = layer
    return module


def is_updated(module: Any) -> bool:
    """Whether active adapters of PEFT change what :func:`in_use` computes."""
    return any(
        isinstance(layer, BaseTunerLayer)
        and not layer.disable_adapters
        and not layer.merged
        and not layer._get_available_adapters().isdisjoint(layer.active_adapters)
        for layer in _layers(module)
    )


def switches(modules: Iterable[Any]) -> Hashable:
    """Which adapters of PEFT are active in these modules, and how strong they are."""
    return tuple(
        (
            part.disable_adapters, tuple(part.active_adapters), tuple(part.merged_adapters),
            repr(getattr(part, "scaling", None)),
        )
        for part in modules if isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper))
    )  # fmt: skip


# -- offloaded weights ---------------------------------------------------------------------------


class Placement(NamedTuple):
    """Where a module computes, and in which dtype its weight is."""

    device: torch.device
    dtype: torch.dtype


def placement(model: Any) -> Placement:
    """The device and dtype of a model's input embeddings; the meta device if the model has no
    weights, as opposed to offloaded ones."""
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    weight = getattr(in_use(embeddings), "weight", None)
    if weight is not None:
        return Placement(device_of(embeddings), weight.dtype)
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if weight is not None:
        return Placement(weight.device, weight.dtype)
    return Placement(torch.device("cpu"), torch.get_default_dtype())


def device_of(module: Any) -> torch.device:
    """The device that a module with weights computes on."""
    module = in_use(module)
    tensors = chain(module.parameters(), module.buffers(), [torch.empty(0, device="cpu")])
    device = next(tensors).device  # torch's own quantized modules, on CPUs, show no tensor
    for hook in _hooks(module) if device.type == "meta" else ():
        place = getattr(hook, "execution_device", None)
        if place is not None:
            return torch.device(place)
    return device


@contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """Within the block, the module's own weights have data; tensors taken from it keep it."""
    hooks: list[Any] = []
    if any(tensor.is_meta for tensor in chain(module.parameters(False), module.buffers(False))):
        hooks = [hook for hook in _hooks(module) if getattr(hook, "offload", False)]
    for hook in hooks:
        hook.pre_forward(module)
    try:
        yield
    finally:
        for hook in hooks:
            hook.post_forward(module, None)


def _hooks(module: Any) -> tuple[Any, ...]:
    """accelerate's hooks of a module."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


# -- a model's embeddings ------------------------------------------------------------------------


def input_features(model: Any) -> tuple[int, int]:
    """Number of tokens that have input embeddings, and width of these."""
    module = in_use(model.get_input_embeddings())
    if isinstance(module, nn.Embedding):  # whose weight may be packed, or a part of it
        return module.num_embeddings, module.embedding_dim
    tokens, width = module.weight.shape
    return tokens, width


def output_features(model: Any) -> tuple[int, int]:
    """Width of the hidden states that logits are computed from, and the number of logits.

    Raises:
        ValueError: the model has no linear output embeddings.
    """
    module = in_use(model.get_output_embeddings())
    found = None if module is None else features(module)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} has no linear output embeddings, whose input the heads read: "
            "choose another method."
        )
    return found


def vocabulary(model: Any) -> int:
    """Number of tokens that a model both reads and computes logits for: it can be shown these as
    drafts, and no others."""
    embeddings, head = in_use(model.get_input_embeddings()), in_use(model.get_output_embeddings())
    read: int = (
        embeddings.num_embeddings
        if isinstance(embeddings, nn.Embedding)
        else model.config.get_text_config(decoder=True).vocab_size
    )
    found = None if head is None else features(head)
    return read if found is None else min(read, found[1])


def output_dtype(model: Any) -> torch.dtype | None:
    """The dtype of the output embeddings' weight; None if they have none, or a quantized one."""
    weight = getattr(in_use(model.get_output_embeddings()), "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    return weight.dtype


def output_weight(model: Any) -> Tensor | None:
    """The weight ``(vocab, hidden)`` of the output embeddings, maybe quantized; None if they have
    none. Values that adapters change are not in it: see :func:`is_updated`."""
    return _read(in_use(model.get_output_embeddings()), "weight")


@torch.no_grad()
def output_bias(model: Any) -> Tensor | None:
    """What the output embeddings add to every row of logits, ``(vocab,)``; None for nothing."""
    module = model.get_output_embeddings()
    if is_updated(module):
        # Some adapters drop a bias, others add one.
        hidden, _ = output_features(model)
        dtype = output_dtype(model) or placement(model).dtype
        made: Tensor = module(torch.zeros(1, hidden, dtype=dtype, device=device_of(module)))
        return made[0]
    return _read(in_use(module), "bias")


def _read(module: Any, name: str) -> Tensor | None:
    with loaded(module):
        tensor = getattr(module, name, None)
        return tensor if isinstance(tensor, Tensor) else None


# -- names in checkpoints ------------------------------------------------------------------------


def conversions(model: Any) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """How Transformers renames tensors of the model's checkpoints, and makes others of them."""
    known = get_model_conversion_mapping(model)
    return (
        [one for one in known if isinstance(one, WeightRenaming)],
        [one for one in known if isinstance(one, WeightConverter)],
    )


def renamed(model: Any) -> Callable[[str], str]:
    """What a tensor of the model's checkpoint is called in the model, by its name there."""
    rules, own = conversions(model), (model.base_model_prefix, model.state_dict())
    return lambda name: rename_source_key(name, *rules, *own)[0]


# -- Notices that tensors were replaced or written to, so that what was made of them is made anew --
#
# A tensor's version counter is not enough: writes through `.data`, as PEFT merges, and steps of
# torch's fused optimizers do not change it. Steps of optimizers are counted here.

#: The last step of an optimizer that wrote to each storage, by its address.
_written: dict[int, int] = {}
_steps = itertools.count()


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return  # a compiled step counts as a write
    step, groups = next(_steps), optimizer.param_groups
    every = (x for group in groups for x in group["params"])
    trained = [x for x in every if x.grad is not None and type(x.data) is Tensor]
    _written.update((x.untyped_storage().data_ptr(), step) for x in trained)


register_optimizer_step_post_hook(_note_step)

Made = TypeVar("Made")


@torch.no_grad()
def weights_version(tensors: Sequence[Tensor]) -> Hashable:
    """A key that changes when one of these plain tensors is replaced or written to.

    It consists of addresses, version counters, steps of optimizers, and at least one entry of each
    row and column. A write that changes none of these is not noticed: one to single entries through
    `.data`. The host waits for each device once. Whoever keeps the key must look whether the
    tensors' memory has been freed, or others could get its addresses.
    """
    places = tuple(
        (
            x.data_ptr(), x.dtype, x.device, None if x.is_inference() else x._version,
            _written.get(x.untyped_storage().data_ptr()),
        )
        for x in tensors
    )  # fmt: skip
    some: dict[torch.device, list[Tensor]] = {}
    for x in tensors:
        entries = x.detach().reshape(-1)[:: _stride(x.shape)]
        some.setdefault(x.device, []).append(entries.float())
    # Bytes, since NaN does not equal itself.
    return places, tuple(torch.cat(parts).cpu().numpy().tobytes() for parts in some.values())


@functools.cache
def _stride(shape: torch.Size) -> int:
    """The largest step through the entries of a shape that meets each row and each column."""
    columns = shape[-1] if len(shape) > 1 else 1
    rows = math.prod(shape) // max(columns, 1)
    most = max(min(rows, columns - 1), 1)
    return next(step for step in range(most, 0, -1) if math.gcd(step, columns) == 1)


def made_anew(
    store: MutableMapping[Any, Any], owner: Any, tensors: Sequence[Tensor],
    make: Callable[[], Made], others: Any = None,
) -> Made:  # fmt: skip
    """What ``store`` has for an owner; made anew where these tensors, or what else it depends on,
    have changed. The tensors' memory is not held: it is freed where a model moves."""
    key = weights_version(tensors), others
    known = store.get(owner)
    if known is None or known[0] != key or any(one.expired() for one in known[1]):
        known = None
        store.pop(owner, None)  # frees it before what takes its place is allocated
        with torch.inference_mode(False), torch.no_grad():  # training may use it later
            # One without entries has no address: DeepSpeed's shards are such between forwards.
            places = [StorageWeakRef(x.untyped_storage()) for x in tensors if x.numel()]
            known = store[owner] = key, places, make()
    return known[2]


# --------------------------------------------------------------------------------------------------
# Weights of checkpoints that are stored as 8-bit floats with a scale for each block of them, as
# DeepSeek-V3 is published ("DeepSeek-V3 Technical Report", 2024, section 3.3).

#: What follows a tensor's name in that of its scales.
SCALES = "_scale_inv"
FP8 = torch.float8_e4m3fn
#: Rows and columns of a block.
BLOCK = 128


def dequantized(name: str, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a weight: its values times the scales of their blocks.

    Args:
        weight: ``(rows, columns)`` float8_e4m3fn
        scales: ``(rows / 128, columns / 128)``, rounded up.

    Raises:
        ValueError: there is not one scale per block.
    """
    check_scales(name, weight.shape, scales.shape)
    rows, columns = weight.shape
    found = torch.empty(rows, columns, dtype=dtype)
    for block, row in enumerate(scales.float()):  # few numbers at a time in float32
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        spread = row.repeat_interleave(BLOCK)[:columns]
        found[part] = (weight[part].float() * spread).to(dtype)
    return found


def check_scales(name: str, shape: Sequence[int], scales: Sequence[int]) -> None:
    """Raise a ValueError unless there is a scale for each block of a weight."""
    expected = tuple(-(-size // BLOCK) for size in shape)
    if len(shape) != 2 or tuple(scales) != expected:
        raise ValueError(
            f"{name + SCALES!r} has shape {tuple(scales)}: a weight of shape {tuple(shape)} has "
            f"one scale per block of {BLOCK} x {BLOCK}, which is {expected}"
        )


# -- Tables computed once from a model's and an adapter's weights, and again if these change -------


def made_once(
    owner: Tensor, others: Sequence[Any], make: Callable[[], Made], in_place: bool = True
) -> Made:
    """The result of ``make()`` for these weights; kept as long as the owner exists.

    Whether they have changed is looked up each time, for which the host waits for the device: ask
    once per call of ``generate``. What is made then takes the place of what was made before, as
    recorded code is for places in memory.

    Args:
        owner: a tensor of the adapter; there is one such table per owner.
        others: the other inputs: tensors; modules, with PEFT's adapters on them; or None.
        make: gives a tuple of tensors or None.
        in_place: whether its tensors are new ones; False if some are views of weights.
    """
    weights, active = [owner], []
    for other in others:
        if isinstance(other, Tensor):
            weights.append(other)
        elif other is not None:
            weights += [*other.parameters(), *other.buffers()]
            active.append(switches(other.modules()))
    plain = [one for one in weights if is_plain(one)]
    special = [one for one in weights if not is_plain(one)]  # held, so that no other gets its id
    key = [*map(id, special)], active
    before = _KNOWN.get(owner) if in_place else None

    def renewed() -> tuple[Any, Any]:
        made: Any = make()
        return (made if before is None else _into(before[2][0], made)), special

    with torch.autocast(owner.device.type, enabled=False):  # later calls may run without
        return made_anew(_KNOWN, owner, plain, renewed, key)[0]


def _into(place: Sequence[Tensor | None], made: Sequence[Tensor | None]) -> Any:
    """New tensors in the memory of those made before; themselves where these are others."""
    if list(map(_kind, place)) != list(map(_kind, made)):
        return made
    for old, new in zip(place, made):
        if old is not None and new is not None:
            old.copy_(new)
    return place


def _kind(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def is_plain(weight: Any) -> bool:
    """Whether a weight is a plain tensor: neither quantized nor sharded over devices."""
    return isinstance(weight, Tensor) and type(weight.data) is Tensor and not weight.is_meta


#: Tables by owner.
_KNOWN: Any = WeakTensorKeyDictionary()


# -- The ranks of a model with tensor parallelism, which must make the same choices ----------------
#
# Each rank runs the same calls on its share of the weights. Choices by time or random numbers are
# those of the first rank; otherwise the shapes of their forwards would differ.


class Ranks:
    """The ranks of a model, :attr:`size` in number; a single one if it is not split."""

    def __init__(self, model: Any):
        self.size = tensor_parallel_size(model)
        self._device = placement(model).device
        self._group: Any = None
        if self.size > 1:
            mesh = getattr(model, "_device_mesh", None)
            names = getattr(mesh, "mesh_dim_names", None) or ()
            if mesh is not None:
                self._group = mesh.get_group("tp" if "tp" in names else None)

    @property
    def same(self) -> Callable[[Sequence[float]], list[float]]:
        """Gives the first rank's numbers; all ranks call it with equally many."""
        return list if self.size == 1 else self._first

    def _first(self, numbers: Sequence[float]) -> list[float]:
        values = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        distributed.broadcast(values, group=self._group, group_src=0)
        return values.tolist()

    def share_random_state(self) -> None:
        """Set the random state of all ranks to that of the first."""
        if self.size == 1:
            return
        shared = random_state(self._device).to(self._device)
        distributed.broadcast(shared, group=self._group, group_src=0)
        set_random_state(self._device, shared.cpu())

    def own_heads(self, states: Tensor, heads: int) -> Tensor:
        """This rank's share of prefix KV, ``(kv_heads, slots, head_dim)``, of which it has
        ``heads``."""
        if self.size == 1 or states.shape[0] != self.size * heads:
            return states
        return states.narrow(0, distributed.get_rank(self._group) * heads, heads)


def tensor_parallel_size(model: Any) -> int:
    """Number of ranks that the layers of a model are split over; 1 if they are not."""
    return getattr(model, "_tp_size", None) or 1


# -- modules that are split ------------------------------------------------------------------------


def own_share(factor: Tensor, size: int, dim: int, module: nn.Module) -> Tensor:
    """The part of a whole module's factor that belongs to this rank's part of it, of ``size``
    features along ``dim``."""
    if factor.shape[dim] == size:
        return factor
    mesh = _mesh(module)
    start = mesh.get_local_rank() * -(-factor.shape[dim] // mesh.size())  # the last may be shorter
    return factor.narrow(dim, start, size)


def summed(partial: Tensor, module: nn.Module) -> Tensor:
    """The sum of the partial results of all ranks of a module."""
    total = partial.contiguous()
    distributed.all_reduce(total, group=_mesh(module).get_group())
    return total


def _mesh(module: nn.Module) -> Any:
    weight: Any = module.weight
    mesh = weight.device_mesh
    return mesh["tp"] if mesh.ndim > 1 else mesh


# -- the state of a device's default random generator ----------------------------------------------


def random_state(device: torch.device) -> Tensor:
    """The state, as bytes on the host."""
    module, which = _generators(device)
    return module.get_rng_state(*which)


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state to what :func:`random_state` gave."""
    module, which = _generators(device)
    module.set_rng_state(state, *which)


@contextmanager
def same_draws(device: torch.device) -> Iterator[None]:
    """What is drawn after the block is what would have been drawn without it, here and on a CPU."""
    states = {one: random_state(one) for one in (torch.device("cpu"), device)}
    try:
        yield
    finally:
        for one, state in states.items():
            set_random_state(one, state)


def _generators(device: torch.device) -> tuple[Any, tuple[Any, ...]]:
    """The module with a device's generator, and how it is told the device: Apple's knows one."""
    if device.type == "cpu":
        return torch, ()
    return torch.get_device_module(device), () if device.type == "mps" else (device,)
