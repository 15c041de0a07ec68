"""``mtp``: layers for multi-token prediction of the checkpoint draft.

Level by level, as trees of EAGLE-3 grow: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024),
sections 2.2 and 5.4.3; Gloeckle et al., "Better & Faster Large Language Models via Multi-token
Prediction" (2024).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_spec.adapters.checkpoint import Origin, complaints, opened, shards
from hf_spec.adapters.layer import Adapter
from hf_spec.adapters.loading import find_active
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.checks import ANOTHER, MAX_BLOCKS, count, explained, first_line, setting
from hf_spec.core.tree import Tree
from hf_spec.draft.options import key_of
from hf_spec.methods.registry import Method
from hf_spec.modeling_patches.attention_masks import attention_beside, runs_kernel
from hf_spec.modeling_patches.modules import decoder_layers, decoder_of, num_layers
from hf_spec.modeling_patches.mtp import (
    BLOCK,
    Layout,
    MtpLayers,
    dtypes,
    gathered,
    is_mtp,
    layout_of,
    recipe_of,
)
from hf_spec.modeling_patches.weights import (
    FP8,
    SCALES,
    check_scales,
    dequantized,
    device_of,
    loaded,
    placement,
)
from hf_spec.predict.losses import ChainConfig, chain_loss
from hf_spec.predict.network import DraftCache, DraftNetwork, GrowOptions, NetworkPredictor, Rows
from hf_spec.target.hidden_states import Reads, model_logits, output_logits, shapes_logits
from hf_spec.threads import memory

# -- A model's layers for multi-token prediction as the network of a drafter -----------------------


class MtpNetwork(DraftNetwork):
    """The layers with the model's embeddings.

    Layer ``d`` predicts what follows a draft token of depth ``d``, and takes the output of layer
    ``d - 1`` at the row before (DeepSeek-V3, section 2.2). So a row runs through all layers that
    are still to come, and the next row takes the outputs of all but the last, side by side. Below
    the last layer's depth, it is used again and takes its own output.
    """

    def __init__(self, model: Any, layers: MtpLayers):
        self.model, self.layers = model, layers
        self.num_layers, self.depth = layers.num_caches, len(layers.layers)
        layers.config._attn_implementation = attention_beside(model, type(model)._supports_sdpa)
        # Trees grow by probabilities, and the layers were trained with the model's own.
        self._logits = model_logits if shapes_logits(model) else output_logits
        self.compiles = self._logits is output_logits  # a graph would hold the model's forward
        sizes = enumerate(map(layers.window, range(self.depth)))
        self.windows = {index: size for index, size in sizes if size is not None}
        self.own = [*layers.parameters(), *layers.buffers()]
        self.weight: Tensor = layers.layers[0].eh_proj.weight  # type: ignore[union-attr, assignment]

    def features(self, states: Tensor) -> Tensor:
        return states.to(self.weight)

    def run(self, tokens: Tensor, hidden: Tensor, rows: Rows, cache: Any) -> tuple[Tensor, Tensor]:
        parts = hidden.split(self.weight.shape[0], dim=-1)
        embeddings, first = self._embedded(tokens), self.depth - len(parts)
        found = [
            self._layer(first + index, embeddings, part, rows, cache)
            for index, part in enumerate(parts)
        ]
        return found[0], self._after(found)

    def run_true(
        self, tokens: Tensor, hidden: Tensor, before: Tensor | None, rows: Rows, cache: Any
    ) -> tuple[Tensor, Tensor]:
        embeddings, found = self._embedded(tokens), []
        width = hidden.shape[-1]
        for index in range(self.depth):
            found.append(self._layer(index, embeddings, hidden, rows, cache))
            last = torch.zeros_like(hidden[:, :1])
            if before is not None and index + 1 < self.depth:
                last = before[..., index * width : (index + 1) * width]
            hidden = torch.cat([last, found[-1][:, :-1]], dim=1)
        return found[0], self._after(found)

    def logits(self, states: Tensor) -> Tensor:
        return self._logits(self.model, states)

    def _embedded(self, tokens: Tensor) -> Tensor:
        module = self.model.get_input_embeddings()
        found: Tensor = module(tokens.to(device_of(module)))
        return found.to(self.weight)

    def _layer(
        self, index: int, embeddings: Tensor, hidden: Tensor, rows: Rows, cache: Any
    ) -> Tensor:
        """Forward of one layer, which has no rows of the first ``index`` tokens."""
        positions, window, begin = rows.positions, self.windows.get(index), None
        if index:  # rows that do not exist see themselves: the softmax of nothing is no number
            begin = positions.clamp(max=index)
        if window is not None:
            near = positions - window + 1
            begin = near if begin is None else torch.maximum(near, begin)
        mask, device = rows.mask(begin, window).to(self.weight.device), self.weight.device
        return self.layers.run(index, embeddings, hidden, positions.to(device), mask, cache)

    @staticmethod
    def _after(found: list[Tensor]) -> Tensor:
        return found[0] if len(found) == 1 else torch.cat(found[:-1], dim=-1)


# --------------------------------------------------------------------------------------------------
# Reads a model's layers for multi-token prediction from the checkpoint that it was loaded from.

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
#: What safetensors calls the types of numbers that are read, and that of 8-bit floats, which are
#: read if there are scales.
FLOATS, EIGHT_BITS = ("BF16", "F16", "F32", "F64"), "F8_E4M3"


def mtp_layers(model: Any) -> MtpLayers:
    """The layers, on the model's device and in its dtype; read once, and again if these change.

    Raises:
        ValueError: its checkpoint has no such layers, cannot be read, or does not fit the model.
    """
    # A module with weights of its own knows the device, also where these are offloaded.
    last = decoder_layers(model)[-1]
    leaf = next((one for one in last.modules() if [*one.parameters(False)]), last)
    place = device_of(leaf), placement(model).dtype
    known = memory(model)
    found: tuple[Any, MtpLayers] | None = known.get(MtpLayers)
    if found is None or found[0] != place:
        found = place, _read(model, *place)
        _check_that_they_run(model, found[1])
        known[MtpLayers] = found
    return found[1]


@torch.no_grad()
def _check_that_they_run(model: Any, layers: MtpLayers) -> None:
    """Raise a ValueError if the layers do not run on two tokens, and on two more."""
    network = MtpNetwork(model, layers)
    cache = DraftCache(network.num_layers, 1, network.weight.device)
    cache.packs = runs_kernel(model)
    tokens = torch.zeros(1, 2, dtype=torch.long, device=network.weight.device)
    hidden = torch.zeros(1, 2, network.weight.shape[0], device=network.weight.device)
    tree = Tree.chain(tokens)
    try:
        for _ in range(2):
            rows = cache.open(tree)
            network.run_true(tokens, network.features(hidden), None, rows, cache)
            cache.commit([2])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        block = type(layers.layers[0].mtp_block).__name__
        raise ValueError(
            f"{type(model).__name__}: {block} does not run as a layer for multi-token prediction: "
            f"a trial raised {type(error).__name__}: {first_line(error).rstrip('.')}. {ANOTHER}"
        ) from error


def _read(model: Any, device: torch.device, dtype: torch.dtype) -> MtpLayers:
    name, below = type(model).__name__, num_layers(model)
    place, files = _files(model, below)
    layout = layout_of(files, below)
    if layout is None:
        named = f" under names that are known, but {min(files)!r}" if files else ""
        raise ValueError(
            f"assistant_strategy='mtp': the checkpoint of {name}, {place!r}, has no layers for "
            f"multi-token prediction{named}. {ANOTHER}"
        )
    scales = {one + SCALES for one in files}
    plain = {one: path for one, path in files.items() if one not in scales}
    num_parts = recipe_of(model).num_parts
    sources, unknown = _sources(plain, layout, below, num_parts)
    sparse = any(".experts." in own for _, own in sources)
    layers = MtpLayers(model, 1 + max(layer for layer, _ in sources), sparse)

    # Names and shapes first: nothing large is read of what does not fit.
    wrong = [f"unknown tensor {one!r}" for one in unknown[:1]]
    norms = _final_norms(model, len(layers.layers)) if layout.final_norm else {}
    shapes = gathered(model, sources, partial(_shape, files)) | norms
    wrong += complaints(shapes, layers.layers.state_dict())
    if wrong:
        for (layer, own), source in sources.items():
            wrong = [text.replace(repr(f"{layer}.{own}"), repr(source)) for text in wrong]
        raise ValueError(
            f"the layers for multi-token prediction of {place!r} do not fit {name}: "
            f"{'; '.join(wrong)} ({BLOCK.rstrip('.')} is the block between them). Download the "
            "checkpoint again, or choose another strategy."
        )
    kept = dtypes(model, num_parts)
    state = {
        own: value.to(device, kept.get(own.partition(BLOCK)[2], dtype)).contiguous()
        for own, value in (gathered(model, sources, partial(_tensor, files, dtype)) | norms).items()
    }
    layers.layers.load_state_dict(state, assign=True)
    left = [own for own, tensor in layers.named_buffers() if tensor.is_meta]
    if left:
        raise ValueError(
            f"{name}: the buffer {left[0]!r} of its decoder layers is made when they are built, "
            f"which is not known here. {ANOTHER}"
        )
    layers.place(device)
    return layers.requires_grad_(False).eval()


def _sources(
    files: Mapping[str, Path], layout: Layout, below: int, num_parts: int
) -> tuple[dict[tuple[int, str], str], list[str]]:
    """What tensors are called in the checkpoint, by layer and name in ``MtpLayer``; and those of
    these layers that the layout does not know."""
    of_layers: dict[tuple[int, str], str] = {}
    of_all: dict[str, str] = {}
    unknown = []
    for source in files:
        parsed = layout.parse(source, below, num_parts)
        if parsed is None:
            unknown.append(source)
        elif (own := parsed[1]) is not None:
            if (layer := parsed[0]) is None:
                of_all[own] = source
            else:
                of_layers[layer, own] = source
    count = 1 + max((layer for layer, _ in of_layers), default=0)
    shared = {(layer, own): of_all[own] for layer in range(count) for own in of_all}
    return of_layers | shared, unknown


def _final_norms(model: Any, count: int) -> dict[str, Tensor]:
    """The model's final norm for this number of layers, by names as of ``gathered``: its own
    memory, into which ``load_state_dict`` writes, unless it is offloaded."""
    norm = decoder_of(model).norm
    with loaded(norm):
        own = {name: one.detach() for name, one in norm.named_parameters()}
    return {f"{index}.post_norm.{name}": own[name] for index in range(count) for name in own}


def _shape(files: Mapping[str, Path], name: str) -> Tensor:
    """A tensor's shape, without numbers."""
    scales = name + SCALES
    with opened(files[name]) as file:
        part = file.get_slice(name)
        kind, shape = part.get_dtype(), part.get_shape()
    if kind == EIGHT_BITS and scales in files:
        with opened(files[scales]) as file:
            found = file.get_slice(scales).get_shape()
        try:
            check_scales(name, shape, found)
        except ValueError as error:
            raise ValueError(f"{str(files[name])!r}: {error}. Download it again.") from error
    elif kind not in FLOATS:
        raise ValueError(
            f"{str(files[name])!r}: {name!r} is stored as {kind}; layers for multi-token "
            f"prediction are read from {', '.join(FLOATS)}, and {EIGHT_BITS} with scales "
            f"({scales!r}). Take a checkpoint that is not quantized, or choose another strategy."
        )
    return torch.empty(shape, dtype=torch.float32, device="meta")


