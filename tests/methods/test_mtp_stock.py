"""Layers for multi-token prediction of Inkling against Transformers' own, which reads the same
checkpoints: for text alone and with images and sounds, under the names that Transformers writes.

Its ``MtpModel`` leaves out two things that the base does and vLLM's layers do: the norm of the
base's embeddings, and the window in what local layers see at once. Here it is given both.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import randomise_all, tiny_config
from conftest import prompt
from packaging.version import Version
from running import drafting
from safetensors.torch import load_file, save_file
from test_mtp import CLOSE, advance, chain, drafter_of
from torch import Tensor
from transformers import cache_utils, masking_utils, modeling_layers

import hf_spec
from hf_spec.methods.mtp.weights import SINGLE, mtp_layers
from modeling_patches.mtp_convolutions import Convolved

pytestmark = [
    pytest.mark.usefixtures("mtp_as_shipped"),
    pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.24"), reason="needs Transformers 5.24"
    ),
]

#: A prompt longer than the window and the convolutions, then none, some or all drafts accepted.
COMMITTED = [9, 10, 13, 15]
TOWERS: dict[str, Any] = {
    "vision_config": {"patch_size": 4, "hidden_size": 16, "num_hidden_layers": 4},
    "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
    "image_token_id": 60, "audio_token_id": 61, "image_bos_token_id": 62, "audio_bos_token_id": 63,
}  # fmt: skip


def built(text: dict[str, Any], towers: bool) -> Any:
    """A model whose convolutions see further back than its local attention, and whose output
    embeddings have rows of no token."""
    special = {"sliding_window_size": 3, "unpadded_vocab_size": 60}
    config: Any = tiny_config("inkling_text").to_dict() | special | text
    if towers:
        whole = transformers.InklingConfig(text_config=config, **TOWERS)
        model: Any = transformers.InklingForConditionalGeneration(whole)
    else:
        model = transformers.InklingForCausalLM(transformers.InklingTextConfig(**config))
    randomise_all(model)
    return model


def checkpoint(folder: Path, local: list[bool], chained: bool, towers: bool) -> Any:
    """A model that was loaded from a folder, with a layer for each of ``local``, whether it has a
    window; and whether there is a norm behind each."""
    count, here = len(local), [index for index, one in enumerate(local) if one]
    fields = {"num_mtp_layers": count, "mtp_local_layer_ids": here}
    model = built({**fields, "chain_hidden_post_norm": chained}, towers)
    model.save_pretrained(folder)
    # Layers like these as a base's: Transformers writes their names.
    kinds = ["hybrid_sliding" if one else "hybrid" for one in local]
    dense = {"num_hidden_layers": count, "layer_types": kinds, "mlp_layer_types": ["dense"] * count}
    built(dense, towers).save_pretrained(folder / "donor")
    start = "model.llm.layers." if towers else "model.layers."
    tensors = load_file(folder / SINGLE)
    for name, tensor in load_file(folder / "donor" / SINGLE).items():
        if name.startswith(start):
            index, _, rest = name.removeprefix(start).partition(".")
            tensors[f"model.mtp.layers.{index}.transformer_block.{rest}"] = tensor + 0.1
    for index in range(count):
        for name, shape in (("hidden_norm", 32), ("embed_norm", 32), ("input_proj", (32, 64))):
            tensors[f"model.mtp.layers.{index}.{name}.weight"] = torch.rand(shape) + 0.1 * index
    if chained:
        tensors["model.mtp.chain_norm.weight"] = torch.rand(32) + 0.5
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    found = type(model).from_pretrained(folder).eval()
    found.generation_config.eos_token_id = None
    return found


def stock_chain(model: Any, stock: Any, ids: Tensor, hidden: Tensor) -> Tensor:
    """``(1, layers, vocab)`` logits of stock's chain after these tokens."""
    cache = cache_utils.MtpCache(config=model.config.get_mtp_config())
    cache.activate_past_recording()
    positions = torch.arange(1, ids.shape[1])[None]
    return stock(ids[:, 1:], hidden[:, : ids.shape[1] - 1], None, positions, cache)[1]


@pytest.mark.parametrize(
    ("local", "chained", "towers"),
    [
        ([False], False, False), ([True], True, False), ([True, False, True], False, True),
        ([False, True], True, True),
    ],
)  # fmt: skip
@torch.no_grad()
def test_chains_are_those_of_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: list[bool], chained: bool, towers: bool
) -> None:
    torch.manual_seed(1)
    model = checkpoint(tmp_path, local, chained, towers)
    stock = modeling_layers.MtpModel.from_pretrained(model)
    stock.embed_tokens = model.get_input_embeddings()
    masks = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING["hybrid_sliding"]
    monkeypatch.setitem(masks, "sliding_attention", masking_utils.create_sliding_window_causal_mask)
    ids = prompt(COMMITTED[-1])
    hidden = model.get_decoder()(ids).last_hidden_state
    drafter, state = drafter_of(model, 1)
    done = 0
    for known in COMMITTED:
        advance(drafter, ids, hidden, [(done, known - 1)])
        done, expected = known - 1, stock_chain(model, stock, ids[:, :known], hidden)
        torch.testing.assert_close(chain(drafter, state, len(local)), expected, **CLOSE)


@torch.no_grad()
def test_output_with_towers(tmp_path: Path) -> None:
    """In float32 as plain generation's; in bfloat16, convolutions stay in float32."""
    checkpoint(tmp_path, [True, False], False, True)
    for dtype in (torch.float32, torch.bfloat16):
        model = transformers.InklingForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
        model.generation_config.eos_token_id = None
        plain = model.generate(prompt(9), max_new_tokens=12, do_sample=False)
        out = model.generate(prompt(9), max_new_tokens=12, do_sample=False, **drafting("mtp"))
        assert hf_spec.last_stats(model).num_drafted_tokens > 0
        if dtype == torch.float32:
            assert out.tolist() == plain.tolist()
    kept = {name for name, one in mtp_layers(model).named_parameters() if one.dtype != dtype}
    assert kept == {name for name, _ in mtp_layers(model).named_parameters() if "sconv" in name}
    assert len(kept) == 2 * Convolved.num_caches


def test_a_norm_that_the_config_does_not_know_is_refused(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, [False], True, False)
    model.config.chain_hidden_post_norm = False
    with pytest.raises(ValueError, match=r"unknown tensor 'model\.mtp\.chain_norm\.weight'"):
        model.generate(prompt(5), max_new_tokens=4, assistant_strategy="mtp")
