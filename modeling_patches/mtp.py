"""Layers for multi-token prediction that checkpoints bring along."""

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.core_model_loading import dot_natural_key, rename_source_key

from hf_spec.modeling_patches.attention_masks import attention_beside
from hf_spec.modeling_patches.modules import CACHE, decoder_layers, decoder_of
from hf_spec.modeling_patches.weights import conversions, in_use

# --------------------------------------------------------------------------------------------------
# The block of a layer for multi-token prediction: what runs between its projection and last norm.
#
# A recipe makes it of the model's own classes. Of most types it is a decoder layer; :data:`RECIPES`
# names those whose block is none.

#: What configs of Nemotron-H call layers with keys, and those with a recurrent state.
ATTENTION, RECURRENCE = {"full_attention", "attention"}, {"linear_attention", "mamba"}


class Recipe:
    """How blocks are made: each is a decoder layer.

    Attributes:
        norm_name: name of a norm in decoder layers.
        rotates: whether they are given rotations.
        num_parts: layers that checkpoints number of one block.
        num_caches: sublayers of one block with keys and values of their own.
        norm: a norm of the model, whose class the others are of.
        rotary: the module that makes rotations; None if blocks are given none.

    Raises:
        ValueError: the model's decoder layers cannot be used so; the message names their class.
    """

    norm_name: ClassVar[str] = "input_layernorm"
    rotates: ClassVar[bool] = True
    num_parts: int = 1
    num_caches: int = 1

    def __init__(self, model: Any):
        self.name, layer = type(model).__name__, in_use(decoder_layers(model)[-1])
        self.kind: Any = type(layer)
        norm = getattr(layer, self.norm_name, None)
        self.norm: Any = in_use(norm)
        self.rotary: Any = getattr(decoder_of(model), "rotary_emb", None) if self.rotates else None
        takes_rotations = "position_embeddings" in inspect.signature(self.kind.forward).parameters
        usable = norm is not None and not isinstance(norm, nn.ModuleList)  # as LongCat-Flash's
        if not usable or self.rotates and not (takes_rotations and self.rotary is not None):
            needs = self.norm_name + " and the position_embeddings" * self.rotates
            raise ValueError(
                f"{self.name}: its decoder layers ({self.kind.__name__}) do not have the "
                f"{needs} that layers for multi-token prediction are built with. Choose another "
                "strategy."
            )

    def adapt(self, config: Any, count: int) -> None:
        """Set what a config says of the parts of this number of blocks."""

    def make(self, config: Any, index: int) -> nn.Module:
        """Block ``index``, whose forward takes hidden states ``(batch, n, hidden)``, and
        ``position_ids``, ``attention_mask``, the cache and, if there is a rotary module,
        ``position_embeddings`` by name.
        """
        return self.kind(config, index)


class Parts(nn.ModuleList):
    """Decoder layers that run one after the other."""

    def forward(self, hidden: Tensor, **inputs: Any) -> Tensor:
        for layer in self:
            hidden = layer(hidden, **inputs)
        return hidden


class PartsRecipe(Recipe):
    """Nemotron-H: a few of its layers, which are an attention without rotations, an MLP or experts
    each. Its config tells their kinds."""

    norm_name = "norm"
    rotates = False

    def __init__(self, model: Any):
        super().__init__(model)
        config = model.config.get_text_config(decoder=True)
        self.pattern = list(config.mtp_layers_block_type)
        self.num_parts = len(self.pattern)
        self.num_caches = sum(kind in ATTENTION for kind in self.pattern)
        asked = "mtp_use_rope" if getattr(config, "mtp_use_rope", False) else None
        if asked or RECURRENCE & {*self.pattern} or not self.num_caches:
            what = f"{asked}=True" if asked else f"mtp_layers_block_type={self.pattern}"
            raise ValueError(
                f"{self.name}: its config says {what}: layers for multi-token prediction have "
                "attention without rotations here, and no recurrent states. Choose another "
                "strategy."
            )

    def adapt(self, config: Any, count: int) -> None:
        config.layers_block_type = self.pattern * count

    def make(self, config: Any, index: int) -> nn.Module:
        parts = [self.kind(config, index * self.num_parts + part) for part in range(self.num_parts)]
        attentions = [one.mixer for one, kind in zip(parts, self.pattern) if kind in ATTENTION]
        for place, one in enumerate(attentions):  # the caches have layers for these only
            one.layer_idx = index * self.num_caches + place
        return Parts(parts)