def _tensor(files: Mapping[str, Path], dtype: torch.dtype, name: str) -> Tensor:
    """A tensor; one that is stored as 8-bit floats in this dtype."""
    with opened(files[name]) as file:
        found: Tensor = file.get_tensor(name)
    if found.dtype != FP8:
        return found
    scales = name + SCALES
    with opened(files[scales]) as file:
        return dequantized(name, found, file.get_tensor(scales), dtype)


def _files(model: Any, below: int) -> tuple[str, Mapping[str, Path]]:
    """Where the checkpoint is, and the file of each of its tensors of the layers above."""
    place = str(getattr(model.config, "name_or_path", None) or model.name_or_path or "")
    if not place:
        raise ValueError(
            f"assistant_strategy='mtp': {type(model).__name__} was not loaded from a checkpoint, "
            "whose layers for multi-token prediction would draft. Load it with from_pretrained."
        )
    commit = getattr(model.config, "_commit_hash", None)
    origin = Origin(place, {} if commit is None else {"revision": commit})
    found = _file(origin, INDEX, SINGLE)
    if found is None:
        raise ValueError(
            f"assistant_strategy='mtp': {place!r} has neither {INDEX} nor {SINGLE}: layers for "
            "multi-token prediction are read from safetensors only, never from a pickle, which "
            f"can run code. {ANOTHER}"
        )
    if found.name == SINGLE:
        with opened(found) as file:
            names = list(file.keys())
        return place, {name: found for name in names if is_mtp(name, below)}
    wanted = {name: file for name, file in shards(found).items() if is_mtp(name, below)}
    paths = {file: _file(origin, file) for file in set(wanted.values())}
    missing = [file for file, path in paths.items() if path is None]
    if missing:
        raise ValueError(
            f"{place!r} has no {min(missing)!r}, which {INDEX} names: download it again."
        )
    return place, {name: path for name, file in wanted.items() if (path := paths[file])}


