"""Which sublayers the drafting model leaves out: the config of a LAYER_SKIP adapter."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from hf_spec.methods.peft_bridge import SpecPeftConfig
from modeling_patches.layer_skip import LayerSkipper, num_layers


@dataclass
class LayerSkipConfig(SpecPeftConfig):
    """Config of a weightless adapter: a set of attention and a set of MLP sublayers to skip.

    Both may be empty; drafting then costs as much as verifying. The lists are kept sorted.

    Raises:
        ValueError: an entry that is not an integer >= 0 or comes twice. Indices beyond the last
            layer are found when the adapter meets its base model.
    """

    type_name: ClassVar[str] = "LAYER_SKIP"

    skip_attention: list[int] = field(
        default_factory=list, metadata={"help": "Layers whose attention drafting leaves out."}
    )
    skip_mlp: list[int] = field(
        default_factory=list, metadata={"help": "Layers whose MLP drafting leaves out."}
    )
    num_layers: int | None = field(
        default=None,
        metadata={"help": "Layers of the base model; recorded when the adapter is attached to it."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.skip_attention = _indices("skip_attention", self.skip_attention)
        self.skip_mlp = _indices("skip_mlp", self.skip_mlp)
        if self.num_layers is not None and (
            type(self.num_layers) is not int or self.num_layers < 1
        ):
            raise ValueError(
                f"num_layers must be a positive integer or None, got {self.num_layers!r}. Leave it "
                "out: attaching the adapter records it."
            )

    def check_base(self, model: nn.Module) -> None:
        """Raise ValueError if the indices do not fit the layers of `model`; record `num_layers`."""
        found = num_layers(model)
        if self.num_layers not in (None, found):
            raise ValueError(
                f"this LAYER_SKIP adapter was made for a model of {self.num_layers} layers, "
                f"{type(model).__name__} has {found}. Load it onto "
                f"{self.base_model_name_or_path or 'the model it was made for'}, or search again."
            )
        LayerSkipper(model, self.skip_attention, self.skip_mlp)  # finds every sublayer or raises
        self.num_layers = found


def _indices(name: str, values: Iterable[int]) -> list[int]:
    """`values` as a sorted list; ValueError unless they are distinct integers >= 0."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of layer indices, got {values!r}.")
    indices = list(values)
    for value in indices:
        if type(value) is not int or value < 0:
            raise ValueError(
                f"{name} must list integers >= 0 (layers count from 0), got {value!r} in {indices}."
            )
    if len(set(indices)) < len(indices):
        twice = sorted({i for i in indices if indices.count(i) > 1})
        raise ValueError(
            f"{name} must list each layer once, got {twice} more than once. Remove them."
        )
    return sorted(indices)