#: By the model's type.
RECIPES: dict[str, type[Recipe]] = {"nemotron_h": PartsRecipe}


def recipe_of(model: Any) -> Recipe:
    """The recipe of a model's blocks; raises its errors."""
    kind = model.config.get_text_config(decoder=True).model_type
    return RECIPES.get(kind, Recipe)(model)


def config_of(model: Any, recipe: Recipe, count: int, sparse: bool) -> Any:
    """The model's config with what it says of single layers replaced by what holds for ``count``
    blocks; ``sparse`` as in :class:`~hf_spec.modeling_patches.mtp.MtpLayers`."""
    config = copy.deepcopy(model.config.get_text_config(decoder=True))

    def of_each(name: str, default: str) -> list[str]:
        given = list(getattr(config, f"mtp_{name}", None) or [])
        return (given + [default] * count)[:count]

    values: dict[str, Any] = {
        "layer_types": of_each("layer_types", "full_attention"),
        "mlp_layer_types": of_each("mlp_layer_types", "sparse" if sparse else "dense"),
        "first_k_dense_replace": 0 if sparse else count,
        "mlp_only_layers": [] if sparse else list(range(count)),
        "decoder_sparse_step": 1,
        "moe_layer_start_index": 0 if sparse else count,
        "moe_layer_interval": 1,
        "num_hidden_layers": count,
    }
    for name, value in values.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    recipe.adapt(config, count)
    config._attn_implementation = attention_beside(model, type(model)._supports_sdpa)
    return config


# --------------------------------------------------------------------------------------------------
# Layers for multi-token prediction (MTP): tensors of checkpoints that Transformers does not load.
#
# Each is a block, see above, with two norms and a projection before it and a norm after it
# (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2). What checkpoints call them
# follows one of a few layouts. Transformers' own ``MtpModel`` knows the layer numbers of released
# models; here layers are counted from the model's last one.

#: Prefix of the block's tensors in :class:`MtpLayer`.
BLOCK = "mtp_block."

