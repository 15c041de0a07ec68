"""Tiny models that see images or hear, and prompts for them.

How many placeholders an image needs, the model's own encoder says.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from architectures import FIELDS, OVERRIDES, config_class, randomise_all, tiny_of
from conftest import padded, prompt
from torch import Tensor
from transformers import AutoModelForMultimodalLM

#: What may stand in a prompt beside text: the last ids.
HEAR, END, START, IMAGE, VIDEO, AUDIO = range(58, 64)
SIZE, PATCH = 28, 14

_SIZES: dict[str, Any] = {
    **FIELDS,
    "image_size": SIZE, "patch_size": PATCH, "spatial_merge_size": 1, "depth": 2, "embed_dim": 32,
    "out_hidden_size": 32, "projection_dim": 32, "projector_hidden_size": 32,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1],
    "mm_tokens_per_image": 4, "encoder_layers": 2, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "vision_start_token_id": START, "image_start_token_id": START,
    "image_token_index": IMAGE, "video_token_index": VIDEO, "audio_token_index": AUDIO,
}  # fmt: skip


def _rope(**fields: Any) -> dict[str, Any]:
    """A decoder that rotates by three positions."""
    given = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], **fields}
    return {"text_config": {"rope_parameters": given}}


_ALL_ROTATED = _rope(partial_rotary_factor=1.0)
_HEARING = {"max_source_positions": 20, "num_mel_bins": 8, "d_model": 32}
_TILES = {"image_grid_pinpoints": [[SIZE, SIZE]]}


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _of(model: Any, images: int, *tiles: int) -> Tensor:
    """Pixels ``(images, *tiles, 3, size, size)``."""
    size = getattr(model.config.vision_config, "image_size", SIZE)
    size = size[0] if isinstance(size, (list, tuple)) else size
    return _random(images, *tiles, 3, size, size)


def _whole(model: Any, images: int) -> dict[str, Tensor]:
    return {"pixel_values": _of(model, images)}


def _sized(model: Any, images: int) -> dict[str, Tensor]:
    return {**_whole(model, images), "image_sizes": torch.tensor([[SIZE, SIZE]] * images)}


def _listed(model: Any, images: int) -> dict[str, Tensor]:
    return {"pixel_values": _of(model, images, 1)}


def _tiled(model: Any, images: int) -> dict[str, Tensor]:
    return {**_sized(model, images), "pixel_values": _of(model, images, 2)}


def _grids(model: Any, images: int) -> dict[str, Tensor]:
    """Every other image is twice as high."""
    vision: Any = model.config.vision_config
    side = 2 * getattr(vision, "spatial_merge_size", 1)
    grids = torch.tensor([[1, side * (1 + i % 2), side] for i in range(images)])
    features = 3 * (getattr(vision, "temporal_patch_size", None) or 1) * PATCH**2
    pixels = _random(int(grids.prod(-1).sum()), features)
    return {"pixel_values": pixels, "image_grid_thw": grids}


def _patches(model: Any, images: int) -> dict[str, Tensor]:
    given = _grids(model, images)
    return given | {"pixel_values": given["pixel_values"].reshape(-1, 3, PATCH, PATCH)}


def _merged(model: Any, images: int) -> dict[str, Tensor]:
    return {**_grids(model, images), "image_merge_sizes": torch.ones(images, dtype=torch.long)}


def _placed(model: Any, images: int) -> dict[str, Tensor]:
    """Nine patches, each with its place."""
    patch = model.config.vision_config.patch_size
    places = torch.tensor([[[i % 3, i // 3] for i in range(9)]] * images)
    pixels = torch.rand((images, 9, 3 * patch**2), generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "image_position_ids": places}


def _shaped(model: Any, images: int) -> dict[str, Tensor]:
    """Four by two patches, the last of which are padding in every other image."""
    shapes = torch.tensor([[4, 2 + 2 * (i % 2)] for i in range(images)])
    real = torch.arange(16) < shapes.prod(-1, keepdim=True)
    pixels = _random(images, 16, 3 * model.config.vision_config.patch_size**2)
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": real.long()}


def _both(model: Any, images: int) -> dict[str, Tensor]:
    size = model.config.high_res_vision_config.image_size
    fine = _random(images, 3, size, size, seed=1)
    return {**_whole(model, images), "high_res_pixel_values": fine}


def _joined(model: Any, images: int) -> dict[str, Tensor]:
    """Patches of all images in a row; every other image is twice as high."""
    sizes = torch.tensor([[4 * (1 + i % 2), 4] for i in range(images)])
    size, patches = model.config.vision_config.patch_size, int(sizes.prod(-1).sum())
    return {"pixel_values": _random(1, 3, size, size * patches), "target_sizes": sizes}


def _flat(model: Any, images: int) -> dict[str, Tensor]:
    """Four patches each."""
    return {"pixel_values": _random(images, 4, 3 * model.config.patch_size**2)}


def _heard(model: Any, sounds: int) -> dict[str, Tensor]:
    frames = 2 * _HEARING["max_source_positions"]
    return {"input_features": _random(sounds, _HEARING["num_mel_bins"], frames)}


def _masked(model: Any, sounds: int, name: str = "input_features_mask") -> dict[str, Tensor]:
    given = _heard(model, sounds)
    return {**given, name: torch.ones_like(given["input_features"][:, 0], dtype=torch.long)}


def _attended(model: Any, sounds: int) -> dict[str, Tensor]:
    return _masked(model, sounds, "feature_attention_mask")


def _frames(model: Any, videos: int) -> dict[str, Tensor]:
    """Eight frames each."""
    return {"pixel_values_videos": _of(model, videos, 8)}


def _clips(model: Any, videos: int) -> dict[str, Tensor]:
    """Two pairs of frames; every other video is twice as high."""
    given = _grids(model, videos)
    pixels = torch.cat([given["pixel_values"]] * 2)
    grids = given["image_grid_thw"] * torch.tensor([2, 1, 1])
    return {"pixel_values_videos": pixels, "video_grid_thw": grids}


class Kind(NamedTuple):
    """How a model is built and what it is given.

    Attributes:
        inputs: makes them for a number of images, or sounds.
        fields: of its config.
        placeholders: tokens of each; None to ask the model's encoder.
    """

    inputs: Callable[[Any, int], dict[str, Tensor]]
    fields: dict[str, Any] = {}
    placeholders: int | None = None


def _kinds(inputs: Any, fields: dict[str, Any], *types: str) -> dict[str, Kind]:
    return dict.fromkeys(types, Kind(inputs, fields))


_OMNI = {
    **_rope(),
    "vision_start_token_id": START,
    "audio_start_token_id": HEAR,
    "audio_config": {**_HEARING, "output_dim": 32, "n_window": 4},
}
_LARGE = {"d_model": 32, "encoder_ffn_dim": 128, "intermediate_size": 128}

KINDS: dict[str, Kind] = {
    **_kinds(_whole, {}, "aya_vision", "cohere2_vision", "deepseek_vl", "gemma3", "got_ocr2",
             "internvl", "janus", "llava", "ovis2", "paligemma", "qianfan_ocr", "video_llava"),
    "aria": Kind(_whole, {"projector_patch_to_query_dict": {4: 4}}),
    "step3p7": Kind(_whole, {"text_config": {"sliding_window": 5}}),
    "vipllava": Kind(_whole, {"vision_feature_layers": [-1, -2]}),
    **_kinds(_sized, {}, "lighton_ocr", "mistral3"),
    **_kinds(_listed, {}, "idefics2", "idefics3", "smolvlm"),
    **_kinds(_tiled, _TILES, "llava_next", "llava_next_video", "llava_onevision"),
    **_kinds(_grids, _rope(), "cosmos3_omni", "glm46v", "glm4v", "qwen2_5_vl", "qwen2_vl",
             "qwen3_vl", "qwen3_vl_moe"),
    **_kinds(_grids, _ALL_ROTATED, "glm4v_moe", "glm_ocr", "qwen3_5", "qwen3_5_moe"),
    "muse_glimmer": Kind(_grids, {"vision_config": {"patch_temporal": 1, "merge_size": 1}}),
    **_kinds(_grids, _OMNI, "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
    "paddleocr_vl": Kind(_patches, _rope()),
    "video_llama_3": Kind(_merged),
    "gemma4": Kind(_placed, {
        "text_config": OVERRIDES["gemma4"]["text_config"],
        "vision_config": {
            "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 3, "position_embedding_size": 8,
        },
    }),
    "lfm2_vl": Kind(_shaped, {
        "vision_config": {"vision_use_head": False},
        "text_config": {"layer_types": ["conv", "full_attention"] * 2},
    }),
    "deepseek_vl_hybrid": Kind(_both),
    "minicpmv4_6": Kind(_joined, {"insert_layer_id": 0}),
    "fuyu": Kind(_flat),
    "glmasr": Kind(_masked, {"audio_config": {
        "num_mel_bins": 8, "hidden_size": 32, "intermediate_size": 128,
        "max_position_embeddings": 20,
    }}),
    "qwen2_audio": Kind(_attended, {"audio_config": _HEARING}, placeholders=10),
    "voxtral": Kind(_heard, {"audio_config": {**_HEARING, **_LARGE}}),
}  # fmt: skip


#: Videos for some of them.
VIDEOS: dict[str, Callable[[Any, int], dict[str, Tensor]]] = {
    **dict.fromkeys(("llava_next_video", "llava_onevision", "video_llava"), _frames),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl"), _clips),
}  # fmt: skip
#: What stands in a prompt for an input, and whose features an encoder makes of it.
_PLACEHOLDERS = {
    "pixel_values": (IMAGE, "image"), "pixel_values_videos": (VIDEO, "video"),
    "input_features": (AUDIO, "audio"),
}  # fmt: skip


@cache
def build(model_type: str) -> Any:
    """A random model; tests must leave it as they found it."""
    torch.manual_seed(0)
    fields = KINDS[model_type].fields if model_type in KINDS else {}
    config = tiny_of(config_class(model_type), fields, _SIZES)
    model: Any = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    randomise_all(model)
    model.generation_config.suppress_tokens = [HEAR, END, START, IMAGE, VIDEO, AUDIO]
    return model


def _encoded(model: Any, given: dict[str, Tensor], seen: str) -> Any:
    """What the model's encoder makes of images or sounds: a part of each, or all in one tensor."""
    name = f"get_{seen}_features"
    inner = getattr(model, "model", model)
    owner = inner if hasattr(inner, name) else model
    with torch.no_grad():
        found = getattr(owner, name)(**given, return_dict=True)
    pooled = getattr(found, "pooler_output", None)
    return found.last_hidden_state if pooled is None else pooled