def _file(origin: Origin, *names: str) -> Path | None:
    """The first of these files of a checkpoint that there is; the Hub is asked only if none of them
    has been downloaded."""
    with explained(f"cannot read {' or '.join(names)} of {origin.place!r}", OSError):
        found = (origin.file(name, ask) for ask in (False, True) for name in names)
        return next(filter(None, found), None)


# -- The MTP adapter: the layers, fine-tuned -------------------------------------------------------
#
# A step of training runs them as drafting does (:mod:`hf_spec.predict.losses`), and token
# embeddings, final norm and output embeddings are the base's, which stay as they are.

#: Steps of the training-time test, if there are not more layers.
STEPS = 4


@dataclass
class MtpConfig(ChainConfig):
    """Config of an MTP adapter: fine-tuned layers of the base's own checkpoint.

    Raises:
        ValueError: a field is invalid; the message names it, its value and the rule.
    """

    type_name: ClassVar[str] = "MTP"
    shards: ClassVar[bool] = False
    num_layers: int | None = setting(
        None, "Layers for multi-token prediction (recorded).", count(1, MAX_BLOCKS)
    )
    sparse: bool = setting(False, "Whether their MLPs are mixtures of experts (recorded).")

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        if not (self.inference_mode and self.num_layers):
            layers = mtp_layers(model)
            self.num_layers, self.sparse = len(layers.layers), layers.sparse
        count = self.num_layers or 1
        if self.ttt_steps is None:
            self.ttt_steps = max(STEPS, count)
        if self.ttt_steps < count:
            raise ValueError(
                f"ttt_steps={self.ttt_steps}: the checkpoint has {count} layers for multi-token "
                f"prediction, one for each step. Take {count} or more, or all further ones would "
                "not be trained."
            )