# -- names in checkpoints ------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """What checkpoints of some families call these tensors.

    Attributes:
        names: prefixes in checkpoints, with ``{}`` for the number of a layer if layers do not share
            the tensor, and in :class:`MtpLayer`; None for a copy of a tensor of the model. The
            first one that fits counts.
        continued: whether layers are numbered on from the model's last one.
        final_norm: whether the norm after each layer is the model's final one.
    """

    names: Mapping[str, str | None]
    continued: bool = False
    final_norm: bool = False

    def parse(
        self, name: str, num_layers: int, num_parts: int = 1
    ) -> tuple[int | None, str | None] | None:
        """Which tensor a name in a checkpoint means, of a model with so many layers.

        Returns:
            The number of its layer, from 0, or None for all of them; and its name in
            :class:`MtpLayer`, or None for a copy. None if it is no tensor of these layers.
        """
        for prefix, ours in self.names.items():
            pattern = re.escape(prefix).replace(r"\{\}", r"(\d+)")
            found = re.search(rf"(?:^|\.){pattern}(.+)", name)
            if found is None:
                continue
            *numbers, rest = found.groups()
            layer = int(numbers[0]) - num_layers * self.continued if numbers else None
            if layer is None:
                return None, None if ours is None else ours + rest
            if layer >= 0:
                layer, part = divmod(layer, num_parts)
                inside = f"{part}." if num_parts > 1 and ours == BLOCK else ""
                return layer, None if ours is None else ours + inside + rest
        return None


#: speculators', of layers without their model
SPECULATORS = Layout({
    "mtp_layers.{}.input_proj.": "eh_proj.",
    "mtp_layers.{}.token_layernorm.": "enorm.",
    "mtp_layers.{}.hidden_layernorm.": "hnorm.",
    "mtp_layers.{}.final_layernorm.": "post_norm.",
    "mtp_layers.{}.": BLOCK,
})  # fmt: skip
#: Of models' checkpoints.
_LAYOUTS = (
    # Qwen3-Next, Qwen3.5, Mellum, EXAONE
    Layout({
        "mtp.fc.": "eh_proj.",
        "mtp.pre_fc_norm_embedding.": "enorm.",
        "mtp.pre_fc_norm_hidden.": "hnorm.",
        "mtp.norm.": "post_norm.",
        "mtp.layers.{}.": BLOCK,
    }),
    # DeepSeek-V3, GLM-4.5
    Layout({
        "layers.{}.eh_proj.": "eh_proj.",
        "layers.{}.enorm.": "enorm.",
        "layers.{}.hnorm.": "hnorm.",
        "layers.{}.shared_head.norm.": "post_norm.",
        "layers.{}.shared_head.head.": None,
        "layers.{}.embed_tokens.": None,
        "layers.{}.": BLOCK,
    }, continued=True),
    # MiMo-V2, Nemotron-H
    Layout({
        "mtp.layers.{}.eh_proj.": "eh_proj.",
        "mtp.layers.{}.enorm.": "enorm.",
        "mtp.layers.{}.hnorm.": "hnorm.",
        "mtp.layers.{}.final_layernorm.": "post_norm.",
        "mtp.layers.{}.pre_mlp_layernorm.": f"{BLOCK}post_attention_layernorm.",
        "mtp.layers.{}.": BLOCK,
        "mtp.norm.": "post_norm.",
        "mtp.embed_tokens.": None,
    }),
    # ERNIE 4.5
    Layout({
        "mtp_linear_proj.{}.": "eh_proj.",
        "mtp_emb_norm.{}.": "enorm.",
        "mtp_hidden_norm.{}.": "hnorm.",
        "mtp_block.{}.": BLOCK,
    }, final_norm=True),
)  # fmt: skip


def is_mtp(name: str, num_layers: int) -> bool:
    """Whether a name in a checkpoint is one of such layers, of a known layout or not."""
    known = any(layout.parse(name, num_layers) is not None for layout in _LAYOUTS)
    return known or re.search(r"(?:^|[._])mtp[._]", name) is not None


def layout_of(names: Iterable[str], num_layers: int) -> Layout | None:
    """The layout of a checkpoint; None if it is none of those known."""
    names = list(names)
    for layout in _LAYOUTS:
        parsed = (layout.parse(name, num_layers) for name in names)
        if any(one is not None and one[1] == "eh_proj.weight" for one in parsed):
            return layout
    return None


# -- the layers ----------------------------------------------------------------------------------


class MtpLayer(nn.Module):
    """One of these layers."""

    def __init__(self, config: Any, recipe: Recipe, index: int):
        super().__init__()
        width, norm = config.hidden_size, recipe.norm
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
        self.enorm, self.hnorm, self.post_norm = (type(norm)(width, eps=eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.mtp_block = recipe.make(config, index)

    def forward(self, embeddings: Tensor, hidden: Tensor, **inputs: Any) -> Tensor:
        """``(batch, n, hidden)``, of which the output embeddings make logits and which the next row
        takes, by the embeddings of each row's token and the final states of the token before."""
        joined = torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1)
        out = self.mtp_block(self.eh_proj(joined), **inputs)
        return self.post_norm(out[0] if isinstance(out, tuple) else out)