def prompts(
    model_type: str, rows: list[tuple[int, int]], videos: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:  # fmt: skip
    """A batch, padded on the left.

    Args:
        rows: of each row, the number of its images, which come after two tokens, and its length
            without them.
        videos: whether it has videos instead.
        dtype: of what is seen or heard.
    """
    model, kind = build(model_type), KINDS[model_type]
    total = sum(images for images, _ in rows)
    given = (VIDEOS[model_type] if videos else kind.inputs)(model, total)
    placeholder, seen = next(_PLACEHOLDERS[name] for name in given if name in _PLACEHOLDERS)
    sizes = [kind.placeholders] * total
    if kind.placeholders is None:
        found = _encoded(model, given, seen)
        each = found if isinstance(found, (list, tuple)) else found.reshape(
            total, -1, found.shape[-1]
        )  # fmt: skip
        sizes = [one.numel() // one.shape[-1] for one in each]
    remaining, sequences = iter(sizes), []
    for row, (images, length) in enumerate(rows):
        text = prompt(length, seed=row)[0].clamp(max=HEAR - 1).tolist()
        parts = [(START, *[placeholder] * next(remaining), END) for _ in range(images)]
        sequences.append(text[:2] + [token for part in parts for token in part] + text[2:])
    for name, value in given.items():
        given[name] = value.to(dtype) if value.is_floating_point() else value
    batch = padded(sequences)
    return {**batch, **given, **token_types(model, batch["input_ids"])}


def token_types(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """What a model wants to know of each token, of those ``(batch, width)``: where images are."""
    types = {"token_type_ids", "mm_token_type_ids"} & {*inspect.signature(model.forward).parameters}
    return dict.fromkeys(types, ((ids == IMAGE) | (ids == AUDIO)).long() + 2 * (ids == VIDEO))