class MtpAdapter(Adapter):
    """The layers, which start as those of the base's checkpoint."""

    def __init__(self, config: MtpConfig, model: Any) -> None:
        super().__init__(config, model)
        if config.inference_mode:  # the weights are loaded later
            made = MtpLayers(model, config.num_layers or 1, config.sparse)
            made.layers.to_empty(device=torch.get_default_device())
        else:
            made = copy.deepcopy(mtp_layers(model)).requires_grad_(True)
        self.layers = made.layers
        # Not a module of this one, as its rotary buffers are not to be cast.
        self.__dict__["_made"] = made

    def placed(self) -> MtpLayers:
        """The layers, all on their device."""
        made: MtpLayers = self.__dict__["_made"]
        first: Any = made.layers[0]
        made.place(first.eh_proj.weight.device)
        return made


def loss(model: Any, adapter: Any, batch: TrainingBatch) -> dict[str, Tensor]:
    """See :func:`chain_loss`."""
    layers = adapter.placed()
    for module in layers.layers.modules():
        # Blocks that compute activations anew leave the cache out.
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
    return chain_loss(model, MtpNetwork(model, layers), batch, adapter.config)


class MtpPredictor(NetworkPredictor):
    """The model's own layers, on its final states, predict one token after the other; those of an
    active adapter, which has fine-tuned them, if there is one."""

    network: MtpNetwork
    options: GrowOptions

    def __init__(self, model: Any, options: GrowOptions):
        adapter: Any = find_active(model, "MTP", options.adapter)
        layers = mtp_layers(model) if adapter is None else adapter.placed()
        key = "mtp", None if adapter is None else adapter.name, key_of(options)
        network = MtpNetwork(model, layers)
        super().__init__(model, options, network, Reads("committed"), key)
        self.beside = (layers.layers,) if adapter is None else ()


METHOD = Method(
    name="mtp",
    summary="the checkpoint's own layers for multi-token prediction, as they are or fine-tuned",
    options=GrowOptions,
    predictor=MtpPredictor,
    adapter_config=MtpConfig,
    adapter_module=MtpAdapter,
    objective=loss,
    included=mtp_layers,
    formats="hf_spec.tools.formats.papers",
    # Below the rates of new layers, as these are trained already.
    training={"learning_rate": 3e-4, "num_train_epochs": 2, "optim": "muon"},
    num_anchors=32,
)