class MtpLayers(nn.Module):
    """All of these layers of a model, without weights at first.

    Args:
        count: number of layers.
        sparse: whether their MLPs are mixtures of experts, where the model has both kinds.

    Attributes:
        num_caches: sublayers with keys and values of their own, of all layers.
        kinds: kind of attention of each layer; None if the model has but one.

    Raises:
        ValueError: the model's decoder layers cannot be used so; the message names its class.
    """

    def __init__(self, model: Any, count: int, sparse: bool):
        super().__init__()
        recipe = recipe_of(model)
        try:
            self.config = config_of(model, recipe, count, sparse)
            with torch.device("meta"):
                made = [MtpLayer(self.config, recipe, index) for index in range(count)]
            # One of its own, as some adapt to the positions that they see.
            with torch.device("cpu"):
                self.rotary = recipe.rotary and type(recipe.rotary)(config=self.config)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{type(model).__name__}: {recipe.kind.__name__} cannot be built as a layer for "
                f"multi-token prediction ({type(error).__name__}: {error}). Choose another "
                "strategy."
            ) from error
        self.num_caches = count * recipe.num_caches
        self.sparse = sparse
        kinds = getattr(self.config, "layer_types", None)
        self.kinds: list[str | None] = list(kinds[:: recipe.num_parts]) if kinds else [None] * count
        self.layers = nn.ModuleList(made)

    def place(self, device: torch.device) -> None:
        """Put what is no weight onto a device."""
        if self.rotary is not None:
            self.rotary.to(device)

    def window(self, index: int) -> int | None:
        """Number of positions that a layer sees; None for all."""
        return self.config.sliding_window if self.kinds[index] == "sliding_attention" else None

    def run(
        self, index: int, embeddings: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor,
        cache: Any,
    ) -> Tensor:  # fmt: skip
        """Forward of a layer; see :meth:`MtpLayer.forward`.

        Args:
            positions: ``(batch, n)`` of the rows.
            mask: ``(batch, 1, n, slots)`` bool, True where a row sees a slot; or a packed one.
            cache: takes ``update(keys, values, index)``.
        """
        inputs: dict[str, Any] = {CACHE: cache, "position_ids": positions}
        if self.rotary is not None:
            by_kind = "layer_type" in inspect.signature(type(self.rotary).forward).parameters
            given = {"layer_type": self.kinds[index]} if by_kind else {}
            inputs["position_embeddings"] = self.rotary(embeddings, positions, **given)
        if self.config._attn_implementation == "eager":
            mask = torch.zeros_like(mask, dtype=embeddings.dtype).masked_fill_(~mask, -torch.inf)
        return self.layers[index](embeddings, hidden, attention_mask=mask, **inputs)


def converted(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A block's tensors, by their names in checkpoints without the layer's prefix, as the model's
    class wants them: with experts stacked, say."""
    renamings, converters = conversions(model)
    for one in (*renamings, *converters):
        one.scope_prefix = None  # also of a part of a multimodal model
    of_pattern = {source: one for one in converters for source in one.source_patterns}
    prefix, found = "layers.0.", dict[str, Tensor]()
    made: dict[str, Any] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(prefix + name, renamings, converters)
        if pattern is None:
            found[target] = tensors[name]
        else:
            one = made.setdefault(target, copy.deepcopy(of_pattern[pattern]))
            one.add_tensor(target, prefix + name, pattern, tensors[name])
    for target, one in made.items():
        for name, value in one.convert(target, model=model, config=model.config).items():
            found[name] = value[0] if isinstance(value, list) else value
    return {name.removeprefix(prefix): value for name, value in found.items()}


def gathered(
    model: Any, sources: Mapping[tuple[int, str], str], numbers: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """The tensors of all layers by their names in ``MtpLayers.layers``, from ``numbers`` by their
    names in the checkpoint."""
    found: dict[str, Tensor] = {}
    blocks: dict[int, dict[str, Tensor]] = {}
    for (layer, own), source in sources.items():
        if own.startswith(BLOCK):
            blocks.setdefault(layer, {})[own.removeprefix(BLOCK)] = numbers(source)
        else:
            found[f"{layer}.{own}"] = numbers(source)
    for layer, block in blocks.items():
        made = converted(model, block)
        found |= {f"{layer}.{BLOCK}{own}": value for own, value in made.items()}
    return found


def dtypes(model: Any, num_parts: int = 1) -> dict[str, torch.dtype]:
    """In which dtype the model keeps the floating-point tensors of its decoder layers, by name;
    names begin with the number of a part if there are several (:class:`Recipe`)."""
    found: dict[str, torch.dtype] = {}
    for layer in decoder_layers(model):
        for name, tensor in layer.state_dict().items():
            # Layers for multi-token prediction are not quantized.
            if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                found.setdefault(name, tensor.dtype)
    if num_parts == 1:
        return found
    return {f"{part}.{name}": found[name] for part in range(num_parts) for name in found}
