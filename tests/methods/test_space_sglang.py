"""``space`` with noise for mask tokens, and its adapters as SGLang's UNO reads them.

SGLang's UNO runs on CUDA only; what is read here is read by PEFT, whose files it takes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_oracle import randomise
from conftest import Tiny, prompt
from peft import PeftModel
from transformers import DynamicCache, PreTrainedModel

import hf_spec
from hf_spec.adapters.active import find_active
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.methods.space import adapter as space
from hf_spec.methods.space.adapter import random_tokens
from hf_spec.tools.hub.transfer import export_adapter
from hf_spec.tools.training.anchors import AnswerDataset, collate
from modeling_patches.cache_name import CACHE

NOISE = {"masks": "noise", "num_mask_tokens": 3}


def added(model: PreTrainedModel, **fields: Any) -> Any:
    model.add_adapter(hf_spec.SpaceConfig(**{**NOISE, **fields}))
    randomise(model, "SPACE", std=0.3)
    return find_active(model, "SPACE")


def exported(fresh: Tiny, folder: Path, **fields: Any) -> tuple[PreTrainedModel, Path]:
    """A model with an adapter, and the folder of what was exported of it."""
    model = fresh("llama")
    added(model, **fields)
    model.save_pretrained(folder / "adapter")
    return model, export_adapter(folder / "adapter", "sglang", fresh("llama"), folder / "uno")


def uno_logits(model: Any, lora: Path, ids: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """What UNO's draft forward predicts behind a prompt, ``(k, vocab)``: the last token of ``ids``
    runs through the base model, and the random ones behind it with the LoRA."""
    peft = PeftModel.from_pretrained(model, str(lora))
    with torch.no_grad():
        cache = DynamicCache()
        with peft.disable_adapter():
            peft(input_ids=ids, **{CACHE: cache}, use_cache=True)
        return peft(input_ids=noise[None], **{CACHE: cache}, use_cache=True).logits[0]


INPUTS = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
#: Fields of the config, and the ends of the names of the modules that are updated.
FIELDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "default": ({}, ["down_proj"]),
    "inputs": ({"target_modules": INPUTS, "rank": 4}, INPUTS),
    "one layer": (
        {"target_modules": r".*layers\.1\..*(q|v|o)_proj", "alpha": 3.5},
        ["q_proj", "v_proj", "o_proj"],
    ),
}


@pytest.mark.parametrize(("fields", "suffixes"), FIELDS.values(), ids=FIELDS)
def test_exported_and_read_by_peft(
    fresh: Tiny, tmp_path: Path, fields: dict[str, Any], suffixes: list[str]
) -> None:
    """Its predictions are ours, behind each place, for the same random tokens."""
    model, uno = exported(fresh, tmp_path, **fields)
    assert sorted(path.name for path in uno.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    config = json.loads((uno / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["r"] == fields.get("rank", 16)
    assert config["lora_alpha"] == fields.get("alpha", 32)
    named = {name.rpartition(".")[2] for name in config["target_modules"]}
    assert named == set(suffixes) and "masks" not in find_active(model, "SPACE").weights()
    ids = prompt(10)
    places = torch.tensor([[3, 6]])
    batch = {"input_ids": ids, "labels": ids, "anchors": places}
    drawn: list[torch.Tensor] = []

    def remember(model: Any, seed: int, *shape: int) -> torch.Tensor:
        drawn.append(random_tokens(model, seed, *shape))
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(space, "random_tokens", remember)
        adapter = find_active(model, "SPACE")
        ours = space.loss(model, adapter, TrainingBatch(**batch))["logits"][0]
    assert not torch.equal(drawn[0][0], drawn[0][1])  # other tokens under each anchor
    for row, place in enumerate(places[0].tolist()):
        theirs = uno_logits(fresh("llama"), uno, ids[:, : place + 1], drawn[0][row])
        # fp32 with other reduction orders; logits up to about 10.
        torch.testing.assert_close(theirs, ours[row], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"masks": "learned"}, "no place for .*: learned mask tokens: UNO puts random tokens"),
        ({"markov_rank": 4}, "a Markov head"),
        ({"draft_vocab_size": 40}, "a draft vocabulary"),
        ({"masks": "learned", "update": "lora"}, "update='lora'.*; learned mask tokens"),
        ({"target_modules": ["up_proj"]}, r"'model.layers.0.mlp.up_proj', .*without gate_proj"),
        ({"target_modules": ["q_proj", "k_proj"]}, "without v_proj beside it"),
        ({"target_modules": r".*lm_head"}, "'lm_head', .* by that name"),
    ],
)
def test_what_uno_cannot_read(
    fresh: Tiny, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        exported(fresh, tmp_path, **fields)
    assert not (tmp_path / "uno" / "adapter_config.json").exists()


def test_noise_belongs_to_a_sequence(fresh: Tiny) -> None:
    """A row's loss does not depend on the rows beside it, nor on when it is computed."""
    model = fresh("llama")
    adapter = added(model)
    rows = [
        {"prompt_ids": [5, 6, 7], "answer_ids": list(range(8, 8 + length))} for length in (6, 15)
    ]
    dataset = AnswerDataset(rows, num_anchors=8)
    data = [dataset[index] for index in range(2)]
    both = space.loss(model, adapter, TrainingBatch(**collate(data)))["loss"]
    each = [space.loss(model, adapter, TrainingBatch(**collate([row])))["loss"] for row in data]
    # Rounding of fp32 sums.
    torch.testing.assert_close(both, sum(each) / 2, rtol=1e-5, atol=1e-5)
