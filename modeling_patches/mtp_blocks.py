"""The block of a layer for multi-token prediction: what runs between its projection and last norm.

A recipe makes it of the model's own classes. Of most types it is a decoder layer; :data:`RECIPES`
names those whose block is none.
"""

import copy
import inspect
from typing import Any, ClassVar

from torch import Tensor, nn

from hf_spec.modeling_patches.attention_masks import attention_beside
from hf_spec.modeling_patches.modules import decoder_layers, decoder_of
from hf_spec.modeling_patches.weights import in_use

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
        made: nn.Module = self.kind(config, index)
        return made


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
